"""Arrays that schemes keep of a tensor between steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.codec.transforms import Identity, Transform
from horovod_fftcomp.kernels.ops import AnyCodec
from horovod_fftcomp.types import Tensor
from horovod_fftcomp.wire.spec import spec_of

FLOAT32, UINT8, INT64 = map(np.dtype, (np.float32, np.uint8, np.int64))


class StateArray(NamedTuple):
    """Size, dtype and domain of an array of a tensor's state, which is 1-D.

    ``words``: shape and domain, by which saved states are compared; "" if they need not be.
    ``transform``: of whose coefficients a residual consists. ``is_kept``: False for an array that
    the options of the scheme leave out, and that a saved state must not have.
    """

    numel: int
    words: str = ""
    dtype: np.dtype = FLOAT32
    transform: Transform = Identity()
    is_kept: bool = True


StateArrays = Mapping[str, StateArray]  # by kind of state


def coefficients(codec: AnyCodec, tensor: Tensor, is_kept: bool) -> StateArray:
    """Return the residual of a tensor as coefficients of the codec's transform."""
    words = f"residual of {list(tensor.shape)} by {spec_of(codec.transform)}"
    dtype, numel = codec.coeffs_format(tensor.shape)
    return StateArray(numel, words, dtype, codec.transform, is_kept)
