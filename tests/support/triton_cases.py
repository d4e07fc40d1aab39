"""The symmetric product in Triton against the reference, in Triton's interpreter on a CPU; prints what is wrong.

A program of its own, because Triton decides at its import whether it interprets.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings, orthogonalize
from deepspeed_muon.ops import torch_operators, triton_sym
from deepspeed_muon.ops.graphs import products_of
from deepspeed_muon.ops.self_test import error_of
from deepspeed_muon.reference import newton_schulz
from tests.support.rounding import iteration_limit

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SHAPES = [(1, 64, 64), (3, 130, 72), (2, 1, 5), (1, 150, 129), (2, 64, 1)]


def mend_bf16() -> None:
    """Have the interpreter treat bf16 as a GPU does.

    numpy has no such dtype: the interpreter multiplies the bits as integers, and cuts them off instead of rounding.
    """
    builder = interpreter.InterpreterBuilder
    dot, cast = builder.create_dot, builder.cast_impl

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            cast(self, operand, tl.float32) if operand.dtype.scalar == tl.bfloat16 else operand
            for operand in (a, b)
        )
        return dot(self, a, b, *rest)

    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, dtype)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def product_faults(
    batch: int, m: int, k: int, dtype: torch.dtype, with_c: bool, strided: bool, device: str = "cpu"
) -> list[str]:
    """Say what is wrong with a product against float64."""
    a = normal(batch, m, 2 * k if strided else k, dtype=dtype).to(device)
    a = a[..., ::2] if strided else a
    a = a.mT.contiguous().mT if strided and batch == 1 else a
    c = torch_operators.sym_gemm(a, a, None, 0.5, 0.0, 0.0) if with_c else None
    alpha, beta, diag = (1.5, -0.5, 2.0) if with_c else (1.0, 0.0, 0.0)
    read = None
    if c is not None:
        # Above the diagonal there may be anything.
        read = c.tril() + torch.full_like(c, float("nan")).triu(1)
    result = triton_sym.sym_gemm(a, a, read, alpha, beta, diag)
    identity = torch.eye(m, dtype=torch.float64, device=device)
    exact = alpha * (a.double() @ a.double().mT) + diag * identity
    size = abs(alpha) * (a.double().abs() @ a.double().abs().mT) + abs(diag) * identity
    if c is not None:
        exact, size = exact + beta * c.double(), size + abs(beta) * c.double().abs()
    # One rounding to the dtype; sums of k terms and what is added in fp32.
    bound = UNIT[dtype] * (exact.abs() + 2.0**-24) + (k + 4) * 2.0**-23 * size
    faults = []
    if result.dtype != dtype or not torch.equal(result, result.mT):
        faults.append("is not symmetric to the last bit")
    if not bool(((result.double() - exact).abs() <= bound).all()):
        faults.append(
            f"differs by {float(((result.double() - exact).abs() / bound).max()):.2g} times the bound"
        )
    return [f"{batch}x{m}x{k} {dtype} c={with_c} strided={strided}: {fault}" for fault in faults]


def iteration_faults(rows: int, cols: int, method: str, dtype: torch.dtype) -> list[str]:
    coefficients = resolve_schedule("quintic")
    x = torch.randn(2, rows, cols, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([newton_schulz(matrix, coefficients) for matrix in x])
    settings = NsSettings(coefficients, method, dtype)  # type: ignore[arg-type]
    error = error_of(orthogonalize(x, settings=settings, products=products_of(triton_sym.sym_gemm)), expected)
    limit = max(iteration_limit(matrix, dtype, [method]) for matrix in x)
    return (
        []
        if error <= limit
        else [f"iteration {rows}x{cols} {method} {dtype}: error {error:.2g} of {limit:.2g}"]
    )


def main() -> None:
    mend_bf16()
    faults = []
    for (batch, m, k), dtype, with_c in itertools.product(SHAPES, UNIT, (False, True)):
        faults += product_faults(batch, m, k, dtype, with_c, False)
    for batch, dtype in itertools.product((1, 2), UNIT):
        faults += product_faults(batch, 70, 40, dtype, True, True)
    triton_sym._TILES_FROM = 1  # tiles of 128
    for dtype in UNIT:
        faults += product_faults(2, 260, 96, dtype, True, False)
    assert not triton_sym.sym_gemm(torch.empty(0, 4, 8), torch.empty(0, 4, 8)).numel()
    for method, dtype in itertools.product(("standard", "gram"), UNIT):
        faults += iteration_faults(40, 100, method, dtype)
        faults += iteration_faults(100, 40, method, dtype)
    print("\n".join(faults) or "all right")


if __name__ == "__main__":
    main()
