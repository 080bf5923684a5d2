"""The stubs, by mypy: they accept what users write, refuse what is wrong, and name everything that there is."""

import importlib.util
import inspect
import os
import pydoc
import re
import subprocess
import sys
import unittest
from pathlib import Path

import skim

HERE = Path(__file__).parent
HAS_TORCH = importlib.util.find_spec("torch") is not None


@unittest.skipUnless(importlib.util.find_spec("mypy"), "needs mypy")
class Stubs(unittest.TestCase):
    def check(self, user, mistakes):
        found = subprocess.run(
            [sys.executable, "-m", "mypy", "--strict", "--cache-dir", os.devnull, user, mistakes],
            cwd=HERE, capture_output=True, text=True,
        )  # fmt: skip
        errors = {(m[1], int(m[2])) for m in re.finditer(r"^(\S+?):(\d+): error", found.stdout, re.MULTILINE)}
        lines = (HERE / mistakes).read_text().splitlines()
        expected = {(mistakes, at) for at, line in enumerate(lines, 1) if line.endswith("# refused")}
        self.assertEqual(errors, expected, found.stdout + found.stderr)

    def test_users_and_mistakes(self):
        self.check("typed_user.py", "typed_mistakes.py")

    @unittest.skipUnless(HAS_TORCH, "torch is not installed")
    def test_users_and_mistakes_under_pytorch(self):
        self.check("typed_torch_user.py", "typed_torch_mistakes.py")


class Names(unittest.TestCase):
    def test_everything_public_is_listed(self):
        # Parts that need torch are modules that some other test may have imported.
        imported = {n for n in vars(skim) if not n.startswith("_") and f"skim.{n}" not in sys.modules}
        listed = set(skim.__all__) - set(skim._TORCH)
        self.assertEqual(listed - {"__version__", "analysis", "protocols"}, imported - {"Any", "TYPE_CHECKING"})
        core = {n for n in dir(skim._core) if not n.startswith("_")}
        self.assertEqual(core - set(skim.__all__), set(skim.analysis.__all__))
        self.assertEqual(set(dir(skim)), set(skim.__all__) | set(skim._TORCH))

    @unittest.skipUnless(HAS_TORCH, "torch is not installed")
    def test_what_needs_torch_is_listed_and_there(self):
        self.assertLessEqual(set(skim._TORCH), set(skim.__all__))
        for name in skim._TORCH:
            self.assertTrue(callable(getattr(skim, name)), name)
        self.assertIn("attach", pydoc.plaintext.document(skim))

    @unittest.skipUnless(HAS_TORCH, "torch is not installed")
    def test_options_have_the_names_of_the_reducers(self):
        from skim import _options

        [comm] = skim.in_process_group(1)
        reducer = set(skim.Reducer(comm, exchange="auto").options) | {"link", "local_speeds"}
        reducer -= {"density", "exchange", "non_finite"}  # these have arguments of their own
        self.assertEqual(set(_options.ReducerOptions.__annotations__), reducer)
        local = set(_options.LocalStepsOptions.__annotations__)
        self.assertLessEqual(set(skim.local_steps_options()), local)
        for typed, function in (
            (_options.AttachOptions, skim.attach),
            (_options.CompressionOptions, skim.Aggregator.__init__),
        ):
            arguments = set(inspect.signature(function).parameters)
            self.assertLessEqual(set(typed.__annotations__) - reducer, arguments)


if __name__ == "__main__":
    unittest.main()
