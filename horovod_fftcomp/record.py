"""Gradients of some steps in an ``.npz`` file, from which recipes can be tried without training."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

# Bytes beside name and values that a member of the file takes at most: its two headers.
_HEADERS_NBYTES = 4096


class Recorder:
    """Writes the gradients of every ``every``-th step into a new file, in a thread of its own.

    ``path``: of a file that does not exist, in a folder that does; otherwise FileExistsError or
    FileNotFoundError. ``np.load`` reads the file at any time, also after the process was killed:
    its keys are "<step>/<tensor name>", its arrays float32 in the tensor's shape.
    """

    def __init__(self, path: str | os.PathLike[str], every: int) -> None:
        self.path = Path(path)
        self.every = every
        if not self.path.parent.is_dir():
            raise FileNotFoundError(
                f"record: the folder {str(self.path.parent)!r} does not exist; make it first"
            )
        try:
            zipfile.ZipFile(self.path, "x").close()
        except FileExistsError:
            raise FileExistsError(
                f"record: {str(self.path)!r} exists and is not overwritten; give another name, or "
                "move the file away"
            ) from None
        self._last = -1
        self._worker = ThreadPoolExecutor(1, "fftcomp-record")
        self._writing: Future[None] | None = None

    def wants(self, step: int) -> bool:
        """Tell whether ``step`` is to be written; one that the file has is not written again."""
        return step % self.every == 0 and step > self._last

    def append(self, step: int, grads: Mapping[str, np.ndarray]) -> None:
        """Write a step's gradients, by name, as float32; they must not change any more.

        Returns at once, but not before the step that was written last is in the file.
        """
        self.flush()
        self._last = step
        members = {f"{step}/{name}": grad for name, grad in grads.items()}
        self._writing = self._worker.submit(_append, self.path, members)

    def check(self) -> None:
        """Raise what writing has raised, if it has; do not wait."""
        if self._writing is not None and self._writing.done():
            self.flush()

    def flush(self) -> None:
        """Wait until everything is written; raise what writing has raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def _append(path: Path, members: Mapping[str, np.ndarray]) -> None:
    """Add arrays to a zip file that can be read at any moment, by whoever finds it cut off.

    A zip file is read from its end, where its directory lies. So the directory is first copied to
    where the file will end, then the new arrays fill the gap, and last comes the new directory.
    """
    begin = path.stat().st_size
    room = sum(g.nbytes + 4 * len(name) + _HEADERS_NBYTES for name, g in members.items())
    with zipfile.ZipFile(path, "a") as archive:
        archive.start_dir = begin + room
        archive.comment = archive.comment  # counts as a change: the directory is written
    end = path.stat().st_size
    with zipfile.ZipFile(path, "a") as archive:
        complete = list(archive.filelist)
        archive.start_dir = begin
        try:
            for name, grad in members.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, grad.astype(np.float32, copy=False))
        except BaseException:
            archive.filelist[:] = complete  # no part of a step
            raise
        finally:
            archive.start_dir = end
