"""Skim in Hugging Face's accelerate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from skim.integrations._files import load_from, save_into

if TYPE_CHECKING:
    from accelerate import Accelerator


def keep_with(accelerator: Accelerator, model: torch.nn.Module, *, strict: bool = True) -> None:
    """Makes accelerator.save_state keep every rank's residuals, and load_state restore them.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        skim.attach(model, density=0.01, optimizer=optimizer, scaler=accelerator.scaler)
        keep_with(accelerator, model)

    strict: as of skim.load_state_dict.
    Not accelerator.register_for_checkpointing, which saves the state of rank 0 alone.
    """
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: save_into(folder, model))
    accelerator.register_load_state_pre_hook(lambda models, folder: load_from(folder, model, strict))
