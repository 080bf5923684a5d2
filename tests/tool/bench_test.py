"""skim bench select and skim bench wire, as a person or a script uses it.

Needs SKIM_TOOL (the binary).
"""

import json
import pathlib
import unittest

from inspect_test import npy
from tool_test import Case, skim

SETS = pathlib.Path(__file__).parents[2] / "bench" / "index_sets"
FIELDS = {"select", "n", "k", "selected", "shape", "target", "threads", "ns", "add_pass_ns", "ratio",
          "local_step_ratio", "cold_ns", "passes", "bytes_read", "bytes_written",
          "memory_bytes_per_second", "add_pass_of_memory_rate"}


def bench(*arguments):
    return skim("bench", "select", "--seconds", 0.01, *arguments)


class Bench(Case):
    def run_json(self, *arguments):
        done = bench(*arguments, "--json", "-")
        self.assert_ok(done)
        return json.loads(done.stdout)

    def test_one_case_alone_is_an_array_of_one_object_with_every_field(self):
        found = self.run_json("--select", "exact", "--n", 100000, "--density", 0.01, "--shape", "normal",
                              "--threads", 1)
        self.assertEqual(len(found), 1)
        case = found[0]
        self.assertEqual(FIELDS - case.keys(), set())
        self.assertEqual((case["select"], case["n"], case["shape"], case["threads"]),
                         ("exact", 100000, "normal", 1))
        self.assertEqual((case["k"], case["selected"]), (1000, 1000))
        self.assertIn(case["passes"], (1, 2, 3))
        self.assertAlmostEqual(case["ratio"], case["ns"] / case["add_pass_ns"])
        self.assertGreater(case["local_step_ratio"], 0)
        self.assertGreaterEqual(case["bytes_read"], 8 * case["n"])

    def test_lists_make_the_product_of_their_cases(self):
        found = self.run_json("--select", "exact,sidco", "--n", "5000,9000", "--shape", "laplace,equal",
                              "--density", "0.1,0.01", "--threads", 2)
        self.assertEqual(len(found), 16)
        self.assertEqual({c["threads"] for c in found}, {2})
        for case in found:
            if case["select"] == "exact":
                self.assertEqual(case["selected"], case["k"], case)

    def test_every_rule_runs_on_every_shape_and_is_checked(self):
        done = skim("bench", "select", "--help")
        self.assert_ok(done)
        shapes = ["normal", "laplace", "heavy", "zeros", "equal", "leading-bits", "recorded", "nonfinite", "jump"]
        for shape in shapes:
            self.assertIn(shape, done.stdout)
        found = self.run_json("--n", 20000, "--density", 0.01, "--shape", ",".join(shapes))
        rules = {c["select"] for c in found}
        self.assertTrue({"exact", "gaussian", "randomk", "blocktopk", "std::nth_element", "torch.topk"} <= rules)
        self.assertEqual(len(found), len(rules) * len(shapes) - 2)  # the baselines add NaN up
        for case in found:
            if case["select"] == "exact":
                self.assertLessEqual(case["passes"], 3, case)

    def test_a_recorded_gradient_is_taken_from_its_file(self):
        path = npy(self.dir / "g.npy", [float(i % 100) for i in range(500)])
        case, = self.run_json("--select", "exact", "--n", 3000, "--density", 0.001, "--shape", "recorded",
                              "--recorded", path)
        self.assertEqual(case["input"], "g.npy")
        self.assertEqual(case["selected"], 3)

    def test_the_forced_target_is_the_one_that_runs(self):
        done = skim("bench", "select", "--target", "none")
        self.assertEqual(done.returncode, 2)
        names = done.stderr[done.stderr.index("{") + 1:done.stderr.index("}")].split(",")
        for name in names:
            case, = self.run_json("--select", "exact", "--n", 5000, "--target", name)
            self.assertEqual(case["target"], name)

    def test_results_go_to_a_file_and_the_table_to_people(self):
        path = self.dir / "out.json"
        done = bench("--select", "exact", "--n", 5000, "--json", path)
        self.assert_ok(done)
        self.assertEqual(len(json.loads(path.read_text())), 1)
        self.assertIn("exact", done.stdout)

    def test_wrong_usage_is_refused_in_one_line(self):
        self.assert_refused(skim("bench"), "expected select")
        self.assert_refused(skim("bench", "speed"), "got speed")
        self.assert_refused(bench("--select", "best"), "exact")
        self.assert_refused(bench("--shape", "round"), "laplace")
        self.assert_refused(bench("--density", 0), "--density", "(0, 1]")
        self.assert_refused(bench("--n", 1, "--threads", 2), "--n", "threads=2")
        self.assert_refused(bench("--n", 2**32), "--n", "4294967295")
        self.assert_refused(bench("--json", self.dir / "no" / "f.json"), "--json", "cannot open")
        self.assert_refused(bench("--recorded", self.dir / "none.npy"), "none.npy")

