"""Ops on the arrays of a device, by the kernels in ``src``, without host synchronisation."""

from horovod_fftcomp.kernels.cuda.ops.coder import CoderOps
from horovod_fftcomp.kernels.cuda.ops.common_index import CommonIndexOps
from horovod_fftcomp.kernels.cuda.ops.low_rank import LowRankOps
from horovod_fftcomp.kernels.cuda.ops.momentum import MomentumOps


class CudaOps(CoderOps, CommonIndexOps, LowRankOps, MomentumOps):
    """Ops of a device; see ``Ops``."""
