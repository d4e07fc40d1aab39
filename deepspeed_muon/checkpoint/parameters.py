"""Which rank, or which saved file, has what of every parameter of a checkpoint.

Checkpoints hold full tensors by name, each with a :class:`.ParameterRecord`. Where ranks hold different slices of a
full tensor or name it differently, a :class:`TensorSlice` says which slice a rank has. Three kinds of parallelism fit
one rule. A rank of ``deepspeed.moe`` has some of the experts, each complete, under numbers of its own; AutoEP stacks a
rank's experts along dimension 0; tensor parallelism shards a dimension. In each case the rank's tensor is the full
tensor, under a name that all ranks share, at some ranges of indices along one dimension.

Example: two ranks share a fused gate and up projection of 12 x 4, and each has half of both. The first rank's tensor of
6 x 4 is ``TensorSlice("gate_up", (12, 4), 0, ((0, 3), (6, 9)))``.

A :class:`PartitionedParameter` adds where the elements of a slice are in the flat partitions of a data-parallel group:
of a running engine, which :func:`collect` describes, or of saved files. :func:`transfers` translates a range of a full
tensor into ranges of those partitions, for a save of an engine and for a conversion of files. Nothing is copied or sent
here.

:class:`BoundEngine` is the engine that an optimizer is bound to: its parameters, counters, schedule and loss scale.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from deepspeed_muon.checkpoint.index import (
    COUNTERS,
    ROW_KEYS,
    SCALE_KEYS,
    ParameterRecord,
    Progress,
    refuse_float64,
    saved_schedule,
)
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import warn
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.plan.layout import MatrixLayout, ParameterLayout
from deepspeed_muon.plan.placement import Fragment, Placement
from deepspeed_muon.routing.route import Route
from deepspeed_muon.step.int8 import SCALE_KEY, Int8Blocks
from deepspeed_muon.step.step_set import Partition

# ---- slices of full tensors --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StridedRange:
    """Equal ranges of elements at equal distances, in a rank's tensor and in the full tensor.

    Attributes:
        local_offset: Where the first range starts in the rank's tensor.
        full_offset: Where it starts in the full tensor.
        numel: Elements of each range.
        count: How many ranges there are.
        local_stride: From the start of one range to that of the next in the rank's tensor.
        full_stride: The same in the full tensor.
    """

    local_offset: int
    full_offset: int
    numel: int
    count: int
    local_stride: int
    full_stride: int


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A rank's tensor, as ranges along one dimension of the full tensor.

    Attributes:
        name: The name of the full tensor, equal on all ranks.
        shape: The shape of the full tensor.
        dim: The dimension along which it is sliced.
        ranges: First and last index plus one of each range, ascending, in the order of the rank's tensor.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        ends = [0, *(stop for _, stop in self.ranges)]
        are_ascending = all(
            end <= start < stop for end, (start, stop) in zip(ends, self.ranges, strict=False)
        )
        has_dim = 0 <= self.dim < max(1, len(self.shape))
        if not self.ranges or not has_dim or not are_ascending or ends[-1] > self.length:
            raise ValueError(f"not a slice: {self}")

    @property
    def length(self) -> int:
        """The length of the full tensor along :attr:`dim`."""
        return self.shape[self.dim] if self.shape else 1

    @property
    def is_full(self) -> bool:
        """Whether the rank holds the full tensor."""
        return self.ranges == ((0, self.length),)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the rank's tensor."""
        length = sum(stop - start for start, stop in self.ranges)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :]) if self.shape else ()

    @property
    def _row_numels(self) -> tuple[int, int, int]:
        """Elements of one index along :attr:`dim`, and of all its indices in the rank's and in the full tensor."""
        inner = math.prod(self.shape[self.dim + 1 :])
        return inner, math.prod(self.local_shape[self.dim :]), self.length * inner

    def local_elements_before(self, element: int) -> int:
        """Return how many of the rank's elements come before an element of the full tensor, both in row-major order.

        So the rank's elements among ``[start, stop)`` of the full tensor are
        ``[local_elements_before(start), local_elements_before(stop))``.
        """
        inner, local_row, full_row = self._row_numels
        # A row is what follows one index of the dimensions before dim. Of the last row, which is incomplete, each range
        # counts as far as the element. Example: ranges (0, 3) and (6, 9) along dimension 0 of a 12 x 4 tensor: one row
        # of 48 elements, of which the rank has 24. Before element 26, in index 6, it has 12 and 2 of them.
        outer, rest = divmod(element, full_row)
        return outer * local_row + sum(
            min(max(rest - start * inner, 0), (stop - start) * inner) for start, stop in self.ranges
        )

    def strided_ranges(self, start: int, stop: int) -> Iterator[StridedRange]:
        """Yield where the rank's elements ``[start, stop)`` are in the full tensor: at most three for each range."""
        inner, local_row, full_row = self._row_numels
        for row, count, left, right in row_ranges(start, stop, local_row):
            range_start = 0  # of this range in the rank's row, in elements
            for begin, end in self.ranges:
                range_stop = range_start + (end - begin) * inner
                low, high = max(left, range_start), min(right, range_stop)
                if low < high:
                    offset = row * full_row + begin * inner + low - range_start
                    yield StridedRange(row * local_row + low, offset, high - low, count, local_row, full_row)
                range_start = range_stop

    def views(
        self, start: int, stop: int, sliced: Tensor, sliced_start: int, full: Tensor, full_start: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of strided views of the same elements: of the rank's tensor, and of the full tensor.

        Args:
            start: The first of the rank's elements to view.
            stop: The element after the last.
            sliced: Consecutive elements of the rank's tensor, one-dimensional and contiguous.
            sliced_start: The element with which ``sliced`` begins.
            full: Consecutive elements of the full tensor, one-dimensional and contiguous.
            full_start: The element of the full tensor with which ``full`` begins.
        """
        for strided in self.strided_ranges(start, stop):
            # Both views are (count, numel): rows of consecutive elements, with the stride of either tensor.
            size = strided.count, strided.numel
            local_offset = sliced.storage_offset() + strided.local_offset - sliced_start
            full_offset = full.storage_offset() + strided.full_offset - full_start
            yield (
                sliced.as_strided(size, (strided.local_stride, 1), local_offset),
                full.as_strided(size, (strided.full_stride, 1), full_offset),
            )

    def scaled(self, local_length: int) -> TensorSlice:
        """Return the slice of a vector that has equally many numbers for each index of :attr:`dim`."""
        factor, rest = divmod(local_length, sum(stop - start for start, stop in self.ranges))
        if rest or not factor:
            raise ValueError(
                f"{self.name}: {local_length} numbers do not belong to the indices of {self.ranges}"
            )
        ranges = tuple((start * factor, stop * factor) for start, stop in self.ranges)
        return TensorSlice(self.name, (self.length * factor,), 0, ranges)


def row_ranges(start: int, stop: int, width: int) -> list[tuple[int, int, int, int]]:
    """Return the rows that elements ``[start, stop)`` cover: the end of a row, full rows, the start of a row.

    Each entry is the first row, the number of rows, the first column, and the column after the last one.
    """
    # [5, 14) in rows of 4: element 5 to the end of row 1, row 2, elements 12 and 13 of row 3
    first, end = -(-start // width), stop // width  # full rows are [first, end)
    if first > end:  # all inside one row
        return [(end, 1, start % width, stop % width)]
    ranges = [(first - 1, 1, start % width, width)] if start < first * width else []
    if end > first:
        ranges.append((first, end - first, 0, width))
    return [*ranges, (end, 1, 0, stop % width)] if stop > end * width else ranges


def full_slice(name: str, shape: Sequence[int]) -> TensorSlice:
    """Return the slice of a rank that has the full tensor."""
    return TensorSlice(name, tuple(shape), 0, ((0, shape[0] if shape else 1),))


def cover_tensor(slices: Iterable[TensorSlice]) -> bool:
    """Return whether slices of one tensor, replicas counted once, have each index of it once."""
    distinct = set(slices)
    if len({(one.name, one.shape, one.dim) for one in distinct}) > 1:
        return False
    ranges = sorted(pair for one in distinct for pair in one.ranges)
    ends = [0, *(stop for _, stop in ranges)]
    are_adjacent = all(end == start for end, (start, _) in zip(ends, ranges, strict=False))
    return are_adjacent and ends[-1] == next(iter(distinct)).length


# ---- partitions of an engine or of files -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartitionedParameter:
    """One parameter, or a slice of it, as the ranks of one data-parallel group have partitioned it.

    With tensor, expert or pipeline parallelism each data-parallel group has a slice of its own.

    Attributes:
        record: The record of the full tensor.
        tensor_slice: Which slice of the full tensor the group holds; has the name of the full tensor.
        placement: Where the elements of the slice are in the partitions of the group.
        row_fragments: Where its per-row state is stored, in rows and ascending; empty without such state. Of a
            replicated parameter every member has all of it.
        members: The members of the group: global ranks, or numbers of files. One object for all parameters of a group.
        partition: Index of the flat partition on each member.
    """

    record: ParameterRecord
    tensor_slice: TensorSlice
    placement: Placement
    row_fragments: tuple[Fragment, ...]
    members: tuple[int, ...]
    partition: int

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
            # Fragments are in the order of the ranks; those before the first element are not looked at.
            ranks = range(self.placement.rank_of(start), self.placement.ranks.stop)
            fragments = map(self.placement.fragment_on, ranks)
        for fragment in filter(None, fragments):
            # What [start, stop) and the fragment have in common, and where that begins in the partition. Example: of
            # [4, 9) a fragment with elements 6 to 15 from offset 20 on has [6, 9), at the offsets 20 to 22.
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
        # A slice of a stack has some of its experts, each with all of its outputs.
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
        record = {**dict(self.record), "step": step, "rows": rows, "row_keys": row_keys}
        return replace(self, record=ParameterRecord(**record))


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
        views = tensor_slice.views(start, start + self.numel, elements, start, piece, self.piece_start)
        for source, target in views:
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
            # members has global ranks; the reader is a position among them
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
        # Data-parallel groups with the same slice, such as those of a copy on tensor-parallel ranks, hold equal values.
        slices.setdefault(parameter.name, {}).setdefault(parameter.tensor_slice, parameter)
    for name, by_slice in slices.items():
        first, *further = by_slice.values()
        where = f"{files[first.members[0]]}: " if files else ""
        problem = f"{where}parameter {name}: the ranks hold slices that do not make up the full tensor: "
        for parameter in further:
            # The stages of a pipeline may number their param groups differently.
            if {**dict(parameter.record), "group": first.record.group} != dict(first.record):
                raise CheckpointError(f"{problem}one is of {first.record!r}, another of {parameter.record!r}")
        for key in first.record.tensor_keys:
            if not cover_tensor(parameter.slice_of(key) for parameter in by_slice.values()):
                ranges = ", ".join(f"{s.ranges} of {p.members[0]}" for s, p in by_slice.items())
                length, dim = first.tensor_slice.length, first.tensor_slice.dim
                raise CheckpointError(
                    f"{problem}{key} has {length} indices along dimension {dim}, there are {ranges}"
                )
    return {name: tuple(by_slice.values()) for name, by_slice in slices.items()}


# ---- the engine of an optimizer ----------------------------------------------------------------------------


class BoundEngine:
    """The engine that an optimizer is bound to, referred to weakly; :func:`bound_engine_of` returns it.

    Attributes:
        parameters: See :func:`describe_parameters`.
        step_thread: The thread that took the last step; ``None`` before the first one.
        is_swapped: Whether masters and momentum are on NVMe between steps.
        save_id: Random id of the running ``engine.save_checkpoint``, equal on all ranks; else ``None``.
    """

    def __init__(
        self, engine: Any, slices: Mapping[str, TensorSlice | str], view_of: Callable[[Any], Any]
    ) -> None:
        """Describe an engine whose optimizer has just been bound.

        Args:
            engine: A ``DeepSpeedEngine`` whose optimizer is ours and bound.
            slices: See :func:`describe_parameters`.
            view_of: Returns the view of the ZeRO optimizer in ``engine.optimizer``.
        """
        # The engine owns the optimizer, and the optimizer owns this object.
        self._engine_reference = weakref.ref(engine)
        self._view_of = view_of
        self.parameters = describe_parameters(engine.basic_optimizer.routes, slices)
        self.is_swapped = view_of(engine.optimizer).swap_folder is not None
        self.save_id: str | None = None
        self.step_thread: int | None = None
        self._interrupted_restore: str | None = None
        self._forward_guards: list[RemovableHandle] = []

    @property
    def engine(self) -> Any:
        """The engine."""
        engine = self._engine_reference()
        if engine is None:
            raise CheckpointError("the engine of this optimizer no longer exists")
        return engine

    @property
    def view(self) -> Any:
        """The view of the ZeRO optimizer in ``engine.optimizer``."""
        return self._view_of(self.engine.optimizer)

    def counters(self) -> dict[str, int]:
        """Return ``global_steps``, ``global_samples`` and ``skipped_steps`` of the engine."""
        return {key: int(getattr(self.engine, key)) for key in COUNTERS}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Set the counters that :meth:`counters` returns."""
        for key, value in counters.items():
            setattr(self.engine, key, value)

    def set_loss_scale(self, state: Mapping[str, Any]) -> None:
        """Continue a dynamic loss scale from a saved state; a static scale is left alone."""
        scaler = self.view.dynamic_scaler()
        for key in SCALE_KEYS:
            if scaler is not None and key in state and hasattr(scaler, key):
                setattr(scaler, key, state[key])

    def loss_scale(self) -> dict[str, int | float]:
        """Return the state of a dynamic loss scale by DeepSpeed's names of its attributes; empty for a static one."""
        scaler = self.view.dynamic_scaler()
        values = {key: getattr(scaler, key, None) for key in SCALE_KEYS}
        return {key: value for key, value in values.items() if isinstance(value, (int, float))}

    def progress(self) -> Progress:
        """Return the engine's counters, schedule and loss scale."""
        scheduler = self.engine.lr_scheduler
        class_name = None if scheduler is None else type(scheduler).__name__
        state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else None
        schedule = saved_schedule(state)
        if schedule is None and state is not None:
            warn(
                "deepspeed_muon: the state of the scheduler %s is not JSON and is left out of the consolidated "
                "checkpoint; save scheduler.state_dict() yourself, and load it after restoring",
                class_name,
            )
        return Progress.model_validate(
            {
                **self.counters(),
                "lr_scheduler": schedule,
                "lr_scheduler_class": class_name,
                "loss_scale": self.loss_scale() or None,
            }
        )

    def begin_restore(self, source: str) -> None:
        """Make steps, saves and forward passes raise until :meth:`end_restore`; may be called again.

        Args:
            source: The checkpoint that is restored, for the error.
        """
        self._interrupted_restore = source
        if self._forward_guards:
            return
        # A pipeline engine runs its module without calling itself; evaluation code may call the module directly.
        for module in (self.engine, self.engine.module):
            guard = module.register_forward_pre_hook(lambda *_: self.require_restored(), prepend=True)
            self._forward_guards.append(guard)

    def end_restore(self) -> None:
        """Allow the engine to train again."""
        self._interrupted_restore = None
        while self._forward_guards:
            self._forward_guards.pop().remove()

    def require_restored(self) -> None:
        """Raise ``CheckpointError`` if a restore began and did not end."""
        if self._interrupted_restore is not None:
            raise CheckpointError(
                f"a restore from {self._interrupted_restore} was interrupted: weights and optimizer state mix two "
                f"states. Restore again, or create a new engine"
            )


def optimizer_of(engine: Any) -> Muon:
    """Return our optimizer inside an engine.

    Raises:
        CheckpointError: If the engine runs another optimizer, or is not initialized yet.
    """
    optimizer = getattr(engine, "basic_optimizer", None)
    if not isinstance(optimizer, Muon):
        raise CheckpointError(
            f"this engine's optimizer is {type(optimizer).__name__}, not deepspeed_muon.Muon: use DeepSpeed's own "
            f"checkpoints for it"
        )
    if optimizer not in _BOUND_ENGINES:
        raise CheckpointError("the engine's optimizer holds no parameters")
    return optimizer


def bound_engine_of(optimizer: Muon) -> BoundEngine:
    """Return the engine that an optimizer is bound to."""
    return _BOUND_ENGINES[optimizer]


def set_bound_engine(optimizer: Muon, bound_engine: BoundEngine) -> None:
    """Set what :func:`bound_engine_of` returns."""
    _BOUND_ENGINES[optimizer] = bound_engine


_BOUND_ENGINES: weakref.WeakKeyDictionary[Muon, BoundEngine] = weakref.WeakKeyDictionary()


def require_checkpointable(engine: Any) -> None:
    """Raise, on every rank and without communicating, if the ranks cannot save or restore this engine together.

    Engines with another optimizer are left to :func:`collect`.

    Raises:
        CheckpointError: If the engine spans only some ranks of the program; if it offloads to NVMe; or if another
            thread takes its steps, whose collectives would interleave with those of the save.
    """
    optimizer = getattr(engine, "basic_optimizer", None)
    if not isinstance(optimizer, Muon) or optimizer not in _BOUND_ENGINES:
        return
    bound_engine = _BOUND_ENGINES[optimizer]
    if not optimizer.ranks.are_all:
        raise CheckpointError(
            "this engine has some of the program's ranks only: a save needs all ranks of the default process group, as "
            "DeepSpeed's own save_checkpoint does, and the others would not take part; save module.state_dict() and "
            "optimizer.state_dict() of each rank instead"
        )
    if bound_engine.is_swapped:
        raise CheckpointError(
            "consolidated sets and universal checkpoints with NVMe offload: masters and momentum are on NVMe, where "
            "such checkpoints are neither read from nor written to. engine.save_checkpoint and load_checkpoint resume "
            "the run on the same ranks; offload to device cpu to change them"
        )
    if bound_engine.step_thread not in (None, threading.get_ident()):
        raise CheckpointError(
            "another thread takes the steps of this engine: save and restore in the thread that calls engine.step"
        )


# ---- the parameters of a running engine --------------------------------------------------------------------


class ParameterInfo(NamedTuple):
    """What the engine knows of a trained parameter before any step.

    Attributes:
        record: The record of the full tensor.
        tensor_slice: Which slice of the full tensor this rank's parameter is.
        route_reason: Why it goes to its algorithm.
    """

    record: ParameterRecord
    tensor_slice: TensorSlice
    route_reason: str


def describe_parameters(
    routes: Iterable[Route], slices: Mapping[str, TensorSlice | str]
) -> dict[str, ParameterInfo | str]:
    """Describe each trained parameter that has elements, by its name on this rank.

    Args:
        routes: The routes of this rank's parameters.
        slices: By name, for parameters that are slices of a full tensor or have another name in it: the slice, or why
            it is unknown. The reason is returned in place of a description.
    """
    infos: dict[str, ParameterInfo | str] = {}
    for route in routes:
        if 0 in route.shape:
            continue  # in no partition, and so in no checkpoint
        tensor_slice = slices.get(route.name) or full_slice(route.name, route.shape)
        if isinstance(tensor_slice, str):
            infos[route.name] = tensor_slice
        elif route.algorithm != "frozen":
            # The index of the param group is known once ZeRO has made its groups; collect() sets it.
            record = ParameterRecord(
                shape=tensor_slice.shape, algorithm=route.algorithm, transposed=route.transposed, group=0
            )
            infos[route.name] = ParameterInfo(record, tensor_slice, route.reason)
    return infos


@dataclass(frozen=True, slots=True)
class LiveParameter(PartitionedParameter):
    """One parameter of a running engine, with this rank's partition.

    Attributes:
        local_name: Its name on this rank.
        route_reason: Why it goes to its algorithm.
        local_partition: The partition that holds this rank's fragment.
        group_rank: This rank inside the data-parallel group.
        int8_blocks: The blocks of the partition's momentum if it is stored as int8, else ``None``.
    """

    local_name: str
    route_reason: str
    local_partition: Partition
    group_rank: int
    int8_blocks: Int8Blocks | None = None

    def local_fragments(self, key: str) -> list[Fragment]:
        """Return this rank's fragments of the master (``fp32``) or of a state tensor."""
        return self.fragments_on(self.group_rank, key)

    def metadata(self) -> PartitionedParameter:
        """Return what is sent to other ranks: no tensors."""
        return PartitionedParameter(*(getattr(self, name) for name in PartitionedParameter.__slots__))


@dataclass(frozen=True, slots=True)
class LiveState:
    """Everything of an engine that a checkpoint holds.

    Attributes:
        optimizer: Our optimizer inside the engine.
        bound_engine: The engine that it is bound to.
        parameters: Name of the full tensor to its parameter, in an order that all ranks with the same parameters share.
        device: Where the collectives' tensors must be.
    """

    optimizer: Muon
    bound_engine: BoundEngine
    parameters: dict[str, LiveParameter]
    device: torch.device

    @property
    def groups(self) -> list[list[LiveParameter]]:
        """The parameters of each data-parallel group that this rank belongs to."""
        groups: dict[int, list[LiveParameter]] = {}
        for parameter in self.parameters.values():
            # collect() shares one tuple among all parameters of a group.
            groups.setdefault(id(parameter.members), []).append(parameter)
        return list(groups.values())

    def flat_tensor(self, partition: Partition, key: str) -> Tensor:
        """Return the master (``fp32``) or a state tensor of this rank's partition, flat in row-major order.

        A view, except for ``channels_last`` parameters of stage 0, of which it is a copy: see :meth:`write_back`.
        """
        return self._tensor(partition, key).reshape(-1)

    def elements(self, parameter: LiveParameter, key: str, offset: int, numel: int) -> Tensor:
        """Return ``numel`` elements of a parameter from an offset in its partition on; int8 momentum as fp32."""
        if key == "momentum_buffer" and parameter.int8_blocks is not None:
            state = self.optimizer.state[parameter.local_partition.tensor]
            return parameter.int8_blocks.decode(state[key].view(-1), state[SCALE_KEY], offset, numel)
        return self.flat_tensor(parameter.local_partition, key).narrow(0, offset, numel)

    def write_back(self, partition: Partition, key: str, flat: Tensor) -> None:
        """Copy what was written into :meth:`flat_tensor` to the partition, if that was a copy."""
        tensor = self._tensor(partition, key)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))

    def _tensor(self, partition: Partition, key: str) -> Tensor:
        tensor: Tensor = partition.tensor if key == "fp32" else self.optimizer.state[partition.tensor][key]
        return tensor.detach()


