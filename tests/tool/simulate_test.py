"""skim simulate --train, as a person or a script uses it. The other form: plan_test.py.

Needs SKIM_TOOL (the binary) and SKIM_VERSION; SKIM_HAS_MPI=1 where the build has MPI.
"""

import json
import os
import shlex
import signal
import subprocess
import unittest

from tool_test import HAS_MPI, LIMIT, SMALL, TOOL, Case, lines, skim, training_lines

LINK = ["--link", "1gbit", "--latency", "0.1ms"]


def simulate(*arguments, **options):
    return skim("simulate", "--train", *LINK, *SMALL, "--model", "mlp-64", *arguments, **options)


def without(line, *keys):
    return {key: value for key, value in line.items() if key not in keys}


class Training(Case):
    def run_with_metrics(self, name, *arguments):
        path = self.dir / name
        done = simulate(*arguments, "--metrics", path, "--json", "-")
        self.assert_ok(done)
        (row,) = json.loads(done.stdout)
        return row, training_lines(path)

    @unittest.skipUnless(HAS_MPI, "this build has no MPI: skim train cannot start ranks")
    def test_it_trains_as_skim_train_does(self):
        case = ["--ranks", 4, "--steps", 6, "--density", 0.01, "--threads", 1]
        for how in ["gtopk"], ["allgather"], ["dense"], ["gtopk", "--split", "shards", "--shards-per-rank", 3]:
            with self.subTest(how):
                row, simulated = self.run_with_metrics("s.jsonl", *case, "--exchange", *how)
                metrics, summary = self.dir / "t.jsonl", self.dir / "t.json"
                self.assert_ok(skim("train", *SMALL, "--model", "mlp-64", *case, "--exchange", *how,
                                    "--metrics", metrics, "--summary", summary))
                trained = training_lines(metrics)
                self.assertEqual(len(trained), 7)
                for s, t in zip(simulated, trained, strict=True):
                    same = {key for key in t if not key.endswith("_ms")}
                    self.assertEqual({key: s[key] for key in same}, {key: t[key] for key in same})
                (expected,) = json.loads(summary.read_text())
                for key in expected.keys() - {"peak_rss_bytes", "metrics"}:
                    if not key.endswith("_ms"):
                        self.assertEqual(row[key], expected[key], key)

    def test_time_is_the_links_and_what_compute_is_said_to_take(self):
        case = ["--ranks", 6, "--steps", 5, "--exchange", "gtopk", "--density", 0.01, "--compute", "20ms",
                "--link-only", "--measure-delta", 2]
        first, again = (self.run_with_metrics(name, *case) for name in ("a.jsonl", "b.jsonl"))
        machine = ["wall_ms", "wall_s", "peak_rss_bytes", "metrics"]
        self.assertEqual(without(first[0], *machine), without(again[0], *machine))
        for a, b in zip(first[1], again[1], strict=True):
            self.assertEqual(without(a, *machine), without(b, *machine))
        row, metrics = first
        steps = [line for line in metrics if "step_ms" in line]
        self.assertEqual(len(steps), 5)
        total = 0
        for s in steps:
            self.assertEqual((s["compute_ms"], s["optimizer_ms"], s["select_ms"]), (20, 0, 0))
            self.assertAlmostEqual(s["step_ms"], 20 + s["exposed_ms"])
            self.assertGreater(s["exposed_ms"], 8e-6 * s["max_sent_bytes"])
            self.assertGreaterEqual(s["max_sent_bytes"], s["sent_bytes"])
            total += 1e-3 * s["step_ms"]
            self.assertAlmostEqual(s["total_s"], total)
            self.assertEqual("delta" in s, s["step"] in (2, 4))
            self.assertGreater(s.get("delta", 1), 0)
        self.assertAlmostEqual(row["total_s"], total)
        self.assertEqual((row["ranks"], row["link_only"], row["alpha_s"]), (6, True, 1e-4))
        self.assertAlmostEqual(row["beta_s_per_byte"], 8e-9)
        self.assertTrue(metrics[-1]["evaluation"])

    def test_a_dead_run_is_no_success(self):
        metrics = self.dir / "m.jsonl"
        done = simulate("--ranks", 3, "--steps", 60, "--lr", "1e20", "--metrics", metrics)
        self.assert_refused(done, "the last 20 steps were skipped", status=1)
        skipped = [line["skipped"] for line in lines(metrics) if "skipped" in line]
        self.assertEqual(skipped[-20:], [True] * 20)
        self.assertLess(len(skipped), 60)

    def test_a_summary_repeats_its_run(self):
        machine = ["wall_ms", "wall_s", "peak_rss_bytes", "metrics", "threads"]

        def repeated(name, *arguments):
            path = self.dir / f"{name}.jsonl"
            done = skim("simulate", "--train", *arguments, "--metrics", path, "--json", self.dir / f"{name}.json")
            self.assert_ok(done)
            (row,) = json.loads((self.dir / f"{name}.json").read_text())
            return without(row, *machine), [without(line, *machine) for line in training_lines(path)]

        case = [*LINK, *SMALL, "--model", "mlp-64", "--ranks", 3, "--steps", 4, "--density", 0.01, "--bucket-mb", 0,
                "--compute", "20ms", "--link-only", "--threads", 1]
        for how, expected in [
            (["--exchange", "param-server", "--down-density", 0.1, "--measure-constants", 3], (0.02, 0, 3)),
            (["--exchange", "gtopk", "--measure-delta", 2], (0.02, 2, 0)),
        ]:
            first = repeated("first", *case, *how)
            self.assertEqual(tuple(first[0][key] for key in ("compute", "measure_delta", "measure_constants")), expected)
            self.assertEqual(repeated("again", "--config", self.dir / "first.json"), first)
        # The command line goes before the file.
        faster = repeated("faster", f"--config={self.dir / 'first.json'}", "--compute", "0s", "--link", "2gbit")
        self.assertEqual({key for key in first[0] if first[0][key] != faster[0][key] and not key.endswith("_ms")},
                         {"compute", "beta_s_per_byte", "total_s"})
        self.assertEqual((faster[0]["compute"], faster[0]["compute_ms"], faster[0]["alpha_s"]), (0, 0, 1e-4))
        (measured,) = json.loads(simulate("--steps", 1, "--json", "-").stdout)
        self.assertIsNone(measured["compute"])

    def test_the_command_repeats_the_run(self):
        metrics = self.dir / "with 'quotes' and spaces"
        self.assert_ok(simulate("--ranks", 3, "--steps", 4, "--compute", "20ms", "--link-only", "--metrics", metrics))
        beginning, *first = lines(metrics)
        self.assertEqual({key: beginning[key] for key in ("run", "step", "ranks", "model", "data")},
                         {"run": "gtopk", "step": 0, "ranks": 3, "model": "mlp-64", "data": "generated"})
        environment = {name: value for name, value in os.environ.items() if name != "SKIM_DATA"}
        command = beginning["command"].replace("skim simulate", shlex.quote(TOOL) + " simulate", 1)
        self.assert_ok(subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=LIMIT,
                                      env=environment))
        again = lines(metrics)
        self.assertEqual(again[0], beginning)
        self.assertEqual([without(line, "wall_ms") for line in again[1:]], [without(line, "wall_ms") for line in first])
        self.assertEqual(len(first), 5)
        page = self.dir / "page.html"
        self.assert_ok(skim("report", metrics, "--out", page))
        self.assertIn(json.dumps(beginning["command"])[1:-1], page.read_text())

    def test_files_that_cannot_be_repeated(self):
        file = self.dir / "s.json"
        for text, words in [("[]", ["no summary", "TOML"]), ('[{"exchange": "gtopk"}, {"exchange": "dense"}]', ["2 runs"]),
                            ('[{"exchange": "gtopk", "ranks": "all"}]', ["ranks", '"all"']),
                            ('[{"exchange": "gtopk", "alpha_s": -1}]', ["alpha_s", ">= 0", "-1"]),
                            ('[{"exchange": "gtopk", "measure_delta": 0.5}]', ["measure_delta", "whole number"])]:
            file.write_text(text)
            self.assert_refused(simulate("--steps", 1, "--config", file), "--config", *words)
        # A summary of skim train names no link.
        file.write_text('[{"exchange": "gtopk"}]')
        self.assert_refused(skim("simulate", "--train", "--config", file), "--link")

    def test_a_hundred_ranks(self):
        row, metrics = self.run_with_metrics("m.jsonl", "--ranks", 100, "--batch", 1, "--steps", 3)
        self.assertEqual((row["ranks"], row["steps"], len(metrics)), (100, 3, 4))
        self.assertGreater(row["exchange_ms"], 0)
        self.assertGreater(row["compute_ms"], 0)

    def test_people_get_lines(self):
        done = simulate("--ranks", 2, "--steps", 3)
        self.assert_ok(done)
        self.assertRegex(done.stdout, r"\nmlp-64 on generated: 50890 parameters, 2 ranks, batch 8 a rank, 3 steps\n"
                         r"simulated: \S+ s; a step \S+ ms = compute \S+ \+ exchange \S+ \(medians\); sent ")

    def test_auto_says_what_it_takes(self):
        case = ["--ranks", 4, "--steps", 3, "--exchange", "auto", "--link-only", "--density", 0.01]
        _, metrics = self.run_with_metrics("m.jsonl", *case)
        (told,) = [line for line in metrics if "decision" in line]
        self.assertEqual((told["step"], told["bucket"], told["n"]), (1, 0, 50890))
        self.assertIn(f"step 1  bucket 0 (50890 entries): {told['decision']}", simulate(*case).stdout)

    def test_help_lists_both_forms(self):
        alone, training = skim("simulate", "--help"), skim("simulate", "--train", "--help")
        for done in (alone, training):
            self.assert_ok(done)
            for option in ("--train", "--link", "--latency", "--json"):
                self.assertRegex(done.stdout, rf"{option}\b")
        for option in ("--model", "--lr", "--metrics", "--compute", "--measure-delta"):
            self.assertRegex(training.stdout, rf"{option}\b")
            self.assertNotRegex(alone.stdout, rf"\n  {option}\b")

    def simulation(self, name, **options):
        """One in the background that has taken some steps, and its --metrics."""
        metrics = self.dir / f"{name}.jsonl"
        run = subprocess.Popen(
            [TOOL, "simulate", "--train", *LINK, *SMALL, "--model", "mlp-64", "--ranks", "4", "--epochs",
             "100000", "--metrics", str(metrics), "--json", str(self.dir / f"{name}.json")],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        self.addCleanup(run.kill)
        self.wait_for_step(run, metrics, 3)
        return run, metrics

    def test_a_signal_ends_it(self):
        for number in (signal.SIGINT, signal.SIGHUP):
            with self.subTest(number.name):
                run, metrics = self.simulation(number.name)
                run.send_signal(number)
                out, err = run.communicate(timeout=LIMIT)
                self.assertEqual(run.returncode, 128 + number, out + err)
                self.assertEqual(len(err.strip().splitlines()), 1, err)
                self.assertIn("stopped after step", err)
                (row,) = json.loads((self.dir / f"{number.name}.json").read_text())
                self.assertTrue(row["stopped"])
                self.assertEqual(row["steps_done"], max(line["step"] for line in lines(metrics)))

    def test_a_second_signal_of_another_kind_ends_it_at_once(self):
        run, _ = self.simulation("m")
        # Both signals are there before the handler of one of them runs.
        for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
            run.send_signal(number)
        out, err = run.communicate(timeout=LIMIT)
        self.assertIn(run.returncode, (-signal.SIGINT, -signal.SIGTERM), out + err)

    def test_under_nohup_it_goes_on_when_the_terminal_closes(self):
        run, metrics = self.simulation("m", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        run.send_signal(signal.SIGHUP)
        self.wait_for_step(run, metrics, 10 + metrics.read_text().count("\n"))
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 128 + signal.SIGINT)

    def test_refusals(self):
        text = self.dir / "text"
        text.write_text("many words. " * 10000)
        for arguments, words in [
            (["--compute", "soon"], ["--compute", "'soon'"]),
            (["--link", "fast"], ["--link", "'fast'"]),
            (["--ranks", 3, "--latency", "1e9s", "--steps", 30], ["the simulated link is too slow"]),
            (["--density", 2], ["--density", "(0, 1]", "2"]),
            (["--ranks", 0], ["--ranks"]),
            (["--ranks", 100], ["512", "100"]),
            (["--measure-delta", 0], ["--measure-delta"]),
            (["--measure-delta", 1, "--no-feedback"], ["--measure-delta", "--no-feedback"]),
            (["--exchange", "ring"], ["--exchange", "ring"]),
            (["--exchange", "hierarchical"], ["hierarchical", "one host"]),
            (["--checkpoint", self.dir], ["--checkpoint", "leave it out"]),
            (["--resume"], ["--resume"]),
            (["--on-divergence", "stop"], ["--on-divergence", "leave it out"]),
            (["--model", "alexnet"], ["alexnet", "lenet5"]),
            (["--data", "mnist", "--data-dir", self.dir], ["mnist"]),
            (["--split", "halves"], ["--split", "halves", "iid", "shards"]),
            (["--split", "shards", "--ranks", 70], ["a rank's shards", "512", "ranks 70"]),
            (["--model", "lstm", "--data", "text", "--data-dir", text, "--split", "shards"], ["--split shards", "text"]),
            (["--nesterov"], ["--nesterov needs"]),
            (["--json", self.dir / "x", "--metrics", self.dir / "x"], ["--json and --metrics"]),
            (["--parameters", 5], ["--parameters"]),
            (["--model", "lstm", "--data", "text", "--data-dir", text, "--hidden", 2048, "--ranks", 4096,
              "--batch", 1, "--sequence-length", 8], ["lstm on 4096 ranks needs about", "GB"]),
        ]:
            with self.subTest(arguments):
                self.assert_refused(simulate("--steps", 1, *arguments), *words)
        self.assert_refused(simulate("--steps", 2, "--lr", 1e30, "--non-finite", "raise"), "step 1", status=1)
        self.assert_refused(simulate("--steps", 1, "--metrics", "/dev/full"), "--metrics", "No space left", status=1)
        done = simulate("--steps", 1, "--json", "/dev/full")
        self.assert_refused(done, "--json", "No space left", status=1)
        self.assertIn("\nsimulated: ", done.stdout, "the result is lost")


if __name__ == "__main__":
    unittest.main()
