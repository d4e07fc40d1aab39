"""Completes sums over rows or blocks that lie on several ranks: one rank adds up, and sends back what follows.

Of rows only those are sent that a partition cuts: to the rank with the first element. Blocks, and what tensor-parallel
ranks have together, go to the owner of the matrix, which is the same on all tensor-parallel ranks. Both ways are an
all-to-all of a few float64 numbers for each unit; of replicated matrices nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.plan.exchange import ExchangePlan
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.placement import Ints
from deepspeed_muon.plan.rows import first_elements, unit_count, units_on
from deepspeed_muon.transport.exchange import StepContext, exchange_bytes
from deepspeed_muon.transport.ranks import phase, reduce_tensor


class UnitExchange:
    """The units of some matrices of a plan of which this rank holds elements, and those whose sums it completes.

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
        tensor_group: dist.ProcessGroup | None,
        *,
        rows: bool,
        device: torch.device,
    ) -> None:
        """Find out who completes what; nothing is sent.

        Args:
            plan: The exchange plan.
            indices: The matrices, ascending.
            context: Of the step set.
            tensor_group: The tensor-parallel group; ``None`` without one.
            rows: Whether the units are rows.
            device: Of the numbers of the held units; those of completed ones lie on the context's.
        """
        self._plan, self._rows, self._context, self._tensor_group = plan, rows, context, tensor_group
        matrices, rank = {index: plan.matrices[index] for index in indices}, plan.rank
        held = {index: units_on(matrix, rank, rows=rows) for index, matrix in matrices.items()}
        at = {index: self._completes(index, units) for index, units in held.items()}
        every = {index: np.arange(unit_count(matrix, rows=rows)) for index, matrix in matrices.items()}
        finished = {index: units[self._completes(index, units) == rank] for index, units in every.items()}
        self._held, self.done = _numbered(held), _numbered(finished)
        self.held_matrix, self.done_matrix = _of_units(held), _of_units(finished)
        self._sends = any(self._travels(index) for index in indices)
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
        joint = torch.tensor([index for index in indices if self._joint(matrices[index])], dtype=torch.int64)
        self._across = torch.isin(self.done_matrix, joint).nonzero().view(-1).to(here)

    @property
    def sent_numbers(self) -> tuple[int, int]:
        """Of how many units this rank sends numbers to the ranks that complete them, and of how many results."""
        return len(self._away), len(self._come)

    def slots(self, index: int, units: Ints) -> Ints:
        """Return the numbers of units of a matrix among those that this rank holds."""
        return _places(self._held[index], units)

    def _joint(self, matrix: MatrixLayout) -> bool:
        """Return whether tensor-parallel ranks complete the sums together: of the parts of units, or of copies."""
        return matrix.shards is not None and not (self._rows and matrix.cuts_outputs)

    def _travels(self, index: int) -> bool:
        """Return whether any rank sends anything of a matrix; the same on all ranks of the group."""
        matrix = self._plan.matrices[index]
        first = int(self._completes(index, np.zeros(1, dtype=np.int64))[0])
        return not matrix.replicated and matrix.placement.ranks != range(first, first + 1)

    def _completes(self, index: int, units: Ints) -> Ints:
        """Return the rank that completes the sums of each of some units of a matrix."""
        matrix = self._plan.matrices[index]
        if self._rows and not matrix.replicated and not self._joint(matrix):
            return matrix.placement.ranks_at(first_elements(matrix, units))
        return np.full(len(units), self._plan.rank if matrix.replicated else self._plan.owners[index])

    def _arriving(self, index: int) -> list[tuple[int, Ints]]:
        """Return the other ranks that hold elements of units of a matrix that this rank completes, with those units."""
        matrix, (_, units) = self._plan.matrices[index], self.done[index]
        if matrix.replicated or not len(units):
            return []
        ranks, found = matrix.placement.ranks, []
        if self._rows and not self._joint(matrix):
            first = int(first_elements(matrix, units[-1:])[0])
            last = matrix.numel - 1 if matrix.transposed else min(first + matrix.cols, matrix.numel) - 1
            ranks = range(self._plan.rank + 1, matrix.placement.rank_at(last) + 1)
        for other in ranks:
            both = np.intersect1d(units_on(matrix, other, rows=self._rows), units, assume_unique=True)
            if other != self._plan.rank and len(both):
                found.append((other, both))
        return found

    def complete(self, numbers: Tensor, weights: Tensor) -> Tensor:
        """Return the sums of the units that this rank completes.

        Must be called by all ranks of the data-parallel and of the tensor-parallel group.

        Args:
            numbers: ``(held units, n)``, float64: of this rank's elements.
            weights: ``(completed units, n)``: factors of the sums over data-parallel ranks.

        Returns:
            ``(completed units, n)`` on the context's device.
        """
        own, to = self._own
        sums = torch.zeros((len(self.done_matrix), numbers.shape[1]), dtype=torch.float64, device=to.device)
        sums.index_add_(0, to, numbers[own].to(to.device))
        received = self._exchanged(numbers[self._away].to(to.device), self._away_splits, self._come_splits)
        sums.index_add_(0, self._come, received)
        sums *= weights
        if self._tensor_group is not None and len(self._across):
            part, what = sums[self._across], "sums over tensor-parallel ranks"
            sums[self._across] = reduce_tensor(part, self._tensor_group, what=what)
        return sums

    def bring_back(self, results: Tensor) -> Tensor:
        """Return the results of the units that this rank holds.

        Must be called by all ranks of the data-parallel group.

        Args:
            results: ``(completed units, n)``, float64.

        Returns:
            ``(held units, n)`` on the device of the held units.
        """
        own, to = self._own
        found = torch.empty((len(self.held_matrix), results.shape[1]), dtype=torch.float64, device=own.device)
        found[own] = results[to].to(own.device)
        received = self._exchanged(results[self._come], self._come_splits, self._away_splits)
        found[self._away] = received.to(own.device)
        return found

    def _exchanged(self, send: Tensor, send_splits: Sequence[int], out_splits: Sequence[int]) -> Tensor:
        """Return what the other ranks send, ``(units, n)``, in the order of the ranks."""
        out = send.new_empty((sum(out_splits), send.shape[1]))
        if self._sends and self._context.world_size > 1:
            splits = [[each * send.shape[1] for each in both] for both in (out_splits, send_splits)]
            with phase("sums over rows and blocks", self._context.group):
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
