"""A Triton that cannot import switched all native kernels off, and a GPU without memory did so for good.

The choice between kernels ended training where a candidate raised something else than a RuntimeError, and differed
between the first process, whose time went into compiling, and the second.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings, orthogonalize
from deepspeed_muon.ops import autotune, checks, gate
from deepspeed_muon.ops.autotune import measure
from deepspeed_muon.ops.candidates import Candidate, problem_of

IDENTITY = ["a GPU", "a driver"]
SETTINGS = NsSettings(resolve_schedule("quintic"))


def saying(text: str) -> list[str]:
    return [sys.executable, "-c", f"print({text!r})"]


def test_each_part_has_a_verdict(tmp_path: Path) -> None:
    told = saying('noise\n{"triton": "ImportError: no driver", "passing": true}')
    assert gate.decide(IDENTITY, told, folder=tmp_path).failed == {"triton": "ImportError: no driver"}


def test_what_raises_is_a_failure_of_its_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[dict[str, object]]:
        raise ImportError("no driver")

    right = {"op": "replay", "device": "cuda", "error": 0.0, "bound": 0.0, "ok": True}
    monkeypatch.setattr(checks.library, "try_load", lambda: None)
    monkeypatch.setattr(checks, "triton_products", lambda: 1)
    monkeypatch.setattr(checks, "_test_triton", broken)
    monkeypatch.setattr(checks, "_test_graphs", lambda operators: [dict(right)])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert gate._failures(0) == {"triton": "ImportError: no driver", "passing": True}


def test_only_wrong_numbers_are_remembered_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1e9]
    monkeypatch.setattr(gate.time, "time", lambda: now[0])
    crashed = gate.decide(IDENTITY, [sys.executable, "-c", "raise MemoryError"], folder=tmp_path)
    assert crashed.failed.keys() == set(gate.PARTS)
    good = saying("{}")
    assert gate.decide(IDENTITY, good, folder=tmp_path) == crashed, "the processes of one start test once"
    now[0] += 3600
    assert not gate.decide(IDENTITY, good, folder=tmp_path).failed
    other = [*IDENTITY, "wrong"]
    wrong = gate.decide(other, saying('{"native": "error 0.5"}'), folder=tmp_path)
    now[0] += 1e8
    assert gate.decide(other, good, folder=tmp_path) == wrong


def test_any_exception_of_a_candidate_rules_it_out() -> None:
    def fails(x: Tensor, settings: NsSettings) -> Tensor:
        raise NotImplementedError

    fine = Candidate("fine", lambda x, settings: orthogonalize(x, settings=settings))
    choice = measure(
        problem_of(torch.empty(8, 12), SETTINGS), [fine, Candidate("odd", fails)], torch.device("cpu")
    )
    assert choice.name == "fine" and choice.rejected == {"odd": "failed: NotImplementedError"}


def test_compiling_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    clock, compiled = Clock(), []
    monkeypatch.setattr(autotune, "time", clock)

    def taking(name: str, seconds: float, compile_seconds: float) -> Candidate:
        def run(x: Tensor, settings: NsSettings) -> Tensor:
            clock.now += seconds if name in compiled else compile_seconds
            compiled.append(name)
            return orthogonalize(x, settings=settings)

        return Candidate(name, run, warm_calls=1)

    problem = problem_of(torch.empty(8, 12), SETTINGS)
    offered = [taking("slow", 0.02, 30.0), taking("other", 0.02, 30.0), taking("fast", 0.001, 30.0)]
    for _ in range(2):  # the second time everything is compiled
        choice = measure(problem, offered, torch.device("cpu"))
        assert (choice.name, choice.reason) == ("fast", "measured")
