"""``benchmarks/newton_schulz.py`` as on a GPU, with a stand-in for CUDA's events; and what raises is left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks import newton_schulz
from deepspeed_muon.ops import dispatch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Clock:
    """Counts a millisecond for each call of an implementation."""

    now = 0.0


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = Clock.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return end.time - self.time


def test_a_turn_is_20_to_50_calls_between_two_events_on_inputs_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    calls: dict[str, list[int]] = {"fast": [], "slow": []}

    def run_of(name: str, ms: float) -> newton_schulz.Run:
        def run(x: Tensor) -> None:
            Clock.now += ms
            calls[name].append(int(x))

        return run

    def raises(x: Tensor) -> None:
        raise RuntimeError("not on this GPU")

    runs = {"fast": run_of("fast", 0.5), "slow": run_of("slow", 80.0), "wrong": raises}
    inputs = [torch.tensor(number) for number in range(3)]
    times = newton_schulz.milliseconds(runs, inputs, 0.0, CUDA)
    assert times == {"fast": pytest.approx([0.5] * 3), "slow": pytest.approx([80.0] * 3)}
    assert len(calls["fast"]) == 1 + 3 + 3 * 50 and len(calls["slow"]) == 1 + 3 + 3 * 20
    assert calls["fast"][4:10] == [0, 1, 2, 0, 1, 2]


def test_inputs_are_together_larger_than_the_l2_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(L2_cache_size=10_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(Tensor, "to", lambda x, device, dtype: x.type(dtype))
    inputs = newton_schulz.inputs_like(torch.empty(1, 32, 32, dtype=torch.float16), CUDA)
    assert len(inputs) == 10 and inputs[0].dtype == torch.float16 and not torch.equal(*inputs[:2])
    assert len(newton_schulz.inputs_like(torch.empty(1, 32, 32), CPU)) == 1


def test_a_pass_that_raises_leaves_out_its_column_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended the whole benchmark with a KeyError."""
    passes = dispatch.flat_passes("torch")

    def raises(*_: object) -> None:
        raise RuntimeError("no such kernel")

    broken = dispatch.FlatPasses("ops", raises, passes.momentum_pack_int8, passes.unpack_apply)
    monkeypatch.setattr(dispatch, "flat_passes", lambda backend, _: broken if backend == "ops" else passes)
    rows = list(newton_schulz.flat_rows(CPU, 512, 0.0))
    assert [row["wire dtype"] for row in rows] == ["float32", "bfloat16", "float16"]
    for row in rows:
        assert row.keys() == {"wire dtype", "copy", "pack, int8", "apply", "pack, torch", "apply, torch"}
    assert "pack is left out: RuntimeError: no such kernel" in capsys.readouterr().out
