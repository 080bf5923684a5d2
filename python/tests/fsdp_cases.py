"""What test_fsdp.py runs under torchrun: every function case_*, on P islands of W ranks. The argument is P.
With DEVICE=cuda the models are on a GPU, which all ranks share.

Gradients are what the test says, as in exact_training.py. The law is one of each shard:

    sum over islands of gradients  ==  P * mean  +  sum over islands of residuals
"""

import contextlib
import gc
import os
import pathlib
import sys
import tempfile
import threading
import unittest.mock
import warnings
import weakref

import numpy as np
import skim
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import expect, expect_equal_everywhere, expect_that_a_failed_wait_ends_backward, gathered, left_out, run
from skim._shards import takes, whole
from skim.integrations import _files
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
import gpt_text  # noqa: E402

EXACT = {"exchange": "allgather", "value_code": "f32", "density": 0.05, "dense_below": 0}
DEVICE = torch.device(os.environ.get("DEVICE", "cpu"))
MESH = None


class Part(nn.Module):
    def __init__(self, *shapes):
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, coefficients):
        return sum((w * c.to(DEVICE)).sum() for w, c in zip(self.w, coefficients) if c is not None)


class Given(nn.Module):
    """Adds sum of parameter * coefficient to the loss so far."""

    def __init__(self, shape):
        super().__init__()
        self.w, self.coefficient = nn.Parameter(torch.zeros(shape)), torch.ones(shape)

    def forward(self, loss):
        return loss + (self.w * self.coefficient.to(DEVICE)).sum()


class Whole(nn.Module):
    """loss = sum of parameter * coefficient, in modules of which two are nested. Most shards are padded."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Part((301, 7), (5,)), Part((64, 10)), Part((1000,), (3, 3), (1,))])
        self.last = nn.Parameter(torch.zeros(77))

    def forward(self, coefficients):
        own = (self.last * coefficients[-1].to(DEVICE)).sum()
        return own + sum(part(c) for part, c in zip(self.parts, coefficients))


def sharded(dtype=torch.float32, **options):
    model = Whole().to(DEVICE, dtype)
    for part in model.parts:
        fully_shard(part, mesh=MESH["inside"], **options)
    return fully_shard(model, mesh=MESH["inside"], **options)


def attached(attach={}, **options):
    model = sharded(**options)
    skim.attach(model, between=MESH["between"].get_group(), **{**EXACT, "timeout": 60.0, **attach})
    return model


def coefficients(step, rank=None):
    """Whole numbers whose means over an island and over the islands are whole, too."""
    rank = dist.get_rank() if rank is None else rank
    rng = np.random.default_rng(1000 * rank + step)

    def some(shape):
        return torch.from_numpy(rng.integers(-50, 50, shape).astype(np.float32) * dist.get_world_size())

    shapes = Whole()
    return [*([some(tuple(w.shape)) for w in part.w] for part in shapes.parts), some(77)]


def gradients(model):
    """This rank's part of all gradients, without padding, by name."""
    return {name: p.grad.to_local().flatten().cpu().clone() for name, p in model.named_parameters() if p.grad is not None}


def of_island(step, model):
    """This rank's part of the island's mean gradient, by name."""
    inside = MESH["inside"].get_group()
    ranks = dist.get_process_group_ranks(inside)
    total = None
    for rank in ranks:
        c = coefficients(step, rank)
        flat = [*(t for part in c[:-1] for t in part), c[-1]]
        total = flat if total is None else [a + b for a, b in zip(total, flat)]
    names = [f"parts.{i}.w.{j}" for i, part in enumerate(Whole().parts) for j in range(len(part.w))] + ["last"]
    mine = {}
    for name, t in zip(names, total):
        parts = torch.chunk(t / len(ranks), len(ranks))
        place = MESH["inside"].get_local_rank()
        mine[name] = parts[place].flatten() if place < len(parts) else torch.zeros(0)
    return {name: mine[name] for name, _ in model.named_parameters()}


def between(tensor):
    """Its sum over the islands."""
    tensor = tensor.clone()
    dist.all_reduce(tensor, group=MESH["between"].get_group())
    return tensor


def check_law(model, given, got):
    islands = MESH["between"].size()
    residuals = skim.compression_of(model).residuals()
    for name, g in given.items():
        kept = residuals[name][: g.numel()].double()
        assert not residuals[name][g.numel() :].any(), "padding has a residual"
        left, right = between(g), islands * got[name] + between(kept)
        torch.testing.assert_close(left, right, rtol=0.0 if islands != 3 else 1e-6, atol=0.0 if islands != 3 else 0.01)
        expect_equal_everywhere(got[name], f"means of {name}", MESH["between"].get_group())


