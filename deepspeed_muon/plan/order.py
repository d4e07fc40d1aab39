"""In which order matrices lie in a flat buffer that ZeRO cuts into equal partitions (stages 1 and 2).

A matrix that crosses a cut has to move; any other is orthogonalised where it lies. What is larger than a partition, a
stack of experts, comes first, in the given order. Each kind of matrix (shape) is then spread over the other
partitions, the dearest kind first: every matrix goes to the partition with the least work, counting what its free
elements will cost if later kinds fill them. Matrices of one shape lie together inside a partition.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Sequence

# ZeRO 1 and 2 pad the flat buffer to a multiple of this times the ranks (nccl_start_alignment_factor).
_FLAT_ALIGNMENT = 2


def flat_partition_numel(total: int, world_size: int) -> int:
    """Return the elements of a rank's partition of a flat buffer of ``total`` elements, with ZeRO's padding."""
    alignment = _FLAT_ALIGNMENT * world_size
    return -(-total // alignment) * _FLAT_ALIGNMENT


def balanced_order(
    numels: Sequence[int], costs: Sequence[float], kinds: Sequence[Hashable], world_size: int
) -> list[int]:
    """Return the order in which the matrices shall lie, as positions in the given order. Deterministic.

    Args:
        numels: Elements of each matrix.
        costs: Newton-Schulz operations of each matrix.
        kinds: Equal for interchangeable matrices, which have the same shape.
        world_size: Ranks of the data-parallel group.
    """
    if world_size < 2 or len(numels) < 2:
        return list(range(len(numels)))
    partition = flat_partition_numel(sum(numels), world_size)
    stacks = [index for index, numel in enumerate(numels) if numel >= partition]
    load, room = _laid_end_to_end(
        [numels[i] for i in stacks], [costs[i] for i in stacks], partition, world_size
    )
    free = [rank for rank in range(world_size) if room[rank] > 0]

    members: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        if numels[index] < partition:
            members.setdefault(kind, []).append(index)
    rest_cost = sum(costs[index] for same in members.values() for index in same)
    rest_numel = sum(numels[index] for same in members.values() for index in same)
    content: dict[int, list[int]] = {rank: [] for rank in free}
    for same in sorted(members.values(), key=lambda m: (-costs[m[0]], m[0])):
        numel, cost = numels[same[0]], costs[same[0]]
        rest_cost, rest_numel = rest_cost - len(same) * cost, rest_numel - len(same) * numel
        # Later kinds fill what is free. Where they cost more per element than this one, it says nothing.
        later = rest_cost / rest_numel if rest_numel and rest_cost * numel < cost * rest_numel else 0.0
        # A partition may have half a matrix too much: the cut then goes through that one.
        idle = [
            (load[rank] + later * room[rank], -room[rank], rank) for rank in free if 2 * room[rank] > -numel
        ]
        heapq.heapify(idle)
        for index in same:
            rank = idle[0][2] if idle else max(free, key=lambda rank: room[rank])
            content[rank].append(index)
            load[rank] += cost
            room[rank] -= numel
            if idle and 2 * room[rank] > -numel:
                heapq.heapreplace(idle, (load[rank] + later * room[rank], -room[rank], rank))
            elif idle:
                heapq.heappop(idle)
    return stacks + _joined(content, room)


def _laid_end_to_end(
    numels: Sequence[int], costs: Sequence[float], partition: int, world_size: int
) -> tuple[list[float], list[int]]:
    """Return the work and the free elements of every partition with these matrices from the first one on."""
    load, room = [0.0] * world_size, [partition] * world_size
    start = 0
    for numel, cost in zip(numels, costs, strict=True):
        stop = start + numel
        for rank in range(start // partition, -(-stop // partition)):
            inside = min(stop, (rank + 1) * partition) - max(start, rank * partition)
            load[rank] += cost / numel * inside
            room[rank] -= inside
        start = stop
    return load, room


def _joined(content: dict[int, list[int]], room: Sequence[int]) -> list[int]:
    """Return all matrices, those of partitions with too much and with too little in turn: cuts stay near their ends."""
    fullest = deque(sorted(content, key=lambda rank: (room[rank], rank)))
    order: list[int] = []
    over = 0
    while fullest:
        first, last = fullest[0], fullest[-1]
        fuller = abs(over - room[first]) < abs(over - room[last])
        rank = fullest.popleft() if fuller else fullest.pop()
        over -= room[rank]
        order += content[rank]
    return order
