"""Processes of gpu_first_minutes.py: programs with a time limit, workers that answer cases, output.

Owns what contains a crash or a hang; what is computed is gpu_cases.py's and the other programs'.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # the package need not be installed
MARK = "@@"  # begins a line of JSON in what a process prints
START_S = 90.0  # until a worker's first answer: imports, and modules that are compiled
LINE, FAILURE = 1700, 450  # characters of a printed line
Case = tuple[str, dict[str, Any]]  # name; kind of case and its arguments
Found = tuple[bool | None, dict[str, Any]]  # whether a step went well, None: left out; its line


class Report:
    """Prints a line of JSON for each step, and writes all details to a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.began = folder, time.monotonic()
        self.lock = threading.Lock()
        self.details = (folder / "steps.jsonl").open("w")
        self.log = (folder / "log.txt").open("wb")
        self.verdicts: dict[str, bool | None] = {}

    def detail(self, **what: Any) -> None:
        """Write a line to steps.jsonl."""
        with self.lock:
            self.details.write(json.dumps(what) + "\n")
            self.details.flush()

    def show(self, **what: Any) -> None:
        """Print a line and write it to steps.jsonl."""
        self.detail(**what)
        with self.lock:
            print(shortened(what, LINE), flush=True)

    def step(self, name: str, ok: bool | None, **what: Any) -> None:
        """Print the line that ends a step; ``ok``: None if it was left out."""
        self.verdicts[name] = ok
        self.show(step=name, ok=ok, at=round(time.monotonic() - self.began), **what)

    def failure(self, step: str, case: str, found: dict[str, Any]) -> None:
        """Print the line of a case that failed; its trace goes to the log alone."""
        self.detail(step=step, case=case, **found)
        left_out = ("trace", "sticky", "s", "cpu_s", "gpu_s")
        short = {key: value for key, value in found.items() if key not in left_out}
        with self.lock:
            print(shortened({"step": step, "case": case, **short}, FAILURE), flush=True)
        self.log_text(f"{step} {case}", found.get("trace", ""))

    def close(self) -> None:
        """Close the files."""
        self.details.close()
        self.log.close()

    def log_text(self, title: str, text: str) -> None:
        """Append to log.txt."""
        with self.lock:
            self.log.write(f"\n== {title}\n{text[-200_000:]}\n".encode())
            self.log.flush()


