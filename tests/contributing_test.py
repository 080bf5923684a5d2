"""CONTRIBUTING.md names what is there, and what it says of exchanges, rules and models is true of each.

Usage: contributing_test.py [-v] [TEST]
"""

import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENUM = "include/skim/exchange.hpp"
TABLE = "src/exchange/table.cpp"
ORACLE = "tests/exchange_oracle.hpp"
PAGE = "docs/algorithms.md"
RULES, RULES_ENUM = "src/select/make_selector.cpp", "include/skim/select.hpp"
RULES_TEST = "tests/selectors_test.cpp"
MODELS_LIST, MODELS, MODELS_TEST = "train/model_options.hpp", "train/models.cpp", "tests/train/models_test.cpp"


def paths(text):
    """The words in backticks that are paths of the tree, in order."""
    found = []
    for code in re.findall(r"`([^`\n]+)`", text):
        for word in code.split():
            is_file = re.fullmatch(r"[\w.]+\.(cpp|hpp|py|md|txt|json|toml)", word)
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


def tests_missing(root):
    """Tests in backticks, as `suite.what_holds`, that no file of tests/ has."""
    named = re.findall(r"`(\w+)\.([a-z]+(?:_[a-z0-9]+)+)`", (root / "CONTRIBUTING.md").read_text())
    there = "".join(file.read_text() for file in sorted((root / "tests").rglob("*.cpp")))
    return [f"{suite}.{name}" for suite, name in named if f"({suite}, {name})" not in there]


def unnamed(root, folders):
    """Folders without a sentence under "Folders". A placeholder stands for any name."""
    named = re.findall(r"`([^`]+)`", section((root / "CONTRIBUTING.md").read_text(), "Folders"))
    patterns = [re.sub(r"<\w+>", "[^/]+", re.escape(name)) for name in named]
    return [folder for folder in folders if not any(re.fullmatch(one, folder) for one in patterns)]


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


def enumerators_of(header, enum):
    body = re.search(rf"enum class {enum}[^{{]*\{{(.*?)\}};", header, re.DOTALL)[1]
    return re.findall(r"^  (\w+),", body, re.MULTILINE)


def not_in_trace(root, heading, *files):
    trace = paths(section((root / "CONTRIBUTING.md").read_text(), heading))
    return [f"CONTRIBUTING.md: '{heading}' does not name {file}" for file in files if file not in trace]


def untrue(root):
    """What the trace "Add an exchange" says, and an exchange lacks."""
    wrong = not_in_trace(root, "Add an exchange", "src/exchange/<name>.cpp", TABLE, ENUM, ORACLE, PAGE)
    header, oracle, page = ((root / file).read_text() for file in (ENUM, ORACLE, PAGE))
    enumerators = enumerators_of(header, "ExchangeKind")
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


def untrue_of_rules(root):
    """What the trace "Add a selection rule" says, and a rule lacks."""
    wrong = not_in_trace(root, "Add a selection rule", RULES, RULES_ENUM, RULES_TEST, PAGE)
    header, factory, tests, page = (
        (root / file).read_text() for file in (RULES_ENUM, RULES, RULES_TEST, PAGE))
    rows = re.search(r"\bkRules = \{\n(.*?)^\};", tests, re.DOTALL | re.M)[1]
    for rule in enumerators_of(header, "SelectRule"):
        name = rule.replace("_", "-")
        if f"Rule{{{rule}," not in rows:
            wrong.append(f"{name}: no row in kRules of {RULES_TEST}")
        if f'"{name}"' not in factory or f"case SelectRule::{rule}:" not in factory:
            wrong.append(f"{name}: no name or no case in {RULES}")
        if f"\n| `{name}` |" not in section(page, "Selectors"):
            wrong.append(f"{name}: no row under 'Selectors' of {PAGE}")
    return wrong


