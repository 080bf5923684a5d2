"""Where skim.TensorLocalHalf keeps the floats of its slots between steps: residuals, and velocities.

A slot is open from its gradient on until another one is opened, or until the step ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from skim._residual_store import ResidualStore

Layout = Sequence[tuple[int, Sequence[tuple[str, int]]]]  # slot, its parameters: name and length


class Kept(ABC):
    """n floats of each slot, on the slot's device: that of its last gradient, and the CPU before the first one."""

    moved_bytes = 0  # between device and host, so far

    @abstractmethod
    def of(self, slot: int) -> torch.Tensor:
        """The slot's floats. They may be changed. Valid until it is called for another slot, or close()."""

    @abstractmethod
    def open(self, slot: int, device: torch.device) -> torch.Tensor:
        """As of(), when the slot has a gradient on this device."""

    @abstractmethod
    def close(self) -> None:
        """At the end of a step, and before put() and load()."""

    @abstractmethod
    def put(self, slot: int, x: torch.Tensor) -> None:
        """A new slot, on the device of x, which it may take over."""

    @abstractmethod
    def load(self, slot: int, first: int, out: torch.Tensor) -> None:
        """Copies the slot's floats from `first` on to `out`, on any device."""

    @abstractmethod
    def device_of(self, slot: int) -> torch.device: ...

    @abstractmethod
    def empty(self) -> Kept:
        """One of the same kind, without slots."""

    def moved_to(self, layout: Layout, before: Layout) -> Kept:
        """One for another layout. Parameters keep their floats. New ones get zeros, on the device of the slot's others.

        One slot of it is floats at a time.
        """
        self.close()
        found = self.empty()
        found.moved_bytes = self.moved_bytes
        places = {}
        for slot, parameters in before:
            first = 0
            for name, n in parameters:
                places[name] = slot, first
                first += n
        for slot, parameters in layout:
            devices = [self.device_of(places[name][0]) for name, _ in parameters if name in places]
            lengths = [n for _, n in parameters]
            whole = torch.zeros(sum(lengths), device=devices[0] if devices else "cpu")
            for (name, _), part in zip(parameters, whole.split(lengths)):
                if name in places:
                    self.load(*places[name], part)
            found.put(slot, whole)
        return found


class InPlace(Kept):
    """As floats on the device."""

    def __init__(self) -> None:
        self._floats: dict[int, torch.Tensor] = {}

    def of(self, slot: int) -> torch.Tensor:
        return self._floats[slot]

    def open(self, slot: int, device: torch.device) -> torch.Tensor:
        if self._floats[slot].device != device:
            self._floats[slot] = self._floats[slot].to(device)
        return self._floats[slot]

    def close(self) -> None:
        pass

    def put(self, slot: int, x: torch.Tensor) -> None:
        self._floats[slot] = x

    def load(self, slot: int, first: int, out: torch.Tensor) -> None:
        out.copy_(self._floats[slot][first : first + out.numel()])

    def device_of(self, slot: int) -> torch.device:
        return self._floats[slot].device

    def empty(self) -> Kept:
        return InPlace()


class Coded(Kept):
    """In fewer bits on the device, in a code of ResidualStore. The open slot is floats."""

    def __init__(self, code: str, in_triton: bool) -> None:
        """in_triton: if Triton may encode them."""
        self._code, self._in_triton = code, in_triton
        self._stores: dict[int, ResidualStore] = {}
        self._floats = torch.zeros(0)
        self._open: int | None = None

    def of(self, slot: int) -> torch.Tensor:
        store = self._stores[slot]
        if self._open != slot or self._floats.device != store.device:
            self.close()
            if self._floats.device != store.device or self._floats.numel() < store.n:
                self._floats = torch.empty(max(s.n for s in self._stores.values()), device=store.device)
            store.load(self._floats[: store.n])
            self._open = slot
        return self._floats[: store.n]

    def open(self, slot: int, device: torch.device) -> torch.Tensor:
        if self._stores[slot].device != device:
            self.close()
            self._stores[slot].move_to(device)
        return self.of(slot)

    def close(self) -> None:
        if self._open is not None:
            store, self._open = self._stores[self._open], None
            store.store(self._floats[: store.n], self._in_triton)

    def put(self, slot: int, x: torch.Tensor) -> None:
        store = self._stores[slot] = ResidualStore(self._code, x.numel(), x.device)
        store.store(x, self._in_triton)

    def load(self, slot: int, first: int, out: torch.Tensor) -> None:
        self._stores[slot].load(out, first)

    def device_of(self, slot: int) -> torch.device:
        return self._stores[slot].device

    def empty(self) -> Kept:
        return Coded(self._code, self._in_triton)


