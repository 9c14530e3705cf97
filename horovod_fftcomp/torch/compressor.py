"""``TorchCompressor``, the compression object that Horovod's optimizer and the user call.

Horovod calls ``compress`` with a gradient, allreduces the result, and calls ``decompress`` with the
reduced value. For a compressed tensor the result is a probe, a tensor with a single 1.0, while the
exchange itself runs in parallel. The sum is multiplied by the reduced probe, which contains
Horovod's op and scaling factors.
"""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from horovod_fftcomp.adapter import handshake, process_sets
from horovod_fftcomp.adapter.compressor import Compressor
from horovod_fftcomp.adapter.connection import Connection
from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.adapter.torch_tensors import arrays
from horovod_fftcomp.adapter.torch_tensors.parameters import Model, Parameters, with_plain_names
from horovod_fftcomp.adapter.torch_tensors.replicas import OptimizedParameters
from horovod_fftcomp.engine.policy import Scheduled
from horovod_fftcomp.torch import horovod_internals
from horovod_fftcomp.torch.device import device_of
from horovod_fftcomp.torch.rounds import PendingRound
from horovod_fftcomp.torch.steps import StepDriver


class TorchCompressor(Compressor):
    """Compressor of the gradients of one optimizer; made by the factories of ``Compression``.

    Parameters
    ----------
    model
        The model whose gradients the optimizer exchanges, its ``named_parameters()``, or a list of
        its parameters.
    policy, settings
        Recipe with its schedule, and settings; made by the factory.
    """

    _parameters: OptimizedParameters
    _steps: StepDriver
    _IN_ELASTIC_JOBS = "; in elastic jobs pass compression=compression to hvd.elastic.TorchState"

    def __init__(self, model: Model, *, policy: Scheduled, settings: Settings) -> None:
        super().__init__(policy, settings)
        _check_scaler(settings.grad_scaler)
        self._set = settings.process_set or hvd.global_process_set
        parameters = Parameters(model)
        self._parameters = OptimizedParameters(parameters)
        self._tensors = parameters.specs()
        self._dtypes = [str(parameter.dtype) for parameter in parameters.tensors]
        buckets = self._buckets_of(self._tensors)
        member = self._set.included()  # on other ranks Horovod never calls the compressor
        device = device_of(parameters.tensors, buckets) if member else None
        outputs = self._open_outputs()
        name = self._new_name()
        groups = process_sets.makers(policy, settings) if buckets else dict
        watch = self._watch(name, horovod_internals.shut_down)
        self._connection = Connection(PendingRound, name, self._set, watch, groups)
        parts = self._make_parts(buckets, device, self._connection.send, name, outputs)
        self._steps = StepDriver(
            parts, parameters, self._parameters, self._join, self._slots, self._gathers, name
        )
        # Horovod calls these for each gradient: methods of the step driver, without a call between.
        self.compress = self._steps.start_gradient
        self.decompress = self._steps.finish_gradient

    def _join(self, begins: bool) -> None:
        """Connect this rank to the others; ``begins``: whether a step is about to begin."""
        if begins and handshake.size_of(self._set) != self._engine.world_size:
            self.rejoin()  # Horovod calls no ``sync`` after an elastic reset that removed ranks
        if not self._connection.is_up:
            # On a process set other than the optimizer's, the handshake would wait for ranks that
            # never call it; so it runs on the optimizer's set and compares the two.
            caller = horovod_internals.calling_optimizer(self)
            if isinstance(caller, torch.optim.Optimizer):
                self._parameters.follow(caller)
                self._warn_of_momentum(caller)
            self._connection.connect(self._facts, getattr(caller, "process_set", None))

    # User methods that take and return tensors instead of arrays.

    def residual(self, name: str) -> torch.Tensor:
        """Return the residual of the parameter ``name``: float32, in the parameter's shape."""
        return torch.from_numpy(super().residual(name))

    def _of_framework(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` with its NumPy arrays converted to tensors."""
        return arrays.to_torch(state)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned on this rank, or a gathered one."""
        super().load_state_dict(with_plain_names(arrays.to_numpy(saved)))

    def _warn_of_momentum(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn if optimizer and recipe both have momentum for the same tensors."""
        momenta: dict[str, object] = {}
        tensors = zip(self._parameters.tensors, self._slots, strict=False)  # frozen ones come last
        compressed = {id(tensor) for tensor, slot in tensors if slot is not None}
        for group in optimizer.param_groups:
            if compressed.isdisjoint(map(id, group["params"])):
                continue
            momenta |= {"momentum": group["momentum"]} if group.get("momentum") else {}
            momenta |= {"betas": betas} if any((betas := group.get("betas") or ())[:1]) else {}
        self._warn_of_two_momenta(type(optimizer).__name__, momenta)


def _check_scaler(scaler: Any) -> None:
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise TypeError(
            f"grad_scaler must have get_scale(), as torch.amp.GradScaler has; "
            f"got {type(scaler).__name__}"
        )
