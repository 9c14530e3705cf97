"""What DDP's communication hooks and those of this package do in cases that break a hook.

    python benchmarks/ddp_torture.py

Starts its own ranks over Gloo: those of one trial with one hook at a time, in new processes, which
are killed when they stand still. Writes results/ddp_torture.json and the table in README.md; a
trial that is there already is not measured again. --hooks and --trials measure a part, which is
printed alone.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import io
import json
import logging
import multiprocessing
import pickle
import re
import signal
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from horovod_fftcomp.tools import environment
from horovod_fftcomp.torch_distributed import compress

OUT = Path(__file__).resolve().parent / "results" / "ddp_torture.json"
README, MARK = Path(__file__).resolve().parent / "README.md", "<!-- ddp_torture -->"
STOCK: dict[str, Callable[..., Any] | None] = {
    "no hook": None,
    "fp16": default_hooks.fp16_compress_hook,
    # DDP refuses the hook of this name where there is no NCCL.
    "bf16": lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket),
    "PowerSGD": powerSGD_hook.powerSGD_hook,
}
OURS = ("powersgd", "topk", "fft")
HOOKS = (*STOCK, *OURS)
N_BUCKETS = 20
PATIENCE_S = 30.0  # without a word of the ranks; a step takes milliseconds
COMPILING_S = 600.0
LATER_STEPS = 10
# What hooks and ``torch.load`` raise; anything else is a fault of this script and ends it.
RAISED = (RuntimeError, pickle.UnpicklingError)


class Job:
    """What a rank of a trial has: a folder that all its jobs share, and whom to tell of steps."""

    def __init__(self, folder: Path, sender: Connection) -> None:
        self.folder, self._sender, self._steps = folder, sender, 0

    def begin_step(self) -> None:
        """Tell that another step begins."""
        self._steps += 1
        self._sender.send(self._steps)


class Net(nn.Module):
    """Three layers of different sizes, so that buckets of other parameters have other sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
        self.layers = nn.Sequential(*sizes, nn.Linear(256, 16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of recognizing the largest of the first 16 inputs."""
        return nn.functional.cross_entropy(self.layers(inputs), inputs[:, :16].argmax(1))


class Layers(nn.Sequential):
    """Layers one after the other."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the outputs."""
        return super().forward(inputs).square().mean()


class Sums(nn.Module):
    """Loss that is linear in the weights.

    With small whole numbers its gradients are exact in whichever order they are added, and do not
    depend on the weights, so two trainings can be compared to the last bit.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Return the sum of the layers' outputs times ``factors``."""
        return torch.stack([(layer(inputs) * factors).sum() for layer in self.layers]).sum()


class Training:
    """A model under DDP with a hook, and its optimizer.

    ``saved``: the hook's state as ``saved`` returned it. ``options``: those of DDP.
    """

    def __init__(
        self,
        hook: str,
        job: Job,
        model: nn.Module,
        saved: bytes | None = None,
        scaler: Any = None,
        **options: Any,
    ) -> None:
        self.hook, self._job, self.scaler = hook, job, scaler
        self.ddp = DistributedDataParallel(model, **options)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if hook in OURS:
            self.state: Any = compress(self.ddp, hook, grad_scaler=scaler, warmup_steps=0)
            if saved is not None:
                self.state.load_state_dict(loaded(saved))
            return
        self.state = None if saved is None else loaded(saved)
        if hook == "PowerSGD" and saved is None:
            self.state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=4, start_powerSGD_iter=2
            )
        if STOCK[hook] is not None:
            self.ddp.register_comm_hook(self.state, STOCK[hook])

    def backward(self, *inputs: torch.Tensor) -> None:
        """Compute the averaged gradients of a step."""
        self._job.begin_step()
        self.optimizer.zero_grad()
        loss = self.ddp(*inputs)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def train(self, steps: range) -> None:
        """Train a ``Net``."""
        for step in steps:
            self.backward(batch(step))
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()

    def weights(self) -> torch.Tensor:
        """Return a copy of all weights."""
        return torch.cat([p.detach().reshape(-1) for p in self.ddp.parameters()]).double()

    def gradients(self) -> torch.Tensor:
        """Return a copy of all averages, each in the order of its tensor's indices."""
        return torch.cat([p.grad.reshape(-1) for p in self.ddp.parameters()]).double()

    def saved(self) -> bytes:
        """Return the hook's state as ``torch.save`` writes it."""
        file = io.BytesIO()
        torch.save(self.state.state_dict() if self.hook in OURS else self.state, file)
        return file.getvalue()

    def residuals(self) -> torch.Tensor:
        """Return this rank's residuals, in the order in which the state holds them."""
        if self.hook in OURS:
            named = self.ddp.module.named_parameters()
            return flat(self.state.residual(name) for name, p in named if p.dim() > 1)
        return flat(self.state.error_dict[index] for index in sorted(self.state.error_dict))


def flat(tensors: Iterator[torch.Tensor]) -> torch.Tensor:
    """Return all elements in one tensor of doubles."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).double()


def loaded(saved: bytes, weights_only: bool = False) -> Any:
    """Return a saved state. PowerSGD's needs a pickle: see the trial of ``weights_only``."""
    return torch.load(io.BytesIO(saved), weights_only=weights_only)


def batch(step: int) -> torch.Tensor:
    """Return a step's inputs on this rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(32, 128, generator=generator)


def whole_numbers(seed: int, *shape: int) -> torch.Tensor:
    """Return small whole numbers of this rank's own, as floats."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(-3, 4, shape, generator=generator).float()


class Found(NamedTuple):
    """What a trial found on one rank: a share, None if it failed; and how the table shows it."""

    share: float | None
    text: str
    digest: str = ""  # of the weights, which must be the same on all ranks


ENDED = Found(None, "crash: a rank has ended")


def found(share: torch.Tensor | float, training: Training) -> Found:
    """Return a share in percent, and a hash of the weights."""
    digest = hashlib.sha256(training.weights().numpy().tobytes()).hexdigest()
    share = float(share)
    digits = ".0f" if share >= 0.1 else ".2g"
    text = f"{100 * share:{digits}} %" if share else "0"
    return Found(share, "NaN" if share != share else text, digest)


# The trials: each runs on every rank.


def resume(hook: str, job: Job, bucket_cap_mb: float) -> Found:
    """Return the difference of the weights three steps after a resume, over their movement."""
    whole = Training(hook, job, Net(), bucket_cap_mb=bucket_cap_mb)
    whole.train(range(4))
    begin, state = whole.weights(), whole.saved()
    model, optimizer = copy.deepcopy((whole.ddp.module, whole.optimizer.state_dict()))
    whole.train(range(4, 7))
    again = Training(hook, job, model, state, bucket_cap_mb=bucket_cap_mb)
    again.optimizer.load_state_dict(optimizer)
    again.train(range(4, 7))
    moved = (whole.weights() - begin).norm()
    return found((again.weights() - whole.weights()).norm() / moved, again)


def load_weights_only(hook: str, job: Job) -> Found:
    """Load the saved state by ``torch.load(weights_only=True)``."""
    training = Training(hook, job, Net())
    training.train(range(4))
    if training.state is None:
        return Found(0.0, "-")
    loaded(training.saved(), weights_only=True)
    return found(0.0, training)


def save_on_two(hook: str, job: Job) -> Found:
    """Save what another number of ranks is to load."""
    training = Training(hook, job, Net())
    training.train(range(4))
    if training.state is None:
        return Found(0.0, "-")
    total = training.residuals()
    dist.all_reduce(total)
    state = training.state.gathered_state_dict() if hook in OURS else training.state
    if dist.get_rank() == 0:  # all ranks load it, as in PyTorch's documentation of PowerSGD
        torch.save(state, job.folder / "state.pt")
        torch.save(total, job.folder / "total.pt")
    return found(0.0, training)


def load_on_three(hook: str, job: Job) -> Found:
    """Return the difference of the sum of all ranks' residuals, over that sum."""
    if not (job.folder / "state.pt").exists():
        return Found(0.0, "-")
    training = Training(hook, job, Net(), (job.folder / "state.pt").read_bytes())
    before = torch.load(job.folder / "total.pt", weights_only=True)
    total = training.residuals()
    dist.all_reduce(total)
    share = (total - before).norm() / before.norm()
    training.train(range(4, 7))
    return found(share, training)


def not_a_number(hook: str, job: Job) -> Found:
    """Return the share of the ten steps after one with a NaN whose averages are not finite."""
    training = Training(hook, job, Net())
    bad = 0
    warnings.filterwarnings("ignore", ".*NaN or Inf", RuntimeWarning)  # ours say so
    for step in range(4 + LATER_STEPS):
        inputs = batch(step)
        if step == 3 and dist.get_rank() == 1:
            inputs[0, 0] = torch.nan
        training.backward(inputs)
        finite = bool(training.gradients().isfinite().all())
        if finite:  # as a loss scaler does
            training.optimizer.step()
        bad += step > 3 and not finite
    if bad == LATER_STEPS:
        return found(1.0, training)._replace(text="NaN from then on")
    return found(bad / LATER_STEPS, training)


def halved_scale(hook: str, job: Job) -> Found:
    """Return the difference of the weights ten steps after a halving, over their movement."""
    ends = []
    for halves in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        training = Training(hook, job, Net(), scaler=scaler)
        training.train(range(4))
        begin = training.weights()
        scaler.update(512.0 if halves else 1024.0)
        training.train(range(4, 4 + LATER_STEPS))
        ends.append(training.weights())
    return found((ends[1] - ends[0]).norm() / (ends[0] - begin).norm(), training)


def static_graph(hook: str, job: Job) -> Found:
    """Return the difference of six steps' weights from those without it, over their movement."""
    ends = []
    for static in (False, True):
        training = Training(hook, job, Net(), static_graph=static)
        begin = training.weights()
        training.train(range(6))
        ends.append(training.weights())
    return found((ends[1] - ends[0]).norm() / (ends[0] - begin).norm(), training)


def no_sync(hook: str, job: Job) -> Found:
    """Return the difference of the averages from those of the whole batch at once, over these."""
    torch.manual_seed(0)
    layers = Sums(*(nn.Linear(64, 96, bias=False) for _ in range(3)))
    one, other = (Training(hook, job, copy.deepcopy(layers)) for _ in range(2))
    difference = total = 0.0
    for step in range(6):
        inputs, factors = whole_numbers(step, 8, 64), whole_numbers(10 + step, 8, 96)
        one.backward(inputs, factors)
        other.optimizer.zero_grad()
        with other.ddp.no_sync():
            for part in range(3):
                other.ddp(inputs[2 * part :][:2], factors[2 * part :][:2]).backward()
        other.ddp(inputs[6:], factors[6:]).backward()
        difference += float((other.gradients() - one.gradients()).norm())
        total += float(one.gradients().norm())
    return found(difference / total, other)


def channels_last(hook: str, job: Job) -> Found:
    """Return the difference of the averages from those of contiguous weights, over these."""
    torch.manual_seed(0)
    layers = Sums(*(nn.Conv2d(16, 32, 3, bias=False) for _ in range(3)))
    memory = copy.deepcopy(layers).to(memory_format=torch.channels_last)
    one, other = (Training(hook, job, each) for each in (layers, memory))
    difference = total = 0.0
    for step in range(6):
        inputs, factors = whole_numbers(step, 4, 16, 8, 8), whole_numbers(10 + step, 4, 32, 6, 6)
        for training in (one, other):
            training.backward(inputs, factors)
        difference += float((other.gradients() - one.gradients()).norm())
        total += float(one.gradients().norm())
    return found(difference / total, other)


def many_buckets(hook: str, job: Job, steps: int) -> Found:
    """Train for ``steps`` steps of twenty buckets."""
    torch.manual_seed(0)
    layers = Layers(*(nn.Linear(64, 64, bias=False) for _ in range(N_BUCKETS)))
    training = Training(hook, job, layers, bucket_cap_mb=64 * 64 * 4 / 2**20)
    for step in range(steps):
        training.backward(batch(step)[:4, :64])
        training.optimizer.step()
    sizes = training.ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", ")
    if len(sizes) != N_BUCKETS:
        raise AssertionError(f"DDP made {len(sizes)} buckets, not {N_BUCKETS}")
    return found(0.0, training)


