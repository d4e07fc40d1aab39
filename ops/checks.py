"""Compares each operator with its reference: for ``report --selftest``, and for :mod:`.gate` before a GPU is used."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch

from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings, restart_steps
from deepspeed_muon.reference import newton_schulz

from . import library, torch_operators
from .autotune import TOLERANCE, error_of
from .candidates import Replayed, candidates_for, has_kernel, problem_of, triton_products
from .torch_operators import BLOCK

Checks = list[dict[str, Any]]

_Compared = tuple[str, float, float]
"""A comparison: what follows the operator and its dtype in the name of the check, the error, and its bound."""

_HALF = (torch.float16, torch.bfloat16)

_DTYPE_PAIRS = [
    (torch.float32, torch.float16),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]
"""Dtypes of two tensors in one call; each dtype is once the first and once the second."""

_NUMEL = 36_000
"""Elements of a flat tensor."""


def cpu_checks() -> Checks:
    """Compare each operator with its reference on the CPU; build the library if necessary.

    Returns:
        One entry for each check: ``op``, ``device``, ``error``, ``bound``, ``ok``.

    Raises:
        InstallationError: If the library can be neither loaded nor built.
    """
    return _test_operators(library.load(), "cpu", _TESTS)


def cuda_checks(
    started: Callable[[str], object] = lambda component: None, skipped: Collection[str] = ()
) -> Checks:
    """Return the checks of :func:`self_test` for the current GPU: native operators, if any, Triton and CUDA graphs.

    Args:
        started: Called with each component of :data:`.gate.COMPONENTS` before it is tested, so that a log names the
            one that hangs.
        skipped: Components that are not tested.

    Returns:
        Checks as of :func:`self_test`, with ``component``, and ``raised`` where the test raised an exception.

    Raises:
        BrokenContextError: If a test left the CUDA context broken, so that nothing more can be tested in this process.
    """
    operators = library.try_load()
    failed = set(skipped)
    # 1. The components that this machine has, in the order in which they are tested.
    tests: dict[str, Callable[[], Checks]] = {}
    if operators is not None:
        tests["native"] = lambda: _test_operators(
            operators, "cuda", [name for name in _TESTS if name != _INT8]
        )
        tests["int8"] = lambda: _test_operators(operators, "cuda", [_INT8])
    if triton_products() is not None:
        tests["triton"] = _test_triton
    # After the products, so that one that is wrong or crashes costs no graphs but its own.
    tests["graphs"] = lambda: _test_graphs(operators, failed)
    # 2. Test each of them. Kernels run asynchronously, so an error may only be raised by the synchronisation.
    checks: Checks = []
    for component, test in tests.items():
        if component in skipped:
            continue
        started(component)
        try:
            results = test()
            torch.cuda.synchronize()
        except Exception as error:  # a library may raise anything on a GPU that it does not support
            message = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
            if context_is_broken():
                raise BrokenContextError(message) from error
            results = [failed_check(component, message)]
        # Graphs of a component that failed are not tested.
        if not all(check["ok"] for check in results):
            failed.add(component)
        checks += [{**check, "component": component} for check in results]
    return checks


class BrokenContextError(RuntimeError):
    """An error such as an illegal address, after which every call of CUDA in this process fails."""


def context_is_broken() -> bool:
    """Return whether CUDA reports an error of an earlier kernel, as it will from then on in this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def failed_check(component: str, why: str) -> dict[str, Any]:
    """Return the entry of a component whose test could not be finished."""
    return {**_check(component, "cuda", float("inf"), 0.0), "raised": why}


def _test_operators(operators: ModuleType, device: str, names: Iterable[str]) -> Checks:
    return [
        _check(f"{name} {dtype}{suffix}", device, error, bound)
        for name in names
        if has_kernel(operators, device, name)
        for dtype in (torch.float32, *_HALF)
        for suffix, error, bound in _TESTS[name](operators, device, dtype)
    ]


