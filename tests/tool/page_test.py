"""The pages show what the tool prints, its help texts in docs/tool.md and plans, and their commands run.

Needs SKIM_TOOL (the binary); SKIM_HAS_MPI=1 where the build has MPI.
"""

import json
import pathlib
import re
import shlex
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docs/site"), str(ROOT / "tests")]

import tool_page  # noqa: E402
from blocks import block, blocks, commands  # noqa: E402
from tool_test import HAS_MPI, SMALL, TOOL, Case, skim  # noqa: E402


SHORT = [*SMALL, "--model", "mlp-64", "--steps", "6"]  # what is not as on the page


class Pages(Case):
    def planned(self, page, name):
        _, *arguments = shlex.split(block(page, "command", name).replace("\\\n", ""))
        done = skim(*arguments)
        self.assert_ok(done)
        return done.stdout

    def test_help_texts(self):
        shown, printed = (ROOT / "docs/tool.md").read_text(), tool_page.page(TOOL)
        self.assertEqual(shown.split(), printed.split(),  # lines break by the length of a path that is left out
                         "run docs/site/tool_page.py build/release/skim > docs/tool.md")
        self.assertEqual([line for line in printed.splitlines() if len(line) > 100], [])

    def test_the_page_has_every_command(self):
        listed = re.search(r"commands:\n(.*?)\n\n", skim("--help").stdout, re.DOTALL)[1]
        self.assertEqual({line.split()[0] for line in listed.splitlines()},
                         {command.split()[0] for command in tool_page.COMMANDS})
        of_bench = re.search(r"expected (.*) \(", skim("bench").stderr)[1]
        of_checkpoint = skim("checkpoint", "--help").stdout.partition("Subcommands:")[2]
        self.assertEqual([*(f"bench {name}" for name in re.findall(r"\w+", of_bench.replace(" or ", " "))),
                          *(f"checkpoint {name}" for name in re.findall(r"^  (\w+)", of_checkpoint, re.MULTILINE))],
                         [command for command in tool_page.COMMANDS if command.startswith(("bench", "checkpoint"))])

    def test_two_sites(self):
        page = "docs/how-to/two-sites.md"
        self.assertEqual(self.planned(page, "sites"), block(page, "output", "sites"))

    def test_scaling(self):
        """The tables have what the commands below them print: [exchange][density]."""
        page = "docs/scaling.md"
        for name, column, unit, density in (("thousand", 3, 1.0, "0.001"), ("internet", 5, 1e3, None)):
            planned = {}
            for line in self.planned(page, name).splitlines():
                words = line.split()
                if len(words) > 5 and re.fullmatch(r"[\d.]+", words[0]) and words[0] in ("1", "0.01", "0.001", "0.0001"):
                    planned.setdefault(words[1], {})[words[0]] = float(words[column]) / unit
            above = (ROOT / page).read_text().partition(f"<!-- command: {name} -->")[0]
            table = re.search(r"((?:^\|.*\n)+)\n\Z", above, re.MULTILINE)[1].splitlines()[2:]
            self.assertGreaterEqual(len(table), 6)
            for exchange, *cells in ([cell.strip(" `") for cell in line.strip("|").split("|")] for line in table):
                densities = ["1"] if exchange == "dense" else [density] if density else ["0.01", "0.001", "0.0001"]
                for at, cell in zip(densities, cells):
                    digits = len(cell.partition(".")[2])
                    self.assertEqual(f"{planned[exchange][at]:.{digits}f}", cell, (name, exchange, at))

    def test_a_density_is_planned(self):
        self.assertIn("advised", self.planned("docs/how-to/density.md", "plan"))

    @unittest.skipUnless(HAS_MPI, "this build has no MPI: skim train cannot start ranks")
    def test_commands_run(self):
        """One after another in a folder of the page, as a reader types them."""
        for page in ("README.md", "docs/adaptive.md", "docs/reliability.md", "docs/report.md"):
            folder = self.dir / pathlib.Path(page).stem
            folder.mkdir()
            # Files that the reader has already.
            (folder / "fit.json").write_text(json.dumps({"alpha_s": 1e-3, "beta_s_per_byte": 8e-9, "select_s": 1e-9,
                                                         "merge_s": 0.0, "add_s": 0.0}))
            for day in ("monday", "tuesday"):
                self.assert_ok(skim("train", *SHORT, "--metrics", folder / f"{day}.jsonl"))
            of_tool = [words for one in blocks(page) if one.language == "sh" for words in commands(one.text)
                       if pathlib.Path(words[0]).name == "skim"]
            self.assertGreater(len(of_tool), 0)
            for _, *words in of_tool:
                with self.subTest(f"{page}: skim {' '.join(words)}"):
                    if words[0] == "train":
                        if "--steps" in words:
                            at = words.index("--steps")
                            words[at : at + 2] = []
                        words += SHORT
                    self.assert_ok(skim(*words, cwd=folder))


if __name__ == "__main__":
    unittest.main()
