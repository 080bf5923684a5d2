"""skim.Aggregator and skim.LocalSteps, under torchrun: test_without_ddp.py runs every function case_* on all ranks, in order."""

import contextlib
import copy
import inspect
import logging
import math
import pickle
import threading
import traceback
import unittest.mock
import warnings

import numpy as np
import skim
import torch
import torch.distributed as dist
from cases import expect, expect_equal_everywhere, left_out
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
from skim._parameters import in_one
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

# ---- skim.Aggregator


def case_aggregator():
    model = Linear()
    aggregator = skim.Aggregator(model.named_parameters(), density=0.02, exchange="allgather", bucket_mb=BUCKET_MB)
    assert len(aggregator.buckets) >= 3
    given, got = torch.zeros(sum(LENGTHS)).double(), torch.zeros(sum(LENGTHS)).double()
    for step in range(6):
        c = gradients(step)
        model(c, used=set(range(6)) - {2 * (step % 2)}).backward()
        given += flat([g if i != 2 * (step % 2) else 0 * g for i, g in enumerate(c)])
        infinite = step == 3
        if infinite and RANK == 0:
            model.w[1].grad[0] = torch.nan
            given -= flat([g * 0 if i != 1 else torch.nn.functional.one_hot(torch.tensor(0), 9000) * g for i, g in enumerate(c)])
        assert aggregator.step() == (not infinite)
        got += 0 if infinite else flat([p.grad for p in model.parameters()])
        model.zero_grad()
    left = flat(aggregator.residuals().values())
    same(total(given), SIZE * got + total(left))
    differences = [torch.full((n,), float(RANK)) for n in LENGTHS]
    again = skim.Aggregator(differences, density=1.0, exchange="dense")
    assert again.reduce(differences)
    assert all(torch.equal(d, torch.full_like(d, (SIZE - 1) / 2)) for d in differences)
    expect(skim.InvalidArgument, "needs 6 tensors", again.reduce, differences[:2])

    wrong = [d.double() for d in differences], [d.to_sparse() for d in differences]
    for tensors, what in zip(wrong, ("torch.float64", "torch.sparse_coo")):
        expect(skim.InvalidArgument, f"are dense and float32, float16 or bfloat16, not {what}", again.reduce, tensors)
    assert again.reduce(differences), "the group goes on"

    raising = skim.Aggregator(differences, density=1.0, exchange="dense", non_finite="raise")
    differences[0][3] = torch.inf if RANK == SIZE - 1 else 0.0
    expect(skim.NonFiniteError, "NaN or infinite", raising.reduce, differences)
    assert raising.reduce([torch.ones(n) for n in LENGTHS]), "the group goes on after such a step"
    expect(skim.InvalidArgument, "no 'skip'", skim.Aggregator, differences, non_finite="skip")


def case_a_dedicated_server_has_no_gradient():
    """It does not count in the mean, so whatever gradient rank 0 had would not count either, or too much."""
    if SIZE == 1:
        return
    options = {"exchange": "param-server", "server": "dedicated", "dense_below": 60}
    text, serves = "is a dedicated server", RANK == 0

    def some(step, used=True):
        return [(SIZE - 1) * c * (used and not serves) for c in gradients(step, size=1)]

    def check(model, steps):
        given, got = torch.zeros(sum(LENGTHS)).double(), torch.zeros(sum(LENGTHS)).double()
        for step in range(steps):
            c = some(step)
            model(c).backward()
            given += flat(c)
            got += means(model)
        torch.testing.assert_close(
            total(given), (SIZE - 1) * got + total(kept(model)), rtol=1e-6, atol=0.01 * (SIZE - 1 not in (1, 2))
        )

    model = attached(attach=options)
    check(model, 5)
    try:
        model(gradients(0)).backward()
        raise AssertionError("it was taken")
    except skim.InvalidArgument as e:
        assert serves and text in str(e) and "server='rank0'" in str(e), e
    except skim.CommError as e:
        assert not serves and e.peer == 0, e

    aggregator = skim.Aggregator([torch.zeros(n) for n in LENGTHS], density=0.02, value_code="f32", **options)
    right, wrong = [c.clone() for c in some(0)], gradients(0)
    if serves:
        expect(skim.InvalidArgument, text, aggregator.reduce, wrong)
    assert aggregator.reduce(right), "a right call works"

    inner, local = local_steps(ahead=1.0, **options)
    for step in range(3):
        one_local_step(inner, local, step, idle=serves)
    if serves:
        expect(skim.InvalidArgument, text, one_local_step, inner, local, 3)
        local._aggregator.fail(RuntimeError("ends"))
    else:
        expect(skim.CommError, "", one_local_step, inner, local, 3)


def case_a_wrong_call_leaves_an_aggregator_usable():
    wrong, ones = skim.InvalidArgument, [torch.ones(n) for n in LENGTHS]
    aggregator = skim.Aggregator(ones, density=1.0, exchange="dense", value_code="f32")
    for scale in (0.0, -1.0, math.nan, math.inf, 1e-45, 1e39, None, "1", [1.0], torch.ones(2)):
        expect(wrong, "scale: must be a number in [1e-37, 1e+38], not ", aggregator.reduce, ones, scale=scale)
    expanded = [t[:1].expand(len(t)) for t in ones]
    expect(wrong, "entries that share memory, as after expand(); give a clone() of it", aggregator.reduce, expanded)
    with torch.inference_mode():
        of_inference = [t.clone() for t in ones]
    expect(wrong, "cannot write into a tensor of torch.inference_mode", aggregator.reduce, of_inference)
    expect(wrong, "takes tensors, not NoneType", aggregator.reduce, None)
    expect(wrong, "takes tensors, not int", aggregator.reduce, [1] * len(ones))
    for fragment in (1, -1, 0.0, None):
        allowed = f"fragment: must be a whole number in [0, 0], not {fragment}"
        expect(wrong, allowed, aggregator.reduce, ones, fragment=fragment)
        expect(wrong, allowed, aggregator.densities, fragment)
    expect(wrong, "not on 'meta'", aggregator.reduce, [t.to("meta") for t in ones])
    mine = [torch.full((n,), float(RANK)) for n in LENGTHS]
    assert aggregator.reduce((t for t in mine), scale=torch.tensor(2.0)), "the group goes on"
    assert all(torch.equal(t, torch.full_like(t, (SIZE - 1) / 2)) for t in mine)


