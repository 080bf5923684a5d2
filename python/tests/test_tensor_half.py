"""skim.TensorLocalHalf against the built-in local half, bit by bit, with its pass in PyTorch and in Triton."""

import contextlib
import importlib.util
import io
import os
import pathlib
import subprocess
import sys
import threading
import unittest
import unittest.mock
import warnings

import numpy as np
import skim
import test_local_half
import test_reducer
from ranks import on_ranks

HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_TRITON = HAS_TORCH and importlib.util.find_spec("triton") is not None

# The ranks are threads here, and Triton's interpreter works in one thread at a time.
ONE_AT_A_TIME = threading.RLock()

if HAS_TORCH:
    import torch
    import torch.distributed as dist
    from skim import _kept, _passes, _triton_trial, dry_run
    from skim._compression import Compression
    from skim._passes import HEAD, LAST, Collected, kernels_for
    from skim.tensor_half import Buffers

    try:
        from emulated_device import EmulatedDevice, OnDevice, Stream, backend, memory_of, to_device, to_host
    except (ImportError, AttributeError):
        EmulatedDevice = None

CANNOT_EMULATE = "" if HAS_TORCH and EmulatedDevice else "this PyTorch cannot have a device in Python"

if HAS_TORCH:

    class OfArrays(skim.TensorLocalHalf):
        """Takes NumPy arrays, and tensors, as gradients. Their memory is taken for that of a device, or copied to one."""

        device = "cpu"

        def tensor(self, grad):
            return torch.as_tensor(grad).to(self.device)

        def check(self, grad, n):
            super().check(self.tensor(grad), n)

        def select(self, task, grad):
            with ONE_AT_A_TIME:
                return super().select(task, self.tensor(grad))

        def gather(self, slot, indices):
            with ONE_AT_A_TIME:
                return super().gather(slot, indices)

        def accumulate(self, task, grad):
            with ONE_AT_A_TIME:
                return super().accumulate(task, self.tensor(grad))

        def set_layout(self, layout):
            with ONE_AT_A_TIME:
                super().set_layout(layout)

        def whole(self, slot, grad):
            return super().whole(slot, self.tensor(grad))

        def write(self, method, grad, *arguments):
            there = self.tensor(grad)
            answer = method(*arguments, there)
            if self.device != "cpu":
                torch.as_tensor(grad).copy_(there)
            return answer

        def apply(self, slot, sum, factor, grad):
            return self.write(super().apply, grad, slot, sum, factor)

        def apply_dense(self, slot, sum, factor, grad):
            return self.write(super().apply_dense, grad, slot, sum, factor)

        def apply_nan(self, grad):
            self.write(super().apply_nan, grad)

    class OfCuda(OfArrays):
        device = "cuda"

    def emulating(method):
        def emulated(self, *arguments):
            with EmulatedDevice():
                return method(self, *arguments)

        return emulated

    class OfEmulatedDevice(OfArrays):
        """The same arrays, as if their memory were that of a device."""

        def tensor(self, grad):
            return OnDevice(torch.as_tensor(grad))

    for name in (
        "set_layout", "check", "select", "gather", "accumulate", "whole", "commit", "commit_all", "apply", "apply_dense",
        "apply_nan", "end_step", "rollback_step", "as_feedback", "take_feedback", "residual",
    ):  # fmt: skip
        setattr(OfEmulatedDevice, name, emulating(getattr(OfArrays, name)))


