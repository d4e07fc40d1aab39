"""The tables of a chunk, and the elementwise passes that read them: one packs all fragments, one applies all updates.

The tables say which fragments this rank packs and applies, and what it copies for the matrices it owns. They are made
once, when the optimizer is bound, and equal pieces of the matrices of a batch are copied at once: the work of a step in
Python does not grow with the number of fragments. What changes from step to step is in :class:`Rates`, a row a matrix.
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
"""The other tensors of :attr:`ChunkTable.packed`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Matrices of one shape that are orthogonalised together, ``(matrices, numel)``, and what is copied there.

    Attributes:
        own: The matrices in the batch and in the directions, if this rank has them whole.
        received: Their fragments in the batch and in the receive buffer.
        in_order: Whether what is orthogonalised is one segment, all of it in order and from an aligned place on.
    """

    own: tuple[Segment, ...]
    received: tuple[Segment, ...]
    in_order: bool


class ChunkTable:
    """What this rank does in one chunk.

    Attributes:
        room: Elements of the directions in a chunk without a gather: of the owned matrices, in the order in which they
            run in batches, and of others' matrices, whose momentum alone is updated. Each fragment starts at a multiple
            of 32 elements.
        sent_room: Elements of the fragments in the send buffer, in the communication dtype.
        packed: Table of the momentum with the directions and with what is sent.
        blocks: The blocks of each fragment of :attr:`packed` where the momentum has 8 bits, else empty.
        held: Table of the partitions with all updates: where the directions of owned matrices were, and what came back,
            which arrives where the direction left from.
        coded: Index of the matrix of each fragment in the send buffer, and where it lies in the communication dtype and
            there; empty if fragments lie in the send buffer as they are.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        chunk: Chunk,
        batches: Sequence[Sequence[int]],
        partitions: Mapping[int, int],
        *,
        exact: bool,
    ) -> None:
        """Make the tables.

        Args:
            plan: The exchange plan.
            chunk: One of its chunks.
            batches: The chunk's owned matrices as they are orthogonalised.
            partitions: Index of a partition to its position.
            exact: Whether fragments lie in the send buffer as they are.
        """
        self._matrices = plan.matrices
        self._partitions = partitions
        found = ((index, plan.matrices[index].placement.fragment_on(plan.rank)) for index in chunk.matrices)
        self._held = {index: fragment for index, fragment in found if fragment is not None}
        self._segments: dict[int, list[Segment]] = {}
        for index, segment in chunk.receive_buffer.segments:
            self._segments.setdefault(index, []).append(segment)

        staying = {} if chunk.gathers else self._held
        owned = [index for batch in batches for index in batch if index in staying]
        kept = owned + [index for index in staying if plan.owners[index] != plan.rank]
        starts, self.room = self._one_after_the_other(kept)
        self._starts = dict(zip(kept, starts, strict=True))
        segments = chunk.send_buffer.segments
        sent = [index for index, _ in segments]
        if exact:
            places, self.sent_room = (
                [segment.buffer_offset for _, segment in segments],
                chunk.send_buffer.numel,
            )
        else:
            places, self.sent_room = self._one_after_the_other(sent)
        pairs = zip(segments, places, strict=True)
        self.coded = (
            () if exact else tuple((i, each._replace(matrix_offset=place)) for (i, each), place in pairs)
        )
        at_owned = starts[: len(owned)]
        self.held = torch.cat((self._table(owned, DIRECTIONS, at_owned), self._table(sent, SEND, places)))
        self.packed = self._table(kept, DIRECTIONS, starts)
        if chunk.gathers:
            self.packed = torch.cat((self.packed, self._table(sent, SEND, places)))
        self.blocks = torch.empty((0, 4), dtype=torch.int64)
        # A chunk has the same active matrices in almost all steps, or some of a few sets.
        self._batch = functools.lru_cache(maxsize=len(batches) + 64)(self._made)
        for batch in batches:
            # Cut matrices of one logical shape need not be alike here.
            if len({plan.matrices[index].numel for index in batch}) == 1:
                self.batch(batch)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return what is copied for owned matrices of one shape. It is known for the batches of a whole chunk."""
        return self._batch(tuple(indices))

    def _made(self, indices: tuple[int, ...]) -> Batch:
        numel = self._matrices[indices[0]].numel
        own: list[Segment] = []
        received: list[list[Segment]] = []
        for number, index in enumerate(indices):
            start = number * numel
            if index in self._starts:
                own.append(Segment.of(start, numel, self._starts[index], numel))
            for position, segment in enumerate(self._segments.get(index, ())):
                if position == len(received):
                    received.append([])
                received[position].append(segment._replace(matrix_offset=start + segment.matrix_offset))
        whole = tuple(_joined(own, numel))
        parts = tuple(each for segments in received for each in _joined(segments, numel))
        in_order = any(  # of the first; there is none if this rank's parts of the matrices are empty
            math.prod(each.shape) == len(indices) * numel and each.buffer_offset % _ALIGNMENT == 0
            for each in (whole or parts)[:1]
        )
        return Batch(whole, parts, in_order)

    def _one_after_the_other(self, indices: Sequence[int]) -> tuple[list[int], int]:
        """Return where fragments start that lie one after the other, at multiples of 32 elements, and their room."""
        lengths = (-(-self._held[index].numel // _ALIGNMENT) * _ALIGNMENT for index in indices)
        ends = list(accumulate(lengths, initial=0))
        return ends[:-1], ends[-1]

    def _table(self, indices: Sequence[int], other: int, places: Sequence[int]) -> Tensor:
        """Return the table of this rank's fragments of matrices for the passes of ops/, int64 ``(fragments, 6)``.

        Args:
            indices: The matrices.
            other: Number of the other tensor.
            places: Where each fragment starts in it.
        """
        rows = []
        for index, place in zip(indices, places, strict=True):
            partition, fragment = self._partitions[self._matrices[index].partition], self._held[index]
            rows.append((partition, fragment.partition_offset, other, place, fragment.numel, index))
        return torch.tensor(rows, dtype=torch.int64).view(-1, COLUMNS)


def _joined(segments: Sequence[Segment], distance: int) -> Iterator[Segment]:
    """Yield segments of one matrix each, with those of consecutive matrices at equal distances as one."""
    last: Segment | None = None
    for each in segments:
        longer = None if last is None else last.joined(each, distance)
        if last is not None and longer is None:
            yield last
        last = longer or each._replace(matrix_strides=(distance, *each.matrix_strides[1:]))
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
        quantized: Of a momentum in 8 bits, whose codes :attr:`momentum` then holds: its scales, by position of the
            partition, mutated; and what :meth:`.MomentumBlocks.begin` returns.
    """

    mask: Tensor | None
    rates: Rates
    flat: Sequence[Tensor]
    momentum: Sequence[Tensor]
    grads: Sequence[Tensor]
    finish: OwnedRows | None
    passes: FlatPasses
    quantized: tuple[Sequence[Tensor], Tensor] | None = None

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
        directions: Receives those that are not sent, :attr:`ChunkTable.room` elements in the communication dtype.
        send: Receives those that are sent. Both lie on the device of the momentum.
    """
    rows, outs, rates = step.active_rows(table.packed), [directions, send], step.rates.momentum
    if step.quantized is None:
        step.passes.momentum_pack(step.momentum, step.grads, outs, rows, rates)
        return
    scales, cut = step.quantized
    blocks = table.blocks if step.mask is None else table.blocks[step.mask[table.packed[:, COLUMNS - 1]]]
    step.passes.momentum_pack_int8(step.momentum, scales, step.grads, outs, rows, rates, blocks, cut)


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
