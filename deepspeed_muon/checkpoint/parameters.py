"""What describes a parameter of a checkpoint: its whole tensor, and the parts that ranks or their files hold.

A part lies somewhere in the flat partitions of a rank or a file. :func:`transfers_of` says which elements of which
partitions a range of the whole tensor consists of: to the ranks of a save, and to a conversion without an engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from typing_extensions import Self

from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.plan.placement import Fragment, Placement, TensorSlice, add_up, whole_slice
from deepspeed_muon.variants import ROW_STATE

STATE_KEYS: dict[str, tuple[str, ...]] = {"muon": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}
"""What the optimizer keeps for each element of a parameter of an algorithm, next to the fp32 master."""
ROW_KEYS: dict[str, tuple[str, ...]] = {"muon": tuple(ROW_STATE), "adamw": ()}
"""What the variants of the algorithm keep besides, one number for each row of each block; a run has one variant's."""

ITEM_BYTES = 4
"""All tensors of a set are fp32."""

# More than any model has, and small enough that sizes in bytes fit into 64 bits.
_MAX_NUMEL = 1 << 50

Dimension = Annotated[int, Field(ge=1, le=_MAX_NUMEL, strict=True)]
Count = Annotated[int, Field(ge=0, le=1 << 53, strict=True)]
Steps = Annotated[int, Field(ge=0, le=1 << 40, strict=True)]

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Name of each tensor of a file to its shape, in the order of the file."""


Blocks = Annotated[tuple[Dimension, ...], Field(max_length=1 << 16)]


class ParameterRecord(BaseModel):
    """One parameter: its whole tensor, how it is updated, and the tensors of a set that hold its state.

    Attributes:
        shape: The layer's true shape.
        algorithm: Whose state it is.
        heads: Blocks (attention heads, experts, parts) that were orthogonalised separately.
        grid: Their rows and columns where they are not ``heads`` equal blocks of rows.
        transposed: Whether the weight is stored as input x output.
        group: Number of its param group.
        rows: Numbers in each entry of its state that has one a row; 0 where there is no such entry.
        row_keys: These entries.
        step: Optimizer steps taken; 0 when there is no optimizer state.
        tensors: Each of :attr:`tensor_keys` to its file. Empty as long as nothing is written.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: Annotated[tuple[Dimension, ...], Field(max_length=64)]
    algorithm: Literal["muon", "adamw"]
    heads: Dimension = 1
    grid: tuple[Blocks, Blocks] | None = None
    transposed: Annotated[bool, Field(strict=True)] = False
    group: Count
    rows: Annotated[int, Field(ge=0, le=_MAX_NUMEL, strict=True)] = 0
    row_keys: Annotated[tuple[str, ...], Field(max_length=len(ROW_STATE))] = ()
    step: Steps = 0
    tensors: dict[str, str] = {}

    @classmethod
    def of(cls, route: Any, **more: Any) -> ParameterRecord:
        """Return the record of a parameter with a route, or with another record; ``more`` are further fields."""
        fields = ("shape", "algorithm", "heads", "grid", "transposed")
        return cls(**{**{name: getattr(route, name) for name in fields}, **more})

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def tensor_keys(self) -> tuple[str, ...]:
        """``fp32``, and the entries of the state once a step was taken."""
        if not self.step:
            return ("fp32",)
        return ("fp32", *STATE_KEYS[self.algorithm], *self.row_keys)

    def shape_of(self, key: str) -> tuple[int, ...]:
        """Return the shape of the whole master (``fp32``) or of an entry of the state."""
        return (self.rows,) if key in ROW_KEYS[self.algorithm] else self.shape

    @model_validator(mode="after")
    def _possible(self) -> ParameterRecord:
        numel = self.numel
        if numel > _MAX_NUMEL:
            raise ValueError(f"shape {list(self.shape)} is absurd")
        if self.heads > numel:
            raise ValueError(f"{self.heads} heads do not fit shape {list(self.shape)}")
        if self.rows > numel or (self.rows and not ROW_KEYS[self.algorithm]):
            raise ValueError(
                f"{self.rows} rows of moments do not fit {self.algorithm} and shape {list(self.shape)}"
            )
        if not set(self.row_keys) <= set(ROW_KEYS[self.algorithm]) or len(set(self.row_keys)) < len(
            self.row_keys
        ):
            raise ValueError(f"row_keys {list(self.row_keys)} are not among {list(ROW_KEYS[self.algorithm])}")
        return self


