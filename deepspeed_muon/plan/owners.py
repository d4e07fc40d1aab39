"""Which rank orthogonalises which matrix.

A matrix of which one rank holds all elements is orthogonalised there and never sent. Of all others, the costliest
first:

* One that is replicated, or of which at least three ranks, and half of all, hold elements, goes to the rank with the
  least work.
* Every other one goes to the rank that would finish it first. Its time is the work that the rank already has, the work
  of the matrix, and the transfer of the elements that the rank does not hold. If one rank holds half of it or more,
  only holders may own it, so that balancing sends at most twice what has to be sent.
* Matrices of equal cost that cross one partition boundary each, as blocks of a stack do, are decided together: the sum
  of these times is minimal. One by one, the blocks of a long stack would push what does not divide evenly from rank to
  rank, until some rank has a block too many.

The same layouts give the same owners on every rank.

A stack of equal blocks (experts, heads) is one parameter. A single owner would receive all of it and let the other
ranks wait, so it is split into slices of blocks with an owner each (:func:`split_blocks`).
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from deepspeed_muon.errors import ConfigError
from deepspeed_muon.math.newton_schulz import NsSettings, orthogonalize_flops
from deepspeed_muon.plan.layout import MatrixLayout, SetIndex, TensorShards
from deepspeed_muon.plan.placement import Floats, Placement

# Floating-point operations that take as long as sending one element back and forth, at 400 TFLOP/s, 100 GB/s and two
# bytes an element. It weighs moving against waiting, so only its order of magnitude matters.
FLOPS_PER_MOVED_ELEMENT = 16_000.0
# A slice of several blocks of a stack that is sent costs at most this fraction of a rank's average work. With a quarter
# the busiest of 1,024 ranks has 1.14 times the mean for kimi-k2 at stage 3, with a sixteenth 1.01.
_SENT_FRACTION = 1 / 16


@dataclass(frozen=True, slots=True)
class Assignment:
    """The layouts that a step set exchanges, complete matrices and slices of blocks, and their owners.

    Attributes:
        matrices: The layouts; those of one matrix follow each other.
        origin: For each layout, the index of its matrix in the step set.
        work: Newton-Schulz operations that each layout costs its owner.
    """

    matrices: tuple[MatrixLayout, ...]
    owners: tuple[int, ...]
    origin: tuple[SetIndex, ...]
    work: tuple[float, ...]


def assign(
    matrices: Sequence[MatrixLayout], iteration: NsSettings, load: Floats, *, divisor: int = 1
) -> Assignment:
    """Choose the owner of each matrix of a step set, and cut stacks of blocks for several owners.

    ``iteration`` decides what a matrix costs. ``load`` has the operations that each rank already has from other step
    sets, and is mutated: the new work is added. A stack is cut only where ``divisor`` divides the elements before the
    cut; raises ConfigError where tensor parallelism has cut one elsewhere.
    """
    # 1. divide what tensor parallelism divides already
    shards = [(index, shard) for index, matrix in enumerate(matrices) for shard in split_shard(matrix)]
    for _, shard in shards:
        if shard.first_row * shard.cols % divisor:
            raise ConfigError(
                f"{shard.name}: tensor parallelism cuts its blocks after {shard.first_row * shard.cols} elements, "
                f"and momentum_dtype int8 needs a multiple of {divisor}: set momentum_dtype to bf16"
            )
    costs = [blocks_flops(grid_blocks(*shard.grid), iteration) for _, shard in shards]
    limit = _SENT_FRACTION * (math.fsum(costs) + math.fsum(load)) / len(load)
    # 2. cut stacks of blocks into slices with an owner each
    layouts: list[MatrixLayout] = []
    origin: list[SetIndex] = []
    for (index, shard), cost in zip(shards, costs, strict=True):
        layouts += split_stack(shard, cost=cost, limit=limit, divisor=divisor)
        origin += [SetIndex(index)] * (len(layouts) - len(origin))
    # 3. choose the owners
    work = [blocks_flops(grid_blocks(*layout.grid), iteration) for layout in layouts]
    owners = assign_owners(work, [layout.placement for layout in layouts], load=load)
    return Assignment(tuple(layouts), tuple(owners), tuple(origin), tuple(work))


@functools.lru_cache(maxsize=512)
def grid_blocks(row_blocks: tuple[int, ...], col_blocks: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Return count, rows and columns of every kind of block in a grid with these row heights and column widths."""
    rows, cols = Counter(row_blocks), Counter(col_blocks)
    return tuple((n * k, r, c) for r, n in rows.items() for c, k in cols.items())


