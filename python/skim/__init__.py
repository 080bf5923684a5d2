"""Top-k sparsified data-parallel training.

Under PyTorch, start with skim.attach (DistributedDataParallel), skim.LocalSteps (local steps between exchanges) or
skim.Aggregator (any training loop).

Reducer replaces this rank's gradient by the group's mean gradient. It sends the k largest of its n entries and keeps
the rest in a residual. Its parts can be used alone: Selector, ErrorFeedback, Codec, Exchange, Chooser, the density
schedules, the cost model, and skim.analysis. Arrays are NumPy arrays, or any object in host memory that supports DLPack
or the buffer protocol. All exceptions derive from skim.Error.
"""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING, Any

from skim import analysis, protocols
from skim._core import (
    Choice,
    Chooser,
    Codec,
    CommError,
    Communicator,
    Cost,
    DecodeError,
    Density,
    DensitySchedule,
    Error,
    ErrorFeedback,
    Exchange,
    ExchangeResult,
    ExchangeRow,
    GroupStats,
    InvalidArgument,
    Link,
    LoadReport,
    LocalSpeeds,
    LocalTask,
    NonFiniteError,
    Progress,
    Reducer,
    Selection,
    Selector,
    SelectReport,
    StateError,
    StepReport,
    Traffic,
    __version__,
    accordion_density,
    adaptive_density,
    adaptive_forms,
    capture_density,
    cheapest,
    communicator_over,
    constant_density,
    descent_per_bit_density,
    dgc_warm_up,
    duration_text,
    entries,
    exchanges,
    gaussiank_warm_up,
    geometric_density,
    gtopk_warm_up,
    in_process_group,
    index_codes,
    level_sends,
    listed_density,
    local_steps_options,
    max_step_bytes,
    outer_lr_for,
    predict,
    predicted_seconds,
    quality_note,
    select_rules,
    simulated_group,
    step_seconds,
    top_k,
    typical_local_speeds,
    value_codes,
    with_down_density,
)

__all__ = [
    "__version__",
    "accordion_density",
    "adaptive_density",
    "adaptive_forms",
    "analysis",
    "capture_density",
    "cheapest",
    "Choice",
    "Chooser",
    "Codec",
    "CommError",
    "Communicator",
    "communicator_over",
    "constant_density",
    "Cost",
    "DecodeError",
    "Density",
    "DensitySchedule",
    "descent_per_bit_density",
    "dgc_warm_up",
    "duration_text",
    "entries",
    "Error",
    "ErrorFeedback",
    "Exchange",
    "ExchangeResult",
    "ExchangeRow",
    "exchanges",
    "gaussiank_warm_up",
    "geometric_density",
    "GroupStats",
    "gtopk_warm_up",
    "in_process_group",
    "index_codes",
    "InvalidArgument",
    "level_sends",
    "Link",
    "listed_density",
    "LoadReport",
    "local_steps_options",
    "LocalSpeeds",
    "LocalTask",
    "max_step_bytes",
    "NonFiniteError",
    "outer_lr_for",
    "predict",
    "predicted_seconds",
    "Progress",
    "protocols",
    "quality_note",
    "Reducer",
    "select_rules",
    "Selection",
    "Selector",
    "SelectReport",
    "simulated_group",
    "StateError",
    "step_seconds",
    "StepReport",
    "top_k",
    "Traffic",
    "typical_local_speeds",
    "value_codes",
    "with_down_density",
]

if TYPE_CHECKING:
    from skim._transport import connect as connect
    from skim.aggregator import Aggregator as Aggregator
    from skim.ddp import attach as attach
    from skim.ddp import compression_of as compression_of
    from skim.ddp import detach as detach
    from skim.ddp import load_state_dict as load_state_dict
    from skim.ddp import report as report
    from skim.ddp import state_dict as state_dict
    from skim.ddp import state_template as state_template
    from skim.elastic import ElasticGroup as ElasticGroup
    from skim.local_steps import LocalSteps as LocalSteps
    from skim.tensor_half import TensorLocalHalf as TensorLocalHalf

# These names need torch, and are imported on first use. The rest of the package works without torch.
_TORCH = {
    "attach": "skim.ddp",
    "report": "skim.ddp",
    "state_dict": "skim.ddp",
    "load_state_dict": "skim.ddp",
    "state_template": "skim.ddp",
    "compression_of": "skim.ddp",
    "detach": "skim.ddp",
    "Aggregator": "skim.aggregator",
    "LocalSteps": "skim.local_steps",
    "ElasticGroup": "skim.elastic",
    "TensorLocalHalf": "skim.tensor_half",
    "connect": "skim._transport",
}


if _find_spec("torch") is not None:
    __all__ += list(_TORCH)

if not TYPE_CHECKING:  # a type checker would take it for a module that has every name

    def __getattr__(name: str) -> Any:
        if name not in _TORCH:
            raise AttributeError(f"module 'skim' has no attribute '{name}'")
        return getattr(_import_module(_TORCH[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_TORCH})


for _error in (Error, InvalidArgument, CommError, DecodeError, NonFiniteError, StateError):
    _error.__module__ = "skim"  # in tracebacks
