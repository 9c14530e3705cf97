"""Steps of gpu_first_minutes.py: what each of them runs, and what its line tells."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import platform
import re
import shutil
import sys
import tempfile
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from xml.etree import ElementTree

from gpu_comparison import recipes
from gpu_processes import HERE, MARK, Case, Found, Minutes, marked

PACKAGES = ("torch", "cupy-cuda13x", "cupy-cuda12x", "numpy", "numba", "llvmlite", "pytest",
            "pytest-xdist", "hypothesis", "ml_dtypes", "scipy", "rich")  # fmt: skip
TOOLS = ("g++", "nvcc", "ncu", "compute-sanitizer", "git")
SMALL, ODD = [(100, 90), (3000,), (50, 70)], [(33, 31), (4099,), (1025, 3)]
# Largest relative norms of a difference: transforms and products of matrices add in another order.
INEXACT = {"fft": 1e-3, "dct": 1e-3, "demo": 1e-3, "auto": 1e-3, "powersgd": 1e-3}
# Coefficients differ by 4e-8 of their block's largest: some round to another level, or cross the
# threshold. Expected after three steps of large tensors: 8e-4, 1e-3, 6e-4; twice that is allowed.
INEXACT_LARGE = INEXACT | {"fft": 1.6e-3, "dct": 2e-3, "demo": 1.2e-3}
FOUND_ERRORS = 3  # exit status of compute-sanitizer
LOOK_AT_GPU = """
import json, time
began = time.time()
import torch
torch_s = time.time() - began
import cupy
found = dict(there=torch.cuda.is_available(), torch_s=round(torch_s, 1))
found["both_s"] = round(time.time() - began, 1)
if found["there"]:
    about, ones = torch.cuda.get_device_properties(0), torch.ones(8, 8, device="cuda")
    found |= dict(
        device=about.name, cc=f"{about.major}.{about.minor}", gb=about.total_memory >> 30,
        sms=about.multi_processor_count, cuda=torch.version.cuda,
        nvrtc=cupy.cuda.nvrtc.getVersion(), driver=cupy.cuda.runtime.driverGetVersion(),
        cublas=float((ones @ ones).sum()) == 512,
    )
