"""The ways to run one orthogonalisation: torch's code and the native operator, in the forms that may be fastest.

All evaluate the same polynomial in the same dtype. They differ in the order of the products (standard, Gram) and in
the kernels, and so in rounding and time.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.logs import logger
from deepspeed_muon.math.newton_schulz import NsSettings, Products, orthogonalize, restart_steps

from .graphs import Replayed

__all__ = [
    "BATCH_NUMEL",
    "Candidate",
    "Problem",
    "candidates_for",
    "has_kernel",
    "other_products",
    "problem_of",
]

# Elements that a batch may stack: stacking copies them, and the iteration needs three times as much again.
BATCH_NUMEL = 1 << 25

# Below this long side / short side Gram does more work than the standard iteration with the same kernels: 36 against
# 30 m^3 at ratio 1, 49 against 63 at 2.67. It is tried from a little below the crossing on.
_GRAM_TRIED_FROM = 1.3

# Up to this many FLOPs a CUDA graph is tried: 1.5 ms of an H200, about what the launches of an iteration take on the
# host. Above, the chip is the slower one and a graph would only hold memory.
_GRAPH_UP_TO = 1e12

# The symmetric CUDA kernels need multiples of this for m and k (include/muon_cuda.h); cuBLAS takes all others.
_CUDA_MULTIPLE = 8

# Squares of 256 are tried from this short side on: below, too few of them are at work at once.
_WIDE_FROM = 1024

# Triangles in blocks need at least two blocks of 256 rows.
_BLOCKS_FROM = 512


@dataclass(frozen=True, slots=True)
class Problem:
    """What a choice depends on.

    Attributes:
        device: Device type, ``cpu`` or ``cuda``.
        input_dtype: Dtype of the input.
        batch: The number of matrices in a call.
        rows: Rows of each matrix.
        cols: Columns of each matrix.
        threads: Threads that a CPU kernel may use; 0 on other devices.
        settings: The iteration.
    """

    device: str
    input_dtype: torch.dtype
    batch: int
    rows: int
    cols: int
    threads: int
    settings: NsSettings

    @property
    def short(self) -> int:
        """The short side."""
        return min(self.rows, self.cols)

    @property
    def ratio(self) -> float:
        """Long side over short side."""
        return max(self.rows, self.cols) / max(1, self.short)

    @property
    def flops(self) -> float:
        """Multiplications and additions of the standard iteration."""
        m, n = self.short, max(self.rows, self.cols)
        return float(self.batch * len(self.settings.coefficients) * (4 * m * m * n + 2 * m**3))

    def key(self) -> str:
        """Return a text that is equal for equal problems."""
        settings = self.settings
        names = [str(dtype).removeprefix("torch.") for dtype in (self.input_dtype, settings.dtype)]
        return (
            f"{self.device} {names[0]}->{names[1]} {self.batch}x{self.rows}x{self.cols} "
            f"{settings.method}{len(settings.coefficients)} threads{self.threads}"
        )


def problem_of(x: Tensor, settings: NsSettings) -> Problem:
    """Return the problem of orthogonalising ``x`` with ``settings``."""
    rows, cols = x.shape[-2:]
    return Problem(
        device=x.device.type,
        input_dtype=x.dtype,
        batch=x.shape[:-2].numel(),
        rows=rows,
        cols=cols,
        threads=torch.get_num_threads() if x.device.type == "cpu" else 0,
        settings=settings,
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run an orthogonalisation.

    Attributes:
        name: ``torch standard``, ``ops gram+symmetric``, ``ops gram+sm90+graph`` and the like.
        run: Called like :func:`deepspeed_muon.math.newton_schulz.orthogonalize`.
        warm_calls: Calls with a shape that warm up; later ones take their usual time.
    """

    name: str
    run: Callable[[Tensor, NsSettings], Tensor]
    warm_calls: int = 0


def has_kernel(operators: Any | None, device: str, name: str = "orthogonalize") -> bool:
    """Return whether the loaded library holds a kernel of operator ``name`` for this device type."""
    if operators is None or device not in ("cpu", "cuda"):
        return False
    # Every build registers the iteration for CUDA; only a build with CUDA has its products.
    needed = {name, "sym_gemm"} if name == "orthogonalize" else {name}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return all(has(f"deepspeed_muon::{each}", device.upper()) for each in needed)


