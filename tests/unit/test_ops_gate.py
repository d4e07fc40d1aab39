"""Native CUDA code runs only after a self-test: what hangs, crashes or is wrong ends in a warning and torch's code."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepspeed_muon.errors import OpsUnavailableError
from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.ops import candidates, dispatch, gate
from deepspeed_muon.ops.candidates import Problem
from tests.support.native_ops import REPOSITORY

IDENTITY = ["a GPU", "13000", torch.__version__, "a key"]


def command(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


GOOD = command("print('{}')")

PLANTED = {
    "hangs": (
        command("import time; print('sym_gemm', flush=True); time.sleep(600)"),
        "did not end within 1 s",
    ),
    "crashes": (
        command("import os; print('sym_gemm', flush=True); os.abort()"),
        "ended by SIGABRT: sym_gemm",
    ),
    "is wrong": (
        command("""print('{"native": "sym_gemm: error 0.5, bound 0.001"}')"""),
        "native: sym_gemm: error 0.5",
    ),
    "ends badly": (command("raise SystemExit('no such device')"), "with 1: no such device"),
}


@pytest.mark.parametrize("how", list(PLANTED))
def test_a_bad_kernel_is_kept_out(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    bad, why = PLANTED[how]
    verdict = gate.decide(IDENTITY, bad, folder=tmp_path, seconds=1.0 if how == "hangs" else 60.0)
    assert "native" in verdict.failed and why in verdict.why
    assert verdict.passing == (how != "is wrong")
    (warning,) = caplog.records
    assert why in warning.getMessage() and "runs it again" in warning.getMessage()
    # The next process believes it and warns too, without running anything.
    again = gate.decide(IDENTITY, command("raise SystemExit('not run')"), folder=tmp_path)
    assert again == verdict and len(caplog.records) == 2
    # Another driver is another machine.
    other = gate.decide([*IDENTITY[:1], "13010", *IDENTITY[2:]], GOOD, folder=tmp_path)
    assert not other.failed and len(caplog.records) == 2


def test_what_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    code = f"""
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open({str(tmp_path / "partial")!r}, "w").write(str(child.pid))
        os.replace({str(tmp_path / "partial")!r}, {str(tmp_path / "child")!r})
        time.sleep(600)
    """
    for seconds in (3.0, 100.0):  # it may end before the child has begun, on a busy machine
        assert gate.decide([*IDENTITY, str(seconds)], command(code), folder=tmp_path, seconds=seconds).failed
        if (tmp_path / "child").exists():
            break
    child = Path("/proc", (tmp_path / "child").read_text())
    while child.exists() and (child / "stat").read_text().split()[2] != "Z":
        time.sleep(0.1)


def test_processes_that_start_at_once_test_once(tmp_path: Path) -> None:
    code = f"""
        import sys
        from pathlib import Path
        from deepspeed_muon.ops import gate
        count = "import time; time.sleep(1); open({str(tmp_path / "count")!r}, 'a').write('x'); print('{{}}')"
        print(gate.decide(["same"], [sys.executable, "-c", count], folder=Path({str(tmp_path)!r})).failed)
    """
    started = [
        subprocess.Popen(command(code), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [each.communicate(timeout=120)[0].strip() for each in started] == ["{}", "{}"]
    assert (tmp_path / "count").read_text() == "x"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not gate.decide(IDENTITY, GOOD, folder=tmp_path / "file").failed


def test_without_trust_only_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = SimpleNamespace(sym_gemm_kernel=lambda: "sm90", flat_passes_missing=lambda: "")
    operators.momentum_pack_ = operators.unpack_apply_ = SimpleNamespace(default=None)
    for module in (candidates, dispatch):
        monkeypatch.setattr(module, "has_kernel", lambda given, *_: given is not None)
    monkeypatch.setattr(dispatch, "_operators", lambda _: operators)
    settings = NsSettings(resolve_schedule("quintic"), "gram", torch.float16)
    problem = Problem("cuda", torch.float32, 1, 512, 2048, 0, settings)
    seen: list[list[str]] = []
    tuner = SimpleNamespace(
        choose=lambda _, offered, __: (seen.append([each.name for each in offered]), offered[0])[1],
        choice=lambda _: None,
    )
    for ok in (True, False):
        monkeypatch.setattr(
            dispatch,
            "trusted",
            lambda _, ok=ok: gate.Verdict({} if ok else dict.fromkeys(gate.PARTS, "it hangs")),
        )
        dispatch.Orthogonalizer("auto", operators, tuner)._choose(problem, torch.device("cuda"))  # type: ignore[arg-type]
        assert dispatch.flat_passes("auto", "cuda").name == ("ops" if ok else "torch")
    assert any(name.startswith("ops ") for name in seen[0]) and any(
        name.endswith("+graph") for name in seen[0]
    )
    assert seen[1] == ["torch gram", "torch standard"]
    with pytest.raises(OpsUnavailableError, match="it hangs"):
        dispatch.Orthogonalizer("ops", operators)._choose(problem, torch.device("cuda"))
    with pytest.raises(OpsUnavailableError, match="it hangs"):
        dispatch.flat_passes("ops", "cuda")


def test_a_library_for_other_gpus_has_no_flat_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = SimpleNamespace(flat_passes_missing=lambda: "no code for this device")
    monkeypatch.setattr(dispatch, "has_kernel", lambda *_: True)
    monkeypatch.setattr(dispatch, "_operators", lambda _: operators)
    monkeypatch.setattr(dispatch, "trusted", lambda _: gate.Verdict())
    assert dispatch.flat_passes("auto", "cuda").name == "torch"
    with pytest.raises(OpsUnavailableError, match="no code for this device"):
        dispatch.flat_passes("ops", "cuda")
