"""Compare recipes with common compressors written in PyTorch: time, bytes and error.

    python benchmarks/peers.py -n 25M --threads 1 --compression topk,qsgd,onebit

Takes the arguments of ``horovod-fftcomp bench`` and prints and writes the same, with a second group
of rows for the peers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch
from torch_peers import PEERS, make_sessions

from horovod_fftcomp.cli import bench
from horovod_fftcomp.cli.arguments import RecipeChoice
from horovod_fftcomp.cli.bench_report import Result
from horovod_fftcomp.kernels.threads import get_num_threads
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.tools.bench import Session
from horovod_fftcomp.types import Array, Shape


class TorchPeers:
    """The peers of the measured recipes. ``seed``: of their random numbers."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def sessions(
        self, choices: Sequence[RecipeChoice], shape: Shape, other_grad: Array
    ) -> list[Session]:
        """Return the peers for tensors of ``shape``, with as many threads as the kernels have."""
        torch.set_num_threads(get_num_threads())
        options = {choice.name: {**RECIPES[choice.name].options, **choice.options}
                   for choice in choices}  # fmt: skip
        return make_sessions(topk_density(choices), shape, other_grad, self._seed, options)

    def lines(self, result: Result, choices: Sequence[RecipeChoice]) -> Iterator[str]:
        """Yield lines for below a table: how much faster each recipe is than its peer.

        Of ``topk`` at equal density only.
        """
        for choice, one in zip(choices, result.ours, strict=True):
            label = "torch.topk" if choice.name == "topk" else PEERS.get(choice.name)
            found = (p for p in result.peers if label is not None and p.label.startswith(label))
            peer = next(found, None)
            if peer is None:
                continue
            if choice.name == "topk" and topk_density([choice]) != topk_density(choices):
                continue
            encode = peer.encode_s / one.encode_s
            if peer.feedback_s and one.feedback_s:
                encode = peer.feedback_s / one.feedback_s
            yield (
                f"{choice.label} over {peer.label}: encodes {encode:.1f}x as fast, decodes "
                f"{peer.decode_s / one.decode_s:.1f}x as fast, "
                f"ratio {one.ratio / peer.ratio:.1f}x as high"
            )


def topk_density(choices: Sequence[RecipeChoice]) -> float:
    """Return the density of torch.topk: that of the first ``topk`` among the recipes."""
    options = next((choice.options for choice in choices if choice.name == "topk"), {})
    default = RECIPES["topk"].options["density"]
    return float(options.get("density", default))


def main(arguments: Sequence[str]) -> None:
    """Measure recipes and peers; exit status 130 if it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    bench.add_arguments(parser)
    parsed = parser.parse_args(arguments)
    parsed.arguments, parsed.program = arguments, ["python", "benchmarks/peers.py"]
    parsed.peers = TorchPeers(parsed.seed)
    try:
        bench.run(parsed)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
