"""Encodes with a selection that is planted wrong, between pages that end the process if touched.

``python -m tests.gpu.overflow``: each recipe with positions prints a line once nothing was written
outside its arrays and all ranks would find the payload corrupt.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from horovod_fftcomp import Codec, PayloadError
from horovod_fftcomp.kernels.cuda.decoder import CORRUPT
from horovod_fftcomp.kernels.cuda.encoder import Encoder
from tests.contracts import CODECS, HOST_ONLY, make_codec
from tests.gpu.emulator import DeviceArray, Emulator, decoder_for

SHAPE = (231, 173)  # ten tiles, the last not full
PAGE = mmap.PAGESIZE
NO_ACCESS = 0
_libc = ctypes.CDLL(None, use_errno=True)


class PagedEmulator(Emulator):
    """Emulator whose arrays end where a page begins that kills who touches it."""

    def empty(self, n, dtype=np.float32):
        nbytes = n * np.dtype(dtype).itemsize
        room = -(-max(nbytes, 1) // PAGE) * PAGE
        whole = np.frombuffer(mmap.mmap(-1, room + 2 * PAGE), np.uint8).view(DeviceArray)
        for guard in (0, PAGE + room):
            assert _libc.mprotect(ctypes.c_void_p(whole.ctypes.data + guard), PAGE, NO_ACCESS) == 0
        begin = PAGE + (room - nbytes) // 16 * 16  # kernels load at most 16 bytes at a time
        return whole[begin : begin + nbytes].view(dtype)


class ChoosesAll(PagedEmulator):
    """Emulator on which all elements, and some beyond the end, count as chosen."""

    def functions(self, source, names):
        found = super().functions(source, names)
        for name in found:
            if name.startswith("choose<") or (name.startswith("narrow") and name.endswith("3>")):
                found[name] = self._wrong(found[name], 5 if name.startswith("narrow") else 4)
        return found

    def _wrong(self, kernel, counts_at):
        """Return a kernel that then marks all; ``counts_at``: the place of the tiles' counts."""

        def launch(grid, threads, arguments, shared_nbytes):
            kernel(grid, threads, arguments, shared_nbytes)
            arguments[3].fill(0xFFFFFFFF)  # of elements above the threshold
            counts = arguments[counts_at].view(np.uint32).reshape(-1, 4)
            of_tile = 32 * arguments[3].size // len(counts)
            counts[:, 0], counts[:, 1], counts[:, 3] = of_tile, 0, 0
            counts[:, 2] = of_tile * np.arange(len(counts))

        return launch


def selecting():
    """Return the keys of the codecs that choose elements on a GPU."""
    keys = [key for key, (recipe, _) in CODECS.items() if recipe not in HOST_ONLY]
    return [key for key in keys if isinstance(make_codec(key), Codec)]


def encoded(device, codec, grad):
    """Return (encoder, message) of one tensor with a residual."""
    encoder = Encoder(device, [codec], [grad.shape])
    dtype, n = encoder.coeffs_formats[0]
    arrays = device.upload(grad), device.zeros(n, dtype), device.empty(n, dtype)
    keys = [7] if codec.draws else None
    made = encoder.encode(*([array] for array in arrays), keys=keys)
    return encoder, made.message[: encoder.message_nbytes]


def check(key):
    """Encode by a wrong selection; all that shows is a payload that nobody takes for sound."""
    codec = make_codec(key)
    grad = np.random.default_rng(1).standard_t(3, SHAPE).astype(np.float32)
    encoder, message = encoded(ChoosesAll(), codec, grad)
    if codec.has_fixed_size and encoder.rows[0]["k"] == encoder.rows[0]["n"]:
        return  # all are to be chosen
    device = PagedEmulator()
    decoder = decoder_for(device, codec, [SHAPE], encoder, 2)
    total = device.empty(grad.size)
    both = device.upload(np.tile(message, 2))
    if codec.has_fixed_size:
        not_finite, found = decoder.decode(both, [total])
        assert found.reshape(2, -1, 4)[:, 0, 1].tolist() == [CORRUPT, CORRUPT]
        assert not_finite[0] == 1
        assert np.isnan(total).all()
    with pytest.raises(PayloadError):
        codec.decode(np.array(message))


if __name__ == "__main__":
    for each in selecting():
        check(each)
        print("nothing was overwritten:", each, flush=True)
