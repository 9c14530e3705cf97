"""Where processes meet that the ranks of a job of torchrun start, each one of its own."""

from __future__ import annotations

import datetime
import os
import socket

import torch.distributed as dist

_PATIENCE = datetime.timedelta(minutes=30)


class MeetingPlaces:
    """Addresses at which such processes meet, one after another; made on all ranks.

    The first rank tells them the others by the store of torchrun, or by its own if torchrun has
    none. Processes in that store would find what those before them have left there.
    """

    def __init__(self) -> None:
        self._address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._is_first, self._number = os.environ["RANK"] == "0", 0
        owns = self._is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        self._store = dist.TCPStore(
            *self._address, is_master=owns, wait_for_workers=False, timeout=_PATIENCE
        )

    def next(self) -> list[str]:
        """Return the next one as variables of the environment, written NAME=value."""
        self._number += 1
        key = f"fftcomp.meeting/{self._number}"
        if self._is_first:
            self._store.set(key, self._free())
        host, port = self._store.get(key).decode().split()
        return [f"MASTER_ADDR={host}", f"MASTER_PORT={port}", "TORCHELASTIC_USE_AGENT_STORE=False"]

    def _free(self) -> str:
        """Return host and free port of this rank; torchrun's store may be on another machine."""
        with socket.create_connection(self._address) as line:
            own, other = line.getsockname()[0], line.getpeername()[0]
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        return f"{self._address[0] if own == other else own} {port}"
