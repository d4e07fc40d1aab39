"""How a save replaces the checkpoint of a folder: at every instant the folder holds the old set or the new one, whole.

Each step is on the disk before the next begins:

1. Every rank writes its shards aside, syncs and renames them, and syncs the folder, which holds their names.
2. All ranks agree that their shards are there.
3. The first rank writes the index aside, syncs it and renames it over the old one. This rename is the commit.
4. It syncs the folder.
5. It removes the shards that the new index does not name.

After a failure a rank removes its own shards only while it is certain that no index names them: until it told the
others that they are there, and after the first rank said that it renamed nothing. The next save removes whatever else
is left. A lock keeps a second save out of the folder meanwhile, which would remove the shards of this one as leftovers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from deepspeed_muon.checkpoint.index import INDEX_NAME, CheckpointIndex, load_index
from deepspeed_muon.checkpoint.shards import fsync_folder, remove_shards, remove_stale, write_synced
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import logger

__all__ = [
    "LOCK_NAME",
    "FolderWriter",
    "UnsettledError",
    "lock",
    "make_folder",
    "removed_on_failure",
    "unlock",
]

LOCK_NAME = ".muon_save.lock"

# NFS answers EBADF for a folder, which cannot be opened for writing.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


class UnsettledError(CheckpointError):
    """A save failed when the index that is in place names its shards, or may name them: they must stay."""


@contextlib.contextmanager
def removed_on_failure(
    folder: Path, files: Iterable[str], failure: type[BaseException] = CheckpointError
) -> Iterator[None]:
    """Remove the shards of this save if it fails while no index can name them.

    Args:
        folder: Where they are.
        files: Their names; may grow meanwhile.
        failure: The errors after which no index names them. An :class:`UnsettledError` is never one.
    """
    try:
        yield
    except UnsettledError:
        raise
    except failure:
        remove_shards(folder, files)
        raise


class FolderWriter:
    """The process that writes the index of a folder; it keeps other saves out until :meth:`close`."""

    def __init__(self, folder: Path) -> None:
        """Lock the folder, which must exist.

        Args:
            folder: Where the set is to be.

        Raises:
            CheckpointError: If another save writes into it, or it cannot be written to.
        """
        self._folder = folder
        self._replaced: list[str] = []
        path = folder / LOCK_NAME
        try:
            self._lock = lock(path, os.O_RDWR | os.O_CREAT)
        except BlockingIOError:
            raise CheckpointError(
                f"{folder}: another save is writing into this folder; wait for it, or name another folder"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path}: {error}") from error
        if self._lock is None:
            logger.warning(
                "deepspeed_muon: %s is on a file system without locks: never run two saves into it at once. What "
                "killed saves left there is not removed",
                folder,
            )

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def commit(self, index: CheckpointIndex, save_id: str) -> None:
        """Make the shards that ``index`` names the set of the folder; shards and names must be synced to the disk.

        Args:
            index: The whole index.
            save_id: That of the shards' names.

        Raises:
            UnsettledError: If the index was renamed, or may have been.
            CheckpointError: If it was not; the set that was there before is untouched.
        """
        path = self._folder / INDEX_NAME
        # Its name has the save's id, as the shards' have: two saves never write to one file.
        aside = path.with_name(f".{INDEX_NAME}.{save_id}.tmp")
        content = index.to_bytes()
        if self._lock is None:
            with contextlib.suppress(CheckpointError):
                self._replaced = list(load_index(self._folder).files)
        try:
            write_synced(aside, content)
        except OSError as error:
            raise CheckpointError(f"{path}: {error}; what the folder held before is untouched") from error
        try:
            os.replace(aside, path)
        except OSError as error:
            left = _what_is_there(path, content)
            with contextlib.suppress(OSError):
                aside.unlink()
            raise UnsettledError(f"{path}: {error}; {left}") from error
        try:
            fsync_folder(self._folder)
        except OSError as error:
            raise UnsettledError(
                f"{self._folder}: {error}; the new set is in place and complete, but its index may not be on the disk: "
                f"after a power cut the set before it may be back, complete too. Save again"
            ) from error

    def clear(self, index: CheckpointIndex) -> None:
        """Remove what the committed ``index`` does not name. What cannot be removed stays, with a warning."""
        if self._lock is not None:
            remove_stale(self._folder, index.files)
        else:
            remove_shards(self._folder, set(self._replaced) - set(index.files))

    def close(self) -> None:
        """Let other saves in; may be called twice."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                (self._folder / LOCK_NAME).unlink()
            unlock(self._lock)
            self._lock = None


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


def _what_is_there(path: Path, content: bytes) -> str:
    """Say which set the folder holds after a rename that reported an error."""
    try:
        new = path.read_bytes() == content
    except FileNotFoundError:
        return "the folder holds no set, as before"
    except OSError as error:
        return f"the folder holds the new set or the one before, complete; its index cannot be read: {error}"
    return "the new set is in place" if new else "what the folder held before is untouched"


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
