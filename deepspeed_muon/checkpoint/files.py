"""Files and folders of checkpoints: safe reading of untrusted ones, atomic replacement, and locks (filelock's).

Reading: only regular files are read, never pipes or devices, and links to pickles only. Unless the caller trusts it, a
pickle is loaded only if it holds nothing but tensors, numbers and a few classes of DeepSpeed.

Writing: content is written under a temporary name, synced, and renamed (:func:`replace`); then the folder that holds
the name is synced. So a reader finds the old content or the new content, even after a power cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import hashlib
import math
import mmap
import os
import pickle
import pkgutil
import secrets
import shutil
import stat
import zipfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from deepspeed_muon.errors import CheckpointError, MuonError
from deepspeed_muon.logs import logger

_ZERO_STAGES = "deepspeed.runtime.zero.config:ZeroStageEnum"
# DeepSpeed's own classes that its files may hold.
_ALLOWED_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler:LossScaler",
    "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler",
    _ZERO_STAGES,
    "deepspeed.utils.tensor_fragment:fragment_address",
)
MAX_BYTES = 40 << 20
"""Largest file that is parsed, the index of some 80,000 parameters; parsing takes many times as much memory."""
# Do not follow a link that replaced the file, and do not wait for a writer of a pipe.
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

UNTOUCHED = "what the folder held before is untouched"


# ---- reading -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def refusing(source: str) -> Iterator[None]:
    """Turn every exception, except this package's own, into a CheckpointError that begins with ``source``.

    For code that reads content of unknown origin: libraries can raise anything on it.
    """
    try:
        yield
    except MuonError:
        raise
    except OSError as error:
        raise CheckpointError(f"{source}: {error.strerror or error}") from error
    except Exception as error:
        raise CheckpointError(f"{source}: cannot be read: {type(error).__name__}: {error}") from error


def folder_of(argument: str, value: object) -> Path:
    """Return the folder that a caller's argument names.

    Raises:
        CheckpointError: If it is not a path, or empty, which would be the working directory.
    """
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise CheckpointError(f"{argument} must be the path of a folder, got {value!r}")
    if not os.fspath(value):
        raise CheckpointError(f"{argument} is empty: name a folder, '.' for the working directory")
    if "\0" in os.fspath(value):
        raise CheckpointError(f"{argument} has a null character: {os.fspath(value)!r}")
    return Path(value)


def require_folder(folder: Path) -> None:
    """Raise a CheckpointError unless a folder exists."""
    if not folder.is_dir():
        problem = "is no folder" if os.path.lexists(folder) else "no such folder"
        raise CheckpointError(f"{folder}: {problem}: give the folder of a checkpoint")


def is_inside(text: str) -> bool:
    """Return whether a text names something in a folder, or below (a tag with slashes), and does not lead out of it."""
    return not {"", ".", ".."} & {*text.split("/")} and "\0" not in text


def regular_size(path: Path) -> int:
    """Return the size of a regular file.

    Raises:
        CheckpointError: If it is a link, a pipe, a device or a folder.
        OSError: If it does not exist.
    """
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    return status.st_size


def open_regular(path: Path) -> BinaryIO:
    """Return a regular file, opened for reading.

    Raises:
        CheckpointError: If it is a link, a pipe, a device or a folder.
        OSError: If it cannot be opened.
    """
    # Opening a device can have side effects, so look first; and look again, as the file may have been replaced since.
    regular_size(path)
    descriptor = os.open(path, _OPEN_FLAGS)
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise CheckpointError(f"{path}: not a regular file")
    return file


def read_regular(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes.

    Raises:
        CheckpointError: If it is not a regular file, or larger.
        OSError: If it cannot be opened.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise CheckpointError(f"{path}: larger than {limit} bytes, the most that such a file can have")
        return file.read()


def latest_tag(folder: Path) -> str | None:
    """Return the content of DeepSpeed's file ``latest``, which need not be a name; ``None`` without one."""
    try:
        return read_regular(folder / "latest", 4096).decode().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _zero_stage(enumeration: Any, name: str) -> Any:
    """Stand in for ``getattr``, with which Python 3.11.0 to 3.11.3 pickle ``ZeroStageEnum`` members."""
    if enumeration is not pkgutil.resolve_name(_ZERO_STAGES):
        raise pickle.UnpicklingError(f"an attribute of {enumeration!r}")
    return enumeration[name]