def case_an_aggregator_leaves_frozen_parameters_as_they_are():
    model = Linear()
    for place, p in enumerate(model.w):
        nn.init.ones_(p)
        p.requires_grad_(place != 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        aggregator = skim.Aggregator(model.parameters(), density=1.0, exchange="dense", value_code="f32")
    assert ["(1 here, such as '1')" in str(w.message) for w in told] == [True] * (RANK == 0), told
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model(gradients(0), used={0, 1, 2}).backward()
    aggregator.step()
    optimizer.step()
    assert model.w[1].grad is None and (model.w[1] == 1.0).all(), "weight decay would change it"
    assert model.w[3].grad is not None, "another rank might have had a gradient"


def case_warnings_that_are_errors_leave_the_optimizer_as_it_was():
    model = Linear()
    model.w[2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            skim.Aggregator(model.parameters(), optimizer=optimizer, **EXACT)
        except UserWarning:
            assert RANK == 0 and optimizer.param_groups[0]["momentum"] == 0.9, optimizer
        else:
            assert RANK > 0 and optimizer.param_groups[0]["momentum"] == 0.0, optimizer


def case_a_failure_that_is_raised_often_keeps_its_traceback():
    aggregator = skim.Aggregator([torch.zeros(10)], process_group=[dist.new_group([r]) for r in range(SIZE)][RANK])
    try:
        raise ZeroDivisionError
    except ZeroDivisionError as e:
        aggregator.fail(e)
    lengths = []
    for _ in range(3):
        try:
            aggregator.step()
        except ZeroDivisionError as e:
            lengths.append(len(traceback.extract_tb(e.__traceback__)))
    assert len(lengths) == 3 and len({*lengths}) == 1, lengths


def case_the_default_dtype_of_pytorch_does_not_matter():
    with default_dtype(torch.bfloat16):
        case_aggregator()
        case_local_steps_resume_bit_by_bit()


def case_the_default_device_of_pytorch_does_not_matter():
    def in_rounds(**options):
        model, local = local_steps(**options)
        four_steps(model, local.optimizer, local.step)
        state = local.state_dict()
        assert {t.device.type for t in state.values()} == {"cpu"}
        local.load_state_dict(state)
        four_steps(model, local.optimizer, local.step)
        local.finish()

    with default_device("meta") as is_possible:
        for options in ({"every": 1}, {"every": 3, "delay": 2}, {"every": 3, "fragments": 2, "outer_momentum": 0.5}):
            if is_possible:
                in_rounds(**options)


def case_buckets_without_entries():
    for make in (lambda p: torch.optim.SGD(p, lr=1.0), lambda p: torch.optim.AdamW(p)):
        model, local = local_steps(Linear((3, 0, 500)), make, outer_lr=0.0, bucket_mb=1e-6)
        for step in range(2):
            local.optimizer.zero_grad()
            model(gradients(step, lengths=(3, 0, 500))).backward()
            local.step()
        assert model.w[2].abs().max() > 0.0


def case_an_aggregator_warns_of_parameters_that_differ():
    for differ in (False, True):
        torch.manual_seed(RANK * differ)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            skim.Aggregator(nn.Linear(5, 3).parameters(), timeout=60.0)
        expected = ["skim.Aggregator: the parameters differ between ranks"] * (differ and RANK == 0 and SIZE > 1)
        assert [str(w.message)[:52] for w in told] == expected, told


def case_without_ddp_choices_are_replayed_too():
    auto = {"exchange": "auto", "among": ["dense", "allgather"], "trial_share": 1.0, "dense_below": 0, "value_code": "f32"}

    def run(**more):
        aggregator = skim.Aggregator([torch.zeros(n) for n in LENGTHS], timeout=60.0, bucket_mb=0.05, **auto, **more)
        found = []
        for step in range(20):
            tensors = gradients(step)
            aggregator.reduce(tensors)
            found.append(flat(tensors))
        return torch.stack(found), aggregator.report().choices

    means_of_first, choices = run()
    again, same_choices = run(replay=choices)
    assert torch.equal(again, means_of_first) and same_choices == choices
    local = local_steps(every=1, replay=choices, **auto)[1]
    assert local.report().choices == {"ranks": SIZE, "changes": []}


def case_a_threshold_may_come_from_a_schedule_of_your_own():
    class Threshold:
        def density(self, progress):
            return skim.Density(0.5, threshold=500.0 * SIZE)

    given = gradients(0)
    for options in ({"density": Threshold()}, {"density": 0.5, "select_threshold": 500.0 * SIZE}):
        tensors = [g.clone() for g in given]
        aggregator = skim.Aggregator(tensors, select="threshold", dense_below=0, **{**EXACT, **options})
        aggregator.reduce(tensors)
        kept = flat(aggregator.residuals().values())
        assert kept.any() and kept.abs().max() < 500.0 * SIZE, kept.abs().max()


# ---- skim.LocalSteps


def one_local_step(model, local, step, scale=1.0, **how):
    local.optimizer.zero_grad()
    model([scale * c for c in gradients(step)]).backward()
    local.step(**how)


def shared(local):
    with local.shared() as model:
        return flat(model.parameters())


def case_a_refused_state_does_not_touch_an_exchange_under_way():
    lengths, ends = [400_000, 50], []
    for is_refused in (False, True):
        model, local = local_steps(Linear(lengths), every=2, delay=2)
        for step in range(10):
            local.optimizer.zero_grad()
            model(gradients(step, lengths=lengths)).backward()
            local.step()
            if is_refused and step == 3:
                state = local.state_dict()
                key = f"rank_{RANK}_of_{SIZE}"
                state[key] = state[key].clone()
                state[key][len(state[key]) // 2] ^= 64
                expect(skim.StateError, "its checksum does not fit", local.load_state_dict, state)
        ends.append(shared(local))
    assert torch.equal(*ends)


def case_local_steps_go_on_after_a_gradient_with_nan():
    """Also the optimizer, which keeps a NaN in its state for ever."""
    for make in (lambda p: torch.optim.AdamW(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)):
        for options in ({"every": 2}, {"every": 2, "delay": 1}, {"every": 2, "fragments": 2, "delay": 1}):
            model, local = local_steps(make_optimizer=make, **options)
            seen = []
            with unittest.mock.patch.object(logging.getLogger("skim"), "warning", seen.append):
                for step in range(16):
                    local.optimizer.zero_grad()
                    model(gradients(step)).backward()
                    if step == 4 and RANK == SIZE - 1:
                        for p in model.parameters():
                            p.grad[3] = math.nan
                    local.step()
                local.finish()
            assert flat(model.parameters()).isfinite().all()
            for state in local.optimizer.state.values():
                assert all(torch.as_tensor(value).isfinite().all() for value in state.values())
            report = local.report()
            assert 1 <= report.skipped <= 2 * options.get("fragments", 1) < report.steps, report
            assert len(seen) == (RANK == SIZE - 1) and all("begins anew" in text for text in seen), seen


def case_local_steps_conserve_what_ranks_moved():
    # The gradients do not depend on the parameters, so each rank moves by their sum, wherever it starts.
    for options in ({"every": 1, "ahead": 0.0}, {"every": 1}, {"every": 3, "ahead": 0.5}, {"every": 2, "exchange": "gtopk"}):
        model, local = local_steps(**options)
        moved = torch.zeros(sum(LENGTHS)).double()
        for step in range(6):
            one_local_step(model, local, step)
            moved += flat(gradients(step))
            if (step + 1) % local.every == 0:
                x, e = shared(local), flat(local.residuals().values())
                assert all(torch.equal(x, of_rank) for of_rank in everywhere(x)), "ranks have different x"
                same(total(moved), total(e) - SIZE * x)
                assert torch.equal(flat(model.parameters()), (x.float() - local.ahead * e.float()).double())


def case_local_steps_conserve_what_16_bit_parameters_moved():
    """x and residuals are float32. What a replica loses when it is rounded to 16 bits is no move."""
    for dtype in (torch.bfloat16, torch.float16):
        if not gloo_takes(dtype):
            left_out(f"LocalSteps on gloo with parameters of {dtype}")
            continue
        for options in ({"every": 1, "ahead": 0.0}, {"every": 1}, {"every": 3, "ahead": 0.5}):
            check_moves_of_16_bit_parameters(dtype, options)


def check_moves_of_16_bit_parameters(dtype, options):
    model = Linear(dtype=dtype)
    torch.manual_seed(0)
    for p in model.w:
        nn.init.normal_(p)
    local = local_steps(model, lambda p: torch.optim.SGD(p, lr=2.0**-14), outer_lr=0.5, **options)[1]
    first, moved = shared(local), torch.zeros(sum(LENGTHS)).double()
    for step in range(24):
        local.optimizer.zero_grad()
        model(gradients(step)).backward()
        before = flat(model.parameters())
        if step < 6:
            local.optimizer.step()
        moved += before - flat(model.parameters())
        local.after_step()
    x = flat(local.state_dict()["shared"].split(LENGTHS))
    change = total(flat(local.residuals().values())) - SIZE * (x - first) / local.outer_lr
    torch.testing.assert_close(total(moved), change, rtol=1e-6, atol=1e-5)
    assert total(moved).abs().max() > 0.05, dtype


def case_a_warm_local_step_allocates_no_copy_of_the_parameters():
    for options in ({}, {"outer_lr": 0.0}, {"ahead": 0.0}):
        model, local = local_steps(every=1, local="host", **options)
        for step in range(2):
            one_local_step(model, local, step)
        one_local_step(model, local, 2, idle=True)
        with torch.profiler.profile(profile_memory=True) as profile:
            local.step()
        allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
        assert allocated < 4 * min(n for n in LENGTHS if n > 1000), f"{allocated} bytes"


def case_tensors_that_lie_in_one_are_found():
    whole = torch.arange(12.0)
    a, b, c = whole[:4].view(2, 2), whole[4:9], whole[9:]
    found = in_one([a, b, c])
    assert found is not None and torch.equal(found, whole) and found.data_ptr() == whole.data_ptr()
    assert torch.equal(in_one([b, c]), whole[4:])
    assert torch.equal(in_one([c]), c)
    for others in ([a, c], [b, a], [a.T, b], [a.T], [nn.Parameter(whole[:4]), b], [a, b.double()], [a, b.clone()], [whole[::2], b]):
        assert in_one(others) is None


LATE = ({"every": 1, "delay": 1}, {"every": 3, "delay": 3}, {"every": 4, "fragments": 2, "delay": 1},
        {"every": 3, "fragments": 3, "delay": 3, "ahead": 0.5}, {"every": 2, "fragments": 2, "exchange": "gtopk"})  # fmt: skip


def case_local_steps_begin_with_one_model():
    """Also what is not trained is rank 0's: a random layer that is frozen, and buffers."""
    torch.manual_seed(RANK)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    model[0].weight.requires_grad_(False)
    model.register_buffer("features", torch.randn(7, dtype=torch.bfloat16, device=DEVICE))
    model.register_buffer("mask", torch.rand(9, device=DEVICE) < 0.5)
    model.register_buffer("count", torch.tensor(10 + RANK, device=DEVICE))
    model.register_buffer("nothing", torch.zeros(0, device=DEVICE))
    model.register_buffer("repeated", torch.randn(1, device=DEVICE).expand(6))
    model.register_buffer("repeated_rows", torch.randn(1, 4, device=DEVICE).expand(3, 4))
    model.register_buffer("spread", torch.randn(10, device=DEVICE)[::2])
    model.register_buffer("conjugate", torch.randn(4, dtype=torch.complex64, device=DEVICE).conj())
    model.register_buffer("negative", torch.randn(4, dtype=torch.complex64, device=DEVICE).conj().imag)
    # A parameter with gaps, whose memory others may use, and one with another order in memory on each rank.
    beside = torch.full((3, 4), 100.0 + RANK, device=DEVICE)
    model.gaps = nn.Parameter(beside[:, ::2])
    images = torch.randn(2, 3, 4, 4, device=DEVICE)
    model.images = nn.Parameter(images.to(memory_format=torch.channels_last) if RANK % 2 else images)
    model.to(DEVICE)
    skim.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=1.0), timeout=60.0)
    state = {name: t.cpu() for name, t in model.state_dict().items()}
    of_ranks = [None] * SIZE
    dist.all_gather_object(of_ranks, state)
    for name, of_first in of_ranks[0].items():
        assert torch.equal(state[name], of_first), name
    assert state["count"] == 10
    assert beside[:, 1::2].eq(100.0 + RANK).all() and beside[:, ::2].eq(100.0).all()


def case_local_steps_that_could_not_be_made_leave_model_and_optimizer_as_they_were():
    def interrupt(*_):
        raise KeyboardInterrupt

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.1, nesterov=True)
    before = copy.deepcopy(optimizer.state_dict())
    hooks_of, made = skim.LocalSteps._hooks_of, []

    def first_hooks(self, module, place_of):
        made.append(module)
        return hooks_of(self, module, place_of) if len(made) == 1 else interrupt()

    for name, value in (
        ("local_steps.make_equal", interrupt),
        ("local_steps.LocalSteps._hooks_of", first_hooks),
        ("_momentum.dataclasses.astuple", interrupt),
    ):
        with unittest.mock.patch("skim." + name, value):
            try:
                skim.LocalSteps(model, optimizer, timeout=60.0)
            except KeyboardInterrupt:
                pass
            else:
                raise AssertionError("no interrupt")
        assert optimizer.state_dict() == before, optimizer.state_dict()
        assert not optimizer._optimizer_step_pre_hooks
        for module in model.modules():
            assert not module._state_dict_hooks and not module._load_state_dict_pre_hooks, name
    skim.LocalSteps(model, optimizer, timeout=60.0).finish()


