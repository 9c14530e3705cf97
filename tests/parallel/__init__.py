"""Cases that run on every rank: of real jobs, which ``test_parallel.py`` starts, and of fake ones.

In fake jobs PyTorch's ranks are threads of pytest, see ``tests/fakes.py``.
"""

import pytest

# The launches: a name that begins with the framework's, the number of ranks, the files of cases.
# Starting ranks and frameworks takes longer than most of the cases, so there are few of them. Sets
# come last: an operation that some ranks of a set never begin leaves its traces.
JOBS = {
    "torch": (
        2,
        "torch_cases training_cases live_view_cases state_cases refusal_cases overlap_cases "
        "learner_cases",
    ),
    "torch_on_three": (3, "scheme_cases process_set_cases"),
    "torch_on_four": (4, "node_cases"),
    "torch_device": (2, "device_cases"),
    "tensorflow": (
        2,
        "tensorflow_cases tensorflow_live_view_cases tensorflow_state_cases "
        "tensorflow_refusal_cases tensorflow_keras_cases",
    ),
    "tensorflow_on_three": (3, "tensorflow_process_set_cases"),
    "tensorflow_on_four": (4, "tensorflow_node_cases"),
    "tensorflow_keras3": (2, "tensorflow_keras3_cases"),
    "tensorflow_device": (2, "tensorflow_device_cases"),
}

# Of tests that bring NaN or Inf without a loss scaler; others would fail by the warning.
told_of_nan = pytest.mark.filterwarnings("ignore:.* NaN or Inf:RuntimeWarning")
