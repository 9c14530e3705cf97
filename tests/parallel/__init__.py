"""Cases that run on every rank; ``test_parallel.py`` starts them."""

import pytest

# Of tests that bring NaN or Inf without a loss scaler; others would fail by the warning.
told_of_nan = pytest.mark.filterwarnings("ignore:.* NaN or Inf:RuntimeWarning")
