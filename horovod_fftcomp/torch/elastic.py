"""Support of compressors in ``hvd.elastic.TorchState``: save, restore and synchronize.

Without it ``hvd.elastic.TorchState(model=..., optimizer=..., compression=compression)`` would
broadcast the first rank's residuals to all. Importing ``horovod_fftcomp.torch`` registers it.
"""

from __future__ import annotations

from horovod.torch.elastic import state as elastic

from horovod_fftcomp.torch import horovod_internals
from horovod_fftcomp.torch.compressor import TorchCompressor


class CompressorStateHandler(elastic.StateHandler):
    """State handler that saves and restores each rank's own residuals."""

    def __init__(self, value: TorchCompressor) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """Copy this rank's state."""
        self._saved = self.value.state_dict()

    def restore(self) -> None:
        """Restore the last copy, even if this rank has another number now."""
        self.value.load_state_dict({**self._saved, **self.value.place()})

    def sync(self) -> None:
        """Continue with the present ranks after a reset; warn of lost residuals."""
        self.value.rejoin()
        self.save()


def register() -> None:
    """Register the handler of compressors with Horovod; repeated calls have no effect."""
    horovod_internals.register_state_handler(TorchCompressor, CompressorStateHandler)
