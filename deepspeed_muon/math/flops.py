"""Floating-point operations of one orthogonalisation: the matrix products of :mod:`.newton_schulz`.

A product of ``a x b`` with ``b x c`` counts ``2 a b c``. Pointwise work does not count. A symmetric product counts in
full, although some kernels compute only half of it.
"""

from __future__ import annotations

import functools

import torch

from deepspeed_muon.math.newton_schulz import NsMethod, restart_steps, runs_gram

__all__ = ["orthogonalize_flops"]


@functools.lru_cache(maxsize=4096)
def orthogonalize_flops(
    rows: int, cols: int, *, steps: int = 5, method: NsMethod = "standard", dtype: torch.dtype = torch.float32
) -> float:
    """Return the floating-point operations of orthogonalising one ``rows x cols`` matrix.

    With ``m`` the short and ``n`` the long side, a standard step is ``X X^T`` (``2 m^2 n``), a square of the Gram
    matrix (``2 m^3``) and a product with ``X`` (``2 m^2 n``). The Gram iteration has up to four ``m^3`` products in a
    step. It multiplies with ``X`` twice, and twice more for every restart; the dtype decides how often it restarts.
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
    return passes * 4.0 * short * short * long + squares * 2.0 * short**3
