"""Bounds and measures against NumPy."""

import unittest

import numpy as np
from skim import InvalidArgument, analysis, top_k


def ratio(u, k):
    u = u.astype(np.float64)
    return np.sort(u**2)[: u.size - k].sum() / np.sum(u**2)


class Measures(unittest.TestCase):
    u = np.random.default_rng(1).laplace(size=200_000).astype(np.float32)

    def test_ratio(self):
        for k in (0, 1, 2000, self.u.size):
            self.assertAlmostEqual(analysis.top_k_ratio(self.u, k), ratio(self.u, k), places=12)

    def test_distributions_and_bounds(self):
        normal = np.random.default_rng(2).standard_normal(self.u.size).astype(np.float32)
        for kappa in (0.001, 0.01, 0.1, 0.5):
            k = int(kappa * self.u.size)
            self.assertAlmostEqual(analysis.laplace_ratio(kappa), ratio(self.u, k), delta=0.005)
            self.assertAlmostEqual(analysis.normal_ratio(kappa), ratio(normal, k), delta=0.005)
            for u in (self.u, normal):
                self.assertLess(ratio(u, k), analysis.unimodal_bound(kappa))
            self.assertAlmostEqual(analysis.unimodal_bound(kappa), (1 - kappa) ** 3)
            self.assertAlmostEqual(analysis.bell_bound(kappa), 1 - analysis.bell_contraction(k, self.u.size))
            self.assertAlmostEqual(analysis.general_bound(kappa), 1 - kappa)

    def test_moments(self):
        u = self.u.astype(np.float64)
        got, z = analysis.moments(self.u), (u - u.mean()) / u.std()
        self.assertAlmostEqual(got.mean, u.mean())
        self.assertAlmostEqual(got.std, u.std())
        self.assertAlmostEqual(got.skewness, np.mean(z**3), places=6)
        self.assertAlmostEqual(got.excess_kurtosis, np.mean(z**4) - 3, places=6)

    def test_shape(self):
        self.assertLess(analysis.distance_from_unimodal(self.u), 0.01)
        self.assertGreater(analysis.distance_from_unimodal(self.u + np.sign(self.u) * 5), 0.3)

    def test_server_constants(self):
        rng = np.random.default_rng(3)
        u = [rng.standard_normal(1000).astype(np.float32) for _ in range(3)]
        mean, h, k = sum(x.astype(np.float64) for x in u) / 3, np.zeros(1000, np.float32), 50

        def kept(x, k):
            out = np.zeros(1000)
            at, _ = top_k(x.astype(np.float32), k)
            out[at] = x[at]
            return out

        each = sum(kept(x, k) for x in u) / 3
        norm = np.linalg.norm(mean)
        one = np.linalg.norm(kept(mean, k) - each) / norm
        two = np.linalg.norm(kept(mean, 20) - kept(each, 20)) / norm
        g = mean.astype(np.float32)
        self.assertAlmostEqual(analysis.one_way_constant(u, g, k), one, places=5)
        self.assertAlmostEqual(analysis.two_way_constant(u, g, h, k=k, k_down=20), two, places=5)


class Convergence(unittest.TestCase):
    def test_formulas(self):
        got = analysis.convergence_bound(gap=2.0, smoothness=3.0, second_moment=5.0, delta=0.1, steps=99.0)
        self.assertAlmostEqual(got, (2 * 2 + 3 * 5) / 10 + 4 * 9 * 5 * 0.9 / (0.01 * 100))
        left_out, a = np.array([3.0, 2.0, 1.0]), 1 - 0.5 * 0.1
        weights = a ** np.array([2, 1, 0])
        self.assertAlmostEqual(
            analysis.error_bound(gap=7.0, mu=0.5, step_size=0.1, left_out=left_out),
            a**3 * 7 + 0.05 * np.sum(weights * left_out),
        )
        # mu = 0: L^2 / 2 times the sum of what was late.
        late = analysis.feedback_bound(
            gap=7.0, mu=0.0, smoothness=3.0, step_sizes=np.array([0.2, 0.1]), residuals=np.array([0.0, 4.0])
        )
        self.assertAlmostEqual(late, 7 + 4.5 * 0.1 * 4.0)

    def test_mistakes(self):
        for call in (
            lambda: analysis.bell_bound(1.5),
            lambda: analysis.top_k_ratio(np.ones(3, np.float32), 4),
            lambda: analysis.moments(np.array([], np.float32)),
            lambda: analysis.moments(np.array([np.nan], np.float32)),
            lambda: analysis.one_way_constant([np.ones(3, np.float32)], np.ones(2, np.float32), 1),
        ):
            with self.assertRaises(InvalidArgument):
                call()


if __name__ == "__main__":
    unittest.main()
