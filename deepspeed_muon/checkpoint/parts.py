"""Which part of a tensor the ranks of a group hold, in memory or in their files, and which file gets which elements.

A safetensors file holds whole tensors, whoever holds their parts. The ranks write in rounds. In each round every rank
receives one piece of the file that it writes. So the pieces bound the memory, whatever the size of the model and of its
largest tensor. A conversion without an engine writes in the same way, as a single rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor
from typing_extensions import Self

from deepspeed_muon.checkpoint.index import ITEM_BYTES, ROW_KEYS, SHARD_PATTERN, ParameterRecord, tensor_name
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.plan.placement import Placement, Places, runs_within
from deepspeed_muon.plan.rows import RowPlaces
from deepspeed_muon.plan.slices import TensorSlice, add_up, whole_slice

DEFAULT_SHARD_BYTES = 2 << 30

# The largest piece that a rank receives at once, which bounds the buffers beside the shard itself.
_PIECE_BYTES = 4 << 20

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Name of each tensor of a file to its shape, in the order of the file."""


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """One parameter as the ranks of a data-parallel group hold it; other ranks may hold other parts of it.

    Attributes:
        record: Of the whole tensor.
        part: The part of it that they hold, with its name.
        placement: Where the master and the entries of the state lie, except for those with one number a row.
        row_places: Where these lie; ``None`` where there are none.
        holders: The ranks of the group, as global ranks or as numbers of files: one object for all its parameters.
        partition: Index of the flat partition.
        whole_momentum: With DeepSpeed's Muon at stages 1 and 2, where the momentum of the whole matrix starts in the
            state of each rank that holds some of the matrix.
    """

    record: ParameterRecord
    part: TensorSlice
    placement: Placement
    row_places: RowPlaces | None
    holders: tuple[int, ...]
    partition: int
    whole_momentum: Mapping[int, int] = field(default_factory=dict, kw_only=True)

    @property
    def name(self) -> str:
        """The name of the whole tensor."""
        return self.part.name

    @property
    def row_count(self) -> int:
        """How many rows these ranks keep numbers of."""
        return 0 if self.row_places is None else self.row_places.numel

    def places_of(self, key: str) -> Places:
        """Return where the master (``fp32``) or an entry of the state lies."""
        if self.row_places is not None and key in ROW_KEYS[self.record.algorithm]:
            return self.row_places
        return self.placement

    def part_of(self, key: str) -> TensorSlice:
        """Return which part of the whole master or entry of the state the ranks hold.

        Raises:
            ValueError: If the rows do not divide as the parameter does.
        """
        if key not in ROW_KEYS[self.record.algorithm] or self.row_places is None:
            return self.part
        # A row is an output of the layer. Ranks that cut the inputs keep the numbers of all outputs each.
        cuts_outputs = len(self.part.shape) > 2 or (self.part.dim == 1) == self.row_places.matrix.transposed
        if self.part.is_whole or not cuts_outputs:
            return whole_slice(self.part.name, (self.row_count,))
        return self.part.scaled(self.row_count)

    def offset(self, key: str, rank: int, element: int) -> int:
        """Return where an element of the part lies in the partition of a rank of the group, which must hold it."""
        if key == "momentum_buffer" and self.whole_momentum:
            return self.whole_momentum[rank] + element
        fragment = self.places_of(key).on(rank)
        assert fragment is not None
        return fragment.partition_offset + element - fragment.matrix_offset

    def with_state(self, state: Mapping[str, Any], step: int) -> Self:
        """Return it with the steps that were taken, and with the rows that the ``state`` of its partition has."""
        keys: tuple[str, ...] = ()
        if step and self.row_places is not None:
            keys = tuple(key for key in ROW_KEYS[self.record.algorithm] if key in state)
        rows = self.part_of(keys[0]).length if keys else 0
        own = ParameterRecord.of(self.record, group=self.record.group, step=step, rows=rows, row_keys=keys)
        return replace(self, record=own)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Consecutive elements of a part that go from one partition to their places in a piece of the whole tensor.

    Attributes:
        held: The parameter.
        key: ``fp32`` or an entry of its state.
        rank: Which of :attr:`HeldParameter.holders` they come from.
        start: The first of the elements, counted in the part.
        numel: How many they are.
        piece_start: Which element of the whole tensor comes first in the piece; negative if it begins later in it.
    """

    held: HeldParameter
    key: str
    rank: int
    start: int
    numel: int
    piece_start: int

    @property
    def source(self) -> int:
        """The global rank, or the number of the file."""
        return self.held.holders[self.rank]

    def put(self, elements: Tensor, piece: Tensor) -> None:
        """Copy the elements to their places in the piece."""
        part, stop = self.held.part_of(self.key), self.start + self.numel
        for own, whole in views(part, self.start, stop, elements, self.start, piece, self.piece_start):
            whole.copy_(own)


def transfers_of(
    parts: Iterable[HeldParameter], key: str, start: int, stop: int, *, piece_start: int, writer: int = 0
) -> Iterator[Transfer]:
    """Yield everything that elements ``[start, stop)`` of a whole tensor consist of, in an order that all ranks share.

    Args:
        parts: The parts of the tensor.
        key: ``fp32`` or an entry of the state.
        start: The first element.
        stop: The one behind the last.
        piece_start: See :class:`Transfer`.
        writer: The rank that gets them. Of copies it gets its own if it has one, else that of the first rank.
    """
    for held in parts:
        part, places = held.part_of(key), held.places_of(key)
        begin, end = part.before(start), part.before(stop)
        if begin < end and places.replicated:
            rank = held.holders.index(writer) if writer in held.holders else 0
            yield Transfer(held, key, rank, begin, end - begin, piece_start)
        elif begin < end:
            for rank, first, last in runs_within(places, begin, end):
                yield Transfer(held, key, rank, first, last - first, piece_start)


def put_together(
    held: Iterable[HeldParameter], files: Sequence[Path] = ()
) -> dict[str, tuple[HeldParameter, ...]]:
    """Return the parts of each whole tensor, each once.

    Args:
        held: All parts, copies too.
        files: What the holders are, for errors, if they are no ranks.

    Raises:
        CheckpointError: If they do not belong together, or are not all of it.
    """
    found: dict[str, dict[TensorSlice, HeldParameter]] = {}
    for each in held:
        found.setdefault(each.name, {}).setdefault(each.part, each)
    for name, parts in found.items():
        first, *others = parts.values()
        place = f"{files[first.holders[0]]}: " if files else ""
        wrong = f"{place}parameter {name}: the ranks hold parts of it that do not make up the whole: "
        for other in others:
            # The stages of a pipeline may number their param groups differently.
            if {**dict(other.record), "group": first.record.group} != dict(first.record):
                raise CheckpointError(f"{wrong}one is of {first.record!r}, another of {other.record!r}")
        for key in first.record.tensor_keys:
            if not add_up(each.part_of(key) for each in parts.values()):
                shown = ", ".join(f"{part.ranges} of {each.holders[0]}" for part, each in parts.items())
                raise CheckpointError(
                    f"{wrong}{key} has {first.part.length} indices along dimension {first.part.dim}, there are {shown}"
                )
    return {name: tuple(parts.values()) for name, parts in found.items()}


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
    name = f"muon-{save_id}-{number:05d}.safetensors"
    assert SHARD_PATTERN.fullmatch(name), name
    return name


def shard_header(tensors: Shapes) -> tuple[dict[str, Any], int]:
    """Return what the header of a safetensors file says of its tensors, and how many bytes they take together."""
    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    return header, end


def check_shard_bytes(shard_bytes: Any) -> None:
    """Raise a CheckpointError unless files can have that size."""
    if not isinstance(shard_bytes, int) or isinstance(shard_bytes, bool) or shard_bytes < 1:
        raise CheckpointError(f"shard_bytes must be a positive number of bytes, got {shard_bytes!r}")


class SavePlan:
    """Which file holds what, who writes it, and in which pieces; made from metadata, equal on all ranks.

    Attributes:
        files: Name of every file to the tensors in it.
        piece_numel: Elements of the largest piece.
    """

    def __init__(
        self, parameters: Mapping[str, ParameterRecord], shard_bytes: int, save_id: str, world_size: int = 1
    ) -> None:
        """Make the plan.

        Args:
            parameters: Name of each parameter to its record, in the same order on all ranks.
            shard_bytes: The intended size of a file; it bounds the pieces too.
            save_id: A random number that is in the names of the files.
            world_size: How many ranks write.
        """
        self._parameters = parameters
        tensors = {
            tensor_name(key, name): record.shape_of(key)
            for name, record in parameters.items()
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

    def ranges(self, piece: Piece) -> Iterator[tuple[str, str, int, int, int]]:
        """Yield what a piece consists of.

        Yields:
            Parameter, key, the first element of that tensor and the one behind the last, and which element of the
            tensor comes first in the piece: negative if the tensor begins later in it.
        """
        offset = 0
        for tensor, shape in self.files[piece.file].items():
            numel = math.prod(shape)
            begin, end = max(piece.start - offset, 0), min(piece.stop - offset, numel)
            if begin < end:
                key, _, name = tensor.partition("/")
                yield name, key, begin, end, piece.start - offset
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
            for name, record in self._parameters.items()
        }
