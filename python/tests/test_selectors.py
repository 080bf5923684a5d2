"""Selectors against NumPy's sort."""

import unittest

import numpy as np
import skim


def largest(x, k):
    """Indices of the k largest magnitudes that are not 0, ascending; ties to the lower index."""
    order = np.argsort(-np.abs(x.astype(np.float64)), kind="stable")[:k]
    return np.sort(order[x[order] != 0])


class Exact(unittest.TestCase):
    def test_equals_a_stable_sort(self):
        rng = np.random.default_rng(1)
        for n, k in ((1, 1), (7, 3), (1000, 10), (100_000, 1000), (5000, 5000), (300, 0)):
            for spread in (3, 10**6):  # few values: many ties
                x = rng.integers(-spread, spread + 1, n).astype(np.float32)
                with self.subTest(n=n, k=k, spread=spread):
                    indices, values = skim.top_k(x, k)
                    np.testing.assert_array_equal(indices, largest(x, k))
                    np.testing.assert_array_equal(values, x[indices])
                    self.assertEqual((indices.dtype, values.dtype), (np.uint32, np.float32))

    def test_accumulates_what_was_not_sent(self):
        rng = np.random.default_rng(2)
        n, k = 20_000, 200
        selector, residual, expected = skim.Selector(), np.zeros(n, np.float32), np.zeros(n, np.float32)
        for step in range(5):
            g = rng.standard_normal(n).astype(np.float32)
            expected += g
            got = selector.select(g, k, residual=residual, step=step)
            np.testing.assert_array_equal(residual, expected)
            np.testing.assert_array_equal(got.indices, largest(expected, k))
            self.assertEqual(got.report.threshold, np.abs(got.values).min())
            self.assertAlmostEqual(got.report.kept_norm2, float(np.sum(got.values.astype(np.float64) ** 2)), delta=1e-3)
            self.assertAlmostEqual(got.report.total_norm2, float(np.sum(expected.astype(np.float64) ** 2)), delta=0.1)
            self.assertAlmostEqual(got.report.gradient_norm2, float(np.sum(g.astype(np.float64) ** 2)), delta=0.1)
            residual[got.indices] -= got.values
            expected[got.indices] = 0

    def test_scale_decay_and_threshold(self):
        residual = np.array([8, 0, -2, 0], np.float32)
        got = skim.Selector().select(
            np.array([2, 4, 6, 0], np.float32), 4, residual=residual, decay=0.5, scale=2.0, threshold=2.0
        )
        np.testing.assert_array_equal(residual, [5, 2, 2, 0])
        np.testing.assert_array_equal(got.indices, [0, 1, 2])
        got = skim.Selector().select(np.zeros(4, np.float32), 4, residual=residual, threshold=3.0)
        np.testing.assert_array_equal(got.indices, [0])

    def test_what_is_not_finite_never_enters_a_residual(self):
        g = np.array([1, np.nan, np.inf, 2], np.float32)
        residual = np.zeros(4, np.float32)
        got = skim.Selector().select(g, 4, residual=residual)
        self.assertEqual(got.report.non_finite, 2)
        np.testing.assert_array_equal(residual, [1, 0, 0, 2])
        np.testing.assert_array_equal(skim.top_k(g, 1)[0], [1])

    def test_halves_strides_and_read_only(self):
        x = np.array([1, -4, 2, 3], np.float16)
        np.testing.assert_array_equal(skim.top_k(x, 2)[0], [1, 3])
        wide = np.arange(10, dtype=np.float32)
        np.testing.assert_array_equal(skim.top_k(wide[::2], 2)[1], [6, 8])
        wide.flags.writeable = False
        np.testing.assert_array_equal(skim.top_k(wide, 1)[0], [9])


class Rules(unittest.TestCase):
    def test_all_of_them_take_entries_as_they_stand(self):
        rng = np.random.default_rng(3)
        n, k = 50_000, 500
        g = rng.laplace(size=n).astype(np.float32)
        for rule in skim.select_rules:
            with self.subTest(rule=rule):
                residual = np.zeros(n, np.float32)
                got = skim.Selector(rule, **({"select_threshold": 4.0} if rule == "threshold" else {})).select(g, k, residual=residual)
                self.assertGreater(len(got.indices), 0)
                self.assertTrue(np.all(np.diff(got.indices.astype(np.int64)) > 0))
                np.testing.assert_array_equal(got.values, residual[got.indices])
                if rule == "threshold":
                    np.testing.assert_array_equal(got.indices, np.flatnonzero(np.abs(g) >= 4.0))

    def test_per_parameter(self):
        g = np.array([10, 9, 8, 1, 2, 3], np.float32)
        selector = skim.Selector(per_parameter=True)
        got = selector.select(g, 2, layout=[("a", 3), ("b", 3)])
        np.testing.assert_array_equal(got.indices, [0, 5])
        with self.assertRaisesRegex(skim.InvalidArgument, "layout"):
            selector.select(g, 2, layout=[("a", 3)])

    def test_state(self):
        rng = np.random.default_rng(4)
        first, second = skim.Selector("sidco"), skim.Selector("sidco")
        for step in range(20):
            first.select(rng.laplace(size=5000).astype(np.float32), 20, step=step)
        second.load(first.save())
        g = rng.laplace(size=5000).astype(np.float32)
        np.testing.assert_array_equal(
            first.select(g, 20, step=20).indices, second.select(g, 20, step=20).indices
        )
        self.assertEqual(first.save(), second.save())
        with self.assertRaises(skim.StateError):
            second.load(first.save()[:-1])


class Mistakes(unittest.TestCase):
    def test_are_refused_and_nothing_changes(self):
        g, selector = np.ones(4, np.float32), skim.Selector()
        residual = np.zeros(4, np.float32)
        for why, call in (
            ("k must be <= n", lambda: selector.select(g, 5, residual=residual)),
            ("the residual has 3 entries, the gradient 4", lambda: selector.select(g, 1, residual=residual[:3])),
            ("decay must be in", lambda: selector.select(g, 1, residual=residual, decay=2.0)),
            ("scale must be > 0", lambda: selector.select(g, 1, residual=residual, scale=0.0)),
            ("float32, float16 or bfloat16", lambda: skim.top_k(np.ones(4), 1)),
            ("no 'topk'", lambda: skim.Selector("topk")),
        ):
            with self.subTest(why=why), self.assertRaisesRegex(skim.InvalidArgument, why):
                call()
        np.testing.assert_array_equal(residual, np.zeros(4))

    def test_a_residual_that_would_be_copied_is_refused(self):
        with self.assertRaises(TypeError):
            skim.Selector().select(np.ones(4, np.float32), 1, residual=np.zeros(4))
        with self.assertRaises(TypeError):
            skim.Selector().select(np.ones(4, np.float32), 1, residual=np.zeros(8, np.float32)[::2])


if __name__ == "__main__":
    unittest.main()
