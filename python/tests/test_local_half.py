"""A local half that is a Python object (numpy_local_half.py) against the built-in one, bit by bit."""

import gc
import threading
import unittest
import weakref

import numpy as np
import skim
import test_own_parts
import test_reducer
from numpy_local_half import NumpyLocalHalf
from ranks import on_ranks

LAYOUT = [(0, [("a", 3000), ("b", 2000)]), (3, [("c", 700)])]


class ReducingWithNumPy(test_reducer.Reducing):
    """The laws of the reducer hold with it, too."""

    @staticmethod
    def parts():
        return {"local": NumpyLocalHalf()}


def train(comm, rank, local, *, dtype=np.float32, normal=False, scale=1.0, steps=6, skipped=(), bad=(), **options):
    """Everything that came out of some steps."""
    reducer = skim.Reducer(comm, local=local, **{"density": 0.02, "dense_below": 1000, **options})
    reducer.set_layout(LAYOUT)
    reducer.set_total_steps(steps)
    rng = np.random.default_rng(rank)
    seen = []
    for step in range(steps):
        for slot, parameters in LAYOUT:
            n = sum(k for _, k in parameters)
            g = rng.standard_normal(n) if normal else rng.integers(-50, 50, n) * rng.integers(0, 2, n)
            g = (g * scale).astype(dtype)
            if step in bad and rank == comm.size - 1:
                g[5] = np.inf
                g[7] = np.nan
            r = reducer.reduce(slot, g, scale)
            counts = (r.k, r.sent_entries, r.sum_entries, r.threshold, r.non_finite, r.dense, r.finite, r.sent_bytes)
            seen += [g.view(np.uint8), counts]
            if not normal:
                seen += [(r.capture, r.residual_norm if not r.dense else 0.0, r.group_gradient_norm2)]
        if step in skipped:
            reducer.rollback_step(step + 1.0)
        else:
            seen.append(reducer.end_step(step + 1.0))
        seen += [reducer.residual(slot).view(np.uint8) for slot, _ in LAYOUT]
    return seen, reducer


