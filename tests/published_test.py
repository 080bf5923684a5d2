"""scripts/published gives the metadata and the README the addresses of the place where the project is published.

Usage: published_test.py -v
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[1]
URL = "https://example.org/team/skim"


class Published(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        (self.folder / "scripts").mkdir()
        for name in ("scripts/published", "pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, self.folder / name)

    def run_it(self, *arguments):
        return subprocess.run([sys.executable, self.folder / "scripts/published", *arguments], capture_output=True, text=True)

    def test_every_address_is_whole_and_names_a_file_that_is_there(self):
        links = re.findall(r"\]\(([^)#]+)", (self.folder / "README.md").read_text())
        self.assertGreater(len(links), 10)
        before = tomllib.loads((self.folder / "pyproject.toml").read_text())
        done = self.run_it(URL, "v1.2.3")
        self.assertEqual((done.returncode, done.stderr), (0, ""))

        readme = (self.folder / "README.md").read_text()
        self.assertEqual(re.findall(r"\]\((?!https://)[^)]*", readme), [])
        for target in links:
            self.assertIn(f"({URL}/{'raw' if target.endswith('.svg') else 'blob'}/v1.2.3/{target}", readme)
        after = tomllib.loads((self.folder / "pyproject.toml").read_text())
        urls = after["project"].pop("urls")
        self.assertEqual(after, before)
        self.assertEqual(urls["Repository"], URL)
        for target in (*urls.values(), *re.findall(rf"{URL}[^)\s]*", readme)):
            if match := re.fullmatch(rf"{URL}/(?:blob|raw)/v1.2.3/([^#]+)(?:#.*)?", target):
                self.assertTrue((ROOT / match[1]).exists(), target)

    def test_it_refuses_what_is_no_address_and_a_second_run(self):
        texts = [(self.folder / name).read_text() for name in ("pyproject.toml", "README.md")]
        for wrong in ((), (URL,), ("example.org/skim", "v1"), (f"{URL}/", "v1"), (URL, "v 1")):
            done = self.run_it(*wrong)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, r"\Ascripts/published: needs URL and REF.*\n\Z")
        self.assertEqual(texts, [(self.folder / name).read_text() for name in ("pyproject.toml", "README.md")])
        self.assertEqual(self.run_it(URL, "v1").returncode, 0)
        self.assertIn("clean checkout", self.run_it(URL, "v1").stderr)


if __name__ == "__main__":
    unittest.main()
