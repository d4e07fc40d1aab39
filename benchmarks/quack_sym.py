"""The symmetric product of quack (https://github.com/Dao-AILab/quack), with kernels for Hopper and Blackwell: a peer.

Its kernel computes the squares
of the lower triangle and stores each of them twice, once transposed. But a square on the diagonal is stored as it was
computed, where ``(i, j)`` and ``(j, i)`` are sums in different orders. The iteration needs a matrix that is symmetric
to the last bit, so :func:`sym_gemm` copies the lower half of these squares to their upper half.
"""

from __future__ import annotations

import functools

import torch
from quack.gemm_interface import gemm_symmetric
from torch import Tensor

# A multiple of the side of the squares on every GPU: 128 or 256.
_SQUARE = 256


def sym_gemm(
    a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0, diag: float = 0.0
) -> Tensor:
    """Return ``alpha a b^T + beta c + diag I``; arguments as of :func:`deepspeed_muon.ops.torch_operators.sym_gemm`.

    The products are summed in fp32. ``m`` and ``k`` must be multiples of 8, and ``c`` must be symmetric.
    """
    # It takes an integer for a tensor on the device.
    out: Tensor = gemm_symmetric(a, b.mT, C=c, alpha=float(alpha), beta=float(beta))
    if diag:
        out.diagonal(dim1=-2, dim2=-1).add_(diag)
    mirror_squares(out if out.ndim == 3 else out.unsqueeze(0))
    return out


def mirror_squares(out: Tensor) -> None:
    """Make the squares on the diagonal of contiguous matrices ``(batch, m, m)`` symmetric, in place."""
    batch, m, _ = out.shape
    count = m // _SQUARE
    # All complete squares in one view, (batch, count, 256, 256), and the smaller one that may be left at the end.
    squares = out.as_strided((batch, count, _SQUARE, _SQUARE), (m * m, _SQUARE * (m + 1), m, 1))
    last = out[:, count * _SQUARE :, count * _SQUARE :]
    for blocks in (squares, last):
        if blocks.numel():
            lower = _lower(out.device)[: blocks.shape[-2], : blocks.shape[-1]]
            blocks.copy_(torch.where(lower, blocks, blocks.mT))


@functools.cache
def _lower(device: torch.device) -> Tensor:
    return torch.ones(_SQUARE, _SQUARE, dtype=torch.bool, device=device).tril()
