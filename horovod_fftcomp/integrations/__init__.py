"""Callbacks that compress the gradients of libraries which train models over PyTorch's DDP.

``lightning.CompressGradients`` and ``huggingface.compress``; each module imports its library.
"""
