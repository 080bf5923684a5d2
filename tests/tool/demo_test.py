"""scripts/demo, its runs cut short; and what tools/plots/time_to_accuracy.py makes of runs.

Needs SKIM_TOOL (the binary); SKIM_HAS_MPI=1 where the build has MPI; SKIM_PYTHON, the Python that
draws.
"""

import json
import os
import pathlib
import random
import re
import signal
import string
import subprocess
import sys
import unittest

from inspect_test import CAN_DRAW, PYTHON
from tool_test import HAS_MPI, LIMIT, TOOL, Case, is_running

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "tools/plots/time_to_accuracy.py"


def compare(*arguments, python=(sys.executable,)):
    return subprocess.run([*python, SCRIPT, *map(str, arguments)], capture_output=True, text=True,
                          timeout=LIMIT)


class Files(Case):
    """Runs as skim writes them: ten steps, an evaluation every second one."""

    maxDiff = None

    def write(self, name, runs, simulated=False):
        """runs: {run: (exchange, density, ms of a step, accuracies)}; returns the base."""
        lines, summaries = [], []
        for run, (exchange, density, step_ms, accuracies) in runs.items():
            for step in range(1, 11):
                lines.append({"run": run, "step": step, "step_ms": step_ms, "loss": 1.0})
                if step % 2 == 0:
                    lines.append({"run": run, "evaluation": True, "step": step,
                                  "test_accuracy": accuracies[step // 2 - 1]})
            summaries.append({"run": run, "exchange": exchange, "density": density, "ranks": 4,
                              "model": "mlp", "parameters": 199210, "data": "generated",
                              "batch": 32, "steps": 10, "steps_done": 10,
                              "max_sent_bytes_per_step": 1.2e6 * density})
            if simulated:
                summaries[-1]["beta_s_per_byte"] = 1e-8
        base = self.dir / name
        base.with_suffix(".jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
        base.with_suffix(".json").write_text(json.dumps(summaries))
        return base

    def both(self, name, dense_ms, sparse_ms, dense=(0.5, 0.7, 0.85, 0.86, 0.87),
             sparse=(0.4, 0.6, 0.8, 0.85, 0.86)):
        return self.write(name, {"dense": ("dense", 1.0, dense_ms, dense),
                                 "gtopk:0.01": ("gtopk", 0.01, sparse_ms, sparse)})


class Words(Files):
    def verdicts(self, *arguments, target=85):
        done = compare("--target", target, *arguments)
        self.assert_ok(done)
        return done.stdout.split("\n\n")[2].splitlines()

    def test_the_table(self):
        fast, slow = self.both("a", 10, 20), self.both("b", 1000, 100)
        done = compare("--target", 85, f"{fast}=1 Gbit/s", f"{slow}=100 Mbit/s")
        self.assert_ok(done)
        self.assertEqual(done.stdout, """\
mlp on generated: 199,210 parameters, 4 ranks, batch 32 a rank, 10 steps

link        exchange      time to 85 %  whole run  accuracy    sent
1 Gbit/s    dense              0.060 s     0.10 s    87.0 %   12 MB
            gtopk at 1 %        0.16 s     0.20 s    86.0 %  120 kB
100 Mbit/s  dense                6.0 s     10.0 s    87.0 %   12 MB
            gtopk at 1 %        0.80 s      1.0 s    86.0 %  120 kB
accuracy: on the test data, at the end. sent: by the busiest rank, in the whole run.
Times are of training steps, without evaluations.
Measured: 1 Gbit/s, 100 Mbit/s.

At 1 Gbit/s gtopk at 1 % reached 85 % accuracy 2.7 x later than dense: 0.16 s instead of 0.060 s.
At 100 Mbit/s gtopk at 1 % reached 85 % accuracy 7.5 x sooner than dense: 0.80 s instead of 6.0 s.
gtopk at 1 % ended 1.0 points of accuracy below dense.
""")

    def test_targets_that_are_not_reached(self):
        low = (0.1, 0.2, 0.3, 0.25, 0.2)
        neither = self.both("neither", 100, 10, dense=low, sparse=low)
        self.assertEqual(self.verdicts(f"{neither}=1 Gbit/s"), [
            "At 1 Gbit/s neither gtopk at 1 % nor dense reached 85 % accuracy "
            "(best: 30.0 % and 30.0 %).",
            "gtopk at 1 % ended with the accuracy of dense."])
        only_dense = self.both("only-dense", 100, 10, sparse=low)
        self.assertEqual(self.verdicts(f"{only_dense}=1 Gbit/s")[0],
                         "At 1 Gbit/s gtopk at 1 % did not reach 85 % accuracy (best: 30.0 %); "
                         "dense took 0.60 s.")
        self.assertIn("not reached", compare("--target", 85, f"{only_dense}=1 Gbit/s").stdout)
        only_sparse = self.both("only-sparse", 100, 10, dense=low)
        self.assertEqual(self.verdicts(f"{only_sparse}=1 Gbit/s")[0],
                         "At 1 Gbit/s gtopk at 1 % reached 85 % accuracy in 0.080 s; "
                         "dense did not (best: 30.0 %).")

    def test_nearly_equal_times_are_called_so(self):
        base = self.both("a", 100, 80)
        self.assertEqual(self.verdicts(f"{base}=1 Gbit/s")[0],
                         "At 1 Gbit/s gtopk at 1 % reached 85 % accuracy about as soon as dense: "
                         "0.64 s instead of 0.60 s.")

    def test_runs_that_end_differently_over_links(self):
        a, b = self.both("a", 9, 9), self.both("b", 9, 9, sparse=(0.5, 0.6, 0.7, 0.8, 0.885))
        self.assertEqual(self.verdicts(f"{a}=1 Gbit/s", f"{b}=1 Mbit/s")[-1],
                         "gtopk at 1 % ended between -1.0 and +1.5 points of accuracy from dense.")

    def test_one_link_from_several_simulations(self):
        climb = (0.5, 0.7, 0.8, 0.9, 0.9)
        dense = self.write("d", {"dense": ("dense", 1.0, 100, climb)}, simulated=True)
        sparse = self.write("g", {"gtopk": ("gtopk", 0.001, 10, climb)}, simulated=True)
        memory = self.both("m", 9, 9)
        arguments = [f"{memory}=memory", f"{dense}=1 Gbit/s", f"{sparse}=1 Gbit/s"]
        self.assertEqual(self.verdicts(*arguments)[1],
                         "At 1 Gbit/s gtopk at 0.1 % reached 85 % accuracy 10 x sooner than dense: "
                         "0.080 s instead of 0.80 s.")
        self.assertIn("Measured: memory.\nSimulated, on a virtual clock: 1 Gbit/s.\n",
                      compare("--target", 85, *arguments).stdout)

    def test_a_run_that_was_stopped_has_sent_the_bytes_of_the_steps_that_it_did(self):
        base = self.both("a", 10, 20)
        summaries = json.loads(base.with_suffix(".json").read_text())
        base.with_suffix(".json").write_text(json.dumps([run | {"steps": 1000} for run in summaries]))
        done = compare("--target", 85, f"{base}=1 Gbit/s")
        self.assertRegex(done.stdout, r"dense +0\.060 s +0\.10 s +87\.0 % +12 MB\n")

    def test_runs_of_one_exchange_and_density_are_told_apart(self):
        runs = {"gtopk:0.01:exact": ("gtopk", 0.01, 50, (0.5, 0.7, 0.8, 0.9, 0.9)),
                "gtopk:0.01:dgc": ("gtopk", 0.01, 10, (0.5, 0.7, 0.8, 0.9, 0.8))}
        base = self.write("a", {"dense": ("dense", 1.0, 100, (0.5, 0.7, 0.8, 0.9, 0.9)), **runs})
        self.assertEqual(self.verdicts(f"{base}=1 Gbit/s")[2:], [
            "gtopk:0.01:exact ended with the accuracy of dense.",
            "gtopk:0.01:dgc ended 10.0 points of accuracy below dense."])

    def test_without_matplotlib_the_rest_is_there(self):
        base = self.both("a", 100, 10)
        # -S: without installed packages.
        done = compare("--target", 85, "--out", self.dir / "x.svg", f"{base}=1 Gbit/s",
                       python=(sys.executable, "-S"))
        self.assert_ok(done)
        self.assertIn("7.5 x sooner", done.stdout)
        self.assertTrue(done.stdout.endswith(
            "No picture: this Python has no matplotlib (scripts/setup installs it into .venv).\n"))

    def test_refusals(self):
        base = self.both("a", 100, 10)
        (self.dir / "b.jsonl").write_text('{"run": "dense", "step": 1, "step_ms": 1}\n')
        (self.dir / "b.json").write_text(base.with_suffix(".json").read_text())
        (self.dir / "c.jsonl").write_text("no\n")
        for argument, words in [
            (base, ["BASE=LINK"]),
            (f"{self.dir}/none=1 Gbit/s", ["none.jsonl", "No such file"]),
            (f"{self.dir}/b=1 Gbit/s", ["b.jsonl", "no test accuracy", "'dense'"]),
            (f"{self.dir}/c=1 Gbit/s", ["c.jsonl", "no JSON"]),
        ]:
            with self.subTest(argument):
                self.assert_refused(compare("--target", 85, argument), *words, status=1)


@unittest.skipUnless(CAN_DRAW, "no matplotlib (scripts/setup installs it)")
class Plots(Files):
    def test_a_panel_for_each_link(self):
        a, b = self.both("a", 10, 20), self.both("b", 1000, 100)
        svg, png = self.dir / "x.svg", self.dir / "x.png"
        done = compare("--target", 85, "--out", svg, "--out", png, f"{a}=1 Gbit/s",
                       f"{b}=100 Mbit/s", python=(PYTHON,))
        self.assert_ok(done)
        self.assertTrue(done.stdout.endswith(f"\nPicture: {svg}, {png}\n"), done.stdout)
        text = svg.read_text()
        for words in ("1 Gbit/s", "100 Mbit/s", "gtopk at 1 %", "test accuracy", "6.0 s", "0.80 s"):
            self.assertTrue(words in text, words)
        self.assertTrue(png.read_bytes().startswith(b"\x89PNG"))

    def test_more_runs_than_colours(self):
        runs = {f"gtopk:0.0{i}": ("gtopk", i / 100, 10 * i, (0.5, 0.7, 0.8, 0.9, 0.9)) for i in range(1, 13)}
        self.assert_ok(compare("--target", 85, f"{self.write('a', runs)}=1 Gbit/s", "--out", self.dir / "x.svg",
                               python=(PYTHON,)))

    def test_targets_that_are_not_reached(self):
        base, out = self.both("a", 10, 20), self.dir / "x.svg"
        arguments = ["--target", 99, f"{base}=1 Gbit/s", "--out"]
        self.assert_ok(compare(*arguments, out, python=(PYTHON,)))
        self.assertTrue(out.exists())
        done = compare(*arguments, self.dir / "none/x.svg", python=(PYTHON,))
        self.assert_refused(done, "cannot write", "none/x.svg", status=1)


@unittest.skipUnless(HAS_MPI, "this build has no MPI: skim train cannot start ranks")
class Script(Case):
    SHORT = ["--model", "mlp-64", "--generated-train", "2000", "--generated-test", "100"]

    def start(self, *arguments, cluster="0"):
        """No cluster has a name of digits: links are simulated, also for root."""
        environment = {**os.environ, "SKIM_DEMO": str(self.dir), "SKIM_CLUSTER": cluster,
                       "TMPDIR": str(self.dir)}
        environment.pop("SKIM_DATA", None)
        return subprocess.Popen([ROOT / "scripts/demo", *self.SHORT, *map(str, arguments)],
                                text=True, env=environment, start_new_session=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def test_all_steps(self):
        run = self.start("--steps", 4, "--eval-epochs", 0.1)
        out, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 0, out + err)
        self.assertRegex(out, r"\nNo real links here \(cluster: SKIM_CLUSTER: .*\)\. ")
        for link in ("the memory of this machine", "simulated links of 1 Gbit/s",
                     "simulated links of 100 Mbit/s"):
            self.assertIn(f"== 4 ranks over {link}\n", out)
        self.assertIn("  step 4/4  ", out)
        for link in ("memory speed", "1 Gbit/s", "100 Mbit/s"):
            self.assertIn(f"At {link} neither allgather at 2 % nor dense reached 93 % accuracy", out)
        self.assertRegex(out, r"\n(Picture: .*/demo\.svg, .*/demo\.png|No picture: .*)\n$")

    def test_over_real_links(self):
        """The ranks have terminals of mpirun's, but what the script prints is for a file."""
        name = "demo" + "".join(random.choices(string.ascii_lowercase, k=4))
        run = self.start("--steps", 4, "--eval-epochs", 0.1, cluster=name)
        out, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 0, out + err)
        if "No real links here" in out:
            self.skipTest(re.search("No real links here.*", out)[0])
        self.assertIn("== 4 ranks over real links of 100 Mbit/s\n", out)
        self.assertRegex(out, r"\nMeasured: memory speed, 1 Gbit/s, 100 Mbit/s\.\n")
        self.assertNotIn("\x1b", out)
        self.assertEqual(out.count("  step 4/4  "), 6, out)

    def test_names_of_files_are_relative_to_the_caller(self):
        (self.dir / "skim").symlink_to(TOOL)
        done = subprocess.run([ROOT / "scripts/demo", "--stepz", "4"], cwd=self.dir, text=True, capture_output=True,
                              env={**os.environ, "SKIM_TOOL": "./skim", "SKIM_DEMO": "results", "SKIM_CLUSTER": "0"},
                              timeout=LIMIT)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertIn("skim train: no option '--stepz'", done.stderr)
        self.assertTrue((self.dir / "results").is_dir())

    def test_ctrl_c_ends_everything(self):
        metrics = self.dir / "memory-dense.jsonl"
        run = self.start("--steps", 1000000, "--eval-epochs", 0)
        self.addCleanup(lambda: is_running(run.pid) and os.killpg(run.pid, signal.SIGKILL))
        self.wait_for_step(run, metrics, 3)
        os.killpg(run.pid, signal.SIGINT)
        # It returns when nobody has the script's output open any more.
        out, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 130, out + err)
        self.assertIn("stopped after step", err)
        self.assertNotIn("1 Gbit/s", out)


if __name__ == "__main__":
    unittest.main()