class AgainstTheBuiltIn(unittest.TestCase):
    make = NumpyLocalHalf
    feedback = {}  # options of the local half

    def make_both(self):
        """Functions that make it, and nothing, for Reducer(local=)."""
        return self.make, lambda: None

    def assert_same(self, first, second):
        self.assertEqual(len(first), len(second))
        for a, b in zip(first, second):
            if isinstance(a, np.ndarray):
                np.testing.assert_array_equal(a, b)
            else:
                self.assertEqual(a, b)

    def check(self, ranks=(1, 2, 3), **options):
        for size in ranks:
            with self.subTest(ranks=size, **{k: str(v) for k, v in options.items()}):
                seen = [
                    on_ranks(skim.in_process_group(size), lambda rank, comm: train(comm, rank, make(), **options)[0])
                    for make in self.make_both()
                ]
                for own, built_in in zip(*seen):
                    self.assert_same(own, built_in)

    def test_what_own_selectors_go_through(self):
        for options in ({}, {"dtype": np.float16}, {"exchange": "gtopk"}):
            for size in (1, 3):
                results = [
                    on_ranks(
                        skim.in_process_group(size),
                        lambda rank, comm: test_own_parts.reduce(comm, rank, density=0.01, local=make(), **options)[0],
                    )
                    for make in self.make_both()
                ]
                for own, built_in in zip(*results):
                    for a, b in zip(own, built_in):
                        self.assert_same(a, b)

    def test_every_exchange(self):
        for row in skim.exchanges.values():
            self.check(ranks=(2, 4), exchange=row.name)

    def test_types_and_scales(self):
        for dtype in (np.float32, np.float16):
            for scale in (1.0, 64.0):
                self.check(dtype=dtype, normal=True, scale=scale)
                self.check(dtype=dtype, scale=scale)

    def test_what_16_bits_cannot_hold(self):
        self.check(ranks=(2,), dtype=np.float16, scale=1024.0)
        self.check(ranks=(2,), dtype=np.float16, scale=1024.0, density=skim.listed_density([0.01] * 3, 1.0))

    def test_dense_sums(self):
        self.check(density=1.0)
        self.check(density=1.0, dtype=np.float16, normal=True)
        self.check(density=skim.listed_density([0.01, 1.0, 0.01, 1.0, 0.5], 0.02))

    def test_steps_that_are_taken_back(self):
        self.check(skipped=(1, 2, 4))
        self.check(skipped=(1, 4), density=skim.listed_density([0.01, 1.0, 0.01, 0.01, 1.0], 0.02))
        self.check(ranks=(3,), skipped=(1, 4), exchange="param-server")
        self.check(
            ranks=(3,), skipped=(1, 4), exchange="param-server",
            density=skim.listed_density([0.01, 1.0, 0.01, 1.0, 0.01], 0.02),
        )  # fmt: skip

    def test_gradients_that_are_not_finite(self):
        for non_finite in ("skip", "pass-on"):
            self.check(bad=(2, 4), non_finite=non_finite, dense_below=0)
            self.check(bad=(2, 4), non_finite=non_finite, density=1.0)

    def test_values_that_are_rounded(self):
        for value in ("f16", "q8", "q4"):
            self.check(ranks=(3,), normal=True, exchange="gtopk", value_code=value)

    def test_within_a_budget(self):
        cost = skim.max_step_bytes([5000, 700], ranks=2, dense_below=0)
        schedule = skim.adaptive_density(cost=cost, budget=6 * cost(0.01))
        self.check(ranks=(2,), density=schedule, dense_below=0)

    def test_states(self):
        """Of either go on as they were, on as many ranks and on others."""
        for new_size in (2, 1, 3):
            def saved(rank, comm, make):
                return train(comm, rank, make(), steps=3)[1].save()

            def goes_on(rank, comm, make, states):
                reducer = skim.Reducer(comm, density=0.02, dense_below=0, local=make())
                # The same parameters in other buckets.
                layout = [(0, [("c", 700), ("b", 2000)]), (1, [("a", 3000)])]
                reducer.set_layout(layout)
                reducer.load(states)
                seen = [reducer.step]
                for slot, n in ((0, 2700), (1, 3000)):
                    seen.append(reducer.residual(slot))
                    g = np.random.default_rng(rank).integers(-50, 50, n).astype(np.float32)
                    reducer.reduce(slot, g)
                    seen.append(g)
                return seen

            with self.subTest(ranks=new_size):
                results = []
                for make in self.make_both():
                    states = on_ranks(skim.in_process_group(2), lambda r, c: saved(r, c, make))
                    group = skim.in_process_group(new_size)
                    results.append(on_ranks(group, lambda r, c: goes_on(r, c, make, states)))
                for own, built_in in zip(*results):
                    self.assert_same(own, built_in)

    def test_a_new_layout(self):
        seen = []
        for local in (self.make(), None):
            reducer = train(skim.in_process_group(1)[0], 0, local)[1]
            reducer.set_layout([(5, [("c", 700), ("new", 9), ("a", 3000)])])
            reducer.add_residual(5, 698, np.array([1, 2, 3], np.float32), 2.0)
            seen.append([reducer.residual(5)])
        self.assert_same(*seen)


class Part(NumpyLocalHalf):
    """Does something else in one method."""

    def __init__(self, method, does):
        super().__init__()
        setattr(self, method, does)


def one_step(comm, local, n=100, density=0.1):
    reducer = skim.Reducer(comm, density=density, dense_below=0, local=local)
    reducer.set_layout([(0, [("w", n)])])
    reducer.reduce(0, np.arange(n, dtype=np.float32))
    return reducer.end_step()


