"""The candidates for one orthogonalisation: torch's code with several products, native operators, CUDA graphs of them.

All evaluate the same polynomial in the same dtype. They differ in the order of the products (standard or Gram) and in
the kernels, and therefore in rounding and time.
"""

from __future__ import annotations

import functools
import importlib.util
import weakref
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from deepspeed_muon.logs import logger
from deepspeed_muon.math.coefficients import SMALLEST_NORM
from deepspeed_muon.math.newton_schulz import NsSettings, Products, orthogonalize, restart_steps

# Elements of the largest batch: stacking copies its matrices, and the iteration needs three times that memory again.
BATCH_NUMEL = 1 << 25

# Gram is tried from this ratio of long side to short side on, a little below the break-even: with the same kernels it
# takes 36 m^3 against 30 m^3 of the standard iteration at ratio 1, and 49 m^3 against 63 m^3 at ratio 2.67.
_GRAM_TRIED_FROM = 1.3

# Up to this many FLOPs a CUDA graph is tried: 1.5 ms of an H200, about what the host needs to launch an iteration.
# Above, the GPU takes longer than the host, and a graph would only cost memory.
_GRAPH_UP_TO = 1e12

_GRAPH = "+graph"  # ends the name of a candidate that replays CUDA graphs

# The symmetric CUDA kernels need m and k to be multiples of this (include/muon_cuda.h); cuBLAS runs other shapes.
_CUDA_MULTIPLE = 8

# Up to this short side a CPU iterates faster in fp32, and rounds less.
_FP32_UP_TO = 16

# The CPU's blocked triangles need at least two blocks of 256 rows.
_BLOCKS_FROM = 512


@dataclass(frozen=True, slots=True)
class Problem:
    """The shape, dtypes, device and iteration of one orthogonalisation: what the choice of a candidate depends on.

    Attributes:
        device: Device type, ``cpu`` or ``cuda``.
        input_dtype: Dtype of the input.
        batch: The number of matrices in a call.
        rows: Rows of each matrix.
        cols: Columns of each matrix.
        threads: Threads that a CPU kernel may use; 0 on other devices.
        settings: Polynomial, method and dtype of the iteration.
        index: Index of the device; equal devices share the cache of choices, so it is not part of the key there.
    """

    device: str
    input_dtype: torch.dtype
    batch: int
    rows: int
    cols: int
    threads: int
    settings: NsSettings
    index: int = 0

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
        """Multiplications and additions of the standard iteration over the batch."""
        return self.batch * _standard_flops(self.rows, self.cols, self.settings)

    def key(self) -> str:
        """Return a readable text that identifies the problem; it is the key in the cache of choices.

        It has a checksum of the coefficients: on them depend where ``gram`` restarts, and the rounding. A choice
        that was cross-checked with one schedule does not count for another one of as many steps.
        """
        settings = self.settings
        schedule = zlib.crc32(repr(settings.coefficients).encode())
        names = [str(dtype).removeprefix("torch.") for dtype in (self.input_dtype, settings.dtype)]
        return (
            f"{self.device} {names[0]}->{names[1]} {self.batch}x{self.rows}x{self.cols} "
            f"{settings.method}{len(settings.coefficients)}-{schedule:08x} threads{self.threads}"
            f"{'' if self.rounds_as == settings.dtype else f' products in {self.rounds_as}'}"
        )

    @property
    def rounds_as(self) -> torch.dtype:
        """The dtype with the rounding of the iteration's products: fp16 for fp32 where torch may multiply in TF32."""
        if self.settings.dtype != torch.float32:
            return self.settings.dtype
        backend = (
            torch.backends.cuda.matmul
            if self.device == "cuda"
            else getattr(torch.backends.mkldnn, "matmul", None)
        )
        # Before torch 2.9 there is only one setting for all devices.
        precision = getattr(backend, "fp32_precision", None) or torch.get_float32_matmul_precision()
        by_name = {
            "high": torch.float16,
            "tf32": torch.float16,
            "medium": torch.bfloat16,
            "bf16": torch.bfloat16,
        }
        return by_name.get(str(precision), torch.float32)


def _standard_flops(rows: int, cols: int, settings: NsSettings) -> float:
    m, n = min(rows, cols), max(rows, cols)
    return float(len(settings.coefficients) * (4 * m * m * n + 2 * m**3))


