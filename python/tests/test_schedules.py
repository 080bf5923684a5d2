"""Schedules: the published lists, what follows a budget, and one object for many reducers."""

import unittest

import numpy as np
import skim
from ranks import on_ranks


def densities(schedule, epochs):
    return [schedule.density(skim.Progress(step=e, epoch=float(e))).up for e in range(epochs)]


class Lists(unittest.TestCase):
    def test_values(self):
        self.assertEqual(densities(skim.constant_density(0.3), 3), [0.3] * 3)
        self.assertEqual(densities(skim.listed_density([0.5, 0.25], 0.1), 4), [0.5, 0.25, 0.1, 0.1])
        np.testing.assert_allclose(
            densities(skim.geometric_density(first=0.4, last=0.1, epochs=2), 4), [0.4, 0.2, 0.1, 0.1]
        )
        self.assertEqual(skim.dgc_warm_up(), [0.25, 0.0625, 0.015625, 0.004])
        self.assertEqual(skim.gaussiank_warm_up(), [0.015625, 0.004, 0.001])
        self.assertEqual(skim.gtopk_warm_up(), [0.004])

    def test_down(self):
        schedule = skim.with_down_density(skim.listed_density([0.5], 0.1), down_density=0.01)
        got = schedule.density(skim.Progress(epoch=1.0))
        self.assertEqual((got.up, got.down, got.threshold, got.at_most_k), (0.1, 0.01, 0.0, False))
        self.assertIn("0.5", schedule.describe())
        self.assertIn(schedule.describe(), repr(schedule))
        self.assertEqual(skim.constant_density(0.1, down_density=0.01).density(skim.Progress()).down, 0.01)
        lengths, server = [10_000], {"ranks": 3, "exchange": "param-server"}
        few, many = (skim.max_step_bytes(lengths, down_density=d, **server)(0.1) for d in (0.01, 0.5))
        self.assertLess(few, many)

    def test_entries(self):
        for density, n in ((0.001, 12345), (0.29, 100), (1e-9, 10), (1.0, 7), (0.5, 0)):
            expected = 0 if n == 0 else min(n, max(1, int(density * n + 1e-9)))
            self.assertEqual(skim.entries(density, n), expected)

    def test_mistakes(self):
        for call in (
            lambda: skim.constant_density(0.0),
            lambda: skim.listed_density([2.0], 0.1),
            lambda: skim.capture_density(1.5),
            lambda: skim.accordion_density(low=0.1, high=2.0),
            lambda: skim.entries(0.0, 5),
            lambda: skim.adaptive_density(cost=lambda d: d, budget=0.0),
        ):
            with self.assertRaises(skim.InvalidArgument):
                call()
        with self.assertRaisesRegex(skim.InvalidArgument, "adaptive_form: no 'best'; there are: even, "):
            skim.adaptive_density(cost=lambda d: d, budget=1.0, adaptive_form="best")
        with self.assertRaisesRegex(skim.InvalidArgument, r"contraction: must be a number in \(0, 1\], not 2"):
            skim.adaptive_density(cost=lambda d: d, budget=1.0, contraction=2)
        with self.assertRaisesRegex(skim.InvalidArgument, "no option 'form'; there are: density_min"):
            skim.adaptive_density(cost=lambda d: d, budget=1.0, form="even")


class Budgets(unittest.TestCase):
    n, ranks, steps = 20_000, 3, 30

    def train(self, schedule, exchange="allgather"):
        """Bytes that the busiest rank sent, and all k."""

        def run(rank, comm):
            reducer = skim.Reducer(comm, density=schedule, exchange=exchange, dense_below=0)
            reducer.set_layout([(0, [("w", self.n)])])
            reducer.set_total_steps(self.steps)
            rng = np.random.default_rng(rank)
            ks = []
            for step in range(self.steps):
                g = rng.laplace(size=self.n).astype(np.float32) / (1 + step)
                ks.append(reducer.reduce(0, g).k)
                reducer.end_step(epoch=step / 3)
            return comm.traffic.sent_bytes, ks

        results = on_ranks(skim.in_process_group(self.ranks), run)
        for _, ks in results:
            self.assertEqual(ks, results[0][1])
        return max(r[0] for r in results), results[0][1]

    def test_bytes_are_never_exceeded_and_used_up(self):
        for exchange in ("allgather", "gtopk"):
            for form in skim.adaptive_forms:
                with self.subTest(exchange=exchange, form=form):
                    cost = skim.max_step_bytes([self.n], ranks=self.ranks, exchange=exchange, dense_below=0)
                    budget = self.steps * cost(0.01)
                    schedule = skim.adaptive_density(
                        cost=cost, budget=budget, adaptive_form=form, n=self.n, ranks=self.ranks
                    )
                    sent, ks = self.train(schedule, exchange)
                    self.assertLessEqual(sent, budget)
                    self.assertLess(budget - sent, cost(max(ks) / self.n))

    def test_a_cost_of_ones_own(self):
        cost = skim.max_step_bytes([self.n], ranks=self.ranks, dense_below=0)
        budget = self.steps * cost(0.01)
        self.assertEqual(
            self.train(skim.adaptive_density(cost=cost, budget=budget)),
            self.train(skim.adaptive_density(cost=lambda density: cost(density), budget=budget)),
        )

    def test_it_spends_by_the_learning_rate(self):
        cost = skim.max_step_bytes([self.n], ranks=self.ranks, dense_below=0)
        schedule = skim.adaptive_density(
            cost=cost, budget=self.steps * cost(0.01), learning_rate=lambda step: 0.1 if step < 5 else 0.01
        )
        _, ks = self.train(schedule)
        self.assertGreater(min(ks[:5]), 3 * max(ks[5:-2]))  # the last steps take what is left

    def test_seconds(self):
        link = skim.Link(1e-4, 1e-8)
        cost = skim.predicted_seconds([self.n], ranks=self.ranks, link=link, compute_s=0.5, dense_below=0)
        k = skim.entries(0.01, self.n)
        exchange_s = skim.predict("allgather", ranks=self.ranks, n=self.n, k=k, link=link).total_s
        self.assertAlmostEqual(cost(0.01), 0.5 + exchange_s, delta=0.02 * exchange_s)
        schedule = skim.adaptive_density(cost=cost, budget=self.steps * cost(0.01), in_bytes=False)
        _, ks = self.train(schedule)
        self.assertLessEqual(sum(cost(k / self.n) for k in ks), self.steps * cost(0.01) * (1 + 1e-9))

    def test_a_budget_that_is_too_small(self):
        cost = skim.max_step_bytes([self.n], ranks=self.ranks, dense_below=0)
        with self.assertRaisesRegex(skim.InvalidArgument, "budget"):
            self.train(skim.adaptive_density(cost=cost, budget=10 * cost(1e-4)))

    def test_rules_without_a_budget(self):
        _, ks = self.train(skim.capture_density(0.5, density_min=0.001, density_max=0.5))
        self.assertTrue(20 <= min(ks) and max(ks) <= 10_000 and len(set(ks)) > 1)
        _, ks = self.train(skim.accordion_density(low=0.01, high=0.1))
        self.assertEqual(set(ks), {200, 2000})
        cost = skim.max_step_bytes([self.n], ranks=self.ranks, dense_below=0)
        _, ks = self.train(skim.descent_per_bit_density(cost))
        self.assertTrue(2 <= min(ks) and max(ks) <= 5000)


if __name__ == "__main__":
    unittest.main()
