"""What a multi-process test run may leave on a machine, and how to find and remove it.

Three kinds of litter matter here. DeepSpeed's CPU backend leaves a 66 MB file per rank in /dev/shm for ever; a
killed rank may leave children behind; and a native build that was killed leaves a ``lock`` file on which every
later build waits in silence. Nothing here removes what a live process still uses, or what another run made.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

SHM_DIR = Path("/dev/shm")
"""Where POSIX shared memory lives on Linux."""

SHM_PREFIXES = ("deepspeed_allreduce_buffer_", "torch_", "sm_segment.", "vader_segment.", "osc_rdma")
"""Names that DeepSpeed, torch and Open MPI give to their files in /dev/shm."""

TAG_VARIABLE = "DEEPSPEED_MUON_TEST_RUN"
"""Environment variable that marks every process of a run, so that all of its descendants can be found again.

Launchers start ranks in sessions of their own, so that neither a process group nor a parent id finds them all.
"""

PATIENCE = 5.0
"""Seconds that the kernel gets to end processes that were killed."""

_SESSION = f"{os.getpid()}-{uuid.uuid4().hex}"


def new_tag() -> str:
    """Return a value of ``TAG_VARIABLE`` for a run of this session."""
    return f"{_SESSION}-{uuid.uuid4().hex}"


def shm_files() -> set[str]:
    """Return the names of the files in /dev/shm that ranks are known to make."""
    if not SHM_DIR.is_dir():
        return set()
    return {name for name in os.listdir(SHM_DIR) if name.startswith(SHM_PREFIXES)}


def allreduce_buffer_prefix(address: str, port: int) -> str:
    """Return how DeepSpeed's shm all-reduce op starts the file names of a run (``shm_initialize`` in shm.cpp)."""
    return f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_"


def remove_shm(names: Iterable[str]) -> None:
    """Remove files from /dev/shm, except those that a live process still has mapped.

    A file that is mapped belongs to a run that goes on; one that nobody maps can only be what a dead rank left.
    """
    names = set(names)
    used = _paths_in_use() if names else set()
    for path in (SHM_DIR / name for name in names):
        if str(path) not in used:
            path.unlink(missing_ok=True)


def kill_tagged(tag: str) -> None:
    """Kill every process of the run with this value of ``TAG_VARIABLE`` and wait until they are gone."""
    deadline = time.monotonic() + PATIENCE
    while (pids := tagged_processes(tag)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def tagged_processes(tag: str) -> list[int]:
    """Return the ids of the live processes of a run."""
    wanted = f"{TAG_VARIABLE}={tag}".encode()
    pids = []
    for pid in _process_ids():
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes() and not _is_zombie(pid):
                pids.append(pid)
    return pids


def remove_stale_locks(folder: Path) -> None:
    """Remove the build locks under ``folder`` that no live process holds.

    torch's ``FileBaton`` keeps its lock file open while it builds, so that a lock which nobody has open was left
    by a build that was killed.
    """
    locks = [path for path in folder.glob("*/lock") if path.is_file()]
    used = _paths_in_use() if locks else set()
    for path in locks:
        if str(path.resolve()) not in used:
            path.unlink(missing_ok=True)


def _process_ids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _is_zombie(pid: int) -> bool:
    # The field after the command's closing bracket; the command itself may hold spaces and brackets.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _paths_in_use() -> set[str]:
    """Return every path that some process that we may look into has open or mapped."""
    return {path for pid in _process_ids() for path in _paths_of(pid)}


def _paths_of(pid: int) -> Iterator[str]:
    # A process may end, or refuse to be looked into, at any point of this.
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                yield fields[5]
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{name}")
