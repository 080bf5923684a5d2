"""Selectors and schedules that are Python objects: as good as the built-in ones, and safe to get wrong."""

import gc
import threading
import unittest
import weakref

import numpy as np
import skim
from ranks import on_ranks


class Largest:
    """The built-in rule, in NumPy, in an order of its own."""

    def select(self, accumulated, k, step, slot):
        return np.argsort(-np.abs(accumulated), kind="stable")[:k]


def reduce(comm, rank, n=20_000, steps=4, dtype=np.float32, **options):
    """What steps gave, all reports and the state at the end."""
    reducer = skim.Reducer(comm, dense_below=0, **options)
    reducer.set_layout([(0, [("w", n)])])
    reducer.set_total_steps(steps)
    rng = np.random.default_rng(rank)
    got = []
    for step in range(steps):
        g = (rng.integers(-50, 50, n) * rng.integers(0, 2, n)).astype(dtype)
        report = reducer.reduce(0, g)
        reducer.end_step(epoch=step + 1.0)
        got.append((g, report.k, report.sent_entries, report.threshold, report.capture, report.residual_norm))
    return got, reducer.save()


class Case(unittest.TestCase):
    def assert_told(self, error, culprit):
        """The rank did not wait for its timeout."""
        self.assertEqual(error.peer, culprit)
        self.assertIn(f"aborted because of rank {culprit}", str(error))


