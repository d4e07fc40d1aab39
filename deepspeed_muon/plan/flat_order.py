"""The order of Muon's matrices in the flat buffer of ZeRO 1 and 2: so that all ranks get equal Newton-Schulz work."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence

from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.plan.owners import blocks_flops

# ZeRO 1 and 2 pad the flat buffer to a multiple of this times the ranks (nccl_start_alignment_factor).
_FLAT_ALIGNMENT = 2


def flat_partition_numel(total: int, world_size: int) -> int:
    """Return the elements of a rank's partition of a flat buffer of ``total`` elements, with ZeRO's padding."""
    alignment = _FLAT_ALIGNMENT * world_size
    return -(-total // alignment) * _FLAT_ALIGNMENT


def order_of_matrices(
    numels: Sequence[int],
    kinds: Sequence[tuple[tuple[int, int, int], ...]],
    world_size: int,
    iteration: NsSettings,
) -> Sequence[int]:
    """Return the order of the matrices of one param group in the flat buffer, as positions in the given order.

    ``numels`` are the elements of each matrix, ``kinds`` its blocks as ``grid_blocks`` of plan/owners.py gives them.

    The buffer is cut into a partition for each of ``world_size`` ranks, and a matrix that crosses a cut has to be sent.
    What is larger than a partition, a stack of experts, comes first. Each kind of matrix, of equal blocks, is then
    spread over the other partitions, the costliest kind first: every matrix goes to the partition with the least work,
    counting what its free elements will cost if later kinds fill them. Matrices of one shape are adjacent inside a
    partition. Example: two ranks have matrices of 4, 4, 4, 4, 8 and 8 elements, the last two of which cost six times as
    much. In the given order the first partition of 16 elements would have the four cheap ones. The order 5, 1, 3, 4, 0,
    2 gives each partition a large and two small ones.
    """
    costs = [blocks_flops(kind, iteration) for kind in kinds]
    if world_size < 2 or len(numels) < 2:
        return range(len(numels))
    partition = flat_partition_numel(sum(numels), world_size)
    stacks = [index for index, numel in enumerate(numels) if numel >= partition]
    # 1. stacks from the first partition on: the work and the free elements of every partition
    load, free_numel = [0.0] * world_size, [partition] * world_size
    start = 0
    for index in stacks:
        stop = start + numels[index]
        for rank in range(start // partition, -(-stop // partition)):
            numel = min(stop, (rank + 1) * partition) - max(start, rank * partition)
            load[rank] += costs[index] / numels[index] * numel
            free_numel[rank] -= numel
        start = stop
    free = [rank for rank in range(world_size) if free_numel[rank] > 0]

    # 2. one kind after the other, each matrix to the partition with the least work
    members: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        if numels[index] < partition:
            members.setdefault(kind, []).append(index)
    rest_cost = sum(costs[index] for equal in members.values() for index in equal)
    rest_numel = sum(numels[index] for equal in members.values() for index in equal)
    content: dict[int, list[int]] = {rank: [] for rank in free}
    for equal in sorted(members.values(), key=lambda m: (-costs[m[0]], m[0])):
        numel, cost = numels[equal[0]], costs[equal[0]]
        rest_cost, rest_numel = rest_cost - len(equal) * cost, rest_numel - len(equal) * numel
        # Later kinds fill what is free. Where they cost more per element than this one, it says nothing.
        later = rest_cost / rest_numel if rest_numel and rest_cost * numel < cost * rest_numel else 0.0
        # A full partition takes one more, through which the cut then goes; none if half a matrix is too much already.
        idle = [  # a heap of (work with later kinds, -free elements, rank)
            (load[rank] + later * free_numel[rank], -free_numel[rank], rank)
            for rank in free
            if 2 * free_numel[rank] > -numel
        ]
        heapq.heapify(idle)
        for index in equal:
            rank = idle[0][2] if idle else max(free, key=lambda rank: free_numel[rank])
            content[rank].append(index)
            load[rank] += cost
            free_numel[rank] -= numel
            if idle and 2 * free_numel[rank] > -numel:
                heapq.heapreplace(idle, (load[rank] + later * free_numel[rank], -free_numel[rank], rank))
            elif idle:
                heapq.heappop(idle)

    # 3. partitions with too much and with too little in turn, so that cuts are near their ends
    ranks = _full_and_free_in_turn({rank: free_numel[rank] for rank in free})
    return stacks + [index for rank in ranks for index in content[rank]]


def _full_and_free_in_turn(free_numel: Mapping[int, int]) -> Iterator[int]:
    """Yield ranks, given how many elements of their partitions are free (or too many, if negative)."""
    fullest = deque(sorted(free_numel, key=lambda rank: (free_numel[rank], rank)))
    # excess: by how many elements the matrices placed so far exceed the partitions that they were chosen for. The next
    # partition is the one that brings it closer to zero: after one with 5 elements too many, one with 5 too few.
    excess = 0
    while fullest:
        first, last = fullest[0], fullest[-1]
        take_fullest = abs(excess - free_numel[first]) < abs(excess - free_numel[last])
        rank = fullest.popleft() if take_fullest else fullest.pop()
        excess -= free_numel[rank]
        yield rank
