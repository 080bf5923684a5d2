"""The scripts that people call first say what they do, and do nothing, if they are asked for help.

Usage: scripts_test.py -v
"""

import pathlib
import subprocess
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


if __name__ == "__main__":
    unittest.main()
