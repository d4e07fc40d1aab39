"""In which order matrices lie in a flat buffer that ZeRO cuts into equal partitions (stages 1 and 2).

A matrix that crosses a cut has to move; any other is orthogonalised where it lies. Each kind of matrix (shape) is
spread evenly over the partitions, the dearest kind first, and what does not divide evenly goes to the partition with
the least work. Matrices of one shape lie together inside a partition. A few matrices then swap places as long as that
helps. Where the given order moves fewer elements or has a better balance, it stays.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from deepspeed_muon.plan.holdings import flat_holdings
from deepspeed_muon.plan.owners import FLOPS_PER_MOVED_ELEMENT, assign_owners, holders_in_holdings

# ZeRO 1 and 2 pad the flat buffer to a multiple of this times the ranks (nccl_start_alignment_factor).
_FLAT_ALIGNMENT = 2
# Up to so many matrices swap places: there its time does not matter, and above it kinds have many members.
_SWAPPED = 32


@dataclass(frozen=True, slots=True)
class OrderQuality:
    """The exchange that an order leads to.

    Attributes:
        moved: Elements that all ranks together send, in both directions.
        busiest: Newton-Schulz operations of the busiest rank.
        straddling: Matrices that several ranks hold.
        score: Operations of the busiest rank plus the transfers of an average rank, counted as operations.
    """

    moved: float
    busiest: float
    straddling: int
    score: float


def flat_partition_numel(total: int, world_size: int) -> int:
    """Return the elements of a rank's partition of a flat buffer of ``total`` elements, with ZeRO's padding."""
    alignment = _FLAT_ALIGNMENT * world_size
    return -(-total // alignment) * _FLAT_ALIGNMENT


def order_quality(numels: Sequence[int], costs: Sequence[float], world_size: int) -> OrderQuality:
    """Return the quality of an order, from the elements and Newton-Schulz operations of its matrices."""
    sizes = np.asarray(numels, dtype=np.int64)
    ends = np.cumsum(sizes)
    partition = flat_partition_numel(int(ends[-1]), world_size)
    holdings = flat_holdings(ends - sizes, sizes, partition_numel=partition, ranks=world_size)
    load = [0.0] * world_size
    owners = assign_owners(costs, holders_in_holdings(holdings), load=load)
    gather, scatter, _ = holdings.traffic(owners)
    moved = float(gather.sum() + scatter.sum())
    straddling = int(np.count_nonzero(holdings.last > holdings.first))
    score = max(load) + FLOPS_PER_MOVED_ELEMENT * moved / world_size
    return OrderQuality(moved, max(load), straddling, score)


def balanced_order(
    numels: Sequence[int], costs: Sequence[float], kinds: Sequence[Hashable], world_size: int
) -> list[int]:
    """Return the order in which the matrices shall lie, as positions in the given order.

    Deterministic. Returns the given order if the new one moves more elements or is no better.

    Args:
        numels: Elements of each matrix.
        costs: Newton-Schulz operations of each matrix.
        kinds: Equal for interchangeable matrices, which have the same shape.
        world_size: Ranks of the data-parallel group.
    """
    given = list(range(len(numels)))
    if world_size < 2 or len(given) < 2:
        return given

    def quality(order: Sequence[int]) -> OrderQuality:
        return order_quality([numels[i] for i in order], [costs[i] for i in order], world_size)

    before = quality(given)

    def score(order: Sequence[int]) -> float:
        after = quality(order)
        fits = after.moved <= before.moved and after.busiest <= max(
            before.busiest, 1.05 * sum(costs) / world_size
        )
        return after.score if fits else float("inf")

    order = _spread_evenly(numels, costs, kinds, world_size)
    if len(order) <= _SWAPPED:
        order = _swapped(order, lambda order: (score(order), quality(order).score))
        # A tiny gain does not justify another layout than the given one.
        return order if score(order) < before.score * (1 - 1e-6) else given
    after = quality(order)
    better = after.moved <= before.moved and after.score < before.score * (1 - 1e-6)
    return order if better else given


def _swapped(order: list[int], score: Callable[[Sequence[int]], tuple[float, float]]) -> list[int]:
    """Swap two matrices as long as that lowers the score."""
    best, found = score(order), True
    while found:
        found = False
        for a, b in itertools.combinations(range(len(order)), 2):
            order[a], order[b] = order[b], order[a]
            if (new := score(order)) < best:
                best, found = new, True
            else:
                order[a], order[b] = order[b], order[a]
    return order


def _spread_evenly(
    numels: Sequence[int], costs: Sequence[float], kinds: Sequence[Hashable], world_size: int
) -> list[int]:
    """Return the order that the rule of this module gives."""
    load = [0.0] * world_size
    room = [flat_partition_numel(sum(numels), world_size)] * world_size
    content: list[list[int]] = [[] for _ in range(world_size)]

    def put(rank: int, matrices: list[int]) -> None:
        content[rank] += matrices
        load[rank] += sum(costs[index] for index in matrices)
        room[rank] -= sum(numels[index] for index in matrices)

    members: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        members.setdefault(kind, []).append(index)
    for same in sorted(members.values(), key=lambda m: (-costs[m[0]], m[0])):
        numel, each, taken = numels[same[0]], len(same) // world_size, 0
        for rank in range(world_size):
            # The last one may lie half in the next partition.
            count = min(each, max(0, -(-(2 * room[rank] + numel) // (2 * numel))))
            put(rank, same[taken : taken + count])
            taken += count
        idle = [(load[rank], -room[rank], rank) for rank in range(world_size) if room[rank] > 0]
        heapq.heapify(idle)
        for index in same[taken:]:
            rank = idle[0][2]
            put(rank, [index])
            if room[rank] > 0:
                heapq.heapreplace(idle, (load[rank], -room[rank], rank))
            else:
                heapq.heappop(idle)
    # Partitions with too much and with too little take turns, so that the cuts stay near their ends.
    fullest = deque(sorted(range(world_size), key=lambda rank: (room[rank], rank)))
    order: list[int] = []
    over = 0
    while fullest:
        first, last = fullest[0], fullest[-1]
        fuller = abs(over - room[first]) < abs(over - room[last])
        rank = fullest.popleft() if fuller else fullest.pop()
        over -= room[rank]
        order += content[rank]
    return order
