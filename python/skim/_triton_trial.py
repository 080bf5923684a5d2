"""Triton compiles its kernels where they run, for GPUs that may never have run them. So they do one small bucket first."""

from __future__ import annotations

import functools

import torch

from skim._passes import HEAD, LAST, Collected, InPyTorch
from skim._residual_store import CODES, ResidualStore

N, K = 10_000, 96
LARGER, TIES = 40, 200  # of the K entries the first are larger than all others. Of those that tie, the lower indices follow


@functools.cache
def what_fails(device: torch.device) -> str:
    """What goes wrong when Triton's kernels do a bucket there; "": nothing. Waits for the device."""
    try:
        expected = _results(device, in_triton=False)
        for what, found in _results(device, in_triton=True).items():
            # Norms are sums in another order.
            if not torch.allclose(found, expected[what], rtol=1e-12 if what == "norms" else 0.0, atol=0.0):
                return f"its {what} are wrong"
    except Exception as error:  # whatever it is, such as a C compiler that is missing, PyTorch's kernels are there
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return ""


def _results(device: torch.device, in_triton: bool) -> dict[str, torch.Tensor]:
    """What the kernels make of the bucket, all as whole numbers but the norms."""
    from skim import _triton_pass

    kernels = _triton_pass.InTriton(device) if in_triton else InPyTorch()
    gradient, residual = (x.to(device) for x in _bucket())
    keys = torch.zeros(2 * K + 4096, dtype=torch.int64, device=device)
    words = torch.zeros(HEAD + 2 * K, dtype=torch.int32, device=device)
    norms = words[2:LAST].view(torch.float64)
    kernels.add(gradient, residual, 0.5, 0.75, 1.0, Collected(keys, words[:2], norms))
    kernels.select(Collected(keys, words[:2], norms), K, residual, words)
    results = {
        "residuals": residual.view(torch.int32), "counts": words[:2], "norms": norms, "selected entries": words[LAST:],
    }  # fmt: skip
    for code in CODES[1:]:
        store = ResidualStore(code, N, device)
        if in_triton:
            _triton_pass.store(residual, code, store.values, store.exponents)
        else:
            store.store(residual, False)
        results[f"{code} residuals"] = torch.cat([store.values.view(torch.int8), store.exponents])
    return results


def _bucket() -> tuple[torch.Tensor, torch.Tensor]:
    """A gradient and a residual, on the CPU. Their sums have ties, and the gradient has entries that are not finite."""
    random = torch.Generator(device="cpu").manual_seed(1)  # the default one is the user's
    gradient, residual = (torch.randn(N, generator=random, dtype=torch.float32, device="cpu") for _ in range(2))
    places = torch.randperm(N, generator=random, device="cpu")[: LARGER + TIES]
    sign = places % 2 * 2.0 - 1.0
    residual[places] = 64.0 * sign
    gradient[places[:LARGER]] += 1000.0 * sign[:LARGER]
    gradient[places[LARGER:]] = 100.0 * sign[LARGER:]
    others = torch.ones(N, dtype=torch.bool, device="cpu").index_fill_(0, places, False).nonzero().view(-1)
    gradient[others[0]], gradient[others[1]] = float("inf"), float("nan")
    return gradient, residual
