"""``horovod-fftcomp check``: what it finds, what it advises, and that it ends."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib import metadata

import pytest

from horovod_fftcomp.cli import check, main
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.kernels import cpu, threads
from horovod_fftcomp.kernels.cpu import bucket
from horovod_fftcomp.tools.check import Finding, Level, frameworks, kernels, packages
from horovod_fftcomp.tools.run.launcher import launched_rank
from horovod_fftcomp.wire.version import __version__


@pytest.fixture(autouse=True)
def _wide(monkeypatch, no_launcher):
    monkeypatch.setenv("COLUMNS", "250")


@pytest.fixture
def only(monkeypatch):
    """Return a function that makes all optional packages missing but those it is given."""
    find_spec = importlib.util.find_spec

    def hide(*there: str) -> None:
        known = {"numpy", "llvmlite", "numba", *there}
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: find_spec(name) if name in known else None
        )

    return hide


def by_topic(findings) -> dict[str, Finding]:
    return {finding.topic: finding for finding in findings}


def test_the_core_alone_is_sound(only, capsys):
    only()
    main(["check"])
    printed = capsys.readouterr().out
    assert f"{__version__} from " in printed
    assert "pip install torch" in printed
    assert "HOROVOD_WITH_PYTORCH=1" in printed
    assert "horovodrun -np 2 horovod-fftcomp check" in printed
    assert "write the reference's bytes for all recipes" in printed
    assert "\n0 failed, " in printed


@pytest.mark.slow
def test_without_a_launcher_horovod_is_not_imported():
    script = (
        "import sys; from horovod_fftcomp.cli import main; main(['check']);"
        "print('loaded:', [m for m in ('torch', 'horovod', 'mpi4py') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "loaded: []" in done.stdout, done.stdout + done.stderr


def test_a_failure_is_the_exit_status(only, capsys, monkeypatch, tmp_path):
    only()
    path = tmp_path / "error.json"  # from which torchrun's report tells the reason
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    bad = Finding("kernels", Level.FAIL, "wrong bytes", "another processor")
    monkeypatch.setattr(kernels, "findings", lambda: iter([bad]))
    with pytest.raises(SystemExit) as caught:
        main(["check"])
    assert caught.value.code == 1
    printed = capsys.readouterr().out
    assert "FAIL" in printed
    assert "another processor" in printed
    assert "\n1 failed, " in printed
    told = json.loads(path.read_text())["message"]["message"]
    assert "horovod-fftcomp check ends with status 1: failed: kernels; see the table" in told


def test_other_ranks_than_the_first_print_their_failures_alone(only, capsys, monkeypatch):
    only()
    monkeypatch.setenv("HOROVOD_RANK", "3")
    with pytest.raises(SystemExit):
        main(["check"])
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    assert line.startswith("rank 3: job: this rank cannot take part without horovod.torch. ")


def test_under_torchrun_the_rank_is_its_own_and_horovod_is_not_needed(only, monkeypatch):
    only()
    for name, value in {"PMI_RANK": "0", "RANK": "3", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    assert launched_rank() == 3
    assert "horovod" not in by_topic(packages.findings())


# Versions.


@pytest.mark.parametrize(
    ("version", "versions", "within"),
    [
        ("2.4.6", "<3,>=2.0", True),
        ("3.0", "<3,>=2.0", False),
        ("3", "<3.0", False),
        ("2", ">=2.0", True),
        ("1.26.4", ">=2.0,<3", False),
        ("2.13.0+cpu", ">=2.1,<2.14", True),
        ("2.9", "<2.14", True),
        ("2.14.0rc1", "<2.14", False),
        ("0.28.1", "==0.28.1", True),
        ("0.28.10", "==0.28.1", False),
        ("1.0", "!=1.0.0", False),
        ("1.0", "<=1.0,>0.9", True),
        ("1.0", "~=1.0", True),
        ("1.0", "", True),
    ],
)
def test_ranges_of_versions(version, versions, within):
    assert packages.is_within(version, versions) is within


def test_tested_ranges_are_those_of_the_installation(monkeypatch):
    required = ["numpy<3,>=2.0", 'torch<2.14,>=2.1; extra == "torch"', "a[b] (>=1)", "rich"]
    monkeypatch.setattr(metadata, "requires", lambda name: required)
    assert packages.tested_ranges() == {
        "numpy": "<3,>=2.0", "torch": "<2.14,>=2.1", "a": ">=1", "rich": "",
    }  # fmt: skip


def test_a_version_that_was_not_tested_is_a_warning(only, monkeypatch):
    only()
    monkeypatch.setattr(packages, "tested_ranges", lambda: {"numpy": ">=1,<2", "numba": ">=0.1"})
    found = by_topic(packages.findings())
    assert found["numpy"].level is Level.WARNING
    assert found["numpy"].found.endswith("; tested was >=1,<2")
    assert found["numpy"].remedy == "pip install 'numpy>=1,<2'"
    assert found["numba"].level is Level.OK


def test_missing_packages(only):
    only()
    found = by_topic(packages.findings())
    levels = {topic: finding.level for topic, finding in found.items()}
    assert levels["numpy"] is Level.OK
    assert levels["torch"] is Level.WARNING
    assert levels["horovod"] is Level.ABSENT  # DDP needs none
    assert levels["tensorflow"] is levels["mpi4py"] is levels["cupy"] is Level.ABSENT
    assert "keras" not in levels
    assert list(frameworks.findings()) == []


def test_a_source_tree_that_is_not_installed_is_told(only, monkeypatch):
    only()

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    for function in ("version", "requires", "metadata"):
        monkeypatch.setattr(metadata, function, missing)
    found = by_topic(packages.findings())
    assert found["horovod_fftcomp"].found.endswith(", not installed")
    assert found["Python"].level is Level.OK
    assert found["numpy"].found == "has no version"


def test_another_version_that_is_installed_is_told(only, monkeypatch):
    only()
    version = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "9.9" if name == "horovod_fftcomp" else version(name)
    )
    assert by_topic(packages.findings())["horovod_fftcomp"].found.endswith("; 9.9 is installed")


@pytest.mark.parametrize(
    ("version", "has_tf_keras", "switch", "level", "remedy"),
    [
        ("2.15.0", False, "", Level.OK, ""),
        ("3.5.0", False, "1", Level.WARNING, "pip install tf_keras"),
        ("3.5.0", True, "", Level.WARNING, "export TF_USE_LEGACY_KERAS=1"),
        ("3.5.0", True, "1", Level.OK, ""),
    ],
)
def test_keras_3_needs_its_predecessor(version, has_tf_keras, switch, level, remedy, monkeypatch):
    there = {"tensorflow", "numpy"} | ({"tf_keras"} if has_tf_keras else set())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr(packages, "installed_version", lambda module: version)
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", switch)
    found = by_topic(packages.findings())["keras"]
    assert found.level is level
    assert remedy in found.remedy


# Kernels.


def test_kernels_that_write_other_bytes_fail_by_recipe(monkeypatch):
    def damaged(codec, flat, shape, key):
        payload = bucket.encode_tensor(codec, flat, shape, key)
        if payload is not None and isinstance(codec, Codec) and codec.sparsifier.density < 1:
            payload[codec.plan(shape).header_nbytes + 8] ^= 16  # a position
        return payload

    monkeypatch.setattr(cpu, "encode_tensor", damaged)
    found = by_topic(kernels.findings())
    assert {"kernels: topk", "kernels: fft", "kernels: dct"} <= set(found)
    assert {"kernels", "kernels: bf16", "kernel cache"}.isdisjoint(found)
    assert found["kernels: topk"].level is Level.FAIL


def test_kernels_that_raise_fail(monkeypatch):
    def fails():
        raise RuntimeError("cannot cache function 'f': no locator available")

    monkeypatch.setattr(kernels, "cpu_kernels", fails)
    found = by_topic(kernels.findings())
    assert found["kernels"].level is Level.FAIL
    assert "no locator available" in found["kernels"].found
    assert "NUMBA_CACHE_DIR" in found["kernels"].remedy


def test_a_cache_folder_that_is_not_used_is_a_warning(monkeypatch, tmp_path):
    found = by_topic(kernels.findings())["kernel cache"]
    assert found.level is Level.OK
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "elsewhere"))
    found = by_topic(kernels.findings())["kernel cache"]
    assert found.level is Level.WARNING
    assert "elsewhere cannot be written" in found.found


def test_a_cache_folder_that_cannot_be_written_is_a_warning(monkeypatch):
    def refuses(dir):
        raise PermissionError(13, "Permission denied", dir)

    monkeypatch.setattr("tempfile.TemporaryFile", refuses)
    found = by_topic(kernels.findings())["kernel cache"]
    assert found.level is Level.WARNING
    assert "Permission denied" in found.found


def test_more_threads_than_cores_are_a_warning(monkeypatch, request):
    request.addfinalizer(threads.get_own_cores.cache_clear)
    monkeypatch.setattr(threads, "chosen_threads", None)
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "1")
    threads.get_own_cores.cache_clear()
    assert by_topic(kernels.findings())["CPU cores"].level is Level.OK
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "100000")
    threads.get_own_cores.cache_clear()
    found = by_topic(kernels.findings())["CPU cores"]
    assert found.level is Level.WARNING
    assert "100000 processes here, 1 thread each" in found.found


# Frameworks, in processes of their own.


@pytest.fixture
def answers(only, monkeypatch):
    """Return a function that replaces what the two processes run."""
    only("torch", "horovod")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)

    def ask(
        torch: str = "print(MARK + '[]')", horovod: str = "", one: str = "print(MARK + '1')"
    ) -> dict[str, Finding]:
        start = f"MARK = {frameworks._MARK!r}\n"
        monkeypatch.setattr(frameworks, "ASK_TORCH", start + torch)
        monkeypatch.setattr(frameworks, "ASK_HOROVOD", start + horovod)
        monkeypatch.setattr(frameworks, "INITIALIZE", start + one)
        return by_topic(frameworks.findings())

    return ask


def test_gpus_are_named(answers):
    found = answers(torch="print('noise'); print(MARK + '[\"H100\", \"H100\"]')")
    assert found["GPU"] == Finding("GPU", Level.OK, "H100, H100")
    assert answers()["GPU"].level is Level.ABSENT


def test_a_build_without_a_controller_fails(answers):
    found = answers(horovod='print(MARK + \'{"MPI": false, "Gloo": false, "NCCL": true}\')')
    assert found["horovod.torch"].level is Level.FAIL
    assert found["horovod.torch"].found == "built with NCCL; without MPI, Gloo"
    found = answers(horovod='print(MARK + \'{"MPI": false, "Gloo": true}\')')
    assert found["horovod.torch"].level is Level.OK


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("raise ImportError('undefined symbol')", "ImportError: undefined symbol"),
        ("import os; os.abort()", "the import ends in SIGABRT: no message"),
        ("print(MARK + '{}'); raise SystemExit(3)", "fftcomp-found {}"),
        ("pass", "no message"),
    ],
)
def test_an_import_that_ends_the_interpreter_is_a_finding(answers, script, expected):
    found = answers(horovod=script)["horovod.torch"]
    assert found.level is Level.FAIL
    assert found.found == expected
    assert "rebuild Horovod for the installed PyTorch" in found.remedy


def test_an_import_that_hangs_is_a_finding(answers, monkeypatch):
    monkeypatch.setattr(frameworks, "TIMEOUT_S", 1)
    found = answers(torch="import time; time.sleep(600)", horovod="print(MARK + '{\"MPI\": true}')")
    assert found["torch runs"].found == "the import did not end in 1 s"


BUILT = "print(MARK + '{\"MPI\": true}')"


def test_a_process_that_mpi_ends_without_a_launcher_is_a_warning(answers, monkeypatch, tmp_path):
    aborts = "import sys; print('Local abort before MPI_INIT', file=sys.stderr); sys.exit(1)"
    found = answers(horovod=BUILT, one=aborts)["one process"]
    assert found.level is Level.WARNING
    assert found.found.endswith("without a launcher: Local abort before MPI_INIT")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert answers(horovod=BUILT, one=aborts)["one process"].remedy == (
        "start scripts by horovodrun -np 1"
    )
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmpi.so.40").touch()
    remedy = answers(horovod=BUILT, one=aborts)["one process"].remedy
    assert remedy.startswith(f"export OPAL_PREFIX={tmp_path}, or make install")
    monkeypatch.setattr(frameworks, "TIMEOUT_S", 4)
    found = answers(horovod=BUILT, one="import time; time.sleep(600)")["one process"]
    assert found.found.endswith("hvd.init() did not end in 4 s")


def test_one_process_is_tried_without_a_launcher_alone(answers, monkeypatch):
    assert answers(horovod=BUILT)["one process"].level is Level.OK
    monkeypatch.setenv("HOROVOD_RANK", "0")
    assert "one process" not in answers(horovod=BUILT)


@pytest.mark.more
@pytest.mark.torch
def test_the_real_frameworks_answer():
    pytest.importorskip("torch")
    pytest.importorskip("horovod")
    found = by_topic(frameworks.findings())
    assert found["GPU"].level in (Level.OK, Level.ABSENT)
    assert found["horovod.torch"].level is Level.OK


# The time limit.

HANGS = """
import sys, time, types
from horovod_fftcomp.cli import main
from horovod_fftcomp.cli import check
from horovod_fftcomp.tools.check import Finding, Level

def findings():
    yield Finding("first", Level.OK, "fine")
    {hang}

check.CHECKS = [types.SimpleNamespace(findings=findings)]
main(["check", "--timeout", "1"])
"""


def test_a_check_that_hangs_ends_with_the_report(monkeypatch):
    script = HANGS.format(hang="time.sleep(600)")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    assert "waited 1 s for the check after 'first'" in done.stdout
    assert "raise --timeout" in done.stdout
    assert "1 failed, 0 warnings" in done.stdout


@pytest.mark.slow
def test_a_check_that_holds_the_interpreters_lock_ends_too():
    script = HANGS.format(hang="import ctypes; ctypes.PyDLL(None).sleep(600)")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in findings" in done.stderr


def test_a_watchdog_that_is_stopped_does_nothing(monkeypatch):
    ended = []
    monkeypatch.setattr(check.Watchdog, "end_process", lambda self, *what: ended.append(what))
    watchdog = check.Watchdog(60, check.Report(None))
    watchdog.expect("a", "b")
    watchdog.stop()
    watchdog.timer.join(20)
    assert not watchdog.timer.is_alive()
    assert ended == []
