"""skim.attach on DistributedDataParallel, under torchrun: test_ddp.py runs every function case_* on all ranks, in order."""

import contextlib
import copy
import gc
import json
import math
import os
import pathlib
import pickle
import shutil
import tempfile
import threading
import types
import unittest.mock
import warnings
import weakref

import numpy as np
import skim
import torch
import torch.distributed as dist
from cases import expect, expect_equal_everywhere, expect_that_a_failed_wait_ends_backward, gathered, left_out, run
from exact_training import (
    BODY,
    BUCKET_MB,
    DEVICE,
    EXACT,
    HEAD,
    LENGTHS,
    NEW,
    RANK,
    SIZE,
    Linear,
    Named,
    attached,
    check_law,
    default_device,
    default_dtype,
    everywhere,
    flat,
    four_steps,
    gloo_takes,
    gradients,
    kept,
    local_steps,
    main,
    means,
    same,
    total,
    train,
)
from numpy_local_half import NumpyLocalHalf
from skim._options import DEFAULTS
from skim.ddp import DdpCompression
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def needs_the_cpu(why):
    """Whether the case must be left out, because models are elsewhere."""
    if DEVICE.type != "cpu" and RANK == 0:
        print(f"left out on {DEVICE}: {why}", flush=True)
    return DEVICE.type != "cpu"


# ---- the life of an attachment


def case_detach_and_attach_anew():
    for make in (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), lambda p: torch.optim.AdamW(p)):
        inner = Linear()
        optimizer = make(inner.parameters())
        before = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        model = attached(inner, attach={"optimizer": optimizer})
        train_steps = lambda steps: [model(gradients(s)).backward() or means(model) for s in steps]  # noqa: E731
        train_steps(range(3))
        skim.detach(model)
        assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == before
        expect(skim.InvalidArgument, "has not been attached", skim.report, model)
        [got] = train_steps([5])
        same(total(flat(gradients(5))), SIZE * got)  # whole gradients
        skim.attach(model, **EXACT, density=0.02, timeout=60.0)
        train(model, range(4))
        assert skim.report(model).steps == 4


class Knowing:
    """A schedule of one's own that refers to the model."""

    def __init__(self, model):
        self.model = model

    def density(self, progress):
        return 0.02


def case_a_model_that_nobody_uses_is_freed():
    def dry_run(model):
        return skim.attach(model, dry_run=2)

    def number(model):
        return skim.attach(model, **EXACT, density=0.02, timeout=60.0)

    def own_schedule(model):
        return skim.attach(model, **EXACT, density=Knowing(model), timeout=60.0)

    for attach in (dry_run, number, own_schedule):
        model = DDP(Linear(), bucket_cap_mb=BUCKET_MB)
        made = weakref.ref(attach(model))
        for step in range(4):
            model(gradients(step)).backward()
        gc.collect()
        assert made() is not None, "the model keeps what attach returned"
        model = weakref.ref(model)
        gc.collect()
        assert model() is None and made() is None, attach

    module = Linear()
    for _ in range(2):
        model = DDP(module, find_unused_parameters=True)
        hooks = [o for o in gc.get_objects() if isinstance(o, types.FunctionType) and o.__qualname__.startswith("_noting.")]
        assert not hooks, f"{len(hooks)} hooks of a DDP that is gone"
        number(model)
        del model
        gc.collect()


def case_a_dry_run_and_then_attach():
    model = DDP(Linear(), bucket_cap_mb=BUCKET_MB)
    skim.attach(model, dry_run=2)
    for of_model in (skim.report, skim.state_dict, skim.detach):
        expect(skim.InvalidArgument, "in a dry run, which compresses nothing; call skim.attach(model)", of_model, model)
    for step in range(12):
        model(gradients(step)).backward()
        got = means(model)
    same(total(flat(gradients(11))), SIZE * got)
    skim.attach(model, **EXACT, density=0.02, timeout=60.0)
    train(model, range(4))


def case_backward_raises_the_error_itself():
    if needs_the_cpu("a local half in NumPy"):
        return

    class Breaks(OfTensors):
        def commit(self, *_):
            raise ZeroDivisionError("mine")

    model = attached(attach={"local": Breaks if RANK == SIZE - 1 else OfTensors})
    try:
        for step in range(3):
            model(gradients(step)).backward()
        raise AssertionError("backward did not raise")
    except ZeroDivisionError as e:
        assert RANK == SIZE - 1 and str(e) == "mine", e
    except skim.CommError as e:
        assert RANK < SIZE - 1 and e.peer == SIZE - 1, e


def case_backward_raises_an_error_of_the_wait_for_a_gradient():
    """The first bucket of a step is reduced by Skim's thread, the last one by backward's own."""
    for is_first in (True, False):
        model = attached()
        train(model, range(4))
        place = 1 if is_first else len(skim.compression_of(model).buckets)
        expect_that_a_failed_wait_ends_backward(model, place, lambda: model(gradients(4)).backward())


def case_backward_raises_an_error_of_a_future():
    """After an error of its own, a device records no event, so a future does not take a tensor of this device."""
    for is_first in (True, False):  # Skim's thread completes the first one, backward's own the last one
        model = attached()
        train(model, range(4))
        compression, complete, of_device = skim.compression_of(model), torch.futures.Future.set_result, set()
        reduce = compression._reduce_bucket

        def reduce_bucket(index, last, members, flat):
            reduce(index, last, members, flat)
            if RANK == SIZE - 1 and (last or is_first):
                of_device.add(flat.data_ptr())

        def set_result(future, result):
            if result.data_ptr() in of_device:
                raise ZeroDivisionError("mine")
            complete(future, result)

        compression._reduce_bucket, torch.futures.Future.set_result = reduce_bucket, set_result
        try:
            if RANK == SIZE - 1:
                expect(ZeroDivisionError, "mine", lambda: model(gradients(4)).backward())
            else:
                # The other ranks may have had all that they need of this step.
                expect(skim.CommError, "", lambda: [model(gradients(4)).backward() for _ in range(2)])
        finally:
            torch.futures.Future.set_result = complete


def case_an_interrupt_before_a_bucket_ends_the_group_and_nobody_waits():
    for where, names in ((DdpCompression, ("run_after_others", "submit")), (torch.futures, ("Future",))):
        model = attached()
        train(model, range(4))
        compression = skim.compression_of(model)
        if RANK == SIZE - 1:
            try:
                interrupts = dict.fromkeys(names, unittest.mock.Mock(side_effect=KeyboardInterrupt))
                with unittest.mock.patch.multiple(where, **interrupts):
                    model(gradients(4)).backward()
                raise AssertionError("backward did not raise")
            except KeyboardInterrupt:
                pass
            assert isinstance(compression.error, KeyboardInterrupt)
        else:
            try:
                model(gradients(4)).backward()
                raise AssertionError("backward did not raise")
            except skim.CommError as e:
                assert e.peer == SIZE - 1 and "timed out" not in str(e), e
        dist.barrier()  # until then the last rank keeps its connections


def case_an_interrupt_while_means_go_to_ddp_ends_backward():
    """After a state was loaded, whole steps are exchanged at once, and DDP waits for all buckets until then."""

    class Interrupted:
        times = 0

        def __init__(self, future):
            self.future = future

        def done(self):
            Interrupted.times += 1
            if Interrupted.times == 1:
                raise KeyboardInterrupt
            return self.future.done()

        def set_result(self, mean):
            self.future.set_result(mean)

    class HeldBack(list):
        def append(self, pair):
            super().append((Interrupted(pair[0]), pair[1]))

    saved = attached()
    train(saved, range(4))
    model = attached()
    skim.load_state_dict(model, skim.state_dict(saved))
    model(gradients(4)).backward()  # DDP has all parameters in one bucket
    if RANK == SIZE - 1:
        skim.compression_of(model).held_back = HeldBack()
        try:
            model(gradients(4)).backward()
            raise AssertionError("backward did not raise")
        except KeyboardInterrupt:
            pass
        assert Interrupted.times > 3, "all buckets had to wait"
    else:  # the last rank has taken part in this step
        expect(skim.CommError, "", lambda: [model(gradients(4)).backward() for _ in range(2)])
    dist.barrier()


def case_trainable_parameters_that_change():
    """Ranks would diverge without a word, as with plain DDP."""
    inner = Linear()
    inner.w[2].requires_grad_(False)
    model = attached(inner)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(3):
            model(gradients(step)).backward()
        assert not seen, [str(w.message) for w in seen]
        inner.w[2].requires_grad_(True)
        for step in range(3, 6):
            model(gradients(step)).backward()
    told = [str(w.message) for w in seen if "'w.2'" in str(w.message)]
    assert len(told) == 1 and "call skim.detach" in told[0], [str(w.message) for w in seen]


def case_trainable_parameters_that_changed_before_attach():
    """DDP exchanges the gradients of those that it found, and Skim would look for others."""
    for frozen in (False, True):
        inner = Linear()
        inner.w[2].requires_grad_(not frozen)
        model = DDP(inner, bucket_cap_mb=BUCKET_MB)
        inner.w[2].requires_grad_(frozen)
        before = len(inner.w) - frozen
        text = f"requires_grad has changed since DDP was made: {before} parameters were trainable then, and "
        expect(skim.InvalidArgument, text, skim.attach, model, **EXACT)
        inner.w[2].requires_grad_(not frozen)
        for _ in range(2):  # DDP forms its buckets anew
            model(gradients(0)).backward()
        skim.attach(model, **EXACT)
        model(gradients(0)).backward()


def case_state_that_rank_0_saves():
    model = attached()
    train(model, range(4))
    mine, of_all = skim.state_dict(model), skim.state_dict(model, gather=True)
    expected = [*(f"rank_{r}_of_{SIZE}" for r in range(SIZE)), "buckets"] if RANK == 0 else []
    assert list(of_all) == expected, list(of_all)
    [of_all] = dist_broadcast(of_all)
    assert len(mine) == 2
    for key, value in mine.items():
        assert torch.equal(of_all[key], value)
    again = attached()
    skim.load_state_dict(again, of_all)
    assert torch.equal(kept(again), kept(model))