print("@@" + json.dumps(found))
"""
METRICS = {
    "gpu__time_duration.sum": "us",
    "dram__bytes_read.sum": "read_mb",
    "dram__bytes_write.sum": "written_mb",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory_pct",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_pct",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_pct",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": "bank_conflicts",
    "launch__registers_per_thread": "registers",
}


def machine(minutes: Minutes, until: float) -> Found:
    """Tell versions, tools and the GPU; begin to compile the CPU's kernels."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    found["missing_tools"] = [tool for tool in TOOLS if shutil.which(tool) is None]
    found["cores"] = len(os.sched_getaffinity(0))
    found["ram_gb"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    minutes.begin_warm_up()
    if minutes.emulated:
        return True, found | {"device": "emulated"}
    _, text = minutes.run([sys.executable, "-c", LOOK_AT_GPU], until, "machine")
    told = marked(text)
    if not told:
        return False, found | {"error": text[-400:]}
    minutes.has_device = told[0].pop("there")
    return (True if minutes.has_device else None), found | told[0]


def compile(minutes: Minutes, until: float) -> Found:
    """Compile all kernels in one module, and wait until the CPU's are compiled too."""
    cases = [("kernels", {"kind": "describe_kernels"})]
    results, (ok, line) = minutes.answer("compile", cases, until, 90, 1, 2)
    told = {k: v for k, v in results["kernels"].items() if k not in ("ok", "trace", "sticky", "s")}
    waited_s = minutes.await_warm_up(min(time.monotonic() + 50, until))
    return ok, told | {"waited_for_numba_s": round(waited_s, 1)} | ({} if ok else line)


def selftest(minutes: Minutes, until: float) -> Found:
    """Run the self-test that precedes a training, of each recipe."""
    cases: list[Case] = [
        (recipe, {"kind": "check_device", "with": {"recipe": recipe}}) for recipe, _ in recipes()
    ]
    return minutes.answer("selftest", minutes.some(cases, 6), until, 40, 4, 2)[1]


def steps_case(title: str, recipe: str, options: dict[str, Any], **about: Any) -> Case:
    """Return a case of steps of two ranks on the GPU and on the CPU."""
    about = {"steps": 4, "shapes": SMALL, "tolerance": INEXACT.get(recipe, 0)} | about
    about |= {"recipe": recipe, "options": options}
    return title, {"kind": "run_steps", "with": about}


def contract_cases() -> list[Case]:
    """Return cases of every recipe and option: NaN, odd sizes, denormals, sharded exchanges."""
    from tests.contracts import STEPS

    cases = [
        steps_case(f"{recipe} {options or ''}", recipe, options, nan_step=2)
        for recipe, options, _ in STEPS
    ]
    for recipe, options in recipes():
        cases.append(steps_case(f"{recipe}, odd sizes", recipe, options, shapes=ODD))
        cases.append(steps_case(f"{recipe}, denormals", recipe, options, exponent=-132))
    for recipe in ("fft", "dct"):
        # One step: which of several equal sums is sent depends on the last bits, so states part.
        cases.append(steps_case(f"{recipe}, sharded", recipe, {"exchange": "sharded"}, steps=1))
    return cases


def contracts(minutes: Minutes, until: float) -> Found:
    """Compare steps of all recipes with the CPU's, small tensors."""
    cases = minutes.some(contract_cases(), 16)
    results, (ok, line) = minutes.answer("contracts", cases, until, 40, 6, 2)
    host = [name for name, found in results.items() if found.get("on_device", [True]) != [True]]
    return ok, line | {"of_the_host": host}


def large(minutes: Minutes, until: float) -> Found:
    """Compare steps of all recipes with the CPU's, large tensors."""
    shapes = {"1 M": (1000, 1000), "25 M": (5000, 5000)}
    if minutes.emulated:
        shapes = {"5 k": (50, 100), "40 k": (200, 200)}
    cases = [
        # The first steps of auto are trials, on the host.
        steps_case(f"{title} {recipe}", recipe, options, shapes=[shape],
                   steps=6 if recipe == "auto" else 3, tolerance=INEXACT_LARGE.get(recipe, 0))
        for title, shape in shapes.items()
        for recipe, options in recipes()
    ]  # fmt: skip
    return minutes.answer("large", minutes.some(cases, 12), until, 60, 4, 2)[1]


def speed(minutes: Minutes, until: float) -> Found:
    """Time codecs on several lists of tensors, and steps of all recipes on one of them."""
    lists, repeat = ("25 M", "ResNet-50", "1 M", "100 M", "20 x 600 x 600"), 7
    if minutes.emulated:
        lists, repeat = ("small",), 2
    cases: list[Case] = []
    for tensors in lists:
        names = ("topk", "fft", "dct", "efsignsgd", "qsgd")
        for codec in names if tensors in ("25 M", "ResNet-50", "small") else names[:2]:
            about = {"codec": codec, "tensors": tensors, "repeat": repeat}
            cases.append((f"{tensors}, {codec}", {"kind": "time_codec", "with": about}))
    for recipe in (
        "powersgd",
        *(name for name, _ in recipes() if name not in ("auto", "powersgd")),
    ):
        about = {"recipe": recipe, "tensors": lists[0], "repeat": repeat}
        cases.append((f"step of {recipe}", {"kind": "time_step", "with": about}))
    results, (ok, line) = minutes.answer("speed", minutes.some(cases, 4), until, 30, 1, 2)
    table = {}
    for name, found in results.items():
        told = {key: value for key, value in found.items() if key not in ("ok", "s")}
        if found["ok"] and name.startswith("step of "):
            table[name.removeprefix("step of ")] = [told["step_ms"], told["copies"]]
        elif found["ok"]:
            minutes.report.show(step="speed", case=name, **told)
    return ok, {"step_ms_and_copies": table, **line}


def waits(minutes: Minutes, until: float) -> Found:
    """Count the calls of each recipe's step for which the host waits for the GPU."""
    cases: list[Case] = [
        (recipe, {"kind": "count_waits", "with": {"recipe": recipe}})
        for recipe, _ in recipes()
        if recipe != "auto"
    ]
    results, (ok, line) = minutes.answer("waits", minutes.some(cases, 8), until, 30, 2, 2)
    told = {name: found["waits"] for name, found in results.items() if found.get("waits")}
    note = {"note": "nothing to count without a GPU"} if minutes.emulated else {}
    return ok, {"waits_per_step": told, **note, **line}


def memcheck(minutes: Minutes, until: float) -> Found:
    """Look for accesses beyond allocations, in the self-test of all recipes."""
    return sanitized(minutes, until, "memcheck")


def racecheck(minutes: Minutes, until: float) -> Found:
    """Look for races in shared memory, in the self-test of all recipes."""
    return sanitized(minutes, until, "racecheck")


def sanitized(minutes: Minutes, until: float, tool: str) -> Found:
    """Run the self-test of all recipes under a tool of compute-sanitizer."""
    if minutes.emulated or shutil.which("compute-sanitizer") is None:
        return None, {"skipped": "no device, or no compute-sanitizer"}
    # A runtime that is newer than the driver asks it for what it has not: no error of kernels.
    command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no",
               "--error-exitcode", FOUND_ERRORS, "--print-limit", 30]  # fmt: skip
    command += [sys.executable, HERE / "gpu_programs.py", "checked"]
    code, text = minutes.run(command, until, tool)
    told = marked(text)
    reports = [line[10:150] for line in text.splitlines() if line.startswith("=========")]
    reports = [line for line in reports if re.search("Invalid|Race|hazard|ERROR SUMMARY", line)]
    failed = [found for found in told if not found["ok"]]
    return None if code is None and not failed and told else code == 0 and not failed, {
        "exit": code,
        "recipes": len(told),
        "failed": failed[:3],
        "slowest": sorted(((found["s"], found["recipe"]) for found in told), reverse=True)[:2],
        "reports": reports[:3] + reports[-1:],
        "end": "" if told else text[-300:],
    }


