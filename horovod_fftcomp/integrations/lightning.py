"""Lightning: a callback that compresses the gradients which the strategy "ddp" averages."""

from __future__ import annotations

from typing import Any

import lightning

from horovod_fftcomp.integrations.scalars import Scalars
from horovod_fftcomp.torch_distributed import DistributedCompressor, compress


class CompressGradients(lightning.Callback):
    """Callback of a ``lightning.Trainer`` that compresses the gradients of the strategy "ddp".

    ``recipe``, ``options``: as of ``torch_distributed.compress``. Checkpoints hold the residuals of
    all ranks, and training may continue from them on any number of ranks. The trainer's loggers get
    scalars named "compression/ratio" etc., every ``log_every_n_steps`` steps. ``compression``: the
    compressor, None before training begins.

    >>> trainer = lightning.Trainer(  # doctest: +SKIP
    ...     strategy="ddp", devices=2, callbacks=[CompressGradients("dither")]
    ... )
    """

    def __init__(self, recipe: str = "dither", **options: Any) -> None:
        self._recipe, self._options = recipe, options
        self._saved: dict[str, Any] = {}
        self.compression: DistributedCompressor | None = None

    def on_fit_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Compress the model, which the strategy has wrapped in DDP by now."""
        self.compression = compress(trainer.strategy.model, self._recipe, **self._options)
        if self._saved:
            self.compression.load_state_dict(self._saved)
        self._scalars = Scalars(self.compression)

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log statistics in the steps in which the trainer logs."""
        if trainer.loggers and (batch_idx + 1) % trainer.log_every_n_steps == 0:
            scalars = self._scalars.read()
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals of all ranks; called on every rank, as Lightning does."""
        return {} if self.compression is None else self.compression.gathered_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the residuals of a checkpoint for ``on_fit_start``, which comes later."""
        self._saved = state_dict