def dist_broadcast(thing):
    things = [thing]
    dist.broadcast_object_list(things)
    return things


# ---- where residuals are


def case_local():
    as_on_a_device = bool(os.environ.get("AS_ON_A_DEVICE")) or DEVICE.type != "cpu"
    kinds = {}
    for local in (None, "host", "device"):
        model = attached(attach={"local": local})
        given, _ = train(model, range(4))
        kinds[local] = isinstance(skim.compression_of(model).local, skim.TensorLocalHalf)
        report = skim.report(model)
        kept = sum(b.k for b in report.buckets.values() if b.dense_steps == 0)
        dense = sum(b.n for b in report.buckets.values() if b.dense_steps)
        # Of each entry that is sent 8 bytes, and 8 of each entry of the mean, of which there are P as many.
        most = 4 * (8 * kept * (1 + SIZE) + 8 * dense + 64 * len(LENGTHS))
        assert (report.moved_bytes > 0) == kinds[local] and report.moved_bytes <= 2 * most, (report, most)
        assert ("between device and host" in str(report)) == kinds[local], str(report)
    assert kinds == {None: as_on_a_device, "host": False, "device": True}, kinds
    # Some ranks on CPUs and some on devices: the device is no option, so they may be in one group.
    of = type(skim.compression_of(model).options)
    own = of.local_half
    with unittest.mock.patch.object(of, "local_half", lambda self, _: own(self, torch.device("cuda" if RANK else "cpu"))):
        model = attached(attach={"momentum_correction": 0.9, "residual_decay": 0.95, "local_clip": 0})
    for step in range(4):
        model(gradients(step)).backward()
        got = means(model)
        assert got.any()
        expect_equal_everywhere(got, "means")
    # What a device does not have: by default the residuals are then in host memory.
    for options in ({"select": "gaussian"}, {"per_parameter": True}, {"selector": skim.Selector("exact")}):
        model = attached(attach=options)
        assert skim.compression_of(model).local is None
        expect(skim.InvalidArgument, "; use local='host'", attached, attach={**options, "local": "device"})
    expect(skim.InvalidArgument, "local: must be 'device', 'host', None or a function", attached, attach={"local": "gpu"})


def case_offload():
    """The same bits, with residuals and velocities that are in the host's memory between the steps."""
    for options in ({}, {"momentum_correction": 0.5}, {"residual_decay": 0.5, "exchange": "shared-indices"}):
        seen = []
        for offload in (False, True):
            model = attached(attach={"local": "device", "offload": offload, **options})
            seen.append([])
            for step in range(6):
                model(gradients(step)).backward()
                seen[-1].append(means(model))
            seen[-1].append(kept(model))
            moved = skim.report(model).moved_bytes
        for a, b in zip(*seen):
            assert torch.equal(a, b), options
        assert moved > 6 * 2 * 4 * sum(LENGTHS), moved
    train(attached(attach={"local": "host", "offload": True}), range(4))  # they are there anyway
    for options, why in (
        ({"residual_code": "q8"}, "offload keeps residuals as floats"),
        ({"local": skim.TensorLocalHalf}, "a local half of your own exclude each other"),
        ({"offload": 1}, "offload: must be True or False, not 1"),
    ):
        expect(skim.InvalidArgument, why, attached, attach={"offload": True, **options})


# ---- the law, however DDP is set up


def case_mass_is_conserved_through_the_rebuild_of_buckets():
    for exchange in ("allgather", "gtopk", "oktopk", "param-server", "auto"):
        model = attached(attach={"exchange": exchange})
        train(model, range(7))
        buckets = skim.compression_of(model).buckets
        assert buckets is not None and len(buckets) >= 3, buckets
        assert len(skim.report(model).buckets) == len(buckets)
        assert SIZE == 1 or 0 < skim.report(model).sent_bytes < skim.report(model).dense_bytes


def case_options_of_ddp():
    train(attached(static_graph=True), range(6))
    train(attached(gradient_as_bucket_view=True), range(6))
    train(attached(find_unused_parameters=True), range(6))
    train(attached(bucket_cap_mb=25), range(6))


def case_residuals_decay():
    model = attached(attach={"residual_decay": 0.5})
    aggregator = skim.Aggregator(Linear().parameters(), 0.02, "allgather", residual_decay=0.5)
    left = of_aggregator = torch.zeros(sum(LENGTHS)).double()
    for step in range(5):
        c = gradients(step)
        model(c).backward()
        before, left = left, kept(model)
        same(total(0.5 * before + flat(c)), SIZE * means(model) + total(left))
        mean = [g.clone() for g in c]
        assert aggregator.reduce(mean)
        before, of_aggregator = of_aggregator, flat(aggregator.residuals().values())
        same(total(0.5 * before + flat(c)), SIZE * flat(mean) + total(of_aggregator))
    assert left.any() and of_aggregator.any()


def case_density_1_is_a_dense_sum():
    model = attached(attach={"density": 1.0})
    given, got = train(model, range(4))
    same(total(given), SIZE * got)


def case_parameters_that_nobody_used_keep_their_residuals():
    def used_in(step):
        return set(range(len(LENGTHS))) - ({0, 3} if step % 2 else {4} if RANK == 0 and SIZE > 1 else set())

    model = attached(find_unused_parameters=True)
    given, of_steps = torch.zeros(sum(LENGTHS)).double(), []
    for step in range(8):
        if step == 4:
            state = skim.state_dict(model)
        c, used = gradients(step), used_in(step)
        model(c, used).backward()
        for i, p in enumerate(model.module.w):
            assert (p.grad is not None) == (step % 2 == 0 or i not in (0, 3)), (step, i)
        given += flat([g if i in used else 0 * g for i, g in enumerate(c)])
        of_steps.append(means(model))
    check_law(model, given, sum(of_steps))
    # A run that resumes reduces its first steps in the saved buckets, and gives back as much.
    again = attached(find_unused_parameters=True, bucket_cap_mb=25)
    skim.load_state_dict(again, state)
    for step in (4, 5):
        again(gradients(step), used_in(step)).backward()
        assert torch.equal(means(again), of_steps[step]), step


def case_a_nan_is_seen_whichever_parameter_of_its_bucket_nobody_used():
    for options in ({}, {"bucket_cap_mb": 25}):
        model = attached(find_unused_parameters=True, **options)
        given, got = torch.zeros(sum(LENGTHS)).double(), torch.zeros(sum(LENGTHS)).double()
        for step in range(4 * len(LENGTHS)):
            c, nobodys = gradients(step), step // 4
            infinite = c[nobodys - 1 if step % 2 else (nobodys + 1) % len(c)]
            is_infinite = step % 4 > 1
            if is_infinite and RANK == SIZE - 1:
                infinite[0] = torch.inf
            model(c, set(range(len(c))) - {nobodys}).backward()
            mean = means(model)
            assert bool(mean.isfinite().all()) != is_infinite, (options, step)
            infinite[infinite.isinf()] = 0.0
            given += flat([0 * g if i == nobodys else g for i, g in enumerate(c)])
            got += 0.0 if is_infinite else mean
        check_law(model, given, got)


def case_parameters_with_gradients_of_zeros_get_their_means():
    model = attached(find_unused_parameters=True)
    given, got = torch.zeros(sum(LENGTHS)).double(), torch.zeros(sum(LENGTHS)).double()
    for step in range(8):
        c = [0 * g if step % 2 and i in (0, 3) else g for i, g in enumerate(gradients(step))]
        model(c).backward()
        given += flat(c)
        got += means(model)
    check_law(model, given, got)


def ddp_applies_what_only_the_first_part_of_a_step_used():
    def zeros(_, bucket):
        return dist.all_reduce(bucket.buffer().zero_(), async_op=True).get_future().then(lambda f: f.value()[0])

    model = DDP(Linear(), find_unused_parameters=True)
    model.register_comm_hook(None, zeros)
    with model.no_sync():
        model(gradients(0)).backward()
    model(gradients(0), {1}).backward()
    return not any(p.grad.any() for p in model.module.w)


def case_parameters_that_were_used_before_the_last_part_of_a_step_get_their_means():
    if not ddp_applies_what_only_the_first_part_of_a_step_used():
        left_out("no_sync with parameters that the step's last part does not use: DDP does not apply their means")
        return
    everything = set(range(len(LENGTHS)))
    model = attached(find_unused_parameters=True)
    given, got = torch.zeros(sum(LENGTHS)).double(), torch.zeros(sum(LENGTHS)).double()
    for step in range(8):
        with model.no_sync():
            model(gradients(2 * step), everything - {3}).backward()
        model(gradients(2 * step + 1), everything - {0, 3}).backward()
        for part, unused in ((0, {3}), (1, {0, 3})):
            given += flat([0 * g if i in unused else g for i, g in enumerate(gradients(2 * step + part))])
        got += means(model)
    check_law(model, given, got)


def case_gradient_accumulation():
    model = attached()
    given, got = torch.zeros(sum(LENGTHS)).double(), torch.zeros(sum(LENGTHS)).double()
    for step in range(6):
        for part in range(3):
            c = gradients(10 * step + part)
            with model.no_sync() if part < 2 else contextlib.nullcontext():
                model(c).backward()
            given += flat(c)
        got += means(model)
    check_law(model, given, got)


def case_uneven_inputs():
    model = attached()
    given, got = torch.zeros(sum(LENGTHS)).double(), torch.zeros(sum(LENGTHS)).double()
    with model.join():
        for step in range(4 + 2 * RANK):
            c = gradients(step)
            model(c).backward()
            given += flat(c)
            got += means(model)
    # Ranks that had no input any more contributed what they had kept; only the last got all means.
    everywhere = [torch.zeros_like(got) for _ in range(SIZE)]
    dist.all_gather(everywhere, got)
    same(total(given), SIZE * everywhere[-1] + total(kept(model)))


