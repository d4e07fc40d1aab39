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
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.checkpoint.atomic import (
    FolderWriter,
    UnsettledError,
    fsync_folder,
    remove_shards,
    unlink,
    write_synced,
)
from deepspeed_muon.checkpoint.index import ITEM_BYTES, CheckpointIndex, FileRecord
from deepspeed_muon.checkpoint.parts import Piece, SavePlan, Shapes, shard_name
from deepspeed_muon.checkpoint.sealed import read_regular
from deepspeed_muon.errors import CheckpointError, MuonError, RankMissingError
from deepspeed_muon.logs import logger
from deepspeed_muon.transport.agreement import RankFacts, agree
from deepspeed_muon.transport.ranks import Ranks, all_ranks

_UNKNOWN = "{folder}: it holds the new set or the one before, complete; 'checkpoint inspect' says which"


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
        fill: See :func:`write_shards`.
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
    untouched = f"{folder}: what it held before is untouched"
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


def log_stage(folder: Path, stage: str) -> None:
    """Say in the log how far a save has come."""
    logger.debug("deepspeed_muon: save to %s: %s", folder, stage)


def write_shards(
    plan: SavePlan,
    rank: int,
    fill: Callable[[Sequence[Piece | None], Tensor], None],
    folder: Path,
    names: Sequence[str],
    files: dict[str, FileRecord],
) -> Exception | None:
    """Write this rank's files. A failure of the disk is returned, not raised: the other ranks still need its fragments.

    Args:
        plan: What to write.
        rank: This rank.
        fill: Called in every round with the pieces of all ranks: brings this rank's into a tensor on the CPU.
        folder: Where to write.
        names: Of all files.
        files: Gets the records of this rank's. Mutated.
    """
    contents = [torch.empty(plan.piece_numel, dtype=torch.float32) for _ in range(2)]
    writer = _Writer(plan, folder, names, files)
    # Appends a piece while the next one is exchanged.
    thread = ThreadPoolExecutor(1, thread_name_prefix="deepspeed_muon-save")
    pending: list[Future[None]] = []
    try:
        for number, pieces in enumerate(plan.rounds()):
            content = contents[number % 2]
            if number > 1:
                pending[number - 2].result()  # the thread has written what it held
            fill(pieces, content)
            pending.append(thread.submit(writer.append, pieces[rank], content))
            log_stage(folder, "piece")
        for future in pending[-2:]:
            future.result()
    except BaseException as interrupt:
        # The thread must not make files after those of the save were removed.
        writer.error = writer.error or CheckpointError(f"interrupted: {interrupt!r}")
        raise
    finally:
        try:
            thread.shutdown(cancel_futures=True)
        finally:
            writer.discard()
    if writer.error is None and files:
        try:
            fsync_folder(folder)
        except OSError as error:
            return CheckpointError(f"{folder}: {error}; what it held before is untouched")
    return writer.error


class _Writer:
    """Appends pieces to this rank's files. The first error is kept, and everything after it ignored."""

    def __init__(
        self, plan: SavePlan, folder: Path, names: Sequence[str], files: dict[str, FileRecord]
    ) -> None:
        self.error: Exception | None = None
        self._plan, self._folder, self._names, self._files = plan, folder, names, files
        self._current: ShardFile | None = None

    def append(self, piece: Piece | None, content: Tensor) -> None:
        """Write a piece, if there is one: the first elements of ``content``."""
        if piece is None or self.error is not None:
            return
        path = self._folder / self._names[piece.shard]
        try:
            if self._current is None:
                self._current = ShardFile(path, self._plan.shards[piece.shard])
            self._current.write(content.narrow(0, 0, piece.stop - piece.start))
            if piece.stop == self._plan.sizes[piece.shard]:
                self._files[path.name] = self._current.finish()
                self._current = None
        except OSError as caught:
            self.error = CheckpointError(f"{path}: {caught}; what the folder held before is untouched")

    def discard(self) -> None:
        """Remove a file that is not finished."""
        if self._current is not None:
            self._current.discard()


class ShardFile:
    """One safetensors file that is written under a temporary name; :meth:`finish` syncs and renames it."""

    def __init__(self, path: Path, tensors: Shapes) -> None:
        """Open the file under its temporary name and write the header for ``tensors``."""
        self._path = path
        self._aside = path.with_name(f".{path.name}.tmp")
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, shape in tensors.items():
            end = offset + math.prod(shape) * ITEM_BYTES
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._expected = 8 + len(text) + offset
        self._written = 0
        self._sha = hashlib.sha256()
        self._file = open(self._aside, "wb")  # noqa: SIM115 - closed by finish() or discard()
        try:
            self._put(len(text).to_bytes(8, "little") + text)
        except OSError:
            self.discard()
            raise

    def write(self, piece: Tensor) -> None:
        """Append the next elements.

        Args:
            piece: One-dimensional, contiguous, fp32, on the CPU.
        """
        assert piece.dtype == torch.float32 and piece.device.type == "cpu"
        self._put(memoryview(piece.detach().numpy().data).cast("B"))

    def _put(self, data: bytes | memoryview) -> None:
        self._sha.update(data)
        self._written += self._file.write(data)

    def finish(self) -> FileRecord:
        """Sync the file, give it its name and return its record. The folder, which holds the name, is not synced."""
        assert self._written == self._expected, (self._written, self._expected)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._aside, self._path)
        return FileRecord(bytes=self._written, sha256=self._sha.hexdigest())

    def discard(self) -> None:
        """Remove whatever there is of the file. No index may name it yet."""
        with contextlib.suppress(OSError):
            self._file.close()
        for path in (self._aside, self._path):
            with contextlib.suppress(OSError):
                path.unlink()
