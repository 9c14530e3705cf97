"""float32 to float16 and back, by whole numbers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.backends import BACKENDS, load_backend


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16_is_that_of_the_standard(backend):
    """Every float16 comes back, and what lies between two of them goes to the nearest even one."""
    kernels = load_backend(backend)
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    wide = kernels.from_float16(every)
    assert wide[~np.isnan(every)].tolist() == every[~np.isnan(every)].astype(np.float32).tolist()
    assert np.isnan(wide[np.isnan(every)]).all()
    finite = wide[np.isfinite(wide)]
    between = np.sort(finite)[:-1] + np.diff(np.sort(finite)) / 2
    for x in (finite, between, np.nextafter(between, np.float32(1e9)), finite[:1] * 0 - 0.0):
        expected = x.astype(np.float16)
        assert kernels.to_float16(x, 65504.0).tobytes() == expected.tobytes()
    beyond = np.float32([7e4, -1e30, 3.4e38, 100, -99.99, 1e-30])
    expected = np.float16([100, -100, 100, 100, -100, 0])
    assert kernels.to_float16(beyond, 100.0).tolist() == expected.tolist()
