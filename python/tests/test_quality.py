"""studies/quality.py: all methods are tuned by one rule, the validation data choose, an interrupted study goes on."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

STUDIES = pathlib.Path(__file__).resolve().parents[2] / "studies"
HAS_TORCH = importlib.util.find_spec("torch") is not None

# In place of quality_run.py: the loss is least at rate 0.02 on the validation data, at 0.01 on the test data.
STAND_IN = """
import json, os, sys
if os.environ["RANK"] == "0":
    of = dict(zip(sys.argv[3::2], sys.argv[4::2]))
    rate = float(of["--lr"])
    print(json.dumps({"task": sys.argv[1], "method": sys.argv[2], "lr": rate, "seed": int(of["--seed"]), "ranks": 2,
                      "steps": int(of["--steps"]), "validation_loss": abs(rate - 0.02), "test_loss": abs(rate - 0.01)}))
"""


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Quality(unittest.TestCase):
    def test_rates_until_the_best_has_two_neighbours_then_other_seeds_and_nothing_twice(self):
        with tempfile.TemporaryDirectory() as folder:
            script, rows = pathlib.Path(folder, "stand_in.py"), pathlib.Path(folder, "rows.jsonl")
            script.write_text(STAND_IN)
            command = [sys.executable, STUDIES / "quality.py", "gpt", rows, "--script", script, "--steps", "7",
                       "--rates", "0.005,0.01", "--methods", "15 local steps, 1 %", "--seeds"]  # fmt: skip
            for seeds, made in (("0", 4), ("0", 0), ("0,1", 1)):
                before = rows.read_text().splitlines() if rows.exists() else []
                done = subprocess.run([*map(str, command), seeds], capture_output=True, text=True, timeout=300)
                self.assertEqual(done.returncode, 0, done.stderr)
                after = rows.read_text().splitlines()
                self.assertEqual(after[: len(before)], before)
                self.assertEqual(len(after), len(before) + made)
            found = [json.loads(line) for line in after]
        tried = [(0.005, 0), (0.01, 0), (0.02, 0), (0.04, 0), (0.02, 1)]
        self.assertEqual([(r["lr"], r["seed"]) for r in found], tried)
        self.assertIn("--every 15 --ahead 0", found[-1]["command"])

    def test_a_run_of_each_kind(self):
        without = {k: v for k, v in os.environ.items() if k != "SKIM_DATA"}  # the text is made up
        rows = {}
        for method in ("alone", "correction", "local"):
            done = subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                 STUDIES / "quality_run.py", "lstm", method, "--steps", "6", "--batch", "2", "--lr", "0.01"],
                capture_output=True, text=True, timeout=300, env=without,
            )  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr)
            rows[method] = json.loads(done.stdout)
        self.assertEqual(rows["alone"]["share"], 0.0)
        for method in ("correction", "local"):
            self.assertTrue(0.0 < rows[method]["share"] < 0.1, rows[method])
            self.assertNotEqual(rows[method]["test_loss"], rows["alone"]["test_loss"])


if __name__ == "__main__":
    unittest.main()
