"""Ops on the arrays of a device, by the kernels in ``src``, without host synchronisation."""

from horovod_fftcomp.kernels.cuda.ops.coder import CoderOps
from horovod_fftcomp.kernels.cuda.ops.low_rank import LowRankOps


class CudaOps(CoderOps, LowRankOps):
    """Ops of a device; see ``Ops``."""
