"""The ways to run one orthogonalisation: torch's code and the native operator, in the forms that may be fastest.

All evaluate the same polynomial in the same dtype. They differ in the order of the products (standard, Gram) and in
the kernels, and so in rounding and time.
"""

from __future__ import annotations

import functools
import importlib.util
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from deepspeed_muon.logs import logger
from deepspeed_muon.math.coefficients import SMALLEST_NORM
from deepspeed_muon.math.newton_schulz import NsSettings, Products, orthogonalize, restart_steps

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

# Squares of 256 are tried from this short side on, and first where they take no more waves than tiles of 128: below,
# too few of them are at work at once.
_WIDE_FROM = 1024

# Up to this short side a CPU iterates faster in fp32, and rounds less.
_FP32_UP_TO = 16

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


def problem_of(x: Tensor, settings: NsSettings, device: torch.device | None = None) -> Problem:
    """Return the problem of orthogonalising ``x``, or a tensor like it on ``device``, with ``settings``."""
    rows, cols = x.shape[-2:]
    kind = (device or x.device).type
    return Problem(
        device=kind,
        input_dtype=x.dtype,
        batch=x.shape[:-2].numel(),
        rows=rows,
        cols=cols,
        threads=torch.get_num_threads() if kind == "cpu" else 0,
        settings=settings,
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run an orthogonalisation.

    Attributes:
        name: ``torch standard``, ``ops gram+symmetric``, ``ops gram+sm90+graph`` and the like.
        run: Called like :func:`deepspeed_muon.math.newton_schulz.orthogonalize`.
        warm_calls: Calls with a shape that compile or record; later ones take their usual time.
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


def products_of(sym_gemm: Callable[..., Tensor]) -> Products:
    """Return the symmetric products of the iteration by a kernel like :func:`.torch_operators.sym_gemm`."""

    def multiply_add(c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
        # b is symmetric, so a b^T is a b.
        return sym_gemm(a, b, c, alpha, beta)

    return Products(lambda x: sym_gemm(x, x), multiply_add)


@functools.cache
def triton_products() -> Products | None:
    """Return Triton's symmetric products, ``None`` where it is not installed or cannot be imported."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        from . import triton_sym
    except Exception as error:  # whatever it raises at its import, on a GPU that it does not know
        logger.warning("deepspeed_muon: Triton is installed, but not used: %s", error)
        return None
    return products_of(triton_sym.sym_gemm)


def candidates_for(
    problem: Problem, operators: Any | None, *, without: Collection[str] = ()
) -> list[Candidate]:
    """Return the ways to solve ``problem``, the expected winner first.

    The method ``standard`` fixes the order of the products; ``gram`` allows both, because it asks for the cheaper one.

    Args:
        problem: What is to be computed.
        operators: ``torch.ops.deepspeed_muon``, or ``None`` for torch's code alone.
        without: What must not be used: ``native`` operators, CUDA ``graphs``, the products of ``triton``.
    """
    methods = ["standard"]
    if problem.settings.method == "gram" and problem.ratio >= _GRAM_TRIED_FROM:
        methods = ["gram", "standard"] if problem.ratio >= 2.0 else ["standard", "gram"]
    native: list[Candidate] = []
    if "native" not in without and has_kernel(operators, problem.device):
        for variant in _variants(problem, operators):
            native += [_native(method + variant, operators) for method in methods]
    # torch's code runs nearly square matrices in the standard order even if it is asked for Gram.
    in_torch = [method for method in methods if method == "standard" or problem.ratio >= 2.0]
    plain = native + [_torch(method) for method in in_torch]
    half = problem.settings.dtype in (torch.float16, torch.bfloat16)
    if problem.device == "cuda" and half and "triton" not in without and triton_products() is not None:
        place = 0 if _has_tcgen05() else len(native)
        plain[place:place] = [_torch(method, "triton") for method in in_torch]
    if problem.device != "cuda" or problem.flops > _GRAPH_UP_TO:
        return plain
    return plain + [
        Candidate(f"{each.name}+graph", Replayed(each.run), warm_calls=each.warm_calls + 1)
        for each in plain
        if "graphs" not in without
    ]


def in_fp32(problem: Problem) -> Candidate | None:
    """Return torch's code in fp32 for small matrices that a CPU would iterate in half precision, ``None`` for others.

    It is a rule and no measurement, so that the dtype depends neither on the number of ranks nor on the batch.
    """
    half = problem.settings.dtype in (torch.float16, torch.bfloat16)
    if problem.device != "cpu" or not half or problem.short > _FP32_UP_TO:
        return None

    def run(x: Tensor, settings: NsSettings) -> Tensor:
        return orthogonalize(x, settings=replace(settings, dtype=torch.float32)).to(settings.dtype)

    return Candidate("torch in fp32", run)


def _has_tcgen05() -> bool:
    """Return whether the GPU has Blackwell's own tensor core instructions, which no CUDA kernel of this project uses.

    On such a chip (compute capability 10 and 11, not the 12 of consumer cards) those kernels run by ``mma.sync``, at a
    fraction of its rate. Triton compiles to ``tcgen05``, so it is the expected winner there. Nobody has timed it: the
    choice between all candidates is measured.
    """
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (10, 11)


def _variants(problem: Problem, operators: Any) -> list[str]:
    """Return the suffixes of the native methods that can run, the fastest expected first."""
    if problem.device != "cpu":
        half = problem.settings.dtype in (torch.float16, torch.bfloat16)
        aligned = not (problem.rows % _CUDA_MULTIPLE or problem.cols % _CUDA_MULTIPLE)
        kernel = str(operators.sym_gemm_kernel()) if half and aligned else ""
        if kernel not in ("sm90", "sm80"):
            return ["+cublas"]
        if kernel == "sm80" or problem.short < _WIDE_FROM:
            return [f"+{kernel}"]
        narrow, wide = operators.sym_gemm_waves(problem.batch, problem.short)
        variants = ["+sm90wide", "+sm90"] if wide <= narrow else ["+sm90", "+sm90wide"]
        return variants if wide else ["+sm90"]
    if problem.settings.dtype == torch.bfloat16 and operators.tiles_available():
        return ["+tiles", ""]
    if problem.settings.dtype == torch.bfloat16 and operators.vectors_available():
        return ["+vectors", ""]
    # Several threads run whole matrices side by side; triangles would divide a matrix once more.
    one_thread_each = problem.threads == 1 or problem.batch > 1
    return ["+symmetric", ""] if problem.short >= _BLOCKS_FROM and one_thread_each else [""]


def _native(method: str, operators: Any) -> Candidate:
    # On a GPU the suffix only says what will compute the products, but for the wide tiles.
    order = method.partition("+")[0] if method.endswith(("+sm90", "+sm80", "+cublas")) else method
    order = order.replace("+sm90wide", "+wide")

    def run(x: Tensor, settings: NsSettings) -> Tensor:
        result: Tensor = operators.orthogonalize(
            x,
            [value for row in settings.coefficients for value in row],
            order,
            sorted(restart_steps(settings.coefficients, settings.dtype)) if order.startswith("gram") else [],
            settings.dtype,
            SMALLEST_NORM,
        )
        return result

    return Candidate(f"ops {method}", run)


def _torch(method: str, name: Literal["torch", "triton"] = "torch") -> Candidate:
    """Return torch's code, with its own products or with Triton's."""
    products = None if name == "torch" else triton_products()

    def run(x: Tensor, settings: NsSettings) -> Tensor:
        return orthogonalize(x, settings=replace(settings, method=method), products=products)  # type: ignore[arg-type]

    return Candidate(f"{name} {method}", run, warm_calls=0 if name == "torch" else 1)


Run = Callable[[Tensor, NsSettings], Tensor]
Replay = Callable[[Tensor], Tensor]
_Shape = tuple[torch.device, torch.dtype, tuple[int, ...], bool, NsSettings]

# Graphs kept for one candidate; a model has a handful of shapes, times the batch sizes that its chunks give.
GRAPHS_KEPT = 32

_pools: dict[torch.device, Any] = {}
# One stream for all captures of a device: cuBLAS keeps a workspace for every stream that it has seen.
_streams: dict[torch.device, torch.cuda.Stream] = {}


class Replayed:
    """Runs the function that it wraps; from the second call with a shape on it replays a CUDA graph.

    An iteration of five steps launches some thirty kernels. For matrices up to about 2048 the host needs longer for
    that than the GPU for the products (the authors of DMuon measured 2.5 ms against 26 us). A graph holds fixed
    addresses, so each shape has an input buffer and an output buffer, and every call copies into one and out of the
    other. All graphs of a device share one memory pool: they run one after another on the caller's stream, so their
    workspaces may overlap.

    The first call with a shape runs without a graph, because libraries create handles and workspaces in it, which a
    capture forbids. While the caller captures its stream itself, every call runs without a graph.
    """

    def __init__(self, run: Run) -> None:
        """Wrap ``run``; nothing is captured yet.

        Args:
            run: Computes on the current stream without synchronising; the same input gives the same result.
        """
        self._run = run
        self._replays: OrderedDict[_Shape, Replay | None] = OrderedDict()

    def __call__(self, x: Tensor, settings: NsSettings) -> Tensor:
        """Return ``run(x, settings)`` in a new tensor; ``x`` that is not dense in either order runs without a graph."""
        dense = x.is_contiguous() or x.mT.is_contiguous()
        if not dense or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return self._run(x, settings)
        key = (x.device, x.dtype, tuple(x.shape), x.is_contiguous(), settings)
        if key not in self._replays:
            self._replays[key] = None
            if len(self._replays) > GRAPHS_KEPT:
                self._replays.popitem(last=False)
            return self._run(x, settings)
        self._replays.move_to_end(key)
        replay = self._replays[key]
        if replay is None:
            replay = self._replays[key] = capture_cuda(self._run, x, settings)
        return replay(x)

    def release(self) -> None:
        """Free the graphs and their memory; the next call with a shape captures it again.

        The pool goes too, because torch adds no graph to a pool whose graphs are all gone.
        """
        for device in {key[0] for key, replay in self._replays.items() if replay is not None}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            _pools.pop(device, None)
        self._replays = OrderedDict.fromkeys(self._replays)


def capture_cuda(run: Run, x: Tensor, settings: NsSettings) -> Replay:
    """Record ``run`` for tensors like ``x`` and return the function that replays it.

    Args:
        run: What to record; every kernel that it launches must be on the current stream.
        x: A CUDA tensor with the shape, dtype and storage order of all later inputs.
        settings: The iteration.

    Raises:
        RuntimeError: If something that ``run`` does cannot be captured.
    """
    if x.device not in _pools:
        _pools[x.device] = torch.cuda.graph_pool_handle()
    if x.device not in _streams:
        _streams[x.device] = torch.cuda.Stream(x.device)
    pool, stream = _pools[x.device], _streams[x.device]
    held = x.clone()
    stream.wait_stream(torch.cuda.current_stream(x.device))
    graph = torch.cuda.CUDAGraph()
    # thread_local, because NCCL's watchdog thread queries events at any time: in a global capture that is an error.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        result = run(held, settings)
    torch.cuda.current_stream(x.device).wait_stream(stream)

    def replay(x: Tensor) -> Tensor:
        held.copy_(x)
        graph.replay()
        return result.clone()

    return replay
