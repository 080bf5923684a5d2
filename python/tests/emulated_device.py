"""A device that is not there: tensors that say they are on it, whose memory is the host's.

An operation on tensors of both kinds raises, as on a real device. So does every operation that would wait for the
device to learn a value or a shape. Copies are counted by their direction. What is copied to the host without waiting
is there when the thread has waited for the device.
"""

import contextlib
import threading

import torch
import torch.utils.backend_registration
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Stream:
    @property
    def device(self):
        return DEVICE

    def synchronize(self):
        backend.synchronize()


class Backend(torch.utils.backend_registration._DummyBackendModule):
    """A thread begins with the default stream. `used` has the streams on which operations were queued."""

    def __init__(self):
        self.of_thread = threading.local()
        self.default, self.used = Stream(), set()

    def current_stream(self, device=None):
        return self.of_thread.__dict__.get("stream", self.default)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.of_thread.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self.of_thread.stream = before

    def queue(self, copy):
        self.of_thread.__dict__.setdefault("copies", []).append(copy)

    def synchronize(self):
        copies, self.of_thread.copies = self.of_thread.__dict__.get("copies", []), []
        for copy in copies:
            copy()


backend = Backend()
torch.utils.backend_registration._setup_privateuseone_for_python_backend("emulated", backend)
DEVICE = torch.device("emulated", 0)
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")
COPIES = ("copy_", "_to_copy")


class OnDevice(torch.Tensor):
    @staticmethod
    def __new__(cls, memory):
        return torch.Tensor._make_wrapper_subclass(
            cls, memory.shape, strides=memory.stride(), storage_offset=memory.storage_offset(), dtype=memory.dtype,
            device=DEVICE,
        )  # fmt: skip

    def __init__(self, memory):
        self.memory = memory

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


to_host, to_device = [], []  # bytes of each copy


def run(func, args, kwargs):
    name = func.overloadpacket.__name__
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    here = [t for t in tensors if isinstance(t, OnDevice)]
    makes = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == DEVICE.type
    if here or makes:
        backend.used.add(backend.current_stream())
    if here and name in WAITS:
        raise AssertionError(f"{name} waits for the device")
    if here and len(here) < len(tensors) and name not in COPIES:
        strangers = [t for t in tensors if not isinstance(t, OnDevice) and t.dim() > 0]
        if strangers:
            raise AssertionError(f"{name}: tensors of the device and of the host")
    kwargs = dict(kwargs)
    gives = bool(here) or makes
    if name == "_to_copy" and kwargs.get("device") is not None:
        gives = makes
        if makes != bool(here):
            (to_device if makes else to_host).append(tensors[0].numel() * tensors[0].element_size())
    if name == "copy_":
        gives = isinstance(args[0], OnDevice)
        if gives != isinstance(args[1], OnDevice):
            (to_device if gives else to_host).append(args[0].numel() * args[0].element_size())
        if not gives and isinstance(args[1], OnDevice) and (*args[2:], kwargs.get("non_blocking"))[0]:
            target, source = args[0], args[1].memory.clone()
            backend.queue(lambda: target.copy_(source))
            return target
    kwargs.pop("pin_memory", None)
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    result = func(*pytree.tree_map(memory_of, args), **pytree.tree_map(memory_of, kwargs))
    in_place = func._schema.is_mutable and args and isinstance(args[0], torch.Tensor)
    if in_place and name.endswith("_"):
        return args[0]
    if kwargs.get("out") is not None:
        return result
    return pytree.tree_map(lambda t: OnDevice(t) if gives and isinstance(t, torch.Tensor) else t, result)


def memory_of(x):
    return x.memory if isinstance(x, OnDevice) else x


class EmulatedDevice(TorchDispatchMode):
    """In the block, tensors can be made on DEVICE."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})
