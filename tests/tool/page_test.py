"""The pages show what the tool prints: its help texts in docs/tool.md, and plans.

Needs SKIM_TOOL (the binary).
"""

import pathlib
import re
import shlex
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docs/site"), str(ROOT / "tests")]

import tool_page  # noqa: E402
from blocks import block  # noqa: E402
from tool_test import TOOL, Case, skim  # noqa: E402


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

    def test_a_density_is_planned(self):
        self.assertIn("advised", self.planned("docs/how-to/density.md", "plan"))


if __name__ == "__main__":
    unittest.main()
