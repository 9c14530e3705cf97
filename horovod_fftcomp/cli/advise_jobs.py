"""Jobs of ``advise``: who starts their ranks, under each launcher."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from horovod_fftcomp.cli import run as run_command
from horovod_fftcomp.cli.arguments import RecipeChoice
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.tools.run import launcher


class Jobs:
    """Starts jobs of ``size`` ranks, one after another.

    Without a launcher by one. A rank that torchrun or Horovod's Gloo has started starts its own
    rank of each job, and the others do the same; ``rank`` is then not 0 on these. MPI and Slurm
    take one process of each rank, so that the first one starts all, and the others end here.
    """

    def __init__(self, parsed: argparse.Namespace) -> None:
        self._parsed, self._places = parsed, None
        self.size, self._given = parsed.np or 2, parsed.launcher
        found = launcher.launched_rank()
        self.rank, self._is_joined = found or 0, found is not None and launcher.may_start_again()
        if found is not None:
            self._check()
            self.size = launcher.launched_size()
        if self._is_joined and launcher.is_torchrun():
            meeting = importlib.import_module("horovod_fftcomp.torch_distributed.meeting")
            self._places = meeting.MeetingPlaces()
        elif found is not None and not self._is_joined:
            self._leave()
        if self.size < 2:
            parsed.fail("give -np 2 or more: one rank exchanges nothing")
        name = Path((self._given or launcher.default_launcher())[0]).name
        has_horovod = importlib.util.find_spec("horovod") is not None
        self.is_ddp = launcher.is_torchrun() or name == "torchrun" or not has_horovod

    def _check(self) -> None:
        if self._parsed.np or (self._parsed.launcher and launcher.may_start_again()):
            self._parsed.fail(
                "a launcher has started this job, so -np and --launcher do not count: leave them "
                "out, or run advise by itself"
            )

    def _leave(self) -> None:
        """End this process unless it is the first rank, which goes on as without a launcher."""
        if self._given is None and "SLURM_STEP_ID" in os.environ:
            self._given = ["srun", "--overlap"]
        elif self._given is None and threads.get_local_size() < self.size:
            self._parsed.fail(
                "MPI takes one process of each rank, and advise starts several; on several "
                f"machines run it by itself: horovod-fftcomp advise -np {self.size} --launcher "
                '"mpirun -H a:1,b:1" ...'
            )
        if self.rank:
            raise SystemExit(0)
        launcher.leave_job()

    def _next(self) -> tuple[list[str], int]:
        """Return what starts the next job, and how many ranks this process then starts."""
        if self._is_joined:
            return ["env", *(self._places.next() if self._places else ())], 1
        return self._given or launcher.default_launcher(), self.size

    def run_script(self, choice: RecipeChoice) -> dict[str, Any]:
        """Return the report of the first rank that is started here; exit if a job has failed."""
        parsed, lines = self._parsed, list[str]()
        parsed.launcher, n_ranks = self._next()
        ended = run_command.launch(parsed, choice, n_ranks, lines.append)
        trouble = run_command.trouble(ended, n_ranks)
        if trouble or ended.reports[0]["step_s"] is None:
            sys.stderr.write("".join(lines[-50:]))
            parsed.fail(
                f"{parsed.script} with recipe {choice.name}: {trouble or 'two steps are needed'}"
            )
        return ended.reports[0]

    def probe(self, nbytes: int, dtypes: list[str], node_size: int) -> dict[str, Any]:
        """Return what ``advise_probe`` reports for gradients of ``nbytes`` in all."""
        asked = json.dumps([nbytes, dtypes, node_size])
        command = [sys.executable, "-m", "horovod_fftcomp.cli.advise_probe", asked]
        start, n_ranks = self._next()
        lines: list[str] = []
        try:
            ended = launcher.launch(start, n_ranks, command, lines.append)
        except FileNotFoundError as error:
            self._parsed.fail(
                f"{error.filename!r} was not found; give a --launcher, or --gbit-per-s X"
            )
        if len(ended.reports) < n_ranks:
            sys.stderr.write("".join(lines[-50:]))
            self._parsed.fail(
                "the network could not be measured (this needs PyTorch, with Horovod unless ranks "
                "are started by torchrun); give its values: --gbit-per-s X --latency-us US "
                "--ranks P"
            )
        return ended.reports[0]

    def start(self, ranks: int) -> str:
        """Return what starts ``horovod-fftcomp`` on so many ranks by the launcher in use."""
        default = ["torchrun"] if self.is_ddp else ["horovodrun"]
        given = self._given or default
        if Path(given[0]).name == "torchrun":
            nodes, local = 1, ranks
            if self._is_joined and ranks == self.size:
                local = threads.get_local_size()
                nodes = self.size // local
            number = ["--nnodes", str(nodes)] * (nodes > 1) + ["--nproc-per-node", str(local)]
            return shlex.join([*given, *number, "-m", "horovod_fftcomp"])
        return shlex.join([*launcher.starts(given, ranks), "horovod-fftcomp"])
