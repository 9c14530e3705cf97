"""Adapter for ``horovod.tensorflow`` and Keras: pass ``Compression.fft(model)``."""

from horovod_fftcomp.tensorflow.compression import Compression
from horovod_fftcomp.tensorflow.elastic import TensorFlowKerasState

__all__ = ["Compression", "TensorFlowKerasState"]
