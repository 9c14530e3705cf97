"""Elastic state of a Keras model with a compressor: save, restore and synchronize."""

from __future__ import annotations

from typing import Any

from horovod.tensorflow import elastic

from horovod_fftcomp.tensorflow.compressor import TensorFlowCompressor


class TensorFlowKerasState(elastic.TensorFlowKerasState):
    """Horovod's ``TensorFlowKerasState`` with a compressor, whose residuals each rank keeps.

    Horovod's own state would broadcast the first rank's residuals to all. ``sync`` warns of
    residuals that were lost with their hosts.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        compression: TensorFlowCompressor | None = None,
        backend: Any = None,
        **kwargs: Any,
    ) -> None:
        if compression is not None:
            compression.bind(model)  # on all ranks, including those without a step so far
        self.compression = compression
        self._saved_compression: dict[str, Any] | None = None
        super().__init__(model, optimizer, backend, **kwargs)
        self._save_compression()

    def save(self) -> None:
        """Copy the model, the optimizer and this rank's residuals."""
        super().save()
        self._save_compression()

    def restore(self) -> None:
        """Restore the last copy, even if this rank has another number now."""
        super().restore()
        if self.compression is not None and self._saved_compression is not None:
            place = self.compression.place()
            self.compression.load_state_dict({**self._saved_compression, **place})

    def sync(self) -> None:
        """Continue with the present ranks after a reset; warn of lost residuals."""
        super().sync()
        if self.compression is not None:
            self.compression.rejoin()
        self._save_compression()

    def _save_compression(self) -> None:
        if self.compression is not None:
            self._saved_compression = self.compression.state_dict()
