"""What _passes.py and _residual_store.py do, as Triton kernels. The pass reads gradient and residual once."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

from skim._passes import Collected

BLOCK, WARPS = 2048, 8  # 4 warps would take 150 registers a thread in place of 64, and fewer blocks would run at once
ROWS, SHARED = 32, 64  # q8: blocks of a program, and entries of a block
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
LARGEST_BF16 = tl.constexpr(torch.finfo(torch.bfloat16).max)
LEAST_EXPONENT, LARGEST_EXPONENT = tl.constexpr(-126), tl.constexpr(121)
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
    with _current(residual.device):
        # Without fusion: a product is rounded before it is added, as on the CPU.
        _kernel[(blocks,)](
            gradient, residual, n, factor, decay, above, into.keys, into.keys.numel(), into.counts, of_blocks,
            block=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    torch.sum(of_blocks, 0, out=into.norms2)


@triton.jit
def _random_bits(x, place):  # type: ignore[no-untyped-def]
    h = x.to(tl.uint32, bitcast=True) + place.to(tl.uint32) * 0x9E3779B9
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h >> 16


@triton.jit
def _store_bf16(x, n, halves, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < n
    v = tl.load(x + at, mask=inside, other=0.0)
    cut = tl.minimum(tl.maximum(v, -LARGEST_BF16), LARGEST_BF16)
    half = (cut.to(tl.uint32, bitcast=True) + _random_bits(v, at)) >> 16
    tl.store(halves + at, half.to(tl.int16), mask=inside)


@triton.jit
def _store_q8(x, n, bytes, exponents, rows: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    at = row[:, None] * block + tl.arange(0, block)[None, :]
    inside = at < n
    v = tl.load(x + at, mask=inside, other=0.0)
    bits = tl.max(tl.abs(v), 1).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 - tl.where((bits & 0x7FFFFF) <= 0x7E0000, 6, 5)
    exponent = tl.minimum(tl.maximum(exponent, LEAST_EXPONENT), LARGEST_EXPONENT)
    units = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    random = _random_bits(v, at).to(tl.int32).to(tl.float32) * 1.52587890625e-05  # 2^-16
    magnitude = tl.minimum((tl.abs(v) * units[:, None] + random).to(tl.int32), 127)
    tl.store(bytes + at, tl.where(v < 0.0, -magnitude, magnitude).to(tl.int8), mask=inside)
    tl.store(exponents + row, exponent.to(tl.int8), mask=row * block < n)


def store(x: torch.Tensor, code: str, values: torch.Tensor, exponents: torch.Tensor) -> None:
    """ResidualStore.store."""
    n = x.numel()
    if n == 0:
        return
    with _current(x.device):
        if code == "bf16":
            _store_bf16[(triton.cdiv(n, BLOCK),)](x, n, values.view(torch.int16), block=BLOCK)
        else:
            grid = (triton.cdiv(exponents.numel(), ROWS),)
            _store_q8[grid](x, n, values, exponents, rows=ROWS, block=SHARED, enable_fp_fusion=False)


def _current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Triton launches on the current device, whatever the device of its arguments."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
