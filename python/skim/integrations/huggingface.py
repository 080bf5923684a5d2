"""Skim in Hugging Face's Trainer."""

from __future__ import annotations

import contextlib
import math
import pathlib
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from skim import ddp
from skim._core import InvalidArgument
from skim.integrations._files import load_from, save_into


class SkimCallback(TrainerCallback):  # type: ignore[misc]
    """Attaches Skim to a Trainer's model, and keeps every rank's residuals in the Trainer's checkpoints.

        trainer = transformers.Trainer(model, arguments, ...)
        trainer.add_callback(SkimCallback(trainer, density=0.01))
        trainer.train()

    Every train() attaches anew, with residuals of zeros or those of the checkpoint that it resumes from.

    options: of skim.attach. optimizer and scaler are the Trainer's, unless they say otherwise. With one rank nothing happens.
    A density schedule that goes by epochs gets the Trainer's.
    strict: as of skim.load_state_dict, when a run resumes. To resume, checkpoints must be in the Trainer's output_dir.
    Raises StateError if one was saved without Skim.
    """

    def __init__(self, trainer: Any, *, strict: bool = True, **options: Any) -> None:
        self.trainer, self.strict, self.options = trainer, strict, options
        self._attached: Any = None  # the model, until the next train() begins, so that its report can be read

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        if self._attached is not None:
            with contextlib.suppress(InvalidArgument):  # the user has detached it
                ddp.detach(self._attached)
            self._attached = None
        model = self.trainer.model_wrapped
        scaler = getattr(self.trainer.accelerator, "scaler", None)  # with fp16=True
        ddp.attach(model, **{"optimizer": self.trainer.optimizer, "scaler": scaler, **self.options})
        self._attached = model
        if state.global_step > 0:
            load_from(self._folder(args, state), model, self.strict)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._attached is not None:
            # A run that resumes inside an epoch tells its fraction.
            ddp.compression_of(self._attached).epoch = math.floor(state.epoch or 0.0)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._attached is not None:
            save_into(self._folder(args, state), self._attached)

    @staticmethod
    def _folder(args: Any, state: Any) -> pathlib.Path:
        return pathlib.Path(args.output_dir, f"checkpoint-{state.global_step}")
