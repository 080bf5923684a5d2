"""Skim in Hugging Face's Trainer."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from skim import ddp
from skim.integrations._files import load_from, save_into


class SkimCallback(TrainerCallback):  # type: ignore[misc]
    """Attaches Skim to a Trainer's model, and keeps every rank's residuals in the Trainer's checkpoints.

        trainer = transformers.Trainer(model, arguments, ...)
        trainer.add_callback(SkimCallback(trainer, density=0.01))
        trainer.train()

    options: of skim.attach. optimizer is the Trainer's, unless they say otherwise. With one rank nothing happens.
    A density schedule that goes by epochs gets the Trainer's.
    strict: as of skim.load_state_dict, when a run resumes. To resume, checkpoints must be in the Trainer's output_dir.
    Raises StateError if one was saved without Skim.
    """

    def __init__(self, trainer: Any, *, strict: bool = True, **options: Any) -> None:
        self.trainer, self.strict, self.options = trainer, strict, options
        self.is_attached = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        model = self.trainer.model_wrapped
        ddp.attach(model, **{"optimizer": self.trainer.optimizer, **self.options})
        self.is_attached = True
        if state.global_step > 0:
            load_from(self._folder(args, state), model, self.strict)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.is_attached:
            # A run that resumes inside an epoch tells its fraction.
            ddp.compression_of(self.trainer.model_wrapped).epoch = math.floor(state.epoch or 0.0)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.is_attached:
            save_into(self._folder(args, state), self.trainer.model_wrapped)

    @staticmethod
    def _folder(args: Any, state: Any) -> pathlib.Path:
        return pathlib.Path(args.output_dir, f"checkpoint-{state.global_step}")
