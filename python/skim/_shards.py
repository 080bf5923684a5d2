"""Parameters that are shards: PyTorch's DTensor."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from skim import _core
from skim._transport import connect

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SHARD = re.compile(r"shard_(\d+)_of_(\d+)_")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank's part of a DTensor; any other tensor itself."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor in the host's memory, gathered from its shards along at most one dimension of its mesh; a copy of any
    other tensor. Collective. For measurements and tests: unlike full_tensor() it works on a GPU with gloo, where that
    one ends the process (https://github.com/pytorch/pytorch/issues/152645).
    """
    mine = local(tensor).detach().to("cpu", copy=True)
    for d, placement in enumerate(getattr(tensor, "placements", ())):
        if placement.is_shard():
            group = tensor.device_mesh.get_group(d)  # type: ignore[attr-defined]
            parts: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, mine, group=group)
            return torch.cat(parts, placement.dim)
    return mine


def is_sharded(model: Any) -> bool:
    """Whether fully_shard was applied to the model itself."""
    return any(t.__name__ == "FSDPModule" for t in type(model).__mro__)


def expect_no_replicate(what: str, model: torch.nn.Module) -> None:
    """Raises InvalidArgument if replicate() of PyTorch was applied to the model, or to a part of it. what: who asks."""
    for module in model.modules():
        if any(t.__module__.startswith("torch.distributed._composable.replicate") for t in type(module).__mro__):
            raise _core.InvalidArgument(
                f"{what}: replicate() exchanges whole gradients itself; make the model without it, and wrap it in "
                "DistributedDataParallel for skim.attach, or give it to skim.LocalSteps as it is"
            )


def reshard(model: torch.nn.Module) -> None:
    """Lets fully_shard gather parameters anew. Call it after their shards have changed."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # type: ignore[operator]


@torch.no_grad()
def make_equal(model: torch.nn.Module, group: dist.ProcessGroup | None, comm: _core.Communicator) -> None:
    """Gives all ranks of the group the parameters and buffers of its first. Collective. comm: of the same ranks.

    What is not trained may be large, and is often equal already. So it is sent only if it is not.
    """
    first = dist.get_global_rank(group, 0) if group else 0
    others = [*model.buffers()]
    for p in model.parameters():
        if p.is_meta or not local(p).numel():
            continue
        if p.requires_grad and takes(group, local(p).device):
            told = local(p).contiguous()  # gloo sends memory as it lies, with its gaps
            dist.broadcast(told, first, group=group)
            if told.data_ptr() != local(p).data_ptr():
                local(p).copy_(told)
        else:
            others.append(p)
    others = [_without_repeats(local(t)) for t in others if not t.is_meta and local(t).numel()]
    if are_equal(others, comm):
        return
    for t in others:
        told = comm.broadcast(_bytes_of(t).tobytes() if comm.rank == 0 else b"", 0)
        t.copy_(torch.frombuffer(bytearray(told), dtype=t.dtype).view(t.shape))


def takes(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether the group has a backend for tensors of this device. NCCL has none for a CPU's."""
    try:
        (group or dist.group.WORLD)._get_backend(device)  # type: ignore[union-attr]
    except RuntimeError:
        return False
    return True


def are_equal(tensors: Iterable[torch.Tensor], comm: _core.Communicator) -> bool:
    """Whether all ranks have the same bits. Collective."""
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(_bytes_of(t))
    return len(set(comm.allgather(digest.digest()))) == 1


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor that expand() has repeated, so that it can be written to."""
    for d, stride in enumerate(tensor.stride()):
        tensor = tensor.narrow(d, 0, 1) if stride == 0 else tensor
    return tensor


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    bytes_of: npt.NDArray[np.uint8] = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
    return bytes_of


@dataclasses.dataclass(frozen=True)
class Shard:
    """This rank's place among the ranks that share the parameters. State is kept by place, because it differs."""

    place: int
    count: int
    mesh: Any  # the DeviceMesh of those ranks

    @staticmethod
    def of(parameters: Iterable[torch.Tensor]) -> Shard | None:
        """None: no parameter is sharded. Raises InvalidArgument for shards that Skim cannot serve."""
        found = None
        for p in parameters:
            if hasattr(p, "device_mesh"):
                if any(placement.is_partial() for placement in p.placements):
                    raise _core.InvalidArgument("skim: a parameter is a DTensor with a Partial placement")
                if found is not None and found.mesh != p.device_mesh:
                    raise _core.InvalidArgument("skim: the parameters are shards on several meshes")
                ranks = p.device_mesh.mesh.flatten().tolist()
                found = Shard(ranks.index(dist.get_rank()), len(ranks), p.device_mesh)
        return found

    def connect(self, timeout: float) -> list[_core.Communicator]:
        """Communicators among the ranks that share the parameters: one for each dimension of their mesh. Collective."""
        groups = [self.mesh.get_group(d) for d in range(self.mesh.ndim) if self.mesh.size(d) > 1]
        return [connect(group, timeout=timeout) for group in groups]

    def wholes(self, parameters: Iterable[torch.Tensor]) -> set[int]:
        """The indices of the parameters that several of the ranks have whole."""
        if self.count == 1:
            return set()
        return {
            i
            for i, p in enumerate(parameters)
            if not hasattr(p, "placements")
            or any(placement.is_replicate() and p.device_mesh.size(d) > 1 for d, placement in enumerate(p.placements))
        }

    @property
    def described(self) -> str:
        """For the ranks of a group to compare."""
        return f"{self.place} of {self.count} (the group must have the ranks with the same shard, one in each island)"

    @property
    def prefix(self) -> str:
        return f"shard_{self.place}_of_{self.count}_"

    def marked(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A state in which every key says whose it is, so that those of several ranks fit into one checkpoint."""
        return {self.prefix + key: value for key, value in state.items()}

    def own(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What marked() returned, without the marks and without other shards. Raises StateError if nothing is left."""
        state = {key: t for key, t in state.items() if isinstance(key, str)}
        mine = {key[match.end() :]: t for key, t in state.items() if (match := SHARD.search(key)) and match[0] == self.prefix}
        if not mine:
            others = sorted({match[0][:-1] for key in state if (match := SHARD.search(key))})
            raise _core.StateError(
                f"skim: no state of {self.prefix[:-1]}; there are: {', '.join(others) or 'states without shards'}. "
                "Residuals can move to another number of islands, but not to another number of ranks inside an island"
            )
        return mine
