"""Who may import whom, and what importing the package costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import horovod_fftcomp
from tests.backends import BACKENDS, load_backend

PACKAGE = Path(horovod_fftcomp.__file__).parent
STDLIB = sys.stdlib_module_names

# From the lowest floor up; a file or folder imports from its own folder and from lower floors.
FLOORS = (
    "errors types",
    "wire",
    "codec",
    "kernels",
    "schemes",
    "recipes monitor schedules",
    "engine",
    "simulation",
    "adapter tools",
    "torch torch_distributed tensorflow mpi",
    "cli integrations __init__",
    "__main__",
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}
# What each may import besides NumPy and the standard library; the longest match counts.
PACKAGES = {
    "": set(),
    "adapter/horovod_internals": {"horovod"},
    "adapter/process_sets": {"horovod"},
    "adapter/torch_tensors/": {"torch"},
    "cli/plots": {"matplotlib"},
    "cli/": {"rich"},
    "codec/base": {"ml_dtypes"},
    "integrations/huggingface": {"torch", "transformers"},
    "integrations/lightning": {"lightning"},
    "kernels/cpu/": {"numba", "llvmlite"},
    "kernels/cuda/cupy_device": {"cupy", "cupyx"},
    "kernels/cuda/torch_device": {"torch"},
    "monitor/parameter_hash": {"numba"},
    "mpi": {"mpi4py"},
    "tensorflow/": {"tensorflow", "horovod", "keras"},
    "tools/check/packages": {"packaging"},
    "torch/": {"torch", "horovod"},
    "torch_distributed/": {"torch"},
}
FILES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")
}


def _imports(path: Path) -> Iterator[str]:
    """Yield the dotted name of everything that a file imports, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_file_and_folder_has_a_floor():
    assert {name.split("/")[0] for name in FILES} == set(FLOOR_OF)
    assert len({path.name for path in PACKAGE.iterdir()} - {"__pycache__"}) <= 22


def test_imports_go_downward_only():
    upward = set()
    for name, path in FILES.items():
        own = name.split("/")[0]
        for imported in _imports(path):
            package, _, rest = imported.partition(".")
            target = rest.split(".")[0]
            if package != "horovod_fftcomp" or target == own:
                continue
            if FLOOR_OF.get(target, FLOOR_OF["__init__"]) >= FLOOR_OF[own]:
                upward.add(f"{name} imports {imported}")
    assert not upward


def test_no_imports_form_a_circle_not_even_for_annotations():
    modules = {"horovod_fftcomp." + name.replace("/", "."): path for name, path in FILES.items()}
    imports = {
        name: {next((m for m in (i, i.rpartition(".")[0]) if m in modules), "") for i in found}
        for name, found in ((name, set(_imports(path))) for name, path in modules.items())
    }
    while leaves := {name for name, found in imports.items() if not found & imports.keys()}:
        for name in leaves:
            del imports[name]
    while tops := imports.keys() - set().union(*imports.values()):
        for name in tops:
            del imports[name]
    assert not imports


def test_a_library_is_imported_only_where_it_belongs():
    misplaced = set()
    for name, path in FILES.items():
        rule = max(
            (r for r in PACKAGES if name == r or (name.startswith(r) and r[-1:] in ("", "/"))),
            key=len,
        )
        allowed = PACKAGES[rule] | STDLIB | {"numpy", "horovod_fftcomp"}
        packages = {imported.split(".")[0] for imported in _imports(path)}
        misplaced |= {f"{name} imports {package}" for package in packages - allowed}
    assert not misplaced


def test_every_kernel_has_the_same_arguments_in_the_reference_and_on_the_cpu():
    reference, cpu = (
        {
            name: list(inspect.signature(kernel).parameters)
            for name, kernel in vars(load_backend(module)).items()
            if inspect.isfunction(kernel) and kernel.__module__.startswith(("horovod_", "tests."))
            if not name.startswith("_")
        }
        for module in BACKENDS
    )
    of_buckets = {"encode_tensor", "sum_payloads"}
    of_the_definition_alone = {  # parts of kernels, and of ops on buckets
        "bitmap_of", "chunk_winners", "columns_and_signs", "decode_range", "decode_values",
        "encode_range", "encode_values", "key_exponent", "lane_sums", "low_pass",
        "magnitude_bits", "random_words", "selection_keys", "sketch_bits", "unary_bits",
    }  # fmt: skip
    assert reference.keys() - cpu.keys() == of_the_definition_alone
    assert cpu.keys() - reference.keys() == of_buckets
    assert {name: reference[name] for name in cpu.keys() - of_buckets} == {
        name: arguments for name, arguments in cpu.items() if name not in of_buckets
    }


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


def test_the_adapter_of_horovod_tells_what_to_import_without_it():
    script = "import sys; sys.modules['horovod'] = None; import horovod_fftcomp.torch"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "ImportError: horovod_fftcomp.torch needs Horovod" in done.stderr
    assert "import horovod_fftcomp.torch_distributed instead" in done.stderr
