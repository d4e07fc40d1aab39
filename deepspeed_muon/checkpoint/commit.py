"""The files of a save, and how they replace the set of a folder: it holds the old set or the new one, whole.

A safetensors file holds whole tensors, whoever holds their parts. The ranks write in rounds. In each round every rank
receives one piece of the file that it writes, so the pieces bound the memory, whatever the size of the model.

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
out of the folder meanwhile, which would remove the shards of this one as leftovers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from deepspeed_muon.checkpoint.files import fsync_folder, lock, regular_size, replace_file, unlink, unlock
from deepspeed_muon.checkpoint.index import INDEX_NAME, SHARD_PATTERN, CheckpointIndex, FileRecord, load_index
from deepspeed_muon.checkpoint.parameters import (
    ITEM_BYTES,
    HeldParameter,
    ParameterRecord,
    Shapes,
    Transfer,
    shard_header,
    tensor_name,
    transfers_of,
)
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import logger

LOCK_NAME = ".muon_save.lock"

# Shards, and what killed saves leave of shards and of the index.
_OURS = re.compile(
    rf"{SHARD_PATTERN.pattern}|\.({SHARD_PATTERN.pattern}|{re.escape(INDEX_NAME)}\.[0-9a-f]{{12}})\.tmp"
)

DEFAULT_SHARD_BYTES = 2 << 30

# The largest piece that a rank receives at once, which bounds the buffers beside the shard itself.
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank appends to its current file in one round.

    Attributes:
        file: Name of the file.
        start: First element of the file's tensors, taken together, that it holds.
        stop: First element that it does not hold.
        ends: Whether it is the last piece of the file.
    """

    file: str
    start: int
    stop: int
    ends: bool


def pack(tensors: Shapes, shard_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    """Divide tensors into files, in order; a file is larger than ``shard_bytes`` only where a single tensor is."""
    shards: list[dict[str, tuple[int, ...]]] = []
    size = 0
    for name, shape in tensors.items():
        nbytes = math.prod(shape) * ITEM_BYTES
        if not shards or size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += nbytes
    return shards


def shard_name(save_id: str, number: int) -> str:
    """Return the file name of a shard; because of ``save_id`` no other save has a file of that name."""
    return f"muon-{save_id}-{number:05d}.safetensors"


class SavePlan:
    """Which file holds what, who writes it, and in which pieces; made from metadata, equal on all ranks.

    Attributes:
        files: Name of every file to the tensors in it.
        piece_numel: Elements of the largest piece.
    """

    def __init__(
        self,
        parts: Mapping[str, Sequence[HeldParameter]],
        shard_bytes: int,
        save_id: str,
        world_size: int = 1,
    ) -> None:
        """Make the plan.

        Args:
            parts: Name of each parameter to the parts of it, in the same order on all ranks.
            shard_bytes: The intended size of a file; it bounds the pieces too.
            save_id: A random number that is in the names of the files.
            world_size: How many ranks write.
        """
        self._parts = parts
        self._records = {name: first.record for name, (first, *_) in parts.items()}
        tensors = {
            tensor_name(key, name): record.shape_of(key)
            for name, record in self._records.items()
            for key in record.tensor_keys
        }
        # Small models too are written by all ranks.
        share = -(-sum(map(math.prod, tensors.values())) * ITEM_BYTES // world_size)
        shards = pack(tensors, min(shard_bytes, max(share, 1)))
        self.files = {shard_name(save_id, number): shard for number, shard in enumerate(shards)}
        piece_bytes = max(1 << 10, min(_PIECE_BYTES, shard_bytes // (2 * world_size)))
        self.piece_numel = numel = piece_bytes // ITEM_BYTES
        self._pieces: list[list[Piece]] = [[] for _ in range(world_size)]
        load = [0] * world_size
        sizes = {file: sum(map(math.prod, shard.values())) for file, shard in self.files.items()}
        # The largest files first, each to the rank that has least to write.
        for file, size in sorted(sizes.items(), key=lambda item: -item[1]):
            rank = load.index(min(load))
            load[rank] += size
            self._pieces[rank] += [
                Piece(file, start, min(start + numel, size), start + numel >= size)
                for start in range(0, size, numel)
            ]

    def rounds(self) -> Iterator[tuple[Piece | None, ...]]:
        """Yield the piece of every rank, or ``None`` for ranks that are done."""
        return zip_longest(*self._pieces)

    def transfers(self, piece: Piece, writer: int = 0) -> Iterator[Transfer]:
        """Yield everything that the piece of a rank consists of, in an order that all ranks share."""
        offset = 0
        for tensor, shape in self.files[piece.file].items():
            numel = math.prod(shape)
            begin, end = max(piece.start - offset, 0), min(piece.stop - offset, numel)
            if begin < end:
                key, _, name = tensor.partition("/")
                place = piece.start - offset
                yield from transfers_of(self._parts[name], key, begin, end, piece_start=place, writer=writer)
            offset += numel
            if offset >= piece.stop:
                return

    def records(self) -> dict[str, ParameterRecord]:
        """Return the record of every parameter, with the names of its files."""
        file_of = {tensor: file for file, tensors in self.files.items() for tensor in tensors}
        return {
            name: record.model_copy(
                update={"tensors": {key: file_of[tensor_name(key, name)] for key in record.tensor_keys}}
            )
            for name, record in self._records.items()
        }


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

    def append(piece: Piece | None, content: Tensor) -> None:
        if piece is None or failed:
            return
        path = folder / piece.file
        try:
            if not current:
                current.append(ShardFile(path, plan.files[piece.file]))
            current[0].write(content.narrow(0, 0, piece.stop - piece.start))
            if piece.ends:
                files[piece.file] = current.pop().finish()
        except OSError as error:
            failed.append(CheckpointError(f"{path}: {error}; what the folder held before is untouched"))

    contents = [torch.empty(plan.piece_numel, dtype=torch.float32) for _ in range(2)]
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="deepspeed_muon-save") as thread:
            # A piece is appended while the next one is exchanged.
            writing = thread.submit(append, None, contents[0])
            for number, pieces in enumerate(plan.rounds()):
                content = contents[number % 2]
                fill(pieces, content)
                writing.result()  # what the other buffer held is written
                writing = thread.submit(append, pieces[rank], content)
                log_stage(folder, "piece")
            writing.result()
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


def log_stage(folder: Path, stage: str) -> None:
    """Log how far a save has come."""
    logger.debug("deepspeed_muon: save to %s: %s", folder, stage)


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
        """Remove the files of ours that no index names, and let other saves in."""
        remove_stale(self._folder, self._stale)
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
