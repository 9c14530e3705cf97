"""Losses of language models by recipe, from benchmarks/results/language_model.md.

Written by ``python benchmarks/language_model.py --report``. Shares of the loss of uncompressed
training with the same optimizer; of several trainings that of the largest change.
"""

LOSSES = {
    "dither(ratio=100)": 0.116,
    "dither(ratio=20)": -0.014,
    "dither(ratio=30)": -0.011,
    "dither(ratio=40)": 0.033,
    "dither(ratio=40, exchange=sharded)": 0.008,
    "dither(ratio=60)": 0.014,
    "dither(ratio=80)": 0.045,
    "fft": 0.06,
    "fft(error_feedback=False)": 0.074,
}
