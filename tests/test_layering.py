"""Who may import whom, and what importing the package costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import horovod_fftcomp
from horovod_fftcomp import backend, backends

PACKAGE = Path(horovod_fftcomp.__file__).parent
STDLIB = sys.stdlib_module_names

# file or folder -> what it may import besides the standard library; the longest match counts.
ALLOWED = {
    "backend.py": {"numpy"},
    "types.py": {"numpy"},
    "version.py": set(),
    "errors.py": set(),
    "options.py": set(),
    "transforms.py": {"numpy", "backends"},
    "draws.py": {"numpy", "wire"},
    "words.py": set(),
    "spec.py": set(),
    "payloads.py": {"numpy", "ml_dtypes", "backends", "draws", "errors", "positions", "spec",
                    "wire"},
    "elementwise.py": {"numpy", "backends", "quantizers", "words"},
    "element_codec.py": {"numpy", "backends", "draws", "elementwise", "errors", "payloads",
                         "positions", "quantizers", "transforms", "wire"},
    "choices.py": {"numpy", "backends", "quantizers", "sparsifiers"},
    "chosen_codec.py": {"numpy", "backends", "choices", "codec", "draws", "payloads", "positions",
                        "quantizers", "transforms", "wire"},
    "backends/reference_levels.py": {"numpy", "backends", "draws", "words"},
    "positions.py": {"numpy", "backends", "entropy"},
    "sparsifiers.py": {"numpy", "backends", "draws"},
    "quantizers.py": {"numpy"},
    "entropy.py": set(),
    "wire.py": {"numpy", "backends", "errors", "positions"},
    "codec.py": {"numpy", "wire", "backends", "draws", "errors", "payloads", "positions",
                 "quantizers", "sparsifiers", "transforms"},
    "backends/__init__.py": {"numpy", "quantizers"},
    "backends/entropy_tables.py": {"numpy", "backends", "entropy"},
    "backends/reference.py": {"numpy", "backends", "entropy", "positions", "quantizers", "words"},
    "backends/gpu/": {"numpy", "backends", "choices", "chosen_codec", "codec", "element_codec",
                      "elementwise", "entropy", "errors", "positions", "quantizers", "sparsifiers",
                      "transforms", "wire", "words"},
    "backends/gpu/cupy_device.py": {"numpy", "cupy", "cupyx", "backends"},
    "backends/gpu/torch_device.py": {"numpy", "torch", "backends"},
    "backends/cpu/": {"numpy", "numba", "llvmlite", "backends", "entropy", "errors", "positions",
                      "quantizers", "threads", "words"},
    "schemes/__init__.py": {"spec", "numpy", "backends", "errors"},
    "schemes/": {"numpy", "backends", "codec", "errors", "quantizers", "schemes", "wire"},
    "schemes/gather.py": {"numpy", "backends", "chosen_codec", "codec", "draws",
                          "element_codec", "errors", "payloads", "schemes", "spec", "wire"},
    "schemes/gather_on_device.py": {"numpy", "backends", "choices", "chosen_codec", "codec",
                                    "draws", "element_codec", "elementwise", "payloads",
                                    "positions", "schemes"},
    "schemes/shared_on_device.py": {"numpy", "backends", "errors", "schemes", "sparsifiers",
                                    "wire"},
    "schemes/shared.py": {"numpy", "backends", "quantizers", "schemes", "sparsifiers", "wire"},
    "schemes/auto.py": {"spec", "numpy", "backends", "codec", "errors", "quantizers", "schemes",
                        "sparsifiers", "transforms", "wire"},
    "schemes/threshold.py": {"numpy", "backends", "codec", "quantizers", "schemes", "sparsifiers",
                             "transforms", "wire"},
    "schemes/around.py": {"numpy", "backends", "schemes"},
    "schemes/nodes.py": {"numpy", "backends", "errors", "quantizers", "schemes", "wire"},
    "schemes/momentum.py": {"numpy", "backends", "elementwise", "payloads", "quantizers",
                            "schemes"},
    "schemes/dgc.py": {"numpy", "backends", "codec", "positions", "quantizers", "schemes", "wire"},
    "schemes/powersgd.py": {"numpy", "backends", "draws", "payloads", "quantizers", "schemes"},
    "schemes/powersgd_on_device.py": {"numpy", "backends", "errors", "schemes"},
    "schemes/rows.py": {"numpy", "backends", "schemes"},
    "schemes/gtopk.py": {"numpy", "backends", "codec", "errors", "payloads", "positions",
                         "quantizers", "schemes", "sparsifiers", "transforms", "wire"},
    "schemes/sketchsgd_on_device.py": {"numpy", "backends", "codec", "errors", "quantizers",
                                       "schemes", "sparsifiers", "transforms", "wire"},
    "schemes/sketchsgd.py": {"numpy", "backends", "draws", "quantizers", "schemes", "sparsifiers"},
    "schemes/sparcml.py": {"numpy", "backends", "codec", "errors", "payloads", "positions",
                           "quantizers", "schemes", "sparsifiers", "transforms", "wire"},
    "schemes/leader.py": {"numpy", "backends", "errors", "positions", "quantizers", "schemes",
                          "sparsifiers", "wire"},
    "schedules.py": set(),
    "record.py": {"numpy"},
    "live_view.py": set(),
    "recovery.py": set(),
    "alarm.py": set(),
    "checkpoint.py": set(),
    "replicas.py": {"numpy", "numba", "backends"},
    "policy.py": {"options", "recipes", "schedules", "schemes"},
    "buckets.py": {"policy", "recipes", "schemes"},
    "differences.py": {"numpy", "backends", "codec", "payloads", "quantizers", "wire"},
    "probe.py": {"numpy", "backends", "buckets", "differences", "errors", "schemes", "transforms"},
    "twins.py": {"numpy", "backends", "codec", "differences", "errors", "schemes", "transforms",
                 "wire"},
    "shadow_check.py": {"numpy", "backends", "engine", "errors", "exchanges", "schemes", "threads",
                        "twins"},
    "verdicts.py": {"numpy", "backends", "errors", "schemes"},
    "not_finite.py": {"numpy", "backends", "errors", "schemes", "wire"},
    "engine.py": {"numpy", "alarm", "backends", "buckets", "checkpoint", "not_finite", "schemes",
                  "shadow_check", "verdicts"},
    "exchanges.py": {"numpy", "backends", "engine", "schemes"},
    "handshake.py": {"numpy", "backends", "errors", "wire"},
    "recipes.py": {"choices", "chosen_codec", "codec", "element_codec", "elementwise",
                   "options", "quantizers", "schemes", "sparsifiers", "transforms"},
    "world.py": {"numpy", "backends", "buckets", "engine", "errors", "policy", "schemes"},
    "agreement.py": {"numpy", "__init__", "errors", "exchanges", "handshake", "schemes", "wire"},
    "stalls.py": set(),
    "watch.py": {"exchanges", "stalls"},
    "connection.py": {"numpy", "agreement", "backends", "errors", "exchanges", "handshake",
                      "process_sets", "schemes", "watch"},
    "process_sets.py": {"horovod", "errors", "exchanges", "policy", "schemes", "settings"},
    "replica_check.py": {"numpy", "backends", "errors", "exchanges", "process_sets", "replicas",
                         "schemes"},
    "settings.py": {"buckets", "options", "policy", "recovery"},
    "wrapping.py": {"errors"},
    "step_report.py": {"cost_model"},
    "jobs.py": set(),
    "cost_model.py": set(),
    "advice.py": {"numpy", "backends", "bench", "buckets", "checkpoint", "cost_model", "gradients",
                  "policy", "recipes", "schemes"},
    "compressor.py": {"buckets", "checkpoint", "connection", "engine", "errors", "exchanges",
                      "handshake", "live_view", "policy", "record", "recovery", "replica_check",
                      "schemes", "settings", "watch", "wire"},
    "factories.py": {"errors", "options", "policy", "recipes", "settings"},
    "mpi.py": {"numpy", "mpi4py", "backends", "buckets", "engine", "handshake", "policy",
               "schemes", "settings", "wire"},
    "threads.py": set(),
    "gradients.py": {"numpy", "backends"},
    "machine.py": {"__init__", "threads"},
    "bench/": {"numpy", "backends", "checkpoint", "gradients", "policy", "recipes", "schemes",
               "threads", "wire"},
    "bench/peers.py": {"numpy", "torch", "backends"},
    "bench/reduced_peers.py": {"numpy", "torch", "backends"},
    "bench/plot.py": {"matplotlib"},
    "health/": {"numpy", "__init__", "backends", "codec", "gradients", "machine", "recipes",
                "schemes", "threads"},
    "health/frameworks.py": {"health", "jobs"},
    "cli/": {"rich", "recipes", "__init__", "schemes"},
    "cli/arguments.py": {"options", "recipes"},
    "cli/check.py": {"rich", "health", "jobs", "torch"},
    "cli/run.py": {"rich", "errors", "jobs", "step_report", "threads", "wrapping"},
    "cli/advise.py": {"rich", "advice", "backends", "bench", "cost_model", "gradients", "jobs",
                      "machine", "schemes", "threads"},
    "cli/advise_report.py": {"rich", "advice", "cost_model"},
    "cli/advise_plot.py": {"matplotlib", "advice"},
    "cli/bench_report.py": {"rich", "bench", "recipes"},
    "cli/bench.py": {"rich", "bench", "buckets", "gradients", "machine", "recipes", "schemes",
                     "threads"},
    "__main__.py": {"cli"},
    "__init__.py": {"codec", "errors", "recipes", "recovery", "schedules", "schemes",
                    "sparsifiers", "threads", "world"},
    "torch/": {"numpy", "torch", "horovod", "backends", "buckets", "compressor", "connection",
               "engine", "errors", "exchanges", "factories", "not_finite", "policy", "probe",
               "process_sets", "record", "replica_check", "schemes", "settings", "shadow_check",
               "stalls", "world"},
    "tensorflow/": {"numpy", "tensorflow", "horovod", "backends", "buckets", "compressor",
                    "connection", "engine", "errors", "exchanges", "factories", "handshake",
                    "live_view", "not_finite", "policy", "probe", "process_sets", "record",
                    "replica_check", "schemes", "settings", "shadow_check", "stalls", "threads"},
    "tensorflow/keras3.py": {"horovod", "keras", "errors"},
    "torch/network.py": {"torch", "horovod", "cost_model", "jobs"},
    "torch/health.py": {"numpy", "torch", "horovod", "errors", "handshake", "health", "machine",
                        "schemes"},
}  # fmt: skip


def _imports(path: Path) -> set[str]:
    """Return the top-level packages and own modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            parts = module.split(".")
            if parts[0] != "horovod_fftcomp":
                found.add(parts[0])
            elif len(parts) == 1 or not _is_module(parts[1]):
                found.add("__init__")
            else:
                found.add(parts[1])
    return found - STDLIB


