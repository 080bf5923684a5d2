"""Skim's C interface from Python without the package: a binding by ctypes. Four ranks, here threads, average gradients.

SKIM_LIBRARY=~/skim/lib/libskim.so python examples/ctypes_skim.py

The library must be a shared one: configure it with -DBUILD_SHARED_LIBS=ON.
"""

import ctypes
import os
import sys
import threading
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_char_p, c_double, c_float, c_int, c_size_t, c_uint32, c_void_p

SEND = CFUNCTYPE(c_int, c_void_p, c_int, c_void_p, c_size_t)


class Transport(Structure):
    _fields_ = [("context", c_void_p), ("send", SEND), ("receive", SEND), ("rank", c_int), ("size", c_int),
                ("host", c_int)]  # fmt: skip


class Parameter(Structure):
    _fields_ = [("slot", c_uint32), ("name", c_char_p), ("length", c_size_t)]


class Report(Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("n", "k", "sent_entries", "sum_entries", "sent_bytes",
                "received_bytes", "rounds", "select_ns", "exchange_ns", "apply_ns")]  # fmt: skip
    _fields_ += [("dense", ctypes.c_int32), ("finite", ctypes.c_int32)]


class Skim:
    """The library. Its functions raise an OSError with Skim's message."""

    def __init__(self, path=os.environ.get("SKIM_LIBRARY", "libskim.so")):
        self._lib = ctypes.CDLL(path)
        self._lib.skim_last_error.restype = c_char_p
        if self._lib.skim_abi_version() != 1:
            raise OSError(f"{path} has another version of the interface than 1")

    def _call(self, name, *arguments):
        if getattr(self._lib, name)(*arguments) != 0:
            raise OSError(self._lib.skim_last_error().decode())

    def in_process_group(self, size):
        group = (c_void_p * size)()
        self._call("skim_in_process_group", c_int(size), c_double(60.0), group)
        return [c_void_p(one) for one in group]

    def communicator_over(self, send, receive, rank, size):
        """send(to, memory) and receive(source, memory) move a memoryview of bytes whole, or raise."""

        def guarded(move):
            def call(_, peer, data, length):
                try:
                    move(peer, memoryview((ctypes.c_char * length).from_address(data)).cast("B"))
                except Exception as error:  # it must not reach C
                    print(f"rank {rank}: {error}", file=sys.stderr)
                    return 1
                return 0

            return SEND(call)

        transport, made = Transport(None, guarded(send), guarded(receive), rank, size, 0), c_void_p()
        self._call("skim_communicator_over", byref(transport), byref(made))
        made.transport = transport  # lives as long as the communicator
        return made

    def free(self, communicator):
        self._lib.skim_communicator_free(communicator)

    def reducer(self, communicator, options, lengths):
        """lengths: {name of a parameter: its entries}. All of them are one bucket."""
        return Reducer(self, communicator, options, lengths)


class Reducer:
    def __init__(self, skim, communicator, options, lengths):
        self._skim, self._handle = skim, c_void_p()
        skim._call("skim_reducer_new", communicator, options.encode(), byref(self._handle))
        layout = [Parameter(0, name.encode(), length) for name, length in lengths.items()]
        skim._call("skim_reducer_set_layout", self._handle, (Parameter * len(layout))(*layout), c_size_t(len(layout)))

    def step(self, gradient):
        """Replaces the gradient, a writable buffer of floats, by the group's mean. Returns a Report."""
        memory, report, apply = memoryview(gradient).cast("B"), Report(), c_int()
        data = (ctypes.c_char * len(memory)).from_buffer(memory)
        arguments = (c_uint32(0), data, c_size_t(len(memory) // 4), c_int(0), byref(report))
        self._skim._call("skim_reducer_reduce", self._handle, *arguments)
        self._skim._call("skim_reducer_end_step", self._handle, c_double(0.0), byref(apply))
        return report

    def free(self):
        self._skim._lib.skim_reducer_free(self._handle)


def main():
    ranks, n = 4, 100_000
    skim = Skim()
    gradients = [(c_float * n)(*((i * 7919 + r * 104729) % 2003 - 1001 for i in range(n))) for r in range(ranks)]
    sent = [0] * ranks

    def train(rank, communicator):
        reducer = skim.reducer(communicator, "density=0.01 exchange=gtopk", {"weights": n})
        sent[rank] = reducer.step(gradients[rank]).sent_bytes  # ctypes lets the other threads run
        reducer.free()
        skim.free(communicator)

    threads = [threading.Thread(target=train, args=one) for one in enumerate(skim.in_process_group(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    equal = all(bytes(g) == bytes(gradients[0]) for g in gradients)
    print(f"sent {sent[0] / 1e3:.0f} kB, a dense sum {1.5 * n * 4 / 1e3:.0f} kB; the ranks", "agree" if equal else "differ")


if __name__ == "__main__":
    main()
