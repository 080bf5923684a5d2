"""The pass of _passes.py as a Triton kernel. It reads gradient and residual once and writes the residual once."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

from skim._passes import Collected

BLOCK = 2048
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
NO_INDEX = tl.constexpr(0xFFFFFFFF)


# Triton reads annotations, and knows none but its own.
@triton.jit
def _clamped(x):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST)


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    gradient, residual, n, factor, decay, above, keys, room, counts, norms2, block: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < n
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    is_finite = tl.abs(g) <= LARGEST
    x = _clamped(tl.where(is_finite, g, 0.0) * factor)
    r = _clamped(tl.load(residual + at, mask=inside, other=0.0) * decay + x)
    tl.store(residual + at, r, mask=inside)

    passes = inside & (tl.abs(r) > above)
    as_number = passes.to(tl.int32)
    count = tl.sum(as_number, 0)
    if count > 0:
        place = tl.atomic_add(counts, count) + tl.cumsum(as_number, 0) - 1
        key = (tl.abs(r).to(tl.int32, bitcast=True).to(tl.int64) << 32) | (NO_INDEX - at)
        tl.store(keys + place, key, mask=passes & (place < room))
    bad = tl.sum((inside & (is_finite == 0)).to(tl.int32), 0)
    if bad > 0:
        tl.atomic_add(counts + 1, bad)
    # A sum for each block, so that the sum over blocks has an order.
    wide_r, wide_x = r.to(tl.float64), x.to(tl.float64)
    tl.store(norms2 + 2 * tl.program_id(0), tl.sum(wide_r * wide_r, 0))
    tl.store(norms2 + 2 * tl.program_id(0) + 1, tl.sum(wide_x * wide_x, 0))


def in_triton(
    gradient: torch.Tensor, residual: torch.Tensor, factor: float, decay: float, above: float, into: Collected
) -> None:
    n = residual.numel()
    blocks = triton.cdiv(n, BLOCK)
    of_blocks = torch.empty(blocks, 2, dtype=torch.float64, device=residual.device)
    # Triton launches on the current device, whatever the device of its arguments.
    with torch.cuda.device(residual.device) if residual.is_cuda else contextlib.nullcontext():
        # Without fusion: a product is rounded before it is added, as on the CPU.
        _kernel[(blocks,)](
            gradient, residual, n, factor, decay, above, into.keys, into.keys.numel(), into.counts, of_blocks,
            block=BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
    torch.sum(of_blocks, 0, out=into.norms2)
