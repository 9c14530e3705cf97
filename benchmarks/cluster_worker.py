"""One host's part of cluster.py: train a net in many ways, in turns, and take all times and bytes.

    docker/netns -n 4 -r 200mbit --gloo python benchmarks/cluster_worker.py alexnet out.json

The ways take their steps in turn, so that a busy machine treats all alike. The first rank writes
the result of all ranks. Raises RuntimeError if the ranks' parameters differ to the last bit.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from horovod_fftcomp import list_compressors
from horovod_fftcomp.tools import environment
from horovod_fftcomp.torch import Compression
from horovod_fftcomp.torch_distributed import compress

WARM_UP = 2
POLL_S = 0.0002
WHOLE = ("step_s", "sent_nbytes", "sent_packets")  # what is known of a step as a whole
PORT = 29500
QSGD_LEVELS = 127
Tensors = tuple[torch.Tensor, ...]

OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "fft(density=0.15, bits=10)": ("fft", {"density": 0.15, "bits": 10}),
    "fft": ("fft", {}),
    "topk": ("topk", {}),
    "random_block": ("random_block", {}),
    "scalecom": ("scalecom", {}),
}


def alexnet() -> nn.Module:
    """Return five convolutions and three large linear layers: 3.0 M parameters."""
    widths = (3, 48, 96, 128, 128, 96)
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Conv2d(before, after, 5 if number == 0 else 3, padding="same"), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * (number in (0, 1, 4))
    head = [nn.Linear(1536, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), *head, nn.Linear(1024, 10))


class Residual(nn.Module):
    """Two convolutions beside a shortcut. He et al. 2016."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activations, (batch, channels, height, width)."""
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet() -> nn.Module:
    """Return a ResNet-18 of half the width: 2.8 M parameters."""
    blocks = [
        Residual(*shape) for shape in [(32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    ] + [Residual(*shape) for shape in [(64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]]
    stem = [nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


MODELS = {"alexnet": alexnet, "resnet": resnet}


def wait_for(handles: Iterable[int]) -> None:
    """Wait and leave the core to others, which Horovod's own waiting, a busy loop, does not."""
    for handle in handles:
        while not hvd.poll(handle):
            time.sleep(POLL_S)


def barrier() -> None:
    """Wait for all ranks."""
    handle = hvd.allreduce_async(torch.zeros(1), name="barrier")
    wait_for([handle])
    hvd.synchronize(handle)


def synchronize(optimizer: Any) -> None:
    """Let Horovod's optimizer wait and unpack."""
    wait_for([handle for handle, _ in optimizer._handles.values()])
    optimizer.synchronize()


class Alone:
    """No exchange: what a step computes."""

    has_parts = True  # whether a step's exchange can be told from its backward pass

    def __init__(self, model: nn.Module) -> None:
        self.optimizer: Any = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        self.forward = model

    def spent(self) -> dict[str, float]:
        """Return seconds and bytes since the start; bytes by the collective that took them."""
        return dict.fromkeys(("encode_s", "hidden_s", "in_backward_s", "decode_s"), 0.0)

    def synchronize(self) -> None:
        """Put the ranks' means into the gradients."""


class Horovod(Alone):
    """Horovod's own ``none`` or ``fp16``."""

    def __init__(self, model: nn.Module, name: str, compression: Any) -> None:
        super().__init__(model)
        named = [(f"{name}.{n}", p) for n, p in model.named_parameters()]
        self.optimizer = hvd.DistributedOptimizer(self.optimizer, named, compression=compression)
        values_nbytes = 2 if compression is hvd.Compression.fp16 else 4
        self.step_nbytes = values_nbytes * sum(p.numel() for _, p in named)
        self.steps = 0

    def spent(self) -> dict[str, float]:
        """Add what was reduced."""
        return {**super().spent(), "allreduce": self.steps * self.step_nbytes}

    def synchronize(self) -> None:
        """Let Horovod do it."""
        self.steps += 1
        synchronize(self.optimizer)


class Ours(Alone):
    """A recipe of this package."""

    def __init__(self, model: nn.Module, recipe: str, options: dict[str, Any]) -> None:
        super().__init__(model)
        self.compression = getattr(Compression, recipe)(model, warmup_steps=0, **options)
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer, model.named_parameters(), compression=self.compression
        )
        self.nbytes = dict.fromkeys(("allgather", "allreduce", "broadcast", "alltoall"), 0)
        exchanges = self.compression.driver.pipeline
        exchanges._send = partial(self._count, exchanges._send)

    def _count(self, send: Callable[..., Any], round_: Any, *where: Any) -> Any:
        self.nbytes[round_.collective] += round_.data.nbytes
        return send(round_, *where)

    def spent(self) -> dict[str, float]:
        """Return what ``stats`` tells; probes and dense tensors are reduced as well."""
        stats = self.compression.stats()
        others = stats["sent_nbytes"] - sum(self.nbytes.values())
        return {
            "encode_s": stats["encode_s"],
            "hidden_s": stats["encode_hidden_s"],
            "in_backward_s": 0.0,
            "decode_s": stats["decode_s"],
            **self.nbytes,
            "allreduce": self.nbytes["allreduce"] + others,
        }

    def synchronize(self) -> None:
        """Let Horovod do it."""
        synchronize(self.optimizer)


class Classic(Alone):
    """A compressor as others write it: each tensor in its hook, gathered unpacked."""

    def __init__(self, model: nn.Module, name: str, make: Callable[[int], Any]) -> None:
        super().__init__(model)
        self.encode_s = self.decode_s = 0.0
        self.nbytes = 0
        self.handles: list[tuple[nn.Parameter, Any, list[int]]] = []
        for label, parameter in model.named_parameters():
            codec = make(parameter.numel())
            hook = partial(self._send, f"{name}.{label}", codec)
            parameter.register_post_accumulate_grad_hook(hook)

    def _send(self, name: str, codec: Any, parameter: nn.Parameter) -> None:
        begin = time.perf_counter()
        message = codec.encode(parameter.grad.reshape(-1))
        self.encode_s += time.perf_counter() - begin
        self.nbytes += sum(part.nbytes for part in message)
        handles = [
            hvd.allgather_async(part, name=f"{name}.{number}")
            for number, part in enumerate(message)
        ]
        self.handles.append((parameter, codec, handles))

    def spent(self) -> dict[str, float]:
        """Add what this took; all encoding is part of the backward pass."""
        encode = dict.fromkeys(("encode_s", "in_backward_s"), self.encode_s)
        spent = {**super().spent(), **encode}
        return {**spent, "decode_s": self.decode_s, "allgather": self.nbytes}

    def synchronize(self) -> None:
        """Wait for each tensor, and put the mean over ranks into its gradient."""
        for parameter, codec, handles in self.handles:
            wait_for(handles)
            gathered = [hvd.synchronize(handle).chunk(hvd.size()) for handle in handles]
            begin = time.perf_counter()
            total = torch.zeros(parameter.numel())
            for message in zip(*gathered, strict=True):
                codec.add(total, message)
            parameter.grad.copy_((total / hvd.size()).view_as(parameter))
            self.decode_s += time.perf_counter() - begin
        self.handles = []


class Ddp(Alone):
    """DDP with a hook, which ``register`` makes; its backward pass ends with the exchange."""

    has_parts = False

    def __init__(
        self, model: nn.Module, register: Callable[[Any], object], bucket_cap_mb: int | None = None
    ) -> None:
        super().__init__(model)
        self.forward = DistributedDataParallel(
            model, broadcast_buffers=False, bucket_cap_mb=bucket_cap_mb
        )
        self.hook = register(self.forward)


def bf16(state, bucket):
    """Call DDP's hook, which DDP refuses by its name where there is no NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


def register_powersgd(model: Any) -> None:
    """Let DDP's PowerSGD compress from the third step on, the first in which it can."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class TopK:
    """Float32 values, int32 indices and a residual. Aji and Heafield 2017."""

    def __init__(self, density: float, numel: int) -> None:
        self.k = max(1, int(density * numel))
        self.residual = torch.zeros(numel)

    def encode(self, grad: torch.Tensor) -> Tensors:
        """Return values and indices."""
        self.residual += grad
        _, indices = self.residual.abs().topk(self.k, sorted=False)
        values = self.residual.gather(0, indices)
        self.residual.index_fill_(0, indices, 0)
        return values, indices.int()

    def add(self, total: torch.Tensor, message: Tensors) -> None:
        """Add a rank's message to ``total``."""
        total.index_add_(0, message[1], message[0])


class Rounded:
    """Each value to the level above or below, by chance, so that the mean is right; int8."""

    def __init__(self, numel: int) -> None:
        self.generator = torch.Generator().manual_seed(hvd.rank())

    def levels(self, grad: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """Return the whole numbers of ``unit``, int8."""
        scaled = grad.abs() / unit.clamp_min(torch.finfo(torch.float32).tiny)
        floor = scaled.floor()
        up = torch.rand(grad.shape, generator=self.generator) < scaled - floor
        return ((floor + up) * grad.sign()).to(torch.int8)

    def add(self, total: torch.Tensor, message: Tensors) -> None:
        """Add a rank's message to ``total``."""
        levels, unit = message
        total.add_(levels.float() * unit)


class QSGD(Rounded):
    """127 levels of the norm. Alistarh et al. 2017."""

    def encode(self, grad: torch.Tensor) -> Tensors:
        """Return levels and what one is worth."""
        unit = grad.norm().reshape(1) / QSGD_LEVELS
        return self.levels(grad, unit), unit


class TernGrad(Rounded):
    """Minus one, zero or one, after clipping at 2.5 standard deviations. Wen et al. 2017."""

    def encode(self, grad: torch.Tensor) -> Tensors:
        """Return signs and what one is worth."""
        limit = 2.5 * grad.std(correction=0)
        clipped = grad.clamp(-limit, limit)
        unit = clipped.abs().max().reshape(1)
        return self.levels(clipped, unit), unit


CLASSIC: dict[str, Callable[[int], Any]] = {
    "Top-k 0.15, unpacked": partial(TopK, 0.15),
    "Top-k 0.01, unpacked": partial(TopK, 0.01),
    "QSGD int8": QSGD,
    "TernGrad int8": TernGrad,
}
# All others, with their defaults: for a table of all recipes, not for every point.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    recipe: (recipe, {"calibrate_steps": 1} if recipe == "hard_threshold" else {})
    for recipe in list_compressors()
    if recipe not in (*OURS, "none", "fp16")
}
# The ways of an exchange: for a table of their own.
EXCHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{recipe}(exchange={exchange})": (recipe, {"exchange": exchange})
    for recipe in ("fft", "topk")
    for exchange in ("gather", "sharded")
}
# Under Horovod and under DDP, side by side.
BY_DDP = ("powersgd", "fft", "dither", "topk", "scalecom")
DDP: dict[str, Callable[[nn.Module], Alone]] = {
    "DDP": lambda model: Ddp(model, lambda _: None),
    "DDP, bf16_compress_hook": lambda model: Ddp(model, lambda m: m.register_comm_hook(None, bf16)),
    # Over Gloo this hook crashes or stands still with several buckets: see ddp_torture.py.
    "DDP, powerSGD_hook": lambda model: Ddp(model, register_powersgd, bucket_cap_mb=1024),
    **{
        f"DDP, {r}": partial(Ddp, register=partial(compress, recipe=r, warmup_steps=0))
        for r in BY_DDP
    },
}
WAYS: dict[str, Callable[[nn.Module], Alone]] = {
    "alone": Alone,
    "none": lambda model: Horovod(model, "none", hvd.Compression.none),
    "fp16": lambda model: Horovod(model, "fp16", hvd.Compression.fp16),
    **{name: partial(Classic, name=name, make=make) for name, make in CLASSIC.items()},
    **{
        name: partial(Ours, recipe=r, options=o)
        for name, (r, o) in (OURS | OTHERS | EXCHANGES).items()
    },
    **DDP,
}


def sent() -> np.ndarray:
    """Return bytes and packets that this host's interface has sent, as the kernel counts them."""
    counters = Path("/sys/class/net/eth0/statistics")
    return np.array([int((counters / name).read_text()) for name in ("tx_bytes", "tx_packets")])


def claimed(nbytes: dict[str, float]) -> float:
    """Return what a host sends on average for these collectives, in bytes.

    A ring passes on each block but the own one; of a broadcast each host but one takes a copy.
    """
    p = hvd.size()
    part = (p - 1) / p
    shares = {"allgather": p - 1, "allreduce": 2 * part, "broadcast": part, "alltoall": part}
    return sum(share * nbytes.get(collective, 0) for collective, share in shares.items())


class Run:
    """One way to train, with a model of its own."""

    def __init__(self, model: str, way: str) -> None:
        torch.manual_seed(0)
        self.name, self.model = way, MODELS[model]()
        self.way = WAYS[way](self.model)
        self.steps: list[dict[str, float]] = []
        self.losses: list[float] = []

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Train one step; take down seconds and bytes."""
        optimizer, before = self.way.optimizer, self.way.spent()
        barrier()
        counted, begin = sent(), time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.way.forward(images), labels)
        loss.backward()
        ready = time.perf_counter()
        self.way.synchronize()
        reduced = time.perf_counter()
        self._apply(optimizer)
        end = time.perf_counter()
        barrier()  # what was on its way has arrived, for links keep the order
        sent_nbytes, sent_packets = sent() - counted
        after = self.way.spent()
        spent = {key: value - before.get(key, 0) for key, value in after.items()}
        exposed = spent["encode_s"] - spent["hidden_s"] - spent["in_backward_s"]
        self.losses.append(loss.item())
        self.steps.append(
            {
                "step_s": end - begin,
                "compute_s": ready - begin - spent["in_backward_s"] + end - reduced,
                "encode_s": spent["encode_s"],
                "hidden_s": spent["hidden_s"],
                "exchange_s": max(0.0, reduced - ready - exposed - spent["decode_s"]),
                "decode_s": spent["decode_s"],
                "sent_nbytes": sent_nbytes,
                "sent_packets": sent_packets,
                "claimed_nbytes": claimed(spent),
            }
        )

    def _apply(self, optimizer: Any) -> None:
        if hasattr(optimizer, "skip_synchronize"):
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()

    def digest(self) -> str:
        """Return a hash of all parameters."""
        weights = (p.detach().numpy().tobytes() for p in self.model.parameters())
        return hashlib.sha256(b"".join(weights)).hexdigest()

    def result(self) -> dict[str, Any] | None:
        """Return medians and quartiles over steps, from all ranks; None where the first is not.

        A step ends when the last rank's does; parts of it and bytes are means over ranks.
        """
        ranks = hvd.allgather_object((self.digest(), self.steps[WARM_UP:], self.losses[-1]))
        digests, steps, losses = zip(*ranks, strict=True)
        if self.name != "alone" and len(set(digests)) > 1:
            raise RuntimeError(f"{self.name}: the ranks' parameters differ: {digests}")
        if hvd.rank():
            return None
        keys = [key for key in steps[0][0] if key in WHOLE or self.way.has_parts]
        table = {key: np.array([[s[key] for s in own] for own in steps]) for key in keys}
        ends = table.pop("step_s").max(axis=0)
        quartiles = [round(float(q), 4) for q in statistics.quantiles(ends, n=4)[::2]]
        means = {key: float(np.median(own.mean(axis=0))) for key, own in table.items()}
        return {
            "step_s": round(float(np.median(ends)), 4),
            "step_s_quartiles": quartiles,
            **{key: round(value, 4 if key.endswith("_s") else 0) for key, value in means.items()},
            "loss": round(statistics.mean(losses), 4),
        }


def idle_nbytes_per_s() -> float:
    """Return what a host sends when nothing is exchanged: Horovod asks each cycle who is ready."""
    barrier()
    before = sent()
    time.sleep(2)
    return float((sent() - before)[0]) / 2


def batches(size: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Return what draws this rank's next batch: ten pictures, each with noise of its own."""
    pictures = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(100 + hvd.rank())

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(10, (size,), generator=generator)
        noise = torch.randn(len(labels), 3, 32, 32, generator=generator)
        return pictures[labels] + 2 * noise, labels

    return draw


def take_precedence() -> None:
    """Let the machine's other work wait, as hosts of their own would not know it."""
    autogroup = Path("/proc/self/autogroup")  # a session's share of the cores
    if autogroup.exists():
        autogroup.write_text("-15")


def connect() -> None:
    """Connect the ranks by ``torch.distributed`` as well, over the shaped links."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    address = f"tcp://{hvd.broadcast_object(socket.gethostname())}:{PORT}"
    dist.init_process_group("gloo", init_method=address, rank=hvd.rank(), world_size=hvd.size())


def main() -> None:
    """Train, and let the first rank write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--batch", type=int, default=16, help="images on each host")
    parser.add_argument("--steps", type=int, default=8, help="timed ones (default: %(default)s)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--ways", nargs="+", choices=WAYS, metavar="WAY")
    which.add_argument("--every-recipe", action="store_true", help="no classic compressors")
    which.add_argument("--exchanges", action="store_true", help="gathered, sharded and auto")
    which.add_argument("--ddp", action="store_true", help="DDP beside Horovod")
    args = parser.parse_args()
    facts = environment.describe()
    take_precedence()
    hvd.init()
    cores = sorted(os.sched_getaffinity(0))  # hosts that share a core get equal parts of it
    os.sched_setaffinity(0, {cores[hvd.rank() % len(cores)]})
    torch.set_num_threads(1)
    draw = batches(args.batch)
    ways = args.ways or [way for way in WAYS if way not in OTHERS | EXCHANGES | DDP]
    if args.every_recipe:
        ways = [way for way in WAYS if way not in CLASSIC | EXCHANGES | DDP]
    if args.exchanges:
        ways = ["alone", "none", "fp16", *EXCHANGES, *dict(EXCHANGES.values())]
    if args.ddp:
        ways = ["alone", "none", "fp16", *BY_DDP, *DDP]
    if not DDP.keys().isdisjoint(ways):
        connect()
    runs = [Run(args.model, way) for way in ways]
    for number in range(WARM_UP + args.steps):
        batch = draw()
        for run in runs:
            run.step(*batch)
        if hvd.rank() == 0:
            print(f"step {number + 1} of {WARM_UP + args.steps}", flush=True)
    idle = hvd.allgather_object(idle_nbytes_per_s())
    found = {run.name: run.result() for run in runs}
    if hvd.rank() == 0:
        result = {
            "machine": facts,
            "parameters": sum(p.numel() for p in runs[0].model.parameters()),
            "batch": args.batch,
            "steps": args.steps,
            "idle_nbytes_per_s": round(statistics.mean(idle)),
            "ways": found,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
