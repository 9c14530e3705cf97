"""Records gradients in ``.npz`` files, with which recipes can be compared without training."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from horovod_fftcomp.monitor.step_log import check_folder_of


class Recorder:
    """Writer of every ``every``-th step's gradients to files in a folder, in a background thread.

    ``path``: a new or empty folder; FileExistsError if it holds anything or is a file,
    FileNotFoundError if its parent does not exist. ``np.load`` reads "<step>.npz": keys are tensor
    names, arrays float32 in the tensor's shape. A file is complete as soon as it is there.
    """

    def __init__(self, path: str | os.PathLike[str], every: int) -> None:
        self.path = Path(path)
        self.every = every
        check_folder_of(self.path, "record")
        if self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir())):
            raise FileExistsError(
                f"record: {str(self.path)!r} exists and is not overwritten; give another name, or "
                "move it away"
            )
        self.path.mkdir(exist_ok=True)
        self._last = -1
        self._worker = ThreadPoolExecutor(1, "fftcomp-record")
        self.writing: Future[None] | None = None

    def wants(self, step: int) -> bool:
        """Return whether ``step`` is to be recorded; recorded steps are not written again."""
        return step % self.every == 0 and step > self._last

    def append(self, step: int, grads: Mapping[str, np.ndarray]) -> None:
        """Write a step's gradients, by name, as float32; they must not change afterwards.

        Waits until the previous step is written, then writes in the background.
        """
        self.flush()
        self._last = step
        self.writing = self._worker.submit(write_file, self.path / f"{step}.npz", grads)

    def check(self) -> None:
        """Raise an error of the last write, if it has failed; do not wait."""
        if self.writing is not None and self.writing.done():
            self.flush()

    def flush(self) -> None:
        """Wait until everything is written; raise an error of the last write."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result()


def write_file(path: Path, grads: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a new ``.npz`` file, which has its name only when it is complete."""
    part = path.with_suffix(".part")
    try:
        # Not np.savez, whose parameters have names that a tensor may have.
        with zipfile.ZipFile(part, "w") as archive:
            for name, grad in grads.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, grad.astype(np.float32, copy=False))
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
