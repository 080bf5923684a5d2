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
HEAD, LAST = tl.constexpr(_passes.HEAD), tl.constexpr(_passes.LAST)
CANDIDATES = 1024  # of a program of the selection
# A magnitude has 31 bits. Its digits of 11, 10 and 10 bits have a histogram each, one behind the other. Behind them is
# a pair for each digit: the k-th largest magnitude down to this digit, and how many of the k entries have the same there.
DIGITS = 3
BINS, BINS_BELOW, CUTS = tl.constexpr(2048), tl.constexpr(1024), tl.constexpr(4096)
ZEROED = CUTS.value // 2 + DIGITS  # 64-bit words of all this


# Triton reads annotations, and knows none but its own.
@triton.jit
def _clamped(x):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST)


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    gradient, residual, first, n, factor, decay, above, keys, room, counts, begins,
    rows: tl.constexpr, columns: tl.constexpr, is_whole: tl.constexpr,
):  # fmt: skip
    """Adds the entries from `first` on, and returns the sums of squares of each row: of residuals, of gradients.

    The keys of a tile follow one another, by index. begins: gets the place of the first one, of tiles that have keys.

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
        begin = tl.atomic_add(counts, count, sem="relaxed")
        tl.store(begins + first // (rows * columns), begin)
        of_rows_before = begin + tl.cumsum(of_row, 0) - of_row
        place = of_rows_before[:, None] + tl.cumsum(as_number, 1) - as_number
        low = (-1 - (first.to(tl.int32) + at)).to(tl.uint32, bitcast=True)
        key = (tl.abs(r).to(tl.int32, bitcast=True).to(tl.int64) << 32) | low.to(tl.int64)
        tl.store(keys + place, key, mask=passes & (place < room))
    tl.atomic_add(counts + 1 + tl.zeros_like(at), 1, mask=is_finite == 0, sem="relaxed")
    wide_r, wide_x = r.to(tl.float64), x.to(tl.float64)
    return tl.sum(wide_r * wide_r, 1), tl.sum(wide_x * wide_x, 1)


@triton.jit
def _pass(  # type: ignore[no-untyped-def]
    gradient, residual, n, factor, decay, above, keys, room, counts, norms2, begins,
    rows: tl.constexpr, columns: tl.constexpr, tiles_of_program: tl.constexpr,
):  # fmt: skip
    of_r, of_x = tl.zeros([rows], tl.float64), tl.zeros([rows], tl.float64)
    begin = tl.program_id(0).to(tl.int64) * (tiles_of_program * rows * columns)
    for tile in range(tiles_of_program):
        first = begin + tile * rows * columns
        if first + rows * columns <= n:
            r, x = _tile(gradient, residual, first, n, factor, decay, above, keys, room, counts, begins, rows, columns, True)
            of_r += r
            of_x += x
        elif first < n:
            r, x = _tile(gradient, residual, first, n, factor, decay, above, keys, room, counts, begins, rows, columns, False)
            of_r += r
            of_x += x
    # A sum for each program, so that the sum over programs has an order.
    tl.store(norms2 + 2 * tl.program_id(0), tl.sum(of_r, 0))
    tl.store(norms2 + 2 * tl.program_id(0) + 1, tl.sum(of_x, 0))


@triton.jit
def _cut(histograms, wanted, digit: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the `wanted` largest entries, the last one's magnitude down to this digit, and how many of them have the same."""
    bins: tl.constexpr = BINS if digit == 0 else BINS_BELOW
    begin: tl.constexpr = 0 if digit == 0 else BINS + (digit - 1) * BINS_BELOW
    bin = tl.arange(0, bins)
    of_bin = tl.load(histograms + begin + bin)
    above = 0
    if digit > 0:
        above = tl.load(histograms + CUTS + 2 * digit - 2)
        wanted = tl.load(histograms + CUTS + 2 * digit - 1)
    # If all bins but 0 have less than wanted, it is 0.
    at_least = tl.sum(of_bin, 0) - tl.cumsum(of_bin, 0) + of_bin
    last = tl.max(tl.where(at_least >= wanted, bin, 0), 0)
    same = wanted - tl.sum(tl.where(bin > last, of_bin, 0), 0)
    if tl.program_id(0) == 0:
        tl.store(histograms + CUTS + 2 * digit, above * bins + last)
        tl.store(histograms + CUTS + 2 * digit + 1, same)
    return above * bins + last, same


