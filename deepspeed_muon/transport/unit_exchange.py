"""Completes numbers of rows or blocks that lie on several ranks: one rank adds up, and sends back what follows.

Where a variant needs whole matrices, that is the owner, to which the state of all rows goes. Else only rows that a
partition cuts are sent, to the rank with the first element; blocks, and what tensor-parallel ranks have together, go to
the owner, which is the same on all tensor-parallel ranks. Both ways are an all-to-all of a few numbers for each unit.
Every rank has all sums of replicated matrices, of which only the owner's state of whole matrices is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepspeed_muon.plan.exchange import ExchangePlan
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.placement import Ints
from deepspeed_muon.plan.rows import blocks_of_rows, first_elements, row_places, unit_count, units_on
from deepspeed_muon.transport.exchange import StepContext, exchange_bytes
from deepspeed_muon.transport.ranks import phase, reduce_tensor

RowStates = Mapping[int, Mapping[str, Tensor]]
"""Partition index and key to the numbers of the rows that this rank keeps."""


class KeptRows(NamedTuple):
    """Rows of which a partition keeps the state.

    Attributes:
        partition: Index of the partition.
        places: Where their numbers lie in its state.
        slots: The number of each one's unit among those that this rank holds.
    """

    partition: int
    places: Tensor
    slots: Tensor


class UnitExchange:
    """The units of some matrices of a plan of which this rank holds elements, and those that it completes.

    Attributes:
        held_matrix: The matrix of each unit that this rank holds.
        done_matrix: The matrix of each unit whose sums it completes.
        done: For each of the matrices, the first number of its completed units, and the units.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        indices: Sequence[int],
        context: StepContext,
        device: torch.device,
    ) -> None:
        """Find out who completes what; nothing is sent.

        Args:
            plan: The exchange plan.
            indices: The matrices, ascending.
            context: Of the step set. The units of its variant are rows or blocks, and its ``finish`` needs the rows of
                whole matrices.
            device: Of the numbers of the held units; those of completed ones lie on the context's.
        """
        self._plan, self._context, variant = plan, context, context.variant
        self._at_owner = variant.finish is not None
        # Shards of one matrix have their own rows at its owners, or all have the same.
        self._tensor_group = None if self._at_owner else context.tensor_group
        self._rows = rows = variant.of_rows or self._at_owner
        self._keys = [each.key for each in variant.state]
        matrices, rank = {index: plan.matrices[index] for index in indices}, plan.rank
        held = {index: units_on(matrix, rank, rows=rows) for index, matrix in matrices.items()}
        at = {index: self._completes(index, units) for index, units in held.items()}
        finished = {index: self._completed_here(index, units, at[index]) for index, units in held.items()}
        self._held, self.done = _numbered(held), _numbered(finished)
        self.held_matrix, self.done_matrix = _of_units(held), _of_units(finished)
        self._sends = any(self._is_sent(index) for index in indices)
        own: list[tuple[int, Ints, Ints]] = []
        away: list[tuple[int, Ints]] = []
        come: list[tuple[int, Ints]] = []
        for index, units in held.items():
            mine = units[at[index] == rank]
            own.append((rank, self.slots(index, mine), _places(self.done[index], mine)))
            others = np.unique(at[index][at[index] != rank]).tolist()
            away += [(other, self.slots(index, units[at[index] == other])) for other in others]
            come += [(other, _places(self.done[index], each)) for other, each in self._arriving(index)]
        here = context.device
        self._own = _tensor((slots for _, slots, _ in own), device), _tensor((each for *_, each in own), here)
        self._away, self._away_splits = _by_rank(away, context.world_size, device)
        self._come, self._come_splits = _by_rank(come, context.world_size, here)
        # Every rank has the same numbers of replicated matrices.
        self._sums = not (self._at_owner and any(matrix.replicated for matrix in matrices.values()))
        self._kept = self._kept_rows(indices, device) if self._keys else []
        joint = torch.tensor([index for index in indices if self._joint(matrices[index])], dtype=torch.int64)
        self._across = torch.isin(self.done_matrix, joint).nonzero().view(-1).to(here)

    @property
    def sent_numbers(self) -> tuple[int, int]:
        """Of how many units this rank sends numbers to the ranks that complete them, and of how many results."""
        return len(self._away) if self._sums else 0, len(self._come)

    def slots(self, index: int, units: Ints) -> Ints:
        """Return the numbers of units of a matrix among those that this rank holds."""
        return _places(self._held[index], units)

    def _joint(self, matrix: MatrixLayout) -> bool:
        """Return whether tensor-parallel ranks complete the sums together: of the parts of units, or of copies."""
        return matrix.shards is not None and not (self._rows and matrix.cuts_outputs)

    def _kept_rows(self, indices: Sequence[int], device: torch.device) -> list[KeptRows]:
        """Return where the row state of the matrices lies in each partition."""
        found: dict[int, list[tuple[Ints, Ints]]] = {}
        places = row_places(self._plan.matrices)
        for index in indices:
            matrix, own = self._plan.matrices[index], places[index].on(self._plan.rank)
            if own is None:
                continue
            units = rows = torch.arange(own.matrix_offset, own.matrix_offset + own.numel)
            if not self._rows:
                units = blocks_of_rows(matrix, rows)
            kept = np.arange(own.partition_offset, own.partition_offset + own.numel)
            found.setdefault(matrix.partition, []).append((kept, self.slots(index, units.numpy())))
        return [
            KeptRows(partition, *(_tensor(column, device) for column in zip(*parts, strict=True)))
            for partition, parts in found.items()
        ]

    def _is_sent(self, index: int) -> bool:
        """Return whether any rank sends anything of a matrix; the same on all ranks of the group."""
        matrix = self._plan.matrices[index]
        first = int(self._completes(index, np.zeros(1, dtype=np.int64))[0])
        is_sent = self._at_owner or not matrix.replicated
        return is_sent and matrix.placement.ranks != range(first, first + 1)

    def _at_first_element(self, matrix: MatrixLayout) -> bool:
        """Return whether each unit is completed by the rank with its first element, and not by the owner."""
        return self._rows and not (self._at_owner or matrix.replicated or self._joint(matrix))

    def _completes(self, index: int, units: Ints) -> Ints:
        """Return the rank that completes each of some units of a matrix."""
        matrix = self._plan.matrices[index]
        if self._at_first_element(matrix):
            return matrix.placement.ranks_at(first_elements(matrix, units))
        is_here = matrix.replicated and not self._at_owner
        return np.full(len(units), self._plan.rank if is_here else self._plan.owners[index])

    def _completed_here(self, index: int, held: Ints, at: Ints) -> Ints:
        """Return the units of a matrix that this rank completes, from those that it holds and the ranks of these."""
        matrix = self._plan.matrices[index]
        if self._at_first_element(matrix):
            here: Ints = held[at == self._plan.rank]
            return here
        is_here = int(self._completes(index, np.zeros(1, dtype=np.int64))[0]) == self._plan.rank
        return np.arange(unit_count(matrix, rows=self._rows) if is_here else 0)

    def _arriving(self, index: int) -> list[tuple[int, Ints]]:
        """Return the other ranks that hold elements of units of a matrix that this rank completes, with those units."""
        matrix, (_, units) = self._plan.matrices[index], self.done[index]
        if (matrix.replicated and not self._at_owner) or not len(units):
            return []
        ranks, found, is_apart = matrix.placement.ranks, [], self._at_first_element(matrix)
        if is_apart:
            first = int(first_elements(matrix, units[-1:])[0])
            last = matrix.numel - 1 if matrix.transposed else min(first + matrix.cols, matrix.numel) - 1
            ranks = range(self._plan.rank + 1, matrix.placement.rank_at(last) + 1)
        for other in ranks:
            if other == self._plan.rank:
                continue
            both = units_on(matrix, other, rows=self._rows)
            both = np.intersect1d(both, units, assume_unique=True) if is_apart else both
            if len(both):
                found.append((other, both))
        return found

    def state(self, kept: RowStates) -> Tensor:
        """Return the sums over held units of what this rank keeps of their rows, ``(held units, keys)``, float64."""
        shape = len(self.held_matrix), len(self._keys)
        numbers = torch.zeros(shape, dtype=torch.float64, device=self._own[0].device)
        for rows in self._kept:
            for number, key in enumerate(self._keys):
                own = kept[rows.partition][key][rows.places]
                numbers[:, number].index_add_(0, rows.slots, own.double())
        return numbers

    def keep(self, kept: RowStates, values: Tensor, active: Tensor | None = None) -> None:
        """Write the numbers of held units to those of their rows that this rank keeps.

        Args:
            kept: Mutated.
            values: ``(held units, keys)``.
            active: A flag for each held unit; the others keep what they have.
        """
        for rows in self._kept:
            for number, key in enumerate(self._keys):
                own, new = kept[rows.partition][key], values[rows.slots, number]
                if active is not None:
                    new = torch.where(active[rows.slots], new, own[rows.places].to(new.dtype))
                own[rows.places] = new.to(own.dtype)

    def complete(self, numbers: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the sums of the units that this rank completes.

        Must be called by all ranks of the data-parallel and of the tensor-parallel group.

        Args:
            numbers: ``(held units, n)``: of this rank's elements.
            weights: ``(completed units, n)``: factors of the sums over data-parallel ranks, 1 by default.

        Returns:
            ``(completed units, n)`` on the context's device.
        """
        own, to = self._own
        sums = numbers.new_zeros((len(self.done_matrix), numbers.shape[1]), device=to.device)
        sums.index_add_(0, to, numbers[own].to(to.device))
        if self._sums:
            away = numbers[self._away].to(to.device)
            received = self._exchanged(away, self._away_splits, self._come_splits)
            sums.index_add_(0, self._come, received)
        if weights is not None:
            sums *= weights
        if self._tensor_group is not None and len(self._across):
            part, what = sums[self._across], "sums over tensor-parallel ranks"
            sums[self._across] = reduce_tensor(part, self._tensor_group, what=what)
        return sums

    def bring_back(self, results: Tensor) -> Tensor:
        """Return the results of the units that this rank holds.

        Must be called by all ranks of the data-parallel group.

        Args:
            results: ``(completed units, n)``.

        Returns:
            ``(held units, n)`` on the device of the held units.
        """
        own, to = self._own
        found = results.new_empty((len(self.held_matrix), results.shape[1]), device=own.device)
        found[own] = results[to].to(own.device)
        received = self._exchanged(results[self._come], self._come_splits, self._away_splits)
        found[self._away] = received.to(own.device)
        return found

    def _exchanged(self, send: Tensor, send_splits: Sequence[int], out_splits: Sequence[int]) -> Tensor:
        """Return what the other ranks send, ``(units, n)``, in the order of the ranks."""
        out = send.new_empty((sum(out_splits), send.shape[1]))
        if self._sends and self._context.world_size > 1:
            splits = [[each * send.shape[1] for each in both] for both in (out_splits, send_splits)]
            with phase("exchange of rows and blocks", self._context.group):
                exchange_bytes(out.view(-1), send.view(-1), *splits, group=self._context.group).wait()
            self._context.stats.count_exchange(send.nbytes)
        return out


def _numbered(units: dict[int, Ints]) -> dict[int, tuple[int, Ints]]:
    """Return the units of each matrix with the number of the first of them among all."""
    found, first = {}, 0
    for index, each in units.items():
        found[index] = first, each
        first += len(each)
    return found


def _places(known: tuple[int, Ints], units: Ints) -> Ints:
    first, among = known
    found: Ints = first + np.searchsorted(among, units)
    return found


def _of_units(units: dict[int, Ints]) -> Tensor:
    """Return the matrix of each unit."""
    counts = torch.tensor([len(each) for each in units.values()], dtype=torch.int64)
    return torch.tensor([*units], dtype=torch.int64).repeat_interleave(counts)


def _by_rank(parts: list[tuple[int, Ints]], ranks: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """Return numbers in the order of their ranks, and how many there are of each rank."""
    counts = [0] * ranks
    for rank, numbers in parts:
        counts[rank] += len(numbers)
    return _tensor((numbers for _, numbers in sorted(parts, key=lambda part: part[0])), device), counts


def _tensor(parts: Iterable[Ints], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *parts])).to(device)
