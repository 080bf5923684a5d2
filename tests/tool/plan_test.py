"""skim plan, skim bench network and skim simulate, as a person or a script uses them.

Needs SKIM_TOOL (the binary); SKIM_HAS_MPI=1 where the build has MPI.
"""

import json
import unittest

from tool_test import HAS_MPI, Case, skim

FIELDS = {"exchange", "density", "step_s", "exchange_s", "speed_up", "bytes"}
PAPER = ["--link", "1gbit", "--latency", "0.4ms", "--compute", "0.2s"]


def plan(*arguments):
    return skim("plan", *arguments)


class Plan(Case):
    def rows(self, *arguments):
        done = plan(*arguments, "--json", "-")
        self.assert_ok(done)
        return json.loads(done.stdout)

    def test_every_exchange_at_every_density_beside_dense(self):
        rows = self.rows("--params", "25.6e6", "--ranks", 32, *PAPER, "--density", "0.01,0.001")
        for row in rows:
            self.assertEqual(FIELDS - row.keys(), set())
        dense = [r for r in rows if r["exchange"] == "dense"]
        self.assertEqual(len(dense), 1)
        self.assertEqual((dense[0]["density"], dense[0]["speed_up"]), (1.0, 1.0))
        sparse = {r["exchange"] for r in rows} - {"dense"}
        self.assertTrue(any(name.startswith("allgather") for name in sparse), sparse)
        self.assertTrue(any(name.startswith("gtopk") for name in sparse), sparse)
        self.assertEqual({(r["exchange"], r["density"]) for r in rows[1:]},
                         {(name, d) for name in sparse for d in (0.01, 0.001)})
        for r in rows:
            self.assertAlmostEqual(r["speed_up"], dense[0]["step_s"] / r["step_s"])
            self.assertGreaterEqual(r["step_s"], 0.2 + r["exchange_s"])

    def test_the_dense_step_is_the_formula(self):
        dense = self.rows("--params", "1e6", "--ranks", 4, "--link", "1gbit", "--latency", "1ms",
                          "--compute", "10ms", "--add-ns", 0)[0]
        # 6 rounds of 1 ms; 1.5 times 4 MB, and 40 bytes of each other rank, at 8 ns a byte.
        self.assertAlmostEqual(dense["exchange_s"], 6e-3 + (6e6 + 120) * 8e-9)
        self.assertEqual(dense["bytes"], 6e6 + 120)
        self.assertAlmostEqual(dense["step_s"], 10e-3 + dense["exchange_s"])

    def test_raw_frames_are_larger_and_overlap_hides_the_link(self):
        case = ["--params", "1e7", "--ranks", 8, *PAPER, "--density", "0.001"]
        coded, raw = self.rows(*case), self.rows(*case, "--frames", "raw")
        hidden = self.rows(*case, "--overlap", 1)
        for c, r, h in list(zip(coded, raw, hidden))[1:]:
            self.assertLess(c["bytes"], 0.8 * r["bytes"])
            self.assertLess(h["step_s"], c["step_s"])

    def test_it_says_which_is_best(self):
        done = plan("--params", "25.6e6", "--ranks", 32, *PAPER)
        self.assert_ok(done)
        self.assertRegex(done.stdout, r"\nbest: \S+ at density \S+, a step [\d.]+ times as fast as dense\n$")

    def test_it_says_when_not_to_compress(self):
        done = plan("--params", "1e6", "--ranks", 2, "--link", "400gbit", "--latency", "2us", "--compute", "1ms")
        self.assert_ok(done)
        self.assertIn("do not compress", done.stdout)

    def test_a_fit_gives_link_and_speeds(self):
        fit = {"alpha_s": 1e-3, "beta_s_per_byte": 8e-9, "select_s": 1e-9, "merge_s": 0.0, "add_s": 0.0}
        path = self.dir / "fit.json"
        path.write_text(json.dumps(fit))
        case = ["--params", "1e6", "--ranks", 4, "--compute", "10ms", "--density", "0.01"]
        rows = self.rows(*case, "--fit", path)
        self.assertAlmostEqual(rows[0]["exchange_s"], 6e-3 + (6e6 + 120) * 8e-9)
        self.assertAlmostEqual(rows[1]["select_s"], 1e-3)
        # What stands on the command line wins.
        rows = self.rows(*case, "--fit", path, "--latency", "0ms", "--select-ns", 0)
        self.assertAlmostEqual(rows[0]["exchange_s"], (6e6 + 120) * 8e-9)
        self.assertEqual(rows[1]["select_s"], 0.0)

    def test_refusals(self):
        good = ["--params", "1e6", "--ranks", 4, *PAPER]
        (self.dir / "bad.json").write_text("{}")
        for arguments, words in [
            (["--ranks", 4, "--link", "1gbit"], ["--compute", "required"]),
            (["--compute", "1s"], ["--link RATE", "--fit FILE"]),
            ([*good, "--link", "1gb"], ["--link", "such as 100mbit", "'1gb'"]),
            ([*good, "--link", "-1gbit"], ["--link", "'-1gbit'"]),
            ([*good, "--latency", "0.4"], ["--latency", "such as 200us", "'0.4'"]),
            ([*good, "--compute", "soon"], ["--compute", "'soon'"]),
            ([*good, "--density", "0.1,2"], ["--density", "(0, 1]", "2"]),
            ([*good, "--params", "0.5"], ["--params", "at least 1"]),
            ([*good, "--ranks", 0], ["--ranks"]),
            ([*good, "--fit", self.dir / "none.json"], ["--fit", "cannot open"]),
            ([*good, "--fit", self.dir / "bad.json"], ["--fit", "bench network"]),
            ([*good, "--json", self.dir / "no" / "file"], ["--json", "cannot open"]),
        ]:
            with self.subTest(arguments):
                self.assert_refused(plan(*arguments), *words)


