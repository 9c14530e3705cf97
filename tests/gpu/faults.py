"""Wrong results of a GPU, emulated or not: one bit of what it has computed is another one."""

from __future__ import annotations

import numpy as np

from horovod_fftcomp import wire
from tests.gpu.emulator import DeviceArray


def _flip(array, place, bit):
    if isinstance(array, np.ndarray):
        array.view(np.dtype(f"u{array.itemsize}"))[place] ^= bit
    else:
        import torch  # only who has it has such an array

        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        array.view(kinds[array.itemsize])[place] ^= bit


def _is_there(array):
    is_hosts = isinstance(array, np.ndarray) and not isinstance(array, DeviceArray)
    return array is not None and not is_hosts


def _on_host(array):
    return np.array(array) if isinstance(array, np.ndarray) else array.cpu().numpy()


class Fault:
    """Flips a bit of what a device computes of a bucket's first tensor.

    Of a message, a sum or a state, as ``where`` says. ``device``: which; None: each. ``planted``:
    where it has.
    """

    def __init__(self, device, where):
        self.device, self.where, self.planted = device, where, []

    def around(self, exchange):
        """Return a scheme's ``exchange`` with the fault."""

        def run(scheme, tensors, grads, state, context):
            made = exchange(scheme, tensors, grads, state, context)
            on_another = context.device is None or self.device not in (None, context.device)
            if on_another or tensors[0].name == "c":
                return (yield from made)
            round_ = next(made)
            try:
                while True:
                    if self.where == "message":
                        self._in_message(round_.data)
                    round_ = made.send((yield round_))
            except StopIteration as stop:
                outcome = stop.value
            if outcome.flags.not_finite is not None:
                self._in(outcome, tensors[0].name)
            return outcome

        return run

    def _in_message(self, message):
        if message.itemsize == 1 and bytes(_on_host(message[:3])) == wire.MAGIC:
            nbytes = wire.read_header(_on_host(message)).payload_nbytes
            _flip(message, nbytes - 6, 0x10)  # of a float32 no exponent
        else:
            _flip(message, 3, 1 << 8 * message.itemsize - 4)
        self.planted.append("message")

    def _in(self, outcome, name):
        if self.where == "sum":
            _flip(outcome.sums[0], 7, 1 << 29)
            self.planted.append("sum")
        for kind, arrays in outcome.state.items() if self.where == "state" else ():
            if _is_there(arrays.get(name)):
                _flip(arrays[name], 11, 1 << 29)
                self.planted.append(kind)
