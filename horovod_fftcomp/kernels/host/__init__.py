"""Ops on NumPy arrays, by the kernels of ``cpu``."""

from horovod_fftcomp.kernels.host.common import CommonOps


class HostOps(CommonOps):
    """Ops of the host; see ``Ops``."""


HOST = HostOps()
