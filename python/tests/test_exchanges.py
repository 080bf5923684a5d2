"""Exchanges over ranks as threads, against sums in float64; a step put together from the library's parts."""

import unittest

import numpy as np
import skim
from ranks import on_ranks

KINDS = [row.name for row in skim.exchanges.values() if row.selects]


def dense(n, indices, values):
    out = np.zeros(n)
    out[indices] = values
    return out


def total(n, result):
    return result.dense if result.dense is not None else dense(n, result.indices, result.values)


class Sums(unittest.TestCase):
    def test_of_everything_that_was_sent(self):
        n, k = 5000, 50
        for ranks in (1, 2, 3, 4):
            for kind in ("allgather", "sparcml", "hierarchical"):
                with self.subTest(ranks=ranks, kind=kind):
                    def run(rank, comm):
                        indices, values = skim.top_k(
                            np.random.default_rng(rank).standard_normal(n).astype(np.float32), k
                        )
                        exchange = skim.Exchange(comm, kind, between="allgather")
                        self.assertEqual((exchange.name, exchange.contributors), (kind, ranks))
                        got = exchange.run(indices, values, n, k=k)
                        return dense(n, indices, values), total(n, got), got

                    results = on_ranks(skim.in_process_group(ranks), run)
                    expected = sum(r[0] for r in results)
                    for mine, sum_, got in results:
                        np.testing.assert_allclose(sum_, expected, rtol=1e-6, atol=1e-6)
                        np.testing.assert_array_equal(sum_, results[0][1])
                        self.assertEqual(got.returned_indices.size, 0)

    def test_unequal_and_empty_selections_and_statistics(self):
        def run(rank, comm):
            indices = np.arange(rank * 2)
            stats = skim.GroupStats(gradient_norm2=rank + 1.0, non_finite=rank, sent_bytes=10 * rank)
            exchange = skim.Exchange(comm, "allgather")
            return exchange.run(indices, np.ones(rank * 2), 10, k=4, stats=stats)

        for got in on_ranks(skim.in_process_group(3), run):
            np.testing.assert_array_equal(total(10, got), [2, 2, 1, 1, 0, 0, 0, 0, 0, 0])
            self.assertEqual(got.stats.gradient_norm2, 6.0)
            self.assertEqual((got.stats.non_finite, got.stats.sent_bytes), (3, 20))

    def test_the_largest_of_the_sum(self):
        n, k = 3000, 30

        def run(rank, comm):
            g = np.random.default_rng(rank).integers(-999, 1000, n).astype(np.float32)
            indices, values = skim.top_k(g, k)
            got = skim.Exchange(comm, "global-topk").run(indices, values, n, k=k)
            return dense(n, indices, values), got

        results = on_ranks(skim.in_process_group(3), run)
        indices, values = skim.top_k(sum(r[0] for r in results).astype(np.float32), k)
        for _, got in results:
            np.testing.assert_array_equal(got.indices, indices)
            np.testing.assert_array_equal(got.values, values)


