"""PyTorch tensors and parameters, for adapters of any launcher: imports torch and no Horovod."""
