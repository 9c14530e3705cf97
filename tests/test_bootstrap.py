"""What ``scripts/bootstrap.py`` sets up and what it leaves out; nothing is downloaded here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
LIGHT = "--without-horovod"
PARTS = ("PyTorch", "TensorFlow", "MPI", "Gloo")


class Clone:
    """A clone in which commands are recorded and not run; ``done``: those of the last set-up."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "scripts").mkdir()
        for name in ("setup.py", "pyproject.toml"):
            shutil.copy(ROOT / name, folder / name)
        for name in ("scripts/bootstrap.py", "scripts/requirements.txt"):
            shutil.copy(ROOT / name, folder / name)
        path = folder / "scripts" / "bootstrap.py"
        spec = importlib.util.spec_from_file_location("bootstrap", path)
        self.bootstrap = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.bootstrap)
        self.venv = self.bootstrap.VENV
        self.done: list[str] = []
        self.failing = "nothing"
        self.builds = True
        self._patch = monkeypatch.setattr
        self._patch(self.bootstrap, "run", self._run)
        self._patch(self.bootstrap, "build_horovod", self._build)
        self._patch(self.bootstrap, "check_compiler", lambda: self.done.append("compiler"))
        self._patch(self.bootstrap, "choose_python", lambda: None)
        self._patch(self.bootstrap.shutil, "disk_usage", lambda _: SimpleNamespace(free=9e9))
        self._patch(self.bootstrap.signal, "signal", lambda *_: None)

    def _run(self, command, log, *_, **__) -> bool:
        self.done.append(" ".join(map(str, command)))
        self.bootstrap.SITE.mkdir(parents=True, exist_ok=True)
        self.bootstrap.PYTHON.parent.mkdir(exist_ok=True)
        self.bootstrap.PYTHON.touch()
        with log.open("a") as stream:  # as horovodrun --check-build does
            stream.writelines(f"[X] {part}\n" for part in PARTS)
        return self.failing not in self.done[-1]

    def _build(self, wheels: Path) -> None:
        self.done.append("build")
        if not self.builds:
            raise self.bootstrap.SetupError("Horovod was not built.")
        (wheels / "horovod-0.28.1.whl").touch()

    def set_up(self, *arguments: str) -> int:
        self.done.clear()
        self._patch(sys, "argv", ["bootstrap.py", *arguments])
        return self.bootstrap.main()

    def installed(self) -> str:
        """Return what the last set-up passed to pip."""
        return "\n".join(command for command in self.done if " pip install " in command)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Clone(tmp_path, monkeypatch)


def test_without_horovod_pytorch_is_installed_alone(clone):
    assert clone.set_up(LIGHT) == 0
    assert "torch==" in clone.installed()
    assert "[torch-distributed," in clone.installed()
    assert "-r " not in clone.installed()  # all that is pinned, TensorFlow among it
    assert clone.installed().count("-c ") == 2
    assert not {"compiler", "build"} & set(clone.done)
    assert clone.set_up(LIGHT) == 0
    assert clone.done == []


def test_make_install_completes_what_was_set_up_without_horovod(clone):
    clone.set_up(LIGHT)
    (clone.venv / "kept").touch()
    assert clone.set_up() == 0
    assert (clone.venv / "kept").exists()
    assert "-r " in clone.installed()
    assert "horovod-0.28.1.whl" in clone.installed()
    assert {"compiler", "build"} < set(clone.done)
    for arguments in ((), (LIGHT,)):
        assert clone.set_up(*arguments) == 0
        assert clone.done == []


def test_a_whole_environment_stays_whole(clone):
    clone.set_up()
    for changed in ("scripts/requirements.txt", "scripts/bootstrap.py", "pyproject.toml"):
        with (clone.venv.parent / changed).open("a") as stream:
            stream.write("# A comment.\n")
        (clone.venv / "kept").touch()
        assert clone.set_up(LIGHT) == 0
        assert (clone.venv / "kept").exists()
        assert "horovod-0.28.1.whl" in clone.installed()
        assert clone.set_up() == 0
        assert clone.done == []


def test_a_change_is_followed_without_horovod_too(clone):
    clone.set_up(LIGHT)
    (clone.venv / "kept").touch()
    with (clone.venv.parent / "setup.py").open("a") as stream:
        stream.write("# A comment.\n")
    assert clone.set_up(LIGHT) == 0
    assert (clone.venv / "kept").exists()
    assert "[torch-distributed," in clone.installed()
    assert "horovod-0.28.1.whl" not in clone.installed()


@pytest.mark.parametrize(("first", "second"), [((), ()), ((), (LIGHT,)), ((LIGHT,), (LIGHT,))])
def test_what_was_interrupted_is_made_anew(first, second, clone, capsys):
    clone.failing = "[torch-distributed," if first else "-r "
    assert clone.set_up(*first) == 1
    assert "Check the network" in capsys.readouterr().err
    (clone.venv / "kept").touch()
    clone.failing = "nothing"
    assert clone.set_up(*second) == 0
    assert not (clone.venv / "kept").exists()


def test_a_completion_that_was_interrupted_counts_as_nothing(clone):
    clone.set_up(LIGHT)
    clone.failing = "-r "
    assert clone.set_up() == 1
    clone.failing = "nothing"
    assert clone.set_up(LIGHT) == 0
    assert "[torch-distributed," in clone.installed()


@pytest.mark.parametrize("first", [(), (LIGHT,)])
def test_without_horovod_a_failed_build_of_it_does_not_matter(first, clone):
    clone.builds = False
    if first:
        assert clone.set_up(*first) == 0
    assert clone.set_up() == 1
    assert clone.set_up(LIGHT) == 0
    assert "[torch-distributed," in clone.installed()
    clone.builds = True
    assert clone.set_up() == 0


@pytest.mark.parametrize(("free_gb", "code"), [(4, 0), (2, 1)])
def test_without_horovod_less_disk_is_needed(free_gb, code, clone, monkeypatch, capsys):
    found = SimpleNamespace(free=free_gb * 1e9)
    monkeypatch.setattr(clone.bootstrap.shutil, "disk_usage", lambda _: found)
    assert clone.set_up(LIGHT) == code
    assert ("3 GB needed" in capsys.readouterr().err) == bool(code)
    assert clone.set_up() == 1  # also where PyTorch is there already
    assert "8 GB needed" in capsys.readouterr().err


def test_the_targets_that_need_no_horovod_do_not_install_it():
    makefile = (ROOT / "Makefile").read_text()
    assert "\ndemo-ddp: install-ddp " in makefile
    assert "\ninstall-ddp: ##" in makefile
    assert f"bootstrap.py {LIGHT}\n" in makefile


def test_the_pinned_packages_take_every_release_of_the_supported_pythons(clone):
    """Debian 12 has Python 3.11.2, for which some packages are too new."""
    refused = set()
    for name, version in clone.bootstrap.PINS.items():
        try:
            metadata = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        needs = SpecifierSet(metadata.get("Requires-Python", ""))
        if metadata["Version"] == version:
            refused |= {name for python in clone.bootstrap.PYTHONS if f"{python}.0" not in needs}
    assert not refused
