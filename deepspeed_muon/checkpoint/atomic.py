"""Replacing a file or a folder at once: whoever reads finds the old or the new one, also after a power cut.

Everything is written under another name and synced, then renamed, then the folder that holds the name is synced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from deepspeed_muon.checkpoint.index import INDEX_NAME, SHARD_PATTERN, CheckpointIndex, load_index
from deepspeed_muon.checkpoint.sealed import regular_size
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import logger

LOCK_NAME = ".muon_save.lock"

# Shards, and what killed saves leave of shards and of the index.
_OURS = re.compile(
    rf"{SHARD_PATTERN.pattern}|\.({SHARD_PATTERN.pattern}|{re.escape(INDEX_NAME)}\.[0-9a-f]{{12}})\.tmp"
)
# NFS answers EBADF for a folder, which cannot be opened for writing.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


def replace_file(path: Path, content: bytes, *, check: Callable[[], None] = lambda: None) -> None:
    """Replace a small file that makes the files beside it a set.

    Args:
        path: The file.
        content: The new content.
        check: Called right before the rename; may raise.

    Raises:
        CheckpointError: Saying what ``path`` holds now.
    """
    # No other process that writes to the same place has a file of this name.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        write_synced(aside, content)
        check()
    except (OSError, CheckpointError) as error:
        unlink(aside)
        raise CheckpointError(f"{path}: {error}; what the folder held before is untouched") from error
    try:
        os.replace(aside, path)
    except OSError as error:
        left = _what_is_there(path, content)
        unlink(aside)
        raise CheckpointError(f"{path}: {error}; {left}") from error
    try:
        fsync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path.parent}: {error}; the new set is in place and complete, but its index may not be on the disk: "
            f"after a power cut the set before it may be back, complete too. Save again"
        ) from error


def _what_is_there(path: Path, content: bytes) -> str:
    """Return which set the folder holds after a rename that reported an error, in words."""
    try:
        new = path.read_bytes() == content
    except FileNotFoundError:
        return "the folder holds no set, as before"
    except OSError as error:
        return f"the folder holds the new set or the one before, complete; its index cannot be read: {error}"
    return "the new set is in place" if new else "what the folder held before is untouched"


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
        OSError: If one cannot be made or synced.
    """
    missing = []
    place = Path(os.path.realpath(folder))
    while not place.exists() and place != place.parent:
        missing.append(place)
        place = place.parent
    if not os.path.ismount(place):
        # A save that was killed may have made this one without syncing the folder above. One that cannot be opened for
        # reading was not made by a save.
        with contextlib.suppress(PermissionError):
            fsync_folder(place.parent)
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        fsync_folder(each.parent)
    folder.mkdir(exist_ok=True)


def write_synced(path: Path, content: bytes) -> None:
    """Write a small file and sync it; nothing of it is left if that fails.

    Raises:
        OSError: If it cannot be written.
    """
    try:
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        unlink(path)
        raise


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
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
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


class FolderWriter:
    """The process that writes the index of a folder; it keeps other saves out until :meth:`close`.

    Attributes:
        save_id: A random number that is in the names of all files of this save, and meanwhile in the lock file.
    """

    def __init__(self, folder: Path) -> None:
        """Lock the folder, which must exist.

        Args:
            folder: Where the set is to be.

        Raises:
            CheckpointError: If another save writes into it, or it cannot be written to.
        """
        self.save_id = secrets.token_hex(6)
        self._folder = folder
        self._lock: int | None = None
        # Which files of ours no index names: those of this save, as long as it has not renamed its index.
        self._stale: Callable[[str], bool] = lambda name: self.save_id in name
        path = folder / LOCK_NAME
        try:
            self._lock = lock(path, os.O_RDWR | os.O_CREAT)
            with open(path, "wb") as file:  # closing it lets ranks on other machines see the content
                file.write(self.save_id.encode())
        except BlockingIOError:
            raise CheckpointError(
                f"{folder}: another save is writing into this folder; wait for it, or name another folder"
            ) from None
        except OSError as error:
            self._release()
            raise CheckpointError(f"{path}: {error}; what the folder held before is untouched") from error
        if self._lock is None:
            logger.warning(
                "deepspeed_muon: %s is on a file system without locks: never run two saves into it at once. What "
                "killed saves left there is not removed",
                folder,
            )

    def commit(self, index: CheckpointIndex) -> None:
        """Make the shards that ``index`` names the set of the folder; shards and names must be synced to the disk.

        Args:
            index: The whole index.

        Raises:
            CheckpointError: Saying which set the folder holds.
        """
        replaced: set[str] = set()
        if self._lock is None:
            with contextlib.suppress(CheckpointError):
                replaced.update(load_index(self._folder).files)

        def check() -> None:
            for name, record in index.files.items():
                size = regular_size(self._folder / name)
                if size != record.bytes:
                    raise CheckpointError(f"{name} has {size} bytes, {record.bytes} were written")
            self._stale = lambda name: False  # from now on until the rename lasts, either index may be there

        replace_file(self._folder / INDEX_NAME, index.to_bytes(), check=check)
        alone = self._lock is not None
        self._stale = lambda name: name not in index.files and (alone or name in replaced)

    def close(self) -> None:
        """Remove the files of ours that no index names, and let other saves in; may be called twice."""
        remove_stale(self._folder, self._stale)
        self._stale = lambda name: False
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            unlink(self._folder / LOCK_NAME)
            unlock(self._lock)
            self._lock = None


def remove_stale(folder: Path, stale: Callable[[str], bool]) -> None:
    """Remove shards, and what killed saves left of shards and of indexes. What cannot be removed stays, with a warning.

    Args:
        folder: A consolidated checkpoint.
        stale: Whether no index names a file.
    """
    stuck: list[OSError] = []
    try:
        names = [name for name in os.listdir(folder) if _OURS.fullmatch(name) and stale(name)]
    except OSError as error:
        names, stuck = [], [error]
    for name in names:
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            stuck.append(error)
    if stuck:
        logger.warning(
            "deepspeed_muon: %s: %d files that no index names could not be removed, which the next save tries again: "
            "%s",
            folder,
            len(stuck),
            stuck[0],
        )
