"""Reads the frames of all threads while others begin and garbage is collected all the time."""

from __future__ import annotations

import gc
import threading
import time
import weakref

from horovod_fftcomp.adapter.watch import innermost_frames


class Cycle:
    """Refers to itself, so that the collector has to find it."""

    def __init__(self) -> None:
        self.itself = self


def start_threads() -> None:
    while not ends.is_set():
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()


ends = threading.Event()
starting = threading.Thread(target=start_threads, daemon=True)
starting.start()
gc.set_threshold(1, 1, 1)
end, n_reads = time.monotonic() + 1, 0
while time.monotonic() < end:
    # A collection calls this, and another thread runs meanwhile.
    told = weakref.ref(Cycle(), lambda _: time.sleep(0.001))
    assert starting.ident in innermost_frames()
    n_reads += 1
ends.set()
starting.join()
assert gc.isenabled()
print(f"frames read {n_reads} times")
