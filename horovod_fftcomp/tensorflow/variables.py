"""Variables of a compressor's model, in an order that is equal on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.schemes import Tensor


class Variables:
    """Names and variables of a model, numbered in their order.

    ``pairs``: (name, variable); of a Keras 3 variable, the TensorFlow variable inside is used.
    Raises ValueError if there are none or names are not unique, TypeError for anything else than
    variables, UnsupportedError for variables that are not floating point.
    """

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        if not pairs:
            raise ValueError(
                "model has no trainable variables; build it first, and pass the model whose "
                "gradients are exchanged, its trainable_variables or (name, variable) pairs"
            )
        counts = Counter(name for name, _ in pairs)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise ValueError(
                f"names of variables must be unique, but these come twice: {', '.join(twice[:8])}; "
                "pass (name, variable) pairs"
            )
        self.names = [name for name, _ in pairs]
        self.variables = [_inner(name, variable) for name, variable in pairs]
        self._numbers = {id(variable): n for n, variable in enumerate(self.variables)}

    def specs(self) -> list[Tensor]:
        """Return names and shapes of the variables."""
        return [
            Tensor(name, tuple(variable.shape.as_list()))
            for name, variable in zip(self.names, self.variables, strict=True)
        ]

    def number(self, variable: Any) -> int:
        """Return the number of a variable; UnsupportedError if it is not one of these."""
        number = self._numbers.get(id(_inner("variable", variable)))
        if number is None:
            raise UnsupportedError(
                f"variable {variable.name!r} of shape {tuple(variable.shape)} is not one of the "
                f"{len(self.names)} variables of this compressor: it was not trainable when the "
                "compressor was made, or belongs to another model. Make the compressor while all "
                "layers that will ever train are trainable; it serves one model: make another for "
                "the second"
            )
        return number

    def check(self, number: int, values: np.ndarray) -> None:
        """Raise UnsupportedError if ``values`` is not a view of the variable's memory.

        In eager execution, Horovod reuses a trace for other variables of equal shapes.
        """
        variable = self.variables[number]
        first, second = variable.read_value(), variable.read_value()
        address = _address(memoryview(first))
        if address == _address(memoryview(second)) and address != _address(values):
            raise UnsupportedError(
                f"got the gradient of another variable than {self.names[number]!r}, of the same "
                "shape; a compressor serves one model, whose variables come in one order: make "
                "another for the second model, or use tf.function"
            )

    def sizes(self) -> list[int]:
        """Return the size of each variable in bytes."""
        return [int(np.prod(v.shape.as_list())) * v.dtype.size for v in self.variables]

    def read(self, number: int) -> np.ndarray:
        """Return a variable's present values as bytes, uint8 1-D."""
        return self.variables[number].numpy().reshape(-1).view(np.uint8)

    def write(self, number: int, values: np.ndarray) -> None:
        """Overwrite a variable with ``values``, uint8 1-D."""
        variable = self.variables[number]
        dtype = variable.dtype.as_numpy_dtype
        variable.assign(values.view(dtype).reshape(variable.shape.as_list()))


def _address(buffer: Any) -> int:
    return np.asarray(buffer).__array_interface__["data"][0]


def pairs_of(model: Any) -> list[tuple[str, Any]]:
    """Return (name, variable) pairs of a Keras model, of variables, or of such pairs."""
    variables = getattr(model, "trainable_variables", model)
    if not isinstance(variables, Iterable):
        raise TypeError(
            "model must be a Keras model, its trainable_variables or (name, variable) pairs, got a "
            f"{type(model).__name__} of {type(model).__module__}; for a PyTorch model use "
            "Compression of horovod_fftcomp.torch"
        )
    items = list(variables)
    if any(isinstance(item, tuple) for item in items):
        return items
    return _with_unique_names([(_name(item), item) for item in items])


def _name(variable: Any) -> str:
    if not hasattr(variable, "name"):
        raise TypeError(
            f"model: {type(variable).__name__} is not a variable; pass a Keras model, its "
            "trainable_variables, or (name, variable) pairs"
        )
    return getattr(variable, "path", variable.name).removesuffix(":0")


def _with_unique_names(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the pairs with a number added to equal names, which Keras and TensorFlow allow."""
    counts, seen = Counter(name for name, _ in pairs), Counter[str]()
    unique = []
    for name, variable in pairs:
        unique.append((name if counts[name] == 1 else f"{name}.{seen[name]}", variable))
        seen[name] += 1
    return unique


def _inner(name: str, variable: Any) -> tf.Variable:
    is_plain = isinstance(variable, tf.Variable)
    inner = variable if is_plain else getattr(variable, "value", None)  # of Keras 3
    if not isinstance(inner, tf.Variable):
        raise TypeError(
            f"model: {name!r} is a {type(variable).__name__}, not a variable; pass a Keras model, "
            "its trainable_variables, or (name, variable) pairs"
        )
    if not inner.dtype.is_floating:
        raise UnsupportedError(
            f"variable {name!r} is {inner.dtype.name}; supported are gradients of float16, "
            "bfloat16, float32 and float64"
        )
    return inner
