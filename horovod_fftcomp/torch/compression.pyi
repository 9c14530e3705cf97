"""Signatures of the factories."""

from horovod_fftcomp.adapter.signatures import Compression as Factories
from horovod_fftcomp.adapter.torch_tensors.parameters import Model
from horovod_fftcomp.torch.compressor import TorchCompressor

class Compression(Factories[Model, TorchCompressor]): ...
