"""studies/both_links.py, its runs cut short; and what is drawn of them.

Needs SKIM_TOOL (the binary); SKIM_PYTHON, the Python that draws.
"""

import json
import pathlib
import signal
import subprocess
import sys
import unittest

from inspect_test import CAN_DRAW, FIGURES, PYTHON
from tool_test import LIMIT, TOOL, Case, lines

SCRIPT = pathlib.Path(__file__).parents[2] / "studies/both_links.py"
SHORT = ["--", "--data", "generated", "--generated-train", 2000, "--generated-test", 50, "--steps", 2]


class Runs(Case):
    def setUp(self):
        super().setUp()
        self.out = self.dir / "out.jsonl"

    def start(self, *arguments):
        return subprocess.run([sys.executable, str(SCRIPT), str(self.out), "--tool", TOOL, *map(str, arguments)],
                              capture_output=True, text=True, timeout=LIMIT)

    def test_the_plan(self):
        done = self.start("--list")
        self.assert_ok(done)
        names = [line.split("  ")[-1] for line in done.stdout.splitlines()]
        self.assertEqual(len(names), len(set(names)))
        self.assertEqual(names[0], "mnist-mlp sgd P 100 partition seed 1")
        # 7 pairs of task and ranks, and 2 tasks on shards, with 3 methods and 3 seeds; 5 values of k_down; 4 pairs, once.
        self.assertEqual(len(names), (7 + 2) * 3 * 3 + 2 * 5 + 4 * 3)
        self.assertEqual([n for n in names if n.endswith("seed 1")], names[:9 * 3 + 10 + 12])
        self.assertRegex(done.stderr, r"^both_links: 103 runs left, about \d+\.\d h with 1 side by side\n$")
        self.assertFalse(self.out.exists())

    def test_runs_once_what_is_not_there(self):
        case = ["--only", "mnist-mlp sgd P 10 partition seed 1,mnist-mlp bi k_down 0.001 P 10 partition seed 1", "--jobs"]
        done = self.start(*case, 1, *SHORT)
        self.assert_ok(done)
        rows = {row["method"]: row for row in lines(self.out)}
        self.assertEqual(set(rows), {"sgd", "bi"})
        sgd, bi = rows["sgd"], rows["bi"]
        for row, rate, exchange in [(sgd, 0.03, "dense"), (bi, 0.1, "param-server")]:
            self.assertEqual((row["task"], row["ranks"], row["split"], row["seed"], row["batch"], row["steps"]),
                             ("mnist-mlp", 10, "partition", 1, 10, 2))
            self.assertEqual((row["lr"], row["exchange"], row["model"]), (rate, exchange, "mlp-64"))
        self.assertEqual((sgd["union_entries_per_step"], sgd["down"], bi["down"]), (0, 1, 0.001))
        self.assertTrue(50 <= bi["union_entries_per_step"] <= 500, bi)
        before = self.out.read_text()
        # Once more, and one that is new.
        case[1] += ",mnist-mlp uni P 10 partition seed 1"
        done = self.start(*case, 1, *SHORT)
        self.assert_ok(done)
        self.assertEqual(done.stderr.count("on core"), 1, done.stderr)
        self.assertTrue(self.out.read_text().startswith(before))
        uni = lines(self.out)[2]
        self.assertEqual((len(lines(self.out)), uni["method"], uni["down"]), (3, "uni", 1))
        self.assertLess(bi["max_sent_bytes_per_step"], uni["max_sent_bytes_per_step"])

    def test_a_run_that_fails_is_told_and_the_others_go_on(self):
        done = self.start("--only", "mnist-mlp sgd P 10 partition seed 1,mnist-mlp sgd P 20 partition seed 1", *SHORT[:-4],
                          "--generated-train", 150, "--steps", 2)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("mnist-mlp sgd P 20 partition seed 1: status 2: skim simulate: data: ranks x batch must be", done.stderr)
        self.assertEqual([row["ranks"] for row in lines(self.out)], [10])

    def test_a_run_that_diverges_is_told_and_the_others_go_on(self):
        tool = self.dir / "tool"
        tool.write_text("""#!/bin/sh\necho '[{"test_accuracy": null, "ranks": 10, "wall_s": 1.0}]'\n""")
        tool.chmod(0o755)
        done = self.start("--only", "mnist-mlp sgd P 10 partition seed 1,mnist-mlp sgd P 20 partition seed 1",
                          "--tool", tool)
        self.assert_ok(done)
        self.assertEqual([row["test_accuracy"] for row in lines(self.out)], [None, None])
        self.assertEqual(done.stderr.count("diverged in 1 s"), 2, done.stderr)

    def test_sigterm_ends_the_simulation_too(self):
        run = subprocess.Popen([sys.executable, str(SCRIPT), str(self.out), "--tool", TOOL, "--only", "mnist-mlp sgd P 10",
                                *map(str, SHORT[:-2]), "--metrics", str(self.dir / "m.jsonl"), "--epochs", "100000"],
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(run.kill)
        self.wait_for_step(run, self.dir / "m.jsonl", 3)
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=LIMIT)  # the pipes are closed: nobody writes to them any more
        self.assertEqual(run.returncode, 130)
        self.assertEqual(self.out.read_text(), "")
        steps = len(lines(self.dir / "m.jsonl"))
        self.assertEqual(self.start("--only", "mnist-mlp sgd P 10", "--list").returncode, 0)
        self.assertEqual(len(lines(self.dir / "m.jsonl")), steps, "it goes on")

    def test_refusals(self):
        for arguments, words in [(["--only", "alexnet"], "no run has 'alexnet'"), (["--jobs", 0], "--jobs"),
                                 (["--jobs", 4097], "--jobs")]:
            done = self.start(*arguments)
            self.assertEqual(done.returncode, 2)
            self.assertIn(words, done.stderr.splitlines()[-1])


