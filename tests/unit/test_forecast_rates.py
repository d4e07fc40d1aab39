"""``python -m deepspeed_muon rates``: other optimizers' settings as those of this one, and the sizes of updates."""

from __future__ import annotations

import contextlib
import json
import math
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
from deepspeed_muon.forecast.rates import carry
from deepspeed_muon.forecast.translation import translate
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


def muon(params: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "Muon", "params": params}, **more}


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


@pytest.mark.parametrize(
    ("clipping", "stage", "rate"),
    [(1.0, 2, 0.02), ("auto", 3, 0.02), (None, 1, 0.02), (0.0, 2, 3.0), (1.0, 0, 3.0)],
)
def test_a_rate_for_clipped_updates_does_not_carry_over(clipping: Any, stage: int, rate: float) -> None:
    """DeepSpeed's default is to clip, which a configuration without ``gradient_clipping`` was not read as."""
    unchanged = {"adam_lr": 1e-3, "momentum": 0.9}
    params = {"muon_lr": 3.0, **unchanged, "per_head_muon": True, "torch_adam": True}
    kind, translation = translate(
        muon(params, gradient_clipping=clipping, zero_optimization={"stage": stage})
    )
    assert kind == "deepspeed" and list(translation.left_out) == ["torch_adam"]
    assert translation.settings == {"muon_lr": rate, **unchanged, "matrices": {"*": {"heads": "config"}}}
    assert translation.rate_is_tuned == (rate == 3.0)


def test_a_rate_that_replaces_another_is_not_carried() -> None:
    content = muon({"lr": 3.0, "torch_adam": False}, scheduler={"params": {"warmup_max_lr": 3.0}})
    _, translation = translate({**content, "zero_optimization": {"stage": 2}})
    carry(translation, {"width": 256}, {"width": 512})
    # lr is AdamW's rate, and what the schedule's number stands for.
    assert translation.settings == {"muon_lr": 0.02, "lr": 3.0}
    assert translation.notes == [
        "Muon's rate is one to begin with and was not tuned: it is not carried to the other size"
    ]


