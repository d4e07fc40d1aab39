"""Safetensors files written as a stream: packing tensors into files, and one file on its way to the disk.

The format is eight bytes with the length of a JSON header, the header, and the tensors one after the other. Writing
it as a stream needs memory for one piece only, whatever the size of a tensor, and computes the checksum on the way.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.checkpoint.index import INDEX_NAME, SHARD_PATTERN, FileRecord, tensor_name
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import logger

__all__ = [
    "DEFAULT_SHARD_BYTES",
    "PlannedTensor",
    "ShardFile",
    "aside",
    "check_shard_bytes",
    "files_of",
    "fsync_folder",
    "pack",
    "remove_shards",
    "remove_stale",
    "shard_name",
    "write_aside",
    "write_synced",
]

# What killed saves leave of shards and of the index.
_LEFTOVER = re.compile(
    rf"\.({SHARD_PATTERN.pattern}|({re.escape(INDEX_NAME)}|muon_token)\.[0-9a-f]{{12}})\.tmp"
)

DEFAULT_SHARD_BYTES = 2 << 30
ITEM_BYTES = 4
"""All tensors are fp32."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor that will be written.

    Attributes:
        parameter: Dotted name.
        key: ``fp32`` or a state key.
        shape: True shape.
    """

    parameter: str
    key: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


def pack(tensors: Sequence[PlannedTensor], shard_bytes: int) -> list[list[PlannedTensor]]:
    """Divide tensors into files, in order; a file is larger than ``shard_bytes`` only where a single tensor is."""
    shards: list[list[PlannedTensor]] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.numel * ITEM_BYTES
        if not shards or size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
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


class ShardFile:
    """One safetensors file that is written under a temporary name; :meth:`finish` syncs and renames it."""

    def __init__(self, path: Path, tensors: Sequence[PlannedTensor]) -> None:
        """Open the file under its temporary name and write the header for ``tensors``, in their order."""
        self._path = path
        self._aside = aside(path)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in tensors:
            end = offset + tensor.numel * ITEM_BYTES
            header[tensor_name(tensor.key, tensor.parameter)] = {
                "dtype": "F32",
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
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


def aside(path: Path) -> Path:
    """Return the name under which ``path`` is written until it is complete."""
    return path.with_name(f".{path.name}.tmp")


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
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def write_aside(path: Path, content: bytes) -> None:
    """Replace a small file: readers find the old or the new one, also after a power failure or with two writers."""
    temporary = aside(path.with_name(f"{path.name}.{secrets.token_hex(6)}"))
    write_synced(temporary, content)
    try:
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_of(shards: Sequence[Sequence[PlannedTensor]], names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the name of every tensor's file, by parameter and key."""
    found: dict[str, dict[str, str]] = {}
    for shard, name in zip(shards, names, strict=True):
        for tensor in shard:
            found.setdefault(tensor.parameter, {})[tensor.key] = name
    return found


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
