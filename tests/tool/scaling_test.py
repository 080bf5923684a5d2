"""skim bench scaling, as a script uses it: ranks of this machine under mpirun; and what is drawn of it.

Needs SKIM_TOOL (the binary); SKIM_HAS_MPI=1 where the build has MPI, and then SKIM_MPIRUN; SKIM_PYTHON, the
Python that draws.
"""

import itertools
import json
import os
import statistics
import subprocess
import unittest

from inspect_test import CAN_DRAW, FIGURES, PYTHON
from tool_test import FOR_MPIRUN, HAS_MPI, LIMIT, TOOL, Case, skim

P, N, K = 4, 20000, 200
SHIFT = 4099  # of one rank's gradient against the next
FIT = {"alpha_s": 1e-3, "beta_s_per_byte": 8e-9, "select_s": 1e-9, "merge_s": 1e-8, "add_s": 0.0}
OWN = ["--parameters", N, "--compute", "1ms", "--density", 0.01, "--rounds", 3]
FIELDS = {"parameters", "k", "density", "ranks", "exchange", "counts_as", "chosen", "decision", "compute_s",
          "select_s", "select_n", "exchange_s", "exchange_least_s", "exchange_most_s", "rounds_s", "predicted_s",
          "predicted_link_s", "predicted_merge_s", "measured_over_predicted", "efficiency", "speed_up_over_dense",
          "busy", "bytes", "result_entries", "frame_bytes", "index_code", "time_scale",
          "waited_s", "shared_cores", "alpha_s", "beta_s_per_byte"}


def scaling(*arguments):
    return skim("bench", "scaling", *arguments)


