"""Parameters of a checkpoint: the full tensor of each, and how ranks or saved files partition it.

Checkpoints hold full tensors by name. A :class:`ParameterRecord` describes one; a :class:`PartitionedParameter` adds
where its elements are in the flat partitions of a data-parallel group, of a running engine or of saved files.
:func:`transfers` translates a range of a full tensor into ranges of those partitions, for a save of an engine and for a
conversion of files alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from typing_extensions import Self

from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.plan.placement import Fragment, Placement, TensorSlice, cover_tensor, full_slice
from deepspeed_muon.variants import ROW_STATE

STATE_KEYS: dict[str, tuple[str, ...]] = {"muon": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}
"""Optimizer state with the shape of the parameter, by algorithm; the fp32 master comes on top."""
ROW_KEYS: dict[str, tuple[str, ...]] = {"muon": tuple(ROW_STATE), "adamw": ()}
"""Optimizer state with one number for each row of each block, by algorithm. A run has that of its variant only."""

ITEM_BYTES = 4
"""All tensors of a consolidated set are fp32."""

# No model has more, and sizes in bytes still fit into 64 bits.
_MAX_NUMEL = 1 << 50

Dimension = Annotated[int, Field(ge=1, le=_MAX_NUMEL, strict=True)]
Count = Annotated[int, Field(ge=0, le=1 << 53, strict=True)]
Steps = Annotated[int, Field(ge=0, le=1 << 40, strict=True)]
Blocks = Annotated[tuple[Dimension, ...], Field(max_length=1 << 16)]

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Shapes by name of tensor, in the order in which a file stores the tensors."""


