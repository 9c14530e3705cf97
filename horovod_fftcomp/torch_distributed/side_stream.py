"""Stream of a GPU on which a compressor works beside the backward pass."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


class SideStream:
    """CUDA stream of a compressor on ``place``; without a GPU all methods do nothing.

    Two threads launch a step's work on it, one after the other: the compressor's until the last
    bucket, and then the one that ends the backward pass. So memory that one of them has freed is
    reused in the order of the stream.
    """

    def __init__(self, place: torch.device) -> None:
        # High priority: few kernels, for which the network waits, among many of the backward pass.
        self._stream = torch.cuda.Stream(place, priority=-1) if place.type == "cuda" else None

    @property
    def is_used(self) -> bool:
        """Whether the compressor works on a GPU."""
        return self._stream is not None

    def enter(self) -> None:
        """Make the GPU the current device of the calling thread; else that is the first GPU."""
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)

    def mark(self) -> torch.cuda.Event | None:
        """Return an event after all that was launched on the current stream."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._stream.device).record_event()

    def use(self, after: torch.cuda.Event | None = None) -> AbstractContextManager[object]:
        """Make it the current stream of a ``with`` block, from the event ``after`` on."""
        if self._stream is None:
            return contextlib.nullcontext()
        if after is not None:
            self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Let the current stream wait for all that was launched on this one."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
