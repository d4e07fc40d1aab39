"""In which order matrices lie in a flat buffer that ZeRO cuts into equal partitions (stages 1 and 2).

A matrix that crosses a cut has to move; any other is orthogonalised where it lies. A good order lets few elements
cross cuts, and gives all partitions about the same work. Partitions with a mixture of all shapes have equal work.
Matrices of one shape lie together inside a partition.

Several orders are built greedily, with different weights of these two aims. Each one, and the given order, is judged by
the exchange that it leads to. The chosen order never moves more elements than the given one.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from deepspeed_muon.plan.holdings import flat_holdings
from deepspeed_muon.plan.owners import FLOPS_PER_MOVED_ELEMENT, assign_owners, holders_in_holdings

__all__ = [
    "OrderName",
    "OrderQuality",
    "balanced_order",
    "flat_partition_numel",
    "order_quality",
]

OrderName = Literal["balanced", "given"]

# ZeRO 1 and 2 pad the flat buffer to a multiple of this times the ranks (nccl_start_alignment_factor).
_FLAT_ALIGNMENT = 2
# The load counts as even if the busiest rank has at most this times the mean.
_EVEN = 1.05
# With more ranks the search takes longer than it saves: a partition holds few matrices, and most of them cross a cut in
# every order.
_MOST_RANKS = 2048
# One order is tried for each of these weights; it multiplies the cost of a moved element.
_WEIGHTS = (0.0, 0.1, 0.3, 1.0, 10.0, 100.0)
# At each cut, the number of shapes whose counts may differ from their share, and by how much.
_VARIED = 6
_AROUND = (-1, 0, 1, 2)


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

    Deterministic. Returns the given order if no other one is better.

    Args:
        numels: Elements of each matrix.
        costs: Newton-Schulz operations of each matrix.
        kinds: Equal for interchangeable matrices, which have the same shape.
        world_size: Ranks of the data-parallel group.
    """
    given = list(range(len(numels)))
    if not 1 < world_size <= _MOST_RANKS or len(given) < 2:
        return given
    best, quality = given, order_quality(numels, costs, world_size)
    limit = quality.moved
    # An order that moves less is no gain if its load is uneven.
    even = max(quality.busiest, _EVEN * sum(costs) / world_size)
    for weight in _WEIGHTS:
        order = _mixed(numels, costs, kinds, world_size, weight * FLOPS_PER_MOVED_ELEMENT)
        found = order_quality([numels[i] for i in order], [costs[i] for i in order], world_size)
        if found.busiest > even or found.moved > limit:
            continue
        # A tiny gain does not justify another layout than the given one.
        if found.score < quality.score * (1 - 1e-6):
            best, quality = order, found
    return best


class _Stock:
    """The matrices that are not placed yet, by kind, each kind in the given order."""

    def __init__(self, numels: Sequence[int], costs: Sequence[float], kinds: Sequence[Hashable]) -> None:
        members: dict[Hashable, list[int]] = {}
        for index, kind in enumerate(kinds):
            members.setdefault(kind, []).append(index)
        # Largest first: small matrices fill the gap that remains.
        self._members = sorted(members.values(), key=lambda m: (-numels[m[0]], m[0]))
        self.numels = np.array([numels[m[0]] for m in self._members], dtype=np.int64)
        self.costs = np.array([costs[m[0]] for m in self._members])
        self.counts = np.array([len(m) for m in self._members], dtype=np.int64)

    def take(self, kind: int, count: int = 1) -> list[int]:
        taken = self._members[kind][:count]
        del self._members[kind][:count]
        self.counts[kind] -= len(taken)
        return taken


def _mixed(
    numels: Sequence[int],
    costs: Sequence[float],
    kinds: Sequence[Hashable],
    world_size: int,
    per_element: float,
) -> list[int]:
    """Fill one partition after the other with a proportional mixture that ends close to the cut."""
    stock = _Stock(numels, costs, kinds)
    partition = flat_partition_numel(sum(numels), world_size)
    order: list[int] = []
    offset = 0
    carried = 0.0
    for rank in range(world_size - 1):
        gap = (rank + 1) * partition - offset
        if gap <= 0 or not stock.counts.any():
            carried = 0.0
            continue
        fair = (float(stock.costs @ stock.counts) + carried) / (world_size - rank)
        counts, straddler = _fill(stock, gap, fair - carried, world_size - rank, per_element)
        filled = int(counts @ stock.numels)
        for kind, count in enumerate(counts.tolist()):
            order += stock.take(kind, count)
        offset += filled
        carried = 0.0
        left = gap - filled
        if straddler >= 0 and left:
            size = int(stock.numels[straddler])
            # The rank that holds more of it will own it.
            carried = float(stock.costs[straddler]) if 2 * left < size else 0.0
            order += stock.take(straddler)
            offset += size
    for kind in range(len(stock.counts)):
        order += stock.take(kind, int(stock.counts[kind]))
    return order


def _fill(stock: _Stock, gap: int, fair: float, ranks: int, per_element: float) -> tuple[np.ndarray, int]:
    """Return how many of each kind go whole into ``gap`` elements, and the kind that crosses its end (or -1)."""
    share = stock.counts // ranks
    varied = [kind for kind in np.argsort(-stock.counts * stock.numels, kind="stable") if stock.counts[kind]]
    varied = varied[:_VARIED]
    ranges = [
        sorted({int(np.clip(share[kind] + d, 0, stock.counts[kind])) for d in _AROUND}) for kind in varied
    ]
    options = np.array(list(itertools.product(*ranges)), dtype=np.int64)
    counts = np.tile(share, (len(options), 1))
    counts[:, varied] = options
    filled = counts @ stock.numels
    counts, filled = counts[filled <= gap], filled[filled <= gap]
    if not len(counts):
        counts, filled = _greedy(stock, gap)
    work = counts @ stock.costs
    best: tuple[float, int, int] | None = None
    left = gap - filled
    closed = np.where(left == 0, np.abs(work - fair), np.inf)
    for kind in (-1, *np.flatnonzero(stock.counts).tolist()):
        if kind < 0:
            score = closed
        else:
            size = int(stock.numels[kind])
            crossing = (left > 0) & (left < size) & (counts[:, kind] < stock.counts[kind])
            mine = np.where(2 * left >= size, stock.costs[kind], 0.0)
            moved = 2.0 * np.minimum(left, size - left)
            score = np.where(crossing, np.abs(work + mine - fair) + per_element * moved, np.inf)
        at = int(np.argmin(score))
        if np.isfinite(score[at]) and (best is None or score[at] < best[0]):
            best = (float(score[at]), at, kind)
    if best is None:
        counts, filled = _greedy(stock, gap)
        remaining = stock.counts - counts[0]
        return counts[0], int(np.argmax(remaining > 0)) if remaining.any() else -1
    return counts[best[1]], best[2]


def _greedy(stock: _Stock, gap: int) -> tuple[np.ndarray, np.ndarray]:
    """Return as many of each kind, largest first, as fit: one option for :func:`_fill`."""
    counts = np.zeros_like(stock.counts)
    filled = 0
    for kind, size in enumerate(stock.numels.tolist()):
        counts[kind] = min(int(stock.counts[kind]), (gap - filled) // size)
        filled += int(counts[kind]) * size
    return counts[None, :], np.array([filled])
