"""Gradients to measure compressors with: recorded in files, or synthetic.

A folder holds files ``<step>.npz`` of a training, with tensor names as keys. A file is ``.npy``
(one tensor) or ``.npz``: keys ``<step>/<tensor name>`` hold the steps of a training; under any
other keys each array is a tensor of one step.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.types import Array

_KEY = re.compile(r"(\d+)/(.+)", re.S)
_ROW = 1024  # elements that share a scale, as the weights of one output do
_DEGREES = 3.0  # of freedom of Student's t: the fourth moment diverges, as it does in trainings
_SPREAD = 1.0  # standard deviation of the logarithm of the rows' scales


class History(NamedTuple):
    """Gradients of one tensor: ``steps`` are C-contiguous float32 arrays of one shape."""

    name: str
    steps: list[Array]


def synthetic(numel: int, n_steps: int = 2, seed: int = 0) -> History:
    """Return heavy-tailed gradients of ``numel`` elements, float32 1-D, a function of ``seed``.

    Student's t with 3 degrees of freedom, scaled in rows of 1024 elements by a log-normal factor
    that is the same in every step. Elements are independent, so transforms gain nothing; gradients
    of real nets are smoother.
    """
    rng = np.random.default_rng(seed)
    n_rows = -(-numel // _ROW)
    steps = [np.empty(n_rows * _ROW, np.float32) for _ in range(n_steps)]  # or MemoryError, at once
    scales = np.exp(_SPREAD * rng.standard_normal(n_rows)).astype(np.float32)
    for values in steps:
        rng.standard_gamma(_DEGREES / 2, dtype=np.float32, out=values)
        np.maximum(values, np.finfo(np.float32).tiny, out=values)
        np.sqrt(np.float32(_DEGREES / 2) / values, out=values)
        values *= rng.standard_normal(n_rows * _ROW, np.float32)
        rows = values.reshape(n_rows, _ROW)
        rows *= scales[:, None]
    return History(f"{numel:,} elements", [values[:numel] for values in steps])


def read(path: Path) -> list[History]:
    """Return the tensors in a folder or a ``.npy`` or ``.npz`` file, steps in ascending order.

    Raises OSError if the file does not exist, and ValueError for a file that is not NumPy's or
    holds no array, and for arrays that are not floating point, are empty, contain NaN or Inf, or
    are steps of one tensor in several shapes. The message names the array.
    """
    arrays = _load(path)
    if not arrays:
        raise ValueError(f"{path} holds no array; {_REMEDY}")
    keys = [(key, _KEY.fullmatch(key)) for key in arrays]
    if all(found for _, found in keys):
        order = sorted(keys, key=lambda pair: int(pair[1][1]))  # type: ignore[index]
        named = [(found[2], key) for key, found in order if found]
    else:
        named = [(key, key) for key in arrays]
    histories: dict[str, History] = {}
    for name, key in named:
        steps = histories.setdefault(name, History(name, [])).steps
        grad = _checked(arrays[key], f"array {key!r} of {path}")
        if steps and steps[0].shape != grad.shape:
            raise ValueError(
                f"array {key!r} of {path} has shape {grad.shape}, but an earlier step of this "
                f"tensor has {steps[0].shape}; give tensors of other shapes other names"
            )
        steps.append(grad)
    return list(histories.values())


_REMEDY = 'write one by numpy.savez(path, **{"0/layer.weight": gradient})'


def _load(path: Path) -> dict[str, Array]:
    if path.is_dir():
        files = [file for file in path.glob("*.npz") if file.stem.isdecimal()]
        return {f"{file.stem}/{name}": grad for file in files for name, grad in _load(file).items()}
    try:
        with path.open("rb") as file:  # np.load(path) would leave a broken file open
            loaded = np.load(file, allow_pickle=False)
            return {path.stem: loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is not a .npy or .npz file of numbers ({error}); {_REMEDY}"
        ) from error


def _checked(array: Array, where: str) -> Array:
    if array.dtype.kind != "f":
        raise ValueError(f"{where} has dtype {array.dtype}; expected a floating-point dtype")
    if array.size == 0:
        raise ValueError(f"{where} has shape {array.shape}, which has no elements; remove it")
    with np.errstate(over="ignore"):
        grad = np.ascontiguousarray(array, np.float32).reshape(array.shape)
    n_bad = grad.size - int(np.count_nonzero(np.isfinite(grad)))
    if n_bad:
        raise ValueError(
            f"{where} has {n_bad:,} of {grad.size:,} elements that are NaN, Inf or beyond float32; "
            "training skips such a step: remove it"
        )
    return grad
