"""The scripts: the help of those that people call first, and files that they write.

Usage: scripts_test.py -v
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from blocks import ROOT, blocks

PAGES = [str(page.relative_to(ROOT)) for pattern in ("*.md", "docs/**/*.md", "studies/*.md") for page in ROOT.glob(pattern)]
SCRIPTS = pathlib.Path(__file__).resolve().parents[1] / "scripts"


class Help(unittest.TestCase):
    def test_it_is_the_comment_at_the_top(self):
        for script in "demo", "setup", "site", "test":
            lines = (SCRIPTS / script).read_text().splitlines()
            comment = [line.removeprefix("#").removeprefix(" ") for line in lines[1 : lines.index("set -euo pipefail")]]
            for option in "-h", "--help":
                with self.subTest(script, option=option), tempfile.TemporaryDirectory() as folder:
                    # Without PATH's programs it could not begin to set anything up.
                    pathlib.Path(folder, "sed").symlink_to("/bin/sed")
                    done = subprocess.run(["/bin/bash", SCRIPTS / script, option], capture_output=True, text=True,
                                          env={"PATH": folder}, timeout=30)
                    self.assertEqual((done.returncode, done.stderr), (0, ""))
                    self.assertEqual(done.stdout.splitlines(), comment)


class Pages(unittest.TestCase):
    def test_programs_that_they_call_by_path_are_executable(self):
        called = {}
        for page in PAGES:
            for block in blocks(page):
                for line in block.text.splitlines() if block.language == "sh" else []:
                    if program := re.match(r"(?:[A-Z_]+=\S+ )*((?:scripts|studies|tools)/\S+)", line):
                        called.setdefault(program[1], page)
        self.assertGreater(len(called), 10)
        wrong = {f"{page}: {program}" for program, page in called.items()
                 if not os.access(ROOT / program, os.X_OK) or not (ROOT / program).read_text().startswith("#!")}
        self.assertEqual(wrong, set())


class Soak(unittest.TestCase):
    def test_one_rank_is_refused(self):
        """It has no launcher, which tells the ranks' processes."""
        done = subprocess.run([sys.executable, SCRIPTS / "soak", "--ranks", "1"], capture_output=True, text=True,
                              env=os.environ | {"SKIM_TOOL": "/bin/false"}, timeout=30)
        self.assertEqual((done.returncode, done.stderr.splitlines()[-1]),
                         (2, "soak: error: --ranks: must be 2 or more, not 1"))

    def test_its_file_has_the_lines_of_one_run(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder, "soak.jsonl")
            out.write_text("a line of an earlier run\n")
            done = subprocess.run([sys.executable, SCRIPTS / "soak", "--out", out], capture_output=True, text=True,
                                  env=os.environ | {"SKIM_TOOL": "/bin/false"}, timeout=30)
            self.assertEqual((done.returncode, done.stderr), (1, "soak: the run ended with status 1\n"))
            self.assertEqual(out.read_text(), "")


if __name__ == "__main__":
    unittest.main()
