"""Where skim.TensorLocalHalf keeps the floats of its slots between steps: residuals, and velocities.

A slot is open from its gradient on until its mean has been applied.
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

    def read(self, slot: int) -> torch.Tensor:
        """As of(), for floats that will not be changed."""
        return self.of(slot)

    @abstractmethod
    def open(self, slot: int, device: torch.device) -> torch.Tensor:
        """As of(), when the slot has a gradient on this device."""

    def applied(self) -> None:
        """When a slot's mean has been applied. Its floats may still be changed, by a rollback."""

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
            whole = torch.zeros(sum(lengths), dtype=torch.float32, device=devices[0] if devices else "cpu")
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
        self._floats = torch.zeros(0, dtype=torch.float32, device="cpu")
        self._open: int | None = None

    def of(self, slot: int) -> torch.Tensor:
        store = self._stores[slot]
        if self._open != slot or self._floats.device != store.device:
            self.close()
            if self._floats.device != store.device or self._floats.numel() < store.n:
                largest = max(s.n for s in self._stores.values())
                self._floats = torch.empty(largest, dtype=torch.float32, device=store.device)
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
    opened after it in the step before. When a slot is closed, it is copied back, and the next one to the device, in both
    directions at once and beside the work of the device. No such copy goes while a slot is open, because small copies
    of the slot would then wait for it: a device has one copy engine for each direction."""

    def __init__(self) -> None:
        self._floats: dict[int, torch.Tensor] = {}  # on the host
        self._devices: dict[int, torch.device] = {}
        self._written: dict[int, torch.cuda.Event | None] = {}  # the last copy of a slot to the host
        self._here, self._next = Room(), Room()  # on the device: of the slots _open and _coming
        self._open: int | None = None
        self._changed = False  # whether the open slot's floats may have been changed
        self._coming: int | None = None
        self._last: int | None = None  # the slot that was opened last
        self._after: dict[int, int] = {}  # the slot that was opened after this one
        self._copies = Copies(torch.device("cpu"))

    def of(self, slot: int) -> torch.Tensor:
        floats = self.read(slot)
        self._changed = True
        return floats

    def read(self, slot: int) -> torch.Tensor:
        if self._open != slot:
            self._put_back()
            if self._coming == slot:
                self._here, self._next, self._coming = self._next, self._here, None
            else:
                self._fetch(slot, self._here)
            if self._here.copied is not None:
                torch.cuda.current_stream(self._devices[slot]).wait_event(self._here.copied)
            self._open = slot
        return self._here.floats[: self._floats[slot].numel()]

    def open(self, slot: int, device: torch.device) -> torch.Tensor:
        if self._devices[slot] != device:
            self._put_back()
            self._coming = None
            self._copies.wait()
            self._devices[slot] = device
            self._floats[slot] = _of_host(self._floats[slot], device)
        if self._last is not None:
            self._after[self._last] = slot
        self._last = slot
        return self.of(slot)

    def applied(self) -> None:
        self.close()

    def close(self) -> None:
        self._put_back()
        slot = None if self._last is None else self._after.get(self._last)
        if slot is not None and slot != self._coming:
            self._fetch(slot, self._next)
            self._coming = slot

    def _fetch(self, slot: int, room: Room) -> None:
        """Begins to copy the slot to the device, into `room`, which grows if it is too small."""
        floats, device = self._floats[slot], self._devices[slot]
        if self._copies.device != device:
            self._copies.wait()
            self._copies = Copies(device)
        if room.floats.device != device or room.floats.numel() < floats.numel():
            room.floats, room.copied = self._copies.room(max(x.numel() for x in self._floats.values()))
        room.copied = self._copies.copy(room.floats[: floats.numel()], floats, room.copied, self._written[slot])
        self.moved_bytes += 4 * floats.numel()

    def _put_back(self) -> None:
        if self._open is None:
            return
        slot, self._open = self._open, None
        done = self._copies.work_so_far()
        if not self._changed:
            self._here.copied = done
            return
        self._changed, floats = False, self._floats[slot]
        self._here.copied = self._written[slot] = self._copies.copy(floats, self._here.floats[: floats.numel()], done)
        self.moved_bytes += 4 * floats.numel()

    def put(self, slot: int, x: torch.Tensor) -> None:
        self._floats[slot], self._devices[slot], self._written[slot] = _of_host(x, x.device), x.device, None

    def load(self, slot: int, first: int, out: torch.Tensor) -> None:
        self._copies.wait()
        out.copy_(self._floats[slot][first : first + out.numel()])

    def device_of(self, slot: int) -> torch.device:
        return self._devices[slot]

    def empty(self) -> Kept:
        return Offloaded()


def _of_host(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of x in the host's memory, from which the device can copy by itself."""
    is_pinned = device.type == "cuda"  # x.pin_memory() may pin for another device
    return torch.empty(x.numel(), dtype=torch.float32, device="cpu", pin_memory=is_pinned).copy_(x)


class Room:
    """Memory of a device for one slot."""

    def __init__(self) -> None:
        self.floats = torch.zeros(0, dtype=torch.float32, device="cpu")
        self.copied: torch.cuda.Event | None = None  # the end of the last copy to it or from it, and of its last use


class Copies:
    """Copies between the host and a device. If it has streams, each direction has one of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, *after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Copies after the copies in this direction so far, and after these events. Returns the end of the copy."""
        if not self._streams:
            target.copy_(source)
            return None
        stream = self._streams[target.is_cuda]
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def room(self, n: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """n floats on the device for such copies, and from when on they may be overwritten."""
        floats = torch.empty(n, dtype=torch.float32, device=self.device)
        for stream in self._streams:
            floats.record_stream(stream)
        return floats, self.work_so_far()

    def work_so_far(self) -> torch.cuda.Event | None:
        """The end of what the device's current stream has been given so far."""
        return torch.cuda.current_stream(self.device).record_event() if self._streams else None

    def wait(self) -> None:
        """The host waits for all copies."""
        for stream in self._streams:
            stream.synchronize()
