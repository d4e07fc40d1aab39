"""``python -m deepspeed_muon report``: what it says, and its exit status."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepspeed_muon.__main__ import main
from deepspeed_muon.errors import InstallationError
from deepspeed_muon.ops import self_test


@pytest.mark.kernels
@pytest.mark.native
def test_the_selftest_passes_and_covers_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--selftest", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all(check["ok"] for check in report["selftest"])
    tested = {check["op"].split()[0] for check in report["selftest"]}
    assert tested == set(self_test.TESTS["flat passes"]) and report["build"]["library"]
    assert set(report["ops"]) == {name for names in self_test.TESTS.values() for name in names}
    assert all("cpu" in report["ops"][name] for name in tested)
    assert report["versions"]["torch"] and report["versions"]["deepspeed"] and report["build"]["folder"]


def test_the_text_names_all_components(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 0
    text = capsys.readouterr().out
    for word in ("torch", "deepspeed", "MPI", "g++", "nvcc", "ninja", "sym_gemm", "architectures", "Hopper"):
        assert word in text
    assert "self-test" not in text


def test_a_failed_check_is_a_failed_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed: list[dict[str, Any]] = [
        {"op": "sym_gemm", "device": "cpu", "error": 1.0, "bound": 1e-4, "ok": False}
    ]
    monkeypatch.setattr(self_test, "checks", lambda: failed)
    assert main(["report", "--selftest"]) == 1
    assert "FAILED cpu   sym_gemm" in capsys.readouterr().out


def test_ops_that_cannot_be_built_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise InstallationError("no C++ compiler")

    monkeypatch.setattr(self_test, "checks", fail)
    assert main(["report", "--selftest"]) == 2
    assert capsys.readouterr().err == "deepspeed_muon report: no C++ compiler\n"