FEEDBACK = [
    {"residual_decay": 0.75},
    {"momentum_correction": 0.5},
    {"momentum_correction": 0.5, "momentum_dampening": 0.5},
    {"momentum_correction": 0.5, "nesterov_correction": True},
    {"momentum_correction": 0.5, "factor_masking": False},
    {"momentum_correction": 0.9, "residual_decay": 0.5},
    {"residual_code": "bf16"},
    {"residual_code": "q8", "momentum_correction": 0.5},
    {"residual_code": "q8", "residual_decay": 0.5},
    {"feedback": False},
    {"offload": True, "residual_decay": 0.5},
    {"offload": True, "momentum_correction": 0.5, "nesterov_correction": True},
]


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class InPyTorch(test_local_half.AgainstTheBuiltIn):
    DEVICE, KERNELS = "cpu", "pytorch"

    def make(self, **options):
        return OfArrays(kernels=self.KERNELS, **options)

    def assert_same(self, first, second):
        """Norms may differ in their last bits."""
        self.assertEqual(len(first), len(second))
        for a, b in zip(first, second):
            if isinstance(a, tuple) and any(isinstance(x, float) for x in a):
                np.testing.assert_allclose(np.array(a, float), np.array(b, float), rtol=1e-6, atol=1e-9)
            else:
                super().assert_same([a], [b])

    def trained(self, make, size, feedback=None, **options):
        return on_ranks(
            skim.in_process_group(size),
            lambda rank, comm: test_local_half.train(comm, rank, make(), **(feedback or {}), **options)[0],
        )

    def test_options_of_feedback(self):
        def check(feedback, **options):
            for size in (1, 2):
                with self.subTest(ranks=size, **feedback, **{k: str(v) for k, v in options.items()}):
                    own = self.trained(lambda: self.make(**feedback), size, **options)
                    of_both = {k: v for k, v in feedback.items() if k != "offload"}
                    built_in = self.trained(lambda: None, size, of_both, **options)
                    for a, b in zip(own, built_in):
                        self.assert_same(a, b)

        for feedback in FEEDBACK:
            check(feedback)
            check(feedback, normal=True, exchange="gtopk", value_code="q4")
            if feedback != {"feedback": False}:
                check(feedback, exchange="shared-indices")
                check(feedback, normal=True, exchange="shared-indices", value_code="q4", bad=(2,))
            check(feedback, dtype=np.float16, scale=16.0, skipped=(2, 3))
            check(feedback, normal=True, density=skim.listed_density([0.01, 1.0, 0.01, 1.0, 0.5], 0.02))

    def test_local_clip(self):
        """The clipped gradient depends on the last bits of a norm."""
        for feedback in ({"local_clip": 1.0}, {"local_clip": 1.0, "momentum_correction": 0.9}):
            own = self.trained(lambda: self.make(**feedback), 2, normal=True)
            built_in = self.trained(lambda: None, 2, feedback, normal=True)
            for a, b in zip(own, built_in):
                for x, y in zip(a, b):
                    if isinstance(x, np.ndarray):
                        np.testing.assert_allclose(x.view(np.float32), y.view(np.float32), rtol=1e-5, atol=1e-8)

    def test_its_states_and_those_of_the_built_in_one(self):
        """Either loads what the other saved, on as many ranks and on others."""
        for feedback in ({}, {"momentum_correction": 0.5}):
            halves = [(lambda: self.make(**feedback), {}), (lambda: None, feedback)]

            def saved(rank, comm, make, options):
                return test_local_half.train(comm, rank, make(), steps=3, **options)[1].save()

            def goes_on(rank, comm, make, options, states):
                reducer = skim.Reducer(comm, density=0.02, dense_below=0, local=make(), **options)
                reducer.set_layout([(0, [("c", 700), ("b", 2000)]), (1, [("a", 3000)])])
                reducer.load(states)
                g = np.random.default_rng(rank).integers(-50, 50, 2700).astype(np.float32)
                reducer.reduce(0, g)
                reducer.end_step()
                return [g, reducer.residual(0), reducer.residual(1)]

            for size in (2, 3):
                results = []
                for maker in halves:
                    states = on_ranks(skim.in_process_group(2), lambda r, c: saved(r, c, *maker))
                    for taker in halves:
                        group = skim.in_process_group(size)
                        results.append(on_ranks(group, lambda r, c: goes_on(r, c, *taker, states)))
                for other in results[1:]:
                    for a, b in zip(results[0], other):
                        self.assert_same(a, b)

    def test_a_damaged_state_changes_nothing(self):
        reducer = test_local_half.train(skim.in_process_group(1)[0], 0, self.make())[1]
        before = [reducer.residual(slot) for slot, _ in test_local_half.LAYOUT]
        state = bytearray(reducer.save())
        state[-100] ^= 1
        with self.assertRaises(skim.StateError):
            reducer.load([np.frombuffer(state, np.uint8)])
        self.assert_same([reducer.residual(slot) for slot, _ in test_local_half.LAYOUT], before)

    def test_bfloat16(self):
        def run(make):
            reducer = skim.Reducer(skim.in_process_group(1)[0], local=make(), density=0.1, dense_below=0)
            reducer.set_layout([(0, [("w", 1000)])])
            seen = []
            for step in range(4):
                g = torch.from_numpy(np.random.default_rng(step).standard_normal(1000)).to(torch.bfloat16)
                g[3] = torch.inf if step == 2 else g[3]
                reducer.reduce(0, g, 4.0)
                reducer.end_step()
                seen += [g.view(torch.int16).numpy(), reducer.residual(0)]
            return seen

        self.assert_same(run(self.make), run(lambda: None))

    def test_residuals_in_fewer_bits_are_rounded_once_in_a_step_that_is_taken_back(self):
        def run(local, options):
            reducer = skim.Reducer(skim.in_process_group(1)[0], local=local, density=0.1, dense_below=0, **options)
            reducer.set_layout([(slot, [(f"w{slot}", 1000)]) for slot in range(2)])
            seen = []
            for step in range(4):
                for slot in range(2):
                    g = np.random.default_rng((step, slot)).standard_normal(1000).astype(np.float32)
                    reducer.reduce(slot, g**3)  # the largest entry of a block, which is sent, is much larger
                if step == 2:
                    reducer.rollback_step()
                else:
                    reducer.end_step()
                seen += [reducer.residual(0), reducer.residual(1)]
            return seen

        for code in ("bf16", "q8"):
            with self.subTest(code=code):
                options = {"residual_code": code}
                self.assert_same(run(self.make(**options), {}), run(None, options))

    def test_what_passes_the_threshold_of_the_step_before(self):
        """Entries that jump, vanish, tie, or are fewer than k: the result is that of a fresh selection."""
        n, k = 30_000, 300
        rng = np.random.default_rng(1)
        noise = lambda: rng.standard_normal(n).astype(np.float32)  # noqa: E731
        steps = [
            noise(), noise(), 1000 * noise(), noise() / 1000, np.zeros(n, np.float32), np.full(n, 7, np.float32),
            np.sign(noise()) * 9, np.where(np.arange(n) < 5, noise(), 0).astype(np.float32), noise(),
            np.full(n, 3e38, np.float32), np.full(n, 3e38, np.float32), np.sign(noise()) * np.float32(3e38), noise(),
        ]  # fmt: skip
        for decay in (1.0, 0.0):

            def run(local, options):
                reducer = skim.Reducer(skim.in_process_group(1)[0], local=local, density=k / n, dense_below=0, **options)
                reducer.set_layout([(0, [("w", n)])])
                seen = []
                for g in steps:
                    g = g.copy()
                    reducer.reduce(0, g)
                    reducer.end_step()
                    seen += [g, reducer.residual(0)]
                return seen

            with self.subTest(decay=decay):
                options = {"residual_decay": decay}
                self.assert_same(run(self.make(**options), {}), run(None, options))

    def test_the_kernels_select_the_largest_of_what_passes(self):
        """The k largest, of equal ones the first, by index. In the order of NumPy's stable sort."""
        rng = np.random.default_rng(2)
        kernels = kernels_for(torch.device(self.DEVICE), self.KERNELS)
        normal, ties = rng.standard_normal(20_000), rng.integers(-3, 4, 20_000)
        cluster = np.where((np.arange(20_000) > 7000) & (np.arange(20_000) < 9000), normal, 0)
        for what, x, above in (
            ("normal", normal, 2.5), ("ties", ties, 2.5), ("ties", ties[:3000], 0.0), ("a cluster", cluster, 0.5),
            ("all", normal[:1023], 0.0), ("the same", np.full(1024, -2.0), 1.0), ("one", normal[:1], 0.0),
            ("none", normal[:5000], 9.0), ("small", normal[:4000] * 1e-42, 0.0), ("large", normal[:4000] * 3e38, 1.0),
        ):  # fmt: skip
            x = np.clip(x, -3.4e38, 3.4e38).astype(np.float32)
            passing = np.flatnonzero(np.abs(x) > np.float32(above))
            by_size = passing[np.argsort(-np.abs(x[passing]), kind="stable")]
            for k in sorted({1, min(300, x.size), max(passing.size - 1, 1), max(passing.size, 1), min(passing.size + 2, x.size)}):
                with self.subTest(what=what, k=k, passing=passing.size):
                    there = lambda n, dtype: torch.zeros(n, dtype=dtype, device=self.DEVICE)  # noqa: E731
                    residual, words = there(x.size, torch.float32), there(HEAD + 2 * k, torch.int32)
                    collected = Collected(
                        there(2 * k + 4096, torch.int64).fill_(-1), there(2, torch.int32), there(2, torch.float64)
                    )
                    kernels.add(torch.from_numpy(x).to(self.DEVICE), residual, 1.0, 1.0, above, collected)
                    self.assertEqual(collected.counts.tolist(), [passing.size, 0])
                    if passing.size > collected.keys.numel():
                        continue
                    kernels.select(collected, k, residual, words)
                    indices, values = words[HEAD : HEAD + k].tolist(), words[HEAD + k :].view(torch.float32).tolist()
                    expected, none = np.sort(by_size[:k]), k - by_size[:k].size
                    self.assertEqual(indices, [-1] * none + expected.tolist())
                    self.assertEqual(values[none:], x[expected].tolist())
                    if not none:
                        self.assertEqual(words[LAST:HEAD].view(torch.float32).tolist(), [float(abs(x[by_size[k - 1]]))])

    def test_the_whole_residual_never_leaves_the_device(self):
        """Bytes that a bucket moves: 8 for each entry of a selection, of its rounded form 4, of the mean 8."""
        n, k = 50_000, 500
        for code, of_sent in (("f32", 0), ("q4", 4)):
            half = self.make()
            reducer = skim.Reducer(skim.in_process_group(1)[0], local=half, density=k / n, value_code=code)
            reducer.set_layout([(0, [("w", n)])])
            for step in range(6):
                before = half.moved_bytes
                reducer.reduce(0, np.random.default_rng(step).standard_normal(n).astype(np.float32))
                reducer.end_step()
            self.assertLessEqual(half.moved_bytes - before, (8 + of_sent + 8) * k + 64, code)

    def test_a_bucket_waits_for_the_device_once(self):
        waits = 0
        wait = Buffers.wait

        def counted(buffers):
            nonlocal waits
            waits += 1
            wait(buffers)

        n, k = 40_000, 400
        with unittest.mock.patch.object(Buffers, "wait", counted):
            half = self.make()
            reducer = skim.Reducer(skim.in_process_group(1)[0], local=half, density=k / n, value_code="q4")
            reducer.set_layout([(0, [("w", n)])])
            of_steps = []
            for step in range(30):
                before = waits
                reducer.reduce(0, np.random.default_rng(step).standard_normal(n).astype(np.float32))
                reducer.end_step()
                of_steps.append(waits - before)
        self.assertEqual(of_steps[5:], [1] * 25, of_steps)

    def test_buckets_without_entries(self):
        for dense_below in (0, 10):
            reducer = skim.Reducer(skim.in_process_group(1)[0], local=self.make(), density=0.1, dense_below=dense_below)
            reducer.set_layout([(0, [("none", 0)]), (1, [("one", 1), ("no other", 0)])])
            for slot, g in ((0, np.zeros(0, np.float32)), (1, np.full(1, 3.0, np.float32))):
                reducer.reduce(slot, g)
                self.assertEqual(g.tolist(), [3.0] * slot)
            self.assertTrue(reducer.end_step())

    def test_wrong_options(self):
        for options, why in (
            ({"momentum_correction": 1.0}, r"momentum_correction: must be a number in \[0, 1\)"),
            ({"momentum": 0.9}, "no option 'momentum'"),
            ({"offload": True, "residual_code": "q8"}, "offload keeps residuals as floats"),
            ({"kernels": "cuda"}, "kernels: must be 'triton', 'pytorch' or None, not 'cuda'"),
        ):
            with self.subTest(**options), self.assertRaisesRegex(skim.InvalidArgument, why):
                skim.TensorLocalHalf(**options)

    def test_wrong_gradients(self):
        for grad, why in (
            (torch.zeros(99), "have 100 entries"),
            (torch.zeros(100, dtype=torch.float64), "float32, float16 or bfloat16"),
            (torch.zeros(10, 20)[:, ::2], "contiguous"),
        ):
            reducer = skim.Reducer(skim.in_process_group(1)[0], local=skim.TensorLocalHalf(), dense_below=0)
            reducer.set_layout([(0, [("w", 100)])])
            with self.assertRaisesRegex(skim.InvalidArgument, why):
                reducer.reduce(0, grad)


