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
    compressor; None before training begins, and with one process. A checkpoint that was made
    without this callback is continued without residuals.

    >>> trainer = lightning.Trainer(  # doctest: +SKIP
    ...     strategy="ddp", devices=2, callbacks=[CompressGradients("dither")]
    ... )
    """

    def __init__(self, recipe: str = "dither", **options: Any) -> None:
        self._recipe, self._options = recipe, options
        self._stage, self._n_batches = "", 0
        self._saved: dict[str, Any] = {}
        self._scalars: Scalars | None = None
        self.compression: DistributedCompressor | None = None

    def setup(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str
    ) -> None:
        """Begin a stage, before Lightning loads a checkpoint for it."""
        self._stage = stage
        if stage == "fit":
            self._saved, self.compression, self._n_batches = {}, None, 0

    def on_fit_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Compress the model, which the strategy has wrapped in DDP by now."""
        if trainer.world_size == 1:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        options = {"grad_scaler": scaler, **self._options}
        self.compression = compress(trainer.strategy.model, self._recipe, **options)
        self._scalars = Scalars(self.compression)
        if self._saved:
            self.compression.load_state_dict(self._saved)

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log statistics every ``log_every_n_steps`` batches."""
        self._n_batches += 1
        every = trainer.log_every_n_steps
        if self._scalars is not None and trainer.loggers and every:
            if self._n_batches % every == 0:
                scalars = self._scalars.read()
                for logger in trainer.loggers:
                    logger.log_metrics(scalars, step=trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals of all ranks; called on every rank, as Lightning does."""
        return {} if self.compression is None else self.compression.gathered_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the residuals of a checkpoint, or keep them for ``on_fit_start``, if that follows.

        Lightning calls this before other stages than "fit" as well, which need none.
        """
        if self._stage == "fit" and self.compression is not None:
            self.compression.load_state_dict(state_dict)
        elif self._stage == "fit":
            self._saved = state_dict