def case_local_steps_refuse_sparse_buffers():
    """The optimizer keeps its momentum then."""
    model = nn.Linear(3, 3)
    model.register_buffer("neighbours", torch.eye(3).to_sparse())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expect(skim.InvalidArgument, "'neighbours' is torch.sparse_coo", skim.LocalSteps, model, optimizer)
    assert optimizer.param_groups[0]["momentum"] == 0.9


def case_late_exchanges_conserve_what_ranks_moved():
    for options in (*LATE, {name: np.int64(value) for name, value in {"every": 3, "delay": 2, "fragments": 2}.items()}):
        model, local = local_steps(**options)
        moved = torch.zeros(sum(LENGTHS)).double()
        for step in range(8):
            one_local_step(model, local, step)
            moved += flat(gradients(step))
            x = shared(local)
            assert all(torch.equal(x, of_rank) for of_rank in everywhere(x)), "ranks have different x"
        local.finish()
        x = flat(model.parameters())
        assert all(torch.equal(x, of_rank) for of_rank in everywhere(x)), "ranks have different x"
        same(total(moved), total(flat(local.residuals().values())) - SIZE * x)


def case_a_mean_is_applied_after_its_delay():
    # Everything is sent, so x lacks what is under way, and a replica lacks what others have under way.
    every, delay = 3, 2
    model, local = local_steps(every=every, delay=delay, density=1.0, exchange="dense")
    own, of_all = [], []  # after each step, all that this rank and the mean rank have moved
    for step in range(10):
        one_local_step(model, local, step)
        before = (own[-1], of_all[-1]) if own else (0.0, 0.0)
        own.append(before[0] - flat(gradients(step)))
        of_all.append(before[1] - total(flat(gradients(step))) / SIZE)
        done = step + 1 - delay
        sent = done // every * every  # steps whose moves are in x
        x = of_all[sent - 1] if sent > 0 else torch.zeros_like(own[0])
        same(shared(local), x)
        same(flat(model.parameters()), x + own[-1] - (own[sent - 1] if sent > 0 else 0.0))


def case_fragments_are_exchanged_in_turn():
    model, local = local_steps(every=4, fragments=2, density=1.0, exchange="dense", ahead=0.0)
    mean = torch.zeros(sum(LENGTHS)).double()
    first = sum(LENGTHS[:3])  # 15,050 of 40,057 entries; the fourth tensor's middle lies behind the half
    seen = torch.zeros_like(mean)
    for step in range(8):
        one_local_step(model, local, step)
        mean -= total(flat(gradients(step))) / SIZE
        part = {1: slice(0, first), 3: slice(first, None)}.get(step % 4)
        if part is not None:
            seen[part] = mean[part]
        same(shared(local), seen)
    aggregator = skim.Aggregator(model.parameters(), fragments=2)
    expect(skim.InvalidArgument, "step needs fragments=1", aggregator.step)
    assert len(skim.Aggregator(model.parameters(), fragments=2**70).fragments) == len(LENGTHS), "one tensor in each"


