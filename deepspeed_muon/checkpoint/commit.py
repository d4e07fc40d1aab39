"""How a save replaces the set of a folder: at every instant the folder holds the old set or the new one, whole.

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
A conversion without an engine takes the same steps, as a single rank.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.checkpoint.atomic import (
    UnsettledError,
    lock,
    replace_file,
    unlink,
    unlock,
    write_synced,
)
from deepspeed_muon.checkpoint.index import INDEX_NAME, SHARD_PATTERN, CheckpointIndex, FileRecord, load_index
from deepspeed_muon.checkpoint.sealed import read_regular, regular_size
from deepspeed_muon.checkpoint.shards import Piece, SavePlan, log_stage, shard_name, write_shards
from deepspeed_muon.errors import CheckpointError, MuonError, RankMissingError
from deepspeed_muon.logs import logger
from deepspeed_muon.transport.agreement import RankFacts, agree
from deepspeed_muon.transport.ranks import Ranks, all_ranks

LOCK_NAME = ".muon_save.lock"

# What killed saves leave of shards and of the index.
_LEFTOVER = re.compile(
    rf"\.({SHARD_PATTERN.pattern}|({re.escape(INDEX_NAME)}|muon_token)\.[0-9a-f]{{12}})\.tmp"
)
_UNTOUCHED = "{folder}: what it held before is untouched"
_UNKNOWN = "{folder}: it holds the new set or the one before, complete; 'checkpoint inspect' says which"


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

    def commit(self, index: CheckpointIndex) -> None:
        """Make the shards that ``index`` names the set of the folder; shards and names must be synced to the disk.

        Args:
            index: The whole index.

        Raises:
            UnsettledError: If the index was renamed, or may have been.
            CheckpointError: If it was not; the set that was there before is untouched.
        """
        if self._lock is None:
            with contextlib.suppress(CheckpointError):
                self._replaced = list(load_index(self._folder).files)
        replace_file(self._folder / INDEX_NAME, index.to_bytes(), check=lambda: self._require_files(index))

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
            unlink(self._folder / LOCK_NAME)
            unlock(self._lock)
            self._lock = None


def write_set(
    folder: Path,
    plan: SavePlan,
    fill: Callable[[Sequence[Piece | None], Tensor], None],
    about: Callable[[], dict[str, Any]],
    writer: FolderWriter | None,
    save_id: str,
    ranks: Ranks,
) -> CheckpointIndex | None:
    """Replace the set of a folder, in the order above. Must be called by all ``ranks``.

    Args:
        folder: Where the set is to be.
        plan: What to write.
        fill: See :func:`~deepspeed_muon.checkpoint.shards.write_shards`.
        about: Returns what the index says besides files and parameters.
        writer: Of the folder, on the first rank.
        save_id: Of the writer.
        ranks: The ranks that save.

    Returns:
        The index, on the first rank.

    Raises:
        CheckpointError: On every rank. The message says which set the folder holds.
    """
    log_stage(folder, "start")
    files: dict[str, FileRecord] = {}
    names = [shard_name(save_id, number) for number in range(len(plan.shards))]
    untouched = _UNTOUCHED.format(folder=folder)
    with rank_lost(untouched), _removed_on_failure(folder, files, BaseException):
        log_stage(folder, "shards")
        error = write_shards(plan, ranks.position, fill, folder, names, files)
    if error is not None:
        remove_shards(folder, files)
    # From here on the other ranks may know that this rank's shards are there, and rank 0 may write the index.
    with rank_lost(_UNKNOWN.format(folder=folder) if writer is None else untouched, UnsettledError):
        # If one rank has no shards, every rank raises this error: nobody writes the index.
        with _removed_on_failure(folder, files):
            agree(RankFacts({}), error=error, kind=CheckpointError, ranks=ranks)
        log_stage(folder, "shards written")
        shares = ranks.gather(files, what="gathering of the index").values()
        every = {name: share[name] for share in shares for name in share}
    index: CheckpointIndex | None = None
    failure: CheckpointError | None = None
    with _removed_on_failure(folder, files):
        if writer is not None:
            index, failure = _commit(writer, plan, names, every, about)
        _announce(folder, failure, ranks)
    log_stage(folder, "index written")
    if writer is not None and index is not None:
        writer.clear(index)
    log_stage(folder, "done")
    return index


def _commit(
    writer: FolderWriter,
    plan: SavePlan,
    names: Sequence[str],
    files: Mapping[str, FileRecord],
    about: Callable[[], dict[str, Any]],
) -> tuple[CheckpointIndex | None, CheckpointError | None]:
    """Write the index. Its failure is returned: the other ranks wait to hear of it."""
    try:
        parameters = plan.records(names)
        index = CheckpointIndex.made_now(**about(), files=dict(sorted(files.items())), parameters=parameters)
        writer.commit(index)
    except CheckpointError as error:
        return None, error
    except Exception as error:
        return None, CheckpointError(f"the index cannot be made: {type(error).__name__}: {error}")
    return index, None


def _announce(folder: Path, failure: CheckpointError | None, ranks: Ranks) -> None:
    """Tell every rank what became of the index; all raise if it was not written, or may not last."""
    said = [(failure is not None, isinstance(failure, UnsettledError), str(failure))]
    if ranks.size > 1:
        committed = "the new set is complete and in place, but not every rank may know"
        knows = ranks.position == 0 and failure is None
        left = f"{folder}: {committed}" if knows else _UNKNOWN.format(folder=folder)
        try:
            with rank_lost(left, UnsettledError):
                dist.broadcast_object_list(said, src=0)
        except UnsettledError:
            if failure is None:
                raise
    if failure is not None:
        raise failure
    failed, unsettled, text = said[0]
    if failed:
        raise (UnsettledError if unsettled else CheckpointError)(f"rank 0: {text}")


@contextlib.contextmanager
def rank_lost(left: str, kind: type[CheckpointError] = CheckpointError) -> Iterator[None]:
    """Name what is left of a save when a collective fails because a rank died or did not come."""
    try:
        yield
    except (MuonError, RuntimeError) as error:
        if isinstance(error, MuonError) and not isinstance(error, RankMissingError):
            raise
        raise kind(f"{left}. The ranks did not finish the save together: {error}") from error


@contextlib.contextmanager
def _removed_on_failure(
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
        gathered = all_ranks().gather((own, error is None), what="naming of a save")
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
            unlink(token)
    return str(save_id)


def _token(folder: Path, save_id: str) -> Path:
    return folder / f".muon_token.{save_id}.tmp"


def remove_shards(folder: Path, names: Iterable[str]) -> None:
    """Remove shards of this save, or of a set that was replaced. What cannot be removed stays, with a warning."""
    stuck: list[OSError] = []
    for name in list(names):  # a thread of the save may still be adding to them
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            stuck.append(error)
    if stuck:
        _warn_of_leftovers(folder, stuck)


def remove_stale(folder: Path, keep: Iterable[str]) -> None:
    """Remove shards, and what killed saves left of them, that no index names any more.

    Args:
        folder: A consolidated checkpoint; no other save may be writing into it.
        keep: Names of the files that its index names.
    """
    kept = set(keep)
    try:
        names = os.listdir(folder)
    except OSError as error:
        _warn_of_leftovers(folder, [error])
        return
    ours = (name for name in names if _LEFTOVER.fullmatch(name) or SHARD_PATTERN.fullmatch(name))
    remove_shards(folder, [name for name in ours if name not in kept])


def _warn_of_leftovers(folder: Path, errors: list[OSError]) -> None:
    logger.warning(
        "deepspeed_muon: %s: %d files that no index names could not be removed, which the next save tries again: %s",
        folder,
        len(errors),
        errors[0],
    )
