"""The stubs, by mypy and pyright: they accept what users write, refuse what is wrong, and name everything that there is."""

import importlib.util
import inspect
import json
import os
import pydoc
import re
import subprocess
import sys
import tempfile
import types
import unittest
from pathlib import Path

import skim

HERE = Path(__file__).parent
HAS_TORCH = importlib.util.find_spec("torch") is not None


class Checked:
    """The laws of a type checker, whose errors(files) returns {(file, line)} and its output."""

    def test_users_and_mistakes(self):
        users, mistakes = ["typed_user.py"], ["typed_mistakes.py"]
        if HAS_TORCH:
            users.append("typed_torch_user.py")
            mistakes.append("typed_torch_mistakes.py")
        lines = [(file, at, line) for file in mistakes for at, line in enumerate((HERE / file).read_text().splitlines(), 1)]
        errors, output = self.errors(*users, *mistakes)
        self.assertEqual(errors, {(file, at) for file, at, line in lines if line.endswith("# refused")}, output)


def run(module, *arguments):
    return subprocess.run([sys.executable, "-m", module, *arguments], cwd=HERE, capture_output=True, text=True)


@unittest.skipUnless(importlib.util.find_spec("mypy"), "needs mypy")
class Mypy(Checked, unittest.TestCase):
    def errors(self, *files):
        found = run("mypy", "--strict", "--cache-dir", os.devnull, *files)
        errors = {(m[1], int(m[2])) for m in re.finditer(r"^(\S+?):(\d+): error", found.stdout, re.MULTILINE)}
        return errors, found.stdout + found.stderr


@unittest.skipUnless(importlib.util.find_spec("basedpyright"), "needs basedpyright, which is pyright with a Node")
class Pyright(Checked, unittest.TestCase):
    def errors(self, *files):
        # An unknown type would hide mistakes.
        settings = {"typeCheckingMode": "strict", "include": [str(HERE / file) for file in files]}
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder, "pyrightconfig.json")
            config.write_text(json.dumps(settings))
            found = run("basedpyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(config))
        listed = json.loads(found.stdout)["generalDiagnostics"]
        errors = {(Path(e["file"]).name, e["range"]["start"]["line"] + 1) for e in listed if e["severity"] == "error"}
        return errors, found.stdout + found.stderr


class Names(unittest.TestCase):
    def test_everything_public_is_listed(self):
        # Parts that need torch are modules that some other test may have imported.
        imported = {n for n, v in vars(skim).items() if not n.startswith("_") and not isinstance(v, types.ModuleType)}
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
    def test_what_needs_torch_has_a_contract(self):
        for name in skim._TORCH:
            found = getattr(skim, name)
            members = [m for m in vars(found) if not m.startswith("_")] if inspect.isclass(found) else []
            methods = [m for m in members if callable(getattr(found, m)) or isinstance(getattr(found, m), property)]
            self.assertEqual([m for m in methods if not inspect.getdoc(getattr(found, m))], [], name)
            self.assertTrue(inspect.getdoc(found), name)

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
