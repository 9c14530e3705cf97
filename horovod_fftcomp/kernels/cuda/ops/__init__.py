"""Ops on the arrays of a device, by the kernels in ``src``, without host synchronisation."""

from horovod_fftcomp.kernels.cuda.ops.coder import CoderOps
from horovod_fftcomp.kernels.cuda.ops.low_rank import LowRankOps
from horovod_fftcomp.kernels.cuda.ops.momentum import MomentumOps


class CudaOps(CoderOps, LowRankOps, MomentumOps):
    """Ops of a device; see ``Ops``."""