class Trial(NamedTuple):
    """A trial: its jobs, one after the other, as pairs (number of ranks, what each rank runs)."""

    title: str
    jobs: Sequence[tuple[int, Callable[..., Found]]]


def make_trials(steps: int) -> dict[str, Trial]:
    """Return the trials by name."""
    two = (2, save_on_two)
    return {
        "resume": Trial("resume, one bucket", [(2, partial(resume, bucket_cap_mb=25.0))]),
        "buckets": Trial("resume, 2 buckets", [(2, partial(resume, bucket_cap_mb=0.3))]),
        "weights_only": Trial("load weights_only", [(2, load_weights_only)]),
        "world_size": Trial("resume, 2 to 3 ranks", [two, (3, load_on_three)]),
        "nan": Trial("one NaN", [(2, not_a_number)]),
        "scale": Trial("loss scale halved", [(2, halved_scale)]),
        "static_graph": Trial("static_graph", [(2, static_graph)]),
        "no_sync": Trial("no_sync", [(2, no_sync)]),
        "channels_last": Trial("channels-last weights", [(2, channels_last)]),
        "steps": Trial(
            f"{N_BUCKETS} buckets, {steps} steps", [(2, partial(many_buckets, steps=steps))]
        ),
    }


def work(
    run: Callable[..., Found], hook: str, rank: int, n_ranks: int, folder: Path, sender: Connection
) -> None:
    """Be one rank of a job, and send what it found."""
    torch.set_num_threads(1)
    powerSGD_hook.logger.setLevel(logging.ERROR)  # it notes each time that its state is saved
    store = f"file://{folder}/store-{n_ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=n_ranks)
    try:
        result = run(hook, Job(folder, sender))
    except RAISED as error:
        result = Found(None, f"crash: {shortened(str(error))}")
    sender.send(result)
    sender.recv()  # no rank leaves while another one still exchanges


