"""What the processes of a machine share: lock files, and JSON files with what one of them has found."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

# Seconds between two tries for a lock: on a network file system every try is a request to its server.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0


@contextmanager
def locked(file: Path, seconds: float) -> Iterator[bool | None]:
    """Hold a lock file; yield whether this process got it in time. The operating system releases that of a dead one.

    ``None`` where processes share nothing and each goes on at once: in a folder that cannot be written, and on a file
    system without locks.

    Args:
        file: Made if it is missing, with its folder; it stays.
        seconds: How long to wait for others.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        gate = file.open("w")
    except OSError:
        yield None
        return
    with gate:
        deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
        mine: bool | None = False
        while mine is False:
            try:
                fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = True
            except BlockingIOError:
                if (left := deadline - time.monotonic()) <= 0:
                    break
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)
            except OSError:
                mine = None
        yield mine


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one if there is no such file, or no object in it."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Replace a file, whole; do nothing in a folder that cannot be written."""
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        partial.write_text(json.dumps(content, indent=1))
        os.replace(partial, file)
    except OSError:
        with suppress(OSError):
            partial.unlink()


def folder_of(variable: str, name: str) -> Path:
    """Return the folder that an environment variable names, or one of that name in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.environ.get(variable) or os.path.join(cache, name))


def cache_folder() -> Path:
    """Return the folder of these files."""
    return folder_of("DS_MUON_CACHE_DIR", "deepspeed_muon")


def file_for(kind: str, identity: Sequence[str], folder: Path | None = None) -> Path:
    """Return the file with what was found for an identity: names of hardware, versions, digests.

    It lies in ``folder``, by default :func:`cache_folder`.
    """
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
    return (cache_folder() if folder is None else folder) / f"{kind}-{digest}.json"


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; ``None`` without one, as of a source tree that is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def hardware_name() -> str:
    """Return the names of the processor, its instruction set and the GPU, if there is one."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            label, _, value = line.partition(":")
            if label.strip() == "model name":
                name = value.strip()
                break
    amx = ", AMX" if torch.cpu._is_amx_tile_supported() else ""
    gpu = f" + {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{name} ({torch.backends.cpu.get_cpu_capability()}{amx}){gpu}"
