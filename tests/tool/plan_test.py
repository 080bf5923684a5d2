"""skim plan, skim bench network and skim simulate, as a person or a script uses them.

Needs SKIM_TOOL (the binary); SKIM_HAS_MPI=1 where the build has MPI.
"""

import json
import re
import signal
import unittest

from tool_test import HAS_MPI, LIMIT, Case, is_running, pids_of, skim

FIELDS = {"exchange", "density", "step_s", "exchange_s", "speed_up", "bytes", "advised", "entry_sends"}
PAPER = ["--link", "1gbit", "--latency", "0.4ms", "--compute", "0.2s"]


def plan(*arguments):
    return skim("plan", *arguments)


class Plan(Case):
    def rows(self, *arguments):
        done = plan(*arguments, "--json", "-")
        self.assert_ok(done)
        return json.loads(done.stdout)

    def test_every_exchange_at_every_density_beside_dense(self):
        rows = self.rows("--parameters", "25.6e6", "--ranks", 32, *PAPER, "--density", "0.01,0.001")
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
        dense = self.rows("--parameters", "1e6", "--ranks", 4, "--link", "1gbit", "--latency", "1ms",
                          "--compute", "10ms", "--add-ns", 0)[0]
        # 6 rounds of 1 ms; 1.5 times 4 MB, and 48 bytes of each other rank, at 8 ns a byte.
        self.assertAlmostEqual(dense["exchange_s"], 6e-3 + (6e6 + 144) * 8e-9)
        self.assertEqual(dense["bytes"], 6e6 + 144)
        self.assertAlmostEqual(dense["step_s"], 10e-3 + dense["exchange_s"])

    def test_raw_frames_are_larger_and_overlap_hides_the_link(self):
        case = ["--parameters", "1e7", "--ranks", 8, *PAPER, "--density", "0.001"]
        coded, raw = self.rows(*case), self.rows(*case, "--index-code", "raw32")
        hidden = self.rows(*case, "--overlap", 1)
        for c, r, h in list(zip(coded, raw, hidden))[1:]:
            self.assertLess(c["bytes"], 0.8 * r["bytes"])
            self.assertLess(h["step_s"], c["step_s"])

    def test_the_largest_density_within_5_percent_of_the_shortest_step_is_advised(self):
        cases = [[*PAPER, *more] for more in ([], ["--density", "0.3,0.05,0.01,0.003,0.001"],
                                              ["--compute", "4s"], ["--compute", "50s"],
                                              ["--density", "1,0.5"], ["--overlap", 1])]
        for case in cases:
            with self.subTest(case):
                rows = self.rows("--parameters", "25.6e6", "--ranks", 32, *case)
                shortest = min(r["step_s"] for r in rows)
                density = max(r["density"] for r in rows if r["step_s"] <= 1.05 * shortest)
                there = [r for r in rows if r["density"] == density]
                (advised,) = [r for r in rows if r["advised"]]
                self.assertEqual(advised, min(there, key=lambda r: r["step_s"]))

    def test_a_tiny_density_is_not_advised_for_a_gain_of_a_few_percent(self):
        case = ["--parameters", "25.6e6", "--ranks", 32, *PAPER, "--compute", "4s"]
        rows = self.rows(*case, "--density", "1e-6,0.01")
        shortest = min(rows, key=lambda r: r["step_s"])
        (advised,) = [r for r in rows if r["advised"]]
        self.assertEqual((shortest["density"], advised["density"]), (1e-6, 0.01))
        self.assertLess(shortest["step_s"], advised["step_s"])
        done = plan(*case, "--density", "1e-6,0.01")
        (marked,) = [line for line in done.stdout.splitlines() if line.endswith("<- advised")]
        self.assertEqual(marked.split()[:2], ["0.01", advised["exchange"]])
        self.assertRegex(done.stdout, rf"\nadvised: {advised['exchange']} at density 0.01: a step of "
                                      r"[\d.]+ ms, [\d.]+ times as fast as dense\n")
        self.assertRegex(done.stdout, r"\nThe shortest step, \S+ at density 1e-06, is [\d.]+ % shorter\.\n")
        # Where it gains much, it is.
        rows = self.rows(*case, "--density", "1e-6,0.01", "--compute", "10ms")
        (advised,) = [r for r in rows if r["advised"]]
        self.assertEqual(advised["density"], 1e-6)

    def test_an_exchange_that_delivers_all_is_named_beside_one_that_does_not(self):
        case = ["--parameters", "25.6e6", "--ranks", 32, *PAPER, "--compute", "200ms", "--density", "0.001"]
        rows = self.rows(*case)
        (advised,) = [r for r in rows if r["advised"]]
        self.assertEqual(advised["exchange"], "gtopk")
        best = min((r for r in rows if r["exchange"] in ("allgather", "sparcml")), key=lambda r: r["step_s"])
        done = plan(*case)
        self.assertRegex(done.stdout, rf"\ngtopk delivers about k entries .* {best['exchange']} delivers all of them, ")
        (ms,) = re.findall(r"better at equal density: a step of (\S+) ms\.", done.stdout)
        self.assertAlmostEqual(float(ms), 1e3 * best["step_s"], delta=1e-3 * float(ms))
        on_two = plan(*case, "--ranks", 2).stdout  # the last --ranks counts
        self.assertIn("advised: allgather", on_two)
        self.assertNotIn("delivers", on_two)

    def test_of_equal_rows_the_first_is_advised(self):
        rows = self.rows("--parameters", "25.6e6", "--ranks", 32, *PAPER, "--density", "0.01,0.01")
        half = rows[1:len(rows) // 2 + 1]
        (first,) = [i for i, r in enumerate(rows) if r["advised"]]
        self.assertEqual(rows[first], min(half, key=lambda r: r["step_s"]))
        self.assertLessEqual(first, len(half))
        self.assertEqual({**rows[first + len(half)], "advised": True}, rows[first])

    def test_it_says_when_not_to_compress(self):
        fast = ["--parameters", "1e6", "--ranks", 2, "--link", "400gbit", "--latency", "2us", "--compute", "1ms"]
        near = ["--parameters", "25.6e6", "--ranks", 32, *PAPER, "--compute", "60s"]
        for case, words in [(fast, "do not compress: the dense sum has the shortest step\n"),
                            (near, "do not compress: the step of the dense sum is within 5 % of the shortest\n")]:
            with self.subTest(words):
                done = plan(*case, "--steps", 20)
                self.assert_ok(done)
                self.assertTrue(done.stdout.endswith(words), done.stdout)  # nothing on quality
                (advised,) = [r for r in self.rows(*case) if r["advised"]]
                self.assertEqual(advised["exchange"], "dense")
        # The step of `near` is not the shortest.
        self.assertGreater(max(r["speed_up"] for r in self.rows(*near)), 1.0)

    RUN = ["--parameters", "25.6e6", "--ranks", 32, *PAPER]
    QUALITY = [*RUN, "--density", "0.01"]

    def test_quality_of_a_run_of_that_length(self):
        level, published = "ended level with dense at S = 28.", "Published runs with S >= 50"
        for steps, s, words, others in [
            (90, "0.9", "At S = 1 a small GPT on 2 ranks ended ", [level, published]),
            (2799, "28", "At S = 10 a small GPT on 2 ranks ended ", [level, published]),
            (2800, "28", level, ["behind", published]),
            (4999, "50", level, ["behind", published]),
            (5000, "50", published, ["behind"]),
        ]:
            with self.subTest(steps):
                done = plan(*self.QUALITY, "--steps", steps)
                self.assert_ok(done)
                self.assertIn(f"quality: S = density x steps = {s}: ", done.stdout)
                self.assertIn(words, done.stdout)
                for other in others:
                    self.assertNotIn(other, done.stdout)
                for r in self.rows(*self.QUALITY, "--steps", steps):
                    self.assertAlmostEqual(r["entry_sends"], r["density"] * steps)

    def test_the_smallest_density_of_known_quality_and_its_step(self):
        smallest = (r"\nAt S = 28, which needs density (\S+), momentum correction was level with dense\.\n"
                    r"(\S+) at that density: a step of (\S+) ms, ")
        for steps, density in [(2799, "0.011"), (1000, "0.028"), (390, "0.072")]:
            with self.subTest(steps):
                done = plan(*self.QUALITY, "--steps", steps)
                self.assert_ok(done)
                self.assertRegex(done.stdout, smallest)
                d, exchange, ms = re.search(smallest, done.stdout).groups()
                self.assertEqual(d, density)
                rows = self.rows(*self.RUN, "--density", d)
                best = min(rows[1:], key=lambda r: r["step_s"])
                self.assertEqual(exchange, best["exchange"])
                self.assertAlmostEqual(float(ms), 1e3 * best["step_s"], delta=1e-3 * float(ms))
        # Dense is the fastest exchange at 0.9, and the only one in a run of 28 steps.
        for steps, words in [(32, "At that density dense is the fastest exchange."),
                             (28, "Only dense exchange reaches S = 28 in so few steps."),
                             (1, "level with dense from S = 28 on, which takes more steps.")]:
            done = plan(*self.QUALITY, "--steps", steps)
            self.assert_ok(done)
            self.assertTrue(done.stdout.endswith(words + "\n"), done.stdout)

    def test_without_steps_it_says_how_many_the_density_needs(self):
        for density, steps in [("0.01", 2800), ("0.003", 9334), ("1e-06", 28000000)]:
            done = plan(*self.RUN, "--density", density)
            self.assert_ok(done)
            self.assertRegex(done.stdout, rf"\nquality: density {density} needs {steps} steps for S = ")
            for r in self.rows(*self.QUALITY):
                self.assertIsNone(r["entry_sends"])

    def test_a_fit_gives_link_and_speeds(self):
        fit = {"alpha_s": 1e-3, "beta_s_per_byte": 8e-9, "select_s": 1e-9, "merge_s": 0.0, "add_s": 0.0}
        path = self.dir / "fit.json"
        path.write_text(json.dumps(fit))
        case = ["--parameters", "1e6", "--ranks", 4, "--compute", "10ms", "--density", "0.01"]
        rows = self.rows(*case, "--fit", path)
        self.assertAlmostEqual(rows[0]["exchange_s"], 6e-3 + (6e6 + 144) * 8e-9)
        self.assertAlmostEqual(rows[1]["select_s"], 1e-3)
        # What stands on the command line wins.
        rows = self.rows(*case, "--fit", path, "--latency", "0ms", "--select-ns", 0)
        self.assertAlmostEqual(rows[0]["exchange_s"], (6e6 + 144) * 8e-9)
        self.assertEqual(rows[1]["select_s"], 0.0)

    def test_hosts_of_several_ranks_show_hierarchical(self):
        case = ["--parameters", "1e6", "--ranks", 8, *PAPER, "--density", "0.01", "--merge-ns", 0]
        alone = {r["exchange"]: r for r in self.rows(*case)}
        hosts = {r["exchange"]: r for r in self.rows(*case, "--hosts", 2, "--inside-link", "100gbit")}
        self.assertEqual(hosts.keys() - alone.keys(), {"hierarchical"})
        # Between two hosts there is one swap on the slow link.
        self.assertLess(hosts["hierarchical"]["exchange_s"], alone["gtopk"]["exchange_s"])
        slow = self.rows(*case, "--hosts", 2, "--inside-link", "100gbit", "--inside-latency", "10ms")
        (slow,) = [r for r in slow if r["exchange"] == "hierarchical"]
        self.assertGreater(slow["exchange_s"], hosts["hierarchical"]["exchange_s"] + 0.01)

    def test_steps_that_take_no_time_are_equally_fast(self):
        for row in self.rows("--parameters", "1e6", "--ranks", 1, "--link", "1gbit", "--compute", "0s", "--select-ns", 0):
            self.assertEqual((row["step_s"], row["speed_up"]), (0, 1), row["exchange"])

    def test_refusals(self):
        good = ["--parameters", "1e6", "--ranks", 4, *PAPER]
        (self.dir / "bad.json").write_text("{}")
        for arguments, words in [
            (["--ranks", 4, "--link", "1gbit"], ["--compute", "required"]),
            (["--compute", "1s"], ["--link RATE", "--fit FILE"]),
            ([*good, "--link", "1gb"], ["--link", "such as 100mbit", "'1gb'"]),
            ([*good, "--link", "-1gbit"], ["--link", "'-1gbit'"]),
            ([*good, "--link", "1e-320kbit"], ["--link: expected a rate in [1e-300, 1e300] bit/s, got '1e-320kbit'"]),
            ([*good, "--link", "1e300gbit"], ["--link: expected a rate in [1e-300, 1e300] bit/s", "'1e300gbit'"]),
            ([*good, "--latency", "0.4"], ["--latency", "such as 200us", "'0.4'"]),
            ([*good, "--compute", "soon"], ["--compute", "'soon'"]),
            ([*good, "--density", "0.1,2"], ["--density", "(0, 1]", "2"]),
            ([*good, "--density", "0.1,,0.2"], ["--density: expected a value before and after each comma, got '0.1,,0.2'"]),
            ([*good, "--parameters", "0.5"], ["--parameters", "at least 1"]),
            ([*good, "--ranks", 0], ["--ranks"]),
            ([*good, "--ranks", 4, "--hosts", 8, "--inside-link", "10gbit"], ["--hosts 8", "--ranks 4"]),
            ([*good, "--hosts", 2], ["--hosts", "--inside-link"]),
            ([*good, "--inside-link", "10gbit"], ["--hosts", "--inside-link"]),
            ([*good, "--overlap", "nan"], ["--overlap: expected a number in [0, 1], got 'nan'"]),
            ([*good, "--steps", 0], ["--steps", "0"]),
            ([*good, "--steps", -5], ["--steps", "-5"]),
            ([*good, "--steps", "many"], ["--steps", "many"]),
            ([*good, "--steps", "1.5"], ["--steps", "1.5"]),
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
        self.assert_ok(plan("--parameters", "1e6", "--ranks", 2, "--compute", "1ms", "--fit", path))

    @unittest.skipUnless(HAS_MPI, "this build has no MPI")
    def test_a_signal_ends_it_at_once(self):
        for signal_, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            path = self.dir / "fit.json"
            run = self.start_skim("bench", "network", "--largest", 1 << 30, "--json", path)
            self.wait_until(run, lambda: len(pids_of(self.dir)) == 2, "the ranks did not start")
            ranks = pids_of(self.dir).values()
            run.send_signal(signal_)
            self.assertEqual(run.communicate(timeout=LIMIT), ("", ""))
            self.assertEqual(run.returncode, status)
            self.assertFalse([pid for pid in ranks if is_running(pid)])
            self.assertFalse(path.exists())

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
        case = ["--parameters", 20000, "--ranks", "4,6", "--link-only"]
        rows = self.rows(*case)
        self.assertEqual(rows, self.rows(*case))
        dense = [r for r in rows if r["exchange"] == "dense"]
        self.assertEqual([r["ranks"] for r in dense], [4, 6])
        for r in dense:
            p = r["ranks"]
            # Chunks differ by an entry where P does not divide n: 4 bytes a round.
            sent = 2 * (p - 1) / p * 80000 + 48 * (p - 1)
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
        case = ["--parameters", 100000, "--ranks", 8, "--exchange", "gtopk"]
        (link,), (both,) = self.rows(*case, "--link-only"), self.rows(*case)
        self.assertEqual(link["bytes"], both["bytes"])
        self.assertGreater(both["exchange_s"], link["exchange_s"])
        self.assertGreater(both["select_s"], 0)

    def test_the_first_step_of_many_ranks(self):
        (row,) = self.rows("--parameters", 20000, "--ranks", 100, "--exchange", "gtopk", "--link-only", "--steps", 1)
        self.assertEqual(row["rounds"], 8)

    def test_auto_takes_the_cheapest(self):
        for density in (0.001, 0.9):
            case = ["--parameters", 20000, "--ranks", 8, "--link-only", "--density", density, "--latency", "1us"]
            rows = {r["exchange"]: r for r in self.rows(*case, "--exchange", "auto,dense,gtopk")}
            auto = rows["auto"]
            self.assertRegex(auto["decision"], r"^(dense|gtopk|allgather|oktopk|sparcml)\S* [\d.]+ \ws, ")
            self.assertLessEqual(auto["exchange_s"], 1.05 * min(r["exchange_s"] for r in rows.values()), auto)
            self.assertEqual(auto["decision"].startswith("dense "), density == 0.9, auto)
            self.assertNotIn("decision", rows["gtopk"])
        self.assertNotIn("auto", {r["exchange"] for r in self.rows("--parameters", 20000, "--link-only")})

    def test_one_rank_sends_nothing(self):
        for row in self.rows("--parameters", 20000, "--ranks", 1, "--link-only"):
            self.assertEqual((row["bytes"], row["rounds"], row["exchange_s"]), (0, 0, 0))

    def test_refusals(self):
        for arguments, words in [
            (["--link", "fast"], ["--link", "'fast'"]),
            (["--latency", "1"], ["--latency", "'1'"]),
            (["--latency", "1e9s", "--parameters", 1000], ["the simulated link is too slow"]),
            (["--link", "1e-300kbit", "--parameters", 1000], ["the simulated link is too slow"]),
            (["--exchange", "ring"], ["--exchange", "ring"]),
            (["--exchange", "hierarchical"], ["--exchange"]),
            (["--density", 0], ["--density", "(0, 1]"]),
            (["--common", "nan"], ["--common: expected a number in [0, 1], got 'nan'"]),
            (["--ranks", 0], ["--ranks"]),
            (["--parameters", 2000000000, "--ranks", 4096, "--exchange", "dense"], ["dense on 4096 ranks needs about"]),
        ]:
            with self.subTest(arguments):
                self.assert_refused(skim("simulate", *self.LINK, *arguments), *words)


if __name__ == "__main__":
    unittest.main()
