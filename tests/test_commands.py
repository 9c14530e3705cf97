"""Every command in README and docs is run, or at least read by the parser that it is for.

``python -m tests.test_commands`` looks at those that load a framework, and prints what is wrong.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from horovod_fftcomp.cli import main as command_line
from horovod_fftcomp.tools.run.launcher import RANK_VARIABLES
from tests.test_docs import PAGES, ROOT, code_blocks, read

EXTRAS = set(re.findall(r'^    "([\w-]+)": \[', read("setup.py"), re.M))
NOT_COMMANDS = ("export", "for", "done")  # what else a shell reads
LAUNCHERS = ("horovodrun", "mpirun", "srun", "torchrun")


def commands(page: str) -> list[list[str]]:
    """Return the commands in a page's blocks for a shell, and those in its text."""
    lines = "\n".join(code_blocks(page, "sh") + code_blocks(page, "bash")).replace("\\\n", "")
    found = [shlex.split(line, comments=True) for line in lines.splitlines()]
    text = re.sub(r"^ *```.*?^ *```", "", read(page), flags=re.S | re.M)
    starts = r"docker/\w+|horovod-fftcomp|horovodrun|make|mpirun|pip|python3?|torchrun"
    spans = (shlex.split(span) for span in re.findall(rf"(?<=`)(?:{starts})\s[^`]+(?=`)", text))
    # Two words, as "make test", are names; tests/test_docs.py looks for those.
    found += [words for words in spans if len(words) > 2 or words[0].startswith("python")]
    return [
        words for words in found if words and words[0] not in NOT_COMMANDS and "..." not in words
    ]


COMMANDS = {page: commands(page) for page in PAGES if page != "CHANGELOG.md"}
ALL = sorted({tuple(words) for found in COMMANDS.values() for words in found})


def is_framework(words: Sequence[str]) -> bool:
    """Whether a framework is loaded to look at a command."""
    is_script = Path(words[0]).name.startswith("python") and words[1] != "-m"
    return words[0] in LAUNCHERS or is_script


class Parsed(Exception):  # noqa: N818
    """Raised where a program would begin, with its arguments as its parser has read them."""


def parsed(program: Callable[[], object]) -> argparse.Namespace:
    """Return what ``program`` reads from its arguments; ValueError if it refuses them."""
    plain = argparse.ArgumentParser.parse_args

    def parse_args(self, *arguments):
        raise Parsed(plain(self, *arguments))

    argparse.ArgumentParser.parse_args = parse_args
    try:
        program()
    except Parsed as found:
        return found.args[0]
    except SystemExit as error:
        raise ValueError(f"exit status {error.code}") from None
    finally:
        argparse.ArgumentParser.parse_args = plain
    raise ValueError("no arguments were read")


def check(words: Sequence[str]) -> None:
    """Raise ValueError, or what else tells why, unless the command would start."""
    program, *arguments = words
    if program == "horovod-fftcomp":
        parsed(lambda: command_line(arguments))
    elif program == "make":
        shown = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
        require({""}, shown.stderr)
    elif program == "pip":
        [(package, extras)] = re.findall(r"^([\w.]+)\[([\w,-]+)\]$", arguments[-1])
        require({"install", ".", "horovod_fftcomp"}, *arguments[:-1], package)
        require(EXTRAS, *extras.split(","))
    elif program in LAUNCHERS:
        check(launched(program, arguments))
    elif Path(program).name in ("python", "python3"):
        check_python(arguments)
    elif program == "bash":  # hands its arguments to the Python program beside it
        require(set(map(str, (ROOT / "scripts").glob("*.sh"))), str(ROOT / arguments[0]))
        check_python([str(Path(arguments[0]).with_suffix(".py")), *arguments[1:]])
    else:
        require(set(map(str, Path(ROOT).glob("docker/*"))), str(ROOT / program))


def require(known: set[str], *names: str) -> None:
    if unknown := {*names} - known:
        raise ValueError(f"{unknown} not in {known}")