def ddp(minutes: Minutes, until: float) -> Found:
    """Train under DDP: one rank over NCCL, then two ranks over Gloo on the same GPU."""
    told: dict[str, Any] = {}
    bad: list[dict[str, Any]] = []
    for backend, size in (("gloo" if minutes.emulated else "nccl", 1), ("gloo", 2)):
        results = ranks(minutes, until, backend, size)
        found, title = marked(results[0][1]), f"{size} over {backend}"
        for each in found:
            minutes.report.detail(step="ddp", ranks=title, **each)
            if not each["ok"] or each["warnings"]:
                bad.append({"ranks": title, **each})
        told[title] = {each["recipe"]: [each["step_ms"], each["waits"]] for each in found}
        if any(code != 0 for code, _ in results) or not found:
            ends = [text[-300:] for code, text in results if code != 0]
            codes = [code for code, _ in results]
            bad.append({"ranks": title, "ok": False, "exits": codes, "end": ends[:1]})
    return all(each["ok"] for each in bad), {"step_ms_and_waits": told, "bad": bad[:3]}


def ranks(minutes: Minutes, until: float, backend: str, size: int) -> list[tuple[int | None, str]]:
    """Run ``size`` ranks of gpu_ranks.py; return exit status and output of each."""
    command = [sys.executable, HERE / "gpu_ranks.py", "--backend", backend]
    command += ["--emulated"] if minutes.emulated else []
    results: list[tuple[int | None, str]] = [(None, "")] * size
    with tempfile.TemporaryDirectory() as folder:

        def run(rank: int) -> None:
            about = {"WORLD_SIZE": str(size), "RANK": str(rank), "OMP_NUM_THREADS": "2"}
            title = f"ddp rank {rank} of {size}"
            results[rank] = minutes.run(command, until, title, STORE=f"{folder}/store", **about)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