def train(model, steps, micro=1):
    given, got = {}, {}
    for step in steps:
        for m in range(micro):
            model.set_requires_gradient_sync(m == micro - 1)
            model(coefficients(step * micro + m)).backward()
            for name, g in of_island(step * micro + m, model).items():
                given[name] = given.get(name, 0.0) + g.double()
        for name, g in gradients(model).items():
            got[name] = got.get(name, 0.0) + g.double()
        for p in model.parameters():
            p.grad = None
    return given, got


# ---- the law


def case_mass_is_conserved():
    for options in ({}, {"exchange": "gtopk"}, {"exchange": "auto"}, {"exchange": "param-server"}, {"density": 1.0}):
        model = attached(options)
        given, got = train(model, range(5))
        check_law(model, given, got)
        report = skim.report(model)
        assert report.steps == 5 and len(report.buckets) == 4, report
        if MESH["between"].size() > 1 and not options:
            assert report.compression > 4.0, report


def case_modules_that_are_sharded_as_one():
    model = Whole().to(DEVICE)
    fully_shard([model.parts[0], model.parts[1]], mesh=MESH["inside"])
    fully_shard(model, mesh=MESH["inside"])
    skim.attach(model, between=MESH["between"].get_group(), **EXACT, timeout=60.0)
    check_law(model, *train(model, range(4)))
    assert len(skim.report(model).buckets) == 2, skim.report(model)


def case_a_forward_before():
    """It leaves the root's parameters whole."""
    model = sharded()
    with torch.no_grad():
        model(coefficients(0))
    skim.attach(model, between=MESH["between"].get_group(), **EXACT, timeout=60.0)
    check_law(model, *train(model, range(4)))

    for nested in (False, True):
        found = []
        for forward in (False, True):
            model = layers(0)
            if nested:
                fully_shard(model[0], mesh=MESH["inside"])
            fully_shard(model, mesh=MESH["inside"])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            if forward:
                with torch.no_grad():
                    model(batch(0)[0])
            local = skim.LocalSteps(model, optimizer, process_group=MESH["between"].get_group(), **EXACT)
            for step in range(4):
                x, y = batch(step)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                local.step()
            local.finish()
            found.append([whole(p) for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found))


def case_backward_goes_on_while_a_module_is_exchanged():
    """But not where FSDP goes on with the gradient itself, or a hook of the user's sees it."""

    def watched(model, *, holds):
        """A list that gets how many exchanges had ended when FSDP's hook returned. holds: the first exchange ends only after
        FSDP has come to the second module."""
        compression = skim.compression_of(model)
        reduce_bucket, reduce_part = compression.reduce_bucket, compression.reduce_part
        second, ended, returned = threading.Event(), [], []

        def begin(*arguments):
            if returned:
                second.set()
            reduce_bucket(*arguments)
            returned.append(len(ended))

        def exchange(*arguments):
            assert not holds or second.wait(30.0), "backward waits for the exchange"
            report = reduce_part(*arguments)
            ended.append(True)
            return report

        compression.reduce_bucket, compression.reduce_part = begin, exchange
        return returned

    model = attached()
    returned = watched(model, holds=True)
    check_law(model, *train(model, range(3)))
    assert returned[0] == 0 and returned[3] == 4, returned

    model = attached()
    returned, given = watched(model, holds=False), {}
    for step in range(2):  # the means of the second are added to those of the first
        model(coefficients(step)).backward()
        given = {name: given.get(name, 0.0) + g.double() for name, g in of_island(step, model).items()}
    check_law(model, given, {name: g.double() for name, g in gradients(model).items()})
    assert returned[4:] == [5, 6, 7, 8], returned

    hooked = attached()
    for p in hooked.parameters():
        p.register_post_accumulate_grad_hook(lambda p: None)
    others = [attached(dtype=torch.float16), attached(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))]
    if DEVICE.type == "cpu":
        others.append(attached(offload_policy=CPUOffloadPolicy(pin_memory=False)))
    if hasattr(others[0], "set_gradient_divide_factor"):
        others.append(attached())
        for module in others[-1].modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(MESH["inside"].size()))
    else:
        left_out("a divide factor of fully_shard", before=(2, 8))
    for model in (hooked, *others):
        returned = watched(model, holds=False)
        train(model, range(1))
        assert returned == [1, 2, 3, 4], returned


def case_backward_raises_an_error_of_the_wait_for_a_gradient():
    """The first module of a step is exchanged by Skim's thread, the last one by backward's own."""
    for place in (1, 4):
        model = attached()
        train(model, range(2))
        expect_that_a_failed_wait_ends_backward(model, place, lambda: model(coefficients(2)).backward())