def case_uneven_inputs_that_leave_parameters_unused():
    """For a rank without inputs, DDP counts the parameters as used that some rank used in the step before."""
    model = attached(find_unused_parameters=True)
    given, got = torch.zeros(sum(LENGTHS)).double(), torch.zeros(sum(LENGTHS)).double()
    with model.join():
        for step in range(3 + 4 * RANK):
            unused = {3: {0, 3}, 4: {4}, 5: {0, 1, 2, 3}}.get(step, {0, 4})
            c = [0 * g if i in unused else g for i, g in enumerate(gradients(step))]
            model(c, set(range(len(LENGTHS))) - unused).backward()
            given += flat(c)
            got += means(model)
    everywhere = [torch.zeros_like(got) for _ in range(SIZE)]
    dist.all_gather(everywhere, got)
    same(total(given), SIZE * everywhere[-1] + total(kept(model)))


def case_a_step_that_is_taken_back_shows_in_every_parameter():
    """An optimizer, or a GradScaler for one, looks at its own parameters only, and there may be several."""
    for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        model = attached(**options)
        for step in range(9):
            c = gradients(step)
            if (place := {0: 1, 4: 0, 7: len(c) - 1}.get(step)) is not None and RANK == SIZE - 1:
                c[place][3] = torch.inf
            model(c).backward()
            assert all(p.grad.isnan().any() == (place is not None) for p in model.parameters()), step
            model.zero_grad()
        assert skim.report(model).skipped == 3 and kept(model).isfinite().all()


def case_a_parameter_that_only_autograd_grad_reaches_is_unused():
    model = attached(find_unused_parameters=True)
    given, got = torch.zeros(sum(LENGTHS)).double(), torch.zeros(sum(LENGTHS)).double()
    for step in range(8):
        unused = {4} if step > 3 else set()
        torch.autograd.grad(model.module(gradients(step)), model.module.w[4])
        c = [0 * g if i in unused else g for i, g in enumerate(gradients(step))]
        model(c, set(range(len(LENGTHS))) - unused).backward()
        given += flat(c)
        got += means(model)
    same(total(given), SIZE * got + total(kept(model)))


def case_options_of_the_hierarchical_exchange():
    """between= is also the name of an argument of attach."""
    model = attached(attach={"exchange": "hierarchical", "inside": "sparcml", "between": "gtopk"})
    train(model, range(5))
    options = skim.compression_of(model).reducer.options
    assert (options["inside"], options["between"]) == ("sparcml", "gtopk"), options
    expect(skim.InvalidArgument, "between", skim.attach, DDP(Linear()), exchange="hierarchical", between="ring")
    expect(skim.InvalidArgument, "between is for models with fully_shard", skim.attach, DDP(Linear()), between=dist.group.WORLD)


def case_traffic_of_a_split_does_not_count():
    model = attached()
    train(model, range(2))
    comm = skim.compression_of(model).comm

    def counted():
        return [getattr(comm.traffic, name) for name in ("sent_bytes", "received_bytes", "messages", "rounds")]

    before = counted()
    part = comm.split(0)
    assert part.size == SIZE and counted() == before and part.traffic.rounds == 0


def case_several_models():
    a, b = attached(), attached(attach={"exchange": "gtopk"})
    given, got_a, got_b = (torch.zeros(sum(LENGTHS)).double() for _ in range(3))
    for step in range(6):
        c = gradients(step)
        (a(c) + b(c)).backward()  # their buckets interleave as autograd pleases
        given += flat(c)
        got_a += means(a)
        got_b += means(b)
    check_law(a, given, got_a)
    check_law(b, given, got_b)


class Convolution(nn.Module):
    """As Linear, with a parameter of four dimensions."""

    def __init__(self, memory_format):
        super().__init__()
        weight = torch.zeros(20, 10, 5, 3, device=DEVICE).to(memory_format=memory_format)
        self.w = nn.ParameterList([nn.Parameter(weight), nn.Parameter(torch.zeros(50, device=DEVICE))])

    def forward(self, coefficients):
        return sum((w * c.view(w.shape).to(w.device)).sum() for w, c in zip(self.w, coefficients))


def case_channels_last():
    sparse = {"dense_below": 0}
    model = attached(Convolution(torch.channels_last), attach=sparse)
    given, got = torch.zeros(3050).double(), torch.zeros(3050).double()
    for step in range(5):
        c = gradients(step, lengths=[3000, 50])
        model(c).backward()
        given += flat(c)
        got += means(model)
    # The law holds for each entry, so residuals are in the order of indices, as gradients are.
    assert kept(model).any()
    same(total(given), SIZE * got + total(kept(model)))
    again = attached(Convolution(torch.channels_last), attach=sparse)
    skim.load_state_dict(again, skim.state_dict(model))
    assert torch.equal(kept(again), kept(model))
    other = attached(Convolution(torch.contiguous_format), attach=sparse)
    expect(skim.StateError, "'w.0 in the order [0, 2, 3, 1]'", skim.load_state_dict, other, skim.state_dict(model))


def case_parameters_with_gaps_in_memory():
    """DDP keeps their gradients in the order of indices."""
    inner = Linear()
    inner.w[1] = nn.Parameter(torch.zeros(90, 200, device=DEVICE)[:, :100])
    inner.w[3] = nn.Parameter(torch.zeros(100, 400, device=DEVICE).t()[::2])
    model = attached(inner)
    shapes = [w.shape for w in inner.w]
    given, got = torch.zeros(sum(LENGTHS)).double(), torch.zeros(sum(LENGTHS)).double()
    for step in range(6):
        c = gradients(step)
        model([g.view(shape) for g, shape in zip(c, shapes)]).backward()
        given += flat(c)
        got += means(model)
    check_law(model, given, got)


def case_copies_are_not_attached():
    watched, model = DDP(Linear()), attached()
    skim.attach(watched, dry_run=3)
    copy.deepcopy(watched)
    train(model, range(3))
    before = kept(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        c = gradients(3)
        twin(c).backward()
        same(total(flat(c)), SIZE * means(twin))  # DDP's own sum
        expect(skim.InvalidArgument, "has not been attached", skim.report, twin)
        skim.attach(twin, density=0.02, exchange="allgather", timeout=60.0)
        train(twin, range(3))
    assert torch.equal(kept(model), before)


def case_16_bit_gradients():
    for dtype in (torch.bfloat16, torch.float16):
        if not gloo_takes(dtype):
            left_out(f"DDP on gloo with parameters of {dtype}")
            continue
        model = attached(Linear(dtype=dtype))
        given, got = torch.zeros(sum(LENGTHS)).double(), torch.zeros(sum(LENGTHS)).double()
        for step in range(6):
            c = [(g / SIZE).to(dtype) for g in gradients(step, most=8)]
            model(c).backward()
            given += flat(c)
            got += means(model)
        # The mean is rounded to the gradient's type, alike on all ranks.
        difference = (total(given) - SIZE * got - total(kept(model))).abs().max().item()
        assert difference <= 8 * SIZE * 8 * 2.0**-8, difference


def case_an_infinite_step_is_taken_back():
    has_scaler = hasattr(torch.amp, "GradScaler")
    if not has_scaler:
        left_out("a GradScaler without CUDA")
    for through_scaler in (True, False) if has_scaler else (False,):
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0, growth_interval=2) if through_scaler else None
        model = attached(attach={"scaler": scaler})
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        given, got = torch.zeros(sum(LENGTHS)).double(), torch.zeros(sum(LENGTHS)).double()
        for step in range(9):
            c = gradients(step)
            infinite = step in (1, 6) and RANK == SIZE - 1
            loss = model([c[0] * (1.0 if not infinite else torch.inf), *c[1:]])
            if infinite:
                c[0] = torch.zeros_like(c[0])  # its finite part: inf and nan have none
            given += flat(c)
            if scaler is None:
                loss.backward()
                if any(not torch.isfinite(p.grad).all() for p in model.parameters()):
                    assert step in (1, 6)
                    means(model)
                else:
                    got += means(model)
                continue
            before = flat(model.parameters())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved = before - flat(model.parameters())
            assert bool(moved.any()) == (step not in (1, 6)), step
            got += moved
        check_law(model, given, got)
        assert skim.report(model).skipped >= 1


