"""How a save replaces the set of a folder: at every instant the folder holds the old set or the new one, whole.

Before anything is written, the first rank locks the folder and writes a random number into the lock file, and all ranks
read it: ranks with folders of their own would write shards that nobody finds. Then each step is on the disk before the
next begins:

1. Every rank writes its shards aside, syncs and renames them, and syncs the folder, which holds their names.
2. All ranks agree that their shards are there.
3. The first rank writes the index aside, syncs it, looks whether every shard that it names is there with its size, and
   renames it over the old one. This rename is the commit.
4. It syncs the folder.
5. It removes the shards that the new index does not name.

If a step before the rename fails, the first rank removes the files of this save. If it died, or if the rename may have
happened, all files are kept, and the next save removes those that its index does not name. The lock keeps a second save
out of the folder meanwhile, which would remove the shards of this one as leftovers. A conversion without an engine
takes the same steps, as a single rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.checkpoint.atomic import LOCK_NAME, FolderWriter, fsync_folder
from deepspeed_muon.checkpoint.index import CheckpointIndex, FileRecord
from deepspeed_muon.checkpoint.parts import Piece, SavePlan, Shapes, shard_header
from deepspeed_muon.checkpoint.sealed import read_regular
from deepspeed_muon.errors import CheckpointError, MuonError, RankMissingError
from deepspeed_muon.logs import logger
from deepspeed_muon.transport.agreement import RankFacts, agree, together
from deepspeed_muon.transport.ranks import Ranks, all_ranks


def require_one_folder(folder: Path, writer: FolderWriter | None) -> str:
    """Raise on every rank unless all of them see the same folder. Must be called by all ranks.

    Args:
        folder: As this rank calls it.
        writer: Of the folder, on the first rank.

    Returns:
        The id of the save.
    """
    own = "" if writer is None else writer.save_id
    save_id = str(next(iter(all_ranks().gather(own, what="naming of a save").values())))
    seen = b""
    with together(CheckpointError):
        with contextlib.suppress(OSError, CheckpointError):
            seen = read_regular(folder / LOCK_NAME, 64)
        if seen != save_id.encode():
            raise CheckpointError(
                f"{os.path.abspath(folder)}: this rank does not see there what rank 0 wrote into {folder}. All ranks "
                f"must share the folder: name it by its absolute path on a file system that every machine mounts. "
                f"Nothing was written, what it held before is untouched"
            )
    return save_id


def write_set(
    folder: Path,
    plan: SavePlan,
    fill: Callable[[Sequence[Piece | None], Tensor], None],
    about: Callable[[], dict[str, Any]],
    writer: FolderWriter | None,
    ranks: Ranks,
) -> CheckpointIndex | None:
    """Replace the set of a folder, in the order above. Must be called by all ``ranks``.

    Args:
        folder: Where the set is to be.
        plan: What to write.
        fill: See :func:`write_shards`.
        about: Returns the entries of the index besides files and parameters.
        writer: Of the folder, on the first rank; closed in any case.
        ranks: The ranks that save.

    Returns:
        The index, on the first rank.

    Raises:
        CheckpointError: On every rank. The message says which set the folder holds.
    """
    untouched = f"{folder}: what it held before is untouched"
    # All that the other ranks know as soon as the first one may write the index.
    unknown = f"{folder}: it holds the new set or the one before, complete; 'checkpoint inspect' says which"
    index: CheckpointIndex | None = None
    failure: CheckpointError | None = None
    try:
        log_stage(folder, "start")
        with rank_lost(untouched):
            log_stage(folder, "shards")
            files, error = write_shards(plan, ranks.position, fill, folder)
        with rank_lost(unknown if writer is None else untouched):
            agree(RankFacts({}), error=error, kind=CheckpointError, ranks=ranks)
            log_stage(folder, "shards written")
            shares = ranks.gather(files, what="gathering of the index").values()
        if writer is not None:
            try:
                every = dict(sorted((name, share[name]) for share in shares for name in share))
                index = CheckpointIndex.made_now(**about(), files=every, parameters=plan.records())
                writer.commit(index)
            except CheckpointError as caught:
                failure = caught
            except Exception as caught:
                text = f"the index cannot be made: {type(caught).__name__}: {caught}"
                failure = CheckpointError(f"{untouched}: {text}")
            unknown = str(
                failure or f"{folder}: the new set is complete and in place, but not every rank may know"
            )
        with rank_lost(unknown):
            agree(RankFacts({}), error=failure, kind=CheckpointError, ranks=ranks)
        log_stage(folder, "index written")
    finally:
        if writer is not None:
            writer.close()
    log_stage(folder, "done")
    return index


@contextlib.contextmanager
def rank_lost(left: str) -> Iterator[None]:
    """Name what is left of a save when a collective fails because a rank died or did not come."""
    try:
        yield
    except (MuonError, RuntimeError) as error:
        if isinstance(error, MuonError) and not isinstance(error, RankMissingError):
            raise
        raise CheckpointError(f"{left}. The ranks did not finish the save together: {error}") from error


def log_stage(folder: Path, stage: str) -> None:
    """Log how far a save has come."""
    logger.debug("deepspeed_muon: save to %s: %s", folder, stage)


def write_shards(
    plan: SavePlan,
    rank: int,
    fill: Callable[[Sequence[Piece | None], Tensor], None],
    folder: Path,
) -> tuple[dict[str, FileRecord], Exception | None]:
    """Write this rank's files. A failure of the disk is returned, not raised: the other ranks still need its fragments.

    Args:
        plan: What to write.
        rank: This rank.
        fill: Called in every round with the pieces of all ranks: brings this rank's into a tensor on the CPU.
        folder: Where to write.

    Returns:
        The records of this rank's files, and the first error.
    """
    files: dict[str, FileRecord] = {}
    current: list[ShardFile] = []
    failed: list[CheckpointError] = []

    def append(piece: Piece, content: Tensor) -> None:
        path = folder / piece.file
        if failed:
            return
        try:
            if not current:
                current.append(ShardFile(path, plan.files[piece.file]))
            current[0].write(content.narrow(0, 0, piece.stop - piece.start))
            if piece.ends:
                files[path.name] = current.pop().finish()
        except OSError as error:
            failed.append(CheckpointError(f"{path}: {error}; what the folder held before is untouched"))

    contents = [torch.empty(plan.piece_numel, dtype=torch.float32) for _ in range(2)]
    # Appends a piece while the next one is exchanged.
    writing: list[Future[None]] = []
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="deepspeed_muon-save") as thread:
            for number, pieces in enumerate(plan.rounds()):
                if len(writing) == 2:
                    writing.pop(0).result()  # the thread has written what this buffer held
                content, own = contents[number % 2], pieces[rank]
                fill(pieces, content)
                if own is not None:
                    writing.append(thread.submit(append, own, content))
                log_stage(folder, "piece")
        for each in writing:
            each.result()
    finally:
        thread.shutdown(cancel_futures=True)  # if the end of the block was interrupted, it still writes
        for file in current:
            file.close()
    if files and not failed:
        try:
            fsync_folder(folder)
        except OSError as error:
            failed.append(CheckpointError(f"{folder}: {error}; what it held before is untouched"))
    return files, failed[0] if failed else None


class ShardFile:
    """One safetensors file that is written under a temporary name; :meth:`finish` syncs and renames it."""

    def __init__(self, path: Path, tensors: Shapes) -> None:
        """Open the file under its temporary name and write the header for ``tensors``."""
        self._path = path
        self._aside = path.with_name(f".{path.name}.tmp")
        header, numbers = shard_header(tensors)
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._expected = 8 + len(text) + numbers
        self._written = 0
        self._sha = hashlib.sha256()
        self._file = open(self._aside, "wb")  # noqa: SIM115 - closed by close()
        try:
            self._put(len(text).to_bytes(8, "little") + text)
        except OSError:
            self.close()
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

    def close(self) -> None:
        """Close a file that is not finished. It keeps its temporary name."""
        with contextlib.suppress(OSError):
            self._file.close()