def shortened(message: str) -> str:
    """Return the first sentence of an error message."""
    sentence = re.split(r"\.\s|\n", message.strip())[0].rstrip(".")
    return sentence if len(sentence) <= 120 else f"{sentence[:117]}..."


def carried_out(
    run: Callable[..., Found],
    hook: str,
    n_ranks: int,
    folder: Path,
    patience_s: float = PATIENCE_S,
) -> Found:
    """Return what a job found; it is killed when it stands still."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["horovod_fftcomp.torch_distributed"])  # and PyTorch, once
    ranks, ends = [], []
    for rank in range(n_ranks):
        end, sender = context.Pipe()
        process = context.Process(target=work, args=(run, hook, rank, n_ranks, folder, sender))
        process.start()
        sender.close()
        ranks.append(process)
        ends.append(end)
    try:
        result = outcome(ends, patience_s)
        for end in ends if result.share is not None else []:
            end.send(None)
        for rank in ranks:
            rank.join(2.0)
        codes = [rank.exitcode for rank in ranks if rank.exitcode]
        if 1 in codes:
            raise RuntimeError(f"a rank of {run} with {hook} failed; see its traceback")
        if (
            codes and result == ENDED
        ):  # Gloo aborts the process when the sizes of a collective differ
            result = Found(None, f"crash: a rank was ended by {signal.Signals(-codes[0]).name}")
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return result


def outcome(ends: Sequence[Connection], patience_s: float) -> Found:
    """Return the result of a job's ranks: of the first one that fails, else of all."""
    step, results = 0, {}
    while len(results) < len(ends):
        ready = wait([end for end in ends if end not in results], patience_s)
        if not ready:
            return Found(None, f"hang in step {step}")
        for end in ready:
            try:
                message = end.recv()
            except EOFError:
                return ENDED
            if isinstance(message, int):
                step = max(step, message)
            elif message.text.startswith("crash"):
                return message
            else:
                results[end] = message
    found = list(results.values())
    if len({each.digest for each in found}) > 1:
        return Found(None, "replicas differ")
    return max(found, key=lambda each: each.share or 0.0)


