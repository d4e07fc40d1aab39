"""The tables of a chunk, and the elementwise passes that read them: one packs all fragments, one applies all updates.

The tables say which fragments this rank packs and applies, and what it copies for the matrices it owns. They are made
once, when the optimizer is bound, and equal segments of the matrices of a batch are copied at once: the work of a step
in Python does not grow with the number of fragments. What changes from step to step is in :class:`Rates`, one row for
each matrix.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.errors import ConfigError
from deepspeed_muon.math.updates import AdjustLrName, WeightDecayMode, decay_factor, update_scale
from deepspeed_muon.ops.dispatch import FlatPasses
from deepspeed_muon.ops.torch_operators import cautious_apply_
from deepspeed_muon.plan.chunks import Chunk, ExchangePlan, Segment
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.transport.row_state import OwnedRows
from deepspeed_muon.variants.variant import Variant

# The columns of a table of ops/: tensor and offset, other tensor and offset, numel, and the index of the matrix.
COLUMNS = 6
_ALIGNMENT = 32
DIRECTIONS, SEND = 0, 1
"""The other tensors of :attr:`ChunkTable.pack_table`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Matrices of one shape that are orthogonalised together, ``(matrices, numel)``, and what is copied into them.

    Attributes:
        local: The matrices in the batch and in the directions, if only this rank has elements of them.
        received: Their fragments in the batch and in the receive buffer.
        in_order: Whether the batch is one segment, all of it in order and from an aligned offset on: then it is a view.
    """

    local: tuple[Segment, ...]
    received: tuple[Segment, ...]
    in_order: bool


class ChunkTable:
    """What this rank packs, copies and applies in one chunk.

    Attributes:
        local_numel: Elements of the directions that are not sent: in a chunk without a gather those of the owned
            matrices, in the order in which they run in batches, and of other ranks' replicated matrices, of which only
            the momentum is updated here. Each fragment starts at a multiple of 32 elements.
        sent_numel: Elements of the fragments in the send buffer, in the communication dtype.
        pack_table: The fragments of the momentum, and where their directions are written.
        blocks: :meth:`.Int8Blocks.row` of each fragment of :attr:`pack_table` for int8 momentum, else empty.
        apply_table: The fragments of the weights, and where their updates are: where their directions were.
        int8_segments: Index of the matrix of each fragment in the send buffer, and the fragment in the communication
            dtype and in the buffer; empty if they are sent uncompressed.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        chunk: Chunk,
        batches: Sequence[Sequence[int]],
        position_of: Mapping[int, int],
        *,
        exact: bool,
    ) -> None:
        """Make the tables.

        Args:
            plan: The exchange plan.
            chunk: One of its chunks.
            batches: The chunk's owned matrices as they are orthogonalised.
            position_of: Index of a partition to its position among the tensors of a pass.
            exact: Whether fragments are sent uncompressed.
        """
        self._matrices, self._position_of = plan.matrices, position_of
        fragments = {index: plan.matrices[index].placement.fragment_on(plan.rank) for index in chunk.matrices}
        self._fragments = {index: each for index, each in fragments.items() if each is not None}
        self._received: dict[int, list[Segment]] = {}
        for index, segment in chunk.receive_buffer.segments:
            self._received.setdefault(index, []).append(segment)

        # 1. directions that are not sent
        unsent = {} if chunk.gathers else self._fragments
        owned = [index for batch in batches for index in batch if index in unsent]
        local = owned + [index for index in unsent if plan.owners[index] != plan.rank]
        offsets, self.local_numel = self._aligned_offsets(local)
        self._offset_of = dict(zip(local, offsets, strict=True))

        # 2. fragments in the send buffer; in the communication dtype they need a tensor of their own if it is int8
        segments = chunk.send_buffer.segments
        sent = [index for index, _ in segments]
        if exact:
            send_offsets, self.sent_numel = (
                [each.buffer_offset for _, each in segments],
                chunk.send_buffer.numel,
            )
        else:
            send_offsets, self.sent_numel = self._aligned_offsets(sent)
        self.int8_segments: tuple[tuple[int, Segment], ...] = ()
        if not exact:
            self.int8_segments = tuple(
                (index, segment._replace(matrix_offset=offset))
                for (index, segment), offset in zip(segments, send_offsets, strict=True)
            )

        # 3. tables of the passes
        self.pack_table = self._table(local, DIRECTIONS, offsets)
        sent_table = self._table(sent, SEND, send_offsets)
        if chunk.gathers:
            self.pack_table = torch.cat((self.pack_table, sent_table))
        self.apply_table = torch.cat((self._table(owned, DIRECTIONS, offsets[: len(owned)]), sent_table))
        self.blocks = torch.empty((0, 2), dtype=torch.int64)

        # A chunk has the same active matrices in almost all steps, or some of a few sets.
        self._batch = functools.lru_cache(maxsize=len(batches) + 64)(self._copies)
        for batch in batches:
            # Shards of matrices of one logical shape may be unequal.
            if len({plan.matrices[index].numel for index in batch}) == 1:
                self.batch(batch)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return what is copied for owned matrices of one shape; cached."""
        return self._batch(tuple(indices))

    def _copies(self, indices: tuple[int, ...]) -> Batch:
        numel = self._matrices[indices[0]].numel
        local: list[Segment] = []
        received: list[list[Segment]] = []  # the first segment of every matrix, the second of every one, ...
        for number, index in enumerate(indices):
            start = number * numel
            if index in self._offset_of:
                local.append(Segment.of(start, numel, self._offset_of[index], numel))
            for position, segment in enumerate(self._received.get(index, ())):
                if position == len(received):
                    received.append([])
                received[position].append(segment._replace(matrix_offset=start + segment.matrix_offset))
        local_joined = tuple(_joined(local, numel))
        received_joined = tuple(joined for segments in received for joined in _joined(segments, numel))
        in_order = any(  # of the first; there is none if this rank's shards of the matrices are empty
            math.prod(each.shape) == len(indices) * numel and each.buffer_offset % _ALIGNMENT == 0
            for each in (local_joined or received_joined)[:1]
        )
        return Batch(local_joined, received_joined, in_order)

    def _aligned_offsets(self, indices: Sequence[int]) -> tuple[list[int], int]:
        """Return the offsets of consecutive fragments at multiples of 32 elements, and the elements of all of them."""
        lengths = (-(-self._fragments[index].numel // _ALIGNMENT) * _ALIGNMENT for index in indices)
        ends = list(accumulate(lengths, initial=0))
        return ends[:-1], ends[-1]

    def _table(self, indices: Sequence[int], target: int, offsets: Sequence[int]) -> Tensor:
        """Return the table of this rank's fragments of matrices for the passes of ops/, int64 ``(fragments, 6)``.

        Args:
            indices: The matrices.
            target: Number of the tensor with directions and updates.
            offsets: Of each fragment in it.
        """
        rows = []
        for index, offset in zip(indices, offsets, strict=True):
            fragment, partition = self._fragments[index], self._matrices[index].partition
            position = self._position_of[partition]
            rows.append((position, fragment.partition_offset, target, offset, fragment.numel, index))
        return torch.tensor(rows, dtype=torch.int64).view(-1, COLUMNS)


def _joined(segments: Sequence[Segment], distance: int) -> Iterator[Segment]:
    """Yield segments of one matrix each, with those of consecutive matrices at equal distances as one."""
    last: Segment | None = None
    for segment in segments:
        longer = None if last is None else last.joined(segment, distance)
        if last is not None and longer is None:
            yield last
        last = longer or segment._replace(matrix_strides=(distance, *segment.matrix_strides[1:]))
    if last is not None:
        yield last


@dataclass(frozen=True, slots=True)
class Rates:
    """How each matrix of a plan is updated in this step.

    Attributes:
        momentum: ``(matrices, 2)``, float64: decay of the moving average, and whether Nesterov's blend follows.
        apply: ``(matrices, 2)``, float64: the rate times the scale of the first block, relative to which an update is
            scaled; and the factor of the weights, or with cautious decay the share that those lose that decay.
        cautious: ``(partitions,)``, bool: where only weights decay that have the sign of their update; ``None`` if
            nowhere.
        scales: Factor of the scale rule for each block of each matrix.
        settings: Values of the variant's settings for each matrix; empty if it has no settings.
    """

    momentum: Tensor
    apply: Tensor
    cautious: Tensor | None
    scales: Sequence[tuple[float, ...]]
    settings: Sequence[tuple[float, ...]]


class RateTable:
    """The :class:`Rates` of a plan, made anew when a param group has changed."""

    def __init__(
        self, matrices: Sequence[MatrixLayout], variant: Variant, partitions: Mapping[int, int]
    ) -> None:
        """Keep the arguments; ``partitions`` maps the index of a partition to its position."""
        self._matrices = matrices
        self._variant = variant
        self._keys = [each.name for each in variant.settings]
        self._position_of = partitions
        self._positions = torch.tensor([partitions[each.partition] for each in matrices], dtype=torch.int64)
        # A schedule changes the rates in every step, but not the rules.
        self._scales = functools.lru_cache(maxsize=4)(self._scales_by)
        self._read: list[tuple[Any, ...]] = []
        self._rates: Rates | None = None

    def of(self, groups: Mapping[int, Mapping[str, Any]]) -> Rates:
        """Return the rates for the param groups, which are given by partition index."""
        of_group = {id(group): self._numbers(group) for group in {id(g): g for g in groups.values()}.values()}
        read = [of_group[id(groups[index])] for index in self._position_of]
        if read != self._read or self._rates is None:
            self._read = read
            self._rates = self._made(read)
        return self._rates

    def _numbers(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what the rates depend on."""
        return (
            float(group["lr"]),
            float(group["weight_decay"]),
            group["weight_decay_mode"],
            group["adjust_lr_fn"],
            float(group["momentum"]),
            bool(group["nesterov"]),
            *(float(group[key]) for key in self._keys),
        )

    def _made(self, read: Sequence[tuple[Any, ...]]) -> Rates:
        decays = {decay for _, decay, *_ in read} - {0.0}
        if decays and "weight_decay" in self._variant.refuses:  # from a schedule, or another run's settings
            raise ConfigError(
                f"weight_decay {decays.pop():g} in a param group of Muon with variant {self._variant.name!r}: "
                f"{self._variant.refuses['weight_decay']}. After another variant restore with hyperparameters=False"
            )
        scales, first = self._scales(tuple(rule for _, _, _, rule, *_ in read))
        numbers = [
            (lr, _decay(mode, lr, decay), momentum, nesterov, *more)
            for lr, decay, mode, _, momentum, nesterov, *more in read
        ]
        settings = [own[4:] for own in numbers]
        width = 4 + len(self._keys)
        rows = torch.tensor(numbers, dtype=torch.float64).view(-1, width)[self._positions]
        rows[:, 0] *= first
        cautious = torch.tensor([mode == "cautious" for _, _, mode, *_ in read])
        return Rates(
            rows[:, 2:4].contiguous(),
            rows[:, :2].contiguous(),
            cautious if cautious.any() else None,
            scales,
            [settings[position] for position in self._positions.tolist()] if self._keys else (),
        )

    def _scales_by(self, rules: Sequence[AdjustLrName]) -> tuple[list[tuple[float, ...]], Tensor]:
        """Return the scales of all blocks of each matrix, and of the first ones, for the rule of each partition."""
        found: list[tuple[float, ...]] = []
        for matrix, position in zip(self._matrices, self._positions.tolist(), strict=True):
            shapes = [matrix.layer_shape(*shape) for shape in matrix.block_shapes]
            if self._variant.apply is not None:
                found.append((1.0,) * len(shapes))
            else:
                found.append(tuple(update_scale(rules[position], *shape) for shape in shapes))
        return found, torch.tensor([each[0] for each in found], dtype=torch.float64)


