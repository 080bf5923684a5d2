"""The stubs, by mypy: they accept what users write, refuse what is wrong, and name everything that there is."""

import importlib.util
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path

import skim

HERE = Path(__file__).parent


@unittest.skipUnless(importlib.util.find_spec("mypy"), "needs mypy")
class Stubs(unittest.TestCase):
    def test_users_and_mistakes(self):
        found = subprocess.run(
            [sys.executable, "-m", "mypy", "--strict", "--cache-dir", os.devnull, "typed_user.py", "typed_mistakes.py"],
            cwd=HERE, capture_output=True, text=True,
        )
        errors = {(m[1], int(m[2])) for m in re.finditer(r"^(\S+?):(\d+): error", found.stdout, re.MULTILINE)}
        lines = (HERE / "typed_mistakes.py").read_text().splitlines()
        expected = {("typed_mistakes.py", at) for at, line in enumerate(lines, 1) if line.endswith("# refused")}
        self.assertEqual(errors, expected, found.stdout + found.stderr)


class Names(unittest.TestCase):
    def test_everything_public_is_listed(self):
        # Parts that need torch are modules that some other test may have imported.
        imported = {n for n in vars(skim) if not n.startswith("_") and f"skim.{n}" not in sys.modules} - {"Any"}
        self.assertEqual(set(skim.__all__) - {"__version__", "analysis", "protocols"}, imported)
        core = {n for n in dir(skim._core) if not n.startswith("_")}
        self.assertEqual(core - set(skim.__all__), set(skim.analysis.__all__))


if __name__ == "__main__":
    unittest.main()
