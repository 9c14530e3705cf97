"""Ops on the arrays of a device, by the kernels in ``src``, without host synchronisation."""

from horovod_fftcomp.kernels.cuda.ops.coder import CoderOps
from horovod_fftcomp.kernels.cuda.ops.common import CommonOps


class CudaOps(CoderOps, CommonOps):
    """Ops of a device; see ``Ops``."""
