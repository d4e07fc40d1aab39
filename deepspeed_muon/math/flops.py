"""Floating-point operations of the matrix products of one orthogonalisation, counted from what the code multiplies.

A product of ``a x b`` with ``b x c`` counts ``2 a b c``. Pointwise work is left out, and so is what a kernel saves that
computes one half of a symmetric product only: these are the operations of :mod:`deepspeed_muon.math.newton_schulz`.
"""

from __future__ import annotations

import torch

from deepspeed_muon.math.newton_schulz import NsMethod, restart_steps, runs_gram

__all__ = ["iteration_flops", "orthogonalize_flops"]


def orthogonalize_flops(
    rows: int, cols: int, *, steps: int = 5, method: NsMethod = "standard", dtype: torch.dtype = torch.float32
) -> float:
    """Return the floating-point operations of orthogonalising one ``rows x cols`` matrix.

    With ``m`` the short and ``n`` the long side, a standard step is ``X X^T`` (``2 m^2 n``), a square of the Gram
    matrix (``2 m^3``) and a product with ``X`` (``2 m^2 n``). The Gram iteration has up to four ``m^3`` products in a
    step, and two with ``X`` for the iteration itself and for every restart, whose number the dtype decides.

    Args:
        rows: Rows of the matrix.
        cols: Columns of the matrix.
        steps: Newton-Schulz steps.
        method: The configuration's ``ns_method``; ``gram`` runs for elongated matrices only.
        dtype: The dtype of the products.
    """
    with_matrix, with_gram, _ = iteration_flops(rows, cols, steps=steps, method=method, dtype=dtype)
    return with_matrix + with_gram


def iteration_flops(
    rows: int, cols: int, *, steps: int, method: NsMethod, dtype: torch.dtype
) -> tuple[float, float, int]:
    """Return the operations of :func:`orthogonalize_flops` by what is multiplied.

    Args:
        rows: Rows of the matrix.
        cols: Columns of the matrix.
        steps: Newton-Schulz steps.
        method: The configuration's ``ns_method``.
        dtype: The dtype of the products, which decides the number of restarts of the Gram iteration.

    Returns:
        Operations of products with the matrix itself, those of products of Gram-sized matrices, and how often the Gram
        matrix is computed from the matrix.
    """
    short, long = min(rows, cols), max(rows, cols)
    squares = passes = steps
    if runs_gram(short, long, method):
        restarts = restart_steps(steps, dtype)
        squares, fresh = 0, True
        for done in range(1, steps + 1):
            squares += 1 if fresh else 2
            fresh = done in restarts
            if done < steps and not fresh:
                squares += 2
        passes = 1 + len(restarts)
    return passes * 4.0 * short * short * long, squares * 2.0 * short**3, passes