def is_archive(path: Path) -> bool:
    """Return whether a file is a zip archive; raise a CheckpointError if it begins as one and its end is missing."""
    with open(path, "rb") as file:
        begins_as_archive = file.read(4) == b"PK\x03\x04"
    if begins_as_archive and not zipfile.is_zipfile(path):  # it looks for the record at the end
        raise CheckpointError(f"{path}: its end is cut off. Copy it again, or load another tag")
    return begins_as_archive


def load_pickle(path: Path, *, trust: bool = False) -> Any:
    """Load a file of ``torch.save`` on the CPU, memory-mapped if it is an archive, without running code from it.

    Args:
        path: The file; may be a link to one.
        trust: Unpickle anything, which can run any code.

    Raises:
        CheckpointError: Naming the file and, if there is one, the class that is not allowed.
    """
    # Where a file calls getattr, the unpickler calls _zero_stage, which returns members of that one class only.
    allowed: list[Any] = [*map(pkgutil.resolve_name, _ALLOWED_CLASSES), (_zero_stage, "builtins.getattr")]
    with refusing(str(path)):
        if not path.is_file() and path.exists():  # torch would wait for the writer of a pipe
            raise CheckpointError(f"{path}: not a regular file")
        try:
            with torch.serialization.safe_globals(allowed):
                # Only archives can be mapped; with checkpoint_serialization false DeepSpeed writes none.
                return torch.load(path, "cpu", mmap=is_archive(path), weights_only=not trust)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path}: holds more than tensors and numbers, or is damaged: {str(error).splitlines()[0]}. If you "
                f"trust whoever wrote it, pass --trust-pickles"
            ) from error


def check_tensor(tensor: object, source: str, *, allow_int8: bool = False) -> None:
    """Raise unless an unpickled object is a dense CPU tensor of floats whose storage has all of its elements.

    With strides of zero, a few numbers would pass for a large tensor.

    Args:
        tensor: The object.
        source: What it is, for the error.
        allow_int8: Accept integers too, for int8 momentum.
    """
    if (
        not isinstance(tensor, Tensor)
        or tensor.layout != torch.strided
        or tensor.device.type != "cpu"
        or not (allow_int8 or tensor.is_floating_point())
    ):
        raise CheckpointError(f"{source} is no dense tensor of real numbers")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise CheckpointError(f"{source} says that it has {tensor.numel()} elements; the file holds fewer")


def drop_pages(tensors: Sequence[Tensor]) -> None:
    """Free the memory of contiguous slices of memory-mapped files after they were read.

    Until then the pages of a mapping count as memory of the process. Tensors outside of mapped files are left alone.
    """
    try:
        with open("/proc/self/maps") as maps:
            lines = [line.split(maxsplit=5) for line in maps]
    except OSError:
        return
    # First and last address of every mapping of a file (those have an inode), in ascending order.
    spans = [span.split("-") for span, _, _, _, inode in (fields[:5] for fields in lines) if inode != "0"]
    mappings = [(int(start, 16), int(stop, 16)) for start, stop in spans]
    madvise = ctypes.CDLL(None).madvise
    for tensor in tensors:
        start = tensor.data_ptr()
        stop = start + tensor.numel() * tensor.element_size()
        mapping_start, mapping_stop = mappings[bisect_right(mappings, (start, math.inf)) - 1]
        if mapping_start <= start < stop <= mapping_stop:
            # madvise takes whole pages. Elements beside the tensor are read from the file again when needed.
            start -= start % mmap.PAGESIZE
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


def file_digest(path: Path) -> str:
    """Return the sha256 of a regular file, hexadecimal.

    Raises:
        CheckpointError: If it is a link, a pipe, a device or a folder.
    """
    digest = hashlib.sha256()
    buffer = bytearray(16 << 20)
    with open_regular(path) as file:
        while count := file.readinto(buffer):  # type: ignore[attr-defined]
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


