"""A lock file for the processes of a machine."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["locked"]


@contextmanager
def locked(file: Path, seconds: float) -> Iterator[bool]:
    """Hold a lock file; yield whether this process got it in time. The operating system releases that of a dead one.

    In a folder that cannot be written processes have nothing to share: each goes on at once.

    Args:
        file: Made if it is missing, with its folder; it stays.
        seconds: How long to wait for others.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        gate = file.open("w")
    except OSError:
        yield True
        return
    with gate:
        deadline = time.monotonic() + seconds
        mine = False
        while not mine:
            try:
                fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = True
            except OSError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
        yield mine