class Offloaded(Kept):
    """As floats in the host's memory, which is pinned. Two slots are on the device: the open one, and the one that was
    opened after it in the step before, which is copied meanwhile. Copies run beside the work of the device."""

    def __init__(self) -> None:
        self._floats: dict[int, torch.Tensor] = {}  # on the host
        self._devices: dict[int, torch.device] = {}
        self._here, self._next = torch.zeros(0), torch.zeros(0)  # on the device: of the slots _open and _coming
        self._open: int | None = None
        self._coming: int | None = None
        self._next_arrived: torch.cuda.Event | None = None
        self._last: int | None = None  # the slot that was opened last
        self._after: dict[int, int] = {}  # the slot that was opened after this one
        self._copies = Copies(torch.device("cpu"))

    def of(self, slot: int) -> torch.Tensor:
        n = self._floats[slot].numel()
        if self._open != slot:
            self._put_back()
            if self._coming == slot:
                self._here, self._next, self._coming = self._next, self._here, None
                arrived = self._next_arrived
            else:
                self._here, arrived = self._fetched(slot, self._here)
            if arrived is not None:
                torch.cuda.current_stream(self._copies.device).wait_event(arrived)
            self._open = slot
        return self._here[:n]

    def open(self, slot: int, device: torch.device) -> torch.Tensor:
        if self._devices[slot] != device:
            self._put_back()
            self._coming = None
            self._copies.wait()
            self._devices[slot] = device
            if device.type == "cuda":
                self._floats[slot] = self._floats[slot].pin_memory()
        floats = self.of(slot)
        if self._last is not None:
            self._after[self._last] = slot
        self._last = slot
        self._prefetch()
        return floats

    def close(self) -> None:
        self._put_back()
        self._prefetch()

    def _prefetch(self) -> None:
        """Begins to copy the slot that is expected next."""
        slot = None if self._last is None else self._after.get(self._last)
        if slot is not None and slot not in (self._open, self._coming):
            self._next, self._next_arrived = self._fetched(slot, self._next)
            self._coming = slot

    def _fetched(self, slot: int, room: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Begins to copy the slot to the device, into `room` if that is there and large enough. Returns where, and when
        it has arrived."""
        floats, device = self._floats[slot], self._devices[slot]
        if self._copies.device != device:
            self._copies.wait()
            self._copies = Copies(device)
        if room.device != device or room.numel() < floats.numel():
            room = torch.empty(max(x.numel() for x in self._floats.values()), device=device)
        self.moved_bytes += 4 * floats.numel()
        return room, self._copies.copy(room[: floats.numel()], floats)

    def _put_back(self) -> None:
        if self._open is not None:
            floats, self._open = self._floats[self._open], None
            self._copies.copy(floats, self._here[: floats.numel()])
            self.moved_bytes += 4 * floats.numel()

    def put(self, slot: int, x: torch.Tensor) -> None:
        pinned = torch.empty(x.numel(), pin_memory=x.device.type == "cuda")
        self._floats[slot], self._devices[slot] = pinned.copy_(x), x.device

    def load(self, slot: int, first: int, out: torch.Tensor) -> None:
        self._copies.wait()
        out.copy_(self._floats[slot][first : first + out.numel()])

    def device_of(self, slot: int) -> torch.device:
        return self._devices[slot]

    def empty(self) -> Kept:
        return Offloaded()


class Copies:
    """Copies between the host and a device, one after another, on a stream of their own if the device has streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event | None:
        """Copies after what the device's current stream has been given so far. Returns the end of the copy."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        return self._stream.record_event()

    def wait(self) -> None:
        """The host waits for all copies."""
        if self._stream is not None:
            self._stream.synchronize()
