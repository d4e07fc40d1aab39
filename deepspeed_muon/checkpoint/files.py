"""Files and folders: untrusted ones are read, and what is replaced is replaced at once.

Only regular files are read, and pickles only if they hold tensors. Whoever reads a file or folder that is replaced
finds the old or the new one, also after a power cut: everything is written under another name and synced, then renamed,
then the folder that holds the name is synced.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
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
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from deepspeed_muon.errors import CheckpointError, MuonError

_STAGES = "deepspeed.runtime.zero.config:ZeroStageEnum"
# DeepSpeed's own classes that its files may hold.
_ALLOWED_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler:LossScaler",
    "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler",
    _STAGES,
    "deepspeed.utils.tensor_fragment:fragment_address",
)
# What an index of some 80,000 parameters needs. More is refused before it is parsed, which takes many times its size.
_MAX_BYTES = 40 << 20
# Neither follow a link that took the file's place, nor wait for whoever writes into a pipe.
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
# NFS answers EBADF for a folder, which cannot be opened for writing.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


@contextlib.contextmanager
def refusing(where: str) -> Iterator[None]:
    """Turn every exception but this package's own into a CheckpointError that begins with ``where``.

    It surrounds whatever reads content of unknown origin, which can make libraries raise anything.
    """
    try:
        yield
    except MuonError:
        raise
    except OSError as error:
        raise CheckpointError(f"{where}: {error.strerror or error}") from error
    except Exception as error:
        raise CheckpointError(f"{where}: cannot be read: {type(error).__name__}: {error}") from error


def folder_of(argument: str, value: Any) -> Path:
    """Return the folder that an argument of a call names.

    Raises:
        CheckpointError: If it names none. An empty text would be the working directory.
    """
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise CheckpointError(f"{argument} must be the path of a folder, got {value!r}")
    if not os.fspath(value):
        raise CheckpointError(f"{argument} is empty: name a folder, '.' for the working directory")
    if "\0" in os.fspath(value):
        raise CheckpointError(f"{argument} has a null character: {os.fspath(value)!r}")
    return Path(value)


def is_name(text: str) -> bool:
    """Return whether a text names something right inside of a folder."""
    return text not in ("", ".", "..") and os.path.basename(text) == text and "\0" not in text


def regular_size(path: Path) -> int:
    """Return the size of a file.

    Raises:
        CheckpointError: If it is no regular file itself, but a link, a pipe or a device.
        OSError: If there is none.
    """
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    return found.st_size


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading.

    Raises:
        CheckpointError: If it is no regular file itself, but a link, a pipe or a device.
        OSError: If it cannot be opened.
    """
    regular_size(path)
    descriptor = os.open(path, _OPEN_FLAGS)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        yield file


def read_regular(path: Path, limit: int = _MAX_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        CheckpointError: If it is no regular file, or larger than ``limit`` bytes.
        OSError: If it cannot be opened.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise CheckpointError(f"{path}: larger than such a file can be")
        return file.read()


def latest_tag(folder: Path) -> str | None:
    """Return what ``latest`` in a folder names, which need not be a name; ``None`` if there is no such file."""
    try:
        return read_regular(folder / "latest", 4096).decode().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _stage(kind: Any, name: str) -> Any:
    """Return what Python 3.11.0 to 3.11.3 pickle as ``getattr(ZeroStageEnum, name)``; no other attribute is read."""
    if kind is not pkgutil.resolve_name(_STAGES):
        raise pickle.UnpicklingError(f"an attribute of {kind!r}")
    return kind[name]


def load_pickle(path: Path, *, trust: bool = False) -> Any:
    """Read a file of ``torch.save`` on the CPU, memory-mapped, without running code from it.

    Args:
        path: The file.
        trust: Unpickle whatever the file asks for. It can run any code.

    Raises:
        CheckpointError: Naming the file and, where one is to blame, the class that is not allowed.
    """
    allowed: list[Any] = [pkgutil.resolve_name(name) for name in _ALLOWED_CLASSES]
    allowed.append((_stage, "builtins.getattr"))
    with refusing(str(path)):
        # DeepSpeed's files may be links. Reading a pipe would wait for whoever writes into it.
        if not path.is_file() and path.exists():
            raise CheckpointError(f"{path}: not a regular file")
        try:
            with torch.serialization.safe_globals(allowed):
                return torch.load(path, map_location="cpu", mmap=True, weights_only=not trust)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path}: holds more than tensors and numbers, or is damaged: {str(error).splitlines()[0]}. If you "
                f"trust whoever wrote it, pass --trust-pickles"
            ) from error


def drop_pages(tensors: Sequence[Tensor]) -> None:
    """Give back the memory of contiguous parts of mapped files after they were read; the disk has them still.

    Pages of a mapping count as the process's until then. Nothing happens to other tensors.
    """
    try:
        with open("/proc/self/maps") as maps:
            fields = [line.split(maxsplit=5) for line in maps]
    except OSError:
        return
    spans = [span.split("-") for span, *_, inode in (each[:5] for each in fields) if inode != "0"]
    mapped = [(int(first, 16), int(last, 16)) for first, last in spans]
    madvise = ctypes.CDLL(None).madvise
    for tensor in tensors:
        start = tensor.data_ptr()
        stop = start + tensor.numel() * tensor.element_size()
        first, last = mapped[bisect_right(mapped, (start, math.inf)) - 1]
        if first <= start < stop <= last:
            start -= start % mmap.PAGESIZE
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


