"""Private parts of ``horovod.torch`` that this adapter relies on, one per function.

``tests/test_horovod_internals.py`` tests each function and fails if Horovod has changed.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.elastic import state as elastic

from horovod_fftcomp.adapter.horovod_internals import calling_frames, check_version

check_version()


def calling_optimizer(compression: object) -> Any | None:
    """Return the object on the call stack that uses ``compression``: the optimizer; None without.

    Horovod does not pass it to the hook. Relies on ``_DistributedOptimizer._compression``, and on
    its methods calling ``compress`` with the optimizer as ``self``. Its ``process_set`` is public.
    """
    for frame in calling_frames():
        owner = frame.f_locals.get("self")
        if getattr(owner, "_compression", None) is compression:
            return owner
    return None


def parameter_of_hook() -> Any | None:
    """Return the parameter of the Horovod hook on the call stack; None without one.

    A sparse gradient that Horovod has made dense is a copy, and only the hook knows whose. Relies
    on the local variable ``p`` of ``_DistributedOptimizer._allreduce_grad_async``.
    """
    for frame in calling_frames():
        if frame.f_code.co_name == "_allreduce_grad_async":
            return frame.f_locals.get("p")
    return None


def shut_down() -> None:
    """Shut Horovod down without dropping the handles of operations that other threads wait for.

    ``hvd.shutdown`` of ``horovod.torch`` would drop them first. Relies on ``mpi_ops._basics``.
    """
    mpi_ops._basics.shutdown()


def register_state_handler(kind: type, handler: type) -> None:
    """Register ``handler`` for objects of ``kind`` with ``hvd.elastic.TorchState``, once.

    Relies on the registry of ``horovod.torch.elastic.state``, whose first match counts.
    """
    registry = elastic.get_handler_registry()
    if (kind, handler) not in registry:
        elastic.set_handler_registry([*registry, (kind, handler)])


def wait_for_horovod(output: torch.Tensor) -> None:
    """Order PyTorch's current stream after the operation of ``output``, which Horovod has finished.

    Relies on Horovod's threads using the default stream only: they allocate outputs there and, with
    HOROVOD_ENABLE_ASYNC_COMPLETION, wait for operations there, which otherwise have ended by now.
    """
    current = torch.cuda.current_stream(output.device)
    default = torch.cuda.default_stream(output.device)
    if current != default:
        if os.environ.get("HOROVOD_ENABLE_ASYNC_COMPLETION", "0") != "0":
            current.wait_stream(default)
        if not output.is_sparse:  # its memory is not reused before this stream has read it
            output.record_stream(current)
