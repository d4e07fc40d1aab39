"""Which rank orthogonalises which matrix.

A matrix that lies whole on one rank is orthogonalised there and never moves. Every other matrix, the costliest first,
goes to the rank that would finish it first. Its time is the work that the rank already has, the work of the matrix, and
the transfer of the elements that the rank does not hold.

If one rank holds half of a matrix or more, only holders may own it, so that balancing never moves more than twice what
has to move. If half of the ranks hold parts of a matrix, any rank may own it. The same layouts give the same owners on
every rank.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from deepspeed_muon.math.newton_schulz import NsMethod, orthogonalize_flops
from deepspeed_muon.plan.holdings import Holdings
from deepspeed_muon.plan.layout import MatrixLayout

# Floating-point operations that take as long as sending one element forth and back, at 400 TFLOP/s, 100 GB/s and two
# bytes an element. It weighs moving against waiting, so only its order of magnitude matters.
FLOPS_PER_MOVED_ELEMENT = 16_000.0

# The ranks that hold elements of a matrix, and how many each; ``None`` if any rank may own the matrix at equal cost.
Holders = tuple[Sequence[int], Sequence[float]] | None


def matrix_flops(
    matrix: MatrixLayout, steps: int = 5, *, method: NsMethod = "standard", dtype: torch.dtype = torch.float32
) -> float:
    """Return the floating-point operations of orthogonalising all blocks of ``matrix``."""
    return sum(
        count * orthogonalize_flops(rows, cols, steps=steps, method=method, dtype=dtype)
        for count, rows, cols in grid_blocks(*matrix.grid)
    )


def grid_blocks(row_blocks: Sequence[int], col_blocks: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Return count, rows and columns of every kind of block in a grid with these row heights and column widths."""
    rows, cols = Counter(row_blocks), Counter(col_blocks)
    return tuple((n * k, r, c) for r, n in rows.items() for c, k in cols.items())


def holders_in_layouts(matrices: Sequence[MatrixLayout], world_size: int) -> list[Holders]:
    """Return the holders of each matrix, for :func:`assign_owners`."""
    everywhere = _everywhere(world_size)
    found: list[Holders] = []
    for matrix in matrices:
        ranks = matrix.placement.ranks
        anywhere = matrix.replicated or len(ranks) >= everywhere
        found.append(None if anywhere else (ranks, [float(matrix.placement.held_by(rank)) for rank in ranks]))
    return found


def holders_in_holdings(holdings: Holdings) -> list[Holders]:
    """Return the holders of each matrix, like :func:`holders_in_layouts`."""
    holders = (holdings.last - holdings.first + 1) * holdings.width
    anywhere = (holders >= _everywhere(holdings.world_size)) | holdings.replicated
    first, numels = holdings.first.tolist(), holdings.numel.tolist()
    found: list[Holders] = [((rank,), (numel,)) for rank, numel in zip(first, numels, strict=True)]
    for index in np.flatnonzero(anywhere | (holders > 1)).tolist():
        found[index] = None
        if not anywhere[index]:
            ranks, held = holdings.holders(index)
            found[index] = ranks.tolist(), held.tolist()
    return found


def _everywhere(world_size: int) -> int:
    """Return the number of holders from which on any rank may own a matrix."""
    return max(3, -(-world_size // 2))


def assign_owners(
    costs: Sequence[float],
    holders: Sequence[Holders],
    *,
    load: list[float],
) -> list[int]:
    """Return the owner of every matrix.

    Args:
        costs: Floating-point operations of each matrix.
        holders: The holders of each matrix.
        load: What each rank has to do already. Mutated: the new matrices are added.
    """
    owners = [-1] * len(costs)
    undecided: list[int] = []
    for index, (cost, held) in enumerate(zip(costs, holders, strict=True)):
        if held is not None and len(held[0]) == 1:
            owners[index] = held[0][0]
            load[owners[index]] += cost
        else:
            undecided.append(index)
    idle = [(busy, rank) for rank, busy in enumerate(load)]
    heapq.heapify(idle)
    for index in sorted(undecided, key=lambda index: (-costs[index], index)):
        while idle[0][0] != load[idle[0][1]]:
            heapq.heapreplace(idle, (load[idle[0][1]], idle[0][1]))
        idlest = owner = idle[0][1]
        if (held := holders[index]) is not None:
            numel = sum(held[1])
            ends = [
                (load[rank] + FLOPS_PER_MOVED_ELEMENT * (numel - own), rank)
                for rank, own in zip(*held, strict=True)
            ]
            if 2 * max(held[1]) < numel:
                ends.append((load[idlest] + FLOPS_PER_MOVED_ELEMENT * numel, idlest))
            owner = min(ends)[1]
        owners[index] = owner
        load[owner] += costs[index]
        if owner == idlest:
            heapq.heapreplace(idle, (load[owner], owner))
    return owners
