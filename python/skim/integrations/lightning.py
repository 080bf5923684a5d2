"""Skim in Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    from pytorch_lightning.callbacks import Callback

from skim import ddp
from skim.integrations._files import load, without_residuals


class SkimCallback(Callback):  # type: ignore[misc]
    """Attaches Skim to the model of strategy="ddp", and keeps all ranks' residuals in Lightning's checkpoints.

        trainer = lightning.Trainer(strategy="ddp", callbacks=[SkimCallback(density=0.01)], ...)
        trainer.fit(module, loader)

    options: of skim.attach. optimizer is the module's, if it has one; scaler is that of precision="16-mixed". With one rank
    nothing happens. strict: as of skim.load_state_dict, when a run resumes. Rank 0 gathers the residuals of all ranks to
    save them. Raises StateError if a run resumes from a checkpoint without residuals. A density schedule that goes by
    epochs gets the trainer's.
    """

    def __init__(self, *, strict: bool = True, **options: Any) -> None:
        self.strict, self.options = strict, options
        self._loaded: Mapping[str, torch.Tensor] | None = None
        self._resumes = False
        self._attached: torch.nn.Module | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.world_size == 1:
            return
        model = trainer.strategy.model
        found = {"optimizer": trainer.optimizers[0]} if len(trainer.optimizers) == 1 else {}
        found["scaler"] = getattr(trainer.strategy.precision_plugin, "scaler", None)  # with "16-mixed"
        ddp.attach(model, **{**found, **self.options})
        self._attached = model
        if self._resumes:
            if self._loaded is None:
                raise without_residuals(trainer.ckpt_path)
            load(model, self._loaded, self.strict)
            self._loaded, self._resumes = None, False

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self._attached is not None:
            ddp.compression_of(self._attached).epoch = trainer.current_epoch

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._attached is not None:
            checkpoint["skim"] = ddp.state_dict(self._attached, gather=True)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._loaded, self._resumes = checkpoint.get("skim"), True