CODES = ["raw32", "packed", "rice", "bitmap", "huffman"]


def wire(*arguments):
    return skim("bench", "wire", "--seconds", 0.001, *arguments)


class Wire(Case):
    def run_json(self, *arguments):
        done = wire(*arguments, "--json", "-")
        self.assert_ok(done)
        return json.loads(done.stdout)

    def test_a_case_has_every_field_and_its_parts_add_up(self):
        case, = self.run_json("--n", 100000, "--density", 0.01)
        self.assertEqual((case["n"], case["k"], case["source"], case["set"]), (100000, 1000, "uniform", ""))
        self.assertEqual((case["index_code"], case["chosen"], case["value_code"]), ("rice", True, "f32"))
        self.assertEqual(case["value_bytes"], 4000)
        self.assertEqual(case["bytes"], 24 + case["index_bytes"] + case["value_bytes"])
        # log2 of the number of 1000-subsets of 100000 is 8073.5.
        self.assertAlmostEqual(case["entropy_bytes"], 8073.5 / 8, delta=0.1)
        self.assertAlmostEqual(case["ratio"], case["index_bytes"] / case["entropy_bytes"])
        self.assertLess(case["ratio"], 1.05)
        self.assertGreater(case["encode_ns"], 0)
        self.assertGreater(case["decode_ns"], 0)

    def test_the_recorded_sets_are_found_and_are_below_the_entropy(self):
        found = self.run_json("--recorded", *sorted(SETS.glob("*.frame")))
        self.assertGreaterEqual(len(found), 8)
        for case in found:
            self.assertEqual(case["source"], "recorded")
            self.assertGreaterEqual(case["k"], 1000)
            self.assertLessEqual(case["ratio"], 1.0, case)
        models = {case["set"].split("-")[0] for case in found}
        self.assertTrue({"mlp", "lenet5", "resnet20", "lstm"} <= models)
        done = wire("--help")
        self.assert_ok(done)
        self.assertIn(str(SETS), "".join(done.stdout.split()))

    def test_all_codes_are_the_chosen_one_and_the_others(self):
        found = self.run_json("--n", 3000, "--density", "0.5,0.01", "--all-codes", "--value-code", "q4")
        self.assertEqual(len(found), 2 * len(CODES))
        for density in (0, 1):
            cases = found[density * len(CODES):][:len(CODES)]
            self.assertEqual([c["chosen"] for c in cases], [True] + 4 * [False])
            self.assertEqual(sorted(c["index_code"] for c in cases), sorted(CODES))
            self.assertEqual(min(c["index_bytes"] for c in cases), cases[0]["index_bytes"])
            self.assertEqual({c["value_code"] for c in cases}, {"q4"})

    def test_what_training_selected_can_be_measured(self):
        done = skim("inspect", "--model", "mlp-64", "--steps", 2, "--every", 1, "--density", 0.02, "--bucket-mb", 0,
                    "--out", self.dir, "--pictures", "none", "--save", "--save-frames")
        self.assert_ok(done)
        frames = [self.dir / "selected-1-0.frame", self.dir / "selected-2-0.frame"]
        found = self.run_json("--recorded", *frames)
        self.assertEqual([c["set"] for c in found], [f.stem for f in frames])
        for case in found:
            self.assertEqual((case["n"], case["k"]), (50890, 1017))

    def test_wrong_usage_is_refused_in_one_line(self):
        self.assert_refused(wire("--density", 1), "--density", "(0, 1)")
        self.assert_refused(wire("--density", 1e-12), "--density 1e-12", "give --n", "4294967295")
        self.assert_refused(wire("--n", 1), "--n")
        self.assert_refused(wire("--value-code", "q3"), "q8,q4,q2")
        self.assert_refused(wire("--json", self.dir / "no" / "f.json"), "--json", "cannot open")
        self.assert_refused(wire("--recorded", self.dir), "--recorded", "Is a directory")
        for name, text in (("none.frame", None), ("text.frame", "no frame")):
            if text:
                (self.dir / name).write_text(text)
            self.assert_refused(wire("--recorded", self.dir / name), "--recorded", name, "--save-frames")


if __name__ == "__main__":
    unittest.main()
