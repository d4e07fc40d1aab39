"""``python -m deepspeed_muon rates``: other optimizers' settings as those of this one, and the sizes of updates."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_muon import Muon
from deepspeed_muon.__main__ import main
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.forecast.rates import translate
from tests.support.native_ops import REPOSITORY

ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}}}
TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def settings(content: dict[str, Any]) -> dict[str, Any]:
    return translate(content)[1].settings


def test_adamws_defaults_are_written_out() -> None:
    rates = {"lr": 3e-4, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.1}
    assert settings(ADAMW) == {**rates, "betas": [0.9, 0.999], "eps": 1e-8}


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    """`| head` ended a command in a traceback of BrokenPipeError."""
    (tmp_path / "adamw.json").write_text(json.dumps(ADAMW))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "deepspeed_muon", "rates", str(tmp_path / "adamw.json")]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_auto_of_the_trainer_stays() -> None:
    found = settings({"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}})
    assert (found["lr"], found["betas"]) == ("auto", "auto")


@pytest.mark.parametrize(("clipping", "stage", "rate"), [(1.0, 2, 0.02), (0.0, 2, 3.0), (1.0, 0, 3.0)])
def test_a_rate_for_clipped_updates_does_not_carry_over(clipping: float, stage: int, rate: float) -> None:
    kept = {"adam_lr": 1e-3, "momentum": 0.9}
    params = {"muon_lr": 3.0, **kept, "per_head_muon": True, "torch_adam": True}
    content = {"optimizer": {"type": "Muon", "params": params}, "gradient_clipping": clipping}
    kind, found = translate({**content, "zero_optimization": {"stage": stage}})
    assert kind == "deepspeed" and list(found.left_out) == ["torch_adam"]
    assert found.settings == {"muon_lr": rate, **kept, "matrices": {"*": {"heads": "config"}}}


@pytest.mark.parametrize("coefficients", [(3.4445, -4.7750, 2.0315), (3.0, -3.2, 1.2)])
def test_torchs_settings_take_the_same_step(coefficients: tuple[float, float, float]) -> None:
    given = {"lr": 0.01, "momentum": 0.9, "nesterov": False, "ns_coefficients": coefficients, "eps": 1e-7}
    found = settings({"optimizer": {"type": "Muon", "params": given}})
    torch.manual_seed(0)
    start = torch.randn(24, 16)
    theirs = torch.nn.Parameter(start.clone())
    ours = torch.nn.Parameter(theirs.detach().clone())
    other = torch.optim.Muon([theirs], **{**given, "eps": 1e-7})
    this = Muon([("layers.0.weight", ours)], **found, ns_dtype="fp32")
    for _ in range(2):
        theirs.grad = torch.randn(24, 16)
        ours.grad = theirs.grad.clone()
        other.step()
        this.step()
    # torch's iteration rounds to bf16, 2^-9 in each of 15 products.
    with torch.no_grad():
        assert float((ours - theirs).norm() / (theirs - start).norm()) < 0.03


def test_megatrons_arguments() -> None:
    given = {"optimizer": "muon", "lr": 5e-4, "weight-decay": 0.1, "adam-beta1": 0.9, "muon_momentum": 0.9}
    recommended = settings(
        {**given, "muon-scale-mode": "spectral", "muon_extra_scale_factor": 0.2, "num_layers": 24}
    )
    assert recommended["adjust_lr_fn"] == "match_rms_adamw" and recommended["lr"] == 5e-4
    assert recommended["nesterov"] is False and recommended["momentum"] == 0.9
    plain = settings({**given, "muon_scale_mode": "shape_scaling", "muon_extra_scale_factor": 2.0})
    assert (plain["adjust_lr_fn"], plain["update_scale"]) == ("original", 2.0)
    assert (plain["lr"], plain["weight_decay"]) == (5e-4, 0.1)
    of_verl = settings({"optimizer": "muon", "muon_match_adamw_update_rms": True, "betas": [0.8, 0.99]})
    assert of_verl["update_scale"] == pytest.approx(1 / 3) and of_verl["betas"] == [0.8, 0.99]


def test_dions_arguments() -> None:
    given = {"mu": 0.9, "adjust_lr": "rms_norm", "weight_decay": 0.1, "use_triton": True}
    kind, found = translate({"optimizer": {"type": "Muon", "params": given}})
    assert (kind, list(found.left_out)) == ("dion", ["use_triton"])
    expected = {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw", "momentum": 0.9, "nesterov": False}
    assert found.settings == {**expected, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8}


@pytest.mark.parametrize(
    ("optimizer", "more", "message"),
    [
        ({"type": "Lion", "params": {}}, {}, "'Lion' has no counterpart"),
        ({}, {}, "'' has no counterpart"),
        ({"type": "AdamW", "params": {"lr": -1}}, {}, "optimizer.params.lr: must be at least 0"),
        ({"type": "AdamW", "params": [1]}, {}, "optimizer.params: must be an object"),
        ({"type": "Muon", "params": {"adjust_lr": None}}, {}, "adjust_lr: None has no counterpart"),
        ("muon", {"muon_extra_scale_factor": "1"}, "a value of the wrong type"),
        ("muon", {"muon_extra_scale_factor": 0.0}, "muon_extra_scale_factor: must be positive"),
        ("muon", {"muon_scale_mode": "original"}, "'original' is none of Megatron-LM's modes"),
    ],
)
def test_what_cannot_be_translated(optimizer: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        translate({"optimizer": optimizer, **more})


Report = Callable[..., dict[str, Any]]


@pytest.fixture
def report_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Report:
    """Write a configuration with these settings and run the command on it with ``--json``; return what it prints."""

    def run(params: dict[str, Any], *arguments: str | Path, type_name: str = "Muon") -> dict[str, Any]:
        file = written(tmp_path, params, type_name)
        assert main(["rates", str(file), *map(str, arguments), "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    return run


def written(folder: Path, params: dict[str, Any], type_name: str = "Muon") -> Path:
    """Write a configuration with these settings."""
    (folder / "ds.json").write_text(json.dumps({"optimizer": {"type": type_name, "params": params}}))
    return folder / "ds.json"


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(ADAMW) + "  // hjson")
    assert main(["rates", str(file)]) == 0
    text = capsys.readouterr().out
    section = json.loads("{" + text[text.index('"optimizer"') :] + "}")
    assert section["optimizer"]["params"] == settings(ADAMW)
    assert all(f"  {key} " in text for key in section["optimizer"]["params"])
    assert main(["rates", str(file), "--check"]) == 2
    assert "--check needs --model" in capsys.readouterr().err
    assert main(["rates", str(tmp_path / "none.json")]) == 2
    assert main(["rates", str(REPOSITORY / "ds_configs" / "1b_8gpus.hjson")]) == 0


def test_the_page_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (REPOSITORY / "docs" / "rates.md").read_text()
    for name, text in re.findall(r'^```json title="(.*?)"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL):
        Path(name).write_text(text)
    blocks = re.findall(
        r"^```console\n\$ python -m deepspeed_muon (.*?)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL
    )
    assert blocks
    for arguments, output in blocks:
        assert main(arguments.split()) == 0
        assert capsys.readouterr().out == output


def test_the_rate_of_adamw_is_carried_to_a_wider_model(report_of: Report) -> None:
    """Under match_rms_adamw, Muon's rate falls with the width; its product with the decay and AdamW's rate stay."""
    adamw = {"lr": 2e-3, "weight_decay": 0.1}
    report = report_of(adamw, "--from", "width=256", "--to", "width=1024", type_name="AdamW")
    params = report["optimizer"]["params"]
    assert params["muon_lr"] == pytest.approx(2e-3 * 4**-0.65, rel=2e-3) and params["adam_lr"] == 2e-3
    assert params["muon_lr"] * params["muon_weight_decay"] == pytest.approx(2e-3 * 0.1, rel=5e-3)
    assert params["tuned_width"] == 1024 and "lr" not in params
    assert report["reasons"].keys() == params.keys()
    # The next step up: the width of the configuration is where its rate comes from.
    again = report_of(params, "--to", "width=2048")["optimizer"]["params"]
    assert again["muon_lr"] == pytest.approx(params["muon_lr"] * 2**-0.65, rel=2e-3)
    assert again["adam_lr"] == 2e-3 and again["tuned_width"] == 2048


@pytest.mark.parametrize(
    ("params", "muon_lr", "note"),
    [
        ({}, 0.018, ""),
        ({"variant": "normuon"}, 0.018, ""),
        ({"adjust_lr_fn": "spectral"}, 0.0127, ""),
        ({"adjust_lr_fn": "unit_rms_norm"}, 0.02, "under unit_rms_norm"),
        ({"variant": "hyperball"}, 0.02, "under hyperball"),
    ],
    ids=str,
)
def test_rules_over_widths(params: dict[str, Any], muon_lr: float, note: str, report_of: Report) -> None:
    params = {"muon_lr": 0.02, "adam_lr": 1e-3, **params}
    report = report_of(params, "--from", "width=256", "--to", "width=512")
    assert report["optimizer"]["params"]["muon_lr"] == muon_lr
    assert ("tuned_width" in report["optimizer"]["params"]) == (muon_lr != 0.02)
    assert (note in report["notes"][0]) if note else not report["notes"]


def test_auto_is_not_multiplied(report_of: Report) -> None:
    auto = {"lr": "auto", "weight_decay": "auto"}
    report = report_of(auto, "--from", "width=256", "--to", "width=512", type_name="AdamW")
    assert report["optimizer"]["params"]["lr"] == report["optimizer"]["params"]["weight_decay"] == "auto"
    assert "set muon_lr to 0.637 times the learning rate that fills it in" in report["notes"][0]
    assert {law["muon_lr"] for law in report["published"]} == {None}


def test_one_law_is_followed_and_others_only_if_asked_for(report_of: Report) -> None:
    params = {"muon_lr": 0.02, "adam_lr": 1e-3, "weight_decay": 0.1}
    sizes = ["--from", "width=256", "tokens=1e9", "batch=5e5", "--to", "width=512", "tokens=8e9", "batch=2e6"]
    report = report_of(params, *sizes)
    laws = {law["name"]: law for law in report["published"]}
    assert laws["marin"]["factor"] == pytest.approx(2**-0.15 * 8**-0.395 * 2, rel=2e-3)
    assert report["optimizer"]["params"]["muon_lr"] == laws["marin"]["muon_lr"]
    # The product of rate and decay is kept over widths alone.
    decay = report["optimizer"]["params"]["muon_weight_decay"]
    assert decay == pytest.approx(0.1 * 2**0.15, rel=5e-3)
    assert laws["hyperp"]["without"] == ["depth"] and laws["kellerjordan"]["factor"] == 1.0
    report = report_of(params, *sizes, "--apply", "scion")
    assert report["optimizer"]["params"]["muon_lr"] == laws["scion"]["muon_lr"]
    assert "because --apply asks for it" in report["reasons"]["muon_lr"]
    # Sizes that are not given are not followed.
    report = report_of(params, "--from", "tokens=1e9", "--to", "tokens=8e9", "width=512")
    assert report["optimizer"]["params"]["muon_lr"] == pytest.approx(0.02 * 8**-0.395, rel=5e-3)
    # The root of the width in the scale of match_rms_adamw is divided out.
    report = report_of({"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"}, *sizes)
    laws = {law["name"]: law["factor"] for law in report["published"]}
    assert laws["kellerjordan"] == pytest.approx(2**-0.5, rel=2e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--from heigth=3", "--from: must be NAME=NUMBER, as in width=512"),
        ("--to width=big", "--to: must be NAME=NUMBER, as in width=512"),
        ("--to width=-1", "and a positive number, got 'width=-1'"),
        ("--to width=1 width=2", "--to: width is given twice"),
        (
            "--from width=1 tokens=1 --to width=2 --apply marin",
            "--apply marin: needs tokens and batch in --from and in --to",
        ),
        ("--from batch=1 --to batch=2 --apply nanochat", "--apply nanochat: needs width in"),
    ],
)
def test_sizes_that_cannot_be_read(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"})
    assert main(["rates", str(file), *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_rates_that_nobody_chose_are_written_out(report_of: Report) -> None:
    report = report_of({"muon_lr": 0.04, "adam_lr": None, "tuned_width": None})
    assert report["optimizer"]["params"] == {"muon_lr": 0.04, "adam_lr": 3e-4, "tuned_width": None}
    assert "chosen by nobody" in report["reasons"]["adam_lr"] and not report["notes"]
    assert "set adjust_lr_fn to 'match_rms_adamw'" in report_of({"lr": 3e-4})["notes"][0]


def test_width_and_depth_of_the_model(tmp_path: Path, report_of: Report) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    params = {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw", "tuned_width": 64}
    report = report_of(params, "--model", tmp_path)
    assert report["from"] == {"width": 64} and report["to"] == {"width": 128, "depth": 3}
    assert report["optimizer"]["params"]["muon_lr"] == 6.37e-4
    assert report_of(params, "--model", tmp_path, "--to", "width=64")["to"] == {"width": 64, "depth": 3}


@pytest.mark.parametrize(
    ("chosen", "ratio"),
    [
        # Twice the width: the update of "original" has 1 / sqrt(2) of the size.
        ({"adjust_lr_fn": "original"}, 0.5**0.5),
        ({"adjust_lr_fn": "match_rms_adamw"}, 1.0),
        ({"variant": "hyperball"}, 1.0),
    ],
    ids=str,
)
def test_check_measures_what_the_rule_says(
    chosen: dict[str, str], ratio: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    file = written(tmp_path, {"lr": 0.01, **chosen})
    assert main(["rates", str(file), "--model", str(tmp_path), "--check"]) == 0
    printed = capsys.readouterr().out
    ratios = [float(found) for found in re.findall(r"ratio ([\d.]+)", printed)]
    assert ratios == pytest.approx([ratio] * 7, rel=0.1) and "Muon for 21 tensors" in printed


def test_check_fails_on_a_wrong_size_and_needs_a_model_that_can_be_halved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**TINY_LLAMA, **ADAMW, "intermediate_size": 2}))
    assert main(["rates", str(file), "--model", str(file), "--check"]) == 2
    assert "gate_proj.weight goes to AdamW: take a wider model" in capsys.readouterr().err
    file.write_text(json.dumps({**TINY_LLAMA, **ADAMW}))
    monkeypatch.setattr("deepspeed_muon.forecast.rates.shape_scale", lambda *_: 1.0)
    assert main(["rates", str(file), "--model", str(file), "--check"]) == 1
