"""What _passes.py and _residual_store.py do, as Triton kernels. The pass reads gradient and residual once."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

from skim import _passes
from skim._passes import Collected

ROWS, COLUMNS, TILES, WARPS = 256, 4, 4, 4  # of the pass: a program takes TILES tiles of ROWS x COLUMNS entries
BLOCK = 2048  # entries of a program, elsewhere
BLOCKS, SHARED = 32, 64  # q8: blocks of a program, and entries of a block
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
LARGEST_BF16 = tl.constexpr(torch.finfo(torch.bfloat16).max)
LEAST_EXPONENT, LARGEST_EXPONENT = tl.constexpr(-126), tl.constexpr(121)
HEAD, LAST_KEY = tl.constexpr(_passes.HEAD), tl.constexpr(_passes.LAST_KEY)


# Triton reads annotations, and knows none but its own.
@triton.jit
def _clamped(x):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST)


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    gradient, residual, first, n, factor, decay, above, keys, room, counts,
    rows: tl.constexpr, columns: tl.constexpr, is_whole: tl.constexpr,
):  # fmt: skip
    """Adds the entries from `first` on, and returns the sums of squares of each row: of residuals, of gradients.

    A thread has whole rows, so it sums them by itself. is_whole: n does not end in this tile. Without masks a thread
    loads four entries at once, whatever n.
    """
    at = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    if is_whole:
        g = tl.load(gradient + first + at).to(tl.float32)
        before = tl.load(residual + first + at)
    else:
        g = tl.load(gradient + first + at, mask=at < n - first, other=0.0).to(tl.float32)
        before = tl.load(residual + first + at, mask=at < n - first, other=0.0)
    is_finite = tl.abs(g) <= LARGEST
    x = _clamped(tl.where(is_finite, g, 0.0) * factor)
    r = _clamped(before * decay + x)
    if is_whole:
        tl.store(residual + first + at, r)
    else:
        tl.store(residual + first + at, r, mask=at < n - first)

    passes = tl.abs(r) > above  # behind the end r is 0
    as_number = passes.to(tl.int32)
    of_row = tl.sum(as_number, 1)
    count = tl.sum(of_row, 0)
    if count > 0:
        of_rows_before = tl.atomic_add(counts, count, sem="relaxed") + tl.cumsum(of_row, 0) - of_row
        place = of_rows_before[:, None] + tl.cumsum(as_number, 1) - as_number
        low = (-1 - (first.to(tl.int32) + at)).to(tl.uint32, bitcast=True)
        key = (tl.abs(r).to(tl.int32, bitcast=True).to(tl.int64) << 32) | low.to(tl.int64)
        tl.store(keys + place, key, mask=passes & (place < room))
    tl.atomic_add(counts + 1 + tl.zeros_like(at), 1, mask=is_finite == 0, sem="relaxed")
    wide_r, wide_x = r.to(tl.float64), x.to(tl.float64)
    return tl.sum(wide_r * wide_r, 1), tl.sum(wide_x * wide_x, 1)


@triton.jit
def _pass(  # type: ignore[no-untyped-def]
    gradient, residual, n, factor, decay, above, keys, room, counts, norms2,
    rows: tl.constexpr, columns: tl.constexpr, tiles: tl.constexpr,
):  # fmt: skip
    of_r, of_x = tl.zeros([rows], tl.float64), tl.zeros([rows], tl.float64)
    begin = tl.program_id(0).to(tl.int64) * (tiles * rows * columns)
    for tile in range(tiles):
        first = begin + tile * rows * columns
        if first + rows * columns <= n:
            r, x = _tile(gradient, residual, first, n, factor, decay, above, keys, room, counts, rows, columns, True)
            of_r += r
            of_x += x
        elif first < n:
            r, x = _tile(gradient, residual, first, n, factor, decay, above, keys, room, counts, rows, columns, False)
            of_r += r
            of_x += x
    # A sum for each program, so that the sum over programs has an order.
    tl.store(norms2 + 2 * tl.program_id(0), tl.sum(of_r, 0))
    tl.store(norms2 + 2 * tl.program_id(0) + 1, tl.sum(of_x, 0))


def in_triton(
    gradient: torch.Tensor, residual: torch.Tensor, factor: float, decay: float, above: float, into: Collected
) -> None:
    n = residual.numel()
    programs = triton.cdiv(n, TILES * ROWS * COLUMNS)
    norms2 = torch.empty(programs, 2, dtype=torch.float64, device=residual.device)
    with _current(residual.device):
        # Without fusion: a product is rounded before it is added, as on the CPU.
        _pass[(programs,)](
            gradient, residual, n, factor, decay, above, into.keys, into.keys.numel(), into.counts, norms2,
            rows=ROWS, columns=COLUMNS, tiles=TILES, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    torch.sum(norms2, 0, out=into.norms2)


@triton.jit
def _pack(largest, low, residual, k, words, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < k
    index = -1 - tl.load(low + at, mask=inside, other=0)
    value = tl.load(residual + index, mask=inside & (index >= 0), other=0.0)
    tl.store(words + HEAD + at, index, mask=inside)
    tl.store(words + HEAD + k + at, value.to(tl.int32, bitcast=True), mask=inside)
    if tl.program_id(0) == 0:
        half = tl.arange(0, 2)
        tl.store(words + LAST_KEY + half, tl.load(largest + 2 * (k - 1) + half))


def pack_in_triton(largest: torch.Tensor, low: torch.Tensor, residual: torch.Tensor, words: torch.Tensor) -> None:
    k = low.numel()
    with _current(residual.device):
        _pack[(triton.cdiv(k, 1024),)](largest.view(torch.int32), low, residual, k, words, block=1024)


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
            grid = (triton.cdiv(exponents.numel(), BLOCKS),)
            _store_q8[grid](x, n, values, exponents, rows=BLOCKS, block=SHARED, enable_fp_fusion=False)


def _current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Triton launches on the current device, whatever the device of its arguments."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