class Own(test_own_parts.Case):
    def test_gradients_of_any_kind(self):
        class Tensor:
            """As opaque to the reducer as memory of a GPU."""

            def __init__(self, numbers):
                self.numbers = numbers

        class OfTensors(NumpyLocalHalf):
            def check(self, grad, n):
                super().check(grad.numbers, n)

            def select(self, task, grad):
                return super().select(task, grad.numbers)

            def apply(self, slot, sum, factor, grad):
                return super().apply(slot, sum, factor, grad.numbers)

        reducer = skim.Reducer(skim.in_process_group(1)[0], density=0.5, dense_below=0, local=OfTensors())
        reducer.set_layout([(0, [("w", 4)])])
        g = Tensor(np.array([1, -4, 2, 3], np.float32))
        report = reducer.reduce(0, g)
        np.testing.assert_array_equal(g.numbers, [0, -4, 0, 3])
        np.testing.assert_array_equal(reducer.residual(0), [1, 0, 2, 0])
        self.assertEqual((report.sent_entries, report.threshold), (2, 3.0))

    def test_what_a_task_says(self):
        seen = []

        class Watches(NumpyLocalHalf):
            def select(self, task, grad):
                where = (task.step, task.slot, task.n)
                seen.append((*where, task.k, task.scale, task.threshold, task.at_most_k, task.ranks))
                return super().select(task, grad)

        class Schedule:
            def density(self, progress):
                return skim.Density(0.25, threshold=0.5, at_most_k=True)

        def run(rank, comm):
            local = Watches() if rank else NumpyLocalHalf()
            reducer = skim.Reducer(comm, density=Schedule(), dense_below=0, local=local)
            reducer.set_layout([(7, [("w", 8)])])
            for _ in range(2):
                reducer.reduce(7, np.ones(8, np.float32), 2.0)
                reducer.end_step()

        on_ranks(skim.in_process_group(2), run)
        self.assertEqual(seen, [(step, 7, 8, 2, 2.0, 0.5, True, 2) for step in range(2)])

    def test_callbacks_of_three_ranks_at_once(self):
        # A rank that held the GIL while it waits for the others would never end.
        barrier = threading.Barrier(3, timeout=30)

        class Meets(NumpyLocalHalf):
            def select(self, task, grad):
                barrier.wait()
                return super().select(task, grad)

            def apply(self, slot, sum, factor, grad):
                barrier.wait()
                return super().apply(slot, sum, factor, grad)

        self.assertEqual(on_ranks(skim.in_process_group(3), lambda rank, comm: one_step(comm, Meets())), [True] * 3)

    def test_what_it_is_shown_cannot_be_written_to(self):
        def commit(slot, sent, returned):
            for array in (*sent, *returned):
                self.assertFalse(array.flags.writeable)
            return 0.0

        self.assertTrue(one_step(skim.in_process_group(1)[0], Part("commit", commit)))

    def test_a_gradient_that_it_refuses_changes_nothing(self):
        def run(rank, comm):
            reducer = skim.Reducer(comm, density=0.1, dense_below=0, local=NumpyLocalHalf())
            reducer.set_layout([(0, [("w", 100)])])
            if rank == 0:
                for wrong in (None, np.zeros(99, np.float32), np.zeros(100)):
                    with self.assertRaisesRegex(skim.InvalidArgument, "needs 100 entries"):
                        reducer.reduce(0, wrong)
                with self.assertRaisesRegex(skim.InvalidArgument, "slot 1 is not in the layout"):
                    reducer.reduce(1, None)
            g = np.ones(100, np.float32)
            reducer.reduce(0, g)
            return g, reducer.end_step()

        for g, applied in on_ranks(skim.in_process_group(2), run):
            self.assertTrue(applied)
            np.testing.assert_array_equal(g, [1] * 10 + [0] * 90)

    def test_wrong_answers_are_named_and_end_the_group(self):
        one, report = np.ones(1, np.float32), skim.SelectReport()
        for method, answer, why, density in (
            ("select", None, "needs \\(indices, values, skim.SelectReport\\), not None", 0.1),
            ("select", ([1], one), "needs \\(indices, values", 0.1),
            ("select", ([100], one, report), r"select: slot 0: index 100 \(entry 0\) is not in \[0, 100\)", 0.1),
            ("select", ([2, 1], np.ones(2), report), "indices must ascend", 0.1),
            ("select", ([1, 2], one, report), "2 indices, but 1 values", 0.1),
            ("select", ([1], one, 3.0), "select: needs a skim.SelectReport, not 3.0", 0.1),
            ("commit", None, "commit: needs a float, not None", 0.1),
            ("apply", None, "apply: needs a bool, whether the sum is finite, not None", 0.1),
            ("accumulate", None, "accumulate: needs a skim.SelectReport", 1.0),
            ("whole", np.zeros(99, np.float32), "whole: slot 0: needs a writable float32 array of 100", 1.0),
            ("whole", np.zeros(100), "whole: slot 0: needs a writable float32 array of 100", 1.0),
            ("apply_dense", None, "apply: needs a bool|apply_dense: needs a bool", 1.0),
        ):
            with self.subTest(method=method, why=why):
                def run(rank, comm):
                    local = Part(method, lambda *_: answer) if rank == 1 else NumpyLocalHalf()
                    with self.assertRaises(skim.InvalidArgument if rank == 1 else skim.CommError) as caught:
                        for _ in range(2):  # what fails behind the exchange the others notice in the next step
                            one_step(comm, local, density=density)
                    return caught.exception

                first, second = on_ranks(skim.in_process_group(2), run)
                self.assertRegex(str(second), why)
                self.assert_told(first, 1)

    def test_what_it_raises_comes_out_as_it_is_and_ends_the_group(self):
        class MyError(Exception):
            pass

        def fails(*_):
            raise MyError("no more")

        for method in ("select", "commit", "apply", "end_step"):
            with self.subTest(method=method):
                def run(rank, comm):
                    local = Part(method, fails) if rank == 0 else NumpyLocalHalf()
                    with self.assertRaises(MyError if rank == 0 else skim.CommError) as caught:
                        for _ in range(2):
                            one_step(comm, local)
                    return caught.exception

                first, second = on_ranks(skim.in_process_group(3), run)[:2]
                self.assertEqual(str(first), "no more")
                self.assert_told(second, 0)

    def test_a_layout_that_it_refuses_changes_nothing(self):
        local = NumpyLocalHalf()
        reducer = skim.Reducer(skim.in_process_group(1)[0], density=0.1, dense_below=0, local=local)
        reducer.set_layout([(0, [("w", 100)])])
        with self.assertRaisesRegex(skim.InvalidArgument, "'w' has 4 entries, before 100"):
            reducer.set_layout([(0, [("w", 4)])])
        local.set_layout = lambda layout: 1 / 0
        with self.assertRaises(ZeroDivisionError):
            reducer.set_layout([(1, [("v", 4)])])
        reducer.reduce(0, np.ones(100, np.float32))

    def test_what_is_none(self):
        comm = skim.in_process_group(1)[0]
        with self.assertRaisesRegex(skim.InvalidArgument, r"local: needs an object .* 3 has no set_layout\(\)"):
            skim.Reducer(comm, local=3)
        with self.assertRaisesRegex(skim.InvalidArgument, "a local half brings its own selector"):
            skim.Reducer(comm, local=NumpyLocalHalf(), selector=skim.Selector())

    def test_states_of_other_kinds(self):
        comm = skim.in_process_group(1)[0]
        reducers = [skim.Reducer(comm, local=local) for local in (NumpyLocalHalf(), None)]
        for reducer in reducers:
            reducer.set_layout([(0, [("w", 4)])])
        for reducer, other in zip(reducers, reversed(reducers)):
            with self.assertRaises(skim.StateError):
                reducer.load([other.save()])

    def test_lives_as_long_as_its_reducer(self):
        local = NumpyLocalHalf()
        alive = weakref.ref(local)
        reducer = skim.Reducer(skim.in_process_group(1)[0], density=1.0, local=local)
        del local
        gc.collect()
        self.assertIsNotNone(alive())
        reducer.set_layout([(0, [("w", 1000)])])
        reducer.reduce(0, np.ones(1000, np.float32))
        reducer.residual(0)
        del reducer
        gc.collect()
        self.assertIsNone(alive())

    def test_cycles_are_found(self):
        class Trainer(NumpyLocalHalf):
            def __init__(self):
                super().__init__()
                self.reducer = skim.Reducer(skim.in_process_group(1)[0], local=self)

        alive = weakref.ref(Trainer())
        gc.collect()
        self.assertIsNone(alive())


if __name__ == "__main__":
    unittest.main()