def case_training_goes_on_while_an_exchange_waits():
    # Every rank but the last begins its exchange, takes another step, and only then lets the last one begin.
    model, local = local_steps(every=3, delay=2)
    for step in range(3):
        if step == 2 and RANK == SIZE - 1:
            for r in range(SIZE - 1):
                dist.recv(torch.zeros(1), r)
        one_local_step(model, local, step)
    if RANK < SIZE - 1:
        one_local_step(model, local, 3)
        dist.send(torch.zeros(1), SIZE - 1)
    else:
        one_local_step(model, local, 3)
    local.finish()
    x = flat(model.parameters())
    assert all(torch.equal(x, of_rank) for of_rank in everywhere(x))


def case_residuals_are_those_after_the_exchanges_that_have_begun():
    model, local = local_steps(every=1, delay=1)
    reduce, begins = local._aggregator.reduce, threading.Event()
    local._aggregator.reduce = lambda tensors, **how: begins.wait() and reduce(tensors, **how)
    one_local_step(model, local, 0)
    arrived = local._flights[0].arrived
    wait = arrived.exception
    arrived.exception = lambda: begins.set() or wait()
    found = flat(local.residuals().values())
    begins.set()
    wait()
    assert found.any() and torch.equal(found, flat(local.residuals().values()))
    local.finish()


def case_local_steps_of_everything_are_data_parallel_sgd():
    reference = DDP(Linear())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    model, local = local_steps(make_optimizer=lambda p: torch.optim.SGD(p, lr=0.5), density=1.0, exchange="dense")
    for step in range(4):
        one_local_step(model, local, step)
        optimizer.zero_grad()
        reference(gradients(step)).backward()
        optimizer.step()
        same(flat(model.parameters()), flat(reference.parameters()))


def case_the_outer_step_is_nesterov():
    model, local = local_steps(
        every=2, density=1.0, exchange="dense", outer_lr=0.5, outer_momentum=0.75, ahead=0.0
    )
    x = torch.zeros(sum(LENGTHS)).requires_grad_()
    outer = torch.optim.SGD([x], lr=0.5, momentum=0.75, nesterov=True)
    for step in range(8):
        one_local_step(model, local, step)
        if step % 2 == 1:
            x.grad = total(torch.cat(gradients(step)) + torch.cat(gradients(step - 1))) / SIZE
            outer.step()
            torch.testing.assert_close(shared(local), x.detach().double(), rtol=1e-5, atol=0.1)


def case_the_outer_rate_follows_the_density():
    def by_adam(parameters):
        return torch.optim.Adam(parameters, lr=1.0)

    adam = {"make_optimizer": by_adam}
    dedicated = {"exchange": "param-server", "server": "dedicated"}  # rank 0 does not count in the mean
    for every, options in (
        (1, {}), (1, adam), (2, adam | {"delay": 1}), (2, adam | {"fragments": 2}), (1, dedicated)
    ):
        ranks = SIZE - 1 if options is dedicated and SIZE > 1 else SIZE
        moved = []
        for rate in (0.0, 1.0):
            model, local = local_steps(every=every, outer_lr=rate, dense_below=60, **options)
            began = shared(local)
            for step in range(every + local.delay):  # each fragment is exchanged once
                one_local_step(model, local, step, idle=ranks < SIZE and RANK == 0)
            moved.append((shared(local) - began).split(LENGTHS))
        densities = [d for f in range(options.get("fragments", 1)) for d in local._aggregator.densities(f)]
        assert densities == [int(0.02 * n) / n if n > 60 else 1.0 for n in LENGTHS]
        for density, by_default, mean in zip(densities, *moved):
            assert mean.any()
            torch.testing.assert_close(by_default, skim.outer_lr_for(ranks, density) * mean, rtol=1e-5, atol=1e-3)
    # Rounds of several steps of SGD apply the mean as it is.
    of_both = [local_steps(every=2, outer_lr=rate) for rate in (0.0, 1.0)]
    for model, local in of_both:
        for step in range(4):
            one_local_step(model, local, step)
    assert torch.equal(*(shared(local) for _, local in of_both))


def case_densities_of_local_steps_go_by_the_epoch():
    for options in ({"every": 1}, {"every": 1, "delay": 1}, {"every": 2, "delay": 2}, {"every": 2, "fragments": 2}):
        model, local = local_steps(density=skim.listed_density([0.5, 0.25, 0.125], 0.0625), dense_below=0, **options)
        assert local.epoch == 0
        reduce, found = local._aggregator.reduce, []

        def recorded(tensors, *, fragment, reduce=reduce, local=local, found=found):
            applied = reduce(tensors, fragment=fragment)
            found.append(local._aggregator.densities(fragment)[0])
            return applied

        local._aggregator.reduce = recorded
        per_epoch = 2 * local.every  # steps
        for step in range(4 * per_epoch):
            local.epoch = step // per_epoch
            one_local_step(model, local, step)
        local.finish()
        # An exchange chooses the density of the next one.
        epochs = [epoch for epoch in range(4) for _ in range(2 * options.get("fragments", 1))]
        wanted = [0.5, *(0.5 ** (1 + epoch) for epoch in epochs)][: len(epochs)]
        for density, of_epoch in zip(found, wanted):
            assert math.isclose(density, of_epoch, rel_tol=0.01), (options, found, wanted)
        assert len(found) >= len(wanted)
        expect_equal_everywhere(flat(model.parameters()), "x")


def case_without_feedback_the_rest_is_lost():
    model = attached(attach={"feedback": False})
    for step in range(5):  # through the rebuild of buckets
        model(gradients(step)).backward()
        means(model)
        assert not kept(model).any() and len(kept(model)) == sum(LENGTHS)

    n, k = 5000, 100
    for options in ({}, {"ahead": 0.0}, {"every": 2, "delay": 1}):
        model, local = local_steps(Linear([n]), feedback=False, density=(k + 0.5) / n, **options)
        x, u = torch.zeros(n), torch.zeros(n)
        for step in range(4):
            [g] = gradients(step, lengths=[n])
            local.optimizer.zero_grad()
            model([g]).backward()
            local.step()
            u += g
            if (step + 1) % local.every == 0:
                largest = torch.argsort(-u.abs(), stable=True)[:k]
                sent = torch.zeros(n)
                sent[largest] = u[largest]
                x -= total(sent) / SIZE
                u = torch.zeros(n)
        local.finish()
        if not local.delay:  # a late mean meets moves that were made in the meantime
            same(flat(model.parameters()), x.double())
        expect_equal_everywhere(flat(model.parameters()), "x")
        assert not local.residuals()["w.0"].any() and len(local.residuals()["w.0"]) == n


def case_ranks_may_take_unequal_numbers_of_local_steps():
    model, local = local_steps(every=4)
    moved = torch.zeros(sum(LENGTHS)).double()
    for step in range(7):
        idle = step % 4 >= 2 and RANK % 2 == 0
        if idle:
            local.step(idle=True)
        else:
            one_local_step(model, local, step)
            moved += flat(gradients(step))
    local.finish()  # in the middle of a round
    same(total(moved), total(flat(local.residuals().values())) - SIZE * flat(model.parameters()))
    expect(skim.InvalidArgument, "after finish()", local.step)


def ones(model):
    return {name: torch.ones_like(p) for name, p in model.named_parameters(remove_duplicate=False)}