def case_residuals_of_updates_do_not_change_with_the_rate():
    rates = [1.0, 1.0, 0.25, 0.5, 0.0, 0.125, 2.0]
    for exchange in ("allgather", "param-server"):
        inner = Linear()
        optimizer = torch.optim.SGD(inner.parameters(), lr=rates[0])
        model = attached(inner, attach={"exchange": exchange, "updates_of": optimizer})
        given, got = torch.zeros(sum(LENGTHS)).double(), torch.zeros(sum(LENGTHS)).double()
        for step, rate in enumerate(rates):
            optimizer.param_groups[0]["lr"] = rate
            c = gradients(step)
            model(c).backward()
            if rate == 0.0:  # as the rate before: what was sent moves nothing
                given += rates[step - 1] * flat(c)
                got += rates[step - 1] * means(model)
                continue
            given += rate * flat(c)
            before = flat(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            got += before - flat(model.parameters())
        check_law(model, given, got)


def case_residuals_of_updates_go_by_the_largest_rate():
    inner = Linear()
    first, *others = inner.parameters()
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.0}, {"params": others}], lr=1.0)
    model = attached(inner, attach={"updates_of": optimizer})
    given = got = torch.zeros(sum(LENGTHS)).double()
    for step, rate in enumerate((1.0, 0.5, 0.25, 2.0)):
        optimizer.param_groups[1]["lr"] = rate
        optimizer.param_groups[0]["lr"] = 0.125 * (step == 2)
        c = gradients(step)
        model(c).backward()
        given = given + rate * flat(c)
        before = flat(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        got = got + before - flat(model.parameters())
    of_others = slice(LENGTHS[0], None)
    same(total(given)[of_others], (SIZE * got + total(kept(model)))[of_others])


def small_gradients(step):
    return [c / (1000.0 * SIZE) for c in gradients(step)]


def trained(make_optimizer, steps, **attach):
    """The parameters after so many steps, and the optimizer."""
    inner = Linear()
    optimizer = make_optimizer(inner.parameters())
    model = attached(inner, attach={"optimizer": optimizer, **attach})
    for step in range(steps):
        optimizer.zero_grad()
        model(small_gradients(step)).backward()
        optimizer.step()
    return flat(inner.parameters()), optimizer


def mean_gradients(step):
    mean = torch.cat(small_gradients(step))
    dist.all_reduce(mean)
    return mean / SIZE


def case_momentum_of_sgd_moves_into_the_correction():
    kinds = [{"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "nesterov": True}]
    for kind in kinds:
        w = torch.zeros(sum(LENGTHS), requires_grad=True)
        plain = torch.optim.SGD([w], lr=0.1, **kind)
        for step in range(8):
            w.grad = mean_gradients(step)
            if step == 0 and kind.get("dampening"):
                w.grad *= 0.5  # PyTorch does not dampen the first gradient; momentum correction does
            plain.step()
        dense, optimizer = trained(lambda p: torch.optim.SGD(p, lr=0.1, **kind), 8, exchange="dense")
        torch.testing.assert_close(dense, w.detach().double(), rtol=1e-4, atol=1e-4)
        [group] = optimizer.param_groups
        assert (group["momentum"], group["dampening"], group["nesterov"]) == (0.0, 0.0, False), group
        sparse, _ = trained(lambda p: torch.optim.SGD(p, lr=0.1, **kind), 8)
        assert not torch.equal(sparse, dense)
    [group] = trained(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3), 1)[1].param_groups
    assert abs(group["weight_decay"] - 1e-2) < 1e-9, group


def case_first_moment_of_adam_moves_into_the_correction():
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        w, m, v = (torch.zeros(sum(LENGTHS)) for _ in range(3))
        clear = torch.ones(sum(LENGTHS), dtype=bool)  # Adam makes much of a sum that is 0 but for rounding
        for step in range(8):
            m = 0.8 * m + 0.2 * mean_gradients(step)
            clear &= m.abs() > 1e-4
            v = 0.99 * v + 0.01 * m * m
            w -= 0.1 * m / ((v / (1 - 0.99 ** (step + 1))).sqrt() + 1e-8)
        dense, optimizer = trained(
            lambda p: kind(p, lr=0.1, betas=(0.8, 0.99), weight_decay=0.0), 8, exchange="dense"
        )
        assert clear.double().mean() > 0.9
        torch.testing.assert_close(dense[clear], w.double()[clear], rtol=1e-3, atol=1e-3)
        assert optimizer.param_groups[0]["betas"] == (0.0, 0.99)


def case_momentum_never_counts_twice():
    wrong = skim.InvalidArgument

    def sgd(momentum=0.9, inner=None):
        inner = inner if inner is not None else Linear()
        return inner, torch.optim.SGD(inner.parameters(), lr=0.1, momentum=momentum)

    inner, optimizer = sgd()
    expect(wrong, "optimizer and momentum_correction exclude", skim.attach, DDP(inner), optimizer=optimizer, momentum_correction=0.9)
    expect(wrong, "not Rprop", skim.attach, DDP(inner), optimizer=torch.optim.Rprop(inner.parameters()))
    groups = [{"params": [p], "momentum": 0.1 * i} for i, p in enumerate(inner.parameters())]
    expect(wrong, "differ in momentum (0.0, 0.1", skim.attach, DDP(inner), optimizer=torch.optim.SGD(groups, lr=0.1))

    # Another optimizer trains some of the parameters, or this one trains those of another model.
    inner, other = Linear(), Linear()
    some = torch.optim.AdamW([*inner.parameters()][1:], lr=0.1)
    for make in (
        lambda: skim.attach(DDP(inner), optimizer=some),
        lambda: skim.Aggregator(inner.named_parameters(), optimizer=some),
        lambda: skim.LocalSteps(inner, torch.optim.SGD([*inner.parameters()][1:], lr=0.1, momentum=0.9)),
    ):
        expect(wrong, "does not train 1 of the model's parameters, 'w.0' among them", make)
    assert some.param_groups[0]["betas"] == (0.9, 0.999)
    both = torch.optim.AdamW([*inner.parameters(), *other.parameters()], lr=0.1)
    other.w[0].requires_grad_(False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        attached(inner, attach={"optimizer": both})
    assert [f"parameters of another model ({len(LENGTHS) - 1} in all)" in str(w.message) for w in told] == [True], told

    # A scheduler that sets it.
    inner, optimizer = sgd()
    model = attached(inner, attach={"optimizer": optimizer})
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    try:
        model(small_gradients(0)).backward()
        raise AssertionError("backward did not raise")
    except RuntimeError as e:
        assert "cycle_momentum=False" in str(e), e

    # A run that goes on: the state remembers.
    inner, optimizer = sgd()
    attached(inner, attach={"optimizer": optimizer})
    other, again = sgd(0.0)
    again.load_state_dict(optimizer.state_dict())
    assert skim.compression_of(attached(other, attach={"optimizer": again})).momentum.momentum_correction == 0.9
    # The state of a run without Skim, loaded afterwards.
    plain_state = sgd()[1].state_dict()
    model = attached(inner := Linear(), attach={"optimizer": (optimizer := sgd(inner=inner)[1])})
    optimizer.load_state_dict(plain_state)
    model(small_gradients(0)).backward()
    assert optimizer.param_groups[0]["momentum"] == 0.0

    class Wrapper:  # as accelerate's
        def __init__(self):
            self.inner, self.optimizer = sgd()

    wrapped = Wrapper()
    aggregator = skim.Aggregator(wrapped.inner.parameters(), optimizer=wrapped)
    assert aggregator.momentum.momentum_correction == 0.9
    assert wrapped.optimizer.param_groups[0]["momentum"] == 0.0


def case_raise_where_a_gradient_is_not_finite():
    """On all ranks. Then the run goes on."""
    others = attached()  # with a second model, Skim's thread reduces the last buckets, too
    for alone in (True, False):
        if alone:
            skim.detach(others)
        else:
            skim.attach(others, **EXACT)
        model = attached(attach={"non_finite": "raise"}, find_unused_parameters=not alone)
        given, got = torch.zeros(sum(LENGTHS)).double(), torch.zeros(sum(LENGTHS)).double()
        for step in range(9):
            c = gradients(step)
            spoilt = step in (0, 1, 6)
            infinite = [torch.inf * c[0], *c[1:]] if spoilt and RANK == SIZE - 1 else c
            if spoilt and RANK == SIZE - 1:
                c[0] = torch.zeros_like(c[0])  # its finite part
            given += flat(c)
            if step == 4:
                skim.load_state_dict(model, skim.state_dict(model))  # its next steps are reduced as a whole
            if spoilt:
                expect(skim.NonFiniteError, "NaN or infinite", lambda: model(infinite).backward())
                means(model)
            else:
                model(c).backward()
                got += means(model)
        check_law(model, given, got)
        assert skim.report(model).skipped == 3 and skim.report(model).steps == 9, skim.report(model)


def case_a_step_that_the_trainer_skips():
    model = attached()
    given, got = torch.zeros(sum(LENGTHS)).double(), torch.zeros(sum(LENGTHS)).double()
    for step in range(7):
        c = gradients(step)
        model(c).backward()
        given += flat(c)
        if step in (2, 5):
            skim.compression_of(model).rollback()
            means(model)
        else:
            got += means(model)
    check_law(model, given, got)


def case_clipped_gradients_are_equal():
    model = attached()
    for step in range(4):
        model(gradients(step)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert abs(flat([p.grad for p in model.parameters()]).norm().item() - 1.0) < 1e-3
        assert len({n for n in gathered(float(norm))}) == 1
        model.zero_grad()


def case_the_default_dtype_of_pytorch_does_not_matter():
    with default_dtype(torch.bfloat16):
        case_mass_is_conserved_through_the_rebuild_of_buckets()
        case_an_infinite_step_is_taken_back()
        case_clipped_gradients_are_equal()


def case_the_default_device_of_pytorch_does_not_matter():
    def under_ddp(**options):
        model = DDP(Linear())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        skim.attach(model, **{**EXACT, "optimizer": optimizer, **options})
        four_steps(model, optimizer, optimizer.step)
        skim.load_state_dict(model, skim.state_dict(model))

    with default_device("meta") as is_possible:
        for options in ({}, {"residual_code": "bf16"}, {"residual_code": "q8"}, {"exchange": "shared-indices"}):
            if is_possible:
                under_ddp(**options)


def case_compiled_models():
    inner = torch.compile(Linear(), backend="aot_eager")
    model = attached(inner, bucket_cap_mb=25)
    train(model, range(5))
    assert list(skim.compression_of(model).residuals())[0] == "w.0"
    outer = DDP(Linear())
    skim.attach(torch.compile(outer, backend="aot_eager"), density=0.02, exchange="allgather")
    train(outer, range(5))


class Falling:
    """A schedule of one's own."""

    def density(self, progress):
        return 0.1 if progress.epoch < 1 else 0.01

    def describe(self):
        return "falling"


class Largest:
    """A selector of one's own."""

    def select(self, accumulated, k, step, slot):
        return np.argsort(-np.abs(accumulated), kind="stable")[:k]


def case_parts_of_ones_own():
    model = attached(attach={"density": Falling(), "selector": Largest(), "exchange": "gtopk"})
    exact = attached(attach={"density": skim.listed_density([0.1], 0.01), "exchange": "gtopk", "value_code": "f32"})
    for step in range(10):
        for m in (model, exact):
            skim.compression_of(m).epoch = step / 5
            m(gradients(step)).backward()
        assert torch.equal(means(model), means(exact)), step
    kept_entries = [b.k for b in skim.report(model).buckets.values() if b.dense_steps == 0]
    assert kept_entries == [b.n // 100 for b in skim.report(model).buckets.values() if b.dense_steps == 0]
    among = attached(attach={"among": ["gtopk"], "exchange": "auto"})
    train(among, range(5))
    sparse = [b for b in skim.report(among).buckets.values() if b.dense_steps == 0]
    assert SIZE == 1 or {b.decision.split(" ")[0] for b in sparse} == {"gtopk"}, sparse
    rounded = attached(attach={"value_code": "q8"})
    for step in range(4):
        rounded(gradients(step)).backward()
        means(rounded)
    assert SIZE == 1 or skim.report(rounded).sent_bytes > 0


def case_ranks_agree_on_densities_if_one_of_them_looks_at_its_residuals():
    """That ends the open step, on one rank before the next epoch is set, and on the others after."""
    for first in (1.0, 0.3):
        for exchange in ("allgather", "gtopk"):
            model = attached(attach={"density": skim.listed_density([first], 0.01), "exchange": exchange})
            quiet = attached(attach={"density": skim.listed_density([first], 0.01), "exchange": exchange})
            for step in range(10):
                for m in (model, quiet):
                    skim.compression_of(m).epoch = step // 4
                    m(gradients(step)).backward()
                got = means(model)
                expect_equal_everywhere(got, "means")
                assert torch.equal(got, means(quiet)), "it changes nothing"
                if RANK == 0:
                    kept(model)


class OfTensors(NumpyLocalHalf):
    """A local half of one's own. DDP's tensors come to it as they are."""

    def check(self, grad, n):
        super().check(grad.numpy(), n)

    def select(self, task, grad):
        return super().select(task, grad.numpy())

    def accumulate(self, task, grad):
        return super().accumulate(task, grad.numpy())

    def apply(self, slot, sum, factor, grad):
        return super().apply(slot, sum, factor, grad.numpy())

    def apply_dense(self, slot, sum, factor, grad):
        return super().apply_dense(slot, sum, factor, grad.numpy())

    def apply_nan(self, grad):
        grad[:1] = torch.nan


def case_a_local_half_of_ones_own():
    if needs_the_cpu("a local half in NumPy"):
        return
    for ddp in ({}, {"find_unused_parameters": True}):
        own = attached(attach={"local": OfTensors, "exchange": "gtopk"}, **ddp)
        built_in = attached(attach={"exchange": "gtopk"}, **ddp)
        for step in range(8):
            used = set(range(len(LENGTHS))) - ({0, 3} if ddp and step % 2 else set())
            for model in (own, built_in):
                c = gradients(step)
                if step == 5 and RANK == SIZE - 1:
                    c[1][7] = torch.nan
                model(c, used).backward()
            assert torch.equal(means(own).nan_to_num(-1.0), means(built_in).nan_to_num(-1.0)), step
            assert torch.equal(kept(own), kept(built_in)), step
        assert skim.report(own).skipped == skim.report(built_in).skipped == 1
    other = attached(attach={"local": OfTensors})
    skim.load_state_dict(other, skim.state_dict(own))
    assert torch.equal(kept(other), kept(own))
    wrong = skim.InvalidArgument
    expect(wrong, "local: the function returned no local half, but None", skim.attach, DDP(Linear()), local=lambda: None)
    expect(wrong, "a local half has options of its own", skim.attach, DDP(Linear()), local=OfTensors, momentum_correction=0.9)


# ---- exchange="auto"


def case_a_replayed_run_has_the_bits_of_the_first():
    # Every candidate is tried in every bucket, so the choices change whatever the clocks say.
    auto = {"exchange": "auto", "among": ["dense", "allgather", "gtopk"], "trial_share": 1.0, "dense_below": 0}

    def run(model, steps):
        for step in steps:
            model(gradients(step)).backward()
            yield means(model), kept(model)

    first = attached(attach=auto)
    expected = list(run(first, range(40)))
    choices = json.loads(json.dumps(skim.report(first).choices))
    assert choices["ranks"] == SIZE and all(c == choices for c in gathered(choices))
    if SIZE > 1:
        assert {"dense", "allgather", "gtopk"} == {name for *_, name in choices["changes"]}
    again = attached(attach={**auto, "replay": choices})
    for step, (got, wanted) in enumerate(zip(run(again, range(40)), expected)):
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1]), step
    assert skim.report(again).choices == choices

    refused, replay = skim.InvalidArgument, {**auto, "replay": choices}
    wrong = {**choices, "ranks": SIZE + 1}
    expect(refused, f"are of {SIZE + 1} ranks, this run has {SIZE}", attached, attach={**replay, "replay": wrong})
    expect(refused, "replay: needs exchange='auto'", attached, attach={"exchange": "gtopk", "replay": choices})
    expect(refused, "replay: needs the choices of a run", attached, attach={**replay, "replay": {"ranks": SIZE}})
    expect(refused, "replay: no 'nothing'", attached, attach={**replay, "replay": {**choices, "changes": [[0, 0, 6000, "nothing"]]}})
    if SIZE > 1:
        other = {**choices, "changes": choices["changes"][:-1]} if RANK == 0 else choices
        expect(refused, "options differ between ranks: rank 0 has replay=", attached, attach={**replay, "replay": other})
    other = attached(Linear([6001, *LENGTHS[1:]]), attach=replay)
    lengths = [6001, *LENGTHS[1:]]
    text = "replay: slot 0 in step 0 has 6001 entries, in the record 6000"
    expect(refused, text, lambda: other(gradients(0, lengths=lengths)).backward())


# ---- state


def case_state_goes_on_bit_by_bit():
    def run(model, steps):
        for step in steps:
            model(gradients(step)).backward()
            yield means(model)

    whole = list(run(attached(), range(10)))
    first = attached()
    for _ in run(first, range(5)):
        pass
    state = skim.state_dict(first)
    assert list(state) == [f"rank_{RANK}_of_{SIZE}", "buckets"]
    # A new run, whose DDP has other buckets at first: the saved ones are kept. One that has trained: its residuals are
    # replaced.
    has_trained = attached()
    for _ in run(has_trained, range(5)):
        pass
    of_device = [attached(attach={"local": "device", "offload": offload}) for offload in (False, True)]
    for again in (attached(), has_trained, *of_device):
        skim.load_state_dict(again, {key: value.clone() for key, value in state.items()})
        torch.testing.assert_close(kept(again), kept(first), rtol=0, atol=0)
        for step, got in zip(range(5, 10), run(again, range(5, 10))):
            assert torch.equal(got, whole[step]), step
        assert list(skim.report(again).buckets), "DDP has its buckets, and they overlap with backward again"
        assert not skim.compression_of(again)._collects
    # DDP never has the saved buckets: it gets its own once they are settled. Nothing is lost.
    other = attached(bucket_cap_mb=25)
    skim.load_state_dict(other, state)
    before, given, got = total(kept(other)), torch.zeros(sum(LENGTHS)).double(), torch.zeros(sum(LENGTHS)).double()
    for step in range(5, 10):
        model_step = gradients(step)
        other(model_step).backward()
        given += flat(model_step)
        mean = means(other)
        if step == 5:
            assert torch.equal(mean, whole[step]), "the saved buckets"
        got += mean
    same(before + total(given), SIZE * got + total(kept(other)))
    assert not skim.compression_of(other)._collects
    assert skim.compression_of(other).buckets != skim.compression_of(first).buckets


def case_state_goes_on_bit_by_bit_with_a_static_graph():
    """DDP then forms its buckets anew after its second step, so its first two do not have the buckets that stay."""
    def run(model, steps):
        for step in steps:
            model(gradients(step)).backward()
            yield means(model)

    first = attached(static_graph=True)
    for _ in run(first, range(6)):
        pass
    state = {key: value.clone() for key, value in skim.state_dict(first).items()}
    again = attached(static_graph=True)
    skim.load_state_dict(again, state)
    saved = skim.compression_of(first).buckets
    for step, (got, expected) in enumerate(zip(run(again, range(6, 12)), run(first, range(6, 12))), 6):
        assert torch.equal(got, expected), step
        assert skim.compression_of(again).buckets == saved, step
    assert not skim.compression_of(again)._collects


class OfTwoTypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Linear([6000, 50]), Linear([9000], torch.bfloat16)])

    def forward(self, coefficients):
        return self.parts[0](coefficients[:2]) + self.parts[1](coefficients[2:])


def case_a_static_graph_with_parameters_of_two_types_resumes():
    """In its first step DDP has a bucket of each type, and calls both the first one and neither the last one."""
    if not gloo_takes(torch.bfloat16):
        left_out("gloo with parameters of bfloat16")
        return

    def make():
        return attached(OfTwoTypes(), static_graph=True, attach={"dense_below": 0})

    def step(model, at):
        model(gradients(at, lengths=[6000, 50, 9000])).backward()
        return means(model)

    model = make()
    for at in range(6):
        step(model, at)
    assert skim.report(model).steps == 6
    state = {key: value.clone() for key, value in skim.state_dict(model).items()}
    again = make()
    skim.load_state_dict(again, state)
    for at in range(6, 9):
        assert torch.equal(step(model, at), step(again, at)), at
    assert torch.equal(kept(model), kept(again))


def case_state_goes_on_with_another_exchange_and_another_rule():
    kinds = [{"exchange": "oktopk"}, {"exchange": "hierarchical", "between": "allgather"}, {"exchange": "hierarchical"}]
    kinds += [{}, {"exchange": "auto"}, {"select": "gaussian", "local": "host"}, {"local": "device"}]
    for before in kinds:
        model = attached(attach=before)
        for step in range(3):
            model(gradients(step)).backward()
        state = skim.state_dict(model)
        for after in kinds:
            other = attached(attach=after)
            skim.load_state_dict(other, state)
            assert torch.equal(kept(other), kept(model)), (before, after)
            other(gradients(3)).backward()


def case_residuals_of_updates_resume_at_a_rate_of_0():
    rates = [0.5, 1.0, 0.25, 0.25, 0.5, 0.0, -1.5e-18, 0.125]  # PyTorch's LinearLR may come to such a rate instead of 0

    def make():
        inner = Linear()
        optimizer = torch.optim.SGD(inner.parameters(), lr=1.0)
        return attached(inner, attach={"updates_of": optimizer}), optimizer

    def run(made, steps):
        model, optimizer = made
        for step in steps:
            optimizer.param_groups[0]["lr"] = rates[step]
            model(gradients(step)).backward()
            yield means(model), kept(model)

    first = make()
    for _ in run(first, range(5)):
        pass
    state = {key: value.clone() for key, value in skim.state_dict(first[0]).items()}
    assert state.keys() - {"buckets", "rate"} == {f"rank_{RANK}_of_{SIZE}"}
    whole = list(run(first, range(5, 8)))
    again = make()
    skim.load_state_dict(again[0], state)
    for step, (got, expected) in enumerate(zip(run(again, range(5, 8)), whole), 5):
        assert all(map(torch.equal, got, expected)), step
    had = kept(again[0])
    for wrong in (torch.zeros(1), torch.tensor([math.nan]), torch.ones(2), 1.0):
        expect(skim.StateError, "one learning rate above 0", skim.load_state_dict, again[0], {**state, "rate": wrong})
    assert torch.equal(kept(again[0]), had)
    of_gradients = attached()
    of_gradients(gradients(0)).backward()
    kept_gradients = kept(of_gradients)
    for strict in (True, False):
        for model, of_other, text in (
            (again[0], skim.state_dict(of_gradients), "are gradients, those of this run are updates"),
            (of_gradients, state, "are updates, those of this run are gradients"),
        ):
            expect(skim.StateError, text, skim.load_state_dict, model, of_other, strict=strict)
    assert torch.equal(kept(again[0]), had) and torch.equal(kept(of_gradients), kept_gradients)
    of_all = skim.state_dict(first[0], gather=True)
    assert ("rate" in of_all) == (RANK == 0)


def case_state_on_another_number_of_ranks():
    if SIZE < 3:
        return
    model = attached()
    train(model, range(4))
    mine = skim.state_dict(model)
    all_states = [None] * SIZE
    dist.all_gather_object(all_states, mine)
    of_all = {k: v for s in all_states for k, v in s.items()}
    group = dist.new_group([0, 1])
    residuals = total(kept(model)) / SIZE
    if RANK < 2:
        smaller = attached(group=group)
        try:
            skim.load_state_dict(smaller, mine)
            raise AssertionError("a part of the states was taken for all of them")
        except skim.StateError as e:
            assert f"the state is of {SIZE} ranks, this is rank {RANK} of 2" in str(e), e
        skim.load_state_dict(smaller, of_all)
        torch.testing.assert_close(kept(smaller), residuals, rtol=1e-6, atol=1e-6)
        c = gradients(9, size=2)
        smaller(c).backward()
        means(smaller)
    dist.barrier()


def case_distributed_checkpoint():
    import torch.distributed.checkpoint as dcp

    if not hasattr(dcp, "save"):
        left_out("torch.distributed.checkpoint, which could not save nested states")
        return
    model = attached()
    train(model, range(4))
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder)
    beside = {"step": 4, "note": "no tensors"}  # of the user's
    state = {"model": model.module.state_dict(), "skim": {**skim.state_dict(model), **beside}}
    dcp.save(state, checkpoint_id=folder[0])
    other = attached()
    train(other, range(20, 23))
    expect(skim.StateError, "no state of Skim is called 'model'", skim.state_template, folder[0], "model")
    expect(skim.StateError, "missing' (", skim.state_template, pathlib.Path(folder[0]) / "missing")
    expect(skim.InvalidArgument, "checkpoint_id: must be a folder's path, not 3", skim.state_template, 3)
    state = {"skim": skim.state_template(folder[0])}
    assert len(state["skim"]) == SIZE + 1  # and the buckets
    dcp.load(state, checkpoint_id=folder[0])
    skim.load_state_dict(other, state["skim"])
    torch.testing.assert_close(kept(other), kept(model), rtol=0, atol=0)