class OwnSelector(Case):
    def assert_same(self, first, second):
        for (got, _), (expected, _) in zip(first, second, strict=True):
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_array_equal(a[0].view(np.uint8), b[0].view(np.uint8))
                self.assertEqual(a[1:], b[1:])

    def test_equals_the_exact_rule_bit_by_bit(self):
        cases = [{"dtype": np.float32}, {"dtype": np.float16}, {"feedback": False},
                 {"momentum_correction": 0.9, "local_clip": 1.0}, {"exchange": "gtopk"},
                 {"value_code": "q4"}]
        for options in cases:
            for ranks in (1, 3):
                with self.subTest(ranks=ranks, options=options):
                    def run(selector):
                        return on_ranks(
                            skim.in_process_group(ranks),
                            lambda rank, comm: reduce(comm, rank, density=0.01, selector=selector, **options),
                        )

                    self.assert_same(run(Largest()), run(skim.Selector()))

    def test_zeros_are_left_out(self):
        class Everything:
            def select(self, accumulated, k, step, slot):
                return np.arange(accumulated.size)[::-1]

        reducer = skim.Reducer(skim.in_process_group(1)[0], density=0.5, dense_below=0, selector=Everything())
        reducer.set_layout([(0, [("w", 6)])])
        g = np.array([0, 1, 0, -2, 0, 3], np.float32)
        report = reducer.reduce(0, g)
        self.assertEqual((report.sent_entries, report.threshold, report.capture), (3, 1.0, 1.0))

    def test_what_it_is_shown(self):
        seen = []

        class Watches:
            def select(self, accumulated, k, step, slot):
                with self_.assertRaises(ValueError):
                    accumulated[0] = 1.0
                seen.append((accumulated.copy(), accumulated.dtype, k, step, slot))
                return np.array([0])

        self_ = self
        reducer = skim.Reducer(skim.in_process_group(1)[0], density=0.5, dense_below=0, selector=Watches())
        reducer.set_layout([(7, [("w", 4)])])
        for _ in range(2):
            reducer.reduce(7, np.array([1, 2, 3, 4], np.float32))
            reducer.end_step()
        np.testing.assert_array_equal(seen[0][0], [1, 2, 3, 4])
        np.testing.assert_array_equal(seen[1][0], [1, 4, 6, 8])
        self.assertEqual([s[1:] for s in seen], [(np.float32, 2, 0, 7), (np.float32, 2, 1, 7)])

    def test_indices_may_be_a_list(self):
        class First:
            def select(self, accumulated, k, step, slot):
                return [] if step == 0 else list(range(k))

        got, _ = reduce(skim.in_process_group(1)[0], 0, steps=2, density=0.01, selector=First())
        self.assertEqual([g[2] for g in got][0], 0)

    def test_wrong_indices_are_named_and_end_the_group(self):
        for answer, why in (
            ([3, 1, 3], "select: slot 0: index 3 stands twice"),
            ([20_000], r"select: slot 0: index 20000 \(entry 0\) is not in \[0, 20000\)"),
            ([-1], "select: slot 0: index -1"),
            ([[1, 2]], "of one dimension"),
            ([0.5], "must be integers"),
            (None, "needs an array of indices"),
        ):
            with self.subTest(why=why):
                class Wrong(Largest):
                    def select(self, accumulated, k, step, slot):
                        return answer

                def run(rank, comm):
                    error = skim.InvalidArgument if rank == 1 else skim.CommError
                    with self.assertRaises(error) as caught:
                        reduce(comm, rank, density=0.01, selector=Wrong() if rank == 1 else Largest())
                    return caught.exception

                first, second = on_ranks(skim.in_process_group(2), run)
                self.assertRegex(str(second), why)
                self.assert_told(first, 1)

    def test_what_it_raises_comes_out_as_it_is_and_ends_the_group(self):
        class MyError(Exception):
            pass

        class Fails(Largest):
            def select(self, accumulated, k, step, slot):
                if step == 2:
                    raise MyError("no more")
                return super().select(accumulated, k, step, slot)

        def run(rank, comm):
            with self.assertRaises(MyError if rank == 0 else skim.CommError) as caught:
                reduce(comm, rank, density=0.01, selector=Fails() if rank == 0 else Largest())
            return caught.exception

        first, second = on_ranks(skim.in_process_group(3), run)[:2]
        self.assertEqual(str(first), "no more")
        self.assert_told(second, 0)

    def test_callbacks_of_three_ranks_at_once(self):
        # All ranks must be in their callbacks at the same time: a rank that held the GIL while it waits for
        # the others would never end.
        barrier = threading.Barrier(3, timeout=30)

        class Meets(Largest):
            def select(self, accumulated, k, step, slot):
                barrier.wait()
                return super().select(accumulated, k, step, slot)

        def run(selector):
            return on_ranks(
                skim.in_process_group(3), lambda rank, comm: reduce(comm, rank, density=0.01, selector=selector)
            )

        self.assert_same(run(Meets()), run(skim.Selector()))

    def test_lives_as_long_as_its_reducer(self):
        selector = Largest()
        alive = weakref.ref(selector)
        reducer = skim.Reducer(skim.in_process_group(1)[0], density=0.01, dense_below=0, selector=selector)
        del selector
        gc.collect()
        self.assertIsNotNone(alive())
        reducer.set_layout([(0, [("w", 1000)])])
        reducer.reduce(0, np.ones(1000, np.float32))
        del reducer
        gc.collect()
        self.assertIsNone(alive())

    def test_cycles_are_found(self):
        class Trainer(Largest):
            def __init__(self):
                self.reducer = skim.Reducer(
                    skim.in_process_group(1)[0], density=self, dense_below=0, selector=self
                )

            def density(self, progress):
                return 0.01

        alive = weakref.ref(Trainer())
        gc.collect()
        self.assertIsNone(alive())

    def test_state_is_the_reducers(self):
        class Counts(Largest):
            def __init__(self):
                self.calls = b""

            def select(self, accumulated, k, step, slot):
                self.calls += b"x" * 3000
                return super().select(accumulated, k, step, slot)

            def save(self):
                return self.calls

            def load(self, state):
                self.calls = state

        comm = skim.in_process_group(1)[0]
        _, state = reduce(comm, 0, density=0.01, selector=Counts())
        counts = Counts()
        reducer = skim.Reducer(comm, density=0.01, selector=counts)
        reducer.set_layout([(0, [("w", 20_000)])])
        reducer.load([state])
        self.assertEqual(counts.calls, b"x" * 12_000)
        forgetful = skim.Reducer(comm, density=0.01, selector=Largest())
        forgetful.set_layout([(0, [("w", 20_000)])])
        with self.assertRaisesRegex(skim.StateError, "the object has no load"):
            forgetful.load([state])


