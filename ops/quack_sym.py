"""The symmetric product of quack (``quack-kernels``), where that is installed; it is no dependency.

Its kernel computes squares on and below the diagonal and writes those below it twice. Squares on the diagonal are not
mirrored inside, and tensor cores may add their two halves in another order: iterated, such a difference grows without a
bound. So they are mirrored here, which touches ``256 / m`` of the result.
"""

from __future__ import annotations

from quack.gemm_interface import gemm_symmetric
from torch import Tensor

# Its squares are as large as the tiles of a cluster: 128 or 256.
_SQUARE = 256


def sym_gemm(
    a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0, diag: float = 0.0
) -> Tensor:
    """Return ``alpha a b^T + beta c + diag I``; arguments as of :func:`deepspeed_muon.ops.reference.sym_gemm`."""
    out = a.new_empty((*a.shape[:-1], a.shape[-2]))
    gemm_symmetric(a, b.mT, C=c, out=out, alpha=float(alpha), beta=float(beta) if c is not None else 1.0)
    if diag:
        out.diagonal(dim1=-2, dim2=-1).add_(diag)
    mirror_diagonal(out)
    return out


def mirror_diagonal(x: Tensor) -> None:
    """Mirror the lower triangle of every square on the diagonal of contiguous ``(..., m, m)``, in place."""
    m = x.shape[-1]
    whole = m // _SQUARE
    if whole:
        steps = (*x.stride()[:-2], _SQUARE * (m + 1), m, 1)
        _mirror(x.as_strided((*x.shape[:-2], whole, _SQUARE, _SQUARE), steps, x.storage_offset()))
    if m % _SQUARE:
        _mirror(x[..., whole * _SQUARE :, whole * _SQUARE :])


def _mirror(squares: Tensor) -> None:
    lower = squares.tril()
    squares.copy_(lower + lower.tril(-1).mT)
