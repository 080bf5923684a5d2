"""Skim in Hugging Face's accelerate."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from skim.integrations._files import load_from, save_into

if TYPE_CHECKING:
    from accelerate import Accelerator

# The number of the last model that is kept with each.
_kept: weakref.WeakKeyDictionary[Accelerator, int] = weakref.WeakKeyDictionary()


def keep_with(accelerator: Accelerator, model: torch.nn.Module, *, strict: bool = True) -> None:
    """Makes accelerator.save_state keep every rank's residuals, and load_state restore them.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        skim.attach(model, density=0.01, optimizer=optimizer, scaler=accelerator.scaler)
        keep_with(accelerator, model)

    strict: as of skim.load_state_dict. For several models, call it in the same order in all runs.
    Not accelerator.register_for_checkpointing, which saves the state of rank 0 alone.
    """
    number = _kept[accelerator] = _kept.get(accelerator, -1) + 1
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: save_into(folder, model, number))
    accelerator.register_load_state_pre_hook(lambda models, folder: load_from(folder, model, strict, number))