@unittest.skipUnless(HAS_MPI, "this build has no MPI")
class Measured(Case):
    def setUp(self):
        super().setUp()
        self.fit = self.dir / "fit.json"
        self.fit.write_text(json.dumps(FIT))

    def start(self, *arguments, ranks=P):
        environment = dict(os.environ, **FOR_MPIRUN, OMPI_MCA_mpi_yield_when_idle="1")
        words = [os.environ["SKIM_MPIRUN"], "-n", ranks, TOOL, "bench", "scaling", "--gradient-folder", self.dir,
                 *arguments]
        return subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=LIMIT, env=environment)

    def rows(self, *arguments, ranks=P):
        done = self.start(*OWN, *arguments, "--json", "-", ranks=ranks)
        self.assert_ok(done)
        return {row["exchange"]: row for row in json.loads(done.stdout)}

    def gradients(self):
        return sorted(self.dir.glob("skim-gradient*"))

    def test_every_exchange_has_every_field_and_they_agree(self):
        rows = self.rows("--fit", self.fit)
        self.assertEqual(list(rows), ["dense-ring", "dense-vendor", "allgather", "gtopk", "oktopk", "auto"])
        dense = min((rows["dense-ring"], rows["dense-vendor"]), key=lambda r: r["exchange_s"])
        self.assertEqual({name: r["counts_as"] for name, r in rows.items() if r["counts_as"]},
                         {dense["exchange"]: "dense", "allgather": "allgather", "gtopk": "gtopk", "oktopk": "oktopk",
                          "auto": "auto"})
        for name, r in rows.items():
            self.assertEqual(FIELDS - r.keys(), set())
            self.assertEqual((r["parameters"], r["k"], r["ranks"], r["compute_s"]), (N, K, P, 1e-3))
            self.assertEqual(len(r["rounds_s"]), 3)
            self.assertEqual(r["exchange_s"], statistics.median(r["rounds_s"]))
            self.assertEqual((r["exchange_least_s"], r["exchange_most_s"]), (min(r["rounds_s"]), max(r["rounds_s"])))
            self.assertGreater(min(r["rounds_s"]), 0)
            self.assertEqual(r["select_s"] == 0, r["chosen"] == "dense", name)
            self.assertEqual((r["select_n"], r["waited_s"]), (N, 1e-3))
            self.assertAlmostEqual(r["efficiency"], 1e-3 / (1e-3 + r["select_s"] + r["exchange_s"]))
            self.assertAlmostEqual(r["speed_up_over_dense"], r["efficiency"] / dense["efficiency"])
            self.assertAlmostEqual(r["predicted_s"], r["predicted_link_s"] + r["predicted_merge_s"])
            self.assertAlmostEqual(r["measured_over_predicted"], r["exchange_s"] / r["predicted_s"])
        # 2 (P - 1) / P of 4 n bytes, and 48 of each other rank.
        self.assertEqual(rows["dense-ring"]["bytes"], 1.5 * 4 * N + 48 * 3)
        self.assertAlmostEqual(rows["dense-ring"]["predicted_s"], 6e-3 + (1.5 * 4 * N + 144) * 8e-9)
        self.assertEqual(rows["dense-ring"]["result_entries"], N)

    def test_ranks_select_different_entries(self):
        rows = self.rows("--exchange", "allgather,gtopk")
        # Indices drawn without regard to one another: k of n each, so 1 of 100 meets another.
        self.assertGreater(rows["allgather"]["result_entries"], 0.9 * P * K)
        self.assertLessEqual(rows["allgather"]["result_entries"], P * K)
        self.assertEqual(rows["gtopk"]["result_entries"], K)
        self.assertIsNone(rows["gtopk"]["speed_up_over_dense"])
        for r in rows.values():
            self.assertIsNone(r["predicted_s"])

    def test_the_prediction_is_the_models(self):
        plan = skim("plan", "--parameters", N, "--ranks", P, "--compute", "1ms", "--density", 0.01, "--fit", self.fit,
                    "--index-code", "raw32", "--json", "-")
        self.assert_ok(plan)
        planned = {r["exchange"]: r for r in json.loads(plan.stdout)}
        whole = self.rows("--fit", self.fit, "--exchange", "dense,allgather,gtopk,oktopk", "--index-code", "raw32")
        known = [r for r in whole.values() if r["chosen"] in planned]
        self.assertGreaterEqual(len(known), 3, planned.keys())
        for r in known:
            self.assertAlmostEqual(r["predicted_link_s"], planned[r["chosen"]]["link_s"])
            self.assertAlmostEqual(r["predicted_merge_s"], planned[r["chosen"]]["merge_s"])
        # A link that is ten times slower is meant to be ten times faster; two cores merge for four ranks.
        scaled = self.rows("--fit", self.fit, "--exchange", "dense,allgather,gtopk,oktopk", "--index-code", "raw32",
                           "--time-scale", 10, "--shared-cores", 2, "--longest-wait", "2ms")
        for name, r in scaled.items():
            self.assertAlmostEqual(r["predicted_link_s"], whole[name]["predicted_link_s"] / 10)
            self.assertAlmostEqual(r["predicted_merge_s"], whole[name]["predicted_merge_s"] / 10 * 2)
            self.assertEqual((r["waited_s"], r["compute_s"]), (2e-3, 1e-3))

    def test_frames_with_coded_indices_are_shorter(self):
        case = ["--exchange", "gtopk"]
        coded, raw = self.rows(*case)["gtopk"], self.rows(*case, "--index-code", "raw32")["gtopk"]
        self.assertEqual(raw["frame_bytes"], 24 + 48 + 8 * K)
        self.assertLess(coded["frame_bytes"], 0.8 * raw["frame_bytes"])
        self.assertLess(coded["bytes"], raw["bytes"])
        self.assertEqual((coded["index_code"], raw["index_code"]), ("auto", "raw32"))

    def test_auto_says_what_it_took_and_how_far_it_is_from_the_best(self):
        # On the told link dense is a second. The run may find out that it is not.
        self.fit.write_text(json.dumps(FIT | {"beta_s_per_byte": 1e-5}))
        rows = self.rows("--fit", self.fit, "--exchange", "dense,allgather,gtopk,auto", "--no-vendor-sum", "--rounds", 7)
        self.assertNotIn("dense-vendor", rows)
        auto = rows.pop("auto")
        self.assertTrue(auto["decision"].startswith(auto["chosen"] + " "), auto["decision"])
        self.assertIn(auto["chosen"], ("dense", "allgather", "gtopk"))
        paired = auto["over_best"]
        best = min(rows.values(), key=lambda r: r["select_s"] + r["exchange_s"])
        self.assertEqual(paired["best"], best["exchange"])
        ratios = sorted((auto["select_s"] + a) / (best["select_s"] + b)
                        for a, b in zip(auto["rounds_s"], best["rounds_s"]))
        self.assertAlmostEqual(paired["median"], ratios[3])
        # Of 7 samples the least and the largest hold the median with probability 1 - 2 / 2^7.
        self.assertEqual((paired["j"], paired["coverage"]), (1, 1 - 2 / 128))
        self.assertAlmostEqual(paired["low"], ratios[0])
        self.assertAlmostEqual(paired["high"], ratios[6])

    def test_the_interval_is_the_narrowest_that_covers(self):
        auto = self.rows("--exchange", "gtopk,auto", "--rounds", 9)["auto"]["over_best"]
        self.assertEqual(auto["j"], 2)  # 96.1 %; with 3: 82 %
        self.assertAlmostEqual(auto["coverage"], 1 - 2 * (1 + 9) / 2**9)

    def test_the_gradient_is_one_file_and_goes_unless_kept(self):
        case = ["--exchange", "gtopk"]
        self.rows(*case)
        self.assertEqual(self.gradients(), [])
        first = self.rows(*case, "--keep-gradient")["gtopk"]
        (kept,) = self.gradients()
        self.assertEqual(kept.stat().st_size, 4 * (N + (P - 1) * SHIFT))
        # It is taken as it is, and not removed by those who did not make it: of zeros nothing is selected.
        kept.write_bytes(bytes(kept.stat().st_size))
        self.assertEqual(self.rows(*case)["gtopk"]["result_entries"], 0)
        self.assertEqual(self.gradients(), [kept])
        # One of another size is not.
        kept.write_bytes(b"short")
        self.assertEqual(self.rows(*case, "--keep-gradient")["gtopk"]["frame_bytes"], first["frame_bytes"])
        self.assertEqual(kept.stat().st_size, 4 * (N + (P - 1) * SHIFT))

    def test_the_table(self):
        path = self.dir / "out.json"
        done = self.start(*OWN, "--rounds", 1, "--longest-wait", "1us", "--json", path, ranks=2)
        self.assert_ok(done)
        for words in (f"{N} parameters, k {K}", "dense-vendor", "auto over ", "efficiency"):
            self.assertIn(words, done.stdout)
        self.assertLessEqual(max(map(len, done.stdout.splitlines())), 110)
        self.assertIn("round 1 of 1: ", done.stderr)
        self.assertEqual([r["compute_s"] for r in json.loads(path.read_text())], 6 * [1e-3])

    def test_one_rank_is_refused(self):
        done = self.start(*OWN, ranks=1)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("skim bench scaling: expected two ranks or more, got one", done.stderr)


