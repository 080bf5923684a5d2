"""--density adaptive and the other rules, --budget and --target-time, on the command line.

Needs SKIM_TOOL (the binary), SKIM_VERSION and SKIM_PYTHON (with matplotlib); SKIM_HAS_MPI=1 where the build has MPI.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import unittest

from tool_test import HAS_MPI, LIMIT, SMALL, Case, lines, pids_of, skim

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MODEL = ["--model", "mlp-64", "--steps", 24]
LINK = ["--link", "1gbit", "--latency", "0.1ms", "--link-only", "--compute", "20ms"]


class Rules(Case):
    def simulate(self, *arguments, ranks=4):
        metrics = self.dir / "m.jsonl"
        done = skim("simulate", "--train", *LINK, *SMALL, *MODEL, "--ranks", ranks, *arguments,
                    "--metrics", metrics, "--json", "-")
        self.assert_ok(done)
        (row,) = json.loads(done.stdout)
        return row, [line for line in lines(metrics) if "sent_bytes" in line], done.stderr

    def test_a_budget_of_bytes_is_used_up_and_never_exceeded(self):
        for more in [["--exchange", "gtopk"], ["--exchange", "allgather", "--no-feedback"],
                     ["--exchange", "allgather", "--adaptive-form", "measured"],
                     ["--exchange", "gtopk", "--bucket-mb", 0.05, "--contraction", 0.95],
                     ["--exchange", "auto", "--among", "allgather,gtopk"]]:
            with self.subTest(more):
                row, steps, people = self.simulate("--density", "adaptive", "--budget", "600kB", *more)
                sent = sum(s["max_sent_bytes"] for s in steps)  # at least the busiest rank's
                busiest = row["max_sent_bytes_per_step"] * row["steps"]
                self.assertLessEqual(busiest, 600e3)
                self.assertGreater(sent, 600e3 - 1.1 * max(s["max_sent_bytes"] for s in steps))
                spent = [s["budget_spent"] for s in steps]
                self.assertEqual(spent, sorted(spent))
                self.assertAlmostEqual(spent[-1], busiest / 600e3, delta=0.05)
                self.assertEqual((row["density"], row["budget"]), ("adaptive", 600e3))
                self.assertRegex(people, r"density 0\.\d+  budget \d+\.\d\d %")

    def test_the_form_is_that_of_the_feedback_and_follows_the_learning_rate(self):
        adaptive = ["--threads", 1, "--density", "adaptive", "--budget", "600kB"]
        for form, more in [("feedback", []), ("measured", ["--no-feedback"]),
                           ("laplace", ["--adaptive-form", "laplace"]),
                           ("water-filling", ["--adaptive-form", "water-filling"]),
                           ("feedback", ["--exchange", "param-server", "--memory", "updates"])]:
            with self.subTest(more):
                densities = []
                for schedule in ("constant", "cosine"):
                    row, steps, _ = self.simulate(*adaptive, *more, "--lr-schedule", schedule)
                    self.assertEqual(row["adaptive_form"], form)
                    densities.append([s["density"] for s in steps])
                constant, falling = ([sum(d[:len(d) // 2]), sum(d[len(d) // 2:])] for d in densities)
                self.assertGreater(falling[0] / falling[1], 1.2 * constant[0] / constant[1])

    def test_residuals_are_of_updates_where_its_bound_is_of_those(self):
        adaptive = ["--density", "adaptive", "--budget", "600kB"]
        for memory, more in [("gradients", []), ("updates", adaptive),
                             ("gradients", [*adaptive, "--memory", "gradients"]),
                             ("gradients", [*adaptive, "--no-feedback"]),
                             ("gradients", [*adaptive, "--adaptive-form", "even"]),
                             ("gradients", [*adaptive, "--optimizer", "adam", "--lr", 0.001]),
                             ("gradients", [*adaptive, "--local-clip", 1])]:
            with self.subTest(more):
                row, _, _ = self.simulate(*more)
                self.assertEqual(row["memory"], memory)

    def test_a_predicted_time(self):
        # Twice what computing takes; the simulated time of a link without processors is predicted.
        row, steps, _ = self.simulate("--density", "adaptive", "--target-time", "0.5s",
                                      "--index-code", "raw32", "--exchange", "allgather",
                                      "--density-max", 1)
        self.assertEqual(row["target_time"], 0.5)
        self.assertLessEqual(row["total_s"], 0.5)
        self.assertGreater(row["total_s"], 0.5 - 2 * max(s["step_ms"] for s in steps) / 1e3)

    def test_the_other_rules(self):
        _, steps, _ = self.simulate("--density", "capture=0.6")
        self.assertAlmostEqual(steps[-1]["capture"], 0.6, delta=0.15)
        self.assertIsNone(steps[-1]["budget_spent"])
        _, steps, _ = self.simulate("--density", "accordion=0.001/0.02")
        self.assertLessEqual({s["density"] for s in steps}, {0.001, 0.02})
        _, steps, _ = self.simulate("--density", "descent-per-bit", "--density-max", 0.1)
        self.assertTrue(all(1e-4 <= s["density"] <= 0.1 for s in steps))

    @unittest.skipUnless(HAS_MPI, "this build has no MPI: skim train cannot start ranks")
    def test_it_trains_as_it_simulates_and_goes_on_as_if_not_stopped(self):
        def steps(found):
            return [(s["density"], s["sent_bytes"], s["budget_spent"], s["loss"])
                    for s in found if "sent_bytes" in s]

        rule = ["--threads", 1, "--density", "adaptive", "--budget", "300kB"]
        _, simulated, _ = self.simulate(*rule, ranks=2)
        case = [*MODEL, "--ranks", 2, *rule]
        whole, parted = self.dir / "w.jsonl", self.dir / "p.jsonl"
        done = skim("train", *SMALL, *case, "--metrics", whole)
        self.assert_ok(done)
        self.assertRegex(done.stdout, r"density 0\.\d+  budget \d+\.\d\d %")
        self.assertEqual(steps(lines(whole)), steps(simulated))

        case += ["--metrics", parted, "--checkpoint", self.dir / "c", "--checkpoint-steps", 7]
        run = self.start(*case)
        self.wait_for_step(run, parted, 9)
        self.wait_for_checkpoint(run, self.dir / "c")
        for pid in [run.pid, *pids_of(self.dir).values()]:
            os.kill(pid, signal.SIGKILL)
        run.communicate(timeout=LIMIT)
        self.assert_ok(skim("train", *SMALL, *case, "--resume"))
        self.assertEqual(steps(lines(parted)), steps(simulated))

    @unittest.skipUnless(HAS_MPI, "this build has no MPI: skim train cannot start ranks")
    def test_a_run_that_goes_on_with_another_number_of_ranks_spends_its_budget(self):
        """Its steps have another number of examples, so another number of them is left."""
        for exchange, ranks, steps, then, of_all in (("allgather", 4, 12, 2, 48), ("gtopk", 2, 21, 3, 16)):
            with self.subTest(ranks=ranks):
                metrics, folder = self.dir / f"m{ranks}.jsonl", self.dir / f"c{ranks}"
                budget = "300kB" if ranks == 4 else "60kB"
                case = ["--threads", 1, "--model", "mlp-64", "--exchange", exchange, "--density", "adaptive",
                        "--budget", budget, "--metrics", metrics, "--checkpoint", folder]
                total = of_all * then // ranks  # of the old group
                whole = self.start(*case, "--ranks", ranks, "--steps", total, "--checkpoint-steps", steps)
                whole.communicate(timeout=LIMIT)
                for checkpoint in folder.glob("step-*"):
                    if checkpoint.name != f"step-{steps:08}":
                        shutil.rmtree(checkpoint)
                self.assert_ok(skim("train", *SMALL, *case, "--ranks", then, "--steps", of_all, "--resume"))
                after = [s for s in lines(metrics) if "sent_bytes" in s and s["step"] > steps * ranks // then]
                self.assertEqual(after[-1]["step"], of_all)
                spent = [s["budget_spent"] for s in after]
                self.assertLessEqual(max(spent), 1.0)
                self.assertGreater(spent[-1], 0.9, spent)

    def test_one_rank(self):
        done = skim("train", *SMALL, *MODEL, "--density", "adaptive", "--budget", "1MB")
        self.assert_ok(done)
        self.assertIn("one rank sends nothing: --budget is not used, the density is 0.25", done.stdout)

    def test_what_does_not_go_together_is_refused(self):
        adaptive = ["--density", "adaptive"]
        budget = [*adaptive, "--budget", "1MB"]
        for arguments, words in [
            (adaptive, ["--density adaptive", "--budget", "--target-time"]),
            (["--budget", "1MB"], ["--budget", "needs --density adaptive"]),
            (["--target-time", "1min"], ["--target-time", "needs --density adaptive"]),
            ([*budget, "--target-time", "1min"], ["exclude"]),
            ([*budget, "--exchange", "dense"], ["dense"]),
            ([*budget, "--exchange", "auto"], ["--among"]),
            ([*budget, "--density-warmup", "dgc"], ["--density-warmup"]),
            ([*budget, "--density-min", 0.5], ["--density-min", "--density-max"]),
            ([*budget, "--contraction", 0], ["--contraction"]),
            ([*budget, "--adaptive-form", "linear"], ["--adaptive-form", "laplace"]),
            ([*adaptive, "--target-time", "1min"], ["--fit", "--compute"]),
            ([*adaptive, "--budget", "much"], ["--budget", "much", "50MB"]),
            ([*adaptive, "--budget", "0B"], ["--budget"]),
            (["--density", "capture=1.5"], ["capture=1.5", "capture=SHARE"]),
            (["--density", "accordion=0.1/0.01"], ["accordion=0.1/0.01"]),
            (["--density", "accordion=0.1"], ["accordion=0.1"]),
            (["--density", "fast"], ["fast", "no density"]),
            (["--compare", "gtopk:capture=2"], ["--compare", "capture=2"]),
            (["--compare", "dense,gtopk:0.01", "--budget", "1MB"], ["needs --density adaptive"]),
        ]:
            with self.subTest(arguments):
                self.assert_refused(skim("train", *SMALL, *MODEL, *arguments), *words)

    @unittest.skipUnless(HAS_MPI, "this build has no MPI: skim train cannot start ranks")
    def test_a_budget_that_is_too_small_is_refused_with_numbers(self):
        done = skim("train", *SMALL, *MODEL, "--ranks", 2, "--density", "adaptive", "--budget", "1kB")
        self.assert_refused(done, "a budget of 1000 bytes is too small", "24 steps at the least density")

    @unittest.skipUnless(HAS_MPI, "this build has no MPI: skim train cannot start ranks")
    def test_rules_beside_one_another(self):
        summary = self.dir / "s.json"
        done = skim("train", *SMALL, *MODEL, "--ranks", 2, "--budget", "300kB", "--summary", summary,
                    "--compare", "gtopk:0.01,gtopk:adaptive,allgather:accordion=0.001/0.01")
        self.assert_ok(done)
        rows = json.loads(summary.read_text())
        self.assertEqual([r["density"] for r in rows], [0.01, "adaptive", "accordion=0.001/0.01"])
        self.assertLessEqual(rows[1]["max_sent_bytes_per_step"] * 24, 300e3)


class Plots(Case):
    def draw(self, records):
        data, out = self.dir / "adaptive-k.json", self.dir / "p.svg"
        data.write_text(json.dumps(records))
        done = subprocess.run([os.environ["SKIM_PYTHON"], ROOT / "studies/figures.py", "budgets", data, "--out", out],
                              capture_output=True, text=True, timeout=LIMIT)
        return done, out

    def test_quality_against_bytes(self):
        records = [{"feedback": feedback, "rule": rule, "at": f"{budget:g}", "budget": budget, "seed": seed,
                    "sent": 0.99 * budget, "test_loss": 1 / budget + 0.01 * seed, "test_accuracy": 0.5,
                    "densities": [0.1, 0.01]}
                   for feedback in ("residual", "none") for rule in ("even", "laplace")
                   for budget in (1e6, 4e6) for seed in (1, 2)]
        records[0]["test_loss"] = None  # it diverged
        done, out = self.draw(records)
        self.assert_ok(done)
        picture = out.read_text()
        for word in ["laplace", "even", "no error feedback", "sent by the busiest rank (MB)", "budget of 4e+06"]:
            self.assertIn(word, picture)


if __name__ == "__main__":
    unittest.main()
