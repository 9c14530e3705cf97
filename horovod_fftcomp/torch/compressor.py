"""``TorchCompressor``, the compression object that Horovod's optimizer and the user call.

Horovod calls ``compress`` with a gradient, allreduces the result, and calls ``decompress`` with the
reduced value. For a compressed tensor the result is a probe, a tensor with a single 1.0, while the
exchange itself runs in parallel. The sum is multiplied by the reduced probe, which contains
Horovod's op and scaling factors.
"""

from __future__ import annotations

import horovod.torch as hvd
import torch

from horovod_fftcomp.adapter import handshake, process_sets
from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.adapter.torch_tensors.compressor import TensorCompressor
from horovod_fftcomp.adapter.torch_tensors.device import device_of
from horovod_fftcomp.adapter.torch_tensors.optimizers import note_exchanged
from horovod_fftcomp.adapter.torch_tensors.parameters import Model, Parameters
from horovod_fftcomp.adapter.torch_tensors.replicas import OptimizedParameters
from horovod_fftcomp.engine.policy import Scheduled
from horovod_fftcomp.torch import horovod_internals
from horovod_fftcomp.torch.rounds import HorovodRound
from horovod_fftcomp.torch.steps import TorchStepDriver


class TorchCompressor(TensorCompressor):
    """Compressor of the gradients of one optimizer; made by the factories of ``Compression``.

    Parameters
    ----------
    model
        The model whose gradients the optimizer exchanges, its ``named_parameters()``, or a list of
        its parameters.
    policy, settings
        Recipe with its schedule, and settings; made by the factory.
    """

    driver: TorchStepDriver
    _IN_ELASTIC_JOBS = "; in elastic jobs pass compression=compression to hvd.elastic.TorchState"

    def __init__(self, model: Model, *, policy: Scheduled, settings: Settings) -> None:
        super().__init__(policy, settings)
        self._set = settings.process_set or hvd.global_process_set
        policy = self._on_nodes(lambda: process_sets.ranks_per_node(settings))
        parameters = Parameters(model)
        self._parameters = OptimizedParameters(parameters)
        self._tensors = parameters.specs()
        self._dtypes = [str(parameter.dtype) for parameter in parameters.tensors]
        buckets = self._buckets_of(self._tensors)
        member = self._set.included()  # on other ranks Horovod never calls the compressor
        device = device_of(parameters.tensors, buckets) if member else None
        groups = process_sets.makers(policy, settings) if buckets else dict
        self._make_connection(HorovodRound, horovod_internals.shut_down, groups)
        parts = self._make_parts(buckets, device, self.connection.send)
        self.driver = TorchStepDriver(parts, parameters, self._parameters, self._join)
        note_exchanged(parameters.tensors, parts.slots, self.engine)
        if member:
            self._await_optimizer()
        # Horovod calls these for each gradient: methods of the step driver, without a call between.
        self.compress = self.driver.start_gradient
        self.decompress = self.driver.finish_gradient

    def _join(self, begins: bool) -> None:
        """Connect this rank to the others; ``begins``: whether a step is about to begin."""
        if begins and handshake.size_of(self._set) != self.engine.world_size:
            self.rejoin()  # Horovod calls no ``sync`` after an elastic reset that removed ranks
        if not self.connection.is_up:
            # On a process set other than the optimizer's, the handshake would wait for ranks that
            # never call it; so it runs on the optimizer's set and compares the two.
            caller = horovod_internals.calling_optimizer(self)
            if isinstance(caller, torch.optim.Optimizer):
                self._parameters.follow(caller)
                self._warn_of(caller)
            self.connection.connect(getattr(caller, "process_set", None))
