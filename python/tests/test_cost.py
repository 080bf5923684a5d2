"""The cost model against hand-made formulas, and against simulated groups."""

import unittest

import numpy as np
import skim
from ranks import on_ranks

LINK = skim.Link(1e-3, 1e-8)


class Formulas(unittest.TestCase):
    def test_dense_ring(self):
        ranks, n = 4, 1e6
        cost = skim.predict("dense", ranks=ranks, n=n, k=1, link=skim.Link(1e-3, 1e-8))
        self.assertEqual(cost.rounds, 2 * (ranks - 1))
        # Each rank sends 2 (P - 1) / P of the floats, and each rank's note of 48 bytes.
        self.assertAlmostEqual(cost.bytes, 2 * (ranks - 1) / ranks * 4 * n, delta=48 * ranks)
        self.assertAlmostEqual(cost.link_s, cost.rounds * 1e-3 + cost.bytes * 1e-8, delta=1e-5)
        self.assertEqual(cost.total_s, cost.exchange_s + cost.select_s)

    def test_local_work(self):
        local = skim.LocalSpeeds(select_s=1e-9, merge_s=1e-8, add_s=1e-9)
        free = skim.predict("allgather", ranks=4, n=1e6, k=1e3, link=LINK)
        cost = skim.predict("allgather", ranks=4, n=1e6, k=1e3, link=LINK, local_speeds=local)
        self.assertAlmostEqual(cost.select_s, 1e-3)
        self.assertGreater(cost.merge_s, free.merge_s)
        self.assertEqual((cost.link_s, free.select_s, free.merge_s), (free.link_s, 0.0, 0.0))

    def test_the_choice(self):
        for ranks in (2, 3, 8):
            costs = {
                name: skim.predict(name, ranks=ranks, n=1e6, k=1e3, link=LINK).total_s for name in skim.exchanges
            }
            best = skim.cheapest(ranks=ranks, n=1e6, k=1e3, link=LINK, among=list(skim.exchanges))
            self.assertEqual(best.cost.total_s, min(costs.values()))
            self.assertEqual(costs[best.exchange], best.cost.total_s)
            self.assertTrue(best.reason.startswith(f"{best.exchange} {skim.duration_text(best.cost.total_s)}"))

    def test_hosts(self):
        def rounds(hosts):
            return skim.predict(
                "hierarchical", ranks=8, n=1e6, k=1e3, link=LINK, hosts=hosts, inside_link=skim.Link(1e-9, 1e-12)
            ).link_s

        self.assertLess(rounds(2), rounds(8))

    def test_overlap(self):
        cost = skim.predict("dense", ranks=2, n=1e6, k=1, link=LINK)
        self.assertEqual(skim.step_seconds(1.0, cost), 1.0 + cost.total_s)
        self.assertLess(skim.step_seconds(1.0, cost, overlap=0.5), 1.0 + cost.total_s)

    def test_mistakes(self):
        for why, call in (
            ("no 'ring'", lambda: skim.predict("ring", ranks=2, n=10, k=1, link=LINK)),
            ("no 'auto'", lambda: skim.predict("auto", ranks=2, n=10, k=1, link=LINK)),
            ("", lambda: skim.predict("dense", ranks=0, n=10, k=1, link=LINK)),
            ("no exchange to choose from", lambda: skim.cheapest(ranks=3, n=10, k=1, link=LINK, among=[])),
            ("among: no 'ring'", lambda: skim.cheapest(ranks=3, n=10, k=1, link=LINK, among=["ring"])),
        ):
            with self.assertRaisesRegex(skim.InvalidArgument, why):
                call()


class Simulation(unittest.TestCase):
    def test_takes_what_the_model_says(self):
        n, k, ranks = 100_000, 500, 4
        def run(rank, comm):
            exchange = skim.Exchange(comm, "allgather", index_code="raw32")
            indices = np.arange(k) * ranks + rank
            began = comm.now_ns
            exchange.run(indices, np.ones(k, np.float32), n, k=k)
            return comm.now_ns - began, comm.traffic

        results = on_ranks(skim.simulated_group(ranks, LINK, processor_time=False), run)
        cost = skim.predict("allgather", ranks=ranks, n=n, k=k, link=LINK, index_code="raw32")
        for ns, traffic in results:
            self.assertAlmostEqual(ns / 1e9, cost.link_s, delta=0.01 * cost.link_s)
            self.assertEqual(traffic.rounds, cost.rounds)
            self.assertAlmostEqual(traffic.sent_bytes, cost.bytes, delta=0.01 * cost.bytes)

    def test_the_link_is_measured(self):
        got = on_ranks(
            skim.simulated_group(3, LINK, processor_time=False),
            lambda rank, comm: comm.measure_link(largest=1 << 20, budget_s=0.01),
        )
        for link in got:
            self.assertAlmostEqual(link.alpha_s, LINK.alpha_s, delta=1e-6)
            self.assertAlmostEqual(link.beta_s_per_byte, LINK.beta_s_per_byte, delta=1e-10)

    def test_mistakes(self):
        with self.assertRaisesRegex(skim.InvalidArgument, "two ranks"):
            skim.in_process_group(1)[0].measure_link()
        with self.assertRaisesRegex(skim.InvalidArgument, "largest must be at least 4 bytes"):
            skim.in_process_group(2)[0].measure_link(largest=1)


if __name__ == "__main__":
    unittest.main()