class OwnSchedule(Case):
    def ks(self, schedule, ranks=1, steps=4):
        results = on_ranks(
            skim.in_process_group(ranks), lambda rank, comm: reduce(comm, rank, steps=steps, density=schedule)
        )
        for got, _ in results:
            self.assertEqual([g[1] for g in got], [g[1] for g in results[0][0]])
        return [g[1] for g in results[0][0]]

    def test_equals_a_built_in_one(self):
        class Falls:
            def density(self, progress):
                return 0.1 * 0.5**progress.epoch

        self.assertEqual(
            self.ks(Falls(), ranks=3), self.ks(skim.listed_density([0.1, 0.05, 0.025], 0.0125), ranks=3)
        )

    def test_a_float_and_a_density(self):
        class Both:
            def density(self, progress):
                return 0.01 if progress.step % 2 else skim.Density(0.02, down=0.01)

        self.assertEqual(self.ks(0.01), [200] * 4)
        self.assertEqual(self.ks(Both()), [400, 200, 400, 200])

    def test_sees_what_the_group_measured(self):
        seen = []

        class Watches:
            def density(self, progress):
                seen.append(progress)
                return 0.01

        got, _ = reduce(skim.in_process_group(1)[0], 0, steps=3, density=Watches())
        last = seen[-1]
        self.assertEqual((last.step, last.total_steps, last.epoch, last.used.up), (3, 3, 3.0, 0.01))
        rng = np.random.default_rng(0)
        for _ in range(3):
            g = rng.integers(-50, 50, 20_000) * rng.integers(0, 2, 20_000)
        self.assertEqual(last.last.gradient_norm2, float(np.sum(g.astype(np.float64) ** 2)))

    def test_a_budget_counts_the_bytes_that_are_not_known_yet(self):
        class Budget:
            def __init__(self):
                self.seen = []

            def density(self, progress):
                self.seen.append((progress.step, progress.unknown_bytes, progress.last.sent_bytes))
                return 0.01 * (1 + progress.step)

            def max_bytes(self, density):
                return 1e6 * density.up

        def run(rank, comm):
            schedule, sent = Budget(), [0]
            reducer = skim.Reducer(comm, density=schedule, dense_below=0)
            reducer.set_layout([(0, [("w", 20_000)])])
            for step in range(4):
                reducer.reduce(0, np.ones(20_000, np.float32))
                sent.append(comm.traffic.sent_bytes)
                reducer.end_step(0.0)
            return schedule.seen, sent

        seen, sent = on_ranks(skim.in_process_group(2), run)[0]
        told = {step: (unknown, known) for step, unknown, known in seen}
        self.assertEqual(told[0], (0.0, 0))
        for step in range(1, 5):
            unknown, known = told[step]
            self.assertEqual(unknown, 1e6 * 0.01 * step, "of the last step, whose bytes no frame has told yet")
            self.assertEqual(known, sent[step - 1])

        class Wrong(Budget):
            def max_bytes(self, density):
                return "many"

        def fails(rank, comm):
            with self.assertRaises(skim.InvalidArgument if rank == 1 else skim.CommError) as caught:
                reduce(comm, rank, density=Wrong() if rank == 1 else 0.01)
            return caught.exception

        told = on_ranks(skim.in_process_group(2), fails)
        self.assertRegex(str(told[1]), "max_bytes: needs a number >= 0, not 'many'")
        self.assert_told(told[0], 1)
        self.assertEqual(skim.Progress(unknown_bytes=3.0).unknown_bytes, 3.0)

    def test_wrong_densities_are_named(self):
        for answer, why in ((0.0, r"must be in \(0, 1\]"), (1.5, r"must be in \(0, 1\]"), (float("nan"), "must be in"),
                            ("x", "needs a float or skim.Density, not 'x'")):
            class Wrong:
                def density(self, progress):
                    return answer

            with self.subTest(why=why), self.assertRaisesRegex(skim.InvalidArgument, why):
                reduce(skim.in_process_group(1)[0], 0, density=Wrong())

    def test_what_it_raises_comes_out_as_it_is_and_ends_the_group(self):
        class Fails:
            def density(self, progress):
                if progress.step == 2:
                    raise KeyError("step 2")
                return 0.01

        def run(rank, comm):
            with self.assertRaises(KeyError if rank == 1 else skim.CommError) as caught:
                reduce(comm, rank, density=Fails() if rank == 1 else 0.01)
            return caught.exception

        self.assert_told(on_ranks(skim.in_process_group(2), run)[0], 1)

    def test_what_is_neither(self):
        comm = skim.in_process_group(1)[0]
        with self.assertRaisesRegex(skim.InvalidArgument, "density: must be a number in .* not 'fast'"):
            skim.Reducer(comm, density="fast")
        with self.assertRaisesRegex(skim.InvalidArgument, "selector: needs a skim.Selector .* not 3"):
            skim.Reducer(comm, selector=3)

    def test_the_librarys_are_no_base_classes(self):
        for base in (skim.Selector, skim.DensitySchedule):  # what a child overrides would not be called
            with self.assertRaises(TypeError):
                type("Child", (base,), {})


if __name__ == "__main__":
    unittest.main()
