"""Compares the native operators and Triton's product with references, before a process uses them on a GPU.

Each component has its own verdict. Inputs, bounds and order are fixed, so that the verdict is the same in every run;
nothing is stored. It takes a second or two per process. A component that fails is left out with one warning. Operators
of a CPU are trusted, as every run of this project's tests covers them; the report tests these as well.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from deepspeed_muon.errors import InstallationError
from deepspeed_muon.logs import warn_on_each_machine
from deepspeed_muon.math.coefficients import SMALLEST_NORM, resolve_schedule
from deepspeed_muon.math.newton_schulz import restart_steps
from deepspeed_muon.reference import newton_schulz

from . import builder, torch_operators
from .graphs import triton_products
from .torch_operators import BLOCK, Column

Component = Literal["flat passes", "symmetric product", "Triton's product"]
Checks = list[dict[str, Any]]
"""One entry for each comparison: ``op``, ``device``, ``error``, ``bound``, ``ok``."""

_Compared = tuple[str, float, float]
"""The rest of the check's name, after the operator and its dtype; the error, and its bound."""

# Bound of the relative error against float64, for any spectrum, by the dtype of the products. Low-rank and
# ill-conditioned matrices come close to it; a Gaussian one has a tenth of it.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-2, torch.bfloat16: 3e-1}

_HALF = (torch.float16, torch.bfloat16)

_DTYPE_PAIRS = [
    (torch.float32, torch.float16),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]
"""The dtypes of two tensors in one call; each is the first once, and the second once."""

_NUMEL = 36_000
"""Elements of a flat tensor."""


def failure(component: Component, device: torch.device) -> str:
    """Return why a component must not run on a device; an empty text if it may.

    Raises:
        InstallationError: If it left the CUDA context broken (an illegal address), so that nothing can run any more.
        torch.OutOfMemoryError: If the device has no memory left, which says nothing about the component.
    """
    return _failure(component, index_of(device)) if device.type == "cuda" else ""


def index_of(device: torch.device) -> int:
    """Return the index of a GPU; that of the current one if the device has none."""
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _failure(component: Component, index: int) -> str:
    try:
        wrong = [check for check in _checks_of(component, torch.device("cuda", index)) if not check["ok"]]
        torch.cuda.synchronize(index)  # kernels run asynchronously: an error may only be raised here
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a library may raise anything on a GPU that it does not support
        why = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        _require_context(component, index, why)
    else:
        why = "; ".join(
            f"{check['op']}: error {check['error']:.2g}, bound {check['bound']:.2g}" for check in wrong[:3]
        )
    if why:
        warn_on_each_machine(
            "deepspeed_muon: the self-test of the %s failed on this GPU, so torch's code runs instead: %s. "
            "`python -m deepspeed_muon report --selftest` runs it again. Please report this.",
            component,
            why,
        )
    return why


def _require_context(component: Component, index: int, why: str) -> None:
    try:
        torch.cuda.synchronize(index)
    except RuntimeError as error:
        raise InstallationError(
            f"the self-test of the {component} broke the CUDA context of this process ({why}), which can run nothing "
            f"any more. Use ns_backend 'torch', and please report this"
        ) from error


def checks() -> Checks:
    """Compare everything that this machine has with its reference; build the library if necessary.

    Raises:
        InstallationError: If the library can be neither loaded nor built.
    """
    builder.load()
    results = _checks_of("flat passes", torch.device("cpu"))
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        for component in ("flat passes", "symmetric product", "Triton's product"):
            try:
                results += _checks_of(component, device)
            except Exception as error:  # as in _failure
                results.append(_check(f"{component}: {error}".splitlines()[0], "cuda", float("inf"), 0.0))
    return results


def _checks_of(component: Component, device: torch.device) -> Checks:
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    # No random numbers are drawn: those of the training stay as they are.
    with current, torch.autocast(device.type, enabled=False):
        if component == "Triton's product":
            return _triton() if triton_products() is not None else []
        operators = builder.try_load()
        return [
            _check(f"{name} {dtype}{suffix}", device.type, error, bound)
            for name, test in TESTS[component].items()
            if builder.has_kernel(operators, device.type, name)
            for dtype in (torch.float32, *_HALF)
            for suffix, error, bound in test(operators, device.type, dtype)
        ]


