"""Ops on NumPy arrays, by the kernels of ``cpu``."""

from horovod_fftcomp.kernels.host.coder import HostCoderOps
from horovod_fftcomp.kernels.host.common_index import HostCommonIndexOps
from horovod_fftcomp.kernels.host.low_rank import HostLowRankOps
from horovod_fftcomp.kernels.host.momentum import HostMomentumOps


class HostOps(HostCoderOps, HostCommonIndexOps, HostLowRankOps, HostMomentumOps):
    """Ops of the host; see ``Ops``."""


HOST = HostOps()