def _decay(mode: WeightDecayMode, lr: float, weight_decay: float) -> float:
    return lr * weight_decay if mode == "cautious" else decay_factor(mode, lr=lr, weight_decay=weight_decay)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one set. Flat tensors are this rank's, by position of the partition.

    Attributes:
        mask: For each matrix of the plan, whether any rank has a gradient, bool on the CPU; ``None`` if all have one.
        rates: Of each matrix of the plan.
        flat: Flat weights; mutated.
        momentum: Mutated.
        grads: The gradients that enter the momentum.
        finish: The variant's ``finish`` with the row state of owned matrices; ``None`` if it has none.
        passes: Native or torch passes.
        scales: Of an int8 momentum, whose codes :attr:`momentum` then holds; mutated.
    """

    mask: Tensor | None
    rates: Rates
    flat: Sequence[Tensor]
    momentum: Sequence[Tensor]
    grads: Sequence[Tensor]
    finish: OwnedRows | None
    passes: FlatPasses
    scales: Sequence[Tensor] | None = None

    def active(self, indices: Sequence[int]) -> Sequence[int]:
        """Return those of some matrices that are active."""
        if self.mask is None:
            return indices
        return [index for index, flag in zip(indices, self.mask[list(indices)].tolist(), strict=True) if flag]

    def active_rows(self, table: Tensor) -> Tensor:
        """Return the rows of a table whose matrix is active."""
        return table if self.mask is None else table[self.mask[table[:, COLUMNS - 1]]]


def pack(table: ChunkTable, step: Step, directions: Tensor, send: Tensor) -> None:
    """Update the momentum of a chunk's active fragments; write their directions.

    Args:
        table: Of the chunk.
        step: The momentum is mutated.
        directions: Receives those that are not sent: :attr:`ChunkTable.local_numel` elements, in the communication
            dtype.
        send: Receives those that are sent. Both are on the device of the momentum.
    """
    rows, outs, rates = step.active_rows(table.pack_table), [directions, send], step.rates.momentum
    if step.scales is None:
        step.passes.momentum_pack(step.momentum, step.grads, outs, rows, rates)
        return
    blocks = table.blocks if step.mask is None else table.blocks[step.mask[table.pack_table[:, COLUMNS - 1]]]
    step.passes.momentum_pack_int8(step.momentum, step.scales, step.grads, outs, rows, rates, blocks)


def apply(table: Tensor, step: Step, updates: Sequence[Tensor]) -> None:
    """Decay and update the fragments of the weights in a table.

    Args:
        table: Of active fragments.
        step: The weights are mutated.
        updates: The table's other tensors: flat, in the communication dtype, on any device.
    """
    if not len(table):
        return
    device = step.flat[0].device
    if any(each.device != device for each in updates):
        table, updates = _moved(table, updates, device)
    cautious = None if step.rates.cautious is None else step.rates.cautious[table[:, 0]]
    if cautious is not None:
        cautious_apply_(step.flat, updates, table[cautious], step.rates.apply)
        table = table[~cautious]
    step.passes.unpack_apply(step.flat, updates, table, step.rates.apply)


def _moved(table: Tensor, updates: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the update of each fragment on the device of the weights, and their table."""
    parts = [updates[other].narrow(0, at, numel) for _, _, other, at, numel, _ in table.tolist()]
    moved = torch.cat(parts).to(device).split(table[:, 4].tolist())
    table = table.clone()
    table[:, 2], table[:, 3] = torch.arange(len(table)), 0
    return table, moved
