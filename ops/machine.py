"""Locks among the processes of a machine, and the folders of the user's cache."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Seconds between two attempts to take a lock, doubled up to the maximum: on a network file system every attempt is a
# request to its server.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0


@contextmanager
def locked(
    file: Path, seconds: float, *, until: Callable[[], object] = lambda: False
) -> Iterator[bool | None]:
    """Hold an exclusive file lock inside the ``with`` block; yield whether this process got it.

    The operating system releases the lock of a process that dies.

    Args:
        file: The lock file. Created with its folder if it is missing, and never removed.
        seconds: How long to wait for another process to release the lock.
        until: Called repeatedly while this process waits, which ends when it returns something true.

    Yields:
        ``True`` with the lock, ``False`` if waiting ended without it, and ``None``, without waiting, if processes
        cannot lock at all: the folder is not writable or its file system has no locks.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = file.open("w")
    except OSError:
        yield None
        return
    with opened:  # closing it releases the lock
        deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
        acquired: bool | None = False
        while acquired is False:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                acquired = True
            except BlockingIOError:
                if (remaining := deadline - time.monotonic()) <= 0 or until():
                    break
                time.sleep(min(pause, remaining))
                pause = min(2 * pause, _LONGEST_PAUSE)
            except OSError:
                acquired = None
        yield acquired


def folder_of(variable: str, name: str) -> Path:
    """Return the folder that the environment variable names, else the folder ``name`` in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.environ.get(variable) or os.path.join(cache, name))