def measured(trial: Trial, hook: str) -> dict[str, Any]:
    """Return what a trial found with a hook."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for n_ranks, run in trial.jobs:
            result = carried_out(run, hook, n_ranks, Path(folder))
            if result.text.startswith(("crash", "hang", "replicas")):
                break
    seconds = round(time.perf_counter() - begin, 1)
    return {"result": result.text, "share": result.share, "seconds": seconds}


def cell(result: str) -> str:
    """Return what stands in the table; the whole result stands below it."""
    return re.split(r":| from| in ", result)[0]


def rows(results: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield each trial's title and its cells."""
    for trial in results["trials"].values():
        yield trial["title"], [cell(trial["hooks"][hook]["result"]) for hook in results["hooks"]]


def notes(results: dict[str, Any]) -> Iterator[str]:
    """Yield what the cells leave out."""
    for trial in results["trials"].values():
        for hook, found in trial["hooks"].items():
            if cell(found["result"]) != found["result"]:
                yield f"{trial['title']}, {hook}: {found['result']}"


def text_table(results: dict[str, Any]) -> str:
    """Return the table for a terminal of 80 columns."""
    widths = {hook: max(len(hook) + 1, 7) for hook in results["hooks"]}
    stock = sum(width for hook, width in widths.items() if hook in STOCK)
    lines = [f"{'':24}{'DDP':{stock}}horovod_fftcomp", f"{'':24}"]
    lines[1] += "".join(f"{hook:{width}}" for hook, width in widths.items())
    for title, cells in rows(results):
        pairs = zip(cells, widths.values(), strict=True)
        lines.append(f"{title:24}" + "".join(f"{each:{width}}" for each, width in pairs))
    lines += ["", *(textwrap.fill(note, 80, subsequent_indent="  ") for note in notes(results))]
    return "\n".join(line.rstrip() for line in lines)