def case_a_replica_is_never_saved_by_mistake():
    tied = Linear()
    tied.also = nn.ParameterList([tied.w[1]])  # a parameter with two names
    model, local = local_steps(tied, every=2)
    for step in range(3):
        one_local_step(model, local, step)
    own, x = flat(model.parameters()), shared(local)
    assert not torch.equal(own, x)
    for saved, name in ((model.state_dict(), "also.0"), (nn.Sequential(model).state_dict(), "0.also.0")):
        assert torch.equal(saved.pop(name).flatten().double(), x.split(LENGTHS)[1])
        assert torch.equal(flat(saved.values()), x)
    assert torch.equal(flat(model.parameters()), own), "saving changes nothing"
    assert torch.equal(flat(tied.w.state_dict().values()), x), "also a part of the model"
    with local.shared():
        expect(skim.InvalidArgument, "inside shared()", local.step)
        expect(skim.InvalidArgument, "load_state_dict inside shared()", model.load_state_dict, ones(model))
        expect(skim.InvalidArgument, "finish inside shared()", local.finish)
        expect(skim.InvalidArgument, "load_state_dict inside shared()", local.load_state_dict, local.state_dict())
    assert torch.equal(flat(model.parameters()), own) and torch.equal(shared(local), x)
    # An interrupt as soon as x is there, and one while the replica is put back.
    for of_calls in ([KeyboardInterrupt, None], [None, KeyboardInterrupt, None]):
        with unittest.mock.patch.object(local, "_reshard", side_effect=of_calls):
            with contextlib.suppress(KeyboardInterrupt), local.shared():
                pass
        local._expect_training("step")
        assert torch.equal(flat(model.parameters()), own), "the replica is back"
    with local.shared(), warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(model)
    for part in (model, tied.w):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            pickle.dumps(part)
        assert told and "this rank alone" in str(told[0].message), told
    of_copy = copy.deepcopy(model).state_dict()
    del of_copy["also.0"]
    assert torch.equal(flat(of_copy.values()), own), "a copy is a model like any other"
    model.load_state_dict(ones(model))
    assert torch.equal(shared(local), torch.ones_like(x))
    one_local_step(model, local, 3)
    tied.w.load_state_dict({"0": torch.zeros(LENGTHS[0])}, strict=False)
    x = shared(local)
    assert all(torch.equal(x, of_rank) for of_rank in everywhere(x)), "what was not loaded is x, and no replica"
    same(x, torch.cat([torch.zeros(LENGTHS[0]), torch.ones(sum(LENGTHS[1:]))]).double())
    one_local_step(model, local, 4)
    with contextlib.suppress(RuntimeError):
        model.load_state_dict({"w.1": torch.zeros(3)})
        raise AssertionError("its shape does not fit")
    assert torch.equal(shared(local), x)

    model, local = local_steps(every=1, delay=1)
    for step in range(3):
        one_local_step(model, local, step)
    model.load_state_dict(ones(model))  # while an exchange is under way
    assert torch.equal(shared(local), torch.ones_like(x))
    one_local_step(model, local, 3)
    local.finish()
    x = flat(model.parameters())
    assert all(torch.equal(x, of_rank) for of_rank in everywhere(x))

    inner, sgd = Linear(), lambda p: torch.optim.SGD(p, lr=1.0)
    compiled = torch.compile(inner, backend="eager")
    local = local_steps(compiled, sgd)[1]
    assert list(local.residuals()) == [name for name, _ in inner.named_parameters()]
    one_local_step(inner, local, 0)
    for saved in (compiled.state_dict(), inner.state_dict()):
        assert torch.equal(flat(saved.values()), shared(local)), "compiled or not"
    expect(skim.InvalidArgument, "has LocalSteps already; call finish() first", local_steps, inner, sgd)
    local.finish()
    local_steps(inner, sgd)

    model, local = local_steps()
    if "assign" in inspect.signature(model.load_state_dict).parameters:  # PyTorch 2.1 or later
        had = [*model.parameters()]
        for module in (model, nn.Sequential(model)):
            expect(skim.InvalidArgument, "without assign=True", module.load_state_dict, ones(module), assign=True)
            assert [*map(id, model.parameters())] == [*map(id, had)] and torch.equal(flat(had), shared(local))
        one_local_step(model, local, 0)
        model.load_state_dict(ones(model))


def case_what_is_loaded_through_a_wrapper_is_x():
    for options in ({"every": 1}, {"every": 3, "ahead": 0.5}, {"every": 1, "delay": 1}):
        for wrap in (lambda m: m, nn.Sequential, lambda m: nn.Sequential(nn.Sequential(m)), compiled_eagerly):
            model, local = local_steps(**options)
            for step in range(4):
                one_local_step(model, local, step)
            wrapper = wrap(model)
            wrapper.load_state_dict(ones(wrapper))
            x, e = shared(local), flat(local.residuals().values())
            assert torch.equal(x, torch.ones_like(x))
            assert torch.equal(flat(model.parameters()), (x.float() - local.ahead * e.float()).double())
            one_local_step(model, local, 4)
            local.finish()
            now = flat(local.residuals().values())
            same(total(flat(gradients(4))), total(now - e) - SIZE * (flat(model.parameters()) - x))


def compiled_eagerly(model):
    return torch.compile(model, backend="eager")


def adamw(p):
    return torch.optim.AdamW(p, lr=0.01)


def case_local_steps_resume_bit_by_bit():
    late = {"every": 4, "fragments": 2, "delay": 3}
    # Between rounds; in the middle of one; with one exchange under way, and with two; a late one in every step.
    for stop, how in ((4, {}), (5, {}), (4, late), (7, late), (5, {"every": 1, "delay": 1})):
        options = {"every": 2, "ahead": 0.7, "outer_momentum": 0.5, "make_optimizer": adamw, **how}
        model, local = local_steps(**options)
        for step in range(stop):
            one_local_step(model, local, step, 1e-3)
        saved = [pickle.loads(pickle.dumps(s)) for s in (model.state_dict(), local.optimizer.state_dict(), local.state_dict())]
        other, again = local_steps(**options)
        other.load_state_dict(saved[0])
        again.optimizer.load_state_dict(saved[1])
        again.load_state_dict(saved[2])
        for step in range(stop, 12):
            one_local_step(model, local, step, 1e-3)
            one_local_step(other, again, step, 1e-3)
        assert torch.equal(flat(model.parameters()), flat(other.parameters()))
        assert torch.equal(shared(local), shared(again))
        expect(skim.StateError, "no 'shared'", again.load_state_dict, {"round": torch.tensor([0])})
        whole = {**saved[2], "steps_left": torch.zeros(9)}
        expect(skim.StateError, "no 'steps_left'", again.load_state_dict, whole)
        refused_without = ["applied", "means", f"sent_from_{RANK}_{SIZE}"] if "means" in saved[2] else []
        before = again.state_dict()
        for missing in refused_without:
            rest = {key: value for key, value in saved[2].items() if key != missing}
            expect(skim.StateError, f"no '{missing}'", again.load_state_dict, rest)
        for odd in set(saved[2]) & {"outer_momentum", "means", f"replica_{RANK}_{SIZE}", f"sent_from_{RANK}_{SIZE}"}:
            expect(skim.StateError, f"no '{odd}'", again.load_state_dict, {**saved[2], odd: torch.zeros(1)})
        after = again.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)


class BeforeWaiting:
    """A future that calls f when somebody is about to use it."""

    def __init__(self, future, f):
        self.future, self.f = future, f

    def __getattr__(self, name):
        self.f()
        return getattr(self.future, name)


def case_a_loaded_state_is_not_changed_by_exchanges_that_began_before():
    model, local = local_steps(every=2, delay=1)
    for step in range(6):
        one_local_step(model, local, step)
    saved = local.state_dict()
    one_local_step(model, local, 6)
    gate = threading.Event()
    local._aggregator.submit(gate.wait)
    one_local_step(model, local, 7)  # its exchange is queued
    [flight] = local._flights.values()
    flight.arrived = BeforeWaiting(flight.arrived, gate.set)
    local.load_state_dict(saved)
    again = local.state_dict()
    assert saved.keys() == again.keys()
    for key, value in saved.items():
        assert torch.equal(again[key], value), key


