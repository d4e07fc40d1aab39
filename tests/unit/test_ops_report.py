"""``python -m deepspeed_muon report``: what it says, and its exit status."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_muon.__main__ import main
from deepspeed_muon.errors import InstallationError
from deepspeed_muon.ops import gate, library, report
from deepspeed_muon.ops.gate import Verdict


@pytest.mark.kernels
@pytest.mark.native
def test_the_selftest_passes_and_covers_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--selftest", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(check["ok"] for check in found["selftest"])
    tested = {check["op"].split()[0] for check in found["selftest"]}
    assert tested == set(library.NAMES) == set(found["ops"])
    assert found["build"]["library"] and all("cpu" in devices for devices in found["ops"].values())
    assert found["versions"]["torch"] and found["versions"]["deepspeed"] and found["build"]["folder"]


def test_the_text_names_what_a_reader_looks_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 0
    text = capsys.readouterr().out
    for word in ("torch", "deepspeed", "MPI", "g++", "nvcc", "ninja", "sym_gemm", "architectures", "wgmma"):
        assert word in text
    assert "self-test" not in text


def test_a_gpu_names_the_kernels_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    without = report.collect()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(report, "cached_verdict", lambda device: Verdict({"graphs": "it hangs"}))
    monkeypatch.setattr(report, "has_kernel", lambda operators, *_: operators is not None)
    operators = SimpleNamespace(
        sym_gemm_kernel=lambda _: "sm90", flat_passes_missing=lambda _: "no code for this device"
    )
    found = report._gpu(operators)
    assert found["sym_gemm"] == "sm90"
    assert found["flat passes"] == "no code for this device"
    assert "it hangs" in found["tested before first use"]
    assert "sym_gemm" not in report._gpu(None)
    text = report.render({**without, "hardware": found})
    assert "sym_gemm               sm90" in text and "no code for this device" in text


def test_a_failed_check_is_a_failed_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed: list[dict[str, Any]] = [
        {"op": "sym_gemm", "device": "cpu", "error": 1.0, "bound": 1e-4, "ok": False}
    ]
    monkeypatch.setattr(gate, "self_test", lambda: failed)
    assert main(["report", "--selftest"]) == 1
    assert "FAILED cpu   sym_gemm" in capsys.readouterr().out


def test_ops_that_cannot_be_built_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise InstallationError("no C++ compiler")

    monkeypatch.setattr(gate, "self_test", fail)
    assert main(["report", "--selftest"]) == 2
    assert capsys.readouterr().err == "deepspeed_muon report: no C++ compiler\n"


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 0 and "deepspeed_muon report" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["no-such-command"])
    assert stopped.value.code == 2