class Conservation(unittest.TestCase):
    """Selector, codec, error feedback and exchange, as the reducer puts them together: over all ranks, what
    was given is what was delivered and what is left, bit by bit for whole numbers."""

    def train(self, kind, comm, rank, n, k, steps):
        codec, selector = skim.Codec(), skim.Selector()
        feedback, exchange = skim.ErrorFeedback(), skim.Exchange(comm, kind)
        feedback.set_layout([(0, [("w", n)])])
        rng = np.random.default_rng(rank)
        given, delivered = np.zeros(n), np.zeros(n)
        for step in range(steps):
            g = rng.integers(-1000, 1000, n).astype(np.float32)
            given += g
            chosen = selector.select(g, k, residual=feedback.residual(0), step=step)
            values = codec.quantize(chosen.values, step=step, stream=rank)
            got = exchange.run(chosen.indices, values, n, k=k, step=step)
            feedback.commit(0, chosen.indices, values, returned=(got.returned_indices, got.returned_values))
            if step == 1:  # this step did not happen; its gradients stay in the residuals
                feedback.rollback_step()
                exchange.rollback_step()
                continue
            feedback.end_step()
            exchange.end_step()
            delivered += total(n, got)
        first, held = exchange.held(0)
        left = feedback.residual(0).astype(np.float64)
        left[first : first + held.size] += held
        indices, values = exchange.flush(0, n)
        np.testing.assert_array_equal(dense(n, indices, values)[first : first + held.size], held)
        self.assertEqual(exchange.held(0)[1].any(), False)
        return given, left, delivered

    def test_law(self):
        n, k, steps = 4000, 40, 5
        for ranks in (1, 2, 3, 4):
            for kind in KINDS:
                with self.subTest(ranks=ranks, kind=kind):
                    results = on_ranks(
                        skim.in_process_group(ranks),
                        lambda rank, comm: self.train(kind, comm, rank, n, k, steps),
                    )
                    for _, _, delivered in results:
                        np.testing.assert_array_equal(delivered, results[0][2])
                    np.testing.assert_array_equal(
                        sum(r[0] for r in results), sum(r[1] for r in results) + results[0][2]
                    )


class Servers(unittest.TestCase):
    def test_who_has_a_gradient(self):
        n, k = 1000, 10

        def run(rank, comm):
            exchange = skim.Exchange(comm, "param-server", server="dedicated")
            indices = np.arange(k) + rank if rank > 0 else np.arange(0)
            exchange.run(indices, np.ones(indices.size, np.float32), n, k=k)
            return exchange.contributors, exchange.union_entries

        self.assertEqual(on_ranks(skim.in_process_group(3), run), [(2, k + 1), (2, 0), (2, 0)])


class Rows(unittest.TestCase):
    def test_what_is_known_of_the_exchanges(self):
        rows = skim.exchanges
        self.assertTrue(all(name == row.name for name, row in rows.items()))
        self.assertEqual([name for name, row in rows.items() if not row.selects], ["dense"])
        self.assertEqual([name for name, row in rows.items() if row.holds_mass], ["param-server"])
        self.assertEqual([name for name, row in rows.items() if row.needs_hosts], ["hierarchical"])
        self.assertTrue(rows["gtopk-tree"].nests and not rows["gtopk-tree"].delivers_all)
        self.assertTrue(rows["global-topk"].cuts_result and not rows["gtopk"].cuts_result)
        with self.assertRaises(TypeError):
            rows["mine"] = rows["gtopk"]