def markdown(results: dict[str, Any]) -> str:
    """Return the table in Markdown."""
    heads = [f"`{hook}`" if hook in OURS else f"DDP, {hook}" for hook in results["hooks"]]
    lines = [f"| trial | {' | '.join(heads)} |", f"|---|{len(heads) * '---:|'}"]
    lines += [f"| {title} | {' | '.join(cells)} |" for title, cells in rows(results)]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes(results))]) + "\n"


def write(results: dict[str, Any]) -> None:
    """Write the results, and their table into README.md."""
    OUT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    page = README.read_text(encoding="utf-8")
    before, _, rest = page.partition(f"{MARK}\n")
    _, end, after = rest.partition(MARK.replace("<!-- ", "<!-- /"))
    README.write_text(f"{before}{MARK}\n{markdown(results)}{end}{after}", encoding="utf-8")


def main() -> None:
    """Measure what is missing, print the table, and write a whole one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = make_trials(1000)
    parser.add_argument("--steps", type=int, default=1000, help="of 20 buckets (%(default)s)")
    parser.add_argument("--hooks", nargs="+", choices=HOOKS, default=HOOKS, metavar="HOOK")
    parser.add_argument("--trials", nargs="+", choices=names, default=names, metavar="TRIAL")
    args = parser.parse_args()
    trials = make_trials(args.steps)
    whole = len(args.hooks) == len(HOOKS) and len(args.trials) == len(trials)
    results: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/ddp_torture.py", *sys.argv[1:]]),
        "machine": environment.describe(),
        "hooks": list(args.hooks),
        "trials": {},
    }
    if whole and OUT.exists():
        results["trials"] = json.loads(OUT.read_text(encoding="utf-8"))["trials"]
    missing = [name for name in args.trials if name not in results["trials"]]
    for hook in set(args.hooks) & set(OURS) if missing else ():  # no trial waits for their kernels
        with tempfile.TemporaryDirectory() as folder:
            carried_out(halved_scale, hook, 2, Path(folder), COMPILING_S)
    for name in missing:
        found = {hook: measured(trials[name], hook) for hook in args.hooks}
        results["trials"][name] = {"title": trials[name].title, "hooks": found}
        print(name, {hook: each["result"] for hook, each in found.items()}, flush=True)
        if whole:
            write(results)
    print(text_table(results))


if __name__ == "__main__":
    main()
