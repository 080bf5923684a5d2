"""--trace: a trace of all ranks, in the trace event format, which Perfetto reads.

Needs SKIM_TOOL; SKIM_HAS_MPI=1 where the build has MPI.
"""

import collections
import json
import signal
import unittest

from tool_test import HAS_MPI, LIMIT, Case, lines, train

TRAINING = ["batch", "compute", "exposed", "optimizer"]
COMMUNICATION = ["select", "exchange", "apply"]
CASE = ["--model", "mlp-64", "--steps", 12, "--bucket-mb", 0.002, "--density", 0.05]


class Trace(Case):
    def trace(self, name="trace.json"):
        """The file, and {process: {name of its track: [span]}} in order of time."""
        whole = json.loads((self.dir / name).read_text())
        of_tracks = self.names(whole, "thread_name")
        tracks = collections.defaultdict(lambda: collections.defaultdict(list))
        for event in whole["traceEvents"]:
            if event["ph"] == "X":
                tracks[event["pid"]][of_tracks[event["pid"], event["tid"]]].append(event)
        # Perfetto knows a track by its number alone, and takes some numbers for a main thread.
        numbers = [tid for _, tid in of_tracks]
        self.assertEqual(len(set(numbers)), len(numbers))
        self.assertFalse(set(numbers) & {0, *tracks})
        for process in tracks.values():
            for spans in process.values():
                spans.sort(key=lambda span: span["ts"])
        return whole, tracks

    def names(self, whole, kind):
        return {(e["pid"], e["tid"]): e["args"]["name"] for e in whole["traceEvents"] if e["name"] == kind}

    def assert_spans_do_not_overlap(self, tracks):
        for process in tracks.values():
            for spans in process.values():
                for one, other in zip(spans, spans[1:]):
                    # As Perfetto cuts times to nanoseconds. It drops a span that overlaps with the one before.
                    end = int(one["ts"] * 1000) + int(one["dur"] * 1000)
                    self.assertLessEqual(end, int(other["ts"] * 1000), (one, other))

    def assert_sums_are_the_metrics(self, spans_of_rank_0, metrics):
        """Of each step and each part, as rank 0 recorded them."""
        sums = collections.defaultdict(float)
        for spans in spans_of_rank_0.values():
            for span in spans:
                sums[span["args"]["step"], span["name"]] += span["dur"] / 1e3
        recorded = [line for line in lines(metrics) if "sent_bytes" in line]
        self.assertGreater(len(recorded), 0)
        for line in recorded:
            for part in TRAINING[1:] + COMMUNICATION:
                self.assertAlmostEqual(sums[line["step"], part], line[f"{part}_ms"], delta=1e-4, msg=part)
            self.assertLessEqual(sum(sums[line["step"], part] for part in TRAINING), line["step_ms"] + 1e-4)

    @unittest.skipUnless(HAS_MPI, "this build has no MPI: it cannot start several ranks")
    def test_every_step_has_its_parts_on_every_rank(self):
        self.assert_ok(train(*CASE, "--ranks", 3, "--exchange", "allgather", "--trace", self.dir / "trace.json",
                             "--metrics", self.dir / "m.jsonl"))
        whole, tracks = self.trace()
        names = {pid: name for (pid, _), name in self.names(whole, "process_name").items()}
        self.assertEqual(names, {r: f"allgather: rank {r}" for r in range(3)})
        self.assertEqual({r: set(tracks[r]) for r in tracks}, dict.fromkeys(range(3), {"training", "communication"}))
        self.assert_spans_do_not_overlap(tracks)
        buckets = {span["args"]["bucket"] for span in tracks[0]["communication"]}
        self.assertGreater(len(buckets), 1)
        for process in tracks.values():
            by_step = collections.defaultdict(list)
            for span in process["training"]:
                by_step[span["args"]["step"]].append(span["name"])
            self.assertEqual(by_step, {step: TRAINING for step in range(1, 13)})
            by_bucket = collections.defaultdict(list)
            for span in process["communication"]:
                by_bucket[span["args"]["step"], span["args"]["bucket"]].append(span["name"])
            self.assertEqual(by_bucket, {(s, b): COMMUNICATION for s in range(1, 13) for b in buckets})
        self.assert_sums_are_the_metrics(tracks[0], self.dir / "m.jsonl")
        # The ranks of one machine have one clock. So each offset is an error, and its bound must hold.
        clocks = whole["otherData"]["clocks"]
        self.assertEqual([clock["rank"] for clock in clocks], [0, 1, 2])
        for clock in clocks:
            for offset, bound in zip(clock["offset_us"], clock["bound_us"], strict=True):
                self.assertLessEqual(abs(offset), bound)
            self.assertEqual(clock["bound_us"][0] > 0, clock["rank"] > 0)
        # No rank ends an exchange before all ranks have begun it, but for the bounds.
        error = 2 * max(max(clock["bound_us"]) for clock in clocks)
        for step in range(1, 13):
            of_step = [span for process in tracks.values() for span in process["communication"]
                       if span["name"] == "exchange" and span["args"] == {"step": step, "bucket": 0}]
            self.assertEqual(len(of_step), 3)
            self.assertGreaterEqual(min(s["ts"] + s["dur"] for s in of_step) + error, max(s["ts"] for s in of_step))

    def test_several_runs_and_what_was_there(self):
        path = self.dir / "trace.json"
        path.write_text("old")
        done = train(*CASE, "--compare", "dense,gtopk:0.01", "--trace", path)
        self.assert_ok(done)
        whole, tracks = self.trace()
        self.assertEqual(list(self.names(whole, "process_name").values()), ["dense: rank 0", "gtopk:0.01: rank 0"])
        self.assert_spans_do_not_overlap(tracks)
        self.assertEqual((self.dir / "trace.json.~1~").read_text(), "old")
        self.assertIn("--trace: kept the old", done.stderr)

    def test_local_steps_exchange_at_the_end_of_a_round(self):
        self.assert_ok(train(*CASE, "--local-steps", 4, "--trace", self.dir / "trace.json",
                             "--metrics", self.dir / "m.jsonl"))
        _, tracks = self.trace()
        self.assert_spans_do_not_overlap(tracks)
        self.assertEqual({span["args"]["step"] for span in tracks[0]["communication"]}, {4, 8, 12})
        self.assertEqual([span["name"] for span in tracks[0]["training"][:4]], ["batch", "compute", "optimizer", "exposed"])
        self.assert_sums_are_the_metrics(tracks[0], self.dir / "m.jsonl")

    @unittest.skipUnless(HAS_MPI, "this build has no MPI: it cannot start several ranks")
    def test_a_stopped_run_has_its_latest_steps(self):
        metrics = self.dir / "m.jsonl"
        run = self.start("--model", "linear", "--ranks", 2, "--steps", 1000000, "--eval-epochs", 0,
                         "--metrics", metrics, "--trace", self.dir / "trace.json")
        self.wait_for_step(run, metrics, 1100)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 128 + signal.SIGINT, err)
        whole, tracks = self.trace()
        steps = max(line["step"] for line in lines(metrics))
        kept = whole["otherData"]["steps_kept"]
        self.assertGreater(steps, kept)
        for process in tracks.values():
            found = sorted({span["args"]["step"] for span in process["training"]})
            self.assertEqual(found, list(range(steps - kept + 1, steps + 1)))

    def test_each_output_is_tried_whatever_happens_to_the_others(self):
        for ranks in (1, 2) if HAS_MPI else (1,):
            with self.subTest(ranks=ranks):
                case = [*CASE, "--ranks", ranks, "--summary", "/dev/full"]
                done = train(*case, "--trace", self.dir / f"trace{ranks}", "--report", self.dir / f"page{ranks}")
                self.assert_refused(done, "--summary: cannot write '/dev/full'", status=1)
                whole, _ = self.trace(f"trace{ranks}")
                self.assertEqual(len(self.names(whole, "process_name")), ranks)
                self.assertNotIn('"live":true', (self.dir / f"page{ranks}").read_text())
                done = train(*case, "--trace", "/proc/self/oom_score_adj")  # the system takes no trace there
                self.assert_refused(done, "--summary: cannot write", "; --trace: cannot write", status=1)

    def test_outputs_are_tried_first(self):
        done = train(*CASE, "--trace", self.dir / "none" / "trace.json")
        self.assert_refused(done, "--trace: cannot open", "No such file")
        self.assert_refused(train(*CASE, "--trace", "-"), "--trace: expected a file, got '-'")
        same = self.dir / "same"
        self.assert_refused(train(*CASE, "--trace", same, "--report", same), "--trace and --report are one file")


if __name__ == "__main__":
    unittest.main()
