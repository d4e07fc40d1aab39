"""Measures *exposed wait*: time in which a rank neither computes nor could.

A rank's main thread blocks in ``Work.wait`` until a collective has ended; every blocking collective ends there too. Of
that time three parts are not the network's:

* some thread of the rank runs: it copies, adds up or hands bytes to the kernel, which is work of this machine;
* some thread of the rank is runnable, but no core is free (the second figure of ``/proc/self/task/*/schedstat``): with
  more ranks than cores it waits for another rank's computation, and on a host of its own it would not;
* all cores are busy: whoever is waited for may lack a core, too. So no more counts than the time in which the machine's
  cores were idle.

What is left is the exposed wait. Threads that run at the same time while the main thread blocks count one after the
other, so the figure is a lower bound.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

_TICKS = os.sysconf("SC_CLK_TCK")


class WaitMeter:
    """Adds up the time that this process's main thread blocks in collectives, and its exposed part.

    Attributes:
        blocked: Seconds inside ``Work.wait``.
        exposed: The part of it in which no thread of this process ran or was runnable.
        waits: Calls.
    """

    def __init__(self) -> None:
        self.blocked = self.exposed = 0.0
        self.waits = 0
        self._files: dict[int, int] = {}
        self._watched: list[int] = []

    @contextlib.contextmanager
    def watching(self, threads: set[int] | None = None) -> Iterator[set[int]]:
        """Count from zero, for the length of the context.

        Args:
            threads: The threads whose time on the run queue counts; by default all. To look at each thread takes a
                microsecond or two, twice a wait.

        Yields:
            A set that holds at the end which threads ran.
        """
        self.blocked = self.exposed = 0.0
        self.waits = 0
        self._open()
        self._watched = [file for thread, file in self._files.items() if threads is None or thread in threads]
        before = self._times()
        ran: set[int] = set()
        original = dist.Work.wait
        original_from_class = dist.Work.__dict__["wait"]
        meter = self

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            start, busy = time.perf_counter(), meter._busy()
            try:
                return original(work, *args, **kwargs)
            finally:
                busy = meter._busy() - busy
                blocked = time.perf_counter() - start
                meter.blocked += blocked
                # Not clamped: the kernel's figures lag by a tick in both directions.
                meter.exposed += blocked - busy
                meter.waits += 1

        dist.Work.wait = wait
        try:
            yield ran
        finally:
            dist.Work.wait = original_from_class
            after = self._times()
            ran.update(thread for thread, times in after.items() if times != before.get(thread))
            for file in self._files.values():
                os.close(file)
            self._files.clear()

    def _open(self) -> None:
        for name in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it ended
                self._files[int(name)] = os.open(f"/proc/self/task/{name}/schedstat", os.O_RDONLY)

    def _times(self) -> dict[int, bytes]:
        """Return each thread's nanoseconds on a core and on the run queue, and its turns on a core."""
        return {thread: _read(file) for thread, file in self._files.items()}

    def _busy(self) -> float:
        """Return the seconds in which threads of this process ran or were runnable, since it started."""
        queued = sum(int(text.split()[1]) for file in self._watched if (text := _read(file)))
        # The clock is exact for threads that run now; schedstat is up to a tick late.
        return time.process_time() + 1e-9 * queued


def _read(file: int) -> bytes:
    with contextlib.suppress(OSError):  # the thread ended
        return os.pread(file, 96, 0)
    return b""


def idle_seconds() -> float:
    """Return the seconds that all cores of this machine together were idle, since it started."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(fields[4]) + int(fields[5])) / _TICKS
