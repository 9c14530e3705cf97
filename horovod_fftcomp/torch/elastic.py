"""Horovod's elastic ``TorchState`` with a compressor in it: commit, restore, go on.

``hvd.elastic.TorchState(model=..., optimizer=..., compression=compression)`` would otherwise
broadcast the first rank's residual to all. Importing ``horovod_fftcomp.torch`` registers this.
"""

from __future__ import annotations

from horovod.torch.elastic import state as elastic

from horovod_fftcomp.torch import horovod_internals
from horovod_fftcomp.torch.compressor import TorchCompressor


class CompressorStateHandler(elastic.StateHandler):
    """Saves and restores each rank's own residuals; tells which were lost with their hosts."""

    def __init__(self, value: TorchCompressor) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """Take a copy of this rank's state."""
        self._saved = self.value.state_dict()

    def restore(self) -> None:
        """Go back to the last copy, whatever number this rank has now."""
        self.value.load_state_dict({**self._saved, **self.value.place()})

    def sync(self) -> None:
        """Go on with the ranks that are there now."""
        self.value.rejoin()
        self.save()


def register() -> None:
    """Tell Horovod's elastic state how to treat a compressor; once is enough, more do no harm."""
    horovod_internals.register_state_handler(TorchCompressor, CompressorStateHandler)