def _orthogonalize(operators: ModuleType, device: str, dtype: torch.dtype) -> Iterator[_Compared]:
    rows = resolve_schedule("quintic")  # (a, b, c) of each step
    flat = [value for row in rows for value in row]
    x = torch.randn(2, 96, 320, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([newton_schulz(matrix, rows) for matrix in x])
    variants = [""]
    if device == "cpu":
        bf16 = dtype == torch.bfloat16
        variants += ["+symmetric"]
        variants += ["+tiles"] if bf16 and operators.tiles_available() else []
        variants += ["+vectors"] if bf16 and operators.vectors_available() else []
    for method in [base + variant for base in ("standard", "gram") for variant in variants]:
        restarts = sorted(restart_steps(rows, dtype)) if method.startswith("gram") else []
        errors = []
        # Stored by rows and by columns.
        for stored, right in ((x, expected), (x.mT.contiguous(), expected.mT)):  # 96 x 320, and 320 x 96
            result = operators.orthogonalize(stored.to(device), flat, method, restarts, dtype, 1e-12)
            errors.append(error_of(result.cpu(), right))
        yield f" {method}", _largest(errors), TOLERANCE[dtype]


def _sym_gemm(operators: ModuleType, device: str, dtype: torch.dtype) -> Iterator[_Compared]:
    yield from _products(operators.sym_gemm, device, dtype)


def _test_triton() -> Checks:
    from . import triton_sym

    return [
        _check(f"sym_gemm of triton {dtype}{suffix}", "cuda", error, bound)
        for dtype in _HALF
        for suffix, error, bound in _products(triton_sym.sym_gemm, "cuda", dtype)
    ]


def product_shapes(processors: int) -> list[tuple[int, int, int]]:
    """Return batch, m and k of the products to check on a GPU with ``processors`` multiprocessors; 0 stands for a CPU.

    On a GPU every thread block must reuse its ring of buffers and its barriers. The second shape has at least three
    tiles of 128 for each of two blocks on a multiprocessor, a batch of 8, a k that is longer than twice the ring (5
    stages of 64) and no multiple of a stage, and enough tiles for Triton to use its larger ones.
    """
    small = (2, 264, 128)
    return [small, (max(8, -(-6 * processors // 55)), 1160, 712)] if processors else [small]


def _products(product: Callable[..., torch.Tensor], device: str, dtype: torch.dtype) -> Iterator[_Compared]:
    # In fp32 a GPU uses cuBLAS only.
    has_cuda_kernel = device == "cuda" and dtype in _HALF
    processors = torch.cuda.get_device_properties(device).multi_processor_count if has_cuda_kernel else 0
    for shape in product_shapes(processors):
        a = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype) / 16
        c = torch_operators.sym_gemm(a, a, None, 0.5, 0.0, 0.0)  # (batch, m, m)
        result = product(a, a, c, 1.5, -0.5, 2.0)
        error = error_of(result.double(), torch_operators.sym_gemm(a, a, c, 1.5, -0.5, 2.0).double())
        if not torch.equal(result, result.mT):
            error = float("inf")
        yield f" {'x'.join(map(str, shape))}, bitwise symmetric", error, 2 * torch.finfo(dtype).eps


def _divide_transposed(operators: ModuleType, device: str, dtype: torch.dtype) -> Iterator[_Compared]:
    # More tiles of 32 x 32 than a GPU runs at once, and incomplete ones at the edges.
    x = torch.randn(3, 1300, 520, generator=torch.Generator().manual_seed(0)).to(device)
    norms = torch.tensor([0.5, 3.0, 700.0], device=device).view(3, 1, 1)
    for matrices in (x, *map(x.to, _HALF)):
        quotients = operators.divide_transposed(matrices, norms, dtype)  # (batch, cols, rows)
        yield f" of {matrices.dtype}", _relative(quotients, (matrices.mT / norms).to(dtype)), 0.0


def _frobenius_norms(operators: ModuleType, device: str, dtype: torch.dtype) -> Iterator[_Compared]:
    x = torch.randn(3, 200, 500, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    yield "", _relative(operators.frobenius_norms(x), torch.linalg.matrix_norm(x.double())), 1e-6


def _fragments() -> torch.Tensor:
    """Return a table of fragments, ``(fragments, 6)``, of two tensors of :data:`_NUMEL` elements and two matrices.

    The fragments are aligned and unaligned, longer than a tile of the GPU's kernels, and more than one launch takes.
    What is in the first tensor of one list is in the second one of the other list, and the other way round.
    """
    fragments = [
        (0, 0, 0, 20_003, 0),
        (1, 8, 9, 10_000, 1),
        *((i % 2, 25_000 + 50 * i, 25_001 + 50 * i, 50, i // 2 % 2) for i in range(200)),
    ]  # tensor, offset, offset in the tensor of the other list, elements, matrix
    return torch.tensor([(i, begin, 1 - i, end, numel, matrix) for i, begin, end, numel, matrix in fragments])


def _flat(device: str, dtypes: Iterable[torch.dtype]) -> list[torch.Tensor]:
    """Return flat random tensors of :data:`_NUMEL` elements, the same in each call up to rounding."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(_NUMEL, generator=generator).to(device, dtype) for dtype in dtypes]


# Products with powers of two are exact, so that a fused multiply-add rounds as a product and a sum do, and all results
# are equal to the last bit. One matrix without Nesterov.
_MOMENTUM_RATES = torch.tensor([(0.75, 1.0), (0.25, 0.0)], dtype=torch.float64)
_APPLY_RATES = torch.tensor([(0.25, 0.5), (0.125, 1.0)], dtype=torch.float64)


def _momentum_pack(operators: ModuleType, device: str, dtype: torch.dtype) -> Iterator[_Compared]:
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


def _unpack_apply(operators: ModuleType, device: str, dtype: torch.dtype) -> Iterator[_Compared]:
    table, errors = _fragments(), []
    for params in _DTYPE_PAIRS:
        results = []
        for run in (operators.unpack_apply_, torch_operators.unpack_apply_):
            tensors = _flat(device, (*params, dtype, dtype))
            run(tensors[:2], tensors[2:], table, _APPLY_RATES)
            results.append(tensors[:2])
        tensors = _flat(device, (*params, dtype, dtype))
        # The same with rates on the device, which take another path.
        rates = _APPLY_RATES.to(device, torch.float32)
        operators.unpack_apply_(tensors[:2], tensors[2:], table, rates)
        errors += [_relative(*pair) for pair in zip(results[0], results[1], strict=True)]
        errors += [_relative(*pair) for pair in zip(tensors[:2], results[1], strict=True)]
    yield "", _largest(errors), 2 * torch.finfo(dtype).eps


def _largest_magnitudes(operators: ModuleType, device: str, dtype: torch.dtype) -> Iterator[_Compared]:
    tensors = _flat(device, (dtype, dtype))
    runs = operators.largest_magnitudes, torch_operators.largest_magnitudes
    magnitudes, expected = (run(tensors, _fragments()) for run in runs)
    yield "", _relative(magnitudes, expected), 0.0


def _momentum_pack_int8(operators: ModuleType, device: str, dtype: torch.dtype) -> Iterator[_Compared]:
    """Compare directions, codes and scales after two steps, as :func:`_momentum_pack`."""
    table, errors = _fragments(), []
    # The blocks of the first fragment are aligned to a GPU's vectors, those of the others are not.
    # Elements of a fragment's first block that precede it, (fragments,), and the blocks that a fragment touches. The
    # scales of the fragments of one tensor follow each other.
    phases = torch.full_like(table[:, 0], 7)
    phases[0] = 0
    counts = (phases + table[:, 4] + BLOCK - 1) // BLOCK
    blocks = torch.stack((phases, torch.zeros_like(phases)), 1)  # (fragments, 2)
    for tensor in (0, 1):
        rows = table[:, 0] == tensor
        blocks[rows, 1] = counts[rows].cumsum(0) - counts[rows]
    for grads in _DTYPE_PAIRS:
        results = []
        for run in (operators.momentum_pack_int8_, torch_operators.momentum_pack_int8_):
            codes = _flat(device, (torch.int8, torch.int8))
            scales = [torch.zeros(int(counts.sum()), device=device) for _ in codes]
            outs = _flat(device, (dtype, dtype))
            # The second step decodes what the first one has encoded.
            for _ in range(2):
                run(codes, scales, _flat(device, grads), outs, table, _MOMENTUM_RATES, blocks)
            results.append((*codes, *scales, *outs))
        errors += [_relative(*pair) for pair in zip(*results, strict=True)]
    yield "", _largest(errors), 2 * torch.finfo(dtype).eps


_INT8 = "momentum_pack_int8_"
_TESTS: dict[str, Callable[[ModuleType, str, torch.dtype], Iterator[_Compared]]] = {
    "orthogonalize": _orthogonalize,
    "sym_gemm": _sym_gemm,
    "divide_transposed": _divide_transposed,
    "frobenius_norms": _frobenius_norms,
    "momentum_pack_": _momentum_pack,
    _INT8: _momentum_pack_int8,
    "unpack_apply_": _unpack_apply,
    "largest_magnitudes": _largest_magnitudes,
}


def _test_graphs(operators: ModuleType | None, without: Collection[str] = ()) -> Checks:
    """Compare replayed CUDA graphs with direct calls, bit for bit."""
    settings = NsSettings(resolve_schedule("quintic"), "gram", torch.float16)
    inputs = [torch.randn(2, 256, 640, device="cuda") for _ in range(3)]
    problem = problem_of(inputs[0], settings)
    offered = candidates_for(problem, operators, without=without)
    candidates = {candidate.name: candidate for candidate in offered}
    checks = []
    for name in [name for name in candidates if name.endswith("+graph")]:
        replayed = candidates[name]
        assert isinstance(replayed.run, Replayed)
        replayed.run.capture(inputs[0], settings)
        results = [
            replayed.run(x, settings) for x in inputs
        ]  # a later replay must not change an earlier result
        direct = [replayed.without_graph.run(x, settings) for x in inputs]
        equal = [torch.equal(*pair) for pair in zip(results, direct, strict=True)]
        checks.append(_check(f"orthogonalize {name}", "cuda", 0.0 if all(equal) else float("inf"), 0.0))
    return checks


def _relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected.double()).norm() / expected.double().norm())


def _largest(errors: list[float]) -> float:
    """Return the largest error; NaN if one is NaN, which ``max`` would drop."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


def _check(op: str, device: str, error: float, bound: float) -> dict[str, Any]:
    op = op.replace("torch.", "")
    return {"op": op, "device": device, "error": error, "bound": bound, "ok": error <= bound}
