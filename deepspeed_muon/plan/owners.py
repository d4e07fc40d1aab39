"""Which rank orthogonalises which matrix.

A matrix that lies whole on one rank is orthogonalised there and never moves. Of a matrix that several ranks share,
the owner is the rank on which it is finished first: the time that the rank already needs, plus the iteration, plus
the transfer of what it does not hold. Deterministic: the same layouts give the same owners on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_muon.plan.layout import MatrixLayout

__all__ = ["assign_owners", "newton_schulz_flops"]

# Floating-point operations that take as long as sending one element forth and back: 400 TFLOP/s against 100 GB/s at
# two bytes an element. It decides ties between ranks, so only its order of magnitude matters.
_FLOPS_PER_MOVED_ELEMENT = 16_000.0


def newton_schulz_flops(rows: int, cols: int, steps: int = 5) -> float:
    """Return the floating-point operations of one standard iteration, ``steps (4 m^2 n + 2 m^3)``, ``m <= n``."""
    short, long = min(rows, cols), max(rows, cols)
    return steps * (4.0 * short * short * long + 2.0 * short**3)


def matrix_flops(matrix: MatrixLayout, steps: int = 5) -> float:
    """Return the floating-point operations of orthogonalising all blocks of ``matrix``."""
    return matrix.heads * newton_schulz_flops(*matrix.block_shape, steps)


def assign_owners(
    matrices: Sequence[MatrixLayout],
    world_size: int,
    *,
    steps: int = 5,
    load: list[float] | None = None,
) -> tuple[int, ...]:
    """Assign every matrix to one rank.

    Args:
        matrices: All matrices that are exchanged together.
        world_size: Ranks of the data-parallel group.
        steps: Newton-Schulz steps, which scale the cost of computing against that of moving.
        load: Cost that each rank already carries from other partitions; updated in place. ``None`` starts at zero.

    Returns:
        One rank per matrix, in order.
    """
    load = [0.0] * world_size if load is None else load
    owners = [-1] * len(matrices)
    for index, matrix in enumerate(matrices):
        whole = matrix.whole_on()
        if whole is not None:
            owners[index] = whole
            load[whole] += matrix_flops(matrix, steps)
    shared = [index for index, owner in enumerate(owners) if owner < 0]
    # Longest first: the classical greedy rule, within 4/3 of the best balance.
    for index in sorted(shared, key=lambda i: (-matrix_flops(matrices[i], steps), i)):
        matrix = matrices[index]
        flops = matrix_flops(matrix, steps)
        candidates = sorted({fragment.rank for fragment in matrix.fragments})

        def finished(rank: int, matrix: MatrixLayout = matrix, flops: float = flops) -> tuple[float, int]:
            missing = matrix.numel - matrix.held_by(rank)
            return load[rank] + flops + _FLOPS_PER_MOVED_ELEMENT * missing, rank

        owner = min(candidates, key=finished)
        owners[index] = owner
        load[owner] += flops
    return tuple(owners)
