"""Top-k sparsified data-parallel training."""

from typing import Any

from skim._core import *  # noqa: F403
from skim._core import __version__  # noqa: F401

# Parts that need torch, which this package does without otherwise.
_TORCH = {
    "attach": "skim.ddp",
    "report": "skim.ddp",
    "state_dict": "skim.ddp",
    "load_state_dict": "skim.ddp",
    "state_template": "skim.ddp",
    "compression_of": "skim.ddp",
    "Aggregator": "skim.aggregator",
    "connect": "skim._transport",
}


def __getattr__(name: str) -> Any:
    if name not in _TORCH:
        raise AttributeError(f"module 'skim' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_TORCH[name]), name)
