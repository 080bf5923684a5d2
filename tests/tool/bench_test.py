"""skim bench select, as a person or a script uses it.

Needs SKIM_TOOL (the binary) and SKIM_HAS_CUDA (0 or 1).
"""

import json
import os
import unittest

from inspect_test import npy
from tool_test import Case, skim

FIELDS = {"algo", "n", "k", "selected", "shape", "target", "threads", "ns", "add_pass_ns", "ratio",
          "local_step_ratio", "cold_ns", "passes", "bytes_read", "bytes_written",
          "memory_bytes_per_second", "add_pass_of_memory_rate", "device"}


def bench(*arguments):
    return skim("bench", "select", "--seconds", 0.01, *arguments)


class Bench(Case):
    def run_json(self, *arguments):
        done = bench(*arguments, "--json", "-")
        self.assert_ok(done)
        return json.loads(done.stdout)

    def test_one_case_alone_is_an_array_of_one_object_with_every_field(self):
        found = self.run_json("--algo", "exact", "--n", 100000, "--density", 0.01, "--shape", "normal",
                              "--threads", 1)
        self.assertEqual(len(found), 1)
        case = found[0]
        self.assertEqual(FIELDS - case.keys(), set())
        self.assertEqual((case["algo"], case["n"], case["shape"], case["threads"]),
                         ("exact", 100000, "normal", 1))
        self.assertEqual((case["k"], case["selected"]), (1000, 1000))
        self.assertEqual(case["device"], "cpu")
        self.assertIn(case["passes"], (1, 2, 3))
        self.assertAlmostEqual(case["ratio"], case["ns"] / case["add_pass_ns"])
        self.assertGreater(case["local_step_ratio"], 0)
        self.assertGreaterEqual(case["bytes_read"], 8 * case["n"])

    def test_lists_make_the_product_of_their_cases(self):
        found = self.run_json("--algo", "exact,sidco", "--n", "5000,9000", "--shape", "laplace,equal",
                              "--density", "0.1,0.01", "--threads", 2)
        self.assertEqual(len(found), 16)
        self.assertEqual({c["threads"] for c in found}, {2})
        for case in found:
            if case["algo"] == "exact":
                self.assertEqual(case["selected"], case["k"], case)

    def test_every_rule_runs_on_every_shape_and_is_checked(self):
        done = skim("bench", "select", "--help")
        self.assert_ok(done)
        shapes = ["normal", "laplace", "heavy", "zeros", "equal", "leading-bits", "recorded", "nonfinite", "jump"]
        for shape in shapes:
            self.assertIn(shape, done.stdout)
        found = self.run_json("--n", 20000, "--density", 0.01, "--shape", ",".join(shapes))
        algos = {c["algo"] for c in found}
        self.assertTrue({"exact", "gaussian", "randomk", "blocktopk", "std::nth_element", "torch.topk"} <= algos)
        self.assertEqual(len(found), len(algos) * len(shapes) - 2)  # the baselines add NaN up
        for case in found:
            if case["algo"] == "exact":
                self.assertLessEqual(case["passes"], 3, case)

    def test_a_recorded_gradient_is_taken_from_its_file(self):
        path = npy(self.dir / "g.npy", [float(i % 100) for i in range(500)])
        case, = self.run_json("--algo", "exact", "--n", 3000, "--density", 0.001, "--shape", "recorded",
                              "--recorded", path)
        self.assertEqual(case["input"], "g.npy")
        self.assertEqual(case["selected"], 3)

    def test_the_forced_target_is_the_one_that_runs(self):
        done = skim("bench", "select", "--target", "none")
        self.assertEqual(done.returncode, 2)
        names = done.stderr[done.stderr.index("{") + 1:done.stderr.index("}")].split(",")
        for name in names:
            case, = self.run_json("--algo", "exact", "--n", 5000, "--target", name)
            self.assertEqual(case["target"], name)

    def test_results_go_to_a_file_and_the_table_to_people(self):
        path = self.dir / "out.json"
        done = bench("--algo", "exact", "--n", 5000, "--json", path)
        self.assert_ok(done)
        self.assertEqual(len(json.loads(path.read_text())), 1)
        self.assertIn("exact", done.stdout)

    def test_on_a_device_the_same_or_one_line_that_says_what_is_missing(self):
        case = ("--device", "cuda", "--algo", "exact,gaussian", "--n", 100001, "--density", 0.001, "--shape", "normal")
        done = bench(*case, "--json", "-")
        if os.environ["SKIM_HAS_CUDA"] == "0":
            self.assert_refused(done, "skim bench select: this build has no CUDA (configure with SKIM_CUDA=ON)")
        elif done.returncode != 0:
            self.assert_refused(done, "skim bench select: no CUDA device")
        else:
            for found in json.loads(done.stdout):
                self.assertEqual(FIELDS - found.keys(), set())
                self.assertEqual((found["target"], found["threads"], found["k"]), ("cuda", 1, 100))
                self.assertNotEqual(found["device"], "cpu")

    def test_what_a_device_has_not_is_refused(self):
        self.assert_refused(bench("--device", "cuda", "--algo", "exact,dgc"), "exact, gaussian", "dgc")
        self.assert_refused(bench("--device", "cuda", "--threads", 2), "--threads", "2")
        here, = self.run_json("--algo", "exact", "--n", 5000)
        self.assert_refused(bench("--device", "cuda", "--target", here["target"]), "--target", "--device cuda")
        self.assert_refused(bench("--device", "tpu"), "cuda")

    def test_wrong_usage_is_refused_in_one_line(self):
        self.assert_refused(skim("bench"), "expected select")
        self.assert_refused(skim("bench", "speed"), "got speed")
        self.assert_refused(bench("--algo", "best"), "exact")
        self.assert_refused(bench("--shape", "round"), "laplace")
        self.assert_refused(bench("--density", 0), "--density", "(0, 1]")
        self.assert_refused(bench("--n", 1, "--threads", 2), "--n", "threads=2")
        self.assert_refused(bench("--n", 2**32), "--n", "4294967295")
        self.assert_refused(bench("--json", self.dir / "no" / "f.json"), "--json", "cannot open")
        self.assert_refused(bench("--recorded", self.dir / "none.npy"), "none.npy")


if __name__ == "__main__":
    unittest.main()