def _normal(*shape: int, generator: torch.Generator | None = None) -> Tensor:
    generator = generator or torch.Generator("cpu").manual_seed(0)
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def _orthogonalize(operators: Any, device: str, dtype: torch.dtype) -> Iterator[_Compared]:
    if dtype not in _HALF:  # in fp32 a GPU uses cuBLAS only, in TF32 if the program allows it
        return
    rows = resolve_schedule("quintic")  # (a, b, c) of each step
    flat = [value for row in rows for value in row]
    x = _normal(2, 96, 320)
    expected = torch.stack([newton_schulz(matrix, rows) for matrix in x])
    for method in ("standard", "gram"):
        restarts = sorted(restart_steps(rows, dtype)) if method == "gram" else []
        errors = []
        for stored, right in ((x, expected), (x.mT.contiguous(), expected.mT)):  # 96 x 320, and 320 x 96
            result = operators.orthogonalize(stored.to(device), flat, method, restarts, dtype, SMALLEST_NORM)
            errors.append(error_of(result.cpu(), right))
        yield f" {method}", _largest(errors), TOLERANCE[dtype]


def _sym_gemm(operators: Any, device: str, dtype: torch.dtype) -> Iterator[_Compared]:
    if dtype in _HALF:
        yield from products(operators.sym_gemm, device, dtype)


def _triton() -> Checks:
    from . import triton_sym

    return [
        _check(f"sym_gemm of triton {dtype}{suffix}", "cuda", error, bound)
        for dtype in _HALF
        for suffix, error, bound in products(triton_sym.sym_gemm, "cuda", dtype)
    ]