@functools.cache
def other_products() -> dict[str, Products]:
    """Return the symmetric products of Triton and of quack, by name, where they are installed and can be imported."""
    found: dict[str, Products] = {}
    for name in ("quack", "triton"):
        if importlib.util.find_spec(name) is not None:
            try:
                found[name] = importlib.import_module(f"{__package__}.{name}_sym").PRODUCTS
            except (
                Exception
            ) as error:  # whatever a library raises at its import, on a GPU that it does not know
                logger.warning("deepspeed_muon: %s is installed, but not used: %s", name, error)
    return found


def candidates_for(problem: Problem, operators: Any | None, *, graphs: bool = True) -> list[Candidate]:
    """Return the ways to solve ``problem``, the expected winner first.

    The method ``standard`` fixes the order of the products; ``gram`` allows both, because it asks for the cheaper one.

    Args:
        problem: What is to be computed.
        operators: ``torch.ops.deepspeed_muon``, or ``None`` for torch's code alone.
        graphs: Whether CUDA graphs and other libraries may be used.
    """
    methods = ["standard"]
    if problem.settings.method == "gram" and problem.ratio >= _GRAM_TRIED_FROM:
        methods = ["gram", "standard"] if problem.ratio >= 2.0 else ["standard", "gram"]
    native: list[Candidate] = []
    if has_kernel(operators, problem.device):
        for variant in _variants(problem, operators):
            native += [_native(method + variant, operators) for method in methods]
    # torch's code runs nearly square matrices in the standard order even if it is asked for Gram.
    in_torch = [method for method in methods if method == "standard" or problem.ratio >= 2.0]
    plain = native + [_torch(method) for method in in_torch]
    half = problem.settings.dtype in (torch.float16, torch.bfloat16)
    if problem.device == "cuda" and graphs and half:
        others = [_torch(method, name) for name in other_products() for method in in_torch]
        plain[len(native) : len(native)] = others
    if problem.device != "cuda" or not graphs or problem.flops > _GRAPH_UP_TO:
        return plain
    return plain + [Candidate(f"{each.name}+graph", Replayed(each.run), warm_calls=1) for each in plain]


def _variants(problem: Problem, operators: Any) -> list[str]:
    """Return the suffixes of the native methods that can run, the fastest expected first."""
    if problem.device != "cpu":
        kernel = _cuda_products(problem, operators)
        wide = kernel == "sm90" and problem.short >= _WIDE_FROM and operators.sym_gemm_wide_available()
        return ["+sm90wide", "+sm90"] if wide else [f"+{kernel}"]
    if problem.settings.dtype == torch.bfloat16 and operators.tiles_available():
        return ["+tiles", ""]
    if problem.settings.dtype == torch.bfloat16 and operators.vectors_available():
        return ["+vectors", ""]
    # Several threads run whole matrices side by side; triangles would divide a matrix once more.
    one_thread_each = problem.threads == 1 or problem.batch > 1
    blocks = problem.short >= _BLOCKS_FROM and one_thread_each
    if not blocks:
        return [""]
    return ["+symmetric", ""]


def _cuda_products(problem: Problem, operators: Any) -> str:
    """Return what computes the symmetric products of ``problem`` on this GPU: a kernel's name or ``cublas``."""
    half = problem.settings.dtype in (torch.float16, torch.bfloat16)
    aligned = not (problem.rows % _CUDA_MULTIPLE or problem.cols % _CUDA_MULTIPLE)
    kernel = str(operators.sym_gemm_kernel()) if half and aligned else ""
    return kernel if kernel in ("sm90", "sm80") else "cublas"


def _native(method: str, operators: Any) -> Candidate:
    # On a GPU the suffix only says what will compute the products, but for the wide tiles.
    order = method.partition("+")[0] if method.endswith(("+sm90", "+sm80", "+cublas")) else method
    order = order.replace("+sm90wide", "+wide")

    def run(x: Tensor, settings: NsSettings) -> Tensor:
        steps = len(settings.coefficients)
        result: Tensor = operators.orthogonalize(
            x,
            [value for row in settings.coefficients for value in row],
            order,
            sorted(restart_steps(steps, settings.dtype)) if order.startswith("gram") else [],
            settings.dtype,
            settings.eps,
        )
        return result

    return Candidate(f"ops {method}", run)


def _torch(method: str, name: str = "torch") -> Candidate:
    """Return torch's code, with the symmetric products of another library in place of its own if that is named."""
    products = None if name == "torch" else other_products()[name]

    def run(x: Tensor, settings: NsSettings) -> Tensor:
        return orthogonalize(x, settings=replace(settings, method=method), products=products)  # type: ignore[arg-type]

    return Candidate(f"{name} {method}", run)