def case_an_error_inside_an_island_names_the_island():
    """Other islands know none of the ranks inside it by their places there."""
    island, place = MESH["between"].get_local_rank(), MESH["inside"].get_local_rank()
    if MESH["inside"].size() == 1:
        return
    model = attached()
    others_are_done = lambda: place != 1 or dist.barrier(MESH["between"].get_group())  # noqa: E731

    def fails():
        others_are_done()
        raise ZeroDivisionError("mine")

    if (island, place) == (0, 1):
        skim.compression_of(model).end_of_step = fails
    try:
        model(coefficients(0)).backward()
        others_are_done()
        model(coefficients(1)).backward()
        raise AssertionError("backward did not raise")
    except ZeroDivisionError:
        assert (island, place) == (0, 1)
    except skim.CommError as e:
        assert e.peer == 0 and ("inside the island" in str(e)) == (island == 0), (e, e.peer)


def case_islands_begin_with_one_model():
    """Also where the group has no backend for the parameters: NCCL has none for those in the host's memory."""
    island = MESH["between"].get_local_rank()
    for has_backend in (True, False):
        model = Whole().to(DEVICE)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(island)
        model.parts[1].requires_grad_(False)
        model.register_buffer("count", torch.tensor([3 + island], device=DEVICE))
        for part in model.parts:
            fully_shard(part, mesh=MESH["inside"])
        fully_shard(model, mesh=MESH["inside"])
        with contextlib.ExitStack() as stack:
            if not has_backend:
                stack.enter_context(unittest.mock.patch("skim._shards.takes", lambda group, device: False))
                stack.enter_context(unittest.mock.patch("torch.distributed.broadcast", None))
            skim.attach(model, between=MESH["between"].get_group(), **EXACT, timeout=60.0)
        assert all(not p.to_local().any() for p in model.parameters()) and model.count == 3
    group = MESH["between"].get_group()
    assert takes(group, DEVICE) and not takes(group, torch.device("meta"))


def case_on_a_device():
    a, b = attached({"local": "host"}), attached({"local": "device"})
    for (_, of_a), (_, of_b) in zip(*(sorted(train(m, range(4))[1].items()) for m in (a, b))):
        assert torch.equal(of_a, of_b)
    assert skim.report(b).moved_bytes > 0 == skim.report(a).moved_bytes


def case_gradient_accumulation():
    model = attached()
    check_law(model, *train(model, range(3), micro=3))


def case_mixed_precision():
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model = attached({"density": 1.0}, mp_policy=policy)
    _, got = train(model, range(2))
    for name, g in got.items():
        expect_equal_everywhere(g, f"means of {name}", MESH["between"].get_group())


def case_modules_without_gradients():
    """A module that a step leaves out keeps its residual. A parameter that a module leaves out is told."""
    model = attached()
    for step in range(4):
        c = coefficients(step)
        if step % 2:
            c[1] = [None]
        model(c).backward()
    assert skim.compression_of(model).residuals()["parts.1.w.0"].any()
    skim.compression_of(model).finish_step()
    assert skim.report(model).steps == 4, skim.report(model)
    c = coefficients(9)
    c[2][1] = None
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)
        model(c).backward()
        model.set_reduce_scatter_unused_params(False)
    else:
        left_out("set_reduce_scatter_unused_params", before=(2, 13))
    expect(skim.InvalidArgument, "a parameter has no gradient in this step", model(c).backward)


def case_islands_that_use_other_modules_are_told():
    """Modules of one size: their gradients would be mixed without any error."""
    if MESH["between"].size() == 1:
        return
    model = nn.Sequential(*(Given((64, 10)) for _ in range(3))).to(DEVICE)
    for part in model:
        fully_shard(part, mesh=MESH["inside"])
    fully_shard(model, mesh=MESH["inside"])
    skim.attach(model, between=MESH["between"].get_group(), **EXACT, timeout=60.0)
    for _ in range(2):
        model(torch.zeros(1, device=DEVICE)).backward()
    first_island = MESH["between"].get_local_rank() == 0
    used = [model[0], model[2]] if first_island else list(model)

    def two_steps():
        for _ in range(2):
            loss = torch.zeros(1, device=DEVICE)
            for part in used:
                loss = part(loss)
            loss.backward()

    expect(skim.InvalidArgument, "in a step all islands must use the same modules", two_steps)


def case_steps_that_are_taken_back():
    """A gradient that is not finite on one shard, and a step that the loop skips: nothing counts as delivered."""
    model = attached()
    given, got = train(model, range(2))

    def skipped(step, spoil=False, end=lambda: skim.compression_of(model).finish_step()):
        c = coefficients(step)
        if spoil:
            c[0][0][0, 0] = torch.inf
        model(c).backward()
        end()
        has_nan = {bool(g.isnan().any()) for g in gradients(model).values() if g.numel()}
        for p in model.parameters():
            p.grad = None
        return has_nan

    has_nan = skipped(5, spoil=dist.get_rank() == 0)
    assert has_nan == {True} and skim.report(model).skipped == 1, "another shard, or parameter, does not show it"
    for name, g in of_island(5, model).items():
        spoilt = name == "parts.0.w.0" and MESH["inside"].get_local_rank() == 0 and g.numel()
        if spoilt:
            # The island's sum of this entry was infinite, and the other islands' entry stays.
            g[0] = 0.0 if MESH["between"].get_local_rank() == 0 else g[0]
        given[name] += g.double()
    skipped(6, end=lambda: skim.compression_of(model).rollback())
    assert skim.report(model).skipped == 2
    for name, g in of_island(6, model).items():
        given[name] += g.double()
    check_law(model, given, got)
    raising = attached({"non_finite": "raise"})
    c = coefficients(5)
    if dist.get_rank() == 0:
        c[0][0][0, 0] = torch.nan
    expect(skim.NonFiniteError, "is NaN or infinite", raising(c).backward)
    for p in raising.parameters():
        p.grad = None
    spoilt = skim.compression_of(raising).residuals()
    given, got = train(raising, range(2))
    check_law(raising, {n: g + spoilt[n][: g.numel()].double() for n, g in given.items()}, got)
    assert skim.report(raising).steps == 3, skim.report(raising)


