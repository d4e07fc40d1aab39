"""Which rank orthogonalises which matrix.

A matrix that lies whole on one rank is orthogonalised there and never moves. Of the others the cost model chooses: the
floating-point operations that a rank already has, plus those of the matrix, plus what it takes to bring the elements
that the rank does not hold, where another node is farther than the own one. A matrix of which one rank holds half or
more stays with its holders, so that balancing never moves more than twice what has to move; of a matrix that is spread
over half of the ranks any may be the owner. Deterministic: the same layouts give the same owners on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from deepspeed_muon.math.flops import orthogonalize_flops
from deepspeed_muon.math.newton_schulz import NsMethod
from deepspeed_muon.plan.balance import Job, assign_jobs
from deepspeed_muon.plan.holdings import Floats, Holdings, Ints
from deepspeed_muon.plan.layout import MatrixLayout

__all__ = ["FLOPS_PER_MOVED_ELEMENT", "assign_holdings", "assign_owners", "grid_blocks", "matrix_flops"]

# Floating-point operations that take as long as sending one element forth and back: 400 TFLOP/s against 100 GB/s at
# two bytes an element. It weighs moving against waiting, so only its order of magnitude matters.
FLOPS_PER_MOVED_ELEMENT = 16_000.0
# The network between nodes is about this much slower than NVLink (450 against 50 GB/s on a DGX H100).
_OTHER_NODE = 9.0

# Ranks that hold elements of a matrix, and how many.
Spread = tuple[Sequence[int], Sequence[float]]


def matrix_flops(
    matrix: MatrixLayout, steps: int = 5, *, method: NsMethod = "standard", dtype: torch.dtype = torch.float32
) -> float:
    """Return the floating-point operations of orthogonalising all blocks of ``matrix``."""
    return sum(
        count * orthogonalize_flops(rows, cols, steps=steps, method=method, dtype=dtype)
        for count, rows, cols in grid_blocks(*matrix.grid)
    )


def grid_blocks(row_blocks: Sequence[int], col_blocks: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Return count, rows and columns of every kind of block in a grid.

    Args:
        row_blocks: Heights of the grid's rows.
        col_blocks: Widths of its columns.
    """
    rows, cols = Counter(row_blocks), Counter(col_blocks)
    return tuple((n * k, r, c) for r, n in rows.items() for c, k in cols.items())


def assign_owners(
    matrices: Sequence[MatrixLayout],
    world_size: int,
    *,
    steps: int = 5,
    load: list[float] | None = None,
    method: NsMethod = "standard",
    dtype: torch.dtype = torch.float32,
    nodes: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Assign every matrix to one rank.

    Args:
        matrices: All matrices that are exchanged together.
        world_size: Ranks of the data-parallel group.
        steps: Newton-Schulz steps, which scale the cost of computing against that of moving.
        load: Cost that each rank already carries from other partitions; updated in place. ``None`` starts at zero.
        method: The iteration, which decides the cost of elongated matrices.
        dtype: The dtype of its products.
        nodes: The node of every rank; ``None`` for one node.

    Returns:
        One rank per matrix, in order.
    """
    load = [0.0] * world_size if load is None else load
    costs = [matrix_flops(matrix, steps, method=method, dtype=dtype) for matrix in matrices]
    spreads: list[Spread | None] = []
    for matrix in matrices:
        if matrix.replicated and world_size > 1:
            spreads.append(None)
            continue
        amounts: dict[int, int] = {}
        for fragment in matrix.fragments:
            amounts[fragment.rank] = amounts.get(fragment.rank, 0) + fragment.numel
        ranks = sorted(amounts)
        everywhere = len(ranks) >= _everywhere(world_size)
        spreads.append(None if everywhere else (ranks, [float(amounts[rank]) for rank in ranks]))
    place = np.zeros(world_size, dtype=np.int64) if nodes is None else np.asarray(nodes, dtype=np.int64)
    return _assign(costs, [matrix.numel for matrix in matrices], spreads, place, load)


def assign_holdings(
    costs: Sequence[float],
    holdings: Holdings,
    *,
    load: list[float],
    nodes: Ints,
    replicated: bool = False,
) -> tuple[int, ...]:
    """Assign every matrix to one rank, as :func:`assign_owners`, from the closed form of who holds what.

    Args:
        costs: Floating-point operations of each matrix.
        holdings: Who holds how much.
        load: Cost that each rank already carries; updated in place.
        nodes: The node of every rank.
        replicated: Whether every rank holds every matrix whole, whatever ``holdings`` says.
    """
    holders = (holdings.last - holdings.first + 1) * holdings.width
    everywhere = (holders >= _everywhere(holdings.world_size)) | replicated
    alone = (holders == 1).tolist()
    first, numels = holdings.first.tolist(), holdings.numel.tolist()
    spreads: list[Spread | None] = []
    for index, anywhere in enumerate(everywhere.tolist()):
        if anywhere:
            spreads.append(None)
        elif alone[index]:
            spreads.append(((first[index],), (numels[index],)))
        else:
            ranks, held = holdings.holders(index)
            spreads.append((ranks.tolist(), held.tolist()))
    return _assign(costs, numels, spreads, nodes, load)


def _everywhere(world_size: int) -> int:
    """Return the number of holders from which a matrix counts as spread over all ranks, so that any may own it."""
    return max(3, -(-world_size // 2))


def _assign(
    costs: Sequence[float],
    numels: Sequence[int],
    spreads: Sequence[Spread | None],
    nodes: Ints,
    load: list[float],
) -> tuple[int, ...]:
    owners = [-1] * len(costs)
    jobs: list[Job] = []
    open_matrices: list[int] = []
    for index, (cost, spread) in enumerate(zip(costs, spreads, strict=True)):
        if spread is not None and len(spread[0]) == 1:
            owners[index] = spread[0][0]
            load[owners[index]] += cost
            continue
        open_matrices.append(index)
        jobs.append(Job(cost) if spread is None else _job(cost, numels[index], *spread, nodes))
    for index, owner in zip(open_matrices, assign_jobs(jobs, load), strict=True):
        owners[index] = owner
    return tuple(owners)


def _job(cost: float, numel: int, ranks: Sequence[int], held: Sequence[float], nodes: Ints) -> Job:
    """Say who may own a matrix with few holders, and what bringing it there costs."""
    owned: Floats = np.asarray(held)
    near = np.zeros(int(nodes.max()) + 1)
    np.add.at(near, nodes[list(ranks)], owned)
    here = near[nodes[list(ranks)]]
    penalties = FLOPS_PER_MOVED_ELEMENT * ((here - owned) + _OTHER_NODE * (numel - here))
    elsewhere = None
    if 2 * max(held) < numel:
        elsewhere = FLOPS_PER_MOVED_ELEMENT * numel * (_OTHER_NODE if int(nodes.max()) else 1.0)
    return Job(cost, tuple(ranks), tuple(penalties.tolist()), elsewhere)
