"""Exchanges over ranks as threads, against sums in float64; a step put together from the library's parts."""

import unittest

import numpy as np
import skim
from ranks import on_ranks

KINDS = [k for k in skim.exchange_kinds if k not in ("dense", "auto")]


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
                    options = skim.ExchangeOptions(kind, between="allgather")

                    def run(rank, comm):
                        indices, values = skim.top_k(
                            np.random.default_rng(rank).standard_normal(n).astype(np.float32), k
                        )
                        got = skim.Exchange(options, comm).run(indices, values, n, k=k)
                        return dense(n, indices, values), total(n, got), got

                    results = on_ranks(skim.in_process_group(ranks), run)
                    expected = sum(r[0] for r in results)
                    for mine, sum_, got in results:
                        np.testing.assert_allclose(sum_, expected, rtol=1e-6, atol=1e-6)
                        np.testing.assert_array_equal(sum_, results[0][1])
                        self.assertEqual(got.contributors, ranks)
                        self.assertEqual(got.returned_indices.size, 0)

    def test_unequal_and_empty_selections_and_statistics(self):
        def run(rank, comm):
            indices = np.arange(rank * 2)
            stats = skim.GroupStats(gradient_norm2=rank + 1.0, non_finite=rank, sent_bytes=10 * rank)
            exchange = skim.Exchange("allgather", comm)
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
            got = skim.Exchange("global-topk", comm).run(indices, values, n, k=k)
            return dense(n, indices, values), got

        results = on_ranks(skim.in_process_group(3), run)
        indices, values = skim.top_k(sum(r[0] for r in results).astype(np.float32), k)
        for _, got in results:
            np.testing.assert_array_equal(got.indices, indices)
            np.testing.assert_array_equal(got.values, values)


class Conservation(unittest.TestCase):
    """Selector, codec, error feedback and exchange, as the reducer puts them together: over all ranks, what
    was given is what was delivered and what is left, bit by bit for whole numbers."""

    def train(self, options, comm, rank, n, k, steps):
        codec, selector = skim.Codec(), skim.Selector()
        feedback, exchange = skim.ErrorFeedback(), skim.Exchange(options, comm)
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
                    options = skim.ExchangeOptions(kind)
                    results = on_ranks(
                        skim.in_process_group(ranks),
                        lambda rank, comm: self.train(options, comm, rank, n, k, steps),
                    )
                    for _, _, delivered in results:
                        np.testing.assert_array_equal(delivered, results[0][2])
                    np.testing.assert_array_equal(
                        sum(r[0] for r in results), sum(r[1] for r in results) + results[0][2]
                    )


class Automatic(unittest.TestCase):
    def test_goes_by_the_link(self):
        n, k = 100_000, 100

        def run(link):
            def ask(rank, comm):
                exchange = skim.Exchange(skim.ExchangeOptions("auto", link=link), comm)
                wants = exchange.wants_dense(n, k=k)
                exchange.took(0, select_s=0.0, exchange_s=1e-3)
                return wants, exchange.decision(0)

            return on_ranks(skim.in_process_group(2), ask)

        for wants, why in run(skim.Link(1e-9, 1e-13)):
            self.assertTrue(wants)
            self.assertRegex(why, "^dense ")
        for wants, why in run(skim.Link(1e-4, 1e-6)):
            self.assertFalse(wants)
            self.assertRegex(why, "^(allgather|gtopk|oktopk|sparcml)")


class Bytes(unittest.TestCase):
    def test_never_exceed_the_bound(self):
        n, k = 20_000, 200

        def run(rank, comm):
            exchange = skim.Exchange("gtopk", comm)
            indices, values = skim.top_k(np.random.default_rng(rank).standard_normal(n).astype(np.float32), k)
            exchange.run(indices, values, n, k=k)
            return comm.traffic.sent_bytes, exchange.most_bytes(n, k=k)

        for sent, most in on_ranks(skim.in_process_group(4), run):
            self.assertGreater(sent, 0)
            self.assertLessEqual(sent, most)


class Mistakes(unittest.TestCase):
    def test_are_named_before_anything_is_sent(self):
        comm = skim.in_process_group(1)[0]
        exchange = skim.Exchange("allgather", comm)
        one, at = np.ones(1, np.float32), np.array([3])
        half = skim.Exchange(skim.ExchangeOptions(codec=skim.CodecOptions(value="f16")), comm)
        for why, call in (
            ("needs 0 < k <= n", lambda: exchange.run(at, one, 10, k=0)),
            ("needs 0 < k <= n", lambda: exchange.run(at, one, 10, k=11)),
            (r"index 3 \(entry 0\) is not in \[0, 2\)", lambda: exchange.run(at, one, 2, k=1)),
            ("as Codec.quantize leaves them", lambda: half.run(at, one / 3, 10, k=1)),
            ("no 'ring'; there are: dense, ", lambda: skim.Exchange("ring", comm)),
            ("dense", lambda: skim.Exchange("dense", comm)),
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
                skim.Exchange("gtopk", comm).run(np.array([1]), np.array([1.0]), 10, k=1)
            return caught.exception

        error = on_ranks(skim.in_process_group(2), run)[0]
        self.assertEqual(error.peer, 1)


if __name__ == "__main__":
    unittest.main()
