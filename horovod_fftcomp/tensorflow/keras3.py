"""Keras 3 with Horovod: a distributed optimizer and a callback that broadcasts variables.

Keras 3 never calls the reduction of Horovod 0.28.1's own ``DistributedOptimizer``, so with that the
ranks would train different models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras

from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.tensorflow import horovod_internals
from horovod_fftcomp.tensorflow.compressor import TensorFlowCompressor


def DistributedOptimizer(optimizer: Any, compression: TensorFlowCompressor) -> Any:  # noqa: N802
    """Return ``optimizer``, of Keras 3, which from now on averages gradients over ranks.

    It keeps its variables and options. Its new class has the name and configuration of the one
    before, so that a saved model loads without this package. For mixed precision with float16 pass
    a ``LossScaleOptimizer``, and make the compressor with
    ``grad_scaler=lambda: optimizer.dynamic_scale.value``. Gradients are reduced in every call of
    ``apply``, before accumulation.
    """
    kind = type(optimizer)

    class Distributed(kind):  # type: ignore[misc,valid-type]
        def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
            variables = trainable_variables
            variables = self._trainable_variables if variables is None else list(variables)
            _check_caller(self)
            if not self.built:
                self.build(variables)  # makes the loss scale, which the exchange reads
            means = compression.reduced(grads, variables)
            compression._check_optimizer(self)
            return super().apply(means, variables)

    Distributed.__name__, Distributed.__qualname__ = kind.__name__, kind.__qualname__
    Distributed.__module__ = kind.__module__
    object.__setattr__(optimizer, "__class__", Distributed)  # Keras tracks what is set otherwise
    return optimizer


def _check_caller(optimizer: Any) -> None:
    """Raise UnsupportedError inside a LossScaleOptimizer, or in a model compiled by XLA."""
    for owner in horovod_internals.calling_objects():
        if isinstance(owner, keras.optimizers.LossScaleOptimizer) and owner is not optimizer:
            raise UnsupportedError(
                "a LossScaleOptimizer around the distributed optimizer would skip steps on some "
                "ranks only; put it inside: DistributedOptimizer(LossScaleOptimizer(optimizer))"
            )
        if isinstance(owner, keras.Model) and owner.jit_compile is True:
            raise UnsupportedError(
                "compression calls Python, which XLA does not support: use "
                "model.compile(..., jit_compile=False)"
            )


class BroadcastCallback(keras.callbacks.Callback):
    """Keras callback that broadcasts the first rank's model and optimizer to ``process_set``.

    It broadcasts once, before the first step, or after it for models built by their first batch.
    """

    def __init__(self, process_set: Any = None) -> None:
        super().__init__()
        self._set = process_set or hvd.global_process_set
        self._is_done = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast if the model is built."""
        if self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast if the first batch has built the model."""
        self._broadcast()

    def _broadcast(self) -> None:
        if self._is_done:
            return
        self._is_done = True
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        variables = [v.value for v in (*self.model.variables, *optimizer.variables)]
        if self._set.size() > 1:
            root = self._set.ranks[0]
            hvd.broadcast_variables(variables, root_rank=root, process_set=self._set)
