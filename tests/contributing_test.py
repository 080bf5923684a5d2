"""CONTRIBUTING.md names files that are there, and what it says of an exchange is true of each.

Usage: contributing_test.py [-v] [TEST]
"""

import pathlib
import re
import shutil
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENUM = "include/skim/exchange.hpp"
TABLE = "src/exchange/table.cpp"
ORACLE = "tests/exchange_oracle.hpp"
PAGE = "docs/algorithms.md"


def paths(text):
    """The words in backticks that are paths of the tree, in order."""
    found = []
    for code in re.findall(r"`([^`\n]+)`", text):
        for word in code.split():
            is_file = re.fullmatch(r"[\w.]+\.(cpp|hpp|cu|py|md|txt|json|toml)", word)
            is_path = re.fullmatch(r"\.?[\w<>]+(/[\w.<>-]+)+", word)
            if (is_file or is_path) and not word.startswith("build/"):
                found.append(word)
    return found


def missing(root):
    """Paths that are not there. Of one with a placeholder: the folder in front of it."""
    wrong = []
    for path in paths((root / "CONTRIBUTING.md").read_text()):
        there = pathlib.PurePath(path)
        while "<" in str(there):
            there = there.parent
        if not (root / there).exists():
            wrong.append(path)
    return wrong


def section(text, heading):
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.M)
    return found[1] if found else ""


def function(text, name):
    return re.search(rf"\b{name}\(\) \{{\n(.*?)^\}}", text, re.DOTALL | re.M)[1]


def exchanges(root):
    """[(enumerator, name, base)] of the table; base: as in make_<base>, None for dense."""
    rows = re.findall(r'ExchangeRow\{\.kind = K::(\w+),\s*\.name = "([\w-]+)",\s*\.make = (\w+)',
                      (root / TABLE).read_text())
    return [(kind, name, None if make == "nullptr" else make.removeprefix("make_"))
            for kind, name, make in rows]


def untrue(root):
    """What the trace "Add an exchange" says, and an exchange lacks."""
    wrong = []
    trace = paths(section((root / "CONTRIBUTING.md").read_text(), "Add an exchange"))
    for path in ("src/exchange/<name>.cpp", TABLE, ENUM, ORACLE, PAGE):
        if path not in trace:
            wrong.append(f"CONTRIBUTING.md: 'Add an exchange' does not name {path}")
    header, oracle, page = ((root / file).read_text() for file in (ENUM, ORACLE, PAGE))
    body = re.search(r"enum class ExchangeKind[^{]*\{(.*?)\};", header, re.DOTALL)[1]
    enumerators = re.findall(r"^  (\w+),", body, re.MULTILINE)
    rows = exchanges(root)
    if [kind for kind, _, _ in rows] != enumerators:
        wrong.append(f"{TABLE} and {ENUM} list different exchanges")
    listed = function(oracle, "sparse_exchanges")
    for kind, name, base in rows:
        if f"case ExchangeKind::{kind}:" not in oracle:
            wrong.append(f"{name}: no case in {ORACLE}")
        if not {f"## {name}", f"## {(base or name).replace('_', '-')}"} & set(page.splitlines()):
            wrong.append(f"{name}: no section in {PAGE}")
        if base is None:
            continue
        if f"{{.kind = ExchangeKind::{kind}" not in listed:
            wrong.append(f"{name}: not in sparse_exchanges of {ORACLE}")
        file = root / f"src/exchange/{base}.cpp"
        if not file.exists():
            wrong.append(f"{name}: no file src/exchange/{base}.cpp")
            continue
        for defined in (f"make_{base}", f"{base}_terms"):
            if f" {defined}(" not in file.read_text():
                wrong.append(f"{name}: src/exchange/{base}.cpp does not define {defined}")
    bases = {base for _, _, base in rows}
    for file in sorted((root / "src/exchange").glob("*.cpp")):
        if f"make_{file.stem}(" in file.read_text() and file.stem not in bases:
            wrong.append(f"{file.name}: no row in {TABLE}")
    return wrong


class Contributing(unittest.TestCase):
    def test_every_path_is_there(self):
        self.assertEqual(missing(ROOT), [])
        self.assertGreater(len(paths((ROOT / "CONTRIBUTING.md").read_text())), 50)

    def test_every_folder_of_the_library_has_a_sentence(self):
        named = set(paths(section((ROOT / "CONTRIBUTING.md").read_text(), "Folders")))
        there = {f"src/{folder.name}" for folder in (ROOT / "src").iterdir() if folder.is_dir()}
        self.assertEqual(there - named, set())

    def test_every_exchange_is_as_its_trace_says(self):
        self.assertGreater(len(exchanges(ROOT)), 5)
        self.assertEqual(untrue(ROOT), [])


class ItCanFail(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.copy = pathlib.Path(folder.name)
        for name in ("include", "src/exchange"):
            shutil.copytree(ROOT / name, self.copy / name)
        for name in (ORACLE, PAGE, "CONTRIBUTING.md"):
            (self.copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.copy / name)

    def change(self, name, old, new):
        path = self.copy / name
        text = path.read_text()
        self.assertIn(old, text)
        path.write_text(text.replace(old, new))

    def test_paths(self):
        (self.copy / "CONTRIBUTING.md").write_text(
            "`src/exchange/<name>.cpp` `src/none/<name>.cpp` `SKIM=1 src/none -R a` `none.hpp` "
            "`a.b()` `build/a`\n")
        self.assertEqual(missing(self.copy), ["src/none/<name>.cpp", "src/none", "none.hpp"])

    def test_an_exchange_without_its_parts(self):
        self.change(ORACLE, "case ExchangeKind::oktopk:", "")
        self.change(PAGE, "## sparcml\n", "## other\n")
        self.change(TABLE, "K::gtopk_tree", "K::other")
        (self.copy / "src/exchange/hierarchical.cpp").unlink()
        (self.copy / "src/exchange/new.cpp").write_text("std::unique_ptr<Exchange> make_new(int)")
        found = "\n".join(untrue(self.copy))
        for words in ("list different exchanges", f"oktopk: no case in {ORACLE}",
                      f"sparcml: no section in {PAGE}", f"new.cpp: no row in {TABLE}",
                      "hierarchical: no file src/exchange/hierarchical.cpp"):
            self.assertIn(words, found)


if __name__ == "__main__":
    unittest.main()