def check_tensor(tensor: Any, where: str, *, coded: bool = False) -> None:
    """Raise unless what was unpickled is a dense tensor that holds all real numbers, or codes, of its shape.

    Strides of zero could make a few numbers look like a large tensor.
    """
    dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not dense or not (coded or tensor.is_floating_point()):
        raise CheckpointError(f"{where} is no dense tensor of real numbers")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise CheckpointError(f"{where} says that it has {tensor.numel()} elements; the file holds fewer")


def file_digest(path: Path) -> str:
    """Return the sha256 of a regular file, hexadecimal.

    Raises:
        CheckpointError: If it is a link, a pipe or a device.
    """
    digest = hashlib.sha256()
    buffer = bytearray(16 << 20)
    with open_regular(path) as file:
        while count := file.readinto(buffer):  # type: ignore[attr-defined]
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def replace_file(path: Path, content: bytes, *, check: Callable[[], None] = lambda: None) -> None:
    """Replace a small file that makes the files beside it a set.

    Args:
        path: The file.
        content: The new content.
        check: Called right before the rename; may raise.

    Raises:
        CheckpointError: Saying what ``path`` holds now.
    """
    untouched = "what the folder held before is untouched"
    left = untouched
    # No other process that writes to the same place has a file of this name.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        check()
        left = "it holds the new set or the one before, complete; 'checkpoint inspect' says which"
        os.replace(aside, path)
        left = (
            "the new set is in place and complete, but its index may not be on the disk: after a power cut the set "
            "before it may be back, complete too. Save again"
        )
        fsync_folder(path.parent)
    except (OSError, CheckpointError) as error:
        if os.path.lexists(aside):  # a rename can report an error after it was done
            left = untouched
            unlink(aside)
        raise CheckpointError(f"{path}: {error}; {left}") from error


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to fill, which gets its name when everything in it is on the disk, and is removed on failure.

    Args:
        out: The name; a folder there must be empty. Those above it are made.

    Raises:
        CheckpointError: If it cannot be written, or holds something.
    """
    partial = out.with_name(f".{out.name}.{secrets.token_hex(6)}.tmp")
    held: int | None = None
    try:
        if out.exists() and any(out.iterdir()):
            raise CheckpointError(f"{out}: already holds something; name a new folder")
        _remove_abandoned(out)
        partial.mkdir(parents=True)
        held = lock(partial)
        yield partial
        for place, _, files in os.walk(partial):
            for name in files:
                with open(os.path.join(place, name), "rb") as file:
                    os.fsync(file.fileno())
            fsync_folder(Path(place))
        if out.exists():
            out.rmdir()
        os.replace(partial, out)
        fsync_folder(out.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{out}: {error}") from error
        raise
    finally:
        if held is not None:
            unlock(held)


def _remove_abandoned(out: Path) -> None:
    """Remove what killed processes left that wrote ``out``: a living one holds the lock of its folder."""
    for left in out.parent.glob(f".{glob.escape(out.name)}.{'[0-9a-f]' * 12}.tmp"):
        with contextlib.suppress(OSError):
            held = lock(left)
            if held is not None:
                shutil.rmtree(left, ignore_errors=True)
                unlock(held)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that they are still there after a power cut.

    Raises:
        CheckpointError: If one cannot be made or synced.
    """
    with refusing(f"{folder}: cannot be made"):
        missing = []
        place = Path(os.path.realpath(folder))
        while not place.exists() and place != place.parent:
            missing.append(place)
            place = place.parent
        if not os.path.ismount(place):
            # A save that was killed may have made this one without syncing the folder above. One that cannot be opened
            # for reading was not made by a save.
            with contextlib.suppress(PermissionError):
                fsync_folder(place.parent)
        for each in reversed(missing):
            each.mkdir(exist_ok=True)
            fsync_folder(each.parent)
        folder.mkdir(exist_ok=True)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unlink(path: Path) -> None:
    """Remove a file if that is possible."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def lock(path: Path, flags: int = os.O_RDONLY) -> int | None:
    """Lock a file or folder without waiting, and return the descriptor for :func:`unlock`.

    The lock ends with the process. On a file system without locks nothing is locked, and ``None`` is returned.

    Args:
        path: What to lock.
        flags: How to open it.

    Raises:
        BlockingIOError: If another process has it.
        OSError: If it cannot be opened.
    """
    while True:
        descriptor = os.open(path, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had the lock may have removed the file between the two calls.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _NO_LOCKS:
                raise
            return None
        os.close(descriptor)


def unlock(descriptor: int) -> None:
    """End a lock of :func:`lock`."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may have the descriptor too
    with contextlib.suppress(OSError):
        os.close(descriptor)
