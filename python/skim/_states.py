"""The states that state_dict() returns: the names of their keys, and checks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch

from skim import _core
from skim._checks import expect_flag

STATE = re.compile(r"rank_(\d+)_of_(\d+)$")  # of a key's end


def expect_state(state: Any, strict: Any) -> None:
    """Raises StateError if the state is no dict, and InvalidArgument if strict is no bool. Only the entries of the
    state with a name of Skim are looked at, and checked where they are."""
    expect_flag("skim: strict", strict)
    if not isinstance(state, Mapping):
        raise _core.StateError(
            f"skim: a state is a dict of tensors, as state_dict() returns it, not {type(state).__name__}"
        )


def expect_bytes(key: str, value: Any) -> None:
    is_tensor = isinstance(value, torch.Tensor)
    if not is_tensor or value.dtype != torch.uint8 or value.dim() != 1:
        found = f"{value.dtype} of shape {list(value.shape)}" if is_tensor else type(value).__name__
        raise _core.StateError(f"skim: '{key}' must be a tensor of bytes (uint8) of one dimension, not {found}")


def json_tensor(value: Any) -> torch.Tensor:
    """A value in JSON as a tensor of bytes, for a state."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def json_value(tensor: torch.Tensor) -> Any:
    """The value that json_tensor() got. Raises ValueError or TypeError for anything else."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(type(tensor).__name__)
    return json.loads(bytes(tensor.cpu().tolist()))