def case_states_that_do_not_fit():
    model = attached()
    state = skim.state_dict(model)
    expect(skim.StateError, "no entry is called rank_R_of_P", skim.load_state_dict, model, {"w": torch.zeros(1)})
    mine = f"rank_{RANK}_of_{SIZE}"
    aggregator = skim.Aggregator([torch.zeros(5)])
    of_bytes = "must be a tensor of bytes (uint8) of one dimension, not"
    for wrong, text in (
        (None, "a state is a dict of tensors, as state_dict() returns it, not NoneType"),
        ([state[mine]], "not list"),
        ({1: state[mine]}, "no entry is called rank_R_of_P; there are: 1"),
        ({mine: bytes(state[mine].numpy())}, f"'{mine}' {of_bytes} bytes"),
        ({mine: state[mine].numpy()}, f"'{mine}' {of_bytes} ndarray"),
        ({mine: state[mine][None]}, f"'{mine}' {of_bytes} torch.uint8 of shape [1, {len(state[mine])}]"),
        ({mine: state[mine].float()}, f"'{mine}' {of_bytes} torch.float32 of shape [{len(state[mine])}]"),
        ({"rank_0_of_0": state[mine]}, "'rank_0_of_0': there is no such rank"),
        ({"rank_2_of_2": state[mine]}, "'rank_2_of_2': there is no such rank"),
    ):
        for load in (skim.compression_of(model).load_state_dict, aggregator.load_state_dict):
            expect(skim.StateError, text, load, wrong)
    _, local = local_steps()
    for load in (skim.compression_of(model).load_state_dict, aggregator.load_state_dict, local.load_state_dict):
        expect(skim.InvalidArgument, "strict: must be True or False, not 'no'", load, state, strict="no")
    saved = local.state_dict()
    for wrong, text in (
        (None, "a state is a dict of tensors, as state_dict() returns it, not NoneType"),
        ({**saved, "shared": 3}, "no 'shared' of length"),
        ({**saved, "shared": None}, "no 'shared' of length"),
    ):
        expect(skim.StateError, text, local.load_state_dict, wrong)
    local.load_state_dict({**saved, 3: "of the user's"})
    train(model, range(5))
    whole, before = skim.state_dict(model), kept(model)
    skim.load_state_dict(model, {**whole, "buckets": "no tensor", "step": 5})
    assert torch.equal(kept(model), before)
    damaged = {k: v.clone() for k, v in state.items()}
    damaged[mine][40] ^= 1
    expect(skim.StateError, "", skim.load_state_dict, model, damaged)
    other = attached(Linear([5, 6]))
    expect(skim.StateError, "", skim.load_state_dict, other, state)