def require_fp32(state: LiveState) -> None:
    """Raise a CheckpointError if a save would round masters: those of float64 models at ZeRO 0 are float64."""
    for parameter in state.parameters.values():
        refuse_float64(parameter.local_partition.tensor.dtype, f"parameter {parameter.name}")


def collect(engine: Any) -> LiveState:
    """Describe what this rank holds of the engine's state, without copying or sending anything.

    Args:
        engine: A ``DeepSpeedEngine`` whose optimizer is ours.

    Raises:
        CheckpointError: If the engine runs another optimizer, two parameters share a name, or it is unknown which
            slice of a full tensor a parameter is.
    """
    optimizer = optimizer_of(engine)
    bound_engine = bound_engine_of(optimizer)
    group_numbers = bound_engine.view.group_numbers()
    shared_members: dict[tuple[int, ...], tuple[int, ...]] = {}  # one object for each data-parallel group
    parameters: dict[str, LiveParameter] = {}
    for runner in optimizer.runners:
        step_set = runner.step_set
        # 1. The ranks that share the step set, and where they store row state.
        # Without a process group there is a single rank.
        members = (0,) if step_set.group is None else tuple(dist.get_process_group_ranks(step_set.group))
        members = shared_members.setdefault(members, members)
        # By index of the matrix; none for variants without row state.
        row_fragments: dict[int, list[Fragment]] = {}
        for origin, fragment in zip(runner.assignment.origin, runner.row_fragments, strict=False):
            row_fragments.setdefault(origin, []).append(fragment)
        # 2. Each parameter: the engine's description, the layout of the step set, the optimizer's state.
        partitions = {partition.index: partition for partition in step_set.partitions}
        layouts: tuple[MatrixLayout | ParameterLayout, ...] = (*step_set.matrices, *step_set.adamw_parameters)
        for index, layout in enumerate(layouts):
            info = bound_engine.parameters[layout.name]
            if isinstance(info, str):
                raise CheckpointError(
                    f"parameter {layout.name}: {info}. engine.save_checkpoint and load_checkpoint resume it at the "
                    f"same ranks"
                )
            partition = partitions[layout.partition]
            state = optimizer.state.get(partition.tensor, {})
            has_int8 = SCALE_KEY in state  # only matrices can
            parameter = LiveParameter(
                record=info.record.model_copy(update={"group": group_numbers[partition.index]}),
                tensor_slice=info.tensor_slice,
                placement=layout.placement,
                row_fragments=tuple(row_fragments.get(index, ())),
                members=members,
                partition=partition.index,
                local_name=layout.name,
                route_reason=info.route_reason,
                local_partition=partition,
                group_rank=step_set.rank,
                int8_blocks=runner.int8_blocks[partition.index] if has_int8 else None,
            ).with_state(state, int(state.get("step", 0)))
            # Two slices of one full tensor on one rank would have the same name.
            namesake = parameters.setdefault(parameter.name, parameter)
            if namesake is not parameter:
                raise CheckpointError(
                    f"two parameters are called {parameter.name} ({namesake.local_name} and {parameter.local_name} on "
                    f"this rank): pass model.named_parameters()"
                )
    if not parameters:
        raise CheckpointError("the engine's optimizer holds no parameters")
    return LiveState(optimizer, bound_engine, parameters, optimizer.runners[0].context.device)
