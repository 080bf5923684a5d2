"""The studies' scripts, without the programs that they run.

Usage: studies_test.py -v
"""

import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "studies"))
import accuracy  # noqa: E402
import adaptive_k  # noqa: E402
import rules  # noqa: E402
import scaling  # noqa: E402


class Kept(unittest.TestCase):
    """--keep: two studies may share a file, and a study may be interrupted while it writes."""

    def setUp(self):
        self.file = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), "runs.json")

    def kept(self):
        return json.loads(self.file.read_text())

    def test_a_run_that_another_study_adds_meanwhile_stays(self):
        def run(command, **_):
            self.file.write_text(json.dumps({**(self.kept() if self.file.exists() else {}), "another": 1}))
            return subprocess.CompletedProcess(command, 0, '[{"loss": 1}]', "")

        def simulate(command, **options):
            pathlib.Path(command[command.index("--metrics") + 1]).write_text("")
            done = run(command, **options)
            done.stdout = json.dumps([{"max_sent_bytes_per_step": 1, "steps_done": 1, "train_loss": 1, "test_loss": 1,
                                       "test_accuracy": 1}])
            return done

        study = adaptive_k.Study("mnist-mlp", keep=self.file)
        with unittest.mock.patch("subprocess.run", run):
            accuracy.skim(["--lr", "1"], self.file)
        self.assertEqual(set(self.kept()), {"train --lr 1", "another"})
        with unittest.mock.patch("subprocess.run", simulate):
            study.run("--seed", 1)
        self.assertEqual(len(self.kept()), 3)

    def test_an_interrupted_write_leaves_what_was_there(self):
        def run(command, **_):
            return subprocess.CompletedProcess(command, 0, '[{"loss": 1}]', "")

        self.file.write_text('{"before": 1}')
        with unittest.mock.patch("subprocess.run", run), \
                unittest.mock.patch("pathlib.Path.write_text", interrupted), self.assertRaises(KeyboardInterrupt):
            accuracy.skim(["--lr", "1"], self.file)
        self.assertEqual(self.kept(), {"before": 1})


class Accuracy(unittest.TestCase):
    def test_runs_without_dense_are_refused_before_they_start(self):
        done = subprocess.run([sys.executable, ROOT / "studies/accuracy.py", "mnist-mlp", "--runs", "gtopk:0.01"],
                              capture_output=True, text=True, env=os.environ | {"SKIM_DATA": "/nowhere"})
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertTrue(done.stderr.endswith("--runs: needs dense, with which the others are compared\n"), done.stderr)


class Diverged(unittest.TestCase):
    def table_of(self, study, *words):
        """Of a study of text, where the runs of seed 2 diverge unless they are dense."""
        def run(command, **_):
            loss = 1.5 if "dense" in command or "1" == command[command.index("--seed") + 1] else None
            summary = {"parameters": 9, "train_loss": loss, "test_loss": loss, "sent_bytes_per_step": 8,
                       "dense_bytes_per_step": 80}
            return subprocess.CompletedProcess(command, 0, json.dumps([summary]), "")

        out = io.StringIO()
        with unittest.mock.patch("subprocess.run", run), contextlib.redirect_stdout(out), \
                unittest.mock.patch("sys.argv", ["study", "text-lstm", "--seeds", "1,2", *words]), \
                unittest.mock.patch.dict(os.environ, SKIM_DATA="/nowhere"), contextlib.redirect_stderr(io.StringIO()):
            study.main()
        return out.getvalue().splitlines()

    def test_accuracy_says_so(self):
        table = self.table_of(accuracy, "--runs", "dense,gtopk:0.01")
        self.assertEqual(table[-2:], ["| dense | 1.5000 | 1.500 ± 0.000 | +0.000 | 0.030 | - | 8 | 10.00 % |",
                                      "| gtopk:0.01 | diverged | diverged | - | - | no | 8 | 10.00 % |"])

    def test_rules_say_so(self):
        table = self.table_of(rules, "--densities", "0.01")
        self.assertIn("| dense |  |  | 1.5000 | 1.50 ± 0.00 | 8 |", table)
        self.assertIn("| exact | residual | 0.01 | diverged | diverged | 8 |", table)


class Scaling(unittest.TestCase):
    def test_the_rows_of_other_models_stay(self):
        def run(command, **_):
            out = "[]" if "network" in command else ""
            if "--parameters" in command:
                out = json.dumps([{"parameters": int(command[command.index("--parameters") + 1])}])
            if "--json" in command and command[command.index("--json") + 1] != "-":
                pathlib.Path(command[command.index("--json") + 1]).write_text(out)
            return subprocess.CompletedProcess(command, 0, out, "")

        out = self.enterContext(tempfile.TemporaryDirectory())
        for models in ("vgg16,resnet20", "resnet20", "alexnet"):
            with unittest.mock.patch("subprocess.run", run), self.assertRaises(SystemExit) as ended, \
                    unittest.mock.patch("sys.argv", ["scaling.py", "4@1gbit", "--models", models, "--out", out]):
                scaling.main()
            self.assertEqual(ended.exception.code, 0)
        rows = json.loads(pathlib.Path(out, "scaling-4-1gbit.json").read_text())
        self.assertEqual([row["model"] for row in rows], ["vgg16", "resnet20", "alexnet"])


def interrupted(path, text):
    with path.open("w") as out:
        out.write(text[:5])
    raise KeyboardInterrupt


if __name__ == "__main__":
    unittest.main()
