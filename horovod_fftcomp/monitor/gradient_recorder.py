"""Gradients of some steps in an ``.npz`` file, from which recipes can be tried without training."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

# Bytes beside name and values that a member of the file takes at most: its two headers.
_HEADERS_NBYTES = 4096
_BUFFER_NBYTES = 1 << 23  # of a directory: a hundred bytes for an array


class Recorder:
    """Writes the gradients of every ``every``-th step into a new file, in a thread of its own.

    ``path``: of a file that does not exist, in a folder that does; otherwise FileExistsError or
    FileNotFoundError. ``np.load`` reads the file, also during the run and after the process was
    killed, unless in the milliseconds in which a directory of the file is written: its keys are
    "<step>/<tensor name>", its arrays float32 in the tensor's shape.
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
    """Add arrays to a zip file; on an error leave it as it was.

    A zip file is read from its end, where its directory lies. So the directory is first copied to
    where the file will end, then the new arrays fill the gap, and last comes the new directory.
    """
    begin = path.stat().st_size
    room = sum(g.nbytes + 4 * len(name) + _HEADERS_NBYTES for name, g in members.items())
    with _or_truncated_to(begin, path), _opened(path) as archive:
        archive.start_dir = begin + room
        archive.comment = archive.comment  # counts as a change: the directory is written
    end = path.stat().st_size
    with _or_truncated_to(end, path), _opened(path) as archive:
        archive.start_dir = begin
        try:
            for name, grad in members.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, grad.astype(np.float32, copy=False))
        finally:
            archive.start_dir = end


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    # The buffer lets a directory reach the file in one piece, or nearly.
    with path.open("r+b", buffering=_BUFFER_NBYTES) as file, zipfile.ZipFile(file, "a") as archive:
        yield archive


@contextlib.contextmanager
def _or_truncated_to(nbytes: int, path: Path) -> Iterator[None]:
    """Cut the file back if an error comes, to where a directory ends it."""
    try:
        yield
    except BaseException:
        os.truncate(path, nbytes)
        raise
