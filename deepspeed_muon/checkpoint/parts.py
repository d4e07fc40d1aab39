"""Which part of a tensor the ranks of a group hold, in memory or in their files, and how its elements come together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from deepspeed_muon.checkpoint.index import ROW_KEYS, ParameterRecord
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.plan.placement import Placement, Places, runs_within
from deepspeed_muon.plan.rows import RowPlaces
from deepspeed_muon.plan.slices import TensorSlice, add_up, whole_slice


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
    """

    record: ParameterRecord
    part: TensorSlice
    placement: Placement
    row_places: RowPlaces | None
    holders: tuple[int, ...]
    partition: int

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
        fragment = self.places_of(key).on(rank)
        assert fragment is not None
        return fragment.partition_offset + element - fragment.matrix_offset


_Held = TypeVar("_Held", bound=HeldParameter)


def with_state(held: _Held, state: Mapping[str, Any], step: int) -> _Held:
    """Return a parameter with the steps that were taken and what an optimizer's state has of it.

    Args:
        held: The parameter, without a state.
        state: The entries of its partition's state.
        step: Optimizer steps.
    """
    key = next((key for key in ROW_KEYS[held.record.algorithm] if key in state), None)
    rows = held.part_of(key).length if step and key is not None and held.row_places is not None else 0
    return replace(
        held, record=ParameterRecord.of(held.record, group=held.record.group, step=step, rows=rows)
    )


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
    parts: Iterable[HeldParameter],
    key: str,
    start: int,
    stop: int,
    *,
    piece_start: int,
    ranks: Mapping[int, int] | None = None,
) -> Iterator[Transfer]:
    """Yield everything that elements ``[start, stop)`` of a whole tensor consist of, in an order that all ranks share.

    Args:
        parts: The parts of the tensor.
        key: ``fp32`` or an entry of the state.
        start: The first element.
        stop: The one behind the last.
        piece_start: See :class:`Transfer`.
        ranks: Which rank of a group, by its identity, sends what each of its ranks has; by default the first.
    """
    for held in parts:
        part, places = held.part_of(key), held.places_of(key)
        begin, end = part.before(start), part.before(stop)
        if begin < end and places.replicated:
            rank = (ranks or {}).get(id(held.holders), 0)
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