@functools.lru_cache(maxsize=512)
def blocks_flops(kinds: tuple[tuple[int, int, int], ...], iteration: NsSettings) -> float:
    """Return the floating-point operations of orthogonalising blocks, given as in :func:`grid_blocks`."""
    return sum(count * orthogonalize_flops(rows, cols, iteration) for count, rows, cols in kinds)


def assign_owners(
    costs: Sequence[float], placements: Sequence[Placement | None], *, load: Floats
) -> list[int]:
    """Return the owner of every matrix. Nothing loops over the ranks that hold a matrix.

    ``costs`` and ``load`` are floating-point operations, of each matrix and of what each rank has to do already; the
    new ones are added. The placement is ``None`` of a matrix that any rank may own at equal cost.
    """
    # 1. matrices that are complete on a rank remain there
    owners = [-1] * len(costs)
    undecided: list[int] = []
    for index, (cost, placement) in enumerate(zip(costs, placements, strict=True)):
        if placement is None or (only := placement.only_rank) is None:
            undecided.append(index)
        else:
            owners[index] = only
            load[only] += cost
    # 2. the other ones, the costliest first. A heap of one rank more than there are undecided matrices is enough to
    # find the idlest rank: these matrices cannot add work to all of its ranks.
    least = np.argsort(load, kind="stable")[: len(undecided) + 1]
    idle = list(zip(load[least].tolist(), least.tolist(), strict=True))
    undecided.sort(key=lambda index: -costs[index])  # stable: in the order of the plan
    everywhere = max(3, -(-len(load) // 2))  # with so many holders any rank may own a matrix
    for joint in _decided_jointly(undecided, costs, placements):
        while idle[0][0] != load[idle[0][1]]:  # an entry from before this rank got more work
            heapq.heapreplace(idle, (load[idle[0][1]], idle[0][1]))
        placement, idlest = placements[joint[0]], idle[0][1]
        if placement is None or placement.replicated or len(placement.ranks) >= everywhere:
            chosen = [idlest]  # usually about the same bytes are sent, whoever owns it
        elif _crossed_boundary(placement) >= 0:
            crossing = [p for index in joint if (p := placements[index]) is not None]
            chosen = _from_rank_to_rank(costs[joint[0]], crossing, load)
        else:
            chosen = [_first_to_finish(placement, load, idlest)]
        for index, owner in zip(joint, chosen, strict=True):
            owners[index] = owner
            load[owner] += costs[index]
    return owners


def _decided_jointly(
    order: Sequence[int], costs: Sequence[float], placements: Sequence[Placement | None]
) -> Iterator[list[int]]:
    """Yield the matrices in an order; together those of equal cost that cross one boundary each, rank after rank."""
    joint: list[int] = []
    last = -1
    for index in order:
        boundary = _crossed_boundary(placements[index])
        if joint and not (0 <= last < boundary and costs[index] == costs[joint[0]]):
            yield joint
            joint = []
        joint.append(index)
        last = boundary  # -1 ends the series: the next matrix is decided alone
    if joint:
        yield joint


def _crossed_boundary(placement: Placement | None) -> int:
    """Return the first of the two ranks that hold a matrix, -1 if there are not two."""
    if placement is None or placement.replicas or not 0 < placement.numel - placement.head <= placement.body:
        return -1
    return placement.first


def _from_rank_to_rank(cost: float, placements: Sequence[Placement], load: Floats) -> list[int]:
    """Return the owners that minimise the sum of the times of matrices of equal cost, each on two ranks.

    The placements are in the order of the ranks. A rank that takes two matrices finishes the second one later.
    """
    # Example: blocks on ranks 0 and 1, on 1 and 2, on 2 and 3, half on each. Idle ranks get one block each: 0, 1, 2. If
    # rank 1 has much work already, the last two move on by a rank: 0, 2, 3.
    # For either owner of the last matrix the best choice so far: the sum of the times, that owner, the choice before. A
    # time is given without what is equal for both owners: the work of the matrix, and the transfer of all its elements.
    choices: list[tuple[float, int, Any]] = [(0.0, -1, None)]
    for placement in placements:
        # When the work begins on either rank; the more of the matrix a rank holds, the less it waits for.
        begins = {
            rank: load[rank] - FLOPS_PER_MOVED_ELEMENT * placement.numel_on(rank) for rank in placement.ranks
        }
        choices = [
            min(
                ((before[0] + begin + cost * (before[1] == rank), rank, before) for before in choices),
                key=itemgetter(0),
            )
            for rank, begin in begins.items()
        ]
    # Each choice refers to the one before it, so the owners are read from the last matrix to the first.
    owners: list[int] = []
    choice = min(choices, key=itemgetter(0))
    while choice[2] is not None:  # the initial choice has no owner
        owners.append(choice[1])
        choice = choice[2]
    return owners[::-1]


def _first_to_finish(placement: Placement, load: Floats, idlest: int) -> int:
    """Return which holder of a matrix on three ranks or more, or the idlest rank, would begin with it first."""
    first, end = placement.first, placement.ranks.stop - 1
    # All ranks between the first and the last hold equally many elements, so only the idlest of them can win.
    middle = first + 1 + int(load[first + 1 : end].argmin())
    numel_on = {first: placement.head, middle: placement.body, end: placement.numel_on(end)}
    begins = [(float(load[rank]) - FLOPS_PER_MOVED_ELEMENT * numel, rank) for rank, numel in numel_on.items()]
    if 2 * max(numel_on.values()) < placement.numel:
        begins.append((float(load[idlest]), idlest))
    return min(begins)[1]


def split_blocks(
    blocks: int, numel: int, placement: Placement, *, cost: float, limit: float, divisor: int = 1
) -> list[tuple[int, int]]:
    """Split a stack of equal blocks into slices that get one owner each: first block and number of blocks.

    Blocks of which one rank holds all elements belong to that rank; a slice of the others, which are sent, is small.
    ``numel`` and ``cost`` are elements and operations of a block, ``limit`` the most operations of a slice of several
    blocks of which no rank holds all elements; ``divisor`` as for :func:`assign`.
    """
    most = max(1, int(limit // cost)) if cost else blocks  # blocks of a slice that is sent
    holders = [-1] * blocks
    if not placement.replicated:
        starts = np.arange(blocks) * numel  # (blocks,)
        first, last = placement.ranks_of(starts), placement.ranks_of(starts + numel - 1)
        # -1 where a block crosses from one rank to another
        holders = np.where(first == last, first, -1).tolist()
    # A slice ends where the holder changes, and one that is sent also where it is full.
    first_blocks = [0]
    for block in range(1, blocks):
        is_full = holders[block] < 0 and block - first_blocks[-1] >= most
        if block * numel % divisor == 0 and (is_full or holders[block] != holders[block - 1]):
            first_blocks.append(block)
    return [(block, end - block) for block, end in pairwise([*first_blocks, blocks])]


def split_stack(matrix: MatrixLayout, *, cost: float, limit: float, divisor: int = 1) -> list[MatrixLayout]:
    """Return a stack's slices of blocks, by :func:`split_blocks`; the matrix itself if it is complete on a rank.

    ``cost`` is that of orthogonalising all of it.
    """
    count = matrix.equal_blocks or 1
    if count == 1 or matrix.tp_shards is not None or matrix.placement.only_rank is not None:
        return [matrix]
    rows, cols = matrix.block_shapes[0]
    slices = split_blocks(
        count, rows * cols, matrix.placement, cost=cost / count, limit=limit, divisor=divisor
    )
    if len(slices) == 1:
        return [matrix]
    return [matrix.slice_blocks(first * rows, (rows,) * number) for first, number in slices]


def split_shard(matrix: MatrixLayout) -> list[MatrixLayout]:
    """Split a shard in blocks: complete blocks need no other rank, each shard of a block is one matrix."""
    shards = matrix.tp_shards
    if shards is None or not shards.complete:
        return [matrix]
    if all(shards.complete):
        return [replace(matrix, tp_shards=None)]
    blocks = matrix.grid[0]
    # Complete blocks that follow each other remain together; a shard of a block is alone.
    slices = [
        tuple(number for number, _ in members)
        for _, members in groupby(enumerate(shards.complete), lambda block: -1 if block[1] else block[0])
    ]
    first_rows = list(accumulate(blocks, initial=0))
    layouts = []
    for numbers in slices:
        block_shards = None
        if not shards.complete[numbers[0]]:
            rows = (blocks[numbers[0]],) * len(shards.sizes)
            block_shards = TensorShards(shards.dim, rows if shards.dim == 0 else shards.sizes)
        layout = matrix.slice_blocks(first_rows[numbers[0]], blocks[numbers[0] : numbers[-1] + 1])
        layouts.append(replace(layout, tp_shards=block_shards))
    return layouts
