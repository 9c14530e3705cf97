"""Code shared by the PyTorch and TensorFlow adapters."""