def pytest(minutes: Minutes, until: float) -> Found:
    """Run the tests of ``make test-gpu``, but for those that want the GPU alone."""
    files = ["tests/gpu/test_device.py", "tests/test_torch_distributed.py"]
    chosen = "not sanitizer and not without_memory and not 2_to_the_31"
    if minutes.emulated:
        files, chosen = files[:1], "emulated and topk-bitmap and payloads"
    path = minutes.report.folder / "pytest.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"]
    command += [f"--junitxml={path}", "-k", chosen, *([] if minutes.emulated else ["-m", "gpu"])]
    with contextlib.suppress(PackageNotFoundError):
        version("pytest-xdist")
        command += [] if minutes.emulated else ["-n", "8", "--dist", "loadgroup"]
    code, text = minutes.run([*command, *files], until, "pytest", OMP_NUM_THREADS="1")
    bad = []
    with contextlib.suppress(OSError, ElementTree.ParseError):
        for case in ElementTree.parse(path).iter("testcase"):
            for problem in (*case.iter("failure"), *case.iter("error")):
                bad.append([case.get("name"), (problem.get("message") or "")[:160]])
    lines = [line for line in text.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    result = lines[-1] if lines else text[-300:]
    return code == 0, {"exit": code, "result": result, "failed": bad[:8]}


def ncu(minutes: Minutes, until: float) -> Found:
    """Count time and bytes of each kernel of an encoding and a decoding by topk and by fft."""
    if minutes.emulated or shutil.which("ncu") is None:
        return None, {"skipped": "no device, or no ncu"}
    table: list[str] = []
    for wanted in (list(METRICS), list(METRICS)[:3]):  # a counter of this list may be unknown
        command = ["ncu", "--profile-from-start", "off", "--clock-control", "none",
                   "--cache-control", "none", "--csv", "--print-units", "base",
                   "--metrics", ",".join(wanted)]  # fmt: skip
        command += [sys.executable, HERE / "gpu_programs.py", "profiled"]
        code, text = minutes.run(command, until, "ncu")
        table = text[text.index('"ID"') :].splitlines() if '"ID"' in text else []
        if table or time.monotonic() > until - 20:
            break
    if not table:
        return False, {"exit": code, "error": text[-400:]}
    (minutes.report.folder / "ncu.csv").write_text("\n".join(table))
    kernels = launches_of(table)
    for own in kernels:
        minutes.report.detail(step="ncu", **own)
    for own in sorted(kernels, key=lambda own: -own["us"])[:6]:
        minutes.report.show(step="ncu", **own)
    return code == 0, {"launches": len(kernels), "us": round(sum(own["us"] for own in kernels), 1)}


def launches_of(table: list[str]) -> list[dict[str, Any]]:
    """Return what ncu has counted of each launch, in microseconds and megabytes."""
    kernels: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(table))):
        own = kernels.setdefault(row["ID"], {"kernel": row["Kernel Name"].partition("(")[0]})
        with contextlib.suppress(KeyError, ValueError, AttributeError):
            own[METRICS[row["Metric Name"]]] = float(row["Metric Value"].replace(",", ""))
    for own in kernels.values():
        for key, unit in (("us", 1e3), ("read_mb", 1e6), ("written_mb", 1e6)):
            own[key] = round(own.get(key, math.nan) / unit, 2)
    return list(kernels.values())


def train(minutes: Minutes, until: float) -> Found:
    """Train by several recipes; each prints its line when it ends."""
    budget, threads = until - time.monotonic(), str(min(8, len(os.sched_getaffinity(0))))
    command = [sys.executable, HERE / "gpu_train.py", "--budget", budget]
    command += ["--emulated"] if minutes.emulated else []
    told: list[dict[str, Any]] = []

    def tell(line: str) -> None:
        if line.startswith(MARK):
            told.extend(marked(line))
            minutes.report.show(step="train", **told[-1])

    code, text = minutes.run(command, until, "train", tell=tell, OMP_NUM_THREADS=threads)
    line = {"exit": code, "recipes": len(told) - 1, "end": "" if code == 0 else text[-300:]}
    return code == 0 and all(each["ok"] for each in told), line
