"""The symmetric product in Triton: for machines without nvcc, and for GPUs that the CUDA sources have no kernel for.

Triton comes with every CUDA build of torch. A program of the kernel computes one tile of the lower triangle and stores
it twice, once transposed. So the result is symmetric to the last bit, and half of the work is saved.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Tiles of 128 x 128 are used from this many on, which fill the multiprocessors of a GPU; below, tiles of 64 x 64.
_TILES_FROM = 128
_DEPTH = 64


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _sym_gemm(  # type: ignore[no-untyped-def]
    a, b, c, out, m, k,
    a_batch, a_row, a_col, b_batch, b_row, b_col, c_batch, c_row, c_col,
    alpha, beta, diag,
    HAS_C: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # Tiles of the lower triangle are numbered row by row. The rounded root is off by one at most.
    row = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > tile, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    col = tile - row * (row + 1) // 2
    rows = row * TILE + tl.arange(0, TILE)
    cols = col * TILE + tl.arange(0, TILE)
    inside_rows, inside_cols = rows < m, cols < m
    # 64-bit offsets: a batch of matrices may have more than 2^31 elements.
    rows_int64, cols_int64 = rows.to(tl.int64), cols.to(tl.int64)
    # Pointers to the rows of both operands: (TILE, 1) and (1, TILE).
    left = a + batch * a_batch + rows_int64[:, None] * a_row
    right = b + batch * b_batch + cols_int64[None, :] * b_row
    sums = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, k, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        # (TILE, DEPTH) of a and (DEPTH, TILE) of b^T; beyond the edges they are 0, which adds nothing.
        x = tl.load(
            left + depth[None, :] * a_col, mask=inside_rows[:, None] & (depth[None, :] < k), other=0.0
        )
        y = tl.load(
            right + depth[:, None] * b_col, mask=inside_cols[None, :] & (depth[:, None] < k), other=0.0
        )
        sums = tl.dot(x, y, sums)
    sums = sums * alpha
    lower = rows[:, None] >= cols[None, :]
    if HAS_C:
        c_tile = c + batch * c_batch + rows_int64[:, None] * c_row + cols_int64[None, :] * c_col
        valid = inside_rows[:, None] & inside_cols[None, :] & lower
        sums += beta * tl.load(c_tile, mask=valid, other=0.0).to(tl.float32)
    sums = tl.where(rows[:, None] == cols[None, :], sums + diag, sums)
    # Rounded before it is mirrored, so that both halves get the same bits.
    value = sums.to(out.dtype.element_ty)
    mirrored = tl.trans(value)
    value = tl.where(lower, value, mirrored)  # differs only in tiles on the diagonal
    target = out + batch * m * m
    both = inside_rows[:, None] & inside_cols[None, :]
    tl.store(target + rows_int64[:, None] * m + cols_int64[None, :], value, mask=both)
    if row != col:
        both = inside_cols[:, None] & inside_rows[None, :]
        tl.store(target + cols_int64[:, None] * m + rows_int64[None, :], mirrored, mask=both)


def sym_gemm(
    a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0, diag: float = 0.0
) -> Tensor:
    """Return ``alpha a b^T + beta c + diag I``; arguments as of :func:`deepspeed_muon.ops.torch_operators.sym_gemm`.

    The products are summed in fp32. Of ``c`` only the lower triangle is read.
    """
    if a.ndim == 2:
        c = None if c is None else c.unsqueeze(0)
        return sym_gemm(a.unsqueeze(0), b.unsqueeze(0), c, alpha, beta, diag).squeeze(0)
    batch, m, k = a.shape
    out = a.new_empty(batch, m, m)  # (batch, m, m) in the dtype of a
    if not out.numel():
        return out
    size = 128 if batch * _triangle(-(-m // 128)) >= _TILES_FROM else 64
    c_or_a = a if c is None else c  # without c the kernel needs some pointer, which it does not read
    _sym_gemm[(_triangle(-(-m // size)), batch)](
        a, b, c_or_a, out, m, k, *a.stride(), *b.stride(), *c_or_a.stride(), alpha, beta, diag,
        HAS_C=c is not None, TILE=size, DEPTH=_DEPTH, num_warps=8 if size == 128 else 4, num_stages=3,
    )  # fmt: skip
    return out


def _triangle(side: int) -> int:
    return side * (side + 1) // 2
