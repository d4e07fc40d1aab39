"""The functions that run a Newton-Schulz iteration, and CUDA graphs of them."""

from __future__ import annotations

import functools
import importlib.util
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.logs import logger
from deepspeed_muon.math.coefficients import SMALLEST_NORM
from deepspeed_muon.math.newton_schulz import NsMethod, NsSettings, Products, orthogonalize, restart_steps

Run = Callable[[Tensor, NsSettings], Tensor]
"""Called like :func:`deepspeed_muon.math.newton_schulz.orthogonalize`."""

Replay = Callable[[Tensor], Tensor]


def torch_iteration(method: NsMethod, products: Products | None = None) -> Run:
    """Return torch's iteration by a method, with torch's symmetric products or others."""

    def run(x: Tensor, settings: NsSettings) -> Tensor:
        return orthogonalize(x, settings=replace(settings, method=method), products=products)

    return run


def native_iteration(method: NsMethod, operators: ModuleType) -> Run:
    """Return the iteration in C++ by a method, over the symmetric products of the native library."""

    def run(x: Tensor, settings: NsSettings) -> Tensor:
        result: Tensor = operators.orthogonalize(
            x,
            [value for row in settings.coefficients for value in row],  # flat: a, b, c, a, b, c, ...
            method,
            sorted(restart_steps(settings.coefficients, settings.dtype)) if method == "gram" else [],
            settings.dtype,
            SMALLEST_NORM,
        )
        return result

    return run


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


# The memory pool of a device, and the replays whose graphs use it. Once all of these are gone, torch cannot capture
# into the pool any more, and the next graph gets a new one.
_pools: dict[torch.device, tuple[Any, weakref.WeakSet[Replay]]] = {}
# One stream for all captures on a device: cuBLAS allocates a workspace for every stream that it has seen.
_streams: dict[torch.device, torch.cuda.Stream] = {}


class Replayed:
    """An iteration for tensors of one shape, dtype and device, which is replayed as a CUDA graph once it is captured.

    An iteration of five steps launches some thirty kernels. For matrices up to about 2048 the host takes longer to
    launch them than the GPU to run them (the authors of DMuon measured 2.5 ms against 26 us). A graph uses fixed
    addresses, so every call copies into its input and out of its output. All graphs of a device share one memory pool:
    they run one after another on the caller's stream, so their workspaces may overlap.

    It is captured by :meth:`capture`, when the optimizer is bound, and never by a call: a capture waits for the device
    and returns free memory to it, and during a step it could run out of memory on some of the ranks.

    Attributes:
        run: The iteration. It computes on the current stream without synchronising, and is deterministic.
    """

    def __init__(self, run: Run) -> None:
        """Wrap ``run``; nothing is captured yet."""
        self.run = run
        self._replay: Replay | None = None

    @property
    def is_captured(self) -> bool:
        """Whether calls replay a graph."""
        return self._replay is not None

    def __call__(self, x: Tensor, settings: NsSettings) -> Tensor:
        """Return ``run(x, settings)`` in a new tensor."""
        # The graph reads contiguous tensors, and the caller may itself be capturing the current stream.
        is_nested = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._replay is None or is_nested or not x.is_contiguous():
            return self.run(x, settings)
        return self._replay(x)

    def capture(self, x: Tensor, settings: NsSettings) -> None:
        """Capture the graph for tensors like the contiguous ``x``, unless there is one.

        Raises:
            Exception: What ``run`` raises, or the capture: the device is out of memory, or ``run`` does something that
                cannot be captured. Calls run without a graph then.
        """
        if self._replay is None:
            # Libraries create handles and workspaces in their first call, which is not allowed during a capture.
            self.run(x, settings)
            self._replay = capture_cuda(self.run, x, settings)

    def release(self) -> None:
        """Free the graph and its memory."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # it may be running
        self._replay = None


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
        # If a capture cannot be ended, torch leaves its stream current and the pool in an unknown state.
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
