"""Losses of language models by recipe, from benchmarks/results/language_model.md.

Written by ``python benchmarks/language_model.py --report``. Shares of the loss of uncompressed
training with the same optimizer; of several trainings that of the largest change.
"""

LOSSES = {
    "bf16": 0.002,
    "dgc": 0.319,
    "dither(ratio=100)": 0.116,
    "dither(ratio=100, momentum=0.9)": 0.237,
    "dither(ratio=20)": 0.012,
    "dither(ratio=30)": 0.042,
    "dither(ratio=40)": 0.033,
    "dither(ratio=40, exchange=sharded)": 0.008,
    "dither(ratio=60)": 0.093,
    "dither(ratio=60, momentum=0.9)": 0.194,
    "dither(ratio=80)": 0.158,
    "fft": 0.079,
    "fft(error_feedback=False)": 0.074,
    "fp16": -0.005,
    "powersgd(rank=4)": 0.143,
    "random_block": 0.613,
    "scalecom": 0.245,
    "topk(density=0.01)": 0.285,
}
