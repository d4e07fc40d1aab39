"""How a process leaves: gloo's threads let go of their tensors first.

A thread of gloo that has finished a collective still has to release its tensors, and for that it asks for Python's
lock. Before Python 3.14, a thread that asks after the interpreter has begun to shut down is ended in the middle of a
destructor, and that kills the process: "terminate called without an active exception", status -6
(https://github.com/pytorch/pytorch/issues/190489). This happens whatever the optimizer, also after a barrier and after
``destroy_process_group``, whose threads live on while anything refers to a group.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

# Seconds. Threads need a few milliseconds, and more on a machine that has more to run than processors.
_BETWEEN_LOOKS, _LONGEST_WAIT = 0.01, 5.0


def wait_for_gloo() -> None:
    """Wait until no thread of gloo in this process has work left; called when the interpreter exits.

    A thread that waits for a dead rank is asleep, and is ignored.
    """
    end = time.monotonic() + _LONGEST_WAIT
    while any(_gloo_threads_running()) and time.monotonic() < end:
        time.sleep(_BETWEEN_LOOKS)


def _gloo_threads_running() -> Iterator[bool]:
    """Yield for each thread of torch's gloo whether it runs, or would if it had a processor; Linux only."""
    for thread in Path("/proc/self/task").glob("*"):
        # Threads end while they are listed.
        with contextlib.suppress(OSError):
            # Python's lock is free while the kernel answers: a thread that asks for the lock counts as running.
            name, fields = (thread / "stat").read_text().rsplit(")", 1)
            if "(pt_gloo" in name:
                yield fields.split()[0] == "R"