@unittest.skipUnless(CAN_DRAW, "this Python has no matplotlib")
class Plots(Case):
    def setUp(self):
        super().setUp()
        self.file = self.dir / "out.jsonl"

        def row(task, method, ranks, accuracy, split="partition", down=1.0, seed=1, union=0.0):
            return {"task": task, "method": method, "ranks": ranks, "split": split, "down": down, "seed": seed, "lr": 0.1,
                    "test_accuracy": accuracy, "parameters": 50000, "union_entries_per_step": union}

        rows = [row("mnist-mlp", "bi", 100, 0.9738, down=0.001, union=4000),
                row("mnist-mlp", "bi", 100, 0.9758, down=0.001, union=4400, seed=2),
                row("mnist-mlp", "bi", 100, 0.96, down=0.0001, union=4000),
                row("mnist-mlp", "sgd", 100, 0.9766), row("mnist-mlp", "uni", 20, 0.97, union=1000),
                row("mnist-mlp", "uni", 100, 0.97, split="shards", union=1000), row("mnist-cnn", "sgd", 30, 0.99),
                row("mnist-cnn", "bi", 20, 0.9928, down=0.001, union=900)]
        self.file.write_text("".join(json.dumps(r) + "\n" for r in rows))

    def plot(self, *arguments):
        return subprocess.run([PYTHON, FIGURES, *map(str, arguments)], capture_output=True, text=True, timeout=LIMIT)

    def test_table(self):
        done = self.plot("downlink-table", self.file)
        self.assert_ok(done)
        # Published: sgd 97.61, 97.72, 97.66; bi 97.47, 97.31, 97.36 and, at 0.0001, 96.61.
        self.assertEqual(done.stdout.splitlines()[2:], [
            "| mnist-mlp | partition | 20 | uni | - | 0.1 | 97.00 (1) | 97.49 [97.33, 97.58] | -0.49 | - | - |",
            "| mnist-mlp | partition | 100 | sgd | - | 0.1 | 97.66 (1) | 97.66 [97.61, 97.72] | -0.00 | - | - |",
            "| mnist-mlp | partition | 100 | bi | 0.0001 | 0.1 | 96.00 (1) | 96.61 | -0.61 | 800.0 | - |",
            "| mnist-mlp | partition | 100 | bi | 0.001 | 0.1 | 97.48 ± 0.14 (2) | 97.38 [97.31, 97.47] | +0.10 | 84.0 | 90.7 |",
            "| mnist-mlp | shards | 100 | uni | - | 0.1 | 97.00 (1) | 97.50 [97.38, 97.63] | -0.50 | - | - |",
            "| mnist-cnn | partition | 20 | bi | 0.001 | 0.1 | 99.28 (1) | 99.28 [99.25, 99.31] | +0.00 | 18.0 | 19.3 |",
            "| mnist-cnn | partition | 30 | sgd | - | 0.1 | 99.00 (1) | - | - | - | - |"])

    def test_figure(self):
        out = self.dir / "x.svg"
        self.assert_ok(self.plot("downlink", self.file, "--out", out))
        for word in ["mnist-mlp", "mnist-cnn", "sgd", "bi", "published", "100 ranks"]:
            self.assertIn(word, out.read_text())

    def test_a_run_that_diverged(self):
        rows = lines(self.file)
        rows[1]["test_accuracy"] = rows[3]["test_accuracy"] = None  # one of two seeds; the only one
        self.file.write_text("".join(json.dumps(r) + "\n" for r in rows))
        done = self.plot("downlink-table", self.file)
        self.assert_ok(done)
        table = done.stdout.splitlines()
        at = "| mnist-mlp | partition | 100 |"
        self.assertIn(f"{at} sgd | - | 0.1 | diverged (1) | 97.66 [97.61, 97.72] | - | - | - |", table)
        self.assertIn(f"{at} bi | 0.001 | 0.1 | diverged (2) | 97.38 [97.31, 97.47] | - | 84.0 | 90.7 |", table)
        self.assert_ok(self.plot("downlink", self.file, "--out", self.dir / "x.svg"))

    def test_what_cannot_be_drawn(self):
        self.file.write_text('{"task": "mnist-mlp"}\n')
        self.assert_refused(self.plot("downlink-table", self.file), "line 1", "split", status=1)
        self.file.write_text("")
        self.assert_refused(self.plot("downlink-table", self.file), "no runs", status=1)


if __name__ == "__main__":
    unittest.main()