# ---- writing -----------------------------------------------------------------------------------------------


def temporary_path(path: Path) -> Path:
    """Return a path beside ``path`` to write its new content to; no other process uses it."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def replace(temporary: Path, path: Path, *, check: Callable[[], None] = lambda: None) -> None:
    """Sync a file or folder that was written under a temporary name, and rename it to its name.

    The rename itself is on the disk once the folder above is synced as well (:func:`fsync_folder`).

    Args:
        temporary: The file, or the folder, with everything in it.
        path: Its name. A file is replaced; a folder must be empty.
        check: Called after the sync, right before the rename; may raise.
    """
    folders = os.walk(temporary)  # nothing, if it is a file
    files = [temporary] if temporary.is_file() else []
    for folder, _, names in folders:
        files += [Path(folder, name) for name in names]
        fsync_folder(Path(folder))
    for file in files:
        # fsync acts on the file, not on the descriptor that wrote it.
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
    check()
    os.replace(temporary, path)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill. At the end it is synced and renamed to ``path``; on failure it is removed.

    Args:
        path: The folder to make, with those above it; an empty one there is replaced.

    Raises:
        CheckpointError: If it cannot be written, is not empty, or another process is making it.
    """
    make_folder(path.parent)
    busy = f"{path}: another process is making this folder; wait for it, or name a new one"
    with exclusive(path.with_name(f".{path.name}.lock"), busy) as is_locked:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointError(f"{path}: is a file, or already holds something; name a new folder")
        if is_locked:  # else another process may still be making this folder
            for abandoned in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 12}.tmp"):
                shutil.rmtree(abandoned, ignore_errors=True)
        temporary = temporary_path(path)
        try:
            temporary.mkdir()
            yield temporary
            replace(temporary, path)
            fsync_folder(path.parent)
        except OSError as error:
            raise CheckpointError(f"{path}: {error}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # nothing is left of a folder that was renamed


def make_folder(folder: Path) -> None:
    """Make a folder and the missing ones above it, durably: they survive a power cut.

    Raises:
        CheckpointError: If one cannot be made or synced.
    """
    with refusing(f"{folder}: cannot be made"):
        missing = []
        parent = Path(os.path.realpath(folder))
        while not parent.exists() and parent != parent.parent:
            missing.append(parent)
            parent = parent.parent
        if not os.path.ismount(parent):
            # A killed save may have made this folder without syncing the one above. Unreadable ones are not ours.
            with contextlib.suppress(PermissionError):
                fsync_folder(parent.parent)
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            fsync_folder(path.parent)
        # Raises if the name is that of a file.
        folder.mkdir(exist_ok=True)


def fsync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unlink(path: Path) -> None:
    """Remove a file if that is possible."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def exclusive(path: Path, busy: str) -> Iterator[bool]:
    """Lock a file for this process without waiting, and remove it at the end.

    The lock ends with the block, whatever is raised in it, and with the process.

    Args:
        path: The file; made if needed.
        busy: The error if another process, or another block of this one, holds the lock.

    Yields:
        Whether it is locked; ``False`` on a file system without locks.

    Raises:
        CheckpointError: If it is locked, or cannot be made.
    """
    # A soft lock, filelock's substitute on a file system without locks, would outlive a process that is killed.
    lock = FileLock(path, fallback_to_soft=False)

    def release() -> None:
        with contextlib.suppress(OSError):  # the block is over, and the lock ends with the process
            lock.release()

    with contextlib.ExitStack() as stack:
        stack.callback(release)  # before it is acquired, so that no interrupt comes between the two
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise CheckpointError(busy) from None
        except (OSError, NotImplementedError) as error:
            if getattr(error, "errno", errno.ENOSYS) not in _NO_LOCKS:
                raise CheckpointError(f"{path}: {error}; {UNTOUCHED}") from error
            logger.warning(
                "deepspeed_muon: %s is on a file system without locks: never run two saves into it at once. Files that "
                "killed saves leave there are not removed",
                path.parent,
            )
        # Removed before it is unlocked, so that nobody removes a file that another process has locked.
        stack.callback(unlink, path)
        yield lock.is_locked