@unittest.skipIf(CANNOT_EMULATE, CANNOT_EMULATE)
class OnADevice(InPyTorch):
    """In PyTorch, on an emulated device: nothing mixes memory, or waits, where it must not."""

    def make(self, **options):
        return OfEmulatedDevice(kernels="pytorch", **options)

    def test_copies_of_a_bucket(self):
        n, k = 40_000, 400
        for feedback in ({}, {"momentum_correction": 0.9, "nesterov_correction": True}, {"local_clip": 1.0}):
            reducer = skim.Reducer(skim.in_process_group(1)[0], local=self.make(**feedback), density=k / n, value_code="q4")
            reducer.set_layout([(0, [("w", n)])])
            for step in range(8):
                to_host.clear()
                to_device.clear()
                reducer.reduce(0, np.random.default_rng(step).standard_normal(n).astype(np.float32))
                reducer.end_step()
            with self.subTest(**feedback):
                self.assertEqual(to_host, [28 + 8 * k])  # counts, norms, the last magnitude, indices and values, in one copy
                of_velocity = [4 * k] if "momentum_correction" in feedback else []  # which entries to mask
                self.assertEqual(to_device, [4 * k, *of_velocity, 8 * k])  # the rounded values; the mean

    def test_copies_with_offload(self):
        """The residual crosses once each way, beside what crosses anyway, and so does the velocity."""
        n, k = 40_000, 400
        for kept, feedback in ((1, {}), (2, {"momentum_correction": 0.9, "factor_masking": False})):
            half = self.make(offload=True, **feedback)
            reducer = skim.Reducer(skim.in_process_group(1)[0], local=half, density=k / n, value_code="q4")
            reducer.set_layout([(0, [("w", n)])])
            for step in range(4):
                to_host.clear()
                to_device.clear()
                before = half.moved_bytes
                reducer.reduce(0, np.random.default_rng(step).standard_normal(n).astype(np.float32))
                reducer.end_step()
            with self.subTest(**feedback):
                self.assertEqual(sorted(to_host), [28 + 8 * k, *[4 * n] * kept])
                self.assertEqual(sorted(to_device), [4 * k, 8 * k, *[4 * n] * kept])
                self.assertEqual(half.moved_bytes - before, sum(to_host) + sum(to_device))


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class OffloadedFloats(unittest.TestCase):
    LENGTHS = {0: 50, 1: 70, 2: 1, 3: 30}

    def setUp(self):
        self.kept = _kept.Offloaded()
        for slot, n in self.LENGTHS.items():
            self.kept.put(slot, torch.zeros(n))

    def test_they_are_what_was_written_last(self):
        rng = np.random.default_rng(0)
        expected = {slot: np.zeros(n, np.float32) for slot, n in self.LENGTHS.items()}
        for _ in range(2000):
            slot, what = int(rng.integers(len(self.LENGTHS))), rng.integers(5)
            if what == 4:
                np.testing.assert_array_equal(self.kept.read(slot), expected[slot])
                continue
            if what == 3:
                self.kept.close()
                out = torch.zeros(self.LENGTHS[slot] // 2)
                self.kept.load(slot, 1, out)
                np.testing.assert_array_equal(out, expected[slot][1 : 1 + out.numel()])
                continue
            floats = self.kept.of(slot) if what else self.kept.open(slot, torch.device("cpu"))
            np.testing.assert_array_equal(floats, expected[slot])
            floats[rng.integers(self.LENGTHS[slot])] = rng.standard_normal()
            expected[slot] = floats.numpy().copy()

    def test_the_next_slot_is_copied_when_one_is_closed(self):
        """Two slots are on the device at a time, and no copy is made twice."""
        copies, copy = [], _kept.Copies.copy

        def noted(self_, target, source, *after):
            to_device = next((s for s, x in self.kept._floats.items() if x is source), None)
            copies.append(f"fetch {to_device}" if to_device is not None else "put back")
            return copy(self_, target, source, *after)

        with unittest.mock.patch.object(_kept.Copies, "copy", noted):
            for _ in range(3):
                copies.clear()
                for slot in (2, 0, 1):
                    self.kept.open(slot, torch.device("cpu"))
                    copies.append(f"open {slot}")
                    self.kept.close()
        self.assertEqual(copies, ["open 2", "put back", "fetch 0", "open 0", "put back", "fetch 1", "open 1", "put back", "fetch 2"])

    def test_slots_that_were_read_are_not_copied_back(self):
        for slot, n in self.LENGTHS.items():
            self.kept.open(slot, torch.device("cpu")).fill_(slot)
        self.kept.close()
        moved = self.kept.moved_bytes
        for slot in self.LENGTHS:
            self.assertTrue((self.kept.read(slot) == slot).all())
        self.kept.close()
        self.assertLessEqual(self.kept.moved_bytes - moved, 4 * sum(self.LENGTHS.values()))

    def test_one_slot_is_copied_ahead_of_its_next_step(self):
        for _ in range(2):
            self.kept.open(1, torch.device("cpu"))
            self.kept.close()
        moved = self.kept.moved_bytes
        self.kept.open(1, torch.device("cpu"))
        self.assertEqual(self.kept.moved_bytes, moved)


@unittest.skipIf(CANNOT_EMULATE, CANNOT_EMULATE)
class Training(unittest.TestCase):
    """skim.LocalSteps and skim.Aggregator train alike on an emulated device and on the CPU."""

    LENGTHS = {"a": 3000, "b": 50}

    def setUp(self):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)

    def train(self, tensor, make, step):
        """The parameters at the end, and the largest copy to the host in the last steps."""
        rng = np.random.default_rng(0)

        def normal(n):
            return tensor(rng.standard_normal(n).astype(np.float32))

        model = torch.nn.Module()
        for name, n in self.LENGTHS.items():
            model.register_parameter(name, torch.nn.Parameter(normal(n)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        skimmed = make(model, optimizer)
        for s in range(12):
            if s == 6:
                to_host.clear()
            for p in model.parameters():
                p.grad = normal(p.numel())
            step(skimmed, optimizer)
        largest = max(to_host, default=0)
        if hasattr(skimmed, "finish"):
            skimmed.finish()
        return [memory_of(p.detach()).clone() for p in model.parameters()], largest

    def check(self, make, step=lambda skimmed, _: skimmed.step()):
        on_cpu, _ = self.train(torch.as_tensor, make, step)
        with EmulatedDevice():
            there, largest = self.train(lambda x: OnDevice(torch.as_tensor(x)), make, step)
        for a, b in zip(on_cpu, there):
            torch.testing.assert_close(a, b, rtol=0.0, atol=0.0)
        self.assertLess(0, largest)
        self.assertLess(largest, 4 * sum(self.LENGTHS.values()) / 2)

    def test_local_steps(self):
        for options in ({"ahead": 1.0}, {"ahead": 0.0}, {"outer_momentum": 0.9, "outer_lr": 0.5}, {"residual_decay": 0.5}):
            for every in (1, 3):
                with self.subTest(every=every, **options):
                    options = {"density": 0.05, "dense_below": 0, "exchange": "allgather", **options}
                    self.check(lambda model, optimizer: skim.LocalSteps(model, optimizer, every=every, **options))

    def test_late_exchanges_come_in_the_order_of_the_callers_stream(self):
        """Their thread begins with another stream, on which its work could come before what it reads was written."""

        def make(model, optimizer):
            return skim.LocalSteps(model, optimizer, every=2, delay=1, density=0.05, exchange="allgather", local="host")

        def value(x):
            return OnDevice(torch.as_tensor(x))

        def emulated(aggregator, job):  # the mode is of one thread
            def run():
                with EmulatedDevice():
                    job()

            submit(aggregator, run)

        mine, submit = Stream(), skim.Aggregator.submit
        backend.used.clear()
        patched = unittest.mock.patch.object(skim.Aggregator, "submit", emulated)
        with EmulatedDevice(), backend.stream(mine), patched:
            self.train(value, make, lambda skimmed, _: skimmed.step())
        self.assertEqual(backend.used, {mine})

    def test_aggregator(self):
        def step(aggregator, optimizer):
            aggregator.step()
            optimizer.step()

        for with_optimizer in (False, True):
            with self.subTest(with_optimizer=with_optimizer):
                self.check(
                    lambda model, optimizer: skim.Aggregator(
                        model.named_parameters(), 0.05, "allgather", dense_below=0,
                        **({"optimizer": optimizer} if with_optimizer else {}),
                    ),
                    step,
                )  # fmt: skip


@unittest.skipIf(CANNOT_EMULATE, CANNOT_EMULATE)
class DryRun(unittest.TestCase):
    def test_it_waits_for_the_device(self):
        """Backward takes 0.1 s and the sum 0.04 s more, on a device to which the host only queues work, as with NCCL."""
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        now = 0.0

        def work_of(seconds):
            def run():
                nonlocal now
                now += seconds

            return run

        class Sum:
            def wait(self):
                backend.queue(work_of(0.04))

        watcher = skim.attach(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2)), dry_run=3)
        flat = OnDevice(torch.from_numpy(np.random.default_rng(0).standard_normal(5000).astype(np.float32)))
        to_host.clear()
        clock = unittest.mock.patch("skim.dry_run.time.perf_counter", lambda: now)
        printed = io.StringIO()
        with EmulatedDevice(), clock, contextlib.redirect_stdout(printed):
            for _ in range(dry_run.WARM_UP + 1 + watcher.steps):
                watcher._seen += 1
                backend.queue(work_of(0.1))
                watcher._backward_ends([Sum()], [flat])
        self.assertAlmostEqual(watcher.step_s, 0.14)
        self.assertAlmostEqual(watcher.exposed_s, 0.04)
        captured = [p.captured for p in watcher.predictions]
        self.assertEqual(sorted(captured[1:]) + [1.0], captured[1:] + captured[:1])
        self.assertIn(f"{watcher.verdict}\n", printed.getvalue())
        self.assertLess(max(to_host), 4 * flat.numel() / 2, "the gradient stays on the device")


