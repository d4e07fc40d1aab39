"""Files that processes share: locks, and JSON caches of measurements and self-test results.

They are in the user's home by default, which several machines may share. So the name of a cache file has a digest of
the hardware for which it holds, and the name of a lock that is about this machine's devices has its host name.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deepspeed_muon.math import coefficients, newton_schulz

SELF_TEST_SECONDS = float(os.environ.get("DS_MUON_SELF_TEST_SECONDS", "300"))
"""Time limit of one run of the self-test, with the import of torch and a CUDA context; with retries twice as long."""

# Seconds for which a transient failure is cached: long enough that processes which start together try once.
_TRANSIENT_SECONDS = 600.0

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


def lock_file(folder: Path, name: str) -> Path:
    """Return the path of a lock among the processes of this machine, in a folder that machines may share."""
    return folder / f".{name}-{platform.node()}"


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if the file is missing, unreadable or holds no JSON object."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Replace a file atomically; do nothing if its folder is not writable."""
    # Readers take no lock, so they must never see half of a file.
    # Beside it, so that the rename is atomic. Machines that share the folder may have processes with the same id.
    partial = file.with_name(f"{file.name}.{platform.node()}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(content, indent=1))
        os.replace(partial, file)
    except OSError:
        with suppress(OSError):
            partial.unlink()


def transient_until() -> float:
    """Return the time in seconds until which a failure of now is cached that may not happen again."""
    return time.time() + _TRANSIENT_SECONDS


def is_current(until: object) -> bool:
    """Return whether a cache entry is valid that holds ``until`` a time in seconds; ``None`` stands for good."""
    if not isinstance(until, int | float):  # in a damaged file it may be anything
        return until is None
    # Expired, or so far in the future that the clock must have been set back.
    return time.time() < until < time.time() + 2 * _TRANSIENT_SECONDS


def folder_of(variable: str, name: str) -> Path:
    """Return the folder that the environment variable names, else the folder ``name`` in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.environ.get(variable) or os.path.join(cache, name))


def cache_folder() -> Path:
    """Return the folder of cached measurements and verdicts; ``DS_MUON_CACHE_DIR`` overrides it."""
    return folder_of("DS_MUON_CACHE_DIR", "deepspeed_muon")


def file_for(kind: str, identity: Sequence[str], folder: Path | None = None) -> Path:
    """Return the path of the cache file for an identity, in ``folder`` or :func:`cache_folder`.

    Args:
        kind: The first word of the file name, such as ``autotune``.
        identity: What the content is valid for: names of hardware, versions, digests. The file name has its digest.
        folder: ``None`` for :func:`cache_folder`.
    """
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
    return (cache_folder() if folder is None else folder) / f"{kind}-{digest}.json"


def installed_version(package: str) -> str | None:
    """Return the version of a package, or ``None`` if it is not installed (a source tree on ``sys.path`` is not)."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def software_identity() -> list[str]:
    """Return the versions of torch and Triton, and a digest of the Python code that runs their kernels.

    Together with the key of the native library it identifies the software for which a cached timing or verdict holds.
    """
    # Nightly builds of torch depend on Triton by the other name.
    triton = installed_version("triton") or installed_version("pytorch-triton")
    return [f"torch {torch.__version__}", f"triton {triton}", f"code {_code_digest()}"]


@functools.cache
def _code_digest() -> str:
    """Return the digest of ``ops/*.py`` and of the iteration in torch, on which timings and verdicts depend."""
    files = [*Path(__file__).parent.glob("*.py"), Path(coefficients.__file__), Path(newton_schulz.__file__)]
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def hardware_name() -> str:
    """Return the names of the processor, of its instruction set and of the current GPU, if there is one."""
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
