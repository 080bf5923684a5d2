"""The program of docs/python.md runs, and prints what it says."""

import contextlib
import io
import re
import unittest
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


class Page(unittest.TestCase):
    def test_runs_as_it_says(self):
        blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
        program = "\n".join(blocks)
        expected = re.findall(r"^print\(.*\)  # (.*)$", program, re.MULTILINE)
        self.assertEqual(len(expected), program.count("print("))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(program, str(PAGE), "exec"), {"__name__": "__main__"})
        self.assertEqual(out.getvalue().splitlines(), expected)


if __name__ == "__main__":
    unittest.main()
