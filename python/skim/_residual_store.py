"""Residuals in fewer bits than a float, on any device. The codes are those of src/feedback/residual_store.hpp."""

from __future__ import annotations

import torch

from skim._passes import has_triton

CODES = ("f32", "bf16", "q8")
BLOCK = 64  # entries that share an exponent (q8)
LEAST_EXPONENT, LARGEST_EXPONENT = -126, 121
LARGEST_BF16 = torch.finfo(torch.bfloat16).max
CHUNK = 1 << 22  # entries that PyTorch rounds at once: they bound its temporary memory
BITS = 0xFFFFFFFF


class ResidualStore:
    """Holds n floats in the code bf16 or q8, and rounds stochastically: see ResidualCode in skim/feedback.hpp.

    bf16: 2 bytes for each entry. q8: 1 + 1/64.
    """

    def __init__(self, code: str, n: int, device: torch.device | str = "cpu") -> None:
        self.code, self.n = code, n
        if code == "bf16":
            self.values = torch.zeros(n, dtype=torch.bfloat16, device=device)
            self.exponents = torch.zeros(0, dtype=torch.int8, device=device)
        else:
            blocks = -(-n // BLOCK)
            self.values = torch.zeros(blocks * BLOCK, dtype=torch.int8, device=device)
            self.exponents = torch.full((blocks,), LEAST_EXPONENT, dtype=torch.int8, device=device)

    @property
    def device(self) -> torch.device:
        return self.values.device

    def move_to(self, device: torch.device) -> None:
        self.values, self.exponents = self.values.to(device), self.exponents.to(device)

    def load(self, out: torch.Tensor, first: int = 0) -> None:
        """The entries from `first` on. out: float32."""
        end = first + out.numel()
        if self.code == "bf16":
            out.copy_(self.values[first:end])
            return
        if skip := first % BLOCK:
            whole = torch.empty(skip + out.numel(), dtype=torch.float32, device=self.device)
            self.load(whole, first - skip)
            out.copy_(whole[skip:])
            return
        units = power_of_two(self.exponents[first // BLOCK : -(-end // BLOCK)])
        last = end // BLOCK * BLOCK  # the end of the last whole block
        blocks = self.values[first:last].view(-1, BLOCK)
        torch.mul(blocks, units[: len(blocks), None], out=out[: last - first].view(-1, BLOCK))
        if last < end:
            out[last - first :] = self.values[last:end] * units[-1]

    def store(self, x: torch.Tensor, in_triton: bool) -> None:
        """x: float32 [n]. in_triton: if Triton can run there. It cannot before the first gradient has come to a GPU."""
        if in_triton and has_triton(x.device, None):
            from skim import _triton_pass

            _triton_pass.store(x, self.code, self.values, self.exponents)
            return
        for first in range(0, self.n, CHUNK):
            part = x[first : first + CHUNK]
            random = random_bits(part, first)
            if self.code == "bf16":
                bits = part.clamp(-LARGEST_BF16, LARGEST_BF16).view(torch.int32).to(torch.int64) + random
                half = bits.bitwise_right_shift(16).to(torch.int16).view(torch.bfloat16)
                self.values[first : first + half.numel()] = half
            else:
                self._store_blocks(part, random, first)

    def _store_blocks(self, x: torch.Tensor, random: torch.Tensor, first: int) -> None:
        n, blocks = x.numel(), -(-x.numel() // BLOCK)
        magnitude = torch.zeros(blocks * BLOCK, dtype=torch.float32, device=x.device)
        torch.abs(x, out=magnitude[:n])
        exponent = exponent_for(magnitude.view(-1, BLOCK).amax(1))
        magnitude.view(-1, BLOCK).mul_(power_of_two(-exponent)[:, None])
        rounded = (magnitude[:n] + random.to(torch.float32) * 2.0**-16).clamp_(max=127.0).to(torch.int8)
        self.values[first : first + n] = torch.where(x < 0.0, -rounded, rounded)
        self.exponents[first // BLOCK : first // BLOCK + blocks] = exponent.to(torch.int8)


def random_bits(x: torch.Tensor, first: int) -> torch.Tensor:
    """16 random bits for each entry x at place first + i: a hash of both, in int64."""
    place = torch.arange(first, first + x.numel(), dtype=torch.int64, device=x.device)
    h = (x.view(torch.int32).to(torch.int64) + place * 0x9E3779B9) & BITS
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & BITS
    h = ((h ^ (h >> 15)) * 0x846CA68B) & BITS
    return h >> 16


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def exponent_for(largest: torch.Tensor) -> torch.Tensor:
    """The smallest exponent for which 127 * 2^exponent is at least `largest`, if there is one."""
    bits = largest.view(torch.int32)
    below = torch.where((bits & 0x7FFFFF) <= 0x7E0000, 6, 5)
    return ((bits >> 23) - 127 - below).clamp(LEAST_EXPONENT, LARGEST_EXPONENT)