if HAS_TORCH and torch.cuda.is_available():

    class OnCuda(InPyTorch):
        DEVICE = "cuda"

        def make(self, **options):
            return OfCuda(kernels=self.KERNELS, **options)

        def test_a_warm_step_neither_waits_twice_nor_takes_memory(self):
            """PyTorch raises an error at every wait but the one for the selected entries."""
            n, k, waits = 1_000_000, 1000, 0
            wait, watched = Buffers.wait, torch.cuda.set_sync_debug_mode

            def counted(buffers):
                nonlocal waits
                waits += 1
                watched("default")
                wait(buffers)
                watched("error")

            def take(reducer, gradients):
                for g in gradients:
                    reducer.reduce(0, g)
                    reducer.end_step()

            def check(half, code):
                nonlocal waits
                comm = skim.in_process_group(1)[0]
                reducer = skim.Reducer(comm, local=half, density=k / n, value_code=code, exchange="allgather")
                reducer.set_layout([(0, [("w", n)])])
                gradients = [torch.randn(n, device="cuda") for _ in range(24)]
                take(reducer, gradients[:12])
                torch.cuda.synchronize()
                before, waits = torch.cuda.memory_stats()["segment.all.allocated"], 0
                with unittest.mock.patch.object(Buffers, "wait", counted):
                    watched("error")
                    take(reducer, gradients[12:])
                    watched("default")
                self.assertEqual(waits, 12)
                self.assertEqual(torch.cuda.memory_stats()["segment.all.allocated"], before)

            for feedback in [{}, *FEEDBACK]:
                for code in ("f32", "q4"):
                    with self.subTest(code=code, **feedback):
                        try:
                            check(skim.TensorLocalHalf(kernels=self.KERNELS, **feedback), code)
                        finally:
                            watched("default")

    class OnCudaInTriton(OnCuda):
        KERNELS = "triton"