def _is_module(name: str) -> bool:
    return (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir()


SHARED = {"backend", "types", "version"}
FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES)
def test_imports_go_downward_only(file):
    rules = [
        rule for rule in ALLOWED if file == rule or (rule[-1] == "/" and file.startswith(rule))
    ]
    assert rules, f"{file} has no rule: add what it may import"
    own = file.split("/")[0].removesuffix(".py")
    extra = _imports(PACKAGE / file) - ALLOWED[max(rules, key=len)] - {own} - SHARED
    assert not extra, f"{file} may not import {sorted(extra)}"


def test_every_backend_has_every_kernel_with_the_same_arguments():
    import inspect

    reference = backend.load_backend("reference")
    for name in backend.BACKENDS:
        module = backend.load_backend(name)
        for kernel in backends.KERNELS:
            expected = list(inspect.signature(getattr(reference, kernel)).parameters)
            assert list(inspect.signature(getattr(module, kernel)).parameters) == expected


def test_importing_the_package_loads_no_framework_and_is_quick():
    script = (
        "import sys, time; start = time.perf_counter(); import numpy;"
        "numpys = time.perf_counter(); import horovod_fftcomp;"
        "print((time.perf_counter() - numpys) / (numpys - start));"
        "print(*[m for m in ('torch', 'tensorflow', 'cupy', 'numba', 'mpi4py', 'horovod', 'scipy',"
        " 'rich') if m in sys.modules])"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    assert all(run.stdout.splitlines()[1:] in ([], [""]) for run in runs)
    # Over the time of importing NumPy, which a busy machine delays as well.
    assert min(float(run.stdout.split()[0]) for run in runs) < 4


def test_the_public_names_are_there():
    for name in horovod_fftcomp.__all__:
        assert hasattr(horovod_fftcomp, name)
    assert horovod_fftcomp.list_compressors()[:2] == ["none", "fp16"]
