"""The laboratory's pages: tables agree with the kept rows, and lines of prose are not too long.

Usage: results_test.py [-v] [TEST]
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = "studies/rows"
PAGES = "docs/results"
LONGEST = 100  # columns


def tables(*arguments):
    return subprocess.run([sys.executable, str(ROOT / "studies/tables.py"), *map(str, arguments)],
                          capture_output=True, text=True, timeout=60)


class Tables(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.copy = pathlib.Path(folder.name)
        for name in (ROWS, PAGES):
            shutil.copytree(ROOT / name, self.copy / name)

    def change(self, name, old, new):
        path = self.copy / name
        text = path.read_text()
        self.assertEqual(text.count(old), 1, f"'{old}' in {name}")
        path.write_text(text.replace(old, new))

    def assert_found(self, *words):
        done = tables("--check", "--root", self.copy)
        self.assertNotEqual(done.returncode, 0)
        for word in words:
            self.assertIn(word, done.stderr)

    def test_the_pages_are_as_their_rows_say(self):
        done = tables("--check")
        self.assertEqual(done.returncode, 0, done.stderr + "run studies/tables.py")

    def test_the_library_says_of_quality_what_the_table_says(self):
        source = (ROOT / "src/quality.cpp").read_text().replace("kLevelSends, .", "28.0, .")
        told = {float(s): tuple(map(float, rest)) for s, *rest in re.findall(
            r"\.entry_sends = ([\d.]+), \.correction = ([-\d.]+), \.step_ahead = ([-\d.]+), \.after_sum = ([-\d.]+)", source)}
        page = (ROOT / PAGES / "quality.md").read_text()
        table = re.search(r"<!-- table: entry-sends -->\n(.*?)<!-- end -->", page, re.DOTALL)[1]
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]
        measured = {float(row[1]): tuple(map(float, row[2:])) for row in rows}
        self.assertGreaterEqual(len(told), 4)
        for sends, of_library in told.items():  # which says it with two digits
            for a, b in zip(of_library, measured[sends], strict=True):
                self.assertLess(abs(a - b), 0.0051, sends)

    def test_a_number_that_was_changed_on_a_page_is_found(self):
        self.change(f"{PAGES}/accuracy.md", "| gtopk:0.001 | 1.0086 | 76.69 |", "| gtopk:0.001 | 1.0086 | 78.69 |")
        self.assert_found("accuracy.md: cifar-resnet20", "has  | gtopk:0.001 | 1.0086 | 78.69", "76.69")

    def test_a_run_that_was_changed_is_found_in_the_table_and_in_the_claim(self):
        self.change(f"{ROWS}/accuracy.jsonl", '"accuracy": 76.69', '"accuracy": 83.69')
        self.assert_found("accuracy.md: cifar-resnet20", "README.md: claims")

    def test_a_seed_that_was_changed_is_found(self):
        path = self.copy / ROWS / "both-links.jsonl"
        first, *rest = path.read_text().splitlines()
        row = json.loads(first)
        row["test_accuracy"] = 0.5
        path.write_text("\n".join([json.dumps(row), *rest]) + "\n")
        self.assert_found("both-links.md: links-mnist-mlp")

    def test_a_run_that_diverged_is_shown(self):
        path = self.copy / ROWS / "both-links.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            if row["seed"] == 1 and row["method"] == "bi":
                row["test_accuracy"] = None
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        path = self.copy / ROWS / "adaptive-k-mnist-mlp.json"
        runs = json.loads(path.read_text())
        for run in runs.values():
            run["test_accuracy"] = run["train_loss"] = run["test_loss"] = None
        path.write_text(json.dumps(runs))
        done = tables("--root", self.copy)
        self.assertEqual(done.returncode, 0, done.stderr)
        for page, name in (("both-links", "links-fashion-mlp"), ("both-links", "links-sweep"),
                           ("adaptive-k", "adaptive-mnist-mlp")):
            text = (self.copy / PAGES / f"{page}.md").read_text()
            table = re.search(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", text, re.DOTALL)[1]
            self.assertIn("| diverged |", table, name)

    def test_markers(self):
        self.change(f"{PAGES}/frames.md", "<!-- table: fuzz -->", "<!-- table: fuss -->")
        self.assert_found("frames.md: fuss: studies/tables.py has no such table",
                          "frames.md: fuzz: the page has no such table")
        self.change(f"{PAGES}/quality.md", "<!-- table: quality-gpt-2 -->", "")
        self.assert_found("quality.md: a table's marker is not closed")

    def test_rewriting_mends_what_the_check_finds(self):
        self.change(f"{PAGES}/accuracy.md", "| gtopk:0.001 | 1.0086 | 76.69 |", "| gtopk:0.001 | 1.0086 | 78.69 |")
        self.assertEqual(tables("--root", self.copy).returncode, 0)
        self.assertEqual(tables("--check", "--root", self.copy).returncode, 0)
        for page in (self.copy / PAGES).iterdir():
            self.assertEqual(page.read_text(), (ROOT / PAGES / page.name).read_text())

    def test_no_table_is_written_by_hand(self):
        for page in sorted((ROOT / PAGES).glob("*.md")):
            text = re.sub(r"<!-- table: .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
            self.assertNotRegex(text, r"(?m)^\|", page.name)

    def test_every_row_says_what_made_it(self):
        for path in sorted((ROOT / ROWS).glob("*.jsonl")):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if path.name != "claims.jsonl":
                    self.assertTrue(json.loads(line)["command"], f"{path.name}:{number}")


def too_long(text):
    """[(number, line)] of prose: no tables, no blocks of code; an address may be as long as it is."""
    found, code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and not line.lstrip().startswith("|") and len(re.sub(r"https?://\S+|\]\(\S+\)", "", line)) > LONGEST:
            found.append((number, line))
    return found


class Prose(unittest.TestCase):
    def test_lines(self):
        pages = [*ROOT.glob("*.md"), *(page for folder in ("docs", "studies", "bench")
                                       for page in sorted((ROOT / folder).rglob("*.md")))]
        self.assertGreater(len(pages), 5)
        wrong = [f"{page.relative_to(ROOT)}:{number}" for page in pages for number, _ in too_long(page.read_text())]
        self.assertEqual(wrong, [], f"more than {LONGEST} columns")

    def test_it_can_fail(self):
        long = "word " * 30
        text = f"{long}\n| {long} |\n```\n{long}\n```\n[name](https://{'x' * 100})\n{long}\n"
        self.assertEqual([number for number, _ in too_long(text)], [1, 7])


if __name__ == "__main__":
    unittest.main()
