"""Which candidates a GPU has, and how replays are kept; the capture itself is tested in tests/gpu."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings, orthogonalize
from deepspeed_muon.ops import candidates
from deepspeed_muon.ops.candidates import Problem, Replay, Replayed, Run, candidates_for

SETTINGS = NsSettings(resolve_schedule("quintic"))


class Recorder:
    """Stands for a GPU's graphs: fixed buffers, as they have, and a count of captures."""

    def __init__(self) -> None:
        self.captures = 0

    def __call__(self, run: Run, x: Tensor, settings: NsSettings) -> Replay:
        self.captures += 1
        held = torch.empty_like(x)
        result = torch.empty_like(run(x, settings))

        def replay(x: Tensor) -> Tensor:
            held.copy_(x)
            result.copy_(run(held, settings))
            return result.clone()

        return replay


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(candidates, "capture_cuda", made)
    return made


def plain(x: Tensor, settings: NsSettings) -> Tensor:
    return orthogonalize(x, settings=settings)


def test_a_shape_is_captured_at_its_second_call_and_replayed_from_then_on(record: Recorder) -> None:
    run = Replayed(plain)
    inputs = [torch.randn(2, 6, 9) for _ in range(4)]
    kept = [run(x, SETTINGS) for x in inputs]
    assert record.captures == 1
    for x, result in zip(inputs, kept, strict=True):
        assert torch.equal(result, plain(x, SETTINGS)), "a later replay must not change an earlier result"


def test_shape_dtype_storage_order_and_settings_have_graphs_of_their_own(record: Recorder) -> None:
    run = Replayed(plain)
    x = torch.randn(6, 6)
    other = NsSettings(resolve_schedule("quintic", 3))
    for given, settings in (
        (x, SETTINGS),
        (x.mT, SETTINGS),
        (x.double(), SETTINGS),
        (x[:4], SETTINGS),
        (x, other),
    ):
        for _ in range(3):
            assert torch.equal(run(given, settings), plain(given, settings))
    assert record.captures == 5
    for _ in range(3):
        run(x[:, 1:5], SETTINGS)  # not dense: no buffer has its strides
    assert record.captures == 5


def test_the_least_used_graph_goes_first(monkeypatch: pytest.MonkeyPatch, record: Recorder) -> None:
    monkeypatch.setattr(candidates, "MAX_GRAPHS", 2)
    run = Replayed(plain)
    first, second, third = (torch.randn(4, 4 + extra) for extra in range(3))
    for x in (first, first, second, second, first, third, third):
        run(x, SETTINGS)
    assert record.captures == 3
    run(first, SETTINGS)
    assert record.captures == 3, "the first was used after the second, so it is still there"
    run(second, SETTINGS)
    run(second, SETTINGS)
    assert record.captures == 4


def gpu_names(
    batch: int, rows: int, cols: int, dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    # What a build with CUDA would answer; no such build can be made here.
    operators = SimpleNamespace(sym_gemm_kernel=lambda _: kernel)
    monkeypatch.setattr(candidates, "has_kernel", lambda *_: True)
    settings = NsSettings(SETTINGS.coefficients, "gram", dtype)
    problem = Problem("cuda", torch.float32, batch, rows, cols, 0, settings)
    return [each.name for each in candidates_for(problem, operators)]


def test_the_name_of_a_gpu_candidate_says_what_computes_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.float16
    assert gpu_names(1, 512, 2048, half, "sm90", monkeypatch)[:2] == ["ops gram+sm90", "ops standard+sm90"]
    assert gpu_names(1, 512, 2048, half, "sm80", monkeypatch)[:2] == ["ops gram+sm80", "ops standard+sm80"]
    assert gpu_names(1, 512, 2050, half, "sm90", monkeypatch)[0] == "ops gram+cublas", (
        "2050 is no multiple of 8"
    )
    assert gpu_names(1, 512, 2048, torch.float32, "sm90", monkeypatch)[0] == "ops gram+cublas"
    assert gpu_names(1, 512, 2048, half, "this device cannot run", monkeypatch)[0] == "ops gram+cublas"


def test_graphs_are_tried_after_the_plain_calls_and_only_where_the_host_may_be_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = gpu_names(8, 512, 512, torch.float16, "sm80", monkeypatch)
    half = len(small) // 2
    assert small[half:] == [f"{name}+graph" for name in small[:half]]
    assert not any("graph" in name for name in gpu_names(1, 8192, 8192, torch.float16, "sm90", monkeypatch))


def test_released_graphs_are_captured_anew_and_give_the_same(
    monkeypatch: pytest.MonkeyPatch, record: Recorder
) -> None:
    """``engine.offload_states`` gives the graphs' memory up; the pool of torch goes with its last graph."""
    monkeypatch.setattr(candidates, "_pools", {torch.device("cpu"): "handle"})
    run = Replayed(plain)
    x = torch.randn(2, 6, 9)
    before = [run(x, SETTINGS) for _ in range(2)]
    run.release()
    assert all(replay is None for replay in run._replays.values()) and not candidates._pools
    assert torch.equal(run(x, SETTINGS), before[1]) and record.captures == 2
