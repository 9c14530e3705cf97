"""Adapter for ``horovod.torch``: pass ``Compression.fft(model)`` as ``compression=``."""

try:
    import horovod.torch  # noqa: F401 (its absence is told here, before other modules import it)
except ImportError as error:
    raise ImportError(
        f"horovod_fftcomp.torch needs Horovod for PyTorch ({error}); under torchrun, without "
        "Horovod, import horovod_fftcomp.torch_distributed instead"
    ) from error

from horovod_fftcomp.adapter.torch_tensors.optimizers import Adam, AdamW
from horovod_fftcomp.adapter.torch_tensors.simulated_ranks import SimulatedLearners
from horovod_fftcomp.torch import elastic
from horovod_fftcomp.torch.compression import Compression
from horovod_fftcomp.torch.flops import rules_by_flops
from horovod_fftcomp.torch.local_steps import LocalSteps

__all__ = ["Adam", "AdamW", "Compression", "LocalSteps", "SimulatedLearners", "rules_by_flops"]

elastic.register()
