"""Ops on NumPy arrays, by the kernels of ``cpu``."""

from horovod_fftcomp.kernels.host.coder import CoderOps
from horovod_fftcomp.kernels.host.common_index import CommonIndexOps
from horovod_fftcomp.kernels.host.low_rank import LowRankOps
from horovod_fftcomp.kernels.host.momentum import MomentumOps


class HostOps(CoderOps, CommonIndexOps, LowRankOps, MomentumOps):
    """Ops of the host; see ``Ops``."""


HOST = HostOps()