def case_a_nan_is_seen_where_the_first_shard_has_no_entries():
    model = fully_shard(Part((1, 4), (64, 3)).to(DEVICE), mesh=MESH["inside"])
    skim.attach(model, between=MESH["between"].get_group(), **EXACT, timeout=60.0)
    c = [torch.ones(1, 4), torch.ones(64, 3)]
    if dist.get_rank() == 0:
        c[1][0] = torch.nan
    model(c).backward()
    assert any(g.isnan().any() for g in gradients(model).values())


def case_a_nan_is_seen_where_the_last_module_has_no_entries():
    model = nn.Sequential(Given((1, 4)), Given((64, 3)), Given((1, 4))).to(DEVICE)  # the first or the third comes last
    for module in model:
        fully_shard(module, mesh=MESH["inside"])
    model = fully_shard(model, mesh=MESH["inside"])
    skim.attach(model, between=MESH["between"].get_group(), **EXACT, timeout=60.0)
    if dist.get_rank() == 0:
        model[1].coefficient[0] = torch.nan
    model(torch.zeros((), device=DEVICE)).backward()
    assert any(g.isnan().any() for g in gradients(model).values())


def case_grad_scaler():
    """Residuals are unscaled, so a scale that changes does not matter."""
    plain, scaled = attached(), sharded()
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0, growth_interval=1)
    optimizer = torch.optim.SGD(scaled.parameters(), lr=0.0)
    skim.attach(scaled, between=MESH["between"].get_group(), scaler=scaler, **{**EXACT, "timeout": 60.0})
    for step in range(3):
        plain(coefficients(step)).backward()
        scaler.scale(scaled(coefficients(step))).backward()
        scaler.unscale_(optimizer)
        for (name, a), b in zip(gradients(plain).items(), gradients(scaled).values()):
            torch.testing.assert_close(a, b, msg=name)
        scaler.step(optimizer)
        scaler.update()
        for p in (*plain.parameters(), *scaled.parameters()):
            p.grad = None
    assert scaler.get_scale() > 1024.0
    for a, b in zip(*(skim.compression_of(m).residuals().values() for m in (plain, scaled))):
        torch.testing.assert_close(a, b)


# ---- training


def layers(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)).to(DEVICE)


