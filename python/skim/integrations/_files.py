"""One file for each rank in the folder of a framework's checkpoint."""

from __future__ import annotations

import os
import pathlib
import re
import warnings
from collections.abc import Mapping

import torch

from skim import ddp
from skim._core import StateError


def name_for(model: torch.nn.Module, number: int) -> str:
    """The name of this rank's file: skim_rank_R_of_P.pt, with fully_shard skim_shard_S_of_W_rank_R_of_P.pt. number: of the
    model in its checkpoint. From 1 on, it follows skim_: skim_model_1_rank_R_of_P.pt."""
    compression = ddp.compression_of(model)
    return f"skim_{_mark(number)}{compression.mark}rank_{compression.comm.rank}_of_{compression.comm.size}.pt"


def _mark(number: int) -> str:
    return f"model_{number}_" if number > 0 else ""


def files_of(folder: str | os.PathLike[str], number: int) -> list[pathlib.Path]:
    """Those of all ranks of a model, of any number of ranks."""
    name = re.compile(rf"skim_{_mark(number)}(shard_\d+_of_\d+_)?rank_\d+_of_\d+\.pt")
    return sorted(file for file in pathlib.Path(folder).glob("skim_*.pt") if name.fullmatch(file.name))


def without_residuals(checkpoint: object) -> StateError:
    return StateError(f"skim: '{checkpoint}' was saved without Skim and has no residuals; go on without Skim, or start anew")


def save_into(folder: str | os.PathLike[str], model: torch.nn.Module, number: int = 0) -> None:
    """Every rank calls it. A file is whole or is not there. Files of another number of ranks, which an earlier run has
    saved there, are removed: a run that resumes on that number would take them."""
    path = pathlib.Path(folder, name_for(model, number))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save(ddp.state_dict(model), part)
    part.replace(path)
    of_this_run = re.sub(r"\d+(?=_of_)", "*", path.name)
    for file in files_of(folder, number):
        if not file.match(of_this_run):
            file.unlink(missing_ok=True)


def load(model: torch.nn.Module, state: Mapping[str, torch.Tensor], strict: bool) -> None:
    """Every rank calls it. Rank 0 warns if parameters differ, which strict refuses."""
    report = ddp.load_state_dict(model, state, strict)
    if any(report) and ddp.compression_of(model).comm.rank == 0:
        warnings.warn(f"skim: {report}", stacklevel=2)


def load_from(folder: str | os.PathLike[str], model: torch.nn.Module, strict: bool, number: int = 0) -> None:
    """Every rank calls it. On another number of ranks, each needs the files of all old ranks.

    Raises StateError if there are none, or some are missing.
    """
    own = pathlib.Path(folder, name_for(model, number))
    files = [own] if own.exists() else files_of(folder, number)
    if not files:
        raise without_residuals(folder)
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state |= torch.load(file, weights_only=True)
    load(model, state, strict)