def models(root):
    rows = re.search(r"\bkModels = \{\n(.*?)^\};", (root / MODELS).read_text(), re.DOTALL | re.M)[1]
    return re.findall(r'Entry\{"([\w-]+)"', rows)


def untrue_of_models(root):
    """What the trace "Add a model" says, and a model lacks."""
    counts = re.search(r"^TEST\(models, have_the_parameter_counts_of_the_papers\) \{\n(.*?)^\}",
                       (root / MODELS_TEST).read_text(), re.DOTALL | re.M)[1]
    return not_in_trace(root, "Add a model", MODELS_LIST, MODELS, MODELS_TEST) + [
        f"{name}: no number of parameters in {MODELS_TEST}" for name in models(root)
        if not re.search(rf'(Case\{{|options\()"{name}"', counts)]


class Contributing(unittest.TestCase):
    def test_every_path_is_there(self):
        self.assertEqual(missing(ROOT), [])
        self.assertGreater(len(paths((ROOT / "CONTRIBUTING.md").read_text())), 50)

    def test_every_test_is_there(self):
        self.assertEqual(tests_missing(ROOT), [])

    def test_every_folder_has_a_sentence(self):
        try:
            listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                                    capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
        except (OSError, subprocess.CalledProcessError) as error:
            self.skipTest(f"needs a checkout and git: {error}")
        folders = sorted({str(pathlib.PurePosixPath(file).parent) for file in listed} - {"."})
        self.assertEqual(unnamed(ROOT, folders), [])
        self.assertGreater(len(folders), 30)

    def test_every_exchange_is_as_its_trace_says(self):
        self.assertGreater(len(exchanges(ROOT)), 5)
        self.assertEqual(untrue(ROOT), [])

    def test_every_selection_rule_is_as_its_trace_says(self):
        self.assertGreater(len(enumerators_of((ROOT / RULES_ENUM).read_text(), "SelectRule")), 5)
        self.assertEqual(untrue_of_rules(ROOT), [])

    def test_every_model_is_as_its_trace_says(self):
        self.assertGreater(len(models(ROOT)), 5)
        self.assertEqual(untrue_of_models(ROOT), [])


class ItCanFail(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.copy = pathlib.Path(folder.name)
        for name in ("include", "src/exchange"):
            shutil.copytree(ROOT / name, self.copy / name)
        for name in (ORACLE, PAGE, RULES, RULES_TEST, MODELS, MODELS_TEST, "CONTRIBUTING.md"):
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

    def test_tests(self):
        (self.copy / "CONTRIBUTING.md").write_text("`every_rule.is_there` `select.no_such_test` `README.md`\n")
        (self.copy / RULES_TEST).write_text("TEST_P(every_rule, is_there) {}")
        self.assertEqual(tests_missing(self.copy), ["select.no_such_test"])

    def test_folders(self):
        (self.copy / "CONTRIBUTING.md").write_text("## Folders\n`a` `b/<name>`\n## Other\n`c`\n")
        self.assertEqual(unnamed(self.copy, ["a", "a/a", "b/1", "b/1/2", "c"]), ["a/a", "b/1/2", "c"])

    def test_a_rule_without_its_parts(self):
        self.change(RULES_TEST, "Rule{sidco,", "Rule{other,")
        self.change(RULES, "case SelectRule::mstopk:", "")
        self.change(PAGE, "| `redsync-trim` |", "| `other` |")
        self.assertEqual(untrue_of_rules(self.copy), [
            f"redsync-trim: no row under 'Selectors' of {PAGE}", f"sidco: no row in kRules of {RULES_TEST}",
            f"mstopk: no name or no case in {RULES}"])

    def test_a_model_without_its_number_of_parameters(self):
        self.change(MODELS_TEST, 'Case{"mlp", ', 'Case{"other", ')
        self.assertEqual(untrue_of_models(self.copy), [f"mlp: no number of parameters in {MODELS_TEST}"])

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