class ParameterRecord(BaseModel):
    """One parameter of a checkpoint: its full tensor, its algorithm, and the files that hold its state.

    Attributes:
        shape: Of the full tensor.
        algorithm: Which optimizer updates it.
        heads: How many blocks (attention heads, experts, parts of fused projections) are orthogonalised separately.
        grid: Rows and columns of the blocks, unless they are ``heads`` equal blocks of rows.
        transposed: Whether the weight is stored as input x output.
        group: Index of its param group.
        rows: Length of its per-row state; 0 without such state.
        row_keys: Keys of its per-row state.
        step: Optimizer steps taken; 0 without optimizer state.
        tensors: Key (``fp32`` or a key of the state) to the file that holds the tensor. Empty until a set is written.
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
    def of(cls, route: object, **fields: object) -> ParameterRecord:
        """Return a record with the shape and the algorithm of a route or of another record, and further fields."""
        copied = ("shape", "algorithm", "heads", "grid", "transposed")
        return cls(**{**{name: getattr(route, name) for name in copied}, **fields})

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def tensor_keys(self) -> tuple[str, ...]:
        """Keys of the tensors that a set holds: ``fp32`` and, once a step was taken, those of the state."""
        if not self.step:
            return ("fp32",)
        return ("fp32", *STATE_KEYS[self.algorithm], *self.row_keys)

    def shape_of(self, key: str) -> tuple[int, ...]:
        """Return the shape of the full tensor with a key."""
        return (self.rows,) if key in ROW_KEYS[self.algorithm] else self.shape

    @model_validator(mode="after")
    def _validate(self) -> ParameterRecord:
        numel, row_keys = self.numel, ROW_KEYS[self.algorithm]
        if numel > _MAX_NUMEL:
            raise ValueError(f"shape {list(self.shape)} is absurd")
        if self.heads > numel:
            raise ValueError(f"{self.heads} heads do not fit shape {list(self.shape)}")
        if self.rows > numel or (self.rows and not row_keys):
            raise ValueError(
                f"{self.rows} rows of moments do not fit {self.algorithm} and shape {list(self.shape)}"
            )
        if not set(self.row_keys) <= set(row_keys) or len(set(self.row_keys)) < len(self.row_keys):
            raise ValueError(f"row_keys {list(self.row_keys)} are not distinct keys of {list(row_keys)}")
        return self


def tensor_name(key: str, parameter: str) -> str:
    """Return the name of a tensor inside the safetensors files."""
    return f"{key}/{parameter}"


@dataclass(frozen=True, slots=True)
class PartitionedParameter:
    """One parameter, or a slice of it, as the ranks of one data-parallel group have partitioned it.

    With tensor, expert or pipeline parallelism each data-parallel group has a slice of its own.

    Attributes:
        record: Of the full tensor.
        tensor_slice: Which slice of the full tensor the group holds; has the name of the full tensor.
        placement: Where the elements of the slice are in the partitions of the group.
        row_fragments: Where its per-row state is stored, in rows and ascending; empty without such state. Of a
            replicated parameter every member has all of it.
        members: The members of the group: global ranks, or numbers of files. One object for all parameters of a group.
        partition: Index of the flat partition on each member.
        block_starts: Of int8 momentum, see :func:`~deepspeed_muon.step.int8.block_starts`; else empty.
    """

    record: ParameterRecord
    tensor_slice: TensorSlice
    placement: Placement
    row_fragments: tuple[Fragment, ...]
    members: tuple[int, ...]
    partition: int
    block_starts: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the full tensor."""
        return self.tensor_slice.name

    @property
    def row_count(self) -> int:
        """Length of the per-row state of the slice."""
        return sum(fragment.numel for fragment in self.row_fragments)

    def fragments_on(self, member: int, key: str) -> list[Fragment]:
        """Return what a member has of the tensor with a key (``fp32`` or a key of the state), and where."""
        if key in ROW_KEYS[self.record.algorithm]:
            is_replicated = self.placement.replicated
            return [rows for rows in self.row_fragments if is_replicated or rows.rank == member]
        fragment = self.placement.fragment_on(member)
        return [] if fragment is None else [fragment]

    def fragments_between(self, start: int, stop: int, key: str, *, reader: int = 0) -> Iterator[Fragment]:
        """Yield where elements ``[start, stop)`` of the tensor with a key are stored, in ascending order.

        Args:
            start: The first element, counted in the slice.
            stop: The element after the last.
            key: ``fp32`` or a key of the state.
            reader: The member that yields all elements of a replicated parameter.
        """
        fragments: Iterable[Fragment | None]
        if self.placement.replicated:
            fragments = (replace(fragment, rank=reader) for fragment in self.fragments_on(reader, key))
        elif key in ROW_KEYS[self.record.algorithm]:
            fragments = self.row_fragments
        else:
            ranks = range(self.placement.rank_of(start), self.placement.ranks.stop)
            fragments = map(self.placement.fragment_on, ranks)
        for fragment in filter(None, fragments):
            # What [start, stop) and the fragment have in common, and where that begins in the partition.
            first = max(start, fragment.matrix_offset)
            last = min(stop, fragment.matrix_offset + fragment.numel)
            if first < last:
                offset = fragment.partition_offset + first - fragment.matrix_offset
                yield Fragment(fragment.rank, first, offset, last - first)
            if last == stop:
                return

    def slice_of(self, key: str) -> TensorSlice:
        """Return which slice of the full tensor with a key the group holds.

        Raises:
            ValueError: If per-row state cannot be sliced as the parameter is.
        """
        if key not in ROW_KEYS[self.record.algorithm] or not self.row_fragments:
            return self.tensor_slice
        # Each row is an output of the layer. Ranks that slice the inputs all have the state of all outputs.
        slices_outputs = len(self.tensor_slice.shape) > 2 or (
            (self.tensor_slice.dim == 1) == self.record.transposed
        )
        if self.tensor_slice.is_full or not slices_outputs:
            return full_slice(self.name, (self.row_count,))
        return self.tensor_slice.scaled(self.row_count)

    def with_state(self, state: Mapping[str, Any], step: int) -> Self:
        """Return a copy whose record has the step count, and the per-row state that the partition's ``state`` has."""
        row_keys: tuple[str, ...] = ()
        if step and self.row_fragments:
            row_keys = tuple(key for key in ROW_KEYS[self.record.algorithm] if key in state)
        rows = self.slice_of(row_keys[0]).length if row_keys else 0
        record = ParameterRecord.of(
            self.record, group=self.record.group, step=step, rows=rows, row_keys=row_keys
        )
        return replace(self, record=record)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Consecutive elements of a slice that are copied from one partition into a piece of a full tensor.

    Attributes:
        parameter: What they are elements of.
        key: ``fp32`` or a key of the state.
        fragment: The elements: which member has them, where they begin in the slice and in the member's partition.
        piece_start: The element of the full tensor with which the piece begins; negative if the tensor begins later.
    """

    parameter: PartitionedParameter
    key: str
    fragment: Fragment
    piece_start: int

    @property
    def source(self) -> int:
        """The global rank, or the number of the file, that has the elements."""
        return self.parameter.members[self.fragment.rank]

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.fragment.numel

    def write(self, elements: Tensor, piece: Tensor) -> None:
        """Copy the ``(numel,)`` elements to their positions in the piece, which is mutated."""
        tensor_slice, start = self.parameter.slice_of(self.key), self.fragment.matrix_offset
        for source, target in matching_views(
            tensor_slice, start, start + self.numel, elements, start, piece, self.piece_start
        ):
            target.copy_(source)


def transfers(
    slices: Iterable[PartitionedParameter],
    key: str,
    start: int,
    stop: int,
    *,
    piece_start: int,
    writer: int = 0,
) -> Iterator[Transfer]:
    """Yield the transfers that make up elements ``[start, stop)`` of a full tensor, in an order that all ranks share.

    Args:
        slices: All slices of the parameter.
        key: ``fp32`` or a key of the state.
        start: The first element.
        stop: The element after the last.
        piece_start: See :class:`Transfer`.
        writer: The rank that receives the elements. It reads a replicated parameter from its own partition if it has
            one, else from the group's first member.
    """
    for parameter in slices:
        tensor_slice = parameter.slice_of(key)
        # From elements of the full tensor to elements of the slice.
        begin, end = tensor_slice.local_elements_before(start), tensor_slice.local_elements_before(stop)
        if begin < end:
            reader = parameter.members.index(writer) if writer in parameter.members else 0
            for fragment in parameter.fragments_between(begin, end, key, reader=reader):
                yield Transfer(parameter, key, fragment, piece_start)


def slices_by_name(
    parameters: Iterable[PartitionedParameter], files: Sequence[Path] = ()
) -> dict[str, tuple[PartitionedParameter, ...]]:
    """Return the distinct slices of each full tensor, by name.

    Args:
        parameters: All slices; replicas are dropped.
        files: For errors: the file with each number in ``members``. Empty if members are ranks.

    Raises:
        CheckpointError: If the slices of a tensor have different records, overlap, or are incomplete.
    """
    slices: dict[str, dict[TensorSlice, PartitionedParameter]] = {}
    for parameter in parameters:
        slices.setdefault(parameter.name, {}).setdefault(parameter.tensor_slice, parameter)
    for name, parameter_of in slices.items():
        first, *further = parameter_of.values()
        where = f"{files[first.members[0]]}: " if files else ""
        problem = f"{where}parameter {name}: the ranks hold slices that do not make up the full tensor: "
        for parameter in further:
            # The stages of a pipeline may number their param groups differently.
            if {**dict(parameter.record), "group": first.record.group} != dict(first.record):
                raise CheckpointError(f"{problem}one is of {first.record!r}, another of {parameter.record!r}")
        for key in first.record.tensor_keys:
            if not cover_tensor(parameter.slice_of(key) for parameter in parameter_of.values()):
                ranges = ", ".join(f"{s.ranges} of {p.members[0]}" for s, p in parameter_of.items())
                length, dim = first.tensor_slice.length, first.tensor_slice.dim
                raise CheckpointError(
                    f"{problem}{key} has {length} indices along dimension {dim}, there are {ranges}"
                )
    return {name: tuple(parameter_of.values()) for name, parameter_of in slices.items()}


def matching_views(
    tensor_slice: TensorSlice,
    start: int,
    stop: int,
    sliced: Tensor,
    sliced_start: int,
    full: Tensor,
    full_start: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of strided views of the same elements: of a slice, and of the full tensor.

    Args:
        tensor_slice: The slice.
        start: The first element of the slice to view.
        stop: The element after the last.
        sliced: Consecutive elements of the slice, one-dimensional and contiguous.
        sliced_start: The element of the slice with which ``sliced`` begins.
        full: Consecutive elements of the full tensor, one-dimensional and contiguous.
        full_start: The element of the full tensor with which ``full`` begins.
    """
    for strided in tensor_slice.strided_ranges(start, stop):
        # Both views are (count, numel): rows of consecutive elements, with the stride of the slice or the full tensor.
        size = strided.count, strided.numel
        yield (
            sliced.as_strided(
                size, (strided.local_stride, 1), sliced.storage_offset() + strided.local_offset - sliced_start
            ),
            full.as_strided(
                size, (strided.full_stride, 1), full.storage_offset() + strided.full_offset - full_start
            ),
        )


def shard_header(tensors: Shapes) -> tuple[dict[str, Any], int]:
    """Return the entries of a safetensors header for fp32 tensors, and the bytes of all of them together."""
    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES  # in bytes, from the end of the header
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    return header, end