class Choosers(unittest.TestCase):
    n, k = 100_000, 100

    def ask(self, **options):
        def run(rank, comm):
            chooser = skim.Chooser(comm, **options)
            chosen = chooser.choose(self.n, k=self.k)
            chooser.took(1e-3)
            return chosen, chooser.decision(0), chooser.candidates

        results = on_ranks(skim.in_process_group(2), run)
        self.assertEqual(results[0], results[1])
        return results[0]

    def test_goes_by_the_link(self):
        chosen, decision, candidates = self.ask(link=skim.Link(1e-9, 1e-13))
        self.assertEqual(chosen, "dense")
        self.assertRegex(decision, "^dense ")
        self.assertEqual(list(candidates), [r.name for r in skim.exchanges.values() if r.delivers_all])
        chosen, decision, _ = self.ask(link=skim.Link(1e-4, 1e-6))
        self.assertTrue(skim.exchanges[chosen].selects)
        self.assertTrue(decision.startswith(chosen + " "))

    def test_takes_no_other_than_it_may(self):
        chosen, _, candidates = self.ask(link=skim.Link(1e-4, 1e-6), among=["gtopk", "sparcml"])
        self.assertEqual(candidates, ("gtopk", "sparcml"))
        self.assertIn(chosen, candidates)

    def test_a_reducer_with_one(self):
        def run(rank, comm, **options):
            reducer = skim.Reducer(comm, density=0.01, dense_below=0, **options)
            reducer.set_layout([(0, [("w", self.n)])])
            before = reducer.decision(0)
            g = np.random.default_rng(rank).standard_normal(self.n).astype(np.float32)
            reducer.reduce(0, g)
            reducer.end_step()
            return before, reducer.decision(0), g

        link = skim.Link(1e-4, 1e-6)
        for options in ({"exchange": "auto"}, {"exchange": "auto", "among": ["gtopk"], "link": link}):
            with self.subTest(options=list(options)):
                results = on_ranks(skim.in_process_group(2), lambda rank, comm: run(rank, comm, **options))
                for before, after, g in results:
                    self.assertEqual(before, "")
                    self.assertIn(after.split(" ")[0], skim.exchanges)
                    self.assertTrue("among" not in options or after.startswith("gtopk "))
                    np.testing.assert_array_equal(g, results[0][2])

    def test_mistakes(self):
        comm = skim.in_process_group(1)[0]
        for why, call in (
            ("among: no 'param-server'; there are: dense, ", lambda: skim.Chooser(comm, among=["param-server"])),
            ("among: must be a list of names among dense, .*, not 'gtopk'", lambda: skim.Chooser(comm, among="gtopk")),
            (r"trial_share: must be a number in \[0, 1\], not 2.0", lambda: skim.Chooser(comm, trial_share=2.0)),
            ("no 'auto'; there are: dense, ", lambda: skim.Exchange(comm, "auto")),
        ):
            with self.subTest(why=why), self.assertRaisesRegex(skim.InvalidArgument, why):
                call()


class Bytes(unittest.TestCase):
    def test_never_exceed_the_bound(self):
        n, k = 20_000, 200

        def run(rank, comm):
            exchange = skim.Exchange(comm, "gtopk")
            indices, values = skim.top_k(np.random.default_rng(rank).standard_normal(n).astype(np.float32), k)
            exchange.run(indices, values, n, k=k)
            return comm.traffic.sent_bytes, exchange.max_sent_bytes(n, k=k)

        for sent, most in on_ranks(skim.in_process_group(4), run):
            self.assertGreater(sent, 0)
            self.assertLessEqual(sent, most)


class Mistakes(unittest.TestCase):
    def test_are_named_before_anything_is_sent(self):
        comm = skim.in_process_group(1)[0]
        exchange = skim.Exchange(comm, "allgather")
        one, at = np.ones(1, np.float32), np.array([3])
        half = skim.Exchange(comm, value_code="f16")
        for why, call in (
            ("needs 0 < k <= n", lambda: exchange.run(at, one, 10, k=0)),
            ("needs 0 < k <= n", lambda: exchange.run(at, one, 10, k=11)),
            (r"index 3 \(entry 0\) is not in \[0, 2\)", lambda: exchange.run(at, one, 2, k=1)),
            ("as Codec.quantize leaves them", lambda: half.run(at, one / 3, 10, k=1)),
            ("no 'ring'; there are: dense, ", lambda: skim.Exchange(comm, "ring")),
            ("dense", lambda: skim.Exchange(comm, "dense")),
        ):
            with self.subTest(why=why), self.assertRaisesRegex(skim.InvalidArgument, why):
                call()
        self.assertEqual(comm.traffic.sent_bytes, 0)

    def test_a_peer_that_leaves(self):
        def run(rank, comm):
            if rank == 1:
                comm.abort(1)
                return None
            with self.assertRaises(skim.CommError) as caught:
                skim.Exchange(comm, "gtopk").run(np.array([1]), np.array([1.0]), 10, k=1)
            return caught.exception

        error = on_ranks(skim.in_process_group(2), run)[0]
        self.assertEqual(error.peer, 1)


if __name__ == "__main__":
    unittest.main()
