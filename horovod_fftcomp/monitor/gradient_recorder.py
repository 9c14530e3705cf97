"""Records gradients in an ``.npz`` file, with which recipes can be compared without training."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

# Upper limit of the bytes of a file member beside name and values: its two headers.
_HEADERS_NBYTES = 4096
_BUFFER_NBYTES = 1 << 23  # for a zip directory: about 100 bytes per array


class Recorder:
    """Writer of every ``every``-th step's gradients to a new file, in a background thread.

    ``path``: a new file; FileExistsError if it exists, FileNotFoundError if its folder does not.
    ``np.load`` reads the file: keys are "<step>/<tensor name>", arrays float32 in the tensor's
    shape. It can also be read during the run and after the process was killed, except in the
    milliseconds in which the zip directory is written.
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
        """Return whether ``step`` is to be recorded; recorded steps are not written again."""
        return step % self.every == 0 and step > self._last

    def append(self, step: int, grads: Mapping[str, np.ndarray]) -> None:
        """Write a step's gradients, by name, as float32; they must not change afterwards.

        Waits until the previous step is written, then writes in the background.
        """
        self.flush()
        self._last = step
        members = {f"{step}/{name}": grad for name, grad in grads.items()}
        self._writing = self._worker.submit(_append, self.path, members)

    def check(self) -> None:
        """Raise an error of the last write, if it has failed; do not wait."""
        if self._writing is not None and self._writing.done():
            self.flush()

    def flush(self) -> None:
        """Wait until everything is written; raise an error of the last write."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def _append(path: Path, members: Mapping[str, np.ndarray]) -> None:
    """Append arrays to a zip file; on an error leave it as it was.

    A zip file is read from its directory at the end. So the directory is first copied to the future
    end of the file, then the new arrays are written before it, and finally the new directory.
    """
    begin = path.stat().st_size
    gap_nbytes = sum(g.nbytes + 4 * len(name) + _HEADERS_NBYTES for name, g in members.items())
    with _or_truncated_to(begin, path), _opened(path) as archive:
        archive.start_dir = begin + gap_nbytes
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
    # With this buffer the directory is written in one piece, or nearly.
    with path.open("r+b", buffering=_BUFFER_NBYTES) as file, zipfile.ZipFile(file, "a") as archive:
        yield archive


@contextlib.contextmanager
def _or_truncated_to(nbytes: int, path: Path) -> Iterator[None]:
    """Truncate the file to ``nbytes``, the end of a directory, on an error."""
    try:
        yield
    except BaseException:
        os.truncate(path, nbytes)
        raise
