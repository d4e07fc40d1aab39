"""What a restore reads from: the interface, and its implementation for consolidated checkpoints."""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from deepspeed_muon.checkpoint.index import ParameterRecord, Progress, load_index, tensor_name
from deepspeed_muon.checkpoint.sealed import open_regular, refusing, regular_size
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.plan.slices import TensorSlice
from deepspeed_muon.plan.spread import Fragment

__all__ = [
    "ConsolidatedSource",
    "StateSource",
    "file_digest",
    "flat_slice",
    "listed",
    "nonfinite_text",
    "views",
]

_READ_BYTES = 16 << 20
_SCAN_NUMEL = 4 << 20
# Elements that are read at once where a rank needs several runs of a tensor.
_WINDOW = 1 << 20


class StateSource(ABC):
    """Full parameters and optimizer state by name, of which a range of elements can be read.

    Attributes:
        where: What error messages call it.
        parameters: What there is.
        groups: Settings of the param groups; may be empty.
        progress: Where the run stood, if the source says so.
    """

    where: str
    parameters: Mapping[str, ParameterRecord]
    groups: Sequence[Mapping[str, Any]] = ()
    progress: Progress | None = None

    @abstractmethod
    def digest(self) -> str:
        """Return a text that is equal on all ranks that see the same checkpoint."""

    @abstractmethod
    def verify(self, share: int, shares: int) -> list[str]:
        """Check one of ``shares`` equal parts of the files against the records.

        Returns:
            The tensors of that part that hold an infinity or NaN.

        Raises:
            CheckpointError: Naming the file and the parameter.
        """

    @abstractmethod
    def read(self, parameter: str, key: str, start: int, numel: int) -> Tensor:
        """Return elements ``[start, start + numel)`` of a tensor in row-major order, fp32, one-dimensional."""

    def fill(self, part: TensorSlice, key: str, own: Fragment, target: Tensor) -> None:
        """Read a rank's fragment of a part of a tensor; where that is not one run, some megabytes at a time.

        Args:
            part: The part, with the name of the whole tensor.
            key: ``fp32`` or a state key.
            own: The fragment.
            target: The rank's flat partition. Mutated.
        """
        kept = target.narrow(0, own.partition_offset, own.numel)
        runs = list(part.runs(own.matrix_offset, own.matrix_offset + own.numel))
        if len(runs) == runs[0].count == 1:
            kept.copy_(self.read(part.name, key, runs[0].whole, own.numel))
            return
        first = min(each.whole for each in runs)
        last = max(each.whole + (each.count - 1) * each.step + each.numel for each in runs)
        for start in range(first, last, _WINDOW):
            stop = min(start + _WINDOW, last)
            begin, end = max(part.before(start), own.matrix_offset), part.before(stop)
            if begin < end:
                window = self.read(part.name, key, start, stop - start)
                for mine, whole in views(part, begin, end, kept, own.matrix_offset, window, start):
                    mine.copy_(whole)

    def close(self) -> None:  # noqa: B027 - most sources keep nothing open
        """Release the files."""


