"""Divides indivisible jobs among equal ranks: longest first, then repairs.

Longest-first alone is within 4/3 of the best balance. A repair takes the busiest rank and an idle one and divides
their movable jobs between them again, exactly. All sums run in a fixed order, so every rank of a group finds the same
assignment.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Job", "assign_jobs"]

# Repairs end when the busiest rank is this close to the lower bound, or after this number of repairs.
_CLOSE_ENOUGH = 1.01
_MAX_REPAIRS = 2000
# With few jobs the repairs can end far from the bound. Then other assignments are tried as their start.
_FEW = 200
_GOOD = 1.03
_STARTS = 40
_PARTNERS = 24
# Two halves of a pool of this size have 2^10 subsets each.
_POOL = 20


@dataclass(frozen=True, slots=True)
class Job:
    """A task that one rank does.

    Attributes:
        cost: Its length, in any unit.
        ranks: Ranks that may do it; ``None`` for all ranks, without penalty.
        penalties: For each of ``ranks``, what the job costs there on top of ``cost``.
        elsewhere: The penalty on any other rank; ``None`` if no other rank may do it.
    """

    cost: float
    ranks: tuple[int, ...] | None = None
    penalties: tuple[float, ...] = ()
    elsewhere: float | None = None

    def allows(self, rank: int) -> bool:
        """Return whether ``rank`` may do it."""
        return self.ranks is None or self.elsewhere is not None or rank in self.ranks


def assign_jobs(jobs: Sequence[Job], load: list[float]) -> list[int]:
    """Return a rank for each job, so that the busiest rank has as little work as possible.

    Args:
        jobs: The work.
        load: What each rank has to do already. Mutated: the new jobs are added.
    """
    before = list(load)
    lengths = [job.cost for job in jobs]
    owners = _longest_first(jobs, lengths, load)
    _repair(jobs, owners, load)
    if len(jobs) > _FEW:
        return owners
    bound = _lower_bound(jobs, before)
    generator = random.Random(0)
    for _ in range(_STARTS):
        if max(load) <= _GOOD * bound:
            break
        other = list(before)
        # Random factors let jobs of similar length change places, so the repairs start from another assignment.
        attempt = _longest_first(jobs, [length * generator.uniform(0.5, 1.0) for length in lengths], other)
        _repair(jobs, attempt, other)
        if max(other) < max(load):
            owners, load[:] = attempt, other
    return owners


def _lower_bound(jobs: Sequence[Job], load: Sequence[float]) -> float:
    """Return the work that the busiest rank has in the best case."""
    lengths = [job.cost for job in jobs]
    return max(math.fsum((*load, *lengths)) / len(load), max(lengths, default=0.0), max(load))


def _longest_first(jobs: Sequence[Job], lengths: Sequence[float], load: list[float]) -> list[int]:
    """Give each job, longest first by ``lengths``, to the rank that would finish it first."""
    owners = [-1] * len(jobs)
    idle = [(busy, rank) for rank, busy in enumerate(load)]
    heapq.heapify(idle)
    for index in sorted(range(len(jobs)), key=lambda i: (-lengths[i], i)):
        job = jobs[index]
        while idle[0][0] != load[idle[0][1]]:
            heapq.heapreplace(idle, (load[idle[0][1]], idle[0][1]))
        best = idle[0][1]
        if job.ranks is not None:
            options = [(load[rank] + more, rank) for rank, more in zip(job.ranks, job.penalties, strict=True)]
            if job.elsewhere is not None:
                options.append((load[best] + job.elsewhere, best))
            best = min(options)[1]
        owners[index] = best
        load[best] += job.cost
        if best == idle[0][1]:
            heapq.heapreplace(idle, (load[best], best))
    return owners


def _repair(jobs: Sequence[Job], owners: list[int], load: list[float]) -> None:
    """Relieve the busiest rank until it is near the lower bound, or no partner can take work from it."""
    if len(load) < 2 or not jobs:
        return
    bound = max(math.fsum(load) / len(load), max(job.cost for job in jobs))
    held: dict[int, list[int]] = {}
    for index, owner in enumerate(owners):
        held.setdefault(owner, []).append(index)
    loads = np.array(load)
    for _ in range(_MAX_REPAIRS):
        busiest = int(np.argmax(loads))
        if loads[busiest] <= _CLOSE_ENOUGH * bound:
            break
        if not any(_exchange(jobs, held, loads, busiest, partner) for partner in _partners(loads, busiest)):
            break
    for rank, indices in held.items():
        for index in indices:
            owners[index] = rank
    load[:] = loads.tolist()


def _partners(loads: np.ndarray, busiest: int) -> list[int]:
    """Return the ranks to try a repair with: the idlest ones, then a sample of the others."""
    order = np.argsort(loads, kind="stable")
    order = order[order != busiest]
    if len(order) <= 2 * _PARTNERS:
        return [int(rank) for rank in order]
    between = order[_PARTNERS :: max(1, (len(order) - _PARTNERS) // _PARTNERS)]
    return [int(rank) for rank in (*order[:_PARTNERS], *between)]


def _exchange(
    jobs: Sequence[Job], held: dict[int, list[int]], loads: np.ndarray, busiest: int, partner: int
) -> bool:
    """Divide the movable jobs of two ranks again; return whether that relieved the busier one."""
    movable = [
        index
        for rank in (busiest, partner)
        for index in held.get(rank, [])
        if jobs[index].allows(busiest) and jobs[index].allows(partner)
    ]
    # Small jobs fill gaps best; the others stay where they are.
    pool = sorted(sorted(movable, key=lambda i: (jobs[i].cost, i))[:_POOL])
    on_busiest = set(held.get(busiest, ()))
    total = sum(jobs[i].cost for i in pool)
    fixed = float(loads[busiest]) - sum(jobs[i].cost for i in pool if i in on_busiest)
    other = float(loads[partner]) - sum(jobs[i].cost for i in pool if i not in on_busiest)
    chosen, amount = _closest_subset([jobs[i].cost for i in pool], (total + other - fixed) / 2)
    after = max(fixed + amount, other + total - amount)
    if after >= loads[busiest] * (1 - 1e-9):
        return False
    keep = {pool[position] for position in chosen}
    for rank, mine in ((busiest, keep), (partner, set(pool) - keep)):
        held[rank] = sorted((set(held.get(rank, ())) - set(pool)) | mine)
    loads[busiest], loads[partner] = fixed + amount, other + total - amount
    return True


def _closest_subset(costs: Sequence[float], target: float) -> tuple[list[int], float]:
    """Return the positions whose sum is closest to ``target``, and that sum, by meeting in the middle."""
    half = len(costs) // 2
    left, right = _subset_sums(costs[:half]), _subset_sums(costs[half:])
    order = np.argsort(right, kind="stable")
    ranked = right[order]
    place = np.searchsorted(ranked, target - left)
    best = (math.inf, 0, 0)
    for shift in (0, -1):
        at = np.clip(place + shift, 0, len(ranked) - 1)
        gap = np.abs(left + ranked[at] - target)
        first = int(np.argmin(gap))
        best = min(best, (float(gap[first]), first, int(order[at[first]])))
    _, low, high = best
    chosen = [i for i in range(half) if low >> i & 1]
    chosen += [half + i for i in range(len(costs) - half) if high >> i & 1]
    return chosen, sum(costs[i] for i in chosen)


def _subset_sums(costs: Sequence[float]) -> np.ndarray:
    """Return the sums of all subsets; bit ``i`` of an index says whether item ``i`` is in that subset."""
    sums = np.zeros(1)
    for cost in costs:
        sums = np.concatenate([sums, sums + cost])
    return sums