class Network(Case):
    @unittest.skipUnless(HAS_MPI, "this build has no MPI")
    def test_the_fit_is_what_plan_reads(self):
        path = self.dir / "fit.json"
        done = skim("bench", "network", "--largest", 1 << 20, "--entries", 100000, "--json", path)
        self.assert_ok(done)
        self.assertIn("alpha", done.stdout)
        self.assertIn("share a host", done.stdout)
        fit = json.loads(path.read_text())
        self.assertEqual((fit["ranks"], fit["one_host"]), (2, True))
        self.assertEqual([s["bytes"] for s in fit["samples"]], [4**i for i in range(11)])
        for s in fit["samples"]:
            self.assertGreater(s["seconds"], 0)
            self.assertAlmostEqual(s["fit_s"], fit["alpha_s"] + s["bytes"] * fit["beta_s_per_byte"])
        for speed in ("select_s", "merge_s", "add_s"):
            self.assertGreater(fit[speed], 0)
        self.assert_ok(plan("--params", "1e6", "--ranks", 2, "--compute", "1ms", "--fit", path))

    @unittest.skipIf(HAS_MPI, "this build has MPI")
    def test_without_mpi(self):
        self.assert_refused(skim("bench", "network"), "no MPI")

    def test_refusals(self):
        self.assert_refused(skim("bench", "network", "--largest", 1), "--largest")
        self.assert_refused(skim("bench", "network", "--ranks", 1), "--ranks")


class Simulate(Case):
    LINK = ["--link", "1gbit", "--latency", "0.1ms", "--density", 0.01]

    def rows(self, *arguments):
        done = skim("simulate", *self.LINK, *arguments, "--json", "-")
        self.assert_ok(done)
        return json.loads(done.stdout)

    def test_link_time_is_the_model_and_always_the_same(self):
        case = ["--params", 20000, "--ranks", "4,6", "--link-only"]
        rows = self.rows(*case)
        self.assertEqual(rows, self.rows(*case))
        dense = [r for r in rows if r["exchange"] == "dense"]
        self.assertEqual([r["ranks"] for r in dense], [4, 6])
        for r in dense:
            p = r["ranks"]
            # Chunks differ by an entry where P does not divide n: 4 bytes a round.
            sent = 2 * (p - 1) / p * 80000 + 40 * (p - 1)
            self.assertAlmostEqual(r["bytes"], sent, delta=8)
            self.assertEqual(r["rounds"], 2 * (p - 1))
            self.assertAlmostEqual(r["exchange_s"], 2 * (p - 1) * 1e-4 + sent * 8e-9, delta=1e-6)
        names = {r["exchange"] for r in rows}
        self.assertTrue({"dense", "allgather", "gtopk", "oktopk", "sparcml"} <= names, names)
        self.assertNotIn("hierarchical", names)
        for r in rows:
            self.assertEqual((r["k"], r["select_s"]), (200, 0))
            self.assertGreaterEqual(r["exchange_s"], r["bytes"] * 8e-9)

    def test_work_of_the_processor_counts_unless_told_otherwise(self):
        case = ["--params", 100000, "--ranks", 8, "--exchange", "gtopk"]
        (link,), (both,) = self.rows(*case, "--link-only"), self.rows(*case)
        self.assertEqual(link["bytes"], both["bytes"])
        self.assertGreater(both["exchange_s"], link["exchange_s"])
        self.assertGreater(both["select_s"], 0)

    def test_the_first_step_of_many_ranks(self):
        (row,) = self.rows("--params", 20000, "--ranks", 100, "--exchange", "gtopk", "--link-only", "--steps", 1)
        self.assertEqual(row["rounds"], 8)

    def test_auto_takes_the_cheapest(self):
        for density in (0.001, 0.9):
            case = ["--params", 20000, "--ranks", 8, "--link-only", "--density", density, "--latency", "1us"]
            rows = {r["exchange"]: r for r in self.rows(*case, "--exchange", "auto,dense,gtopk")}
            auto = rows["auto"]
            self.assertRegex(auto["decision"], r"^(dense|gtopk|allgather|oktopk|sparcml)\S* [\d.]+ \ws, ")
            self.assertLessEqual(auto["exchange_s"], 1.05 * min(r["exchange_s"] for r in rows.values()), auto)
            self.assertEqual(auto["decision"].startswith("dense "), density == 0.9, auto)
            self.assertNotIn("decision", rows["gtopk"])
        self.assertNotIn("auto", {r["exchange"] for r in self.rows("--params", 20000, "--link-only")})

    def test_one_rank_sends_nothing(self):
        for row in self.rows("--params", 20000, "--ranks", 1, "--link-only"):
            self.assertEqual((row["bytes"], row["rounds"], row["exchange_s"]), (0, 0, 0))

    def test_refusals(self):
        for arguments, words in [
            (["--link", "fast"], ["--link", "'fast'"]),
            (["--latency", "1"], ["--latency", "'1'"]),
            (["--exchange", "ring"], ["--exchange", "ring"]),
            (["--exchange", "hierarchical"], ["--exchange"]),
            (["--density", 0], ["--density", "(0, 1]"]),
            (["--ranks", 0], ["--ranks"]),
            (["--params", 2000000000, "--ranks", 4096, "--exchange", "dense"], ["dense on 4096 ranks needs about"]),
        ]:
            with self.subTest(arguments):
                self.assert_refused(skim("simulate", *self.LINK, *arguments), *words)


if __name__ == "__main__":
    unittest.main()
