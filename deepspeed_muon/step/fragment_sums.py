"""Changes weights and gradients by factors that depend on sums over rows or blocks, for variants with ``apply``.

Every rank sums over its fragments, pieces of one shape together. Then the sums are
completed (:mod:`deepspeed_muon.transport.unit_exchange`), the variant makes two factors of those of each unit, and a
second pass applies them. The host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.plan.exchange import ExchangePlan
from deepspeed_muon.plan.rows import Piece, pieces_of
from deepspeed_muon.step.passes import COLUMNS, ChunkTable, Step
from deepspeed_muon.step.step_set import StepSet
from deepspeed_muon.transport.exchange import StepContext
from deepspeed_muon.transport.unit_exchange import UnitExchange
from deepspeed_muon.variants.variant import Combine, UnitRates

_MOST = 1 << 22
"""Elements of equal pieces that run together, which copies them."""


class EqualPieces(NamedTuple):
    """Pieces of one shape that run together.

    Attributes:
        piece: The first one.
        own: Where each lies in the weights: number of the flat tensor, and first element.
        other: The same in what the weights are multiplied with.
        slots: ``(pieces, units)``: the number of each unit among those that this rank holds.
    """

    piece: Piece
    own: tuple[tuple[int, int], ...]
    other: tuple[tuple[int, int], ...]
    slots: Tensor

    def views(self, flat: Sequence[Tensor], places: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return a view of each piece: ``(rows, cols)``."""
        shape, strides = self.piece.shape, (self.piece.stride, 1)
        return [
            flat[number].as_strided(shape, strides, flat[number].storage_offset() + start)
            for number, start in places
        ]

    def wide(self, flat: Sequence[Tensor], places: Sequence[tuple[int, int]]) -> Tensor:
        """Return all pieces ``(pieces, rows, cols)`` in fp32 (float64 of float64), not to be written to."""
        views = self.views(flat, places)
        found = views[0].unsqueeze(0) if len(views) == 1 else torch.stack(views)
        return found.to(_wide(found.dtype))

    def summed(self, products: Tensor) -> Tensor:
        """Return the sums over units, flat in the order of the slots, of ``(pieces, rows, cols)``."""
        down, along = self.piece.steps
        return (products.sum(2) if down else products.sum(1) if along else products.flatten(1).sum(1)).view(
            -1
        )

    def spread(self, values: Tensor) -> Tensor:
        """Return the number of each element's unit, which broadcasts to the pieces, for numbers of all slots."""
        shape = (len(self.slots), 1, -1) if self.piece.steps[1] else (len(self.slots), -1, 1)
        return values[self.slots].view(shape)