def case_an_exception_while_a_mean_is_awaited_loses_nothing():
    for everywhere_too in (False, True):
        for options in ({"every": 1, "delay": 1}, {"every": 4, "fragments": 2, "delay": 1}):
            check_an_exception(interrupted=everywhere_too or RANK == SIZE - 1, saves=everywhere_too, ahead=0.5, **options)


def check_an_exception(interrupted, saves, **options):
    def interrupt():
        raise KeyboardInterrupt

    runs = [local_steps(**options)]
    for step in range(6):
        one_local_step(*runs[0], step)
    [flight] = runs[0][1]._flights.values()
    assert flight.steps_left == 1
    if interrupted:
        flight.arrived.exception()
        flight.arrived = BeforeWaiting(flight.arrived, interrupt)
        try:
            one_local_step(*runs[0], 6)
            raise AssertionError("it was not awaited")
        except KeyboardInterrupt:
            flight.arrived = flight.arrived.future
        if saves:
            runs.append(local_steps(**options))
            for of, again in zip(*runs):
                again.load_state_dict(of.state_dict())
        for _, local in runs:
            local.after_step()  # goes on with the step
    else:
        one_local_step(*runs[0], 6)
    for model, local in runs:
        for step in range(7, 10):
            one_local_step(model, local, step)
        local.finish()
        x, moved = flat(model.parameters()), sum(flat(gradients(step)) for step in range(10))
        assert all(torch.equal(x, of_rank) for of_rank in everywhere(x)), "ranks have different x"
        same(total(moved), total(flat(local.residuals().values())) - SIZE * x)


class FailsAtLast:
    """A selector that fails on every rank, when it is called for the last time."""

    calls_left = 0

    def select(self, accumulated, k, step, slot):
        self.calls_left -= 1
        if self.calls_left == 0:
            dist.barrier()  # the buckets before are reduced on all ranks
            raise RuntimeError("fails at last")
        return np.argsort(-np.abs(accumulated), kind="stable")[:k]


def case_a_step_in_which_a_bucket_failed_is_taken_back():
    model, selector = Linear(), FailsAtLast()
    options = {"density": 0.02, "dense_below": 0, "selector": selector, "bucket_mb": BUCKET_MB, **EXACT}
    aggregator = skim.Aggregator(model.parameters(), **options)
    selector.calls_left = 3 * len(aggregator.buckets)  # the last bucket of the third step
    given, got = torch.zeros(sum(LENGTHS)).double(), torch.zeros(sum(LENGTHS)).double()
    for step in range(3):
        c = gradients(step)
        model(c).backward()
        given += flat(c)
        if step < 2:
            assert aggregator.step()
            got += flat([p.grad for p in model.parameters()])
            model.zero_grad()
    expect(RuntimeError, "fails at last", aggregator.step)
    state = aggregator.state_dict()
    left = flat(aggregator.residuals().values())
    same(total(given), SIZE * got + total(left))
    again = skim.Aggregator(model.parameters(), **options)
    again.load_state_dict(state)
    assert torch.equal(flat(again.residuals().values()), left)


def case_an_interrupt_before_an_exchange_begins_ends_the_group_and_nobody_waits():
    for how, options in (("run_after_others", {"every": 1}), ("submit", {"every": 2, "delay": 1})):
        for use in ("exchange", "finish", "after_step", "load_state_dict"):
            model, local = local_steps(**options)
            saved, last = local.state_dict(), RANK == SIZE - 1
            with contextlib.ExitStack() as stack:
                if last:
                    interrupted = unittest.mock.patch.object(local._aggregator, how, side_effect=KeyboardInterrupt)
                    stack.enter_context(interrupted)
                ends = KeyboardInterrupt if last else skim.CommError
                try:
                    for step in range(4):
                        one_local_step(model, local, step)
                    raise AssertionError("it trains on")
                except ends:
                    pass
            assert not local._flights
            local.state_dict()
            try:
                for _ in range(4 if use == "after_step" else 1):
                    getattr(local, use)(*([saved] if use == "load_state_dict" else []))
                assert use == "load_state_dict" or (use == "finish" and SIZE == 1), use
            except (ends, skim.CommError):
                assert use != "load_state_dict", use
            dist.barrier()


def case_the_state_of_local_steps_is_the_same_inside_shared():
    for options in ({"every": 4}, {"every": 4, "fragments": 2, "delay": 3}):
        model, local = local_steps(**options)
        for step in range(6):  # the second round is open
            one_local_step(model, local, step)
        outside = local.state_dict()
        with local.shared():
            inside = local.state_dict()
        assert inside.keys() == outside.keys()
        for key, value in outside.items():
            assert torch.equal(inside[key], value), key
        assert not torch.equal(inside[f"replica_{RANK}_{SIZE}"], inside["shared"])


def case_local_steps_go_on_on_another_number_of_ranks():
    for stop, late in ((4, {}), (5, {}), (4, {"fragments": 2, "delay": 2})):
        model, local = local_steps(every=2, **late)
        for step in range(stop):
            one_local_step(model, local, step)
        states = [None] * SIZE
        dist.all_gather_object(states, local.state_dict())
        of_all = {key: value for state in states for key, value in state.items()}
        e = flat(local.residuals().values())
        x, own = shared(local), flat(model.parameters())
        alone = [dist.new_group([r]) for r in range(SIZE)]
        other, again = local_steps(every=2, process_group=alone[RANK], **late)
        if SIZE > 1:
            again.load_state_dict(of_all)
            assert torch.equal(shared(again), x)
            torch.testing.assert_close(flat(again.residuals().values()), total(e) / SIZE)
            torch.testing.assert_close(flat(other.parameters()), total(own) / SIZE, rtol=1e-6, atol=1e-3)
            again.finish()  # what was under way arrives, and nothing is lost
            after = flat(other.parameters()) - flat(again.residuals().values())
            torch.testing.assert_close(after, total(own) / SIZE, rtol=1e-6, atol=0.01)


def case_a_state_from_the_middle_of_a_round_keeps_what_ranks_moved_with_other_options_too():
    for before, after in (
        ({}, {}),
        ({"ahead": 0.5}, {"ahead": 1.0}),
        ({"exchange": "param-server"}, {"exchange": "allgather"}),
        ({"exchange": "allgather"}, {"exchange": "param-server"}),
        ({"delay": 2}, {"delay": 2, "ahead": 0.0}),
        ({"every": 4, "delay": 4, "ahead": 0.5}, {"every": 2, "ahead": 0.5}),  # an exchange is under way when the next one begins
        ({"fragments": 2, "delay": 2}, {"fragments": 2, "delay": 1, "ahead": 0.5}),
        ({"every": 6}, {"every": 1}),
        ({"every": 6, "ahead": 0.0}, {"every": 1}),
    ):
        model, local = local_steps(**{"every": 3, **before})
        moved = torch.zeros(sum(LENGTHS)).double()
        for step in range(5):
            one_local_step(model, local, step)
            moved += flat(gradients(step))
        other, again = local_steps(**{"every": 3, **after})
        again.load_state_dict(local.state_dict())
        if before == after:
            assert torch.equal(flat(other.parameters()), flat(model.parameters()))
        if before.get("every") != 6:  # otherwise the round has no step after it was loaded
            one_local_step(other, again, 5)
            moved += flat(gradients(5))
        again.finish()
        same(total(moved), total(flat(again.residuals().values())) - SIZE * flat(other.parameters()))


