"""The scripts: the help of those that people call first, and files that they write.

Usage: scripts_test.py -v
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

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


class Soak(unittest.TestCase):
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
