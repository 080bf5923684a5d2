"""What ddp_cases.py and without_ddp_cases.py share: training in which a case says what the gradients are.

The loss is the sum of parameter times coefficient. With whole numbers that are multiples of the number of ranks all sums
are exact, so the law is one of equality:

    sum over ranks of gradients  ==  P * sum of means  +  sum over ranks of residuals
"""

import contextlib
import os
import sys

import numpy as np
import skim
import torch
import torch.distributed as dist
from cases import expect_equal_everywhere, left_out, run
from skim._options import Options
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

if os.environ.get("AS_ON_A_DEVICE"):
    of_device = Options.local_half
    Options.local_half = lambda self, device: of_device(self, torch.device("cuda"))  # it only looks at the type

# Where models and their gradients are. What a case expects is computed on the CPU.
DEVICE = torch.device(os.environ.get("DEVICE", "cpu"))
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # of torchrun
EXACT = {"exchange": "allgather", "value_code": "f32"}  # no rounding, so that laws are equalities
LENGTHS = [6000, 9000, 50, 20000, 5000, 7]
BUCKET_MB = 0.015  # so that there are at least 3


class Linear(nn.Module):
    """loss = sum of parameter * coefficient; parameters may be left out."""

    def __init__(self, lengths=LENGTHS, dtype=torch.float32):
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.zeros(n, dtype=dtype, device=DEVICE)) for n in lengths)

    def forward(self, coefficients, used=None):
        terms = [
            (w * c.to(w.device)).sum() for i, (w, c) in enumerate(zip(self.w, coefficients)) if used is None or i in used
        ]
        return sum(terms)


def gradients(step, rank=None, size=None, lengths=LENGTHS, most=1000):
    rng = np.random.default_rng((RANK if rank is None else rank) * 10007 + step)
    size = SIZE if size is None else size
    return [torch.from_numpy(rng.integers(-most, most, n).astype(np.float32) * size) for n in lengths]


def attached(model=None, group=None, attach={}, **ddp):
    ddp.setdefault("bucket_cap_mb", BUCKET_MB)
    model = DDP(model if model is not None else Linear(), process_group=group, **ddp)
    skim.attach(model, **{**EXACT, "density": 0.02, "timeout": 60.0, **attach})
    return model


def flat(tensors):
    return torch.cat([t.detach().double().flatten().cpu() for t in tensors])


def kept(model):
    return flat(skim.compression_of(model).residuals().values())


def total(tensor, group=None):
    tensor = tensor.clone()
    dist.all_reduce(tensor, group=group)
    return tensor


def means(model):
    """The gradients as they are after backward; then none."""
    got = flat([p.grad if p.grad is not None else torch.zeros_like(p) for p in model.module.parameters()])
    for p in model.module.parameters():
        p.grad = None
    return got


def same(a, b, size=None):
    """Bit by bit where 1 / P is a float."""
    exact = (SIZE if size is None else size) != 3
    torch.testing.assert_close(a, b, rtol=0.0 if exact else 1e-6, atol=0.0 if exact else 0.01)


def check_law(model, given, got, group=None, size=None):
    size = SIZE if size is None else size
    same(total(given, group), size * got + total(kept(model), group), size)
    expect_equal_everywhere(got, "means", group)


def train(model, steps, group=None, size=None, **law):
    given, got = torch.zeros(sum(LENGTHS)).double(), torch.zeros(sum(LENGTHS)).double()
    for step in steps:
        c = gradients(step, size=size)
        model(c).backward()
        given += flat(c)
        got += means(model)
    check_law(model, given, got, group, size)
    return given, got


def gloo_takes(dtype):
    try:
        dist.broadcast(torch.zeros(1, dtype=dtype), 0)
    except RuntimeError:
        return False
    return True


class Named(Linear):
    """Linear, whose parameters have names of their own."""

    def __init__(self, **lengths):
        nn.Module.__init__(self)
        self.w = nn.ParameterDict()
        for name, n in lengths.items():  # a dict would be sorted
            self.w[name] = nn.Parameter(torch.zeros(n, device=DEVICE))

    def forward(self, coefficients, used=None):
        return sum((w * c.to(w.device)).sum() for w, c in zip(self.w.values(), coefficients))


BODY, HEAD, NEW = {"a": 6000, "b": 9000, "c": 50}, {"head": 700, "bias": 7}, {"new": 800}


def local_steps(inner=None, make_optimizer=lambda p: torch.optim.SGD(p, lr=1.0), **options):
    inner = inner if inner is not None else Linear()
    options = {**EXACT, "density": 0.02, "outer_lr": 1.0, "timeout": 60.0, "bucket_mb": BUCKET_MB, **options}
    return inner, skim.LocalSteps(inner, make_optimizer(inner.parameters()), **options)


def everywhere(tensor):
    of_ranks = [torch.zeros_like(tensor) for _ in range(SIZE)]
    dist.all_gather(of_ranks, tensor)
    return of_ranks


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def default_device(device):
    """Yields False if AdamW of this PyTorch cannot step then."""
    torch.set_default_device(device)
    try:
        alone = nn.Parameter(torch.zeros(1, device="cpu"))
        alone.grad = torch.zeros(1, device="cpu")
        try:
            torch.optim.AdamW([alone]).step()
        except RuntimeError:
            left_out("AdamW with another default device", before=(2, 13))
            yield False
        else:
            yield True
    finally:
        torch.set_default_device(None)


def four_steps(model, optimizer, step):
    for i in range(4):
        optimizer.zero_grad()
        model(gradients(i)).backward()
        step()


def main(cases):
    """Runs the cases of a file, its globals(), or those that the command line names."""
    torch.set_num_threads(1)
    dist._DEFAULT_FIRST_BUCKET_BYTES = int(BUCKET_MB * 2**20)  # a megabyte in older versions of PyTorch
    dist.init_process_group("gloo")
    run(cases, sys.argv[1:])
