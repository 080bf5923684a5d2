"""studies/quality.py: all methods are tuned by one rule, the validation data choose, an interrupted study goes on."""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import random
import signal
import string
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

    def test_only_methods_that_the_task_and_the_ranks_allow(self):
        sys.path.insert(0, str(STUDIES))
        self.addCleanup(sys.path.remove, str(STUDIES))
        import quality

        for task in quality.TASKS:
            for ranks in quality.RANKS:
                methods = quality.methods_for(task, ranks)
                self.assertIn("momentum correction, 1 %", methods)
                for method in methods:
                    options = argparse.Namespace(ranks=ranks, steps=7)
                    words = quality.arguments_of(task, method, 0.01, 0, options)
                    self.assertFalse("--islands" in words and task not in ("gpt", "gpt10m"), (task, method))
        with tempfile.TemporaryDirectory() as folder:
            rows = pathlib.Path(folder, "rows.jsonl")
            of_four = "momentum correction, 1 %, sharded"
            for study, task, ranks in (("quality", "gpt", "2"), ("quality", "fashion", "4"), ("slow_link", "gpt", "2")):
                done = subprocess.run(
                    [sys.executable, STUDIES / f"{study}.py", task, rows, "--ranks", ranks, "--methods", "dense",
                     of_four],
                    capture_output=True, text=True, timeout=300,
                )  # fmt: skip
                self.assertEqual(done.returncode, 2, done.stderr)
                line = f"--methods: '{of_four}' is not for {task} on {ranks} ranks"
                self.assertIn(line, done.stderr.splitlines()[-1])
                self.assertFalse(rows.exists())

    def test_a_run_of_each_kind(self):
        without = {k: v for k, v in os.environ.items() if k != "SKIM_DATA"}  # the text is made up
        rows = {}
        for method in ("alone", "correction", "local", "demo"):
            done = subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                 STUDIES / "quality_run.py", "lstm", method, "--steps", "6", "--batch", "2", "--lr", "0.01"],
                capture_output=True, text=True, timeout=300, env=without,
            )  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr)
            rows[method] = json.loads(done.stdout)
        self.assertEqual(rows["alone"]["share"], 0.0)
        for method in ("correction", "local", "demo"):
            self.assertTrue(0.0 < rows[method]["share"] < 0.1, rows[method])
            self.assertNotEqual(rows[method]["test_loss"], rows["alone"]["test_loss"])

    def test_the_transform_of_demo_is_orthonormal_and_finds_waves(self):
        sys.path.insert(0, str(STUDIES))
        self.addCleanup(sys.path.remove, str(STUDIES))
        import dct
        import torch

        for shape in ((7,), (65, 128), (16, 3, 3, 3)):
            blocks = dct.Blocks(shape)
            x = torch.randn(blocks.shape, generator=torch.Generator().manual_seed(1)).flatten()
            there = blocks.forward(x)
            self.assertAlmostEqual(there.norm().item(), x.norm().item(), places=4)
            torch.testing.assert_close(blocks.back(there), x)
        wave = torch.outer(dct.dct_of(64)[5], dct.dct_of(32)[3]).flatten()
        there = dct.Blocks((64, 32)).forward(wave).view(64, 32)
        self.assertAlmostEqual(there[5, 3].item(), 1.0, places=5)
        there[5, 3] = 0.0
        self.assertLess(there.abs().max().item(), 1e-5)

    def test_a_screen_of_each_variant(self):
        without = {k: v for k, v in os.environ.items() if k != "SKIM_DATA"}  # the text is made up
        rows = []
        for variant in ((), ("--over-senders", "--flush-last"), ("--momentum-residual", "0.9", "--dct", "--sign")):
            done = subprocess.run([sys.executable, STUDIES / "screen.py", "lstm", "--lr", "0.01", "--steps", "3",
                                   "--batch", "2", "--ranks", "2", *variant], capture_output=True, text=True,
                                  timeout=300, env=without)  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stderr)
            rows.append(json.loads(done.stdout))
        self.assertEqual(len({row["test_loss"] for row in rows}), len(rows))
        self.assertEqual([row["variant"] for row in rows],
                         ["base", "mean over the senders, flush at the end",
                          "momentum 0.9 as the residual, DCT in blocks, sign of the mean"])  # fmt: skip
        base, flushed = rows[0]["entries"], rows[1]["entries"]
        self.assertAlmostEqual(flushed, (2 * base + 1.0) / 3, places=4)

    def test_when_a_run_has_reached_what_dense_reaches(self):
        sys.path.insert(0, str(STUDIES))
        self.addCleanup(sys.path.remove, str(STUDIES))
        import slow_link

        def row(label, metric, *curve):
            return {"label": label, f"test_{metric}": 0.0, "curve": [[i, 10.0 * i, v] for i, v in enumerate(curve, 1)]}

        dense = [row("dense", "loss", 3.0, 2.0, 1.5), row("dense", "loss", 3.0, 2.0, 1.7)]
        target = slow_link.target_of([*dense, row("other", "loss", 0.0)])
        self.assertAlmostEqual(target, 1.65)
        self.assertEqual(slow_link.seconds_to(row("other", "loss", 2.0, 1.65 - 1e-9, 1.4, 1.8), target), 20.0)
        self.assertIsNone(slow_link.seconds_to(dense[1], target))
        self.assertAlmostEqual(slow_link.target_of([row("dense", "accuracy", 50.0, 61.0)]), 60.0)
        self.assertEqual(slow_link.seconds_to(row("other", "accuracy", 59.9, 60.0), 60.0), 20.0)

    def test_a_run_on_slow_links_is_timed_once(self):
        cluster = STUDIES.parent / "scripts/cluster/cluster"
        # A name of its own, so that what a killed run of this test left behind is not in the way.
        name = "slow" + "".join(random.choices(string.ascii_lowercase, k=4))
        tried = subprocess.run(["bash", cluster, "once", "2", "1gbit", "true"], capture_output=True, text=True,
                               env=os.environ | {"SKIM_CLUSTER": name})
        if tried.returncode:
            self.skipTest(f"no shaped links here: {tried.stderr.strip().splitlines()[-1]}")
        # The text is made up.
        without = {k: v for k, v in os.environ.items() if k != "SKIM_DATA"} | {"SKIM_CLUSTER": name}
        with tempfile.TemporaryDirectory() as folder:
            tuned, rows = pathlib.Path(folder, "tuned.jsonl"), pathlib.Path(folder, "rows.jsonl")
            of = {"task": "lstm", "label": "step ahead, 1 %", "ranks": 2, "seed": 0}
            tuned.write_text("".join(json.dumps({**of, "lr": lr, "validation_loss": loss}) + "\n"
                                     for lr, loss in ((0.01, 2.0), (0.02, 1.5), (0.04, 1.8))))
            command = [sys.executable, STUDIES / "slow_link.py", "lstm", rows, "--links", "1gbit", "--ranks", "2",
                       "--steps", "4", "--tuned", tuned, "--tuned-ranks", "2", "--methods"]  # fmt: skip
            for _ in range(2):
                done = subprocess.run([*command, "step ahead, 1 %"], capture_output=True, text=True, timeout=300,
                                      env=without)  # fmt: skip
                self.assertEqual(done.returncode, 0, done.stderr)
            [row] = [json.loads(line) for line in rows.read_text().splitlines()]
            unknown = subprocess.run([*command, "dense"], capture_output=True, text=True, timeout=300, env=without)
        self.assertEqual((row["link"], row["ranks"], row["lr"], row["exchange"]), ("1gbit", 2, 0.02, "auto"))
        self.assertEqual([step for step, _, _ in row["curve"]], [1, 2, 3, 4])
        seconds = [s for _, s, _ in row["curve"]]
        self.assertEqual(seconds, sorted(seconds))
        self.assertNotEqual(unknown.returncode, 0)
        self.assertIn("no rows of 'dense' on 2 ranks; studies/quality.py makes them", unknown.stderr)

    def test_sigterm_takes_the_slow_links_down(self):
        def terminate(run, asked):
            while not (asked.exists() and asked.read_text().count("enter") == 2):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(timeout=0.05)
                self.assertIsNone(run.returncode, "it ended early")
            run.terminate()

        self.terminate_slow_link("", terminate)

    def test_sigterm_while_ranks_start_leaves_none(self):
        at_the_second = (
            "class Signalled(subprocess.Popen):\n"
            "    def __init__(self, words, **options):\n"
            "        super().__init__(words, **options)\n"
            "        if words[2:4] == ['enter', '1']: os.kill(os.getpid(), signal.SIGTERM)\n"
            "subprocess.Popen = Signalled\n"
        )
        self.terminate_slow_link("import os, signal, subprocess\n" + at_the_second, lambda run, asked: None)

    def terminate_slow_link(self, patch, terminate):
        with tempfile.TemporaryDirectory() as folder:
            # In place of the program that makes hosts: it notes what it is asked for. A rank does not end.
            tool, asked = pathlib.Path(folder, "cluster"), pathlib.Path(folder, "asked")
            tool.write_text(f'echo "$1" >> {asked}; if [ "$1" = enter ]; then exec sleep 1000; fi\n')
            tuned = pathlib.Path(folder, "tuned.jsonl")
            tuned.write_text(json.dumps({"task": "lstm", "label": "dense", "ranks": 2, "seed": 0, "lr": 0.1,
                                         "validation_loss": 1.0}))  # fmt: skip
            start = (f"import sys; sys.path.insert(0, {str(STUDIES)!r}); import slow_link\n{patch}"
                     f"slow_link.CLUSTER = {str(tool)!r}; slow_link.main()")  # fmt: skip
            run = subprocess.Popen([sys.executable, "-c", start, "lstm", pathlib.Path(folder, "rows.jsonl"), "--tuned", tuned,
                                    "--tuned-ranks", "2", "--ranks", "2", "--methods", "dense"], stderr=subprocess.PIPE,
                                   text=True)  # fmt: skip
            self.addCleanup(run.kill)
            terminate(run, asked)
            err = run.communicate(timeout=60)[1]  # it ends when no rank is left that could write it
            self.assertEqual(run.returncode, -signal.SIGINT, err)
            up, *enter, down = asked.read_text().split()
            self.assertEqual((up, set(enter) - {"enter"}, down), ("up", set(), "down"))


if __name__ == "__main__":
    unittest.main()
