"""How a save replaces the checkpoint of a folder: at every instant the folder holds the old set or the new one, whole.

Before anything is written, the first rank puts a file with a random name into the folder, and all ranks read it: ranks
with folders of their own would write shards that nobody finds. Then each step is on the disk before the next begins:

1. Every rank writes its shards aside, syncs and renames them, and syncs the folder, which holds their names.
2. All ranks agree that their shards are there.
3. The first rank writes the index aside, syncs it, looks whether every shard that it names is there with its size, and
   renames it over the old one. This rename is the commit.
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
import glob
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from deepspeed_muon.checkpoint.index import INDEX_NAME, CheckpointIndex, load_index
from deepspeed_muon.checkpoint.sealed import read_regular, regular_size
from deepspeed_muon.checkpoint.shards import fsync_folder, remove_shards, remove_stale, write_synced
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import logger
from deepspeed_muon.transport.agreement import RankFacts, agree
from deepspeed_muon.transport.members import everyone

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
    """The process that writes the index of a folder; it keeps other saves out until :meth:`close`.

    Attributes:
        save_id: A random number that is in the names of all files of this save.
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

    def commit(self, index: CheckpointIndex) -> None:
        """Make the shards that ``index`` names the set of the folder; shards and names must be synced to the disk.

        Args:
            index: The whole index.

        Raises:
            UnsettledError: If the index was renamed, or may have been.
            CheckpointError: If it was not; the set that was there before is untouched.
        """
        path = self._folder / INDEX_NAME
        # Its name has the save's id, as the shards' have: two saves never write to one file.
        aside = path.with_name(f".{INDEX_NAME}.{self.save_id}.tmp")
        content = index.to_bytes()
        if self._lock is None:
            with contextlib.suppress(CheckpointError):
                self._replaced = list(load_index(self._folder).files)
        try:
            write_synced(aside, content)
            self._require_files(index)
        except (OSError, CheckpointError) as error:
            _unlink(aside)
            raise CheckpointError(f"{path}: {error}; what the folder held before is untouched") from error
        try:
            os.replace(aside, path)
        except OSError as error:
            left = _what_is_there(path, content)
            _unlink(aside)
            raise UnsettledError(f"{path}: {error}; {left}") from error
        try:
            fsync_folder(self._folder)
        except OSError as error:
            raise UnsettledError(
                f"{self._folder}: {error}; the new set is in place and complete, but its index may not be on the disk: "
                f"after a power cut the set before it may be back, complete too. Save again"
            ) from error

    def _require_files(self, index: CheckpointIndex) -> None:
        """Raise unless every file that the index names is in the folder with its size."""
        for name, record in index.files.items():
            size = regular_size(self._folder / name)
            if size != record.bytes:
                raise CheckpointError(f"{name} has {size} bytes, {record.bytes} were written")

    def clear(self, index: CheckpointIndex) -> None:
        """Remove what the committed ``index`` does not name. What cannot be removed stays, with a warning."""
        if self._lock is not None:
            remove_stale(self._folder, index.files)
        else:
            remove_shards(self._folder, set(self._replaced) - set(index.files))

    def close(self) -> None:
        """Let other saves in; may be called twice."""
        if self._lock is not None:
            _unlink(self._folder / LOCK_NAME)
            unlock(self._lock)
            self._lock = None


def require_one_folder(folder: Path, writer: FolderWriter | None) -> str:
    """Raise on every rank unless all of them see the same folder. Must be called by all ranks.

    Args:
        folder: As this rank calls it.
        writer: Of the folder, on the first rank.

    Returns:
        The id of the save.
    """
    error: Exception | None = None
    own, token = "", None
    if writer is not None:
        own = writer.save_id
        token = _token(folder, own)
        try:
            write_synced(token, own.encode())
        except OSError as caught:
            error = CheckpointError(f"{token}: {caught.strerror}; what the folder held before is untouched")
    try:
        gathered = everyone().gather((own, error is None), what="naming of a save")
        save_id, is_written = next(iter(gathered.values()))
        try:
            if is_written and read_regular(_token(folder, save_id), 64).decode() != save_id:
                raise FileNotFoundError
        except (OSError, ValueError, CheckpointError):
            error = CheckpointError(
                f"{os.path.abspath(folder)}: this rank does not see there what rank 0 wrote into {folder}. All ranks "
                f"must share the folder: name it by its absolute path on a file system that every machine mounts. "
                f"Nothing was written, what it held before is untouched"
            )
        agree(RankFacts({}), error=error, kind=CheckpointError)
    finally:
        if token is not None:
            _unlink(token)
    return str(save_id)


def _token(folder: Path, save_id: str) -> Path:
    return folder / f".muon_token.{save_id}.tmp"


def _unlink(path: Path) -> None:
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


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to fill, which gets its name when everything in it is on the disk, and is removed on failure.

    Args:
        out: The name; a folder there must be empty. Those above it are made.

    Raises:
        CheckpointError: If it cannot be written, or holds something.
    """
    # No other process that writes to the same place has a folder of this name.
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