def case_all_of_an_exchange_is_exposed_that_training_waits_for():
    model, local = local_steps(every=1)
    apart = skim.Aggregator([torch.zeros(3000), torch.zeros(50, 20)], **EXACT, density=0.02, timeout=60.0)
    for step in range(3):
        one_local_step(model, local, step)
        apart.reduce([torch.ones_like(t) for t in apart.tensors])
    for report in (apart.report(), local.report()):
        parts = sum(b.select_s + b.exchange_s + b.apply_s for b in report.buckets.values())
        assert 0 < parts <= report.exposed_s, (parts, report.exposed_s)


def case_a_state_from_late_in_a_longer_round_ends_it_at_the_next_step():
    model, local = local_steps(every=4)
    for step in range(3):
        one_local_step(model, local, step)
    state = local.state_dict()
    other, again = local_steps(every=2)
    again.load_state_dict(state)
    one_local_step(other, again, 3)
    assert again.report().steps == 1, again.report()
    one_local_step(model, local, 3)
    assert torch.equal(shared(again), shared(local))


def case_a_replica_that_is_not_finite_changes_nothing():
    model, local = local_steps(every=1, ahead=0.0)
    one_local_step(model, local, 0)
    x = shared(local)
    with torch.no_grad():
        if RANK == SIZE - 1:
            model.w[0][7] = torch.nan
        model.w[1].sub_(8.0)
    assert not local.exchange()
    assert torch.equal(shared(local), x)
    assert torch.equal(flat(model.parameters()), x), "the replica starts anew"
    before = total(flat(local.residuals().values()))
    assert local.exchange(), "what was finite is still there"
    same(total(flat(local.residuals().values())), before - SIZE * (x - shared(local)))


def case_an_update_under_way_that_is_not_finite_changes_nothing():
    model, local = local_steps(every=1, delay=1)
    one_local_step(model, local, 0)
    with torch.no_grad():
        if RANK == SIZE - 1:
            model.w[0][7] = torch.nan
    one_local_step(model, local, 1)  # its exchange has the NaN
    x = shared(local)
    moved = total(flat(gradients(0)) + flat(gradients(1)))
    one_local_step(model, local, 2)
    assert torch.equal(shared(local), x)
    moved += total(flat(gradients(2)))
    local.finish()
    lost = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    lost[7] = True
    x, e = flat(model.parameters()), total(flat(local.residuals().values()))
    assert torch.isfinite(x).all()
    same((e - SIZE * x)[~lost], moved[~lost])

    _, local = local_steps(every=1, delay=1, non_finite="raise")
    with torch.no_grad():
        local.model.w[0][7] = torch.inf
    one_local_step(local.model, local, 0)
    expect(skim.NonFiniteError, "NaN or infinite", one_local_step, local.model, local, 1)
    one_local_step(local.model, local, 2)


def case_momentum_of_sgd_moves_before_the_exchange_of_every_step():
    def sgd(p):
        return torch.optim.SGD(p, lr=0.5, momentum=0.75, weight_decay=weight_decay)

    weight_decay = 0.125
    # Everything is sent: momentum SGD.
    _, local = everything = local_steps(make_optimizer=sgd, density=1.0, exchange="dense")
    x = torch.zeros(sum(LENGTHS), requires_grad=True)
    plain = sgd([x])
    for step in range(6):
        one_local_step(*everything, step)
        x.grad = total(torch.cat(gradients(step))) / SIZE
        plain.step()
        torch.testing.assert_close(shared(local), x.detach().double(), rtol=1e-5, atol=0.05)
    assert local.optimizer.param_groups[0]["momentum"] == 0.0, "no momentum counts twice"

    weight_decay = 0.0
    # A part of it, by a loop that is written out: what was sent has no velocity any more.
    n, k = sum(LENGTHS), sum(LENGTHS) // 50
    model, local = local_steps(make_optimizer=sgd, density=(k + 0.5) / n, exchange="allgather", bucket_mb=100.0)
    x, e, m = torch.zeros(n), torch.zeros(n), torch.zeros(n)
    for step in range(6):
        one_local_step(model, local, step)
        m = 0.75 * m + 0.5 * torch.cat(gradients(step))
        e += m
        sent = torch.zeros(n)
        largest = torch.argsort(-e.abs(), stable=True)[:k]
        sent[largest] = e[largest]
        e[largest], m[largest] = 0.0, 0.0
        x -= total(sent) / SIZE
        torch.testing.assert_close(shared(local), x.double(), rtol=1e-5, atol=0.05)
        torch.testing.assert_close(flat(model.parameters()), (x - e).double(), rtol=1e-5, atol=0.05)

    _, local = local_steps(make_optimizer=sgd, every=2)
    assert local.optimizer.param_groups[0]["momentum"] == 0.75, "several steps need it"


def case_momentum_comes_back_and_weight_decay_with_it():
    def sgd(model, **options):
        return torch.optim.SGD(model.parameters(), lr=0.1, **{"momentum": 0.9, "weight_decay": 1e-4, **options})

    def group_of(optimizer):
        return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}

    plain, taken, summed = (0.9, 1e-4), (0.0, 1e-4), (0.0, 1e-3)

    def expect_group(optimizer, expected):
        group = optimizer.param_groups[0]
        assert group["momentum"] == expected[0] and math.isclose(group["weight_decay"], expected[1], rel_tol=1e-12), group

    # finish() leaves the optimizer as it was, also if others of an elastic group go on; then it can be given to attach.
    inner = Linear()
    optimizer = sgd(inner, nesterov=True)
    before = group_of(optimizer)
    model, local = local_steps(inner, lambda p: optimizer)
    one_local_step(model, local, 0)
    expect_group(optimizer, taken)
    local.finish()
    assert group_of(optimizer) == before
    local._last_exchange()
    assert group_of(optimizer) == before
    ddp = attached(inner, attach={"optimizer": optimizer})
    expect_group(optimizer, summed)
    skim.detach(ddp)
    expect_group(optimizer, plain)

    # The state of an optimizer under attach, and one without the factor of the weight decay.
    attached(inner, attach={"optimizer": optimizer})
    saved = copy.deepcopy(optimizer.state_dict())
    old = copy.deepcopy(saved)
    old["param_groups"][0]["skim_momentum"] = old["param_groups"][0]["skim_momentum"][:3]

    def resumed(state):
        model = Linear()
        optimizer = sgd(model)
        optimizer.load_state_dict(state)
        return model, optimizer

    for every, expected in ((1, taken), (2, plain)):
        model, optimizer = resumed(saved)
        local = local_steps(model, lambda p: optimizer, every=every)[1]
        expect_group(optimizer, expected)
        one_local_step(model, local, 0)
        of_updates = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)  # while it trains
        one_local_step(model, local, 1)
        expect_group(optimizer, expected)
        has_sums = optimizer.state[model.w[0]].get("momentum_buffer") is not None  # old PyTorch has None
        assert has_sums == (every == 2), "the optimizer has its momentum in the step itself if it keeps it"
        optimizer.load_state_dict(saved)
        local.after_step()  # as after GradScaler.step
        expect_group(optimizer, expected)
        if every == 2:
            optimizer.load_state_dict(saved)
            local.load_state_dict(local.state_dict())
            expect_group(optimizer, expected)
    for state in (saved, of_updates, old):
        model, optimizer = resumed(state)
        ddp = attached(model, attach={"optimizer": optimizer})
        expect_group(optimizer, summed)
        skim.detach(ddp)
        expect_group(optimizer, plain)

    model = Linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    attached(model, attach={"optimizer": optimizer})
    local_steps(model, lambda p: optimizer)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def case_a_loaded_momentum_counts_once_in_a_step_that_the_loop_takes_itself():
    """As GradScaler.step: LocalSteps sees only after_step()."""
    if not hasattr(torch.optim.SGD.step, "__wrapped__"):
        return print("skipped: this PyTorch calls no hook of optimizers any more once a model was compiled")
    make = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
    plain, taken = (make(Linear().parameters()) for _ in range(2))
    skim.Aggregator(taken.param_groups[0]["params"], optimizer=taken)
    for every, loaded in ((1, plain), (2, taken)):
        model, local = local_steps(make_optimizer=make, every=every)
        one_local_step(model, local, 0)
        local.optimizer.load_state_dict(loaded.state_dict())
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        local.optimizer.step()
        has_sums = local.optimizer.state[model.w[0]].get("momentum_buffer") is not None
        assert has_sums == (every == 2), "momentum correction stands for the optimizer's momentum with every=1 only"
        local.after_step()
        local.finish()
        assert not local.optimizer._optimizer_step_pre_hooks