def graph_batch(rows: int, cols: int, settings: NsSettings) -> int:
    """Return how many matrices of this shape, at most, are iterated in one CUDA graph; 0 where no graph is tried."""
    stacked = max(1, BATCH_NUMEL // max(1, rows * cols))
    return min(stacked, int(_GRAPH_UP_TO // max(1.0, _standard_flops(rows, cols, settings))))


def problem_of(x: Tensor, settings: NsSettings, device: torch.device | None = None) -> Problem:
    """Return the problem of orthogonalising ``x``, or a tensor like it on ``device``."""
    rows, cols = x.shape[-2:]
    device = device or x.device
    return Problem(
        device=device.type,
        input_dtype=x.dtype,
        batch=x.shape[:-2].numel(),
        rows=rows,
        cols=cols,
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
        settings=settings,
        index=index_of(device),
    )


def index_of(device: torch.device) -> int:
    """Return the index of a device: of a GPU without one that of the current GPU, and 0 of a CPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.index or 0
    return torch.cuda.current_device() if device.index is None else device.index


@dataclass(frozen=True, slots=True)
class Candidate:
    """A function that runs an orthogonalisation.

    Attributes:
        name: ``torch standard``, ``ops gram+symmetric``, ``ops gram+sm90+graph`` and the like.
        run: Called like :func:`deepspeed_muon.math.newton_schulz.orthogonalize`.
        warm_calls: How many first calls with a shape compile, and so take longer than later ones.
    """

    name: str
    run: Callable[[Tensor, NsSettings], Tensor]
    warm_calls: int = 0

    @property
    def without_graph(self) -> Candidate:
        """The candidate that launches the same kernels one by one."""
        if not isinstance(self.run, Replayed):
            return self
        return Candidate(self.name.removesuffix(_GRAPH), self.run.run)


def has_kernel(operators: ModuleType | None, device: str, name: str = "orthogonalize") -> bool:
    """Return whether the loaded library has a kernel of operator ``name`` for a device type."""
    if operators is None or device not in ("cpu", "cuda"):
        return False
    # Every build registers the iteration for CUDA, but only a build with CUDA has the products that it calls.
    needed = {name, "sym_gemm"} if name == "orthogonalize" else {name}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return all(has(f"deepspeed_muon::{operator}", device.upper()) for operator in needed)


def products_of(sym_gemm: Callable[..., Tensor]) -> Products:
    """Return the symmetric products of the iteration, computed by a kernel like :func:`.torch_operators.sym_gemm`."""

    def multiply_add(c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
        # b is symmetric, so a b^T is a b.
        return sym_gemm(a, b, c, alpha, beta)

    return Products(lambda x: sym_gemm(x, x), multiply_add)


@functools.cache
def triton_products() -> Products | None:
    """Return the symmetric products in Triton, or ``None`` if Triton is not installed or cannot be imported."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        from . import triton_sym
    except Exception as error:  # Triton may raise anything at import, on a GPU that it does not support
        logger.warning("deepspeed_muon: Triton is installed, but cannot be used: %s", error)
        return None
    return products_of(triton_sym.sym_gemm)


def candidates_for(
    problem: Problem, operators: ModuleType | None, *, without: Collection[str] = ()
) -> list[Candidate]:
    """Return the candidates for ``problem``, the expected winner first.

    The method ``standard`` fixes the order of the products. ``gram`` asks for the cheaper order, so it allows both.

    Args:
        problem: What is to be computed.
        operators: ``torch.ops.deepspeed_muon``, or ``None`` without native operators.
        without: What must not be used, by the names of :data:`.gate.COMPONENTS`.
    """
    # 1. The orders of the products that the method allows, the expected winner first.
    methods = ["standard"]
    if problem.settings.method == "gram" and problem.ratio >= _GRAM_TRIED_FROM:
        methods = ["gram", "standard"] if problem.ratio >= 2.0 else ["standard", "gram"]
    # 2. Native operators and torch's code.
    native: list[Candidate] = []
    if "native" not in without and operators is not None and has_kernel(operators, problem.device):
        for variant in _variants(problem, operators):
            native += [_native(method + variant, operators) for method in methods]
    # torch's code uses the standard order below ratio 2 even with method "gram".
    torch_methods = [method for method in methods if method == "standard" or problem.ratio >= 2.0]
    candidates = native + [_torch(method) for method in torch_methods]
    # 3. The kernels of Triton: in front where they are the expected winners, else behind the native ones.
    half = problem.settings.dtype in (torch.float16, torch.bfloat16)
    if problem.device == "cuda" and half and "triton" not in without and triton_products() is not None:
        position = 0 if _has_tcgen05(problem.index) else len(native)
        candidates[position:position] = [_torch(method, "triton") for method in torch_methods]
    # 4. Each of them also as a CUDA graph, if launches may take longer than the kernels.
    if problem.device != "cuda" or problem.flops > _GRAPH_UP_TO or "graphs" in without:
        return candidates
    return candidates + [
        Candidate(candidate.name + _GRAPH, Replayed(candidate.run)) for candidate in candidates
    ]


def in_fp32(problem: Problem) -> Candidate | None:
    """Return torch's code in fp32 for small matrices in half precision on a CPU, ``None`` for other problems.

    This is a rule, not a measurement, so that the dtype depends neither on the number of ranks nor on the batch.
    """
    half = problem.settings.dtype in (torch.float16, torch.bfloat16)
    if problem.device != "cpu" or not half or problem.short > _FP32_UP_TO:
        return None

    def run(x: Tensor, settings: NsSettings) -> Tensor:
        return orthogonalize(x, settings=replace(settings, dtype=torch.float32)).to(settings.dtype)

    return Candidate("torch in fp32", run)


def _has_tcgen05(index: int) -> bool:
    """Return whether a GPU has Blackwell's ``tcgen05`` tensor core instructions, which the CUDA kernels do not use.

    On such a GPU (compute capability 10 or 11, not the 12 of consumer cards) the CUDA kernels use ``mma.sync``, at a
    fraction of the peak rate. Triton's use ``tcgen05``, so they are the expected winners. Nobody
    has timed them on such a GPU; by default the choice between all candidates is measured.
    """
    return torch.cuda.is_available() and torch.cuda.get_device_capability(index)[0] in (10, 11)


def _variants(problem: Problem, operators: ModuleType) -> list[str]:
    """Return the suffixes of the native methods that can run, the expected winner first."""
    if problem.device != "cpu":
        half = problem.settings.dtype in (torch.float16, torch.bfloat16)
        aligned = not (problem.rows % _CUDA_MULTIPLE or problem.cols % _CUDA_MULTIPLE)
        kernel = str(operators.sym_gemm_kernel(problem.index)) if half and aligned else ""
        return [f"+{kernel}" if kernel in ("sm90", "sm80") else "+cublas"]
    if problem.settings.dtype == torch.bfloat16 and operators.tiles_available():
        return ["+tiles", ""]
    if problem.settings.dtype == torch.bfloat16 and operators.vectors_available():
        return ["+vectors", ""]
    # Several threads orthogonalise the matrices of a batch in parallel. A single matrix is divided among the threads
    # already, and blocked triangles would divide it once more.
    one_thread_per_matrix = problem.threads == 1 or problem.batch > 1
    return ["+symmetric", ""] if problem.short >= _BLOCKS_FROM and one_thread_per_matrix else [""]


def _native(method: str, operators: ModuleType) -> Candidate:
    # On a GPU the suffix only reports which kernel will run.
    order = method.partition("+")[0] if method.endswith(("+sm90", "+sm80", "+cublas")) else method

    def run(x: Tensor, settings: NsSettings) -> Tensor:
        result: Tensor = operators.orthogonalize(
            x,
            [value for row in settings.coefficients for value in row],  # flat: a, b, c, a, b, c, ...
            order,
            sorted(restart_steps(settings.coefficients, settings.dtype)) if order.startswith("gram") else [],
            settings.dtype,
            SMALLEST_NORM,
        )
        return result

    return Candidate(f"ops {method}", run)


def _torch(method: str, name: Literal["torch", "triton"] = "torch") -> Candidate:
    """Return torch's code with torch's products, or with those of Triton."""
    products = triton_products() if name == "triton" else None

    def run(x: Tensor, settings: NsSettings) -> Tensor:
        return orthogonalize(x, settings=replace(settings, method=method), products=products)  # type: ignore[arg-type]

    return Candidate(f"{name} {method}", run, warm_calls=0 if name == "torch" else 1)


Run = Callable[[Tensor, NsSettings], Tensor]
Replay = Callable[[Tensor], Tensor]
_Shape = tuple[torch.device, torch.dtype, tuple[int, ...], bool, bool, NsSettings]

# The memory pool of a device, and the replays whose graphs use it. Where all of them are gone, torch cannot capture
# into it any more, and the next graph gets a new pool.
_pools: dict[torch.device, tuple[Any, weakref.WeakSet[Replay]]] = {}
# One stream for all captures on a device: cuBLAS allocates a workspace for every stream that it has seen.
_streams: dict[torch.device, torch.cuda.Stream] = {}


class Replayed:
    """Wraps a function, captures CUDA graphs of it, and replays them.

    An iteration of five steps launches some thirty kernels. For matrices up to about 2048 the host takes longer to
    launch them than the GPU to run them (the authors of DMuon measured 2.5 ms against 26 us). A graph uses fixed
    addresses, so each shape has an input and an output buffer, and every call copies into the one and out of the other.
    All graphs of a device share one memory pool: they run one after another on the caller's stream, so their workspaces
    may overlap.

    A shape is captured by :meth:`capture`, when the optimizer is bound, and never by a call: a capture waits for the
    device and returns free memory to it, and in a step it could run out of memory on some of the ranks. Other shapes
    run without a graph, and so do all while the caller itself captures the current stream.

    Attributes:
        run: The wrapped function.
    """

    def __init__(self, run: Run) -> None:
        """Wrap ``run``; nothing is captured yet.

        Args:
            run: Computes on the current stream without synchronising; deterministic.
        """
        self.run = run
        self._replays: dict[_Shape, Replay] = {}

    def __call__(self, x: Tensor, settings: NsSettings) -> Tensor:
        """Return ``run(x, settings)`` in a new tensor."""
        replay = self._replays.get(_shape_of(x, settings))
        if replay is None or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return self.run(x, settings)
        return replay(x)

    def capture(self, x: Tensor, settings: NsSettings) -> None:
        """Capture a graph for tensors like ``x``, unless there is one; ``x`` or ``x.mT`` is contiguous.

        Raises:
            Exception: What ``run`` raises, or the capture: the device is out of memory, or ``run`` does something that
                cannot be captured. The shape runs without a graph then.
        """
        shape = _shape_of(x, settings)
        if shape not in self._replays:
            # Libraries create handles and workspaces in their first call, which is not allowed during a capture.
            self.run(x, settings)
            self._replays[shape] = capture_cuda(self.run, x, settings)

    def release(self) -> None:
        """Free the graphs and their memory."""
        for device in {shape[0] for shape in self._replays}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self._replays.clear()


def _shape_of(x: Tensor, settings: NsSettings) -> _Shape:
    return (x.device, x.dtype, tuple(x.shape), x.is_contiguous(), x.mT.is_contiguous(), settings)


def capture_cuda(run: Run, x: Tensor, settings: NsSettings) -> Replay:
    """Record ``run`` for tensors like ``x`` and return the function that replays it.

    Args:
        run: What to record; every kernel that it launches must be on the current stream.
        x: A CUDA tensor with the shape, dtype and storage order of all later inputs.
        settings: Polynomial, method and dtype of the iteration.

    Raises:
        RuntimeError: If ``run`` does something that cannot be captured, or the device is out of memory.
    """
    if x.device not in _pools or not _pools[x.device][1]:
        _pools[x.device] = torch.cuda.graph_pool_handle(), weakref.WeakSet()
    if x.device not in _streams:
        _streams[x.device] = torch.cuda.Stream(x.device)
    pool, replays = _pools[x.device]
    stream, current = _streams[x.device], torch.cuda.current_stream(x.device)
    # A graph reads from fixed addresses, so every replay copies its input to this one.
    graph_input = x.clone()
    stream.wait_stream(current)
    graph = torch.cuda.CUDAGraph()
    try:
        # thread_local: NCCL's watchdog thread queries events at any time, which is an error in a global capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = run(graph_input, settings)
    except BaseException:
        # torch leaves its own stream current if the capture cannot be ended, and the pool in an unknown state.
        torch.cuda.set_stream(current)
        del _pools[x.device], _streams[x.device]
        raise
    current.wait_stream(stream)

    # Every replay writes to the same addresses, so each caller gets a copy.
    def replay(x: Tensor) -> Tensor:
        graph_input.copy_(x)
        graph.replay()
        return result.clone()

    replays.add(replay)
    return replay