def launched(launcher: str, arguments: list[str]) -> list[str]:
    """Return the command that a launcher would start on each rank."""
    if launcher == "horovodrun":
        from horovod.runner import launch

        sys.argv = [launcher, *arguments]
        return parsed(launch.parse_args).command
    if launcher == "torchrun":
        from torch.distributed.run import get_args_parser

        found = get_args_parser().parse_args(arguments)
        module = ["-m"] if found.module else []
        return ["python", *module, found.training_script, *found.training_script_args]
    first = "torchrun" if "torchrun" in arguments else "python"
    return arguments[arguments.index(first) :]


def check_python(arguments: list[str]) -> None:
    if arguments[0] != "-m":
        script, *rest = arguments
        if script != "train.py" and not (ROOT / script).is_file():
            raise ValueError(f"there is no script {script}")
        if rest and script != "train.py":
            sys.argv = [str(ROOT / script), *rest]
            sys.path.insert(0, str((ROOT / script).parent))
            parsed(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
            sys.path.pop(0)
    elif arguments[1] == "horovod_fftcomp":
        check(["horovod-fftcomp", *arguments[2:]])
    else:
        require({"pytest"}, arguments[1])
        files = [name for name in arguments[2:] if "/" in name]
        require(set(map(str, (ROOT / "tests").rglob("*.py"))), *(str(ROOT / f) for f in files))


def test_what_is_no_command_is_found_out():
    for command in (
        "horovod-fftcomp advise --noodles 2..4 train.py", "horovod-fftcomp bench --recipes topk",
        "horovod-fftcomp run --compression fftt train.py", "make demos", "make test NP=2 all-of-it",
        "pip install .[torches]", "pip instal .[torch]", "docker/walk", "nonsense",
        "python -m pytest tests/test_nothing.py", "python benchmarks/nothing.py",
        "bash scripts/nothing.sh", "bash scripts/gpu_first_minutes.sh --budgets 270",
    ):  # fmt: skip
        with pytest.raises(ValueError):  # noqa: PT011
            check(command.split())


@pytest.mark.parametrize("page", [page for page, found in COMMANDS.items() if found])
def test_commands_are_read(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in COMMANDS[page]:
        if not is_framework(words):
            check(words)


@pytest.mark.more
@pytest.mark.torch
def test_commands_of_launchers_and_scripts_are_read():
    """In a process of its own, for what the scripts import and set."""
    pytest.importorskip("horovod")
    command = [sys.executable, "-m", "tests.test_commands"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, ""), found.stderr[-4000:]


# What runs on one machine without root and within a minute. Scripts in benchmarks/ take longer, and
# targets of make are run by hand and by CI.
ELSEWHERE = re.compile(
    r"-H |--nnodes [^1]|--all|benchmarks/|--json bench.json|out/charlm|mpirun|srun"
)
RUN = [shlex.join(words) for words in ALL if words[0] in (*LAUNCHERS, "horovod-fftcomp")]
RUN = [command for command in RUN if not ELSEWHERE.search(command)]

DDP_SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(100, 100))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(8):
    optimizer.zero_grad()
    model(torch.randn(4, 100)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the files that the pages' commands name, but for train.py."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name in ("gradients", "recorded"):
        (tmp_path / name).mkdir()
        grad = np.random.default_rng(0).standard_normal((200, 100)).astype(np.float32)
        np.savez(tmp_path / name / "0.npz", w=grad)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.torch
@pytest.mark.xdist_group("commands")  # torchrun takes the same port each time
@pytest.mark.parametrize("command", RUN)
def test_the_command_runs(command, folder):
    pytest.importorskip("horovod")
    horovods = (ROOT / "tests" / "scripts" / "torch_digits.py").read_text()
    (folder / "train.py").write_text(DDP_SCRIPT if "torchrun" in command else horovods)
    few = ["--epochs", "1"] if " examples/" in command else []
    environment = {k: v for k, v in os.environ.items() if k not in {*RANK_VARIABLES, "COLUMNS"}}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        [*shlex.split(command), *few],
        cwd=folder,
        env=environment | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    refused = (
        "Nothing is recommended" in ended.stdout
    )  # as beside other tests; torchrun ends with 1
    assert ended.returncode == 0 or refused, ended.stdout[-4000:] + ended.stderr[-4000:]


if __name__ == "__main__":
    for words in filter(is_framework, ALL):
        try:
            check(words)
        except (ValueError, TypeError, ImportError) as error:
            print(shlex.join(words), repr(error))
