"""Safetensors files written as a stream: which file holds what, who writes it, and in which pieces.

A file holds whole tensors, whoever holds their parts. The ranks write in rounds. In each round every rank receives one
piece of the file that it writes, and a thread appends it. So the pieces bound the memory, whatever the size of the
model and of its largest tensor. A conversion without an engine writes in the same way, as a single rank.

The format is eight bytes with the length of a JSON header, the header, and the tensors one after the other. The
checksum is computed on the way.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from deepspeed_muon.checkpoint.atomic import fsync_folder
from deepspeed_muon.checkpoint.index import (
    ITEM_BYTES,
    SHARD_PATTERN,
    FileRecord,
    ParameterRecord,
    tensor_name,
)
from deepspeed_muon.checkpoint.parts import HeldParameter, Transfer, transfers_of
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import logger

DEFAULT_SHARD_BYTES = 2 << 30

# The largest piece that a rank receives at once, which bounds the buffers beside the shard itself.
_PIECE_BYTES = 4 << 20

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Name of each tensor of a file to its shape, in the order of the file."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank appends to its current file in one round.

    Attributes:
        shard: Number of the file.
        start: First element of the file's tensors, taken together, that it holds.
        stop: First element that it does not hold.
    """

    shard: int
    start: int
    stop: int


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
    name = f"muon-{save_id}-{number:05d}.safetensors"
    assert SHARD_PATTERN.fullmatch(name), name
    return name


def check_shard_bytes(shard_bytes: Any) -> None:
    """Raise a CheckpointError unless files can have that size."""
    if not isinstance(shard_bytes, int) or isinstance(shard_bytes, bool) or shard_bytes < 1:
        raise CheckpointError(f"shard_bytes must be a positive number of bytes, got {shard_bytes!r}")


class SavePlan:
    """Which file holds what, who writes it, and in which pieces; made from metadata, equal on all ranks.

    Attributes:
        parts: Name of each whole tensor to the parts of it that groups of ranks hold, copies left out.
        shards: The tensors of every file.
        sizes: The elements of every file.
        writers: The rank that writes each file.
        piece_numel: Elements of the largest piece.
    """

    def __init__(
        self, parts: Mapping[str, Sequence[HeldParameter]], shard_bytes: int, world_size: int = 1
    ) -> None:
        """Make the plan.

        Args:
            parts: See above, in the same order on all ranks.
            shard_bytes: The intended size of a file; it bounds the pieces too.
            world_size: How many ranks write.
        """
        self.parts = parts
        tensors = {
            tensor_name(key, name): first.record.shape_of(key)
            for name, (first, *_) in parts.items()
            for key in first.record.tensor_keys
        }
        total = sum(math.prod(shape) for shape in tensors.values()) * ITEM_BYTES
        # Small models too are written by all ranks.
        self.shards = pack(tensors, min(shard_bytes, max(-(-total // world_size), 1)))
        self.sizes = [sum(map(math.prod, shard.values())) for shard in self.shards]
        self.writers = _balanced(self.sizes, world_size)
        piece_bytes = max(1 << 10, min(_PIECE_BYTES, shard_bytes // (2 * world_size)))
        self.piece_numel = piece = piece_bytes // ITEM_BYTES
        self._pieces: list[list[Piece]] = [[] for _ in range(world_size)]
        for shard, (size, writer) in enumerate(zip(self.sizes, self.writers, strict=True)):
            self._pieces[writer].extend(
                Piece(shard, start, min(start + piece, size)) for start in range(0, size, piece)
            )
        # Where a writer is among the ranks that hold copies. By identity: the ranks of one group are one object, and
        # too many to compare for every parameter.
        self._positions: list[dict[int, int]] = [{} for _ in range(world_size)]
        groups = {id(each.holders): each.holders for held in parts.values() for each in held}
        for key, holders in groups.items():
            for position, rank in enumerate(holders if world_size > 1 else ()):
                self._positions[rank][key] = position

    def rounds(self) -> Iterator[tuple[Piece | None, ...]]:
        """Yield the piece of every rank, or ``None`` for ranks that are done."""
        return zip_longest(*self._pieces)

    def transfers(self, writer: int, piece: Piece) -> Iterator[Transfer]:
        """Yield everything that ``piece`` consists of, in an order that all ranks share."""
        offset = 0
        for tensor, shape in self.shards[piece.shard].items():
            numel = math.prod(shape)
            begin, end = max(piece.start - offset, 0), min(piece.stop - offset, numel)
            if begin < end:
                key, _, name = tensor.partition("/")
                own = self._positions[writer]
                yield from transfers_of(
                    self.parts[name], key, begin, end, piece_start=piece.start - offset, ranks=own
                )
            offset += numel
            if offset >= piece.stop:
                return

    def records(self, names: Sequence[str]) -> dict[str, ParameterRecord]:
        """Return the record of every parameter, with the names of its files."""
        files: dict[str, dict[str, str]] = {}
        for shard, file in zip(self.shards, names, strict=True):
            for tensor in shard:
                key, _, name = tensor.partition("/")
                files.setdefault(name, {})[key] = file
        return {
            name: first.record.model_copy(update={"tensors": files[name]})
            for name, (first, *_) in self.parts.items()
        }


def log_stage(folder: Path, stage: str) -> None:
    """Say in the log how far a save has come."""
    logger.debug("deepspeed_muon: save to %s: %s", folder, stage)


def _balanced(sizes: Sequence[int], world_size: int) -> list[int]:
    """Give every file to the rank that has least to write, largest files first."""
    load = [0] * world_size
    writers = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        writers[number] = min(range(world_size), key=lambda rank: (load[rank], rank))
        load[writers[number]] += sizes[number]
    return writers


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
    with _Writer(plan, folder, names, files) as writer:
        for number, pieces in enumerate(plan.rounds()):
            content = contents[number % 2]
            writer.wait_for(number - 2)
            fill(pieces, content)
            writer.append(pieces[rank], content)
            log_stage(folder, "piece")
    if writer.error is None and files:
        try:
            fsync_folder(folder)
        except OSError as error:
            return CheckpointError(f"{folder}: {error}; what it held before is untouched")
    return writer.error


class _Writer:
    """Appends pieces to this rank's files in a thread, while the next piece is exchanged.

    The first error is kept and everything after it ignored: the rank goes on to serve the others.
    """

    def __init__(
        self, plan: SavePlan, folder: Path, names: Sequence[str], files: dict[str, FileRecord]
    ) -> None:
        self.error: Exception | None = None
        self._plan = plan
        self._folder = folder
        self._names = names
        self._files = files
        self._current: ShardFile | None = None
        self._pending: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="deepspeed_muon-save")

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._thread.shutdown()
            for future in self._pending:
                future.result()
        except BaseException as interrupt:
            # The thread must not make files after those of the save were removed.
            self.error = self.error or CheckpointError(f"interrupted: {interrupt!r}")
            self._thread.shutdown(cancel_futures=True)
            raise
        finally:
            if self._current is not None:
                self._current.discard()

    def append(self, piece: Piece | None, content: Tensor) -> None:
        """Write a piece soon; ``content`` must stay as it is until :meth:`wait_for` its number."""
        self._pending.append(self._thread.submit(self._append, piece, content))

    def wait_for(self, number: int) -> None:
        """Return once the piece appended as number ``number`` is written."""
        if number >= 0:
            self._pending[number].result()

    def _append(self, piece: Piece | None, content: Tensor) -> None:
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