def tensor_name(key: str, parameter: str) -> str:
    """Return the name of a tensor inside the safetensors files."""
    return f"{key}/{parameter}"


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """One parameter as the ranks of a data-parallel group hold it; other ranks may hold other parts of it.

    Attributes:
        record: Of the whole tensor.
        part: The part of it that they hold, with its name.
        placement: Where the master and the entries of the state lie, except for those with one number a row.
        row_fragments: Where these are stored, in rows, ascending; empty where there are none. Of a replicated parameter
            every rank has all of them.
        holders: The ranks of the group, as global ranks or as numbers of files: one object for all its parameters.
        partition: Index of the flat partition.
    """

    record: ParameterRecord
    part: TensorSlice
    placement: Placement
    row_fragments: tuple[Fragment, ...]
    holders: tuple[int, ...]
    partition: int

    @property
    def name(self) -> str:
        """The name of the whole tensor."""
        return self.part.name

    @property
    def row_count(self) -> int:
        """How many rows the ranks hold."""
        return sum(fragment.numel for fragment in self.row_fragments)

    def fragments(self, key: str, rank: int) -> list[Fragment]:
        """Return what a rank of the group has of the master (``fp32``) or of an entry of the state, and where."""
        if key in ROW_KEYS[self.record.algorithm]:
            replicated = self.placement.replicated
            return [fragment for fragment in self.row_fragments if replicated or fragment.rank == rank]
        fragment = self.placement.on(rank)
        return [] if fragment is None else [fragment]

    def shares(self, key: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield rank, start and stop of the consecutive elements among ``[start, stop)`` that one rank has."""
        if key in ROW_KEYS[self.record.algorithm]:
            for fragment in self.row_fragments:
                first = max(start, fragment.matrix_offset)
                last = min(stop, fragment.matrix_offset + fragment.numel)
                if first < last:
                    yield fragment.rank, first, last
            return
        while start < stop:
            rank = self.placement.rank_at(start)
            end = min(stop, int(self.placement.starts(np.array([rank + 1]))[0]))
            yield rank, start, end
            start = end

    def part_of(self, key: str) -> TensorSlice:
        """Return which part of the whole master or entry of the state the ranks hold.

        Raises:
            ValueError: If the rows do not divide as the parameter does.
        """
        if key not in ROW_KEYS[self.record.algorithm] or not self.row_fragments:
            return self.part
        # A row is an output of the layer. Ranks that cut the inputs keep the numbers of all outputs each.
        cuts_outputs = len(self.part.shape) > 2 or (self.part.dim == 1) == self.record.transposed
        if self.part.is_whole or not cuts_outputs:
            return whole_slice(self.part.name, (self.row_count,))
        return self.part.scaled(self.row_count)

    def offset(self, key: str, rank: int, element: int) -> int:
        """Return where an element of the part lies in the partition of a rank of the group, which must hold it."""
        inside = ((each, element - each.matrix_offset) for each in self.fragments(key, rank))
        return next(each.partition_offset + n for each, n in inside if 0 <= n < each.numel)

    def with_state(self, state: Mapping[str, Any], step: int) -> Self:
        """Return it with the steps that were taken, and with the rows that the ``state`` of its partition has."""
        keys: tuple[str, ...] = ()
        if step and self.row_fragments:
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
        part = held.part_of(key)
        begin, end = part.before(start), part.before(stop)
        if begin < end and held.placement.replicated:
            rank = held.holders.index(writer) if writer in held.holders else 0
            yield Transfer(held, key, rank, begin, end - begin, piece_start)
        elif begin < end:
            for rank, first, last in held.shares(key, begin, end):
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


def shard_header(tensors: Shapes) -> tuple[dict[str, Any], int]:
    """Return what the header of a safetensors file says of its tensors, and how many bytes they take together."""
    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    return header, end