class FragmentSums:
    """The sums over this rank's fragments of some matrices of a plan, and what they decide about."""

    def __init__(
        self,
        plan: ExchangePlan,
        indices: Sequence[int],
        table: Tensor,
        context: StepContext,
        step_set: StepSet,
    ) -> None:
        """Find out which units the fragments lie in; nothing is sent.

        Args:
            plan: The exchange plan.
            indices: The matrices, ascending.
            table: Of this rank's fragments of them, in the weights and in what these are multiplied with.
            context: Of the step set; its variant has ``apply``.
            step_set: The step set.
        """
        self._matrices, self._rank, self._variant = plan.matrices, plan.rank, context.variant
        self._keys = [each.key for each in self._variant.state]
        self._device = step_set.partitions[0].tensor.device
        self._units = UnitExchange(plan, indices, context, self._device)
        self._pieces = [*self._equal_pieces(table.tolist())]
        muon = [partition.index for partition in step_set.partitions if partition.muon]
        positions = torch.tensor([muon.index(each.partition) for each in plan.matrices], dtype=torch.int64)
        self._position = positions[self._units.done_matrix]
        ranks = 1 if context.tensor_group is None else dist.get_world_size(context.tensor_group)
        self._weights = self._weights_of(ranks).to(context.device)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to data-parallel ranks each time."""
        there, back = self._units.sent_numbers
        return torch.float64.itemsize * (there * (3 + len(self._keys)) + back * (2 + len(self._keys)))

    def _equal_pieces(self, table: Sequence[Sequence[int]]) -> Iterator[EqualPieces]:
        """Yield the pieces of a table's fragments, together where that can be."""
        rows, found = self._variant.of_rows, []
        for partition, offset, other, place, numel, index in table:
            fragment = self._matrices[index].placement.on(self._rank)
            assert fragment is not None
            start = fragment.matrix_offset
            for piece in pieces_of(self._matrices[index], start, start + numel, rows=rows):
                places = (partition, offset + piece.start), (other, place + piece.start)
                found.append(((*piece.shape, piece.stride, piece.steps), places, index, piece))
        found.sort(key=lambda each: each[:2])
        for (height, width, *_), members in groupby(found, key=lambda each: each[0]):
            pieces, most = [*members], max(1, _MOST // (height * width))
            for part in (pieces[first : first + most] for first in range(0, len(pieces), most)):
                own, beside = zip(*(places for _, places, *_ in part), strict=True)
                slots = np.stack([self._units.slots(index, piece.units) for *_, index, piece in part])
                yield EqualPieces(part[0][-1], own, beside, torch.from_numpy(slots).to(self._device))

    def _weights_of(self, ranks: int) -> Tensor:
        """Return the factors of the sums of each completed unit: three products, and the state.

        Copies on tensor-parallel ranks count once, and the numbers of the state are means over the rows of a block.
        """
        found = []
        for index, (_, units) in self._units.done.items():
            matrix = self._matrices[index]
            copies = ranks if matrix.shards is not None and not matrix.is_cut else 1
            rows = [1] * len(units)
            if not self._variant.of_rows:
                shapes = matrix.block_shapes
                rows = [matrix.layer_shape(*shapes[unit])[0] for unit in units.tolist()]
            # Ranks that cut the inputs keep the numbers of all outputs each.
            holders = ranks if matrix.is_cut and not matrix.cuts_outputs else copies
            state = 1 / (holders * torch.tensor(rows, dtype=torch.float64)).view(-1, 1)
            products = torch.full((len(units), 3), 1 / copies, dtype=torch.float64)
            found.append(torch.cat((products, state.expand(-1, len(self._keys))), dim=1))
        return torch.cat(found) if found else torch.empty((0, 3 + len(self._keys)), dtype=torch.float64)

    def entering(self, step: Step) -> list[Tensor]:
        """Return what enters the momentum instead of the gradients, and advance the row state.

        Must be called by all ranks of the data-parallel and of the tensor-parallel group.
        """
        assert self._variant.before_momentum is not None
        found = [torch.empty_like(each, dtype=_wide(each.dtype)) for each in step.grads]
        self._combine(self._variant.before_momentum, step, step.grads, found)
        return found

    def apply(self, step: Step, updates: Sequence[Tensor]) -> None:
        """Update this rank's fragments of the active matrices, and their row state.

        Must be called by all ranks of the data-parallel and of the tensor-parallel group.

        Args:
            step: The weights and the row state are mutated.
            updates: The other tensors of the table: flat, in the communication dtype, on any device.
        """
        assert self._variant.apply is not None
        self._combine(self._variant.apply, step, [each.to(self._device) for each in updates], step.flat)

    def zeros(self, flat: Sequence[Tensor]) -> list[str]:
        """Return the names of the matrices with a block of zeros whose sums this rank completes; waits for the device.

        Must be called by all ranks of both groups, with this rank's flat weights by position of the partition.
        """
        numbers = self._products(flat, None)
        found = self._units.complete(numbers, self._weights)[:, 0].cpu() == 0
        return [self._matrices[index].name for index in self._units.done_matrix[found].unique().tolist()]

    def _products(self, flat: Sequence[Tensor], others: Sequence[Tensor] | None) -> Tensor:
        """Return this rank's sums of each unit and room for the state, ``(units, 3 + keys)``; of the weights alone."""
        shape = len(self._units.held_matrix), 3 + len(self._keys)
        numbers = torch.zeros(shape, dtype=torch.float64, device=self._device)
        for each in self._pieces:
            own = each.wide(flat, each.own)
            other = own if others is None else each.wide(others, each.other)
            products = [each.summed(a * b) for a, b in ((own, own), (own, other), (other, other))]
            numbers[:, :3].index_add_(0, each.slots.view(-1), torch.stack(products, 1).double())
        return numbers

    def _combine(
        self, function: Combine, step: Step, others: Sequence[Tensor], out: Sequence[Tensor]
    ) -> None:
        """Write what the variant makes of weights and ``others`` to ``out``, by the places of the weights."""
        numbers = self._products(step.flat, others)
        numbers[:, 3:] = self._units.state(step.kept)
        sums = self._units.complete(numbers, self._weights)
        values = {key: sums[:, 3 + number].clone() for number, key in enumerate(self._keys)}
        keep, move = function((sums[:, 0], sums[:, 1], sums[:, 2]), values, self._rates(step, sums.device))
        results = self._units.bring_back(torch.stack((keep, move, *values.values()), 1))
        active = None if step.mask is None else step.mask[self._units.held_matrix].to(self._device)
        self._units.keep(step.kept, results[:, 2:], active)
        for each in self._pieces:
            weights, targets = each.wide(step.flat, each.own), each.views(out, each.own)
            part = each.wide(others, each.other) * each.spread(results[:, 1]).to(weights.dtype)
            new = weights * each.spread(results[:, 0]).to(weights.dtype) + part
            if active is not None:  # the others have no update
                new = torch.where(each.spread(active), new, each.wide(out, each.own))
            torch._foreach_copy_(targets, new.unbind())

    def _rates(self, step: Step, device: torch.device) -> UnitRates:
        """Return the rates of the completed units."""
        of_matrix = self._units.done_matrix
        steps = torch.tensor(step.counts, dtype=torch.float64)[self._position].unsqueeze(1)
        rates = torch.cat((step.rates.apply[of_matrix], step.rates.adam[of_matrix], steps), dim=1)
        return UnitRates(*rates.to(device).unbind(1))


def fragment_sums(
    plan: ExchangePlan, tables: Sequence[ChunkTable], context: StepContext, step_set: StepSet
) -> tuple[list[FragmentSums], FragmentSums | None]:
    """Return the sums of each chunk with its updates, and those of all matrices with their gradients, if any."""
    if context.variant.apply is None:
        return [], None
    chunks = [
        FragmentSums(plan, chunk.matrices, table.held, context, step_set)
        for chunk, table in zip(plan.chunks, tables, strict=True)
    ]
    if context.variant.before_momentum is None:
        return chunks, None
    held = torch.cat([torch.empty((0, COLUMNS), dtype=torch.int64), *(table.held for table in tables)])
    held[:, 2:4] = held[:, :2]  # a gradient lies as its weights do
    return chunks, FragmentSums(plan, range(len(plan.matrices)), held, context, step_set)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