@triton.jit
def _count_digits(  # type: ignore[no-untyped-def]
    keys, counts, room, k, histograms, digit: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Adds to a digit's histogram the magnitudes that may be the k-th. All others go to bin 0, whose number is not read."""
    count = tl.minimum(tl.load(counts), room)
    at = tl.program_id(0) * block + tl.arange(0, block)
    magnitude = (tl.load(keys + at, mask=at < count, other=0) >> 32).to(tl.int32)
    bins: tl.constexpr = BINS if digit == 0 else BINS_BELOW
    begin: tl.constexpr = 0 if digit == 0 else BINS + (digit - 1) * BINS_BELOW
    counted = at < count
    if digit > 0:
        above, _ = _cut(histograms, tl.minimum(k, count), digit - 1)
        counted &= (magnitude >> (10 * (3 - digit))) == above
    bin = tl.arange(0, bins)
    of_bin = tl.histogram(tl.where(counted, (magnitude >> (10 * (2 - digit))) & (bins - 1), 0), bins)
    tl.atomic_add(histograms + begin + bin, of_bin, mask=(bin > 0) & (of_bin > 0), sem="relaxed")


@triton.jit
def _mark(  # type: ignore[no-untyped-def]
    keys, counts, room, k, histograms, marks, of_tiles, tile: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """marks: 1 in the upper half for an entry larger than the k-th, 1 in the lower half for one as large.

    of_tiles: their sum for each tile; zeros before.
    """
    count = tl.minimum(tl.load(counts), room)
    at = tl.program_id(0) * block + tl.arange(0, block)
    key = tl.load(keys + at, mask=at < count, other=0)
    magnitude = (key >> 32).to(tl.int32)
    kth, _ = _cut(histograms, tl.minimum(k, count), 2)
    mark = ((magnitude > kth).to(tl.int64) << 32) | (magnitude == kth).to(tl.int64)
    mark = tl.where(at < count, mark, 0)
    tl.store(marks + at, mark, mask=at < room)
    index = tl.where(mark > 0, -1 - key.to(tl.int32), 0)
    tl.atomic_add(of_tiles + index // tile, mark, mask=mark > 0, sem="relaxed")


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    keys, counts, room, k, histograms, upto, upto_tile, begins, residual, words, tile: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Writes an entry behind those that are taken before it in its tile, and in the tiles before.

    upto, upto_tile: 0, and then the sum of the marks up to each candidate, and up to each tile.
    """
    count = tl.minimum(tl.load(counts), room)
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < count
    key = tl.load(keys + at, mask=inside, other=0)
    magnitude = (key >> 32).to(tl.int32)
    index = tl.where(inside, -1 - key.to(tl.int32), 0)
    kth, same = tl.load(histograms + CUTS + 4), tl.load(histograms + CUTS + 5)
    begin = tl.load(begins + index // tile, mask=inside, other=0)
    before = tl.load(upto + at, mask=inside, other=0) - tl.load(upto + begin, mask=inside, other=0)
    before += tl.load(upto_tile + index // tile, mask=inside, other=0)
    larger, as_large = (before >> 32).to(tl.int32), before.to(tl.int32)
    none = k - tl.minimum(k, count)
    place = none + larger + tl.minimum(as_large, same)
    # With more candidates than there is room for, places may lie behind k.
    taken = inside & ((magnitude > kth) | ((magnitude == kth) & (as_large < same))) & (place < k)
    value = tl.load(residual + index, mask=taken, other=0.0)
    tl.store(words + HEAD + place, index, mask=taken)
    tl.store(words + HEAD + k + place, value.to(tl.int32, bitcast=True), mask=taken)
    tl.store(words + HEAD + at, -1, mask=at < none)
    if tl.program_id(0) == 0:
        tl.store(words + LAST, kth)


class InTriton:
    """Kernels in Triton. The selection sorts nothing: it counts digits for the k-th magnitude, and adds up places.

    Takes 16 bytes for each candidate there is room for, and 20 for each tile of 1024 entries of the largest bucket.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Of a selection. _zeroed has the histograms, the pairs behind them, and then a sum for each tile.
        self._zeroed = self._upto_tile = self._marks = self._upto = torch.zeros(0, dtype=torch.int64, device=device)
        self._begins = torch.zeros(0, dtype=torch.int32, device=device)

    def add(
        self, gradient: torch.Tensor, residual: torch.Tensor, factor: float, decay: float, above: float, into: Collected
    ) -> None:
        n, room = residual.numel(), into.keys.numel()
        self._grow(triton.cdiv(n, ROWS * COLUMNS), room)
        programs = triton.cdiv(n, TILES * ROWS * COLUMNS)
        norms2 = torch.empty(programs, 2, dtype=torch.float64, device=self._device)
        with _current(self._device):
            # Without fusion: a product is rounded before it is added, as on the CPU.
            _pass[(programs,)](
                gradient, residual, n, factor, decay, above, into.keys, room, into.counts, norms2, self._begins,
                rows=ROWS, columns=COLUMNS, tiles_of_program=TILES, num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
        torch.sum(norms2, 0, out=into.norms2)

    def select(self, collected: Collected, k: int, residual: torch.Tensor, words: torch.Tensor) -> None:
        room, tile = collected.keys.numel(), ROWS * COLUMNS
        tiles = triton.cdiv(residual.numel(), tile)
        zeroed = self._zeroed[: ZEROED + tiles].zero_()
        histograms, of_tiles = zeroed[:ZEROED].view(torch.int32), zeroed[ZEROED:]
        marks, upto, upto_tile = self._marks[:room], self._upto[: room + 1], self._upto_tile[: tiles + 1]
        candidates = (collected.keys, collected.counts, room, k, histograms)
        grid = (triton.cdiv(room, CANDIDATES),)
        with _current(self._device):
            for digit in range(DIGITS):
                _count_digits[grid](*candidates, digit=digit, block=CANDIDATES)
            _mark[grid](*candidates, marks, of_tiles, tile=tile, block=CANDIDATES)
            torch.cumsum(marks, 0, out=upto[1:])
            torch.cumsum(of_tiles, 0, out=upto_tile[1:])
            _write[grid](
                *candidates, upto, upto_tile, self._begins, residual, words, tile=tile, block=CANDIDATES
            )  # fmt: skip

    def _grow(self, tiles: int, room: int) -> None:
        def zeros(n: int) -> torch.Tensor:
            return self._marks.new_zeros(n)

        if self._begins.numel() < tiles:
            self._begins = self._begins.new_zeros(tiles)
            self._zeroed, self._upto_tile = zeros(ZEROED + tiles), zeros(tiles + 1)
        if self._marks.numel() < room:
            self._marks, self._upto = zeros(room), zeros(room + 1)


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