class ConsolidatedSource(StateSource):
    """A folder written by :func:`deepspeed_muon.checkpoint.consolidate`. Nothing is unpickled."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Read and check the index; raises a CheckpointError if there is none, or it is not valid."""
        self._folder = Path(folder)
        self.where = str(folder)
        self.index = load_index(folder)
        self.parameters, self.groups = self.index.parameters, self.index.groups
        self.progress = self.index.progress
        self._open: dict[str, Any] = {}

    def digest(self) -> str:
        """Return the checksum of the index."""
        return hashlib.sha256(self.index.model_dump_json().encode()).hexdigest()

    def verify(self, share: int, shares: int) -> list[str]:
        """Check presence, size, header and checksum of this share's files; see :class:`StateSource`."""
        inside: dict[str, list[tuple[str, str]]] = {name: [] for name in self.index.files}
        for parameter, record in self.parameters.items():
            for key, file in record.tensors.items():
                inside[file].append((parameter, key))
        names = sorted(self.index.files, key=lambda name: (-self.index.files[name].bytes, name))
        nonfinite = []
        for name in names[share::shares]:
            with refusing(str(self._folder / name)):
                nonfinite += self._verify_file(name, inside[name])
        return nonfinite

    def _verify_file(self, name: str, tensors: Sequence[tuple[str, str]]) -> list[str]:
        path, record = self._folder / name, self.index.files[name]
        affected = listed([f"{parameter} ({key})" for parameter, key in tensors], 3)
        try:
            size = regular_size(path)
            if size != record.bytes:
                raise CheckpointError(f"{path}: {size} bytes, expected {record.bytes}")
            digest = file_digest(path)
        except (OSError, CheckpointError) as error:
            reason = f"{path}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
            raise CheckpointError(f"{reason}; it holds {affected}") from error
        if digest != record.sha256:
            raise CheckpointError(f"{path}: its checksum is not that of the index; it holds {affected}")
        handle = self._handle(name)
        found = set(handle.keys())
        nonfinite = []
        for parameter, key in tensors:
            entry = tensor_name(key, parameter)
            if entry not in found:
                raise CheckpointError(f"{path}: no tensor {entry} of parameter {parameter}")
            piece = handle.get_slice(entry)
            shape = tuple(piece.get_shape())
            expected = self.parameters[parameter].shape_of(key)
            if shape != expected or piece.get_dtype() != "F32":
                raise CheckpointError(
                    f"{path}: {entry} is {piece.get_dtype()} of shape {list(shape)}, the index says F32 of shape "
                    f"{list(expected)}"
                )
            if not _is_finite(handle, entry, shape):
                nonfinite.append(f"{parameter} ({key})")
        return nonfinite

    def read(self, parameter: str, key: str, start: int, numel: int) -> Tensor:
        """Return a range of a tensor; see :class:`StateSource`."""
        record = self.parameters[parameter]
        file = record.tensors[key]
        with refusing(f"{self._folder / file}: {parameter} ({key})"):
            entry = tensor_name(key, parameter)
            return flat_slice(self._handle(file), entry, record.shape_of(key), start, numel)

    def _handle(self, name: str) -> Any:
        if name not in self._open:
            with refusing(str(self._folder / name)):
                self._open[name] = safe_open(self._folder / name, framework="pt", device="cpu").__enter__()
        return self._open[name]

    def close(self) -> None:
        """Close the files."""
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()


def views(
    part: TensorSlice, start: int, stop: int, own: Tensor, own_start: int, whole: Tensor, whole_start: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views that show the same elements of a rank's part and of the whole tensor.

    Args:
        part: The part.
        start: First element of the part to show.
        stop: The one behind the last.
        own: Elements of the part, one-dimensional and contiguous.
        own_start: Which element of the part comes first in it.
        whole: Elements of the whole tensor, one-dimensional and contiguous.
        whole_start: Which element of the whole tensor comes first in it.
    """
    for each in part.runs(start, stop):
        size = each.count, each.numel
        yield (
            own.as_strided(size, (each.own_step, 1), own.storage_offset() + each.own - own_start),
            whole.as_strided(size, (each.step, 1), whole.storage_offset() + each.whole - whole_start),
        )


def flat_slice(handle: Any, entry: str, shape: Sequence[int], start: int, numel: int) -> Tensor:
    """Return ``numel`` elements of a tensor in row-major order; only the rows that hold them are read."""
    if not shape:
        whole: Tensor = handle.get_tensor(entry)
        return whole.reshape(-1)
    row = math.prod(shape[1:])
    first, last = start // row, -(-(start + numel) // row)
    rows: Tensor = handle.get_slice(entry)[first:last]
    return rows.reshape(-1).narrow(0, start - first * row, numel)


def _is_finite(handle: Any, entry: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor holds no infinity and no NaN, reading some rows at a time."""
    if not shape:
        return bool(torch.isfinite(handle.get_tensor(entry)).all())
    piece = handle.get_slice(entry)
    step = max(1, _SCAN_NUMEL // math.prod(shape[1:]))
    return all(bool(torch.isfinite(piece[row : row + step]).all()) for row in range(0, shape[0], step))


def listed(names: Sequence[str], most: int) -> str:
    """Return the first ``most`` names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def nonfinite_text(names: Sequence[str]) -> str:
    """Say which tensors hold an infinity or NaN, and what that means."""
    return f"{len(names)} tensors hold an infinity or NaN: {listed(names, 10)}: the run had diverged when it was saved"


def file_digest(path: Path) -> str:
    """Return the sha256 of a regular file, hexadecimal.

    Raises:
        CheckpointError: If it is a link, a pipe or a device.
    """
    digest = hashlib.sha256()
    buffer = bytearray(_READ_BYTES)
    with open_regular(path) as file:
        while count := file.readinto(buffer):  # type: ignore[attr-defined]
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()
