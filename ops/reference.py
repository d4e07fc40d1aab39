"""The operators in plain torch calls: they run without a compiler, and the tests compare every kernel with them.

Arguments and mutations are those of the native operators of the same name (``csrc/binding.cpp``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sym_gemm(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, diag: float) -> Tensor:
    """Return ``alpha a b^T + beta c + diag I`` if that is symmetric; the result is symmetric to the last bit.

    ``a`` and ``b`` are ``(m, k)`` or ``(batch, m, k)``; ``c`` is symmetric, or ``None``.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    result = (a.to(wide) @ b.to(wide).mT).mul_(alpha)
    if c is not None:
        result += beta * c.to(wide)
    result.diagonal(dim1=-2, dim2=-1).add_(diag)
    lower = result.to(a.dtype).tril()
    return lower + lower.tril(-1).mT


def orthogonalize(
    x: Tensor,
    coefficients: Sequence[float],
    method: str,
    restarts: Sequence[int],
    dtype: torch.dtype,
    eps: float,
) -> Tensor:
    """Return the approximate polar factor of every matrix; see :func:`deepspeed_muon.math.newton_schulz.orthogonalize`.

    Args:
        x: ``(..., rows, cols)``, floating. Not mutated.
        coefficients: Flat ``(a, b, c)`` triples, one for each step.
        method: ``standard`` or ``gram``; what follows a ``+`` chooses between kernels and is ignored here.
        restarts: Numbers of completed steps after which the Gram iteration restarts.
        dtype: Dtype of the products and of the result.
        eps: Lower bound of the Frobenius norm.
    """
    steps = [tuple(coefficients[index : index + 3]) for index in range(0, len(coefficients), 3)]
    tall = x.shape[-2] > x.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    work = (x.mT if tall else x).to(wide)
    norm = torch.linalg.vector_norm(work, dim=(-2, -1), keepdim=True).clamp(min=eps)
    work = (work / norm).to(dtype)
    if method.split("+")[0] == "gram":
        work = _gram(work, steps, frozenset(restarts))
    else:
        for a, b, c in steps:
            gram = work @ work.mT
            work = a * work + (b * gram + c * gram @ gram) @ work
    return (work.mT if tall else work).contiguous()


def _gram(x: Tensor, steps: Sequence[tuple[float, ...]], restarts: frozenset[int]) -> Tensor:
    eye = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device)
    r, q = x @ x.mT, eye
    for done, (a, b, c) in enumerate(steps, start=1):
        z = b * r + c * r @ r
        q = a * q + z @ q
        if done in restarts:
            x = q @ x
            r, q = x @ x.mT, eye
        elif done < len(steps):
            rz = a * r + z @ r
            r = a * rz + z @ rz
    return q @ x


def frobenius_norms(x: Tensor) -> Tensor:
    """Return the Frobenius norm of every matrix of ``(..., rows, cols)``, fp32, without synchronisation.

    It reads ``x`` once, and copies it only if neither ``x`` nor its transpose is contiguous.
    """
    flat = (x if x.is_contiguous() else x.mT).flatten(-2)
    # torch sums in fp32 and rounds to the input's dtype: an fp32 result would take four times as long on a CPU.
    norms: Tensor = torch.linalg.vector_norm(flat, dim=-1)
    return norms.float()


def momentum_pack_(buf: Tensor, grad: Tensor, out: Tensor, momentum: float, nesterov: bool) -> None:
    """Write ``buf <- lerp(buf, grad, 1 - momentum)`` and the direction to be exchanged.

    Args:
        buf: Flat fp32 momentum. Mutated.
        grad: Flat fp32 gradient. Not mutated.
        out: Flat fp32, bf16 or fp16; receives ``lerp(grad, buf, momentum)`` with Nesterov, else ``buf``. Mutated.
        momentum: Decay in [0, 1).
        nesterov: Whether to blend the gradient in once more.
    """
    buf.lerp_(grad, 1.0 - momentum)
    out.copy_(torch.lerp(grad, buf, momentum) if nesterov else buf)


def unpack_apply_(param: Tensor, update: Tensor, lr_scale: float, decay: float) -> None:
    """Write ``param <- decay * param - lr_scale * update``.

    Args:
        param: Flat fp32. Mutated.
        update: Flat fp32, bf16 or fp16.
        lr_scale: Learning rate times the scale of the matrix.
        decay: One minus learning rate times weight decay.
    """
    if decay != 1.0:
        param.mul_(decay)
    param.add_(update, alpha=-lr_scale)
