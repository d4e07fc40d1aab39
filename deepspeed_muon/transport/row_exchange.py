"""Sends the row state of a variant from the ranks that keep it to the owners of the matrices, and back.

Both ways are an all-to-all of a few numbers for each row. Every rank keeps all rows of replicated matrices, of which
only the owner's results are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepspeed_muon.plan.exchange import ExchangePlan
from deepspeed_muon.plan.placement import Ints
from deepspeed_muon.plan.rows import row_count, row_places, rows_on
from deepspeed_muon.transport.exchange import StepContext, exchange_bytes
from deepspeed_muon.transport.ranks import phase

RowStates = Mapping[int, Mapping[str, Tensor]]
"""Partition index and key to the numbers of the rows that this rank keeps."""


class KeptRows(NamedTuple):
    """Rows of which a partition keeps the state.

    Attributes:
        partition: Index of the partition.
        places: Where their numbers are in its state.
        slots: The number of each among the rows that this rank keeps.
    """

    partition: int
    places: Tensor
    slots: Tensor


class RowExchange:
    """The rows of the matrices of a plan that this rank keeps, and those of the matrices that it owns.

    Attributes:
        owned: For each matrix, the first number of its rows among those of all owned matrices, and the rows.
    """

    def __init__(self, plan: ExchangePlan, context: StepContext, device: torch.device) -> None:
        """Find out who owns what; nothing is sent.

        Args:
            plan: The exchange plan.
            context: Of the step set.
            device: Of the kept rows; those of owned matrices are on the context's.
        """
        self._plan, self._context = plan, context
        self._keys = [entry.key for entry in context.variant.state]
        rank, matrices = plan.rank, plan.matrices
        kept = {
            index: np.array(rows_on(matrix, rank), dtype=np.int64) for index, matrix in enumerate(matrices)
        }
        owned = {
            index: np.arange(row_count(matrix) if plan.owners[index] == rank else 0)
            for index, matrix in enumerate(matrices)
        }
        self._kept, self.owned = _numbered(kept), _numbered(owned)
        self._kept_count, self._owned_count = (sum(map(len, rows.values())) for rows in (kept, owned))
        own: list[tuple[Ints, Ints]] = []
        away: list[tuple[int, Ints]] = []
        come: list[tuple[int, Ints]] = []
        for index, rows in kept.items():
            owner = plan.owners[index]
            if owner == rank:
                own.append((_places(self._kept[index], rows), _places(self.owned[index], rows)))
            elif len(rows):
                away.append((owner, _places(self._kept[index], rows)))
            come += [(other, _places(self.owned[index], rows)) for other, rows in self._arriving(index)]
        on_owner = context.device
        self._own = (
            _tensor((slots for slots, _ in own), device),
            _tensor((places for _, places in own), on_owner),
        )
        self._away, self._away_splits = _by_rank(away, context.world_size, device)
        self._come, self._come_splits = _by_rank(come, context.world_size, on_owner)
        # The same on all ranks of the group: whether any of them keeps rows of another one's matrix.
        self._sends = any(
            matrix.placement.ranks != range(owner, owner + 1)
            for matrix, owner in zip(matrices, plan.owners, strict=True)
        )
        # Every rank has the same numbers of replicated matrices.
        self._gathers = not any(matrix.replicated for matrix in matrices)
        self._rows = self._kept_rows(device)

    @property
    def sent_numbers(self) -> tuple[int, int]:
        """Of how many rows this rank sends numbers to the owners, and of how many results."""
        return len(self._away) if self._gathers else 0, len(self._come)

    def _kept_rows(self, device: torch.device) -> list[KeptRows]:
        """Return where the row state of the matrices is in each partition."""
        places_of: dict[int, list[tuple[Ints, Ints]]] = {}
        for index, places in enumerate(row_places(self._plan.matrices)):
            kept = places.on(self._plan.rank)
            if kept is not None:
                rows = np.arange(kept.matrix_offset, kept.matrix_offset + kept.numel)
                offsets = np.arange(kept.partition_offset, kept.partition_offset + kept.numel)
                slots = _places(self._kept[index], rows)
                places_of.setdefault(self._plan.matrices[index].partition, []).append((offsets, slots))
        return [
            KeptRows(partition, *(_tensor(column, device) for column in zip(*columns, strict=True)))
            for partition, columns in places_of.items()
        ]

    def _arriving(self, index: int) -> list[tuple[int, Ints]]:
        """Return the other ranks that keep rows of a matrix that this rank owns, with those rows."""
        matrix = self._plan.matrices[index]
        if self._plan.owners[index] != self._plan.rank:
            return []
        others = (other for other in matrix.placement.ranks if other != self._plan.rank)
        arriving = ((other, np.array(rows_on(matrix, other), dtype=np.int64)) for other in others)
        return [(other, rows) for other, rows in arriving if len(rows)]

    def state(self, kept: RowStates) -> Tensor:
        """Return what this rank keeps, ``(kept rows, keys)``, fp32."""
        numbers = torch.zeros((self._kept_count, len(self._keys)), device=self._own[0].device)
        for rows in self._rows:
            for number, key in enumerate(self._keys):
                numbers[rows.slots, number] = kept[rows.partition][key][rows.places].float()
        return numbers

    def keep(self, kept: RowStates, values: Tensor) -> None:
        """Write ``values``, ``(kept rows, keys)``, to what this rank keeps. ``kept`` is mutated."""
        for rows in self._rows:
            for number, key in enumerate(self._keys):
                state = kept[rows.partition][key]
                state[rows.places] = values[rows.slots, number].to(state.dtype)

    def gather(self, numbers: Tensor) -> Tensor:
        """Return the numbers of the rows of owned matrices, ``(owned rows, n)`` on the context's device.

        Must be called by all ranks of the data-parallel group, with ``(kept rows, n)``.
        """
        own, to = self._own
        owned = numbers.new_zeros((self._owned_count, numbers.shape[1]), device=to.device)
        owned[to] = numbers[own].to(to.device)
        if self._gathers:
            away = numbers[self._away].to(to.device)
            owned[self._come] = self._exchanged(away, self._away_splits, self._come_splits)
        return owned

    def scatter(self, results: Tensor) -> Tensor:
        """Return the results of the kept rows, ``(kept rows, n)``, on their device.

        Must be called by all ranks of the data-parallel group, with ``(owned rows, n)``.
        """
        own, to = self._own
        kept = results.new_empty((self._kept_count, results.shape[1]), device=own.device)
        kept[own] = results[to].to(own.device)
        received = self._exchanged(results[self._come], self._come_splits, self._away_splits)
        kept[self._away] = received.to(own.device)
        return kept

    def _exchanged(self, send: Tensor, send_splits: Sequence[int], out_splits: Sequence[int]) -> Tensor:
        """Return what the other ranks send, ``(rows, n)``, in the order of the ranks."""
        out = send.new_empty((sum(out_splits), send.shape[1]))
        if self._sends and self._context.world_size > 1:
            splits = [[each * send.shape[1] for each in both] for both in (out_splits, send_splits)]
            with phase("exchange of rows", self._context.group):
                exchange_bytes(out.view(-1), send.view(-1), *splits, group=self._context.group).wait()
            self._context.stats.count_exchange(send.nbytes)
        return out


def _numbered(rows_of: dict[int, Ints]) -> dict[int, tuple[int, Ints]]:
    """Return the rows of each matrix with the number of the first of them among all."""
    numbered, first = {}, 0
    for index, rows in rows_of.items():
        numbered[index] = first, rows
        first += len(rows)
    return numbered


def _places(numbered: tuple[int, Ints], rows: Ints) -> Ints:
    """Return the numbers of rows of a matrix among all."""
    first, known_rows = numbered
    places: Ints = first + np.searchsorted(known_rows, rows)
    return places


def _by_rank(parts: list[tuple[int, Ints]], ranks: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """Return numbers in the order of their ranks, and how many there are of each rank."""
    counts = [0] * ranks
    for rank, numbers in parts:
        counts[rank] += len(numbers)
    return _tensor((numbers for _, numbers in sorted(parts, key=lambda part: part[0])), device), counts


def _tensor(parts: Iterable[Ints], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *parts])).to(device)