def shortened(found: dict[str, Any], most: int) -> str:
    """Return ``found`` as JSON of about ``most`` characters; what is long in it is cut."""
    text = json.dumps(found)
    for room in (300, 160, 80):
        if len(text) <= most:
            break
        cut: dict[str, Any] = {}
        for key, value in found.items():
            own = json.dumps(value)
            if len(own) <= room:
                cut[key] = value
            elif isinstance(value, list):
                cut[key] = [*(str(each)[: room // 4] for each in value[:4]), f"... {len(value)}"]
            else:
                cut[key] = own[:room] + "..."
        text = json.dumps(cut)
    return text


def marked(text: str) -> list[dict[str, Any]]:
    """Return the lines of JSON in what a process has printed."""
    lines = text.splitlines()
    return [json.loads(line[len(MARK) :]) for line in lines if line.startswith(MARK)]


def say(found: dict[str, Any]) -> None:
    """Print a line that ``marked`` reads."""
    print(MARK + json.dumps(found), flush=True)


def environment(**more: str) -> dict[str, str]:
    """Return the environment variables of all processes."""
    path = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    ours = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"}
    return os.environ | ours | {"OMP_NUM_THREADS": "4"} | more


def start(command: Sequence[Any], environ: dict[str, str], **streams: Any) -> subprocess.Popen:
    """Start a process in a session of its own, so that ``end`` ends its children too."""
    words = [str(word) for word in command]
    return subprocess.Popen(words, cwd=ROOT, env=environ, start_new_session=True, **streams)


def end(process: subprocess.Popen) -> None:
    """End a process and the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Pool:
    """Processes that answer cases; one that ends or is too slow is replaced.

    They live until ``close``: a process imports and compiles once for all steps.
    """

    def __init__(self, report: Report, emulated: bool) -> None:
        self.report, self.emulated = report, emulated
        self._idle: dict[int, list[subprocess.Popen]] = {}  # by their number of threads
        self._lock = threading.Lock()

    def run(
        self, step: str, cases: Sequence[Case], until: float, each_s: float, n: int, threads: int
    ) -> dict[str, dict[str, Any]]:
        """Return the answers to ``cases`` by name, of ``n`` processes with ``threads`` each."""
        todo: queue.SimpleQueue[Case] = queue.SimpleQueue()
        for case in cases:
            todo.put(case)
        results: dict[str, dict[str, Any]] = {}

        def serve() -> None:
            while time.monotonic() < until:
                try:
                    name, case = todo.get_nowait()
                except queue.Empty:
                    return
                results[name] = found = self._answer(case, threads, until, each_s)
                if found["ok"] is False:
                    self.report.failure(step, name, found)
                else:
                    self.report.detail(step=step, case=name, **found)

        servers = [threading.Thread(target=serve) for _ in range(min(n, len(cases)))]
        for server in servers:
            server.start()
        for server in servers:
            server.join()
        return results

    def _answer(
        self, case: dict[str, Any], threads: int, until: float, each_s: float
    ) -> dict[str, Any]:
        """Return the answer of an idle process, or of a new one."""
        with self._lock:
            idle = self._idle.setdefault(threads, [])
            process = idle.pop() if idle else None
        patience = each_s if process else START_S + each_s
        if process is None:
            process = self._started(threads)
        limit = min(time.monotonic() + patience, until)
        found = _asked(process, case, limit)
        if found is not None and not found.get("sticky"):
            with self._lock:
                idle.append(process)
            return found
        in_time = time.monotonic() < limit - 0.2
        end(process)
        if found is not None:
            return found
        if in_time:
            return {"ok": False, "error": f"the process ended with {process.returncode}"}
        if time.monotonic() >= until - 0.2:
            return {"ok": None, "error": "the step's time was over"}
        return {"ok": False, "error": f"no answer in {patience:.0f} s"}

    def _started(self, threads: int) -> subprocess.Popen:
        command = [sys.executable, HERE / "gpu_cases.py", "--threads", threads]
        command += ["--emulated"] if self.emulated else []
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.report.log}
        return start(command, environment(), **pipes)

    def close(self) -> None:
        """End all processes, and so free the GPU's memory."""
        with self._lock:
            for process in (process for idle in self._idle.values() for process in idle):
                end(process)
            self._idle = {}


def _asked(process: subprocess.Popen, case: dict[str, Any], limit: float) -> dict[str, Any] | None:
    """Return a process's answer to a case, None if there is none until ``limit``."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(case).encode() + b"\n")
        process.stdin.flush()
    except OSError:
        return None
    text = b""
    while got := _read(process, limit):
        text += got
        if text.endswith(b"\n") and (answers := marked(text.decode(errors="replace"))):
            return answers[0]
    return None


@dataclass
class Minutes:
    """What all steps share. ``whole``: without a GPU, run all cases, not a few of each step."""

    report: Report
    pool: Pool
    emulated: bool
    whole: bool
    has_device: bool = True  # until ``machine`` has looked
    warming: list[subprocess.Popen] = field(default_factory=list)

    def some(self, cases: list[Case], every: int) -> list[Case]:
        """Return the cases; without a GPU a few of them."""
        return cases[::every] if self.emulated and not self.whole else cases

    def answer(
        self, step: str, cases: list[Case], until: float, each_s: float, n: int, threads: int
    ) -> tuple[dict[str, dict[str, Any]], Found]:
        """Return the answers to all cases, and what their step's line says of them."""
        if self.emulated:  # on fewer cores
            n, each_s = min(n, 2), 5 * each_s
        results = self.pool.run(step, cases, until, each_s, n, threads)
        failed = [name for name, found in results.items() if found["ok"] is False]
        unfinished = [name for name, found in results.items() if found["ok"] is None]
        unfinished += [name for name, _ in cases if name not in results]
        passed = len(results) - len([name for name in (*failed, *unfinished) if name in results])
        line: dict[str, Any] = {"passed": passed, "failed": failed, "not_finished": unfinished}
        for key in ("cpu_s", "gpu_s"):
            if seconds := sum(found.get(key, 0) for found in results.values()):
                line[key] = round(seconds, 1)
        return results, (False if failed else True if passed else None, line)

    def run(
        self,
        command: Sequence[Any],
        until: float,
        name: str,
        tell: Callable[[str], None] = lambda line: None,
        **more: str,
    ) -> tuple[int | None, str]:
        """Run a program; return its exit status, None if its time was over, and its output.

        ``tell`` is called with each line as soon as it is there.
        """
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        process = start(command, environment(**more), stderr=subprocess.STDOUT, **streams)
        text = told = b""
        while got := _read(process, until):
            text += got
            *lines, told = (told + got).split(b"\n")
            for line in lines:
                tell(line.decode(errors="replace"))
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(max(0.5, until - time.monotonic()) if got == b"" else 0.5)
        end(process)
        found = text.decode(errors="replace")
        self.report.log_text(f"{name}: {code}", found)
        return code, found

    def begin_warm_up(self) -> None:
        """Begin to compile the CPU's kernels, into Numba's cache, beside what follows."""
        n = max(1, min(12, len(os.sched_getaffinity(0)) - 3))
        quiet = {"stdin": subprocess.DEVNULL, "stdout": self.report.log, "stderr": self.report.log}
        for part in range(n):
            command = [sys.executable, HERE / "gpu_programs.py", "warm", f"{part}/{n}"]
            self.warming.append(start(command, environment(OMP_NUM_THREADS="1"), **quiet))

    def await_warm_up(self, until: float) -> float:
        """Wait for the CPU's kernels; return how long, seconds."""
        began = time.monotonic()
        for process in self.warming:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
        return time.monotonic() - began

    def close(self) -> None:
        """End all processes and close the files."""
        self.pool.close()
        for process in self.warming:
            end(process)
        self.report.close()


def _read(process: subprocess.Popen, until: float) -> bytes | None:
    """Return some of what a process prints, b"" at its end, None when the time is over."""
    assert process.stdout is not None
    while (left := until - time.monotonic()) > 0:
        if select.select([process.stdout], [], [], min(left, 0.25))[0]:
            return os.read(process.stdout.fileno(), 1 << 16)
    return None