CLIPPED = {"gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
MATCHED = {"adjust_lr_fn": "match_rms_adamw"}
ADAM_HALF = {"betas": [0.9, 0.999], "eps": 1e-8}
OF_DION = {"momentum": 0.95, "weight_decay": 0.01, "betas": [0.9, 0.95], "eps": 1e-8}
NULL = None


@pytest.mark.parametrize(
    ("content", "kind", "expected", "notes"),
    [
        # This package's rates were taken for DeepSpeed's, whose update is clipped, and replaced.
        (muon({"lr": 4e-4, **MATCHED}, **CLIPPED), "this", {"lr": 4e-4, **MATCHED}, []),
        (muon({"muon_lr": 0.1, "lr": 1e-3, "tuned_width": 64}, **CLIPPED), "this", {"muon_lr": 0.1}, []),
        (
            muon({"muon_lr": 0.1, "adam_lr": 1e-3}, zero_optimization={"stage": 1}),
            "deepspeed or this",
            {"muon_lr": 0.1},
            ['add "adjust_lr_fn": "original"'],
        ),
        (muon({"muon_lr": 0.1, "adam_lr": 1e-3}), "deepspeed or this", {"muon_lr": 0.1}, []),
        # Rates that the Trainer fills in.
        (
            muon({"lr": "auto", "torch_adam": True}, **CLIPPED),
            "deepspeed",
            {"muon_lr": 0.02, "lr": "auto"},
            [],
        ),
        (
            muon({"lr": "auto"}, **CLIPPED),
            "deepspeed or this",
            {"lr": "auto"},
            ["the Trainer's learning_rate"],
        ),
        (muon({"lr": "auto", **MATCHED}), "this", {"lr": "auto"}, []),
        # It advised match_rms_adamw, which the variant refuses.
        (muon({"lr": "auto", "variant": "hyperball"}), "this", {"lr": "auto"}, ["serve both: add muon_lr"]),
        (muon({"lr": "auto", "muon_lr": 0.02}), "deepspeed or this", {"lr": "auto", "muon_lr": 0.02}, []),
        # null is a default.
        (muon({"lr": 1e-3, "muon_lr": NULL, **MATCHED}), "this", {"lr": 1e-3, **MATCHED}, []),
        ({"optimizer": {"type": "AdamW", "params": {"lr": NULL}}}, "adamw", {"lr": 1e-3}, []),
        # The schedule has the rate.
        (
            {"optimizer": {"type": "AdamW"}, "scheduler": {"params": {"warmup_max_lr": 3e-4}}},
            "adamw",
            {"lr": 3e-4},
            [],
        ),
        (
            {"optimizer": {"type": "AdamW"}, "scheduler": {"params": {"cycle_max_lr": [1e-4, 1e-4]}}},
            "adamw",
            {"lr": 1e-4},
            [],
        ),
        (
            {"optimizer": {"type": "AdamW"}, "scheduler": {"params": {"warmup_max_lr": "auto"}}},
            "adamw",
            {"lr": "auto"},
            [],
        ),
        # AdamW's arguments were read as Megatron-LM's Muon.
        (
            {"optimizer": "adam", "lr": 3e-4, "adam-beta2": 0.95, "clip_grad": 1.0, "muon_momentum": 0.95},
            "megatron adam",
            {"lr": 3e-4, **MATCHED, "weight_decay": 0.01, "betas": [0.9, 0.95], "eps": 1e-8},
            [],
        ),
        (
            {"learning_rate": 2e-5, "adam_beta1": 0.8, "adam_epsilon": 1e-7, "optim": "adamw_torch"},
            "trainer",
            {"lr": 2e-5, **MATCHED, "weight_decay": 0.0, "betas": [0.8, 0.999], "eps": 1e-7},
            [],
        ),
        # Megatron-LM's Muon was recognised by six arguments.
        (
            {"optimizer": "muon", "--lr": 5e-4, "--muon-nesterov": True},
            "megatron",
            {"nesterov": True},
            ["5 times"],
        ),
        ({"muon_coefficient_type": "simple", "lr": 5e-4}, "megatron", {"momentum": 0.95}, ["5 times"]),
        (muon({"muon_num_ns_steps": 6, "lr": 5e-4}), "megatron", {"ns_steps": 6}, ["5 times"]),
        # Muons were read as the Trainer's AdamW, because they had learning_rate.
        (
            {"learning_rate": 0.02, "muon_momentum": 0.9, "muon_scale_mode": "unit_rms_norm"},
            "megatron",
            {"lr": 0.02, "momentum": 0.9},
            ["one rate does not serve both"],
        ),
        (
            {"learning_rate": 1e-4, "mu": 0.9, "adjust_lr": "rms_norm", "epsilon": 1e-7},
            "dion",
            {"lr": 1e-4, **MATCHED, "momentum": 0.9, "eps": 1e-7},
            ["triples of coefficients"],
        ),
        # The rate of both halves was lr or muon_lr, whichever came last.
        ({"optimizer": "muon", "lr": 1e-3, "muon_lr": 0.02}, "this", {"lr": 1e-3, "muon_lr": 0.02}, []),
        ({"optimizer": "muon", "muon_lr": 0.02, "lr": 1e-3}, "this", {"lr": 1e-3, "muon_lr": 0.02}, []),
        (
            {"optimizer": "muon", "muon_lr": 0.02, "adam_lr": 3e-4, "adjust_lr_fn": "original"},
            "this",
            {"muon_lr": 0.02, "adam_lr": 3e-4, "adjust_lr_fn": "original"},
            [],
        ),
        (
            {"muon_lr": 0.02, "lr": 2e-3, "muon_momentum": 0.9, "muon_extra_scale_factor": 0.2},
            "megatron",
            {"lr": 2e-3, "momentum": 0.9, "muon_lr": NULL},
            [],
        ),
        ({"--optimizer": "muon", "--lr": 1e-3}, "megatron", {"lr": 1e-3}, ["5 times"]),
        # A key that is null identified the optimizer.
        (muon({"lr": 2e-3, "mu": NULL, **MATCHED}), "this", {"lr": 2e-3, **MATCHED}, []),
        (muon({"lr": 2e-3, "ns_coefficients": NULL, **MATCHED}), "this", {"lr": 2e-3, **MATCHED}, []),
        # torch, Dion and xtuner.
        (muon({"lr": 0.1, "adjust_lr_fn": NULL}), "torch", {"muon_lr": 0.1, "adjust_lr_fn": "original"}, []),
        (
            muon({"lr": 0.1, "eps": 1e-7, "ns_steps": 5, "weight_decay": "auto"}),
            "torch",
            {"muon_lr": 0.1, "weight_decay": "auto", "adam_lr": 3e-4},
            ["add a key that only it has"],
        ),
        (muon({"lr": 1e-3, "eps": 1e-7, "ns_steps": 5, **MATCHED, "clip": "all"}), "this", {"eps": 1e-7}, []),
        (
            muon({"lr": 0.02, "mu": 0.95, "epsilon": 1e-8}),
            "dion",
            {"lr": 0.02, "adjust_lr_fn": "unit_rms_norm", **OF_DION, "nesterov": False},
            ["triples of coefficients", "one rate does not serve both"],
        ),
        (
            muon({"lr": 1e-4, "adjust_lr": "rms_norm"}),
            "dion",
            {"lr": 1e-4, **MATCHED, **OF_DION, "nesterov": False},
            ["triples of coefficients", "for xtuner's"],
        ),
        (
            {"lr": 1e-4, "adjust_lr": "rms_norm", "clip_grad_mode": "adamw_only", "max_grad_norm": 2.0},
            "xtuner",
            {"lr": 1e-4, **MATCHED, **OF_DION, "weight_decay": 0.1, "nesterov": True, "clip": "adamw"},
            ["triples of coefficients", "set gradient_clipping to 2.0"],
        ),
        (
            muon({"enable_all2all": True}),
            "xtuner",
            {"lr": 1e-5, "clip": "adamw"},
            ["triples", "clipping to 1.0"],
        ),
    ],
)
def test_how_a_configuration_is_read(
    content: dict[str, Any], kind: str, expected: dict[str, Any], notes: list[str]
) -> None:
    read_as, translation = translate(content)
    assert (read_as, {key: translation.settings.get(key) for key in expected}) == (kind, expected)
    if kind in ("megatron adam", "trainer", "xtuner") and len(expected) > 2:
        assert translation.settings == expected
    assert all(words in note for words, note in zip(notes, translation.notes, strict=True))


def test_what_nobody_chose_has_a_reason_that_says_so() -> None:
    for content in ({"optimizer": {"type": "AdamW"}}, {"optimizer": "muon"}, muon({"mu": 0.9}), muon({})):
        _, translation = translate(content)
        assert all(
            "chosen by nobody" in translation.reasons[key]
            for key in translation.settings.keys() & {"lr", "muon_lr"}
        )
    given = {
        "optimizer": "muon",
        "lr": 1e-3,
        "decoupled_lr": 0.1,
        "muon_scalar_optimizer": "lion",
        "clip_grad": 1.0,
    }
    _, of_adam = translate({**given, "optimizer": "adam"})
    assert of_adam.left_out.keys() == {"decoupled_lr", "muon_scalar_optimizer", "clip_grad"}
    _, translation = translate({**given, "muon_lr_scale": 2.0})
    assert translation.left_out.keys() >= {*of_adam.left_out, "muon_lr_scale"}
    assert translation.reasons["momentum"] == "the default of OptimizerConfig there; --muon-momentum's is 0.9"


@pytest.mark.parametrize(
    "content",
    [
        {**ADAMW, "scheduler": {"params": {"warmup_max_lr": 1e-3}}, **CLIPPED},
        muon({"lr": 1e-3, "muon_lr": 1.0, "torch_adam": True, "betas": [0.9, 0.95]}, **CLIPPED),
        muon({"lr": 1e-3, "ns_coefficients": [3.0, -3.2, 1.2], "ns_steps": 5, "eps": 1e-7, **MATCHED}),
        muon({"lr": 1e-3, "mu": 0.9, "adjust_lr": "rms_norm", "betas": [0.9, 0.95]}),
        {"lr": 1e-3, "adjust_lr": "rms_norm", "max_grad_norm": 1.0, "clip_grad_mode": "all", "eps": 1e-8},
        {
            "optimizer": "muon",
            "lr": 1e-3,
            "muon_scale_mode": "spectral",
            "muon_extra_scale_factor": 1.0,
            "muon_match_adamw_update_rms": True,
            "betas": [0.9, 0.95],
            "muon_coefficient_type": "quintic",
        },
        {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_beta1": 0.9, "max_grad_norm": 1.0},
    ],
    ids=lambda content: translate(content)[0],
)
def test_odd_values_are_no_raw_errors(content: dict[str, Any]) -> None:
    params = content["optimizer"]["params"] if "params" in content.get("optimizer", "") else content
    for mapping in (params, content):
        for key, value in list(mapping.items()):
            for odd in (
                "x",
                "auto",
                None,
                True,
                -1,
                1.5,
                math.nan,
                [],
                [1.5, 2, 3],
                [None, 0.9],
                {},
                {"stage": "x"},
            ):
                mapping[key] = odd
                with contextlib.suppress(ConfigError):
                    _, translation = translate(content)
                    carry(translation, {"width": 256, "tokens": 1e9}, {"width": 512, "tokens": 2e9})
            mapping[key] = value


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
    for betas in ({"betas": [0.8, 0.99]}, {"adam_beta1": 0.8, "adam_beta2": 0.99}):
        of_verl = settings({"optimizer": "muon", "muon_match_adamw_update_rms": True, **betas})
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
        (
            "muon",
            {"muon_extra_scale_factor": "1"},
            "muon_extra_scale_factor: must be a positive number, got '1'",
        ),
        ("muon", {"muon_extra_scale_factor": 0.0}, "muon_extra_scale_factor: must be a positive number"),
        (
            "muon",
            {"muon_match_adamw_update_rms": True, "muon_extra_scale_factor": 0.5},
            "muon_match_adamw_update_rms: derives muon_extra_scale_factor",
        ),
        ("muon", {"betas": "auto"}, "arguments.betas: is 'auto'"),
        ("muon", {"lr": "auto"}, "lr: is 'auto'"),
        ({"type": "Lion", "params": {"mu": 0.9}}, {}, "'Lion' has no counterpart"),
        (
            {"type": "Muon", "params": {"ns_coefficients": 3, "ns_steps": 4}},
            {},
            "ns_coefficients: must be three numbers",
        ),
        ("muon", {"betas": [0.9, 0.95, 0.99]}, "arguments.betas: must be two numbers"),
        ("muon", {"adam_beta1": 1.5}, "arguments.betas[0]: must be below 1"),
        ("adaptive_muon", {"muon_momentum": 0.9}, "'adaptive_muon' has no counterpart"),
        ("normuon", {"lr": 0.02, "mu": 0.95}, "add variant 'normuon'"),
        (
            {"type": "NorMuon", "params": {"lr": 0.02, "adjust_lr": "rms_norm"}},
            {},
            "'NorMuon' has no counterpart",
        ),
        ("", {"learning_rate": 0.02, "momentum": 0.95}, "momentum: is no argument of the AdamW"),
        ("adamw", {"learning_rate": 0.02, "lr": 0.95}, "lr: is given twice"),
        ({"type": "AdamW", "params": []}, {}, "optimizer.params: must be an object"),
        ("sgd", {"lr": 0.1, "muon_momentum": 0.9}, "'sgd' has no counterpart"),
        ("", {"lr": 1e-3, "adam_beta1": 0.9}, "'' has no counterpart"),
        ("", {"learning_rate": 1e-3, "optim": "adafactor"}, "optim: 'adafactor' has no counterpart"),
        ({"type": "Muon", "params": {"muon_lr": "auto"}}, {}, "optimizer.params.muon_lr: is 'auto'"),
        (
            {"type": "Muon", "params": {"lr": 1.0}},
            {"zero_optimization": "x"},
            "zero_optimization: must be an object",
        ),
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
    assert params["muon_lr"] == pytest.approx(2e-3 * 4**-0.65, rel=2e-3) and params["lr"] == 2e-3
    assert params["muon_lr"] * params["muon_weight_decay"] == pytest.approx(2e-3 * 0.1, rel=5e-3)
    assert params["tuned_width"] == 1024 and "adam_lr" not in params
    assert report["reasons"].keys() == params.keys()
    # The next step up: the width of the configuration is where its rate comes from.
    again = report_of(params, "--to", "width=2048")["optimizer"]["params"]
    assert again["muon_lr"] == pytest.approx(params["muon_lr"] * 2**-0.65, rel=2e-3)
    assert again["lr"] == 2e-3 and again["tuned_width"] == 2048


@pytest.mark.parametrize(
    ("params", "muon_lr", "reason", "measured"),
    [
        ({}, 0.018, "which the runs here agree with", "in 16 cells"),
        ({"variant": "normuon"}, 0.018, "which the runs here agree with", "in 9 cells"),
        ({"variant": "muon_eq"}, 0.018, "which was not measured under muon_eq", "nothing under muon_eq"),
        (
            {"variant": "normuon", "adjust_lr_fn": "spectral"},
            0.0127,
            "not measured under normuon with spectral",
            "nothing under normuon with spectral",
        ),
        ({"adjust_lr_fn": "spectral"}, 0.0127, "which the runs here agree with", "width^-0.65, fitted to"),
        ({"adjust_lr_fn": "unit_rms_norm"}, 0.02, "", "nothing under unit_rms_norm"),
        ({"variant": "hyperball"}, 0.018, "over widths the best rate fell faster", "in 12 cells"),
    ],
    ids=str,
)
def test_rules_over_widths(
    params: dict[str, Any], muon_lr: float, reason: str, measured: str, report_of: Report
) -> None:
    """Reasons and costs are those of the rule and variant: "original" has more runs than the others."""
    params = {"muon_lr": 0.02, "adam_lr": 1e-3, **params}
    report = report_of(params, "--from", "width=256", "--to", "width=512")
    assert report["optimizer"]["params"]["muon_lr"] == muon_lr
    assert ("tuned_width" in report["optimizer"]["params"]) == (muon_lr != 0.02)
    assert reason in report["reasons"]["muon_lr"] and measured in report["measured"]
    assert bool(report["notes"]) == (muon_lr == 0.02)


def test_a_rate_that_nobody_chose_is_not_carried(report_of: Report) -> None:
    for params, type_name, rate in (({}, "Muon", "muon_lr"), ({}, "AdamW", "lr")):
        report = report_of(params, "--from", "width=256", "--to", "width=512", type_name=type_name)
        assert "it is not carried" in report["notes"][0]
        assert "chosen by nobody" in report["reasons"][rate]
        assert "tuned_width" not in report["optimizer"]["params"]


def test_muons_rate_does_not_become_adamws(report_of: Report) -> None:
    """One lr under "original", carried, remained as "AdamW's rate, as tuned"."""
    report = report_of({"lr": 0.02}, "--from", "width=256", "--to", "width=512")
    assert report["optimizer"]["params"]["muon_lr"] == 0.018
    assert report["reasons"]["lr"] == "as it was, Muon's rate: choose adam_lr"


def test_auto_is_not_multiplied(report_of: Report) -> None:
    auto = {"lr": "auto", "weight_decay": "auto"}
    report = report_of(auto, "--from", "width=256", "--to", "width=512", type_name="AdamW")
    params = report["optimizer"]["params"]
    assert params["lr"] == params["weight_decay"] == "auto"
    assert params["tuned_width"] == 256, "the rate was not carried, so a warning at start has to ask for it"
    assert "set muon_lr to 0.637 times the learning rate that fills it in" in report["notes"][0]
    assert "set muon_weight_decay to 1.57 times the number" in report["notes"][1]
    decay = report_of(
        {**auto, "weight_decay": 0.1}, "--from", "width=256", "--to", "width=512", type_name="AdamW"
    )
    assert "set muon_weight_decay to 0.157, with muon_lr" in decay["notes"][1]
    assert {law["muon_lr"] for law in report["published"]} == {None}


@pytest.mark.parametrize(
    ("params", "scheduler", "lr", "note"),
    [
        ({"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}, {"warmup_max_lr": 0.02}, 0.02, ""),
        (
            {"muon_lr": 0.02, "adam_lr": 1e-3},
            {"warmup_max_lr": 0.02},
            None,
            "warmup_max_lr, 0.02, stands for muon_lr",
        ),
        (
            {"muon_lr": 0.02, "adam_lr": 1e-3},
            {"cycle_max_lr": [0.02, 1e-3]},
            None,
            "multiply Muon's rates in it by 0.901",
        ),
        ({"muon_lr": 0.02, "adam_lr": 1e-3}, {"lr_range_test_min_lr": 0.02}, None, "lr_range_test_min_lr"),
        (
            {"muon_lr": 0.02, "adam_lr": 1e-3},
            {"warmup_max_lr": "auto"},
            None,
            "multiply learning_rate, with which the Trainer fills it in, by 0.901",
        ),
        ({"muon_lr": 0.02, "adam_lr": 1e-3}, {"warmup_num_steps": 9}, None, ""),
    ],
)
def test_a_schedule_follows_the_rate(params: Any, scheduler: Any, lr: float | None, note: str) -> None:
    """A schedule's number is the rate of a group with ``lr``. Once ``lr`` was ``adam_lr``, it undid the carrying."""
    _, translation = translate(muon(params, scheduler={"type": "WarmupLR", "params": scheduler}))
    before = translation.config()
    translation.notes.clear()
    carry(translation, {"width": 256}, {"width": 512})
    after, factor = translation.config(), 2**-0.65 if lr else 2**-0.15
    assert after.muon_defaults()["lr"] == pytest.approx(before.muon_defaults()["lr"] * factor, rel=5e-3)
    assert after.adam_defaults()["lr"] == before.adam_defaults()["lr"] and after.lr == lr
    assert [note in text for text in translation.notes] == ([True] if note else [])


def test_what_was_not_measured_is_said(report_of: Report) -> None:
    params = {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"}
    report = report_of(params, "--from", "batch=5e5", "width=256", "--to", "batch=8e6", "width=512")
    assert report["reasons"]["muon_lr"].endswith("extrapolated beyond what was measured, batch 512 to 2,048)")
    assert report["measured_on"].endswith("76,800 to 614,400 tokens in steps of 512 to 2,048")
    assert "how it follows batch was not measured" in report["reasons"]["lr"]
    assert "it was the same at all widths" in report["reasons"]["lr"]
    assert "widths" not in report_of(params, "--from", "batch=512", "--to", "batch=1024")["reasons"]["lr"]
    assert (
        "chosen by nobody"
        in report_of({}, "--from", "width=9", "--to", "width=99", type_name="AdamW")["reasons"]["lr"]
    )


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
        ("--to width=-1", "and a number from 1 to 1e+30, got 'width=-1'"),
        ("--from width=1e300 tokens=1e-300", "and a number from 1 to 1e+30, got 'width=1e300'"),
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
    assert report["optimizer"]["params"] == {"muon_lr": 0.04, "adam_lr": 3e-4}
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


@pytest.mark.parametrize(
    "sizes",
    [
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention"] * 3,
            "model_type": "qwen3",
            "head_dim": 32,
        },
        {"hidden_size": 448, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 64},
        {"hidden_size": 1792, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": None},
        {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3},
    ],
    ids=["one entry a layer", "odd heads", "few heads", "other names"],
)
def test_check_of_ordinary_configurations(
    sizes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({**TINY_LLAMA, **sizes}))
    file = written(tmp_path, {"lr": 1e-3}, "AdamW")
    assert main(["rates", str(file), "--model", str(tmp_path), "--check"]) == 0, capsys.readouterr().err


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
