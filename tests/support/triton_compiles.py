"""Compile Triton's symmetric product for every architecture, to machine code, without a GPU; prints what it is made of.

A program of its own: in the tests' process Triton may be the interpreter.
"""

from __future__ import annotations

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_for

from deepspeed_muon.ops.triton_sym import _DEPTH, _sym_gemm

PRODUCTS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
"""Compute capability and the instruction of its tensor cores."""


def compiled_for(capability: int, tile: int, dtype: str) -> str:
    """Return the PTX; matrices are contiguous and aligned, as in the iteration."""
    pointers = ("a", "b", "c", "out")
    constants = {"HAS_C": True, "TILE": tile, "DEPTH": _DEPTH, "a_col": 1, "b_col": 1, "c_col": 1}
    kinds = dict.fromkeys(pointers, f"*{dtype}") | dict.fromkeys(("alpha", "beta", "diag"), "fp32")
    kinds |= dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in _sym_gemm.arg_names}
    aligned = [*pointers, *(name for name, kind in signature.items() if kind == "i32")]
    attributes = {(_sym_gemm.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    built = compile_for(
        ASTSource(_sym_gemm, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 8 if tile == 128 else 4, "num_stages": 3},
    )
    return str(built.asm["ptx"])


def main() -> None:
    for capability, product in PRODUCTS.items():
        for tile, dtype in ((64, "bf16"), (128, "fp16")):
            count = compiled_for(capability, tile, dtype).count(product)
            print(f"sm_{capability} {tile} {dtype}: {count} x {product}")
            assert count, "no tensor cores"
    print("all right")


if __name__ == "__main__":
    main()