def losses(model, optimizer, steps, place, places):
    """Of the whole batch, of which this rank has a part."""
    found = []
    for step in range(steps):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(48, 20, generator=g).to(DEVICE)
        y = x[:, :3].argmax(1)
        part = slice(48 * place // places, 48 * (place + 1) // places)
        loss = nn.functional.cross_entropy(model(x[part]), y[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append(float(total) / dist.get_world_size())
    return found


def case_trains_as_dense_and_as_ddp_do():
    """At density 1 as without Skim; at equal density nearly as DDP, whose buckets are other pieces of the gradient."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def by_ddp(**options):
        model = nn.parallel.DistributedDataParallel(layers(0))
        if options:
            skim.attach(model, **options, timeout=60.0)
        return losses(model, torch.optim.SGD(model.parameters(), lr=0.5), 40, rank, size)

    def by_fsdp(**options):
        model = layers(1000 * MESH["between"].get_local_rank())  # attach makes the islands equal
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=MESH["inside"])
        fully_shard(model, mesh=MESH["inside"])
        skim.attach(model, between=MESH["between"].get_group(), timeout=60.0, **options)
        return losses(model, torch.optim.SGD(model.parameters(), lr=0.5), 40, rank, size)

    dense = {"density": 1.0, "value_code": "f32", "exchange": "dense"}
    np.testing.assert_allclose(by_fsdp(**dense), by_ddp(), rtol=1e-4)
    few = {"density": 0.1, "value_code": "f32", "exchange": "allgather", "dense_below": 0}
    of_fsdp, of_ddp = by_fsdp(**few), by_ddp(**few)
    assert of_ddp[-1] < 0.6 * of_ddp[0], of_ddp
    np.testing.assert_allclose(of_fsdp, of_ddp, rtol=0.0, atol=0.06)


def case_a_gpt_has_the_losses_of_ddp():
    """Step by step, at equal density. If an island has one rank, both select in whole parameters, and so the same.
    Otherwise each shard selects for itself.

    Each parameter sends a whole number of entries, however buckets join parameters.
    """
    width = MESH["inside"].size()
    sizes = unittest.mock.patch.multiple(gpt_text, CONTEXT=16, WIDTH=32, HEADS=2, LAYERS=2)
    drawn = torch.Generator().manual_seed(0)
    text = torch.cumsum(torch.randint(1, 3, (4000,), generator=drawn), 0) % 11  # the next letter is one of two

    def of(wrap, group):
        torch.manual_seed(0)
        with sizes:
            model = wrap(gpt_text.GPT(11).to(DEVICE))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            skim.attach(model, optimizer=optimizer, per_parameter=True, timeout=60.0, **{**EXACT, "density": 1 / 16, **group})
            island, found = MESH["between"].get_local_rank(), []
            for step in range(60):
                # All ranks of an island have its batch, so its mean is the gradient of any of them.
                g = torch.Generator().manual_seed(10 * step + island)
                begin = torch.randint(len(text) - 17, (8,), generator=g)[:, None] + torch.arange(17)
                loss = model(text[begin[:, :-1]].to(DEVICE), text[begin[:, 1:]].to(DEVICE))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(float(between(loss.detach())) / MESH["between"].size())
        return found

    def sharded_gpt(model):
        for block in model.blocks:
            fully_shard(block, mesh=MESH["inside"])
        return fully_shard(model, mesh=MESH["inside"])

    group = MESH["between"].get_group()
    of_ddp = of(lambda model: nn.parallel.DistributedDataParallel(model, process_group=group), {})
    of_hsdp = of(sharded_gpt, {"between": group})
    assert of_ddp[-1] < 0.6 * of_ddp[0], of_ddp
    if width == 1:
        np.testing.assert_allclose(of_hsdp, of_ddp, rtol=0.0, atol=1e-4)
    else:  # the loss of a batch is noisy, that of ten in a row less
        of_tens = [np.mean(np.reshape(of, (-1, 10)), axis=1) for of in (of_hsdp, of_ddp)]
        np.testing.assert_allclose(*of_tens, rtol=0.0, atol=0.05)


def case_momentum_correction():
    model = attached()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    again = sharded()
    skim.attach(again, between=MESH["between"].get_group(), optimizer=(other := torch.optim.AdamW(again.parameters())), **EXACT)
    assert other.param_groups[0]["betas"][0] == 0.0
    for m, o in ((model, optimizer), (again, other)):
        for step in range(3):
            m(coefficients(step)).backward()
            o.step()
            o.zero_grad()
    kept = skim.compression_of(again).residuals()
    assert any(r.any() for r in kept.values())


# ---- local steps


def local_steps(density=1.0, every=3, **options):
    model = layers(1000 * MESH["between"].get_local_rank())
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=MESH["inside"])
    fully_shard(model, mesh=MESH["inside"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    group = MESH["between"].get_group()
    options = {"value_code": "f32", "exchange": "allgather", "dense_below": 0, **options}
    return model, skim.LocalSteps(model, optimizer, every=every, density=density, process_group=group, **options)


def batch(step):
    g = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    x = torch.randn(8, 20, generator=g).to(DEVICE)
    return x, x[:, :3].argmax(1)


def case_local_steps():
    """An island takes local steps as one rank does. Its shards follow the law of local steps: all islands have one x."""
    for options in ({"every": 1, "ahead": 0.0}, {"density": 0.2}, {"density": 0.2, "ahead": 0.0, "outer_momentum": 0.5}):
        model, local = local_steps(**options)
        first = last = None
        for step in range(30):
            x, y = batch(step)
            loss = nn.functional.cross_entropy(model(x), y)
            local.optimizer.zero_grad()
            loss.backward()
            local.step()
            with local.shared(), torch.no_grad():
                x, y = batch(1000)
                last = float(nn.functional.cross_entropy(model(x), y))
                first = last if first is None else first
        assert last < 0.9 * first, (first, last)
        local.finish()
        for name, p in model.named_parameters():
            expect_equal_everywhere(p.to_local().flatten(), name, MESH["between"].get_group())
        with torch.no_grad():
            x, y = batch(1000)
            np.testing.assert_allclose(float(nn.functional.cross_entropy(model(x), y)), last, rtol=1e-6)


def tensor_parallel(mesh=None):
    """As layers(), but inside an island each rank has a part of two matrices, and all have the same batch."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = layers(1000 * MESH["between"].get_local_rank())
    return parallelize_module(model, mesh or MESH["inside"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def case_whole_tensors():
    """What the cases compare. PyTorch's own way has no gloo on a GPU."""
    models = [fully_shard(layers(0), mesh=mesh) for mesh in (MESH, MESH["inside"])]
    if 40 % MESH["inside"].size() == 0:
        models.append(tensor_parallel())
    for p in (p for model in models for p in model.parameters()):
        assert DEVICE.type != "cpu" or torch.equal(whole(p), p.full_tensor() if hasattr(p, "full_tensor") else p)


def case_local_steps_are_those_of_whole_replicas():
    """Islands of W ranks that have one batch train as ranks do that have it. At density 1 no selection differs."""
    def run(model, local):
        for step in range(7):
            g = torch.Generator().manual_seed(1000 * MESH["between"].get_local_rank() + step)
            x = torch.randn(8, 20, generator=g).to(DEVICE)
            local.optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            local.step()
        local.finish()
        return [whole(p) for p in model.parameters()]

    def as_a_replica(model):
        return model, skim.LocalSteps(
            model, torch.optim.SGD(model.parameters(), lr=0.5, foreach=False), every=3, density=1.0,
            process_group=MESH["between"].get_group(), value_code="f32", exchange="allgather", dense_below=0,
        )  # fmt: skip

    expected = run(*as_a_replica(layers(1000 * MESH["between"].get_local_rank())))
    found = [run(*local_steps())]
    if 40 % MESH["inside"].size() == 0:  # PyTorch's tensor parallelism needs even parts of the width
        found.append(run(*as_a_replica(tensor_parallel())))
    for parameters in found:
        for a, b in zip(parameters, expected):
            torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-4, atol=1e-5)


def case_parameters_that_are_whole_inside_an_island_stay_equal():
    """Of tensor parallelism. Each rank of an island exchanges them beside other shards."""
    if MESH["inside"].size() == 1 or 40 % MESH["inside"].size() != 0:
        return
    group = MESH["between"].get_group()
    model = tensor_parallel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    text = "'2.bias' whole, and exchange='auto' may choose another exchange on each"
    expect(skim.InvalidArgument, text, skim.LocalSteps, model, optimizer, process_group=group)
    for options in ({"dense_below": 0}, {"every": 2, "value_code": "f32", "dense_below": 0}, {}):
        model = tensor_parallel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
        local = skim.LocalSteps(model, optimizer, density=0.1, exchange="allgather", process_group=group, **options)
        for step in range(6):
            g = torch.Generator().manual_seed(1000 * MESH["between"].get_local_rank() + step)
            x = torch.randn(8, 20, generator=g).to(DEVICE)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            local.step()
        local.finish()
        wholes = [(n, p) for n, p in model.named_parameters() if not any(q.is_shard() for q in getattr(p, "placements", ()))]
        assert [name for name, _ in wholes] == ["2.bias", "4.weight", "4.bias"], wholes
        for name, p in wholes:
            mine = p.to_local() if hasattr(p, "to_local") else p
            expect_equal_everywhere(mine.detach().flatten(), name, MESH["inside"].get_group())


def case_local_steps_resume():
    def run(model, local, steps):
        found = []
        for step in steps:
            x, y = batch(step)
            loss = nn.functional.cross_entropy(model(x), y)
            local.optimizer.zero_grad()
            loss.backward()
            local.step()
            found.append(loss.item())
        return found

    model, local = local_steps(density=0.2, exchange="gtopk")
    run(model, local, range(4))  # in the middle of a round
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        dcp.save({"skim": local.state_dict()}, checkpoint_id=folders[0])
        losses = run(model, local, range(4, 9))
        again, other = local_steps(density=0.2, exchange="gtopk")
        state = {"skim": skim.state_template(folders[0])}
        dcp.load(state, checkpoint_id=folders[0])
        other.load_state_dict(state["skim"])
        assert run(again, other, range(4, 9)) == losses
        dist.barrier()
    with torch.no_grad():
        model(batch(9)[0])  # leaves parameters gathered, of which state_dict() has shards
    saved = {name: p.to_local().clone() for name, p in model.state_dict().items()}
    assert any(not torch.equal(saved[name], p.to_local()) for name, p in model.named_parameters()), "x is no replica"
    with torch.no_grad():
        model(batch(9)[0])
    model.load_state_dict({name: p.detach().clone() for name, p in model.state_dict().items()})
    with local.shared():
        assert all(torch.equal(p.to_local(), saved[name]) for name, p in model.named_parameters())
    foreign = {key.replace("shard_", "shard_9"): t for key, t in state["skim"].items()}
    expect(skim.StateError, "no state of shard_", other.load_state_dict, foreign)


# ---- state


def case_a_resumed_run_is_the_same():
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        model = attached({"exchange": "gtopk", "value_code": "q8"})
        train(model, range(3))
        dcp.save({"skim": skim.state_dict(model)}, checkpoint_id=folders[0])
        _, expected = train(model, range(3, 6))
        again = attached({"exchange": "gtopk", "value_code": "q8"})
        state = {"skim": skim.state_template(folders[0])}
        assert len(state["skim"]) == dist.get_world_size(), state
        dcp.load(state, checkpoint_id=folders[0])
        skim.load_state_dict(again, state["skim"])
        _, got = train(again, range(3, 6))
        for name, g in got.items():
            assert torch.equal(g, expected[name]), name
        dist.barrier()


def case_files_of_frameworks():
    """Each rank has its own, also among the ranks of an island. Those of an earlier run go."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        old = pathlib.Path(folders[0], f"skim_shard_0_of_{MESH['inside'].size() + 1}_rank_0_of_{MESH['between'].size()}.pt")
        old.touch()
        model = attached()
        train(model, range(3))
        dist.barrier()
        _files.save_into(folders[0], model)
        dist.barrier()
        names = [file.name for file in pathlib.Path(folders[0]).iterdir()]
        assert len(names) == dist.get_world_size() and old.name not in names, names
        again = attached()
        _files.load_from(folders[0], again, True)
        expected = skim.compression_of(model).residuals()
        assert all(torch.equal(r, expected[name]) for name, r in skim.compression_of(again).residuals().items())
        dist.barrier()


def case_residuals_of_updates_resume_at_a_rate_of_0():
    def make():
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        skim.attach(model, between=MESH["between"].get_group(), updates_of=optimizer, **EXACT, timeout=60.0)
        return model, optimizer

    model, optimizer = make()
    train(model, range(3))
    state = {key: value.clone() for key, value in skim.state_dict(model).items()}
    again, its_optimizer = make()
    skim.load_state_dict(again, state)
    for one in (optimizer, its_optimizer):
        one.param_groups[0]["lr"] = 0.0
    _, expected = train(model, range(3, 5))
    _, got = train(again, range(3, 5))
    for name, g in got.items():
        assert torch.equal(g, expected[name]), name
    of_both = [skim.compression_of(m).residuals() for m in (again, model)]
    assert all(torch.equal(r, of_both[1][name]) for name, r in of_both[0].items())


def case_another_number_of_islands():
    """What the residuals still owe the mean stays: the sum over the old islands divided by their number."""
    model = attached()
    train(model, range(3))
    owed = {name: between(r) / MESH["between"].size() for name, r in skim.compression_of(model).residuals().items()}
    of_all = {key: value for state in gathered(skim.state_dict(model)) for key, value in state.items()}
    for wrong in (None, [1], {1: torch.zeros(3)}):
        expect(skim.StateError, "", skim.load_state_dict, model, wrong)
    alone = sharded()
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    skim.attach(alone, between=groups[dist.get_rank()], **EXACT)
    skim.load_state_dict(alone, of_all)
    for name, r in skim.compression_of(alone).residuals().items():
        torch.testing.assert_close(r, owed[name], rtol=1e-5, atol=1e-3)
    if MESH["inside"].size() > 1:
        foreign = {key.replace("shard_", "shard_9"): value for key, value in of_all.items()}
        expect(skim.StateError, "but not to another number of ranks inside an island", skim.load_state_dict, alone, foreign)


def case_state_of_other_parameters():
    """The shards that both models have keep their residuals, on as many islands and on others."""
    old = attached()
    train(old, range(3))
    had, mine = skim.compression_of(old).residuals(), skim.state_dict(old)
    of_all = {key: value for state in gathered(mine) for key, value in state.items()}
    inner = Whole()
    inner.head, inner.parts = nn.Parameter(torch.zeros(40)), inner.parts[:2]
    inner.to(DEVICE)
    for part in inner.parts:
        fully_shard(part, mesh=MESH["inside"])
    model = fully_shard(inner, mesh=MESH["inside"])
    skim.attach(model, between=MESH["between"].get_group(), **EXACT, timeout=60.0)
    expect(skim.StateError, "1 parameter of the model ('head'); load with strict=false", skim.load_state_dict, model, mine)
    gone = {f"parts.2.w.{j}" for j in range(3)}
    for state in (mine, of_all):
        missing, unexpected = skim.load_state_dict(model, state, strict=False)
        assert missing == ["head"] and unexpected.keys() == gone
        has = skim.compression_of(model).residuals()
        assert not has["head"].any()
        assert all(torch.equal(has[name], had[name]) for name in had.keys() - gone)
        for name, norm in unexpected.items():
            torch.testing.assert_close(norm, float(had[name].double().norm()))


def case_detach():
    """Whole gradients then go between the islands."""
    model = attached()
    train(model, range(2))
    skim.detach(model)
    given, got = train(model, range(5, 7))
    for name, g in given.items():
        torch.testing.assert_close(between(g) / MESH["between"].size(), got[name])
    skim.attach(model, between=MESH["between"].get_group(), **EXACT)
    check_law(model, *train(model, range(3)))


def case_a_model_that_nobody_uses_is_freed():
    for detaches in (False, True):
        model = attached()
        train(model, range(2))
        compression = weakref.ref(skim.compression_of(model))
        if detaches:
            skim.detach(model)
        model = weakref.ref(model)
        gc.collect()
        assert model() is None and compression() is None, (model(), compression())


# ---- mistakes


def case_trainable_parameters_that_change():
    """Islands would diverge without a word."""
    model = Whole().to(DEVICE)
    model.parts[2].requires_grad_(False)
    for part in model.parts:
        fully_shard(part, mesh=MESH["inside"])
    fully_shard(model, mesh=MESH["inside"])
    group = MESH["between"].get_group()
    skim.attach(model, between=group, **EXACT, timeout=60.0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(model, range(3))
        assert not any("skim" in str(w.message) for w in seen), [str(w.message) for w in seen]
        model.parts[2].requires_grad_(True)
        train(model, range(3, 6))
    told = [str(w.message) for w in seen if "skim" in str(w.message)]
    assert len(told) == 1 and "for 3 parameters, 'parts.2.w.0' among them" in told[0], told
    assert "call skim.detach, and attach anew" in told[0], told
    skim.detach(model)
    skim.attach(model, between=group, **EXACT, timeout=60.0)
    check_law(model, *train(model, range(3)))


def case_mistakes():
    refused = skim.InvalidArgument
    expect(refused, "needs between=, the process group", skim.attach, sharded(), **EXACT)
    group = MESH["between"].get_group()
    parts = Whole().to(DEVICE)
    fully_shard(parts.parts[0], mesh=MESH["inside"])
    expect(refused, "the model itself, Whole, has not; call fully_shard on it, too", skim.attach, parts, between=group)
    expect(refused, "between is for models with fully_shard", skim.attach, nn.parallel.DistributedDataParallel(Whole().to(DEVICE)), between=group)
    expect(refused, "dry_run needs DistributedDataParallel", skim.attach, sharded(), between=group, dry_run=True)
    text = "select_threshold: must be above 0 with select='threshold'"
    expect(refused, text, skim.attach, sharded(), between=group, select="threshold")
    expect(refused, "the parameters are shards: give process_group=", skim.LocalSteps, sharded(), None)
    expect(refused, "is a DTensor: use skim.LocalSteps", skim.Aggregator, sharded().parameters())
    if MESH["inside"].size() > 1:  # shards of one size, so that nothing else differs
        even = nn.Linear(4, 12, bias=False).to(DEVICE)
        fully_shard(even, mesh=MESH["inside"])
        optimizer = torch.optim.SGD(even.parameters(), lr=0.1)
        inside = MESH["inside"].get_group()
        text = f"rank 1 has shard=1 of {MESH['inside'].size()} (the group must have the ranks with the same shard"
        expect(refused, text, skim.attach, even, between=inside)
        expect(refused, text, skim.LocalSteps, even, optimizer, process_group=inside)
        if 40 % MESH["inside"].size() == 0:
            shape = (MESH["between"].size(), 1, MESH["inside"].size())
            mesh = init_device_mesh(DEVICE.type, shape, mesh_dim_names=("between", "data", "inside"))
            both = fully_shard(tensor_parallel(mesh["inside"])[2], mesh=mesh["data"])
            expect(refused, "several ranks of an island have 'bias' whole", skim.attach, both, between=group)
    model = attached()
    expect(refused, "has been attached already", skim.attach, model, between=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    text = "skim.attach exchanges the gradients of this model in every step; call skim.detach(model) first"
    expect(refused, text, skim.LocalSteps, model, optimizer, process_group=group)
    skim.detach(model)
    local = skim.LocalSteps(model, optimizer, process_group=group, timeout=60.0)
    expect(refused, "skim.attach: this model has LocalSteps already; call finish() first", skim.attach, model, between=group)
    local.finish()
    if MESH["between"].size() > 1 and MESH["inside"].size() > 1:
        both = Whole().to(DEVICE)
        fully_shard(both, mesh=MESH)
        expect(refused, "give fully_shard the mesh of the island alone", skim.attach, both, between=group)


def main():
    global MESH
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    islands = int(sys.argv[1])
    torch.zeros(1, device=DEVICE)  # otherwise the mesh chooses a GPU for each rank
    MESH = init_device_mesh(DEVICE.type, (islands, dist.get_world_size() // islands), mesh_dim_names=("between", "inside"))
    cases = globals()
    if not fully_shard_averages():
        left_out("fully_shard over gloo, which sums gradients where it should average them", before=(2, 13))
        cases = {}
    run(cases, sys.argv[2:])


def fully_shard_averages():
    model = fully_shard(nn.Linear(1, 1, bias=False).to(DEVICE), mesh=MESH["inside"])
    model(torch.ones(1, 1, device=DEVICE)).backward()
    return whole(model.weight.grad).item() == 1.0


if __name__ == "__main__":
    main()
