"""Ops on NumPy arrays, by the kernels of ``cpu``."""

from horovod_fftcomp.kernels.host.coder import CoderOps
from horovod_fftcomp.kernels.host.common import CommonOps


class HostOps(CommonOps, CoderOps):
    """Ops of the host; see ``Ops``."""


HOST = HostOps()
