"""Horovod's elastic state of a Keras model with a compressor in it: commit, restore, go on."""

from __future__ import annotations

from typing import Any

from horovod.tensorflow import elastic

from horovod_fftcomp.tensorflow.compressor import TensorFlowCompressor


class TensorFlowKerasState(elastic.TensorFlowKerasState):
    """As Horovod's, but each rank keeps its own residuals.

    Horovod's own would give all ranks those of the first. ``sync`` tells which were lost with
    their hosts.
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
            compression.bind(model)  # all ranks alike, also those that have made no step
        self.compression = compression
        self._saved_compression: dict[str, Any] | None = None
        super().__init__(model, optimizer, backend, **kwargs)
        self._save_compression()

    def save(self) -> None:
        """Take a copy of model, optimizer and this rank's residuals."""
        super().save()
        self._save_compression()

    def restore(self) -> None:
        """Go back to the last copy, whatever number this rank has now."""
        super().restore()
        if self.compression is not None and self._saved_compression is not None:
            place = self.compression.place()
            self.compression.load_state_dict({**self._saved_compression, **place})

    def sync(self) -> None:
        """Go on with the ranks that are there now."""
        super().sync()
        if self.compression is not None:
            self.compression.rejoin()
        self._save_compression()

    def _save_compression(self) -> None:
        if self.compression is not None:
            self._saved_compression = self.compression.state_dict()