if os.environ.get("TRITON_INTERPRET") == "1":  # Triton reads it when it is imported

    class InTriton(InPyTorch):
        KERNELS = "triton"

        @classmethod
        def setUpClass(cls):
            # The interpreter's time goes by operations, so by tiles. A bucket of 50,000 entries still has several programs,
            # and so has its selection.
            from skim import _triton_pass

            store = _kept.ResidualStore.store

            def one_at_a_time(*arguments):
                with ONE_AT_A_TIME:
                    store(*arguments)

            for patch in (
                unittest.mock.patch.object(_triton_pass, "ROWS", 2048),
                unittest.mock.patch.object(_triton_pass, "CANDIDATES", 4096),
                unittest.mock.patch.object(_kept.ResidualStore, "store", one_at_a_time),
            ):
                patch.start()
                cls.addClassCleanup(patch.stop)


    class Trial(unittest.TestCase):
        """A device tries the kernels before it uses them."""

        def setUp(self):
            self.forget()
            self.addCleanup(self.forget)

        @staticmethod
        def forget():
            _passes.has_triton.cache_clear()
            _triton_trial.what_fails.cache_clear()

        def check_that_pytorch_does_the_work(self, why, **wrong):
            """wrong: what stands for a function of _triton_pass, or a method of InTriton."""
            from skim import _triton_pass

            with contextlib.ExitStack() as patches:
                for name, function in wrong.items():
                    where = _triton_pass if hasattr(_triton_pass, name) else _triton_pass.InTriton
                    patches.enter_context(unittest.mock.patch.object(where, name, function))
                for options in ({}, {"residual_code": "q8"}):
                    self.forget()
                    with self.subTest(why), self.assertWarnsRegex(UserWarning, rf"^skim: Triton does not work on cpu \({why}\)"):
                        self.assertEqual(self.trained(OfArrays(**options)), self.trained(None, **options))
                with self.assertRaisesRegex(skim.InvalidArgument, f"kernels: no triton here: {why}; use pytorch"):
                    self.trained(OfArrays(kernels="triton"))

        @staticmethod
        def trained(local, **options):
            options = options if local is None else {"local": local}
            reducer = skim.Reducer(skim.in_process_group(1)[0], density=0.01, dense_below=0, exchange="allgather", **options)
            reducer.set_layout([(0, [("w", 3000)])])
            rng, means = np.random.default_rng(3), []
            for _ in range(3):
                means.append(rng.standard_normal(3000).astype(np.float32))
                reducer.reduce(0, means[-1])
                reducer.end_step()
            return [m.tolist() for m in means]

        def test_kernels_that_work_are_used(self):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                self.assertTrue(_passes.has_triton(torch.device("cpu"), None))
            self.assertTrue(_passes.has_triton(torch.device("cpu"), "triton"))

        def test_kernels_that_raise_are_not_used(self):
            def raises(*arguments, **named):
                raise RuntimeError("Failed to find C compiler.\nPlease specify one")

            for name in ("add", "select", "store"):
                self.check_that_pytorch_does_the_work("RuntimeError: Failed to find C compiler.", **{name: raises})

        def test_kernels_that_are_wrong_are_not_used(self):
            from skim import _triton_pass

            add, select, store = _triton_pass.InTriton.add, _triton_pass.InTriton.select, _triton_pass.store

            def fused(kernels, gradient, residual, factor, decay, above, into):
                """A product is not rounded before it is added."""
                exact = residual.double() * decay + gradient.double() * factor
                add(kernels, gradient, residual, factor, decay, above, into)
                residual.copy_(torch.where(exact.isfinite(), exact, residual).float())

            def no_counts(kernels, gradient, residual, factor, decay, above, into):
                add(kernels, gradient, residual, factor, decay, above, into)
                into.counts[1] = 0

            def half_a_norm(kernels, gradient, residual, factor, decay, above, into):
                add(kernels, gradient, residual, factor, decay, above, into)
                into.norms2[1] *= 0.5

            def another_tie(kernels, collected, k, residual, words):
                select(kernels, collected, k, residual, words)
                words[HEAD + k - 1] += 1

            def another_rounding(x, code, values, exponents):
                store(x, code, values, exponents)
                values[0] += 1

            for why, wrong in (
                ("its residuals are wrong", {"add": fused}), ("its counts are wrong", {"add": no_counts}),
                ("its norms are wrong", {"add": half_a_norm}), ("its selected entries are wrong", {"select": another_tie}),
                ("its bf16 residuals are wrong", {"store": another_rounding}),
            ):  # fmt: skip
                self.check_that_pytorch_does_the_work(why, **wrong)