class Refusals(Case):
    def test_without_mpirun(self):
        self.assert_refused(scaling(*OWN), "two ranks or more", "mpirun")

    def test_refusals(self):
        (self.dir / "bad.json").write_text("{}")
        for arguments, words in [
            (["--parameters", 0], ["--parameters"]),
            (["--compute", "soon"], ["--compute", "'soon'"]),
            (["--density", 0], ["--density", "(0, 1]"]),
            (["--exchange", "hierarchical"], ["--exchange"]),
            (["--rounds", 0], ["--rounds"]),
            (["--time-scale", 0], ["--time-scale", "> 0"]),
            (["--index-code", "coded"], ["--index-code", "raw32"]),
            (["--longest-wait", "1"], ["--longest-wait", "'1'"]),
            (["--gradient-folder", self.dir / "none"], ["--gradient-folder"]),
            (["--fit", self.dir / "none.json"], ["--fit", "cannot open"]),
            (["--fit", self.dir / "bad.json"], ["--fit", "bench network"]),
        ]:
            with self.subTest(arguments):
                given = {"--parameters": N, "--compute": "1ms"} | dict([arguments])
                self.assert_refused(scaling(*itertools.chain(*given.items())), *words)
        self.assert_refused(scaling("--parameters", N), "--compute", "required")
        self.assert_refused(scaling("--compute", "1s"), "--parameters", "required")


