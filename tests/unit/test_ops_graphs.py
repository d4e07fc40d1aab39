"""How iterations are captured as CUDA graphs and replayed; the capture itself is tested in tests/gpu."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings, orthogonalize
from deepspeed_muon.ops import dispatch, graphs
from deepspeed_muon.ops.graphs import Replay, Replayed, Run

SETTINGS = NsSettings(resolve_schedule("quintic"))


class Recorder:
    """Stands for a GPU's graphs: fixed buffers, as they have, and a count of captures."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, run: Run, x: Tensor, settings: NsSettings) -> Replay:
        self.captures += 1
        static = torch.empty_like(x)
        result = torch.empty_like(run(x, settings))

        def replay(x: Tensor) -> Tensor:
            self.replays += 1
            static.copy_(x)
            result.copy_(run(static, settings))
            return result.clone()

        return replay


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(graphs, "capture_cuda", made)
    return made


def plain(x: Tensor, settings: NsSettings) -> Tensor:
    return orthogonalize(x, settings=settings)


def test_a_transposed_tensor_is_not_replayed(record: Recorder) -> None:
    run = Replayed(plain)
    x = torch.randn(6, 6)
    run.capture(x, SETTINGS)
    assert torch.equal(run(x.mT, SETTINGS), plain(x.mT, SETTINGS))
    assert record.captures == 1 and record.replays == 0


class FakeGraph:
    """Stands for a CUDA graph of ``doubled``: a replay computes from the input's buffer into the result's."""

    buffers: tuple[Tensor, Tensor]

    def replay(self) -> None:
        self.buffers[1].copy_(2 * self.buffers[0])


def doubled(x: Tensor, settings: NsSettings) -> Tensor:
    FakeGraph.buffers = x, 2 * x
    return FakeGraph.buffers[1]


@pytest.fixture
def cuda_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Give torch.cuda what a capture calls; return the streams that were made current and the captures' arguments."""
    calls: list[Any] = []
    stream = SimpleNamespace(wait_stream=lambda awaited: None)

    @contextlib.contextmanager
    def graph(graph: FakeGraph, **arguments: Any) -> Iterator[None]:
        calls.append(arguments)
        yield

    pools = itertools.count()
    fakes = {"graph": graph, "CUDAGraph": FakeGraph, "graph_pool_handle": lambda: next(pools)}
    fakes |= {
        "Stream": lambda device: stream,
        "current_stream": lambda device: stream,
        "set_stream": calls.append,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(graphs, "_pools", {})
    monkeypatch.setattr(graphs, "_streams", {})
    return calls


def test_a_replay_returns_a_new_tensor_and_threads_may_call_cuda(cuda_calls: list[Any]) -> None:
    replay = graphs.capture_cuda(doubled, torch.zeros(3), SETTINGS)
    # NCCL's watchdog queries events at any time, which would end a capture in the mode "global".
    assert [call["capture_error_mode"] for call in cuda_calls] == ["thread_local"]
    first, second = (replay(torch.full((3,), value)) for value in (1.0, 5.0))
    assert first.tolist() == [2.0] * 3 and second.tolist() == [10.0] * 3


def test_a_pool_is_shared_as_long_as_a_graph_lives_in_it(cuda_calls: list[Any]) -> None:
    """A capture into a pool whose graphs are all destroyed raises in torch: nobody releases those of a tuner."""

    def capture() -> Replay:
        return graphs.capture_cuda(doubled, torch.zeros(3), SETTINGS)

    first, second = capture(), capture()
    del first
    third = capture()
    del second, third
    fourth = capture()
    assert [call["pool"] for call in cuda_calls] == [0, 0, 0, 1]
    assert fourth(torch.ones(3)).tolist() == [2.0] * 3


def test_a_failed_capture_leaves_the_streams_as_they_were(cuda_calls: list[Any]) -> None:
    def fails(x: Tensor, settings: NsSettings) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        graphs.capture_cuda(fails, torch.zeros(3), SETTINGS)
    assert cuda_calls[-1] is torch.cuda.current_stream(torch.device("cpu"))
    assert not graphs._pools and not graphs._streams


@pytest.fixture
def with_graph(monkeypatch: pytest.MonkeyPatch) -> dispatch.Orthogonalizer:
    """Return an orthogonalizer that takes a graph for every shape that is prepared."""
    choose = dispatch.Orthogonalizer._choice

    def choice(self: dispatch.Orthogonalizer, problem: Any, *, prepared: bool = False) -> Any:
        choice = choose(self, problem)
        if prepared:
            choice.run = Replayed(choice.run)
        return choice

    monkeypatch.setattr(dispatch.Orthogonalizer, "_choice", choice)
    return dispatch.Orthogonalizer("auto")


def test_a_shape_is_captured_when_it_is_prepared(
    with_graph: dispatch.Orthogonalizer, record: Recorder
) -> None:
    """Captures were in the second step, at the peak of memory."""
    x = torch.randn(2, 24, 36)
    with_graph.prepare(x.to("meta"), settings=SETTINGS, device=torch.device("cpu"))
    assert record.captures == 1
    for _ in range(3):
        assert torch.equal(with_graph(x, settings=SETTINGS), plain(x, SETTINGS))
    assert record.captures == 1 and record.replays == 3
    # A step in which a matrix has no gradient: a smaller batch, which nothing has prepared.
    assert torch.equal(with_graph(x[:1], settings=SETTINGS), plain(x[:1], SETTINGS))
    assert record.captures == 1 and [entry["ran"] for entry in with_graph.report()] == [
        "torch standard in a CUDA graph",
        "torch standard",
    ]
    # engine.offload_states and reload_states
    with_graph.release()
    assert torch.equal(with_graph(x, settings=SETTINGS), plain(x, SETTINGS)) and record.replays == 3
    with_graph.capture(torch.device("cpu"))
    with_graph(x, settings=SETTINGS)
    assert record.captures == 2 and record.replays == 4


def test_a_capture_that_fails_costs_the_graph_and_nothing_else(
    with_graph: dispatch.Orthogonalizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It raised in the second step on the rank that was out of memory, while the others waited for it."""
    attempts = []

    def fails(run: Run, x: Tensor, settings: NsSettings) -> Replay:
        attempts.append(x.shape)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(graphs, "capture_cuda", fails)
    inputs = [torch.randn(2, 24, 36), torch.randn(3, 24, 36)]
    for x in inputs:
        with_graph.prepare(x.to("meta"), settings=SETTINGS, device=torch.device("cpu"))
    for x in 2 * inputs:
        assert torch.equal(with_graph(x, settings=SETTINGS), plain(x, SETTINGS))
    assert len(attempts) == 2 and len(caplog.records) == 1 and "out of memory" in caplog.text
    for entry in with_graph.report():
        assert entry["ran"] == "torch standard" and "out of memory" in entry["note"]
