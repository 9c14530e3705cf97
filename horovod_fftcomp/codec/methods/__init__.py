"""Element-wise methods, one in each file: options, payload body, NumPy kernels and traits."""
