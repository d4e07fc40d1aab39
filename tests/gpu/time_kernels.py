"""Times the CUDA kernels against cuBLAS, a compiled standard iteration and a plain copy; prints a table, writes JSON.

    python -m tests.gpu.time_kernels LIBRARY OUTPUT.json

Times are medians of CUDA-event timings, each over a rotation of inputs larger than the L2 where they fit; random data,
because zeros run faster. "computed" counts the tiles on and below the diagonal, which is what the kernel works off.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.cuda_library import OK, Kernels, gram, product_of

TILE = 128
L2_BYTES = 60 << 20


def milliseconds(call: Callable[[int], Any], *, repeats: int = 30, inner: int = 1) -> float:
    """Median time of ``call(i)``; ``i`` counts up, for rotating inputs."""
    for i in range(3):
        call(i)
    times = []
    for i in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for j in range(inner):
            call(i * inner + j)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / inner)
    return statistics.median(times)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def time_sym_gemm(kernels: Kernels, kernel: str, batch: int, m: int, k: int, with_c: bool) -> dict[str, Any]:
    dtype = torch.bfloat16
    sets = max(2, min(8, 1 + L2_BYTES // (batch * m * k * 2)))
    a = [random(batch, m, k, dtype=dtype) for _ in range(sets)]
    d = torch.empty(batch, m, m, dtype=dtype, device="cuda")
    c = torch.empty_like(d)
    assert kernels.sym_gemm(kernel, a[0], a[0], None, c) == OK
    added, beta = (c, 0.5) if with_c else (None, 0.0)

    def ours(i: int) -> None:
        assert kernels.sym_gemm(kernel, a[i % sets], a[i % sets], added, d, beta=beta) == OK

    def cublas(i: int) -> None:
        x = a[i % sets]
        if with_c:
            torch.baddbmm(c, x, x.mT, beta=beta, out=d)
        else:
            torch.bmm(x, x.mT, out=d)

    mine, theirs = milliseconds(ours, inner=4), milliseconds(cublas, inner=4)
    rows = -(-m // TILE)
    computed = batch * rows * (rows + 1) // 2 * 2 * TILE * TILE * k
    return {
        "what": "sym_gemm",
        "kernel": kernel,
        "shape": f"{batch} x {m} x {k}" + (" + c" if with_c else ""),
        "ms": mine,
        "cublas_ms": theirs,
        "speedup": theirs / mine,
        "tflops_computed": computed / mine * 1e-9,
        "cublas_tflops": batch * 2 * m * m * k / theirs * 1e-9,
    }


def standard(x: Tensor) -> Tensor:
    """Five quintic steps in bf16, the usual implementation, to be compiled."""
    x = x.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x


def standard_symmetric(x: Tensor, product: Callable[..., Tensor]) -> Tensor:
    """The same with both symmetric products through our kernel, in fp16."""
    x = (x / x.norm(dim=(-2, -1), keepdim=True)).half()
    for _ in range(5):
        square = product(x, x)
        x = torch.baddbmm(x, product(square, square, square, alpha=2.0315, beta=-4.775), x, beta=3.4445)
    return x


def graphed(call: Callable[[], Tensor]) -> Callable[[int], None]:
    """Return a replay of ``call`` as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return lambda _: graph.replay()


def time_orthogonalize(kernels: Kernels, kernel: str, batch: int, m: int, ratio: float) -> dict[str, Any]:
    n = round(m * ratio / 8) * 8
    x = random(batch, m, n, dtype=torch.float32)
    product = product_of(kernels, kernel)
    compiled = torch.compile(standard)
    theirs = milliseconds(lambda _: compiled(x), repeats=15)
    symmetric = milliseconds(graphed(lambda: standard_symmetric(x, product)), repeats=15)
    with_gram = milliseconds(graphed(lambda: gram(x, torch.float16, product)), repeats=15)
    mine = min(symmetric, with_gram)
    return {
        "what": "orthogonalize",
        "kernel": kernel,
        "shape": f"{batch} x {m} x {n}",
        "ms": mine,
        "method": "gram" if with_gram < symmetric else "standard",
        "compiled_standard_ms": theirs,
        "speedup": theirs / mine,
    }


def time_flat(kernels: Kernels, n: int) -> list[dict[str, Any]]:
    momentum, grad = (random(n, dtype=torch.float32) for _ in range(2))
    wire = torch.empty(n, dtype=torch.bfloat16, device="cuda")
    copy = milliseconds(lambda _: momentum.copy_(grad))
    bandwidth = 8 * n / copy * 1e-9
    pack = milliseconds(lambda _: kernels.momentum_pack([((momentum, grad, wire), 0.95)], nesterov=True))
    apply = milliseconds(lambda _: kernels.unpack_apply([((momentum, wire), 0.998)], lr_scale=0.02))
    return [
        {"what": name, "shape": str(n), "ms": ms, "tb_s": size * n / ms * 1e-9, "copy_tb_s": bandwidth}
        for name, ms, size in (("momentum_pack", pack, 14), ("unpack_apply", apply, 10))
    ]


def main(library: str, output: str) -> None:
    kernels = Kernels(Path(library))
    results: list[dict[str, Any]] = []

    def note(result: dict[str, Any]) -> None:
        results.append(result)
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}, flush=True)
        about = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "results": results,
        }
        Path(output).write_text(json.dumps(about, indent=1) + "\n")

    for kernel in ("sm90_wide", "sm90", "sm80"):
        if kernels.available(kernel) != OK:
            print(f"{kernel}: {kernels.name(kernels.available(kernel))}")
            continue
        shapes = [(1, 1024, 1024), (1, 2048, 2048), (8, 2048, 2048), (1, 4096, 4096), (1, 8192, 8192)]
        shapes += [(1, 4096, 16384), (8, 1024, 4096)] if kernel != "sm80" else []
        for shape in shapes:
            for with_c in (False, True):
                note(time_sym_gemm(kernels, kernel, *shape, with_c))
    for result in time_flat(kernels, 1 << 28):
        note(result)
    best = "sm90_wide" if kernels.available("sm90_wide") == OK else "sm80"
    for batch, m in ((1, 4096), (8, 2048), (1, 2048), (8, 1024)):
        for ratio in (1, 8 / 3, 4, 8):
            note(time_orthogonalize(kernels, best, batch, m, ratio))


if __name__ == "__main__":
    main(*sys.argv[1:])
