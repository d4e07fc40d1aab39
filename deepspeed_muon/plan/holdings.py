"""Which ranks hold how much of every matrix, as arrays whose size does not grow with the number of ranks.

ZeRO always gives a matrix to consecutive ranks: the first holds a head, the last a tail, and each rank between them an
equal body. So a few numbers a matrix replace its list of fragments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deepspeed_muon.plan.placement import Ints

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Holdings:
    """Consecutive holders of every matrix.

    Attributes:
        first: First data-parallel rank that holds elements of the matrix.
        last: Last one.
        head: Elements on the first rank.
        body: Elements on every rank strictly between.
        tail: Elements on the last rank; equals ``head`` where it is the only one.
        numel: Elements of the matrix.
        ranks: Data-parallel ranks.
        width: Tensor-parallel ranks, numbered consecutively, that divide equally what one data-parallel rank holds.
        replicated: Whether every rank holds every matrix whole instead (ZeRO stage 0).
    """

    first: Ints
    last: Ints
    head: Ints
    body: Ints
    tail: Ints
    numel: Ints
    ranks: int
    width: int = 1
    replicated: bool = False

    @property
    def whole(self) -> NDArray[np.bool_]:
        """Marks the matrices that lie whole on one data-parallel rank and on no other."""
        whole: NDArray[np.bool_] = (self.first == self.last) & (not self.replicated)
        return whole

    @property
    def world_size(self) -> int:
        """The number of ranks, tensor-parallel ones counted."""
        return self.ranks * self.width

    def held(self, matrices: Ints, ranks: Ints) -> Floats:
        """Return the elements of ``matrices[i]`` on ``ranks[i]``, 0 if the rank is none of its holders."""
        group = ranks // self.width
        first, last = self.first[matrices], self.last[matrices]
        amount = np.where(
            group == first,
            self.head[matrices],
            np.where(group == last, self.tail[matrices], self.body[matrices]),
        )
        return np.where((group < first) | (group > last), 0, amount) / self.width

    def holders(self, matrix: int) -> tuple[Ints, Floats]:
        """Return the ranks that hold elements of one matrix, ascending, and how many each holds."""
        start, stop = self.first[matrix] * self.width, (self.last[matrix] + 1) * self.width
        ranks = np.arange(start, stop, dtype=np.int64)
        return ranks, self.held(np.full(len(ranks), matrix), ranks)

    def rank_at(self, matrix: int, element: int) -> int:
        """Return the data-parallel rank that holds an element of a matrix."""
        behind = element - int(self.head[matrix])
        return int(self.first[matrix]) + (0 if behind < 0 else 1 + behind // int(self.body[matrix]))

    def ranges(self, matrices: Ints, starts: Ints, stops: Ints) -> Holdings:
        """Return the holdings of parts: part ``i`` is ``matrices[i]`` from ``starts[i]`` to ``stops[i]``."""
        first, head, body = self.first[matrices], self.head[matrices], self.body[matrices]

        def rank_of(position: Ints) -> Ints:
            return np.where(position < head, first, first + 1 + (position - head) // np.maximum(body, 1))

        def end_of(rank: Ints) -> Ints:
            return head + (rank - first) * body

        begin, last = rank_of(starts), rank_of(stops - 1)
        front = np.minimum(stops, np.where(begin == self.last[matrices], stops, end_of(begin))) - starts
        back = np.where(last > begin, stops - end_of(last - 1), front)
        return replace(self, first=begin, last=last, head=front, body=body, tail=back, numel=stops - starts)

    def traffic(self, owners: Sequence[int]) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Return the elements that each rank sends in gather and in scatter, and which matrices travel."""
        ranks = np.asarray(owners, dtype=np.int64)
        gather, scatter = np.zeros(self.world_size), np.zeros(self.world_size)
        if self.replicated:
            away = self.numel * (self.world_size - 1.0)
        else:
            own = self.held(np.arange(len(ranks)), ranks)
            away = self.numel - own
            gather += self.per_rank()
            np.add.at(gather, ranks, -own)
        np.add.at(scatter, ranks, away)
        return gather, scatter, away > 0

    def per_rank(self) -> Floats:
        """Return the elements that every rank holds, of all matrices together."""
        steps = np.zeros(self.ranks + 1)
        several = self.last > self.first
        np.add.at(steps, self.first[several] + 1, self.body[several])
        np.add.at(steps, self.last[several], -self.body[several])
        total = np.cumsum(steps)[: self.ranks]
        np.add.at(total, self.first, self.head)
        np.add.at(total, self.last[several], self.tail[several])
        return np.repeat(total / self.width, self.width)


def flat_holdings(
    offsets: Ints, numels: Ints, *, partition_numel: int, ranks: int, width: int = 1
) -> Holdings:
    """Describe matrices in a flat buffer that ZeRO cuts into equal partitions (stages 1 and 2).

    Args:
        offsets: Where each matrix starts in the buffer of all ranks.
        numels: Elements of each matrix.
        partition_numel: Elements of a partition.
        ranks: Data-parallel ranks.
        width: Tensor-parallel ranks.
    """
    ends = offsets + numels
    first, last = offsets // partition_numel, (ends - 1) // partition_numel
    head = np.minimum(ends, (first + 1) * partition_numel) - offsets
    tail = np.where(last > first, ends - last * partition_numel, head)
    body = np.full_like(numels, partition_numel)
    return Holdings(first, last, head, body, tail, numels, ranks, width)


def sharded_holdings(numels: Ints, *, ranks: int, width: int = 1, replicated: bool = False) -> Holdings:
    """Describe matrices that are each divided over all ranks (stage 3), or whole on all of them (``replicated``)."""
    shard = -(-numels // ranks)
    last = -(-numels // shard) - 1
    tail = numels - last * shard
    first, head = np.zeros_like(numels), np.minimum(shard, numels)
    return Holdings(first, last, head, shard, tail, numels, ranks, width, replicated)