def product_shapes(processors: int) -> list[tuple[int, int, int]]:
    """Return batch, m and k of the products to check on a GPU with ``processors`` multiprocessors; 0 stands for a CPU.

    On a GPU every thread block must reuse its ring of buffers and its barriers. The second shape has at least three
    tiles of 128 for each of two blocks on a multiprocessor, a batch of 8, a k that is longer than twice the ring (5
    stages of 64) and no multiple of a stage, and enough tiles for Triton to use its larger ones.
    """
    small = (2, 264, 128)
    return [small, (max(8, -(-6 * processors // 55)), 1160, 712)] if processors else [small]


def products(product: Callable[..., Tensor], device: str, dtype: torch.dtype) -> Iterator[_Compared]:
    """Compare symmetric products, which must be symmetric to the last bit."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device == "cuda" else 0
    for shape in product_shapes(processors):
        a = _normal(*shape).to(device, dtype) / 16
        c = torch_operators.sym_gemm(a, a, None, 0.5, 0.0, 0.0)  # (batch, m, m)
        result = product(a, a, c, 1.5, -0.5, 2.0)
        error = error_of(result.double(), torch_operators.sym_gemm(a, a, c, 1.5, -0.5, 2.0).double())
        if not torch.equal(result, result.mT):
            error = float("inf")
        yield f" {'x'.join(map(str, shape))}, bitwise symmetric", error, 2 * torch.finfo(dtype).eps


def _divide_transposed(operators: Any, device: str, dtype: torch.dtype) -> Iterator[_Compared]:
    # More tiles of 32 x 32 than a GPU runs at once, and incomplete ones at the edges.
    x = _normal(3, 1300, 520).to(device)
    norms = torch.tensor([0.5, 3.0, 700.0], dtype=torch.float32, device=device).view(3, 1, 1)
    for matrices in (x, *map(x.to, _HALF)):
        quotients = operators.divide_transposed(matrices, norms, dtype)  # (batch, cols, rows)
        yield f" of {matrices.dtype}", _relative(quotients, (matrices.mT / norms).to(dtype)), 0.0


def _fragments() -> Tensor:
    """Return a table of fragments, ``(fragments, 6)``, of two tensors of :data:`_NUMEL` elements and two matrices.

    The fragments are aligned and unaligned, longer than a tile of the GPU's kernels, and more than one launch takes.
    What is in the first tensor of one list is in the second one of the other list, and the other way round.
    """
    fragments = [
        (0, 0, 0, 20_003, 0),
        (1, 8, 9, 10_000, 1),
        *((i % 2, 25_000 + 50 * i, 25_001 + 50 * i, 50, i // 2 % 2) for i in range(200)),
    ]  # tensor, offset, offset in the tensor of the other list, elements, matrix
    rows = [(i, begin, 1 - i, end, numel, matrix) for i, begin, end, numel, matrix in fragments]
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def _flat(device: str, dtypes: Iterable[torch.dtype]) -> list[Tensor]:
    """Return flat random tensors of :data:`_NUMEL` elements, the same in each call up to rounding."""
    generator = torch.Generator().manual_seed(0)
    return [_normal(_NUMEL, generator=generator).to(device, dtype) for dtype in dtypes]


# Products with powers of two are exact, so that a fused multiply-add rounds as a product and a sum do, and all results
# are equal to the last bit. One matrix without Nesterov.
_MOMENTUM_RATES = torch.tensor([(0.75, 1.0), (0.25, 0.0)], dtype=torch.float64, device="cpu")
_APPLY_RATES = torch.tensor([(0.25, 0.5), (0.125, 1.0)], dtype=torch.float64, device="cpu")


def _momentum_pack(operators: Any, device: str, dtype: torch.dtype) -> Iterator[_Compared]:
    """Each call has two combinations of the dtypes of momentum and gradient; together the calls have all of them."""
    table, errors = _fragments(), []
    for bufs, grads in itertools.product(_DTYPE_PAIRS, repeat=2):
        results = []
        for run in (operators.momentum_pack_, torch_operators.momentum_pack_):
            tensors = _flat(device, (*bufs, *grads))
            outs = [tensor.to(dtype) for tensor in _flat(device, bufs)]
            run(tensors[:2], tensors[2:], outs, table, _MOMENTUM_RATES)
            results.append((*tensors[:2], *outs))
        errors += [_relative(*pair) for pair in zip(*results, strict=True)]
    yield "", _largest(errors), 2 * torch.finfo(dtype).eps


def _unpack_apply(operators: Any, device: str, dtype: torch.dtype) -> Iterator[_Compared]:
    table, errors = _fragments(), []
    for params in _DTYPE_PAIRS:
        results = []
        for run in (operators.unpack_apply_, torch_operators.unpack_apply_):
            tensors = _flat(device, (*params, dtype, dtype))
            run(tensors[:2], tensors[2:], table, _APPLY_RATES)
            results.append(tensors[:2])
        errors += [_relative(*pair) for pair in zip(*results, strict=True)]
    yield "", _largest(errors), 2 * torch.finfo(dtype).eps


def _momentum_pack_int8(operators: Any, device: str, dtype: torch.dtype) -> Iterator[_Compared]:
    """Compare directions, codes and scales after two steps, as :func:`_momentum_pack`."""
    table, errors = _fragments(), []
    # Elements of a fragment's first block that precede it, (fragments,), and the blocks that it touches. Only the first
    # fragment's blocks are aligned to a GPU's vectors. The scales of the fragments of one tensor follow each other.
    phases = torch.full_like(table[:, Column.NUMEL], 7)
    phases[0] = 0
    counts = (phases + table[:, Column.NUMEL] + BLOCK - 1) // BLOCK
    blocks = torch.stack((phases, torch.zeros_like(phases)), 1)  # (fragments, 2)
    for tensor in (0, 1):
        rows = table[:, Column.PARTITION] == tensor
        blocks[rows, 1] = counts[rows].cumsum(0) - counts[rows]
    for grads in _DTYPE_PAIRS:
        results = []
        for run in (operators.momentum_pack_int8_, torch_operators.momentum_pack_int8_):
            codes = _flat(device, (torch.int8, torch.int8))
            scales = [torch.zeros(int(counts.sum()), dtype=torch.float32, device=device) for _ in codes]
            outs = _flat(device, (dtype, dtype))
            for _ in range(2):  # the second step decodes what the first one has encoded
                run(codes, scales, _flat(device, grads), outs, table, _MOMENTUM_RATES, blocks)
            results.append((*codes, *scales, *outs))
        errors += [_relative(*pair) for pair in zip(*results, strict=True)]
    yield "", _largest(errors), 2 * torch.finfo(dtype).eps


TESTS: dict[Component, dict[str, Callable[[Any, str, torch.dtype], Iterator[_Compared]]]] = {
    "symmetric product": {
        "sym_gemm": _sym_gemm,
        "divide_transposed": _divide_transposed,
        "orthogonalize": _orthogonalize,
    },
    "flat passes": {
        "momentum_pack_": _momentum_pack,
        "momentum_pack_int8_": _momentum_pack_int8,
        "unpack_apply_": _unpack_apply,
    },
}
"""The operators of a component."""


def error_of(result: Tensor, expected: Tensor) -> float:
    """Return the largest relative error (Frobenius norm) of the matrices of a batch ``(..., rows, cols)``."""
    difference = torch.linalg.vector_norm(result.to(expected) - expected, dim=(-2, -1))
    return float((difference / torch.linalg.vector_norm(expected, dim=(-2, -1)).clamp(min=1e-30)).max())


def _relative(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected.double()).norm() / expected.double().norm())


def _largest(errors: list[float]) -> float:
    """Return the largest error; NaN if one is NaN, which ``max`` would drop."""
    return float(torch.tensor(errors, dtype=torch.float64, device="cpu").max())


def _check(op: str, device: str, error: float, bound: float) -> dict[str, Any]:
    return {
        "op": op.replace("torch.", ""),
        "device": device,
        "error": error,
        "bound": bound,
        "ok": error <= bound,
    }
