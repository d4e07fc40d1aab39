"""Replays an orthogonalisation as a CUDA graph, which costs the host a few microseconds instead of many launches.

An iteration of five steps launches some thirty kernels. For matrices up to about 2048 the host needs longer for that
than the GPU for the products (the authors of DMuon measured 2.5 ms against 26 us). A graph holds fixed addresses, so
each shape has an input buffer and an output buffer, and every call copies into one and out of the other. All graphs of
a device share one memory pool: they run one after another on the caller's stream, so their workspaces may overlap.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.math.newton_schulz import NsSettings

__all__ = ["GRAPHS_KEPT", "Replayed", "capture_cuda"]

Run = Callable[[Tensor, NsSettings], Tensor]
Replay = Callable[[Tensor], Tensor]
Capture = Callable[[Run, Tensor, NsSettings], Replay]
_Shape = tuple[torch.device, torch.dtype, tuple[int, ...], bool, NsSettings]

# Graphs kept for one candidate; a model has a handful of shapes, times the batch sizes that its chunks give.
GRAPHS_KEPT = 32

_pools: dict[torch.device, Any] = {}
# One stream for all captures of a device: cuBLAS keeps a workspace for every stream that it has seen.
_streams: dict[torch.device, torch.cuda.Stream] = {}


class Replayed:
    """Runs the function that it wraps; from the second call with a shape on it replays a graph.

    The first call with a shape runs without a graph, because libraries create handles and workspaces in it, which a
    capture forbids. While the caller captures its stream itself, every call runs without a graph.
    """

    def __init__(self, run: Run, capture: Capture | None = None) -> None:
        """Wrap ``run``; nothing is captured yet.

        Args:
            run: Computes on the current stream without synchronising; the same input gives the same result.
            capture: Makes the replay of one shape; by default :func:`capture_cuda`.
        """
        self._run = run
        self._capture = capture_cuda if capture is None else capture
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
            replay = self._replays[key] = self._capture(self._run, x, settings)
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
    pool = _pools.setdefault(x.device, None)
    if pool is None:
        pool = _pools[x.device] = torch.cuda.graph_pool_handle()
    held = torch.empty_like(x)
    held.copy_(x)
    stream = _streams.get(x.device)
    if stream is None:
        stream = _streams[x.device] = torch.cuda.Stream(x.device)
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
