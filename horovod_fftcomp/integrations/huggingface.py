"""Hugging Face's Trainer: a callback that compresses the gradients which its DDP averages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from horovod_fftcomp import torch_distributed
from horovod_fftcomp.errors import warn
from horovod_fftcomp.integrations.scalars import Scalars

FILE, TRAINER_STATE = "gradient_compression.pt", "trainer_state.json"  # in each checkpoint


def compress(
    trainer: Trainer,
    recipe: str = "dither",
    *,
    resume_from: str | os.PathLike[str] | bool = True,
    **options: Any,
) -> CompressGradients:
    """Compress the gradients of ``trainer`` from its next ``train()`` on; return the callback.

    ``recipe``, ``options``: as of ``torch_distributed.compress``. Each checkpoint of the trainer
    gets a file, gradient_compression.pt, with the residuals of all ranks.
    ``train(resume_from_checkpoint=...)`` loads it, on any number of ranks. ``resume_from``: the
    checkpoint's folder, if it is not one of ``args.output_dir``; False: begin without residuals.
    Logs get scalars named "compression/ratio" etc.

    >>> callback = compress(trainer, "dither", ratio=40); trainer.train()  # doctest: +SKIP
    """
    callback = CompressGradients(trainer, recipe, resume_from, options)
    # Before those that report logs, as TensorBoard's.
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback


class CompressGradients(TrainerCallback):
    """Callback that ``compress`` adds to a trainer.

    ``compression``: the compressor; None before training begins, and with one process.
    """

    def __init__(
        self,
        trainer: Trainer,
        recipe: str,
        resume_from: str | os.PathLike[str] | bool,
        options: dict[str, Any],
    ) -> None:
        self._trainer, self._recipe, self._options = trainer, recipe, options
        self._resume_from, self._model = resume_from, None
        self.compression: torch_distributed.DistributedCompressor | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Compress the model, which the trainer has wrapped in DDP by now."""
        _warn_of_clipping(args, given["optimizer"])
        if args.world_size == 1:
            if Path(_folder(args, state), FILE).exists():
                warn(
                    "with one process nothing is compressed: the residuals of the checkpoint are "
                    "lost, and new checkpoints have none"
                )
            return
        trainer = self._trainer
        # Accelerate has compiled the wrapped model, if that was asked for.
        model = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)
        if model is not self._model:  # which a second ``train()`` does not wrap anew
            scaler = getattr(trainer.accelerator, "scaler", None)
            options = {"grad_scaler": scaler, **self._options}
            self.compression = torch_distributed.compress(model, self._recipe, **options)
            self._model, self._scalars = model, Scalars(self.compression)
        assert self.compression is not None
        if state.global_step and self._resume_from is not False:
            self.compression.load_state_dict(self._saved(args, state))

    def _saved(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
        """Return the state in the checkpoint from which training continues."""
        given = self._resume_from
        folder = Path(_folder(args, state) if isinstance(given, bool) else given)
        path = folder / FILE
        if not path.exists():
            raise FileNotFoundError(
                f"{path} does not exist, so the residuals are unknown; give the folder of the "
                "checkpoint, compress(trainer, resume_from=...), or resume_from=False if it was "
                "made without compression"
            )
        # A folder of this name may also belong to another training than the one that continues.
        if (
            TrainerState.load_from_json(str(folder / TRAINER_STATE)).log_history
            != state.log_history
        ):
            raise ValueError(
                f"{folder} is of another training than the one that continues; give the folder of "
                "its checkpoint, compress(trainer, resume_from=...)"
            )
        return torch.load(path, weights_only=True, map_location="cpu")

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Save the residuals of all ranks in the checkpoint's folder."""
        if self.compression is None or state.is_hyper_param_search:  # which continues from none
            return
        saved = self.compression.gathered_state_dict()
        if args.should_save:
            torch.save(saved, Path(_folder(args, state), FILE))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **given: Any,
    ) -> None:
        """Add statistics to the logs of training steps."""
        if self.compression is not None and logs is not None and "loss" in logs:
            logs.update(self._scalars.read())


def _warn_of_clipping(args: TrainingArguments, optimizer: Any) -> None:
    """Warn if the trainer clips gradients before an optimizer that clips them itself."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's
    if isinstance(optimizer, torch_distributed.Adam) and args.max_grad_norm:
        warn(
            f"the trainer clips to max_grad_norm={args.max_grad_norm} before "
            f"{type(optimizer).__name__} takes second moments, which are to be of gradients that "
            "are not clipped: give TrainingArguments(max_grad_norm=0), and max_norm to the "
            "optimizer"
        )


def _folder(args: TrainingArguments, state: TrainerState) -> str:
    return str(Path(args.output_dir, f"checkpoint-{state.global_step}"))