def steps_of(model, lengths, steps):
    given, got = 0.0, 0.0
    for step in steps:
        c = gradients(step, lengths=lengths.values())
        model(c).backward()
        given, got = given + flat(c), got + means(model)
    return given, got


def case_state_of_a_model_with_another_head():
    options = {"dense_below": 0, "residual_code": "bf16"}, {"dense_below": 0, "momentum_correction": 0.5}, {"dense_below": 0}
    for attach in options:
        old = attached(Named(**BODY, **HEAD), attach=attach)
        steps_of(old, BODY | HEAD, range(5))
        model = attached(Named(**NEW, **BODY), attach=attach)
        steps_of(model, NEW | BODY, range(2))
        had, states = skim.compression_of(old).residuals(), [None] * SIZE
        before, mine = kept(model), skim.state_dict(old)
        assert "buckets" in mine
        dist.all_gather_object(states, mine)
        of_all = {key: value for state in states for key, value in state.items()}
        text = (
            "the model does not have 2 parameters of the state ('w.bias', 'w.head'), and the state does not have 1 "
            "parameter of the model ('w.new'); load with strict=false"
        )
        expect(skim.StateError, text, skim.load_state_dict, model, mine)
        assert torch.equal(kept(model), before), "a state that is refused changes nothing"
        longer = attached(Named(**NEW, **BODY, head=701), attach=attach)
        expect(skim.StateError, "'w.head' has 700 entries, the model's 701", skim.load_state_dict, longer, mine, strict=False)

        for state in (mine, of_all, skim.state_dict(old, gather=True) or mine):
            report = skim.load_state_dict(model, state, strict=False)
            has = skim.compression_of(model).residuals()
            assert all(torch.equal(has[f"w.{name}"], had[f"w.{name}"]) for name in BODY)
            assert not has["w.new"].any()
            missing, unexpected = report
            assert missing == report.missing_keys == ["w.new"] and unexpected == report.unexpected_keys
            assert list(unexpected) == ["w.bias", "w.head"]
            for name, norm in unexpected.items():
                assert math.isclose(norm, had[name].double().norm(), rel_tol=1e-9), (name, norm)
            assert had["w.head"].any(), "there is something to lose"
        owed = total(kept(model))
        given, got = steps_of(model, NEW | BODY, range(5, 10))
        if attach == {"dense_below": 0}:
            same(owed + total(given), SIZE * got + total(kept(model)))
        expect_equal_everywhere(got, "means")
        assert not any(skim.load_state_dict(model, skim.state_dict(model), strict=False))