def case_the_momentum_that_comes_back_begins_at_0():
    for make in (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, weight_decay=0.0)):
        inner = Linear()
        optimizer = make(inner.parameters())

        def step_by(gradient):
            before = flat(inner.parameters())
            for p in inner.parameters():
                p.grad = torch.full_like(p, gradient)
            optimizer.step()
            return flat(inner.parameters()) - before

        step_by(1.0)
        model = attached(inner, attach={"optimizer": optimizer})
        model(gradients(0)).backward()
        optimizer.step()
        skim.detach(model)
        assert not step_by(0.0).any(), "what the optimizer had summed up before is of long ago"
        assert step_by(1.0).all() and step_by(0.0).all()


def case_a_model_is_attached_or_takes_local_steps():
    def local_steps_of(inner, **options):
        return skim.LocalSteps(inner, torch.optim.SGD(inner.parameters(), lr=1.0), timeout=60.0, **options)

    inner = Linear()
    whole = nn.Sequential(inner)
    model = attached(inner)
    for module in (inner, whole, inner.w):
        text = "skim.attach exchanges the gradients of this model in every step; call skim.detach(model) first"
        expect(skim.InvalidArgument, text, local_steps_of, module)
    skim.detach(model)
    local = local_steps_of(inner)
    for module in (model, DDP(whole)):
        text = "skim.attach: this model has LocalSteps already; call finish() first"
        expect(skim.InvalidArgument, text, skim.attach, module, **EXACT)
    local.finish()
    skim.attach(model, **EXACT)
    train(model, range(2))

    model.itself = [model]  # so that only the garbage collection frees it
    del model
    local_steps_of(whole).finish()


def case_local_steps_refuse():
    wrong, inner = skim.InvalidArgument, Linear()
    optimizer = torch.optim.SGD(inner.parameters(), lr=1.0)
    for model in (DDP(inner), nn.Sequential(DDP(inner))):
        expect(wrong, "give the model without it", skim.LocalSteps, model, optimizer)
    for name, value in (("every", 0), ("every", 1.5), ("ahead", 1.5), ("outer_lr", -1.0), ("outer_momentum", 1.0),
                        ("outer_lr", math.inf), ("outer_lr", 1e300),
                        ("delay", 2), ("delay", -1), ("fragments", 0), ("fragments", 2)):  # fmt: skip
        expect(wrong, f"{name}: must be", skim.LocalSteps, inner, optimizer, **{name: value})
    for other, what in ((None, "NoneType"), ([*inner.parameters()], "list"), (inner.parameters(), "generator")):
        expect(wrong, f"model must be a torch.nn.Module, not {what}", skim.LocalSteps, other, optimizer)
    expect(wrong, "no momentum_correction here", skim.LocalSteps, inner, optimizer, momentum_correction=0.9)
    for name in ("of_updates", "tensors"):
        expect(wrong, f"no {name} here", skim.LocalSteps, inner, optimizer, **{name: True})
    for what, other in (
        ("optimizer must be an optimizer, with step(), not 'sgd'", "sgd"),
        ("optimizer must be an optimizer, with step(), not <class", torch.optim.SGD),
        ("trains none of the model's parameters", torch.optim.SGD(Linear().parameters(), lr=1.0)),
        ("makes parameters equal on all ranks", ZeroRedundancyOptimizer(inner.parameters(), torch.optim.SGD, lr=1.0)),
    ):
        expect(wrong, what, skim.LocalSteps, inner, other)

    inner.w[0].requires_grad_(False)
    model, local = local_steps(inner, every=2)
    inner.w[1].requires_grad_(False)  # after that it stays as it is
    model.load_state_dict(ones(model))
    local.step()
    inner.w[0].requires_grad_(True)
    for f in (local.step, local.exchange, local.finish):
        expect(wrong, "'w.0' was frozen when LocalSteps was made, so it would not be exchanged; call finish() before", f)
    inner.w[0].requires_grad_(False)
    state = local.state_dict()
    local.finish()
    for f in (local.step, local.exchange, lambda: local.load_state_dict(state)):
        expect(wrong, "after finish()", f)


def case_local_steps_of_a_model_with_another_head():
    def make(**lengths):
        model = Named(**lengths)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return model, skim.LocalSteps(
            model, optimizer, 2, 0.05, outer_momentum=0.5, dense_below=0, timeout=60.0, **{**EXACT, **late}
        )

    def step(model, local, lengths, at):
        model(gradients(at, lengths=lengths.values())).backward()
        local.step()
        for p in model.parameters():
            p.grad = None

    for late, stop in (({}, 5), ({"delay": 1}, 4)):
        model, local = make(**BODY, **HEAD)
        for at in range(stop):
            step(model, local, BODY | HEAD, at)
        saved, state, had = model.state_dict(), local.state_dict(), local.residuals()
        other, again = make(**NEW, **BODY)
        other.load_state_dict({key: value for key, value in saved.items() if key[2:] in BODY}, strict=False)
        before = again.state_dict()
        text = "the state does not have 1 parameter of the model ('w.new'); load with strict=False"
        expect(skim.StateError, text, again.load_state_dict, state)
        if late:
            expect(skim.StateError, "exchanges under way", again.load_state_dict, state, strict=False)
            assert all(torch.equal(value, before[key]) for key, value in again.state_dict().items())
            continue
        report = again.load_state_dict(state, strict=False)
        assert report.missing_keys == ["w.new"] and list(report.unexpected_keys) == ["w.bias", "w.head"]
        has = again.residuals()
        assert all(torch.equal(has[f"w.{name}"], had[f"w.{name}"]) for name in BODY) and not has["w.new"].any()
        now, n = again.state_dict(), sum(BODY.values())
        for key in ("shared", "outer_momentum", f"replica_{RANK}_{SIZE}"):
            assert torch.equal(now[key][800:], state[key][:n]), key
            assert not now[key][:800].any(), "new parameters are 0, as in the model"
        for at in range(stop, 9):
            step(other, again, NEW | BODY, at)
        expect_equal_everywhere(shared(again), "x")


def case_lazy_modules_are_refused_until_they_have_shapes():
    text = "has no shape yet, because its module is lazy; call the model once on every rank before"
    lazy = nn.Sequential(nn.LazyLinear(3))
    expect(skim.InvalidArgument, f"'0.weight' {text}", skim.Aggregator, lazy.named_parameters())
    expect(skim.InvalidArgument, f"'0' {text}", skim.Aggregator, lazy.parameters())
    buffers = nn.Sequential(nn.Linear(3, 3), nn.LazyBatchNorm1d(affine=False))
    for name, model in (("0.weight", lazy), ("1.running_mean", buffers)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        expect(skim.InvalidArgument, f"'{name}' {text}", skim.LocalSteps, model, optimizer)
        model(torch.ones(2, 3))
        skim.LocalSteps(model, optimizer, timeout=60.0).finish()


if __name__ == "__main__":
    main(globals())