@unittest.skipUnless(HAS_TRITON, "triton is not installed")
class Interpreted(unittest.TestCase):
    def check(self, count, *names):
        done = subprocess.run(
            [sys.executable, "-m", "unittest", *(f"test_tensor_half.{name}" for name in names)],
            cwd=pathlib.Path(__file__).parent, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True,
            text=True, timeout=1800,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr, rf"Ran {count} tests?\b")

    # Three parts, because the interpreter works on one core, and tests run at the same time. The first takes as long as
    # the others together.
    LONGEST = "test_options_of_feedback"

    def check_laws(self, part):
        others = [n for n in unittest.defaultTestLoader.getTestCaseNames(InPyTorch) if n != self.LONGEST]
        names = [f"InTriton.{name}" for name in ([self.LONGEST], others[::2], others[1::2])[part]]
        self.check(len(names), *names)

    def test_the_longest_law_of_InPyTorch_holds_in_Triton(self):
        self.check_laws(0)

    def test_laws_of_InPyTorch_hold_in_Triton(self):
        self.check_laws(1)

    def test_all_other_laws_of_InPyTorch_hold_in_Triton(self):
        self.check_laws(2)

    def test_a_device_tries_the_kernels_first(self):
        self.check(3, "Trial")


CHANGES_LAYOUT = """
import re, sys, skim, torch
slots, n = 40, 1_000_000
def taken(what):  # VmRSS: now; VmHWM: at most so far. (ru_maxrss would have that of the process that started this one.)
    return 1024 * int(re.search(what + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
half = getattr(skim, sys.argv[1])(residual_code="q8")
half.set_layout([(s, [(f"p{s}", n)]) for s in range(slots)])
before = taken("VmRSS")
half.set_layout([(s, [(f"p{slots - 1 - s}", n)]) for s in range(slots)])
print((taken("VmHWM") - before) / (slots * n))
"""


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Memory(unittest.TestCase):
    def test_a_change_of_layout_never_holds_all_residuals_as_floats(self):
        """It takes 1 byte an entry for the new codes, and the floats of one slot. PyTorch's own temporaries, for 4 M
        entries at once, are about 3 bytes an entry here. Floats of old and new layout would take 8 more."""
        for kind, most in (("ErrorFeedback", 3.0), ("TensorLocalHalf", 8.0)):
            done = subprocess.run([sys.executable, "-c", CHANGES_LAYOUT, kind], stdout=subprocess.PIPE, text=True, check=True)
            self.assertLess(float(done.stdout), most, kind)