@unittest.skipUnless(CAN_DRAW, "no matplotlib (scripts/setup installs it)")
class Plots(Case):
    def setUp(self):
        super().setUp()
        self.file = self.dir / "scaling.json"

        def row(ranks, scale, exchange, counts_as, seconds, **more):
            return {"model": "vgg16", "parameters": 14728266, "ranks": ranks, "time_scale": scale, "exchange": exchange,
                    "counts_as": counts_as, "index_code": "auto", "compute_s": 0.1, "select_s": 0.02,
                    "exchange_s": seconds, "exchange_least_s": seconds / 2, "exchange_most_s": seconds * 2,
                    "predicted_s": seconds / 1.25, "measured_over_predicted": 1.25, "efficiency": 0.1 / (0.12 + seconds),
                    "speed_up_over_dense": 2.0, "busy": 0.5, "chosen": exchange,
                    "bytes": 1000} | more

        self.rows = [row(p, scale, *case) for p, scale in [(4, 1), (16, 1), (16, 10), (32, 10)]
                     for case in [("dense-ring", None, 0.9), ("dense-vendor", "dense", 0.38), ("allgather", "allgather", 0.05),
                                  ("gtopk", "gtopk", 0.03)]]
        over = {"median": 1.01, "low": 0.99, "high": 1.04}
        self.rows.append(row(4, 1, "auto", "auto", 0.03, over_best=over, busy=0.95))
        self.file.write_text(json.dumps(self.rows))

    def plot(self, *arguments):
        return subprocess.run([PYTHON, FIGURES, *map(str, arguments)], capture_output=True, text=True, timeout=LIMIT)

    def table(self, cell):
        done = self.plot("scaling-table", self.file, "--cell", cell)
        self.assert_ok(done)
        return done.stdout.splitlines()[2:]

    def test_tables(self):
        # 0.1 s of computing in 0.5 s; published: 7.9, 3.0 and 1.0 %.
        self.assertEqual(self.table("efficiency")[:3], [
            "| model | exchange | P = 4 | P = 16 | P = 16, 10 x slower | P = 32, 10 x slower |", "|---|---|---|---|---|---|",
            "| vgg16 | dense | 20.0 (7.9) | 20.0 (3) | 20.0 (3) | 20.0 (1) |"])
        self.assertEqual(self.table("time")[4], "| vgg16 | gtopk" + 4 * " | 30 [15, 60]" + " |")
        self.assertEqual(self.table("ratio")[4], "| vgg16 | gtopk" + 4 * " | 1.25" + " |")
        self.assertEqual(self.table("speed-up")[3], "| vgg16 | allgather" + 4 * " | 2.00; 1.00" + " |")
        self.assertEqual(self.table("speed-up")[4], "| vgg16 | gtopk" + 4 * " | 2.00; 1.13" + " |")
        self.assertEqual(self.table("parts")[2], "| vgg16 | dense" + 4 * " | 20.0; 4.0; 76.0" + " |")
        # A machine that is 95 % busy is starred.
        self.assertEqual(self.table("auto")[2:], ["| vgg16 | auto | auto: 1.010 [0.990, 1.040]* | - | - | - |"])

    def test_figures(self):
        for command, words in [("scaling", ["vgg16", "dense", "gtopk", "published"]),
                               ("scaling-parts", ["32 ranks", "selection", "allgather"]),
                               ("scaling-time", ["gtopk, measured", "allgather, modelled", "vgg16"])]:
            out = self.dir / f"{command}.svg"
            self.assert_ok(self.plot(command, self.file, "--out", out))
            for word in words:
                self.assertIn(word, out.read_text())

    def test_what_cannot_be_drawn(self):
        out = self.dir / "x.svg"
        self.assert_refused(self.plot("scaling", self.file, self.file, "--out", out), "two cases", status=1)
        self.assert_refused(self.plot("scaling", self.file, "--index-code", "raw32", "--out", out), "raw32", status=1)
        self.assert_refused(self.plot("scaling-parts", self.file, "--ranks", 8, "--out", out), "8 ranks", status=1)


if __name__ == "__main__":
    unittest.main()
