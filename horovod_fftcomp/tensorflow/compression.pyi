"""Signatures of the factories."""

from collections.abc import Iterable
from typing import Any, Protocol

from horovod_fftcomp.adapter.signatures import Compression as Factories
from horovod_fftcomp.tensorflow.compressor import TensorFlowCompressor

class _KerasModel(Protocol):
    """A Keras model or layer, or a ``tf.Module``."""

    @property
    def trainable_variables(self) -> Any: ...

class Compression(Factories[_KerasModel | Iterable[Any] | None, TensorFlowCompressor]): ...
