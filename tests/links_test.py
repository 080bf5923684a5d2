"""Every relative link in the project's pages leads to a file that is there, and to a heading that it has.

Usage: links_test.py [-v] [TEST]
"""

import pathlib
import re
import tempfile
import unicodedata
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "studies/**/*.md"]
LINK = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\)[^()\s]*)*)\)")


def without_blocks(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def prose(text):
    """Without code, where brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", without_blocks(text))


def anchor(heading):
    """As GitHub makes it."""
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    kinds = [(c, unicodedata.category(c)) for c in heading]
    return "".join(c for c, kind in kinds if c in " -" or kind[0] in "LM" or kind in ("Nd", "Pc")).replace(" ", "-")


def anchors(text):
    found = {}
    for heading in re.findall(r"^#{1,6} +(.*)$", without_blocks(text), re.MULTILINE):
        name = anchor(heading)
        found[name] = found.get(name, -1) + 1
    return {name + (f"-{i}" if i else "") for name, count in found.items() for i in range(count + 1)}


def broken(root):
    wrong = []
    for page in sorted({page for pattern in PAGES for page in root.glob(pattern)}):
        for link in LINK.findall(prose(page.read_text())):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, heading = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            where = f"{page.relative_to(root)}: {link}"
            if not target.exists():
                wrong.append(f"{where}: no such file")
            elif heading and target.suffix == ".md" and heading not in anchors(target.read_text()):
                wrong.append(f"{where}: no such heading")
    return wrong


class Links(unittest.TestCase):
    def test_of_the_project(self):
        self.assertEqual(broken(ROOT), [])

    def test_figures_are_shown(self):
        shown = {pathlib.PurePath(link).name for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
                 for link in LINK.findall(page.read_text())}
        self.assertEqual({figure.name for figure in (ROOT / "docs/figures").iterdir()} - shown, set())

    def test_it_can_fail(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "docs").mkdir()
            (root / "README.md").write_text(
                "[a](docs/a.md) [b](docs/b.md) [c](docs/a.md#why-k-is-1)\n[d](docs/a.md#how) "
                "`[e](none)` [f](https://example.org/none) [g](#none)\n")
            (root / "docs/a.md").write_text("# A\n\n## Why `k` is 1?\n\n```\n## How\n```\n[up](../README.md)\n")
            self.assertEqual(broken(root), [
                "README.md: docs/b.md: no such file", "README.md: docs/a.md#how: no such heading",
                "README.md: #none: no such heading"])


if __name__ == "__main__":
    unittest.main()