def case_files_beside_the_checkpoint_of_a_framework():
    from skim.integrations._files import load_from, save_into

    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder)
    old = attached(Named(**BODY, **HEAD), attach={"dense_below": 0})
    steps_of(old, BODY | HEAD, range(3))
    # An earlier run on another number of ranks has saved there, too. Its residuals are not those of this checkpoint.
    earlier = [pathlib.Path(folder[0], f"skim_rank_{r}_of_{SIZE + 1}.pt") for r in range(SIZE + 1)]
    for file in earlier:
        file.touch()
    dist.barrier()
    save_into(folder[0], old)
    dist.barrier()
    found = sorted(file.name for file in pathlib.Path(folder[0]).iterdir())
    assert found == sorted(f"skim_rank_{r}_of_{SIZE}.pt" for r in range(SIZE)), found
    same_model = attached(Named(**BODY, **HEAD), attach={"dense_below": 0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # PyTorch 2.1 says so of itself
        load_from(folder[0], same_model, strict=True)
    assert torch.equal(kept(same_model), kept(old)) and kept(old).any()
    model = attached(Named(**NEW, **BODY), attach={"dense_below": 0})
    expect(skim.StateError, "load with strict=false", load_from, folder[0], model, strict=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_from(folder[0], model, strict=False)
    told = [str(w.message) for w in caught if "skim" in str(w.message)]
    assert len(told) == (RANK == 0) and all("'w.head'" in text and "'w.new'" in text for text in told), told
    had, has = skim.compression_of(old).residuals(), skim.compression_of(model).residuals()
    assert all(torch.equal(has[f"w.{name}"], had[f"w.{name}"]) for name in BODY)
    dist.barrier()
    if RANK == 0:
        shutil.rmtree(folder[0])


def case_an_accelerator_keeps_several_models():
    from skim.integrations.accelerate import keep_with

    class Accelerator:
        """What keep_with uses of it."""

        def __init__(self):
            self.saves, self.loads = [], []

        def register_save_state_pre_hook(self, hook):
            self.saves.append(hook)

        def register_load_state_pre_hook(self, hook):
            self.loads.append(hook)

    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder)

    def made():
        models, accelerator = [attached(Named(**BODY)), attached(Named(**BODY))], Accelerator()
        for model in models:
            keep_with(accelerator, model)
        return models, accelerator

    olds, accelerator = made()
    for model, steps in zip(olds, (range(3), range(5))):
        steps_of(model, BODY, steps)
    for _ in range(2):  # the second time over what is there
        for save in accelerator.saves:
            save([], [], folder[0])
        dist.barrier()
    news, accelerator = made()
    for load in accelerator.loads:
        load([], folder[0])
    for old, new in zip(olds, news):
        assert torch.equal(kept(new), kept(old)) and kept(old).any()
    assert not torch.equal(kept(olds[0]), kept(olds[1]))
    dist.barrier()
    if RANK == 0:
        shutil.rmtree(folder[0])


def case_state_of_other_parameters_on_another_number_of_ranks():
    old = attached(Named(**BODY, **HEAD), attach={"dense_below": 0})
    steps_of(old, BODY | HEAD, range(4))
    states = [None] * SIZE
    dist.all_gather_object(states, skim.state_dict(old))
    of_all = {key: value for state in states for key, value in state.items()}
    mean = {name: total(r.double()) / SIZE for name, r in skim.compression_of(old).residuals().items()}
    groups = [dist.new_group([r]) for r in range(SIZE)]
    model = attached(Named(**NEW, **BODY), group=groups[RANK], attach={"dense_below": 0})
    report = skim.load_state_dict(model, of_all, strict=False)
    has = skim.compression_of(model).residuals()
    for name in BODY:
        torch.testing.assert_close(has[f"w.{name}"].double(), mean[f"w.{name}"], rtol=1e-6, atol=1e-6 * 1000 * SIZE)
    assert not has["w.new"].any()
    assert math.isclose(report.unexpected_keys["w.head"], mean["w.head"].norm(), rel_tol=1e-6)


def case_a_local_half_with_a_format_of_its_own_is_strict():
    if needs_the_cpu("a local half in NumPy"):
        return
    model = attached(attach={"local": OfTensors})
    train(model, range(5))
    state, before = skim.state_dict(model), kept(model)
    assert "buckets" in state
    expect(skim.InvalidArgument, "strict=false needs a local half with as_feedback", skim.load_state_dict, model, state, False)
    assert torch.equal(kept(model), before)
    other = attached(attach={"local": OfTensors}, bucket_cap_mb=25)
    train(other, range(5))
    buckets = list(skim.compression_of(other).buckets)
    expect(skim.InvalidArgument, "strict=false needs a local half with as_feedback", skim.load_state_dict, other, state, False)
    assert skim.compression_of(other).buckets == buckets, "nothing has changed"


# ---- what cannot work


def case_refusals():
    wrong = skim.InvalidArgument
    expect(wrong, "not Linear; wrap it, or use skim.Aggregator", skim.attach, Linear())
    expect(wrong, "not int", skim.attach, 3)
    expect(wrong, "call skim.attach(model) first", skim.report, DDP(Linear()))
    expect(wrong, "this model has been attached already", skim.attach, attached())
    expect(wrong, "'w.0' is torch.float64", skim.attach, DDP(Linear(dtype=torch.float64)))
    sparse = nn.Sequential(nn.Embedding(10, 3, sparse=True))
    expect(wrong, "'0' makes sparse gradients", skim.attach, DDP(sparse))
    if hasattr(DDP(Linear()), "skip_all_reduce_unused_params"):  # newer than PyTorch 2.7
        skips = DDP(Linear(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
        for options in ({}, {"dry_run": True}):
            expect(wrong, "make DDP without skip_all_reduce_unused_params", skim.attach, skips, **options)
    expect(wrong, "no 'ring'; there are: dense,", skim.attach, DDP(Linear()), exchange="ring")
    expect(wrong, "density", skim.attach, DDP(Linear()), density=0.0)
    for name, value, what in (
        ("density", None, "must be a number in (0, 1]"),
        ("density", True, "must be a number in (0, 1]"),
        ("exchange", 3, "must be a string, not 3"),
        ("value_code", 4, "must be a string, not 4"),
        ("total_steps", "x", "must be a whole number, not 'x'"),
        ("total_steps", -1, "must be 0 (not known) or more, not -1"),
        ("total_steps", 10**30, f"must be at most {2**53}, not {10**30}"),
        ("dense_below", 0.5, "must be a whole number, not 0.5"),
        ("residual_decay", "0.9", "must be a number, not '0.9'"),
        ("residual_decay", 1e-50, "must be 0 or from 1e-45 to 3.4e+38 in size, not 1e-50"),
        ("local_clip", 1e-50, "must be 0 or from 1e-45 to 3.4e+38 in size, not 1e-50"),
        ("select_threshold", 1e-50, "must be 0 or from 1e-45 to 3.4e+38 in size, not 1e-50"),
        ("select_threshold", 1e39, "must be 0 or from 1e-45 to 3.4e+38 in size, not 1e+39"),
        ("residual_decay", 0, "0 would forget what is not sent; use feedback=False for that, or a number in (0, 1]"),
        ("feedback", 1, "must be True or False, not 1"),
        ("select_block", True, "must be a whole number, not True"),
        ("among", "gtopk", "must be a list of names among dense, "),
        ("among", torch.tensor(1.0), "must be a list of names among dense, "),
    ):
        expect(wrong, f"{name}: {what}", skim.attach, DDP(Linear()), **{name: value})
    inner = Linear()

    def aggregator(**options):
        return skim.Aggregator(inner.parameters(), **options)

    def local_steps(**options):
        return skim.LocalSteps(inner, torch.optim.SGD(inner.parameters(), lr=1.0), **options)

    class Writer:
        def add_scalar(self, tag, value, step):
            pass

    for name, value, what, *makers in (
        ("timeout", 0, "must be a number above 0, not 0", lambda **o: skim.attach(DDP(inner), **o), aggregator, local_steps),
        ("timeout", math.nan, "must be a number above 0, not nan", aggregator),
        ("timeout", 1e30, "must be at most 1e+06 s, not 1e+30", aggregator),
        ("writer", 3, "must have add_scalar(tag, value, step), not 3", aggregator),
        ("writer", Writer, "must have add_scalar(tag, value, step), not <class", aggregator),
        ("bucket_mb", 0, "must be a number above 0, not 0", aggregator, local_steps),
        ("bucket_mb", "1", "must be a number above 0, not '1'", aggregator),
        ("fragments", 0, "must be a whole number of at least 1, not 0", aggregator),
        ("every", "3", "must be a whole number of at least 1, not '3'", local_steps),
        ("every", True, "must be a whole number of at least 1, not True", local_steps),
        ("delay", 2, "must be a whole number in [0, every], not 2", local_steps),
    ):
        for make in makers:
            expect(wrong, f"{name}: {what}", make, **{name: value})
    for make in (lambda **o: skim.attach(DDP(inner), **o), aggregator, local_steps):
        for density in (0.1, skim.listed_density([0.1], 0.1)):
            text = "select_threshold: must be above 0 with select='threshold'"
            expect(wrong, text, make, density=density, select="threshold")
            expect(wrong, text, make, density=density, select="threshold", select_threshold=0)
    expect(wrong, "one of torch.distributed, with this rank in it, not 3", aggregator, process_group=3)
    for of_epochs in (aggregator(timeout=60.0), local := local_steps(timeout=60.0)):
        expect(wrong, "epoch: must be a number, not '3'", setattr, of_epochs, "epoch", "3")
        of_epochs.epoch = np.float32(3)
    local.finish()
    one = torch.zeros(3)
    for tensors, what in (
        (inner, ", not Linear"),
        (one, ", not Tensor"),
        (None, ", not NoneType"),
        (3, ", not int"),
        (nn.Sequential(inner), "; item 0 is Linear"),
        (inner.state_dict(), "; item 0 is str"),
        (np.zeros(3), "; item 0 is float64"),
        ([one, 3], "; item 1 is int"),
        ([(0, one)], "; item 0 is (int, Tensor)"),
        ([("a", None)], "; item 0 is (str, NoneType)"),
        ([("a", one, one)], "; item 0 is (str, Tensor, Tensor)"),
    ):
        allowed = "tensors: must be tensors, or pairs (name, tensor) as from model.named_parameters()"
        expect(wrong, allowed + what, skim.Aggregator, tensors)
    text = "'0' and '6' are one parameter, whose gradient would count twice; give it once"
    expect(wrong, text, skim.Aggregator, [*inner.parameters(), inner.w[0]])
    skim.Aggregator([one, one], timeout=60.0)  # only the shapes count

    ended = dist.new_group()
    of_ended = DDP(Linear(), process_group=ended)
    dist.destroy_process_group(ended)
    for dry_run in (False, True):
        expect(wrong, "the process group has ended", skim.attach, of_ended, dry_run=dry_run)
    expect(wrong, "the process group has ended", aggregator, process_group=ended)
    expect(wrong, "no option 'value_cod'; did you mean 'value_code'?", skim.attach, DDP(Linear()), value_cod="f16")
    expect(wrong, "among: needs exchange='auto'", skim.attach, DDP(Linear()), exchange="gtopk", among=["gtopk"])
    expect(wrong, "decay", skim.attach, DDP(Linear()), residual_decay=1.5)
    expect(wrong, "no 'ignore'; there are: pass-on, raise", skim.attach, DDP(Linear()), non_finite="ignore")
    expect(wrong, "updates_of must be an optimizer", skim.attach, DDP(Linear()), updates_of=0.1)
    for scaler in (1024.0, torch.cuda.amp.GradScaler):
        text = f"scaler must be a GradScaler, with get_scale(), not {scaler}"
        expect(wrong, text, skim.attach, DDP(Linear()), scaler=scaler)
    sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    expect(wrong, "updates_of and local_clip exclude", skim.attach, DDP(Linear()), updates_of=sgd, local_clip=1.0)
    hooked = DDP(Linear())
    hooked.register_comm_hook(None, lambda state, bucket: None)
    expect(wrong, "DDP refused the hook", skim.attach, hooked)
    if SIZE > 1:
        expect(
            wrong,
            "options differ between ranks: rank 0 has density=0.1, rank 1 has density=0.2",
            skim.attach,
            DDP(Linear()),
            density=0.1 * (1 + min(RANK, 1)),
        )
        expect(wrong, "rank 0 has updates_of=None", skim.attach, DDP(Linear()), updates_of=sgd if RANK else None)
        scaler = type("GradScaler", (), {"get_scale": lambda _: 1.0})() if RANK else None
        expect(wrong, "rank 0 has scaler=None, rank 1 has scaler=GradScaler", skim.attach, DDP(Linear()), scaler=scaler)
        for name, values in (
            ("density", np.array([0.1, 0.2], np.float32)),
            ("density", torch.tensor([0.5, 0.25])),
            ("total_steps", np.array([7, 8])),
        ):
            text = f"rank 0 has {name}={values[0]:g}, rank 1 has {name}={values[1]:g}"
            expect(wrong, text, skim.attach, DDP(Linear()), **{name: values[min(RANK, 1)]})
        for make, name, values in (
            (aggregator, "bucket_mb", (25.0, 1.0)),
            (aggregator, "fragments", (1, 2)),
            (local_steps, "every", (2, 3)),
            (local_steps, "delay", (0, 1)),
            (local_steps, "ahead", (1.0, 0.5)),
            (local_steps, "outer_lr", (0.5, 0.75)),
            (local_steps, "outer_momentum", (0.0, 0.5)),
        ):
            text = f"rank 0 has {name}={values[0]}, rank 1 has {name}={values[1]}"
            expect(wrong, text, make, timeout=60.0, **{name: values[min(RANK, 1)]})


def case_a_refused_model_and_its_optimizer_stay_as_they_were():
    inner = Linear()
    model = DDP(inner, find_unused_parameters=True)
    model.register_comm_hook(None, lambda state, bucket: None)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)
    before = copy.deepcopy(optimizer.state_dict())
    expect(skim.InvalidArgument, "DDP refused the hook", skim.attach, model, optimizer=optimizer, local_clip=1.0)
    assert optimizer.state_dict() == before, optimizer.state_dict()
    assert not any(p._backward_hooks for p in inner.parameters())


def case_fsdp_is_refused():
    from torch.distributed.fsdp import FullyShardedDataParallel

    try:
        sharded = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    except RuntimeError as e:
        left_out(f"FSDP without CUDA: {str(e).splitlines()[0]}")
    else:
        expect(skim.InvalidArgument, "use torch.distributed.fsdp.fully_shard and skim.attach(model, between=", skim.attach, sharded)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
        text = "FullyShardedDataParallel gives every rank other parameters, which have no mean; use torch.distributed."
        for model in (sharded, nn.Sequential(sharded)):
            expect(skim.InvalidArgument, text, skim.LocalSteps, model, optimizer)
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # before torch 2.6
        return
    other = nn.Linear(8, 8)
    fully_shard(other, mesh=init_device_mesh("cpu", (SIZE,)))
    expect(skim.InvalidArgument, "shard inside islands, or use skim.LocalSteps", skim.attach, other)


def case_modules_that_replicate_synchronizes_are_refused():
    """It exchanges whole gradients itself. Whatever Skim exchanged would come on top."""
    try:
        from torch.distributed._composable import replicate
    except ImportError:
        left_out("replicate")
        return
    inside = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    replicate(inside[1])
    if type(inside[1]) is nn.Linear:
        left_out("replicate, whose modules do not show it")
        return
    models = [replicate(nn.Linear(8, 8)), inside]
    with contextlib.suppress(ImportError):  # newer versions of PyTorch have another one
        from torch.distributed._composable.replicate_with_fsdp import replicate as by_fsdp
        from torch.distributed.device_mesh import init_device_mesh

        models.append(by_fsdp(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (SIZE,))))
    text = "replicate() exchanges whole gradients itself; make the model without it"
    for model in models:
        expect(skim.InvalidArgument, text, skim.attach, model)
        expect(skim.InvalidArgument, text, skim.attach, model, between=dist.group.WORLD)
        expect(skim.InvalidArgument, text, skim.LocalSteps, model, torch.optim.SGD(model.parameters(), lr=1.0))


# ---- what it says


def case_the_report_names_the_rank_that_the_others_waited_for():
    if SIZE == 1:
        return
    model = attached(attach={"density": 0.01})
    slow, pause = SIZE - 1, threading.Event()
    for step in range(200):
        if RANK == slow:
            pause.wait(0.01)
        model(gradients(step)).backward()
    report = skim.report(model)
    assert len(report.waited_s) == SIZE and max(report.waited_s) == report.waited_s[slow], report.waited_s
    assert 1.0 < report.waited_s[slow] <= report.compared_s, report
    assert f"of {report.compared_s:.1f} s: " in str(report) and f"rank {slow} " in str(report), str(report)


def case_report_writer_and_profiler():
    written = {}

    class Writer:
        def add_scalar(self, tag, value, step):
            written[tag] = (value, step)

    model = attached(attach={"writer": Writer(), "density": 0.01})
    before = skim.compression_of(model).comm.traffic.sent_bytes
    train(model, range(5))
    try:
        everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        everything = None
        left_out("a profiler of all threads", before=(2, 13))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=everything
    ) as profile:
        model(gradients(0)).backward()
    if everything is not None:
        events = {e.key for e in profile.key_averages()}
        assert {"skim::select", "skim::exchange", "skim::apply"} <= events, events
    assert set(written) >= {"skim/sent_bytes", "skim/captured", "skim/exposed_ms"}, written
    report = skim.report(model)
    text = str(report)
    assert f"rank {RANK} of {SIZE}" in text and len(text.splitlines()) == 6 + len(report.buckets), text
    assert max(map(len, text.splitlines())) <= 100, text
    reasons = report.reasons().splitlines()
    assert len(reasons) == sum(b.decision != "" for b in report.buckets.values()), reasons
    # All bytes of the run, those before the buckets stood included.
    traffic = skim.compression_of(model).comm.traffic.sent_bytes - before
    assert report.sent_bytes == traffic, (report.sent_bytes, traffic)
    assert report.steps == 6 and report.forming.n == sum(LENGTHS)


def case_a_report_counts_every_entry_once_a_step():
    """Also if a state is loaded between the steps, and with it its buckets."""
    model, state = attached(), {}
    for part in range(4):
        if part > 1:
            skim.load_state_dict(model, state)
        for step in range(4):
            model(gradients(step)).backward()
        if part == 0:
            state = skim.state_dict(model)
    report = skim.report(model)
    dense = 2 * (SIZE - 1) / SIZE * 4 * sum(LENGTHS) * 16
    assert abs(report.dense_bytes - dense) < 1e-6 * max(dense, 1.0), (report.dense_bytes, dense)
    assert report.forming.steps == 12 and report.forming.n == sum(LENGTHS), report.forming


def case_dry_run_trains_as_before():
    plain = DDP(Linear())
    dry = DDP(Linear())
    watcher = skim.attach(dry, dry_run=3)
    with unittest.mock.patch.object(skim._core, "predict", wraps=skim._core.predict) as predict:
        for step in range(11):
            c = gradients(step)
            plain(c).backward()
            dry(c).backward()
            assert torch.equal(means(plain), means(dry))
    codes = {call.kwargs.get("value_code", "f32") for call in predict.call_args_list}
    assert codes == {DEFAULTS["value_code"]}, "not of the call that the verdict names"
    assert watcher.verdict.startswith("verdict: it would"), watcher.verdict
    assert [p.density for p in watcher.predictions] == [1.0, 0.001, 0.01, 0.1]
    captured = [p.captured for p in watcher.predictions]
    assert 0 < captured[1] < captured[2] < captured[3] < captured[0] == 1.0, captured
    assert len(set(gathered(watcher.verdict))) == 1
    assert "speed-up" in str(watcher) and len(str(watcher).splitlines()) == 9
    for wrong in (-3, 2.5, "20", None, torch.ones(2)):
        expect(skim.InvalidArgument, "dry_run must be True or", skim.attach, DDP(Linear()), dry_run=wrong)
    assert skim.attach(DDP(Linear()), dry_run=np.int64(3)).steps == 3
    for model, text in (  # they would end the run after the steps that are measured
        (Linear(dtype=torch.float64), "'w.0' is torch.float64"),
        (nn.Sequential(nn.Embedding(10, 3, sparse=True)), "'0' makes sparse gradients"),
    ):
        expect(skim.InvalidArgument, text, skim.attach, DDP(model), dry_run=3)

    for wrong, what in ((None, "must be a whole number, not None"), (-5, "must be 0 (not known) or more, not -5")):
        text = f"total_steps: {what}"
        expect(skim.InvalidArgument, text, skim.attach, DDP(Linear()), dry_run=3, total_steps=wrong)

    rare = skim.attach(DDP(Linear()), dry_run=3, total_steps=1000)._quality(0.003)
    assert "S = density x steps = 3:" in rare and "density 0.028" in rare, rare


def case_total_steps_tell_of_rare_sends():
    for density, told in ((0.003, True), (0.028, False), (skim.listed_density([], 0.003), False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            skim.attach(DDP(Linear()), density=density, total_steps=1000)
        found = [str(w.message) for w in caught if "skim.attach" in str(w.message)]
        assert len(found) == (1 if told and RANK == 0 else 0), found
        assert all("needs density 0.028" in text for text in found), found


if __name__ == "__main__":
    main(globals())
