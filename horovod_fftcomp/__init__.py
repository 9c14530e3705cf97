"""Gradient compression for data-parallel training: stock Horovod and ``torch.distributed``.

``horovod_fftcomp.torch``, ``horovod_fftcomp.torch_distributed`` and ``horovod_fftcomp.tensorflow``
are the adapters, which import their framework, as do ``horovod_fftcomp.adapter.torch_tensors`` and
``horovod_fftcomp.integrations``; importing ``horovod_fftcomp`` itself loads NumPy only.
"""

from horovod_fftcomp import schedules
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.sparsifiers import formula_threshold
from horovod_fftcomp.errors import ConfigMismatchError, FFTCompError, PayloadError, UnsupportedError
from horovod_fftcomp.kernels.threads import get_num_threads, set_num_threads
from horovod_fftcomp.monitor.density_recovery import Recover
from horovod_fftcomp.recipes import RECIPES, get_codec, get_scheme, list_compressors
from horovod_fftcomp.schemes import Scheme
from horovod_fftcomp.simulation import simulate
from horovod_fftcomp.wire.version import __version__

__all__ = [
    "RECIPES",
    "Codec",
    "ConfigMismatchError",
    "FFTCompError",
    "PayloadError",
    "Recover",
    "Scheme",
    "UnsupportedError",
    "__version__",
    "formula_threshold",
    "get_codec",
    "get_num_threads",
    "get_scheme",
    "list_compressors",
    "schedules",
    "set_num_threads",
    "simulate",
]
