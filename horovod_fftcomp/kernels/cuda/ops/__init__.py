"""Ops on the arrays of a device, by the kernels in ``src``, without host synchronisation."""

from horovod_fftcomp.kernels.cuda.ops.coder import CudaCoderOps
from horovod_fftcomp.kernels.cuda.ops.common_index import CudaCommonIndexOps
from horovod_fftcomp.kernels.cuda.ops.low_rank import CudaLowRankOps
from horovod_fftcomp.kernels.cuda.ops.momentum import CudaMomentumOps


class CudaOps(CudaCoderOps, CudaCommonIndexOps, CudaLowRankOps, CudaMomentumOps):
    """Ops of a device; see ``Ops``."""
