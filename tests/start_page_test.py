"""The program of docs/start-cpp.md is built against the installed library and prints what the page says.

Usage: start_page_test.py PREFIX
"""

import os
import pathlib
import subprocess
import sys
import tempfile

from blocks import ROOT, block

PAGE = "docs/start-cpp.md"

with tempfile.TemporaryDirectory() as home:
    pathlib.Path(home, "skim").symlink_to(sys.argv[1])  # where the page installs it

    def run(name):
        done = subprocess.run(["bash", "-ec", block(PAGE, "command", name)], cwd=ROOT, text=True, capture_output=True,
                              env={**os.environ, "HOME": home}, timeout=150)
        if done.returncode:
            sys.exit(f"{PAGE}, '{name}' ends with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    run("copy")
    pathlib.Path(home, "first/CMakeLists.txt").write_text(block(PAGE, "file", "CMakeLists.txt"))
    printed = run("build")
    if not printed.endswith(block(PAGE, "output", "build")):
        sys.exit(f"{PAGE} says another output than:\n{printed}")
