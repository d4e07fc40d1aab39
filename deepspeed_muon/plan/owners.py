"""Which rank orthogonalises which matrix.

A matrix that lies whole on one rank is orthogonalised there and never moves. Every other matrix goes to the rank that
would finish it first. Its time is the work that the rank already has, the work of the matrix, and the transfer of the
elements that the rank does not hold; a transfer from another node costs more.

If one rank holds half of a matrix or more, only holders may own it, so that balancing never moves more than twice what
has to move. If half of the ranks hold parts of a matrix, any rank may own it. The same layouts give the same owners on
every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from deepspeed_muon.math.flops import orthogonalize_flops
from deepspeed_muon.math.newton_schulz import NsMethod
from deepspeed_muon.plan.balance import Job, assign_jobs
from deepspeed_muon.plan.holdings import Floats, Holdings
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.spread import Ints

__all__ = [
    "FLOPS_PER_MOVED_ELEMENT",
    "Holders",
    "assign_owners",
    "grid_blocks",
    "holders_in_holdings",
    "holders_in_layouts",
    "matrix_flops",
]

# Floating-point operations that take as long as sending one element forth and back, at 400 TFLOP/s, 100 GB/s and two
# bytes an element. It weighs moving against waiting, so only its order of magnitude matters.
FLOPS_PER_MOVED_ELEMENT = 16_000.0
# How much slower the network between nodes is than NVLink (450 against 50 GB/s on a DGX H100).
_OTHER_NODE = 9.0

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
        ranks = matrix.spread.ranks
        anywhere = matrix.replicated or len(ranks) >= everywhere
        found.append(None if anywhere else (ranks, [float(matrix.spread.held_by(rank)) for rank in ranks]))
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
    nodes: Sequence[int] | None = None,
) -> list[int]:
    """Return the owner of every matrix.

    Args:
        costs: Floating-point operations of each matrix.
        holders: The holders of each matrix.
        load: What each rank has to do already. Mutated: the new matrices are added.
        nodes: The node of every rank; ``None`` for one node.
    """
    places = np.zeros(len(load), dtype=np.int64) if nodes is None else np.asarray(nodes, dtype=np.int64)
    owners = [-1] * len(costs)
    jobs: list[Job] = []
    undecided: list[int] = []
    for index, (cost, held) in enumerate(zip(costs, holders, strict=True)):
        if held is not None and len(held[0]) == 1:
            owners[index] = held[0][0]
            load[owners[index]] += cost
        else:
            undecided.append(index)
            jobs.append(Job(cost) if held is None else _job(cost, *held, places))
    for index, owner in zip(undecided, assign_jobs(jobs, load), strict=True):
        owners[index] = owner
    return owners


def _job(cost: float, ranks: Sequence[int], held: Sequence[float], nodes: Ints) -> Job:
    """Return a matrix with few holders as a job: which ranks may own it, and what moving it to them costs."""
    owned: Floats = np.asarray(held)
    numel = float(owned.sum())
    near = np.zeros(int(nodes.max()) + 1)
    np.add.at(near, nodes[list(ranks)], owned)
    here = near[nodes[list(ranks)]]
    penalties = FLOPS_PER_MOVED_ELEMENT * ((here - owned) + _OTHER_NODE * (numel - here))
    elsewhere = None
    if 2 * max(held) < numel:
        elsewhere = FLOPS_PER_MOVED_ELEMENT * numel * (_OTHER_NODE if int(nodes.max()) else 1.0)
    return Job(cost, tuple(ranks), tuple(penalties.tolist()), elsewhere)