@unittest.skipUnless(HAS_TRITON, "triton is not installed")
class Compiled(unittest.TestCase):
    def test_all_kernels_compile_for_gpus_of_both_makers(self):
        """The interpreter runs more than the compiler takes."""
        from skim import _triton_pass as kernels
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile

        of_pass = {
            "residual": "*fp32", "n": "i32", "factor": "fp32", "decay": "fp32", "above": "fp32", "keys": "*i64",
            "room": "i32", "counts": "*i32", "norms2": "*fp64", "begins": "*i32",
        }  # fmt: skip
        of_tile = {"rows": kernels.ROWS, "columns": kernels.COLUMNS, "tiles_of_program": kernels.TILES}
        of_keys = {"keys": "*i64", "counts": "*i32", "room": "i32", "k": "i32", "histograms": "*i32"}
        of_candidates = {"tile": kernels.ROWS * kernels.COLUMNS, "block": kernels.CANDIDATES}
        of_mark = {"marks": "*i64", "of_tiles": "*i64", "tile": "constexpr", "block": "constexpr"}
        of_write = {
            "upto": "*i64", "upto_tile": "*i64", "begins": "*i32", "residual": "*fp32", "words": "*i32",
            "tile": "constexpr", "block": "constexpr",
        }  # fmt: skip
        of_q8 = {"bytes": "*i8", "exponents": "*i8", "rows": "constexpr", "block": "constexpr"}
        sources = [
            *((kernels._pass, {"gradient": g, **of_pass, **dict.fromkeys(of_tile, "constexpr")}, of_tile)
              for g in ("*fp32", "*fp16", "*bf16")),
            *((kernels._count_digits, {**of_keys, "digit": "constexpr", "block": "constexpr"},
               {"digit": digit, "block": kernels.CANDIDATES}) for digit in range(kernels.DIGITS)),
            (kernels._mark, {**of_keys, **of_mark}, of_candidates),
            (kernels._write, {**of_keys, **of_write}, of_candidates),
            (kernels._store_bf16, {"x": "*fp32", "n": "i32", "halves": "*i16", "block": "constexpr"}, {"block": kernels.BLOCK}),
            (kernels._store_q8, {"x": "*fp32", "n": "i32", **of_q8}, {"rows": kernels.BLOCKS, "block": kernels.SHARED}),
        ]
        for target in (GPUTarget("cuda", 70, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
            for kernel, types, constants in sources:
                with self.subTest(target=target, kernel=kernel.fn.__name__, types=types):
                    made = compile(ASTSource(kernel, types, constants), target=target, options={"enable_fp_fusion": False, "num_warps": kernels.WARPS})
                    assembly = made.asm["ptx" if target.backend == "cuda" else "amdgcn"]
                    self.assertIn(kernel.fn.__name__, assembly)
                    # Products are rounded before they are added, as on the CPU.
                    self.assertNotRegex(assembly, r"\bfma\.rn(\.ftz)?\.f32\b|\bv_(fma|fmac|mac|mad)_f32")


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Streams(unittest.TestCase):
    def test_a_bucket_goes_in_the_order_of_the_streams_of_all_devices(self):
        """The first bucket of a step ends the step before, on the devices of the others too."""
        current = []

        class Device:
            made = 0

            def Stream(self, device):  # noqa: N802 - as PyTorch calls it
                self.made += 1
                return unittest.mock.Mock(device=device)

            @contextlib.contextmanager
            def stream(self, stream):
                current.append(stream.device)
                yield
                current.pop()

        compression = Compression.__new__(Compression)
        compression.local, compression._streams = object(), {}
        one, other, cpu = torch.device("meta", 0), torch.device("meta", 1), torch.device("cpu")
        with unittest.mock.patch.object(torch, "meta", Device(), create=True):
            for device, expected in (
                (cpu, []), (one, [one]), (other, [one, other]), (one, [other, one]), (cpu, [one, other]),
            ):  # fmt: skip
                ready = None if device is cpu else unittest.mock.Mock()
                with self.subTest(device), compression.after(ready, device):
                    self.assertEqual(current, expected)
                    self.assertEqual([c[0] for c in ready.method_calls] if ready else [], ["wait"] if ready else [])
            self.assertEqual(torch.meta.made, 2)


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class ReducingWithTensors(test_reducer.Reducing):
    """The laws of the reducer hold with it, too."""

    @staticmethod
    def parts():
        return {"local": OfArrays()}


if __name__ == "__main__":
    unittest.main()
