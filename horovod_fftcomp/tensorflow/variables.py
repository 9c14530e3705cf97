"""The variables of one optimizer or tape, in the order that all ranks share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.schemes import Tensor


class Variables:
    """Names and variables. Raises ValueError or TypeError for what cannot be told apart.

    ``pairs``: (name, variable); a variable of Keras 3 stands for the one of TensorFlow inside.
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
                f"names of variables must differ, these come twice: {', '.join(twice[:8])}; pass "
                "(name, variable) pairs"
            )
        self.names = [name for name, _ in pairs]
        self.variables = [_inner(name, variable) for name, variable in pairs]
        self._numbers = {id(variable): n for n, variable in enumerate(self.variables)}

    def __len__(self) -> int:
        return len(self.names)

    def specs(self) -> list[Tensor]:
        """Return names and shapes."""
        return [
            Tensor(name, tuple(variable.shape.as_list()))
            for name, variable in zip(self.names, self.variables, strict=True)
        ]

    def number(self, variable: Any) -> int:
        """Return the number of a variable; UnsupportedError if it is none of these."""
        number = self._numbers.get(id(_inner("variable", variable)))
        if number is None:
            raise UnsupportedError(
                f"variable {variable.name!r} of shape {tuple(variable.shape)} is none of the "
                f"{len(self)} variables of this compressor: it was not trainable when the "
                "compressor was made, or belongs to another model. Make the compressor while all "
                "layers that will ever train are trainable; it serves one model: make another for "
                "the second"
            )
        return number

    def check(self, number: int, values: np.ndarray) -> None:
        """Raise UnsupportedError if ``values`` are not the memory of a variable, but of another.

        Called eagerly, Horovod reuses a trace for all variables of equal shapes.
        """
        variable = self.variables[number]
        first, second = variable.read_value(), variable.read_value()
        kept = _address(memoryview(first))
        if kept == _address(memoryview(second)) and kept != _address(values):
            raise UnsupportedError(
                f"a gradient came of another variable than {self.names[number]!r} of the same "
                "shape; a compressor serves one model, whose variables come in one order: make "
                "another for the second model, or use tf.function"
            )

    def sizes(self) -> list[int]:
        """Return the bytes of each variable."""
        return [int(np.prod(v.shape.as_list())) * v.dtype.size for v in self.variables]

    def read(self, number: int) -> np.ndarray:
        """Return a variable's present values as bytes, uint8 1-D."""
        return self.variables[number].numpy().reshape(-1).view(np.uint8)

    def write(self, number: int, values: np.ndarray) -> None:
        """Overwrite a variable by bytes."""
        variable = self.variables[number]
        dtype = variable.dtype.as_numpy_dtype
        variable.assign(values.view(dtype).reshape(variable.shape.as_list()))


def _address(buffer: Any) -> int:
    return np.asarray(buffer).__array_interface__["data"][0]


def pairs_of(model: Any) -> list[tuple[str, Any]]:
    """Return (name, variable) of a Keras model, of variables, or of such pairs."""
    variables = getattr(model, "trainable_variables", model)
    if not isinstance(variables, Iterable):
        raise TypeError(
            "model must be a Keras model, its trainable_variables or (name, variable) pairs, got a "
            f"{type(model).__name__} of {type(model).__module__}; for a PyTorch model take "
            "Compression of horovod_fftcomp.torch"
        )
    items = list(variables)
    if any(isinstance(item, tuple) for item in items):
        return items
    return _told_apart([(_name(item), item) for item in items])


def _name(variable: Any) -> str:
    if not hasattr(variable, "name"):
        raise TypeError(
            f"model: {type(variable).__name__} is not a variable; pass a Keras model, its "
            "trainable_variables, or (name, variable) pairs"
        )
    return getattr(variable, "path", variable.name).removesuffix(":0")


def _told_apart(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the pairs, those of equal names numbered: Keras and TensorFlow give such."""
    counts, seen = Counter(name for name, _ in pairs), Counter[str]()
    told = []
    for name, variable in pairs:
        told.append((name if counts[name] == 1 else f"{name}.{seen[name]}", variable))
        seen[name] += 1
    return told


def _inner(name: str, variable: Any) -> tf.Variable:
    inner = variable
    if not isinstance(inner, tf.Variable) and isinstance(
        getattr(variable, "value", None), tf.Variable
    ):
        inner = variable.value  # of Keras 3
    if not isinstance(inner, tf.Variable):
        raise TypeError(
            f"model: {name!r} is a {type(variable).__name__}, not a variable; pass a Keras model, "
            "its trainable_variables, or (name, variable) pairs"
        )
    if not inner.dtype.is_floating:
        raise UnsupportedError(
            f"variable {name!r} is {inner.dtype.name}; gradients of float16, bfloat16, float32 and "
            "float64 can be exchanged"
        )
    return inner
