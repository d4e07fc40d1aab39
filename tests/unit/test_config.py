"""Every key of the configuration, and what a wrong one says."""

from __future__ import annotations

import inspect
import math
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_muon import Muon
from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.errors import ConfigError, ScheduleError

ROOT = Path(__file__).resolve().parents[2]


def test_defaults_are_those_of_deepspeeds_own_muon() -> None:
    config = MuonConfig.from_params(None)
    assert config.muon_defaults() == {
        "lr": 0.02,
        "momentum": 0.95,
        "nesterov": True,
        "weight_decay": 0.0,
        "adjust_lr_fn": "original",
        "beta2": 0.95,
        "weight_decay_mode": "decoupled",
    }
    assert config.adam_defaults() == {
        "lr": 3e-4,
        "betas": (0.9, 0.95),
        "eps": 1e-10,
        "weight_decay": 0.0,
        "weight_decay_mode": "decoupled",
    }
    assert len(config.coefficients()) == 5


def test_precedence_of_rates() -> None:
    config = MuonConfig.from_params(
        {"lr": 0.1, "adam_lr": 0.01, "weight_decay": 0.2, "muon_weight_decay": 0.3}
    )
    assert config.muon_defaults()["lr"] == 0.1
    assert config.adam_defaults()["lr"] == 0.01
    assert config.muon_defaults()["weight_decay"] == 0.3
    assert config.adam_defaults()["weight_decay"] == 0.2
    assert config.reference_lr == 0.1
    assert MuonConfig.from_params({"muon_lr": 0.5}).reference_lr == 0.5


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"moun_lr": 0.1, "momentm": 0.9}, "unknown key 'moun_lr'; did you mean 'muon_lr'?"),
        ({"zzz": 1}, "known keys: adam_lr"),
        ({"lr": -1.0}, "optimizer.params.lr"),
        ({"lr": math.inf}, "optimizer.params.lr"),
        ({"lr": math.nan}, "optimizer.params.lr"),
        ({"lr": "auto"}, "only the Hugging Face integrations fill in"),
        ({"muon_lr": "auto"}, "optimizer.params.muon_lr"),
        ({"momentum": 1.0}, "optimizer.params.momentum"),
        ({"moun_lr": 0.1, "momentm": 0.9}, "params: unknown key 'momentm'; did you mean 'momentum'?"),
        ({"betas": [0.9]}, "optimizer.params.betas: must be two numbers, as in [0.9, 0.95] (got [0.9])"),
        ({"betas": 0.9}, "must be two numbers"),
        ({"betas": [0.9, 1.5]}, "optimizer.params.betas"),
        ({"eps": 0}, "optimizer.params.eps"),
        ({"ns_method": "svd"}, "optimizer.params.ns_method"),
        ({"ns_dtype": "fp8"}, "optimizer.params.ns_dtype"),
        ({"momentum_dtype": "fp8"}, "optimizer.params.momentum_dtype"),
        ({"ns_schedule": "nope"}, "optimizer.params.ns_schedule"),
        ({"adjust_lr_fn": "spectral_norm"}, "optimizer.params.adjust_lr_fn"),
        ({"nonfinite_grad": "ignore"}, "optimizer.params.nonfinite_grad"),
        ({"health": {"evry": 3}}, "optimizer.params.health: must be the steps between two samples"),
        (
            {"qk_clip": {"treshold": 3}},
            "optimizer.params.qk_clip: unknown key 'treshold'; did you mean 'threshold'?",
        ),
        ({"health": -1}, "optimizer.params.health: must be at least 0"),
        (
            {"health": {"matrices": 4}},
            "optimizer.params.health: 'health.matrices' is no setting since version 0.3",
        ),
        (
            {"health": {"every": 4, "check": True}},
            "optimizer.params.health: 'health.every' is no setting since version 0.3",
        ),
    ],
)
def test_bad_values_name_the_key(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MuonConfig.from_params(params)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "keywords", "said"),
    [
        ((0.02, 0.1, 0.95, True), {}, "got 3 more: name them.*ns_schedule .torch's ns_coefficients."),
        ((object(), 0.02), {}, "got 1 more"),
        (
            (object(),),
            {"mu": 0.9},
            "'mu' is an argument of another Muon; write momentum\n.*'distributed_mesh'",
        ),
        ((), {"ns_coefficients": (1, 2, 3), "eps": 1e-7}, "ns_schedule: .*eps is AdamW's"),
        ((), {"epsilon": 1e-8}, "write eps, which is AdamW's"),
        (
            (),
            {"momentum_beta": 0.9, "num_ns_steps": 5, "scale_mode": "spectral"},
            "(?s)ns_steps.*adjust_lr_fn",
        ),
    ],
)
def test_arguments_of_other_muons_name_our_key(arguments: Any, keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Muon(nn.Linear(4, 4), *arguments, **keywords)


def test_schedules() -> None:
    assert len(MuonConfig.from_params({"ns_steps": 9}).coefficients()) == 9
    assert len(MuonConfig.from_params({"ns_schedule": "deepseekv4"}).coefficients()) == 10
    own = [[3.4445, -4.7750, 2.0315]] * 6
    assert len(MuonConfig.from_params({"ns_schedule": own}).coefficients()) == 6
    with pytest.raises(ScheduleError):
        MuonConfig.from_params({"ns_schedule": own, "ns_steps": 5})


def test_wire_dtype() -> None:
    auto = MuonConfig.from_params({})
    assert auto.resolved_wire_dtype(torch.float32) == torch.float32
    assert auto.resolved_wire_dtype(torch.bfloat16) == torch.bfloat16
    assert auto.resolved_wire_dtype(torch.float16) == torch.bfloat16
    assert MuonConfig.from_params({"wire_dtype": "fp32"}).resolved_wire_dtype(torch.bfloat16) == torch.float32


def test_what_ranks_compare_is_canonical() -> None:
    first = MuonConfig.from_params({"lr": 0.1, "momentum": 0.9})
    second = MuonConfig.from_params({"momentum": 0.9, "lr": 0.1})
    texts = [each.model_dump_json() for each in (first, second, MuonConfig.from_params({"lr": 0.1}))]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, (100, True)),
        (True, (100, True)),
        (False, (0, False)),
        (7, (7, True)),
        (0, (0, False)),
    ],
)
def test_health(given: Any, expected: tuple[int, bool]) -> None:
    recorder = Muon(nn.Linear(4, 4), health=given).recorder
    assert (recorder.every, recorder.check) == expected


def test_auto_takes_fp32_for_a_schedule_without_a_margin_for_rounding() -> None:
    gpu = torch.device("cuda")
    assert MuonConfig.from_params({}).ns_settings(gpu).dtype == torch.float16
    assert MuonConfig.from_params({"ns_schedule": "cans"}).ns_settings(gpu).dtype == torch.float32
    chosen = MuonConfig.from_params({"ns_schedule": "cans", "ns_dtype": "fp16"})
    assert chosen.ns_settings(gpu).dtype == torch.float16


def test_the_constructor_shows_every_key() -> None:
    """``help(Muon)`` and ``inspect.signature(Muon)`` say of each key its default, its type and its sentence."""
    shown = inspect.signature(Muon).parameters
    for name, field in MuonConfig.model_fields.items():
        assert shown[name].default == field.get_default(call_default_factory=True)
        assert shown[name].annotation is not inspect.Parameter.empty
        assert f"\n            {name}: " in (Muon.__init__.__doc__ or "")
        assert field.description
    assert shown.keys() == {"params", "model", *MuonConfig.model_fields}
    assert "**settings" not in (Muon.__init__.__doc__ or "")


def test_type_checkers_know_every_key(tmp_path: Path) -> None:
    """A type checker refuses a misspelt key, a value of the wrong type and arguments by position; the rest is fine."""
    mypy = pytest.importorskip("mypy.api")
    script = runpy.run_path(str(ROOT / "scripts" / "settings_table.py"))
    assert script["KEYWORDS"].read_text() == script["keywords"](), "run: python scripts/settings_table.py"
    (tmp_path / "program.py").write_text(
        "from typing import Any\nfrom deepspeed_muon.optimizer import Muon\nmodel: Any = 0\n"
        "Muon(model, 0.02, betas=[0.9, 0.95], health=False, include=['*'], restore_from='set', model=model)\n"
        "Muon(model, mun_lr='x')\nMuon(model, momentum='x')\nMuon(model, 0.02, 0.1)\n"
    )
    # Neither torch nor the rest of the package is looked into, which would take a minute.
    arguments = [
        "--follow-imports=skip",
        "--cache-dir=/dev/null",
        "--config-file=",
        str(tmp_path / "program.py"),
    ]
    for module in ("config/__init__", "config/keywords", "config/settings", "optimizer"):
        arguments.append(str(ROOT / "deepspeed_muon" / f"{module}.py"))
    found = mypy.run(arguments)[0]
    assert re.findall(r"program\.py:(\d): error", found) == ["5", "6", "7"], found
    assert 'Unexpected keyword argument "mun_lr" for "Muon"; did you mean "muon_lr"?' in found


def test_help_shows_what_users_call() -> None:
    """And not how the engine binds the optimizer and runs it."""
    public = {name for name in dir(Muon) if not name.startswith("_")} - set(dir(torch.optim.Optimizer))
    # DeepSpeed asks an offloaded optimizer for fp32_optimizer_states.
    assert public == {"adam_report", "fp32_optimizer_states", "health", "kernel_report", "routes"}


def test_a_subclass_has_its_own_signature() -> None:
    class Own(Muon):
        def __init__(self, params: Any, rate: float) -> None:
            super().__init__(params, rate)

    assert list(inspect.signature(Own).parameters) == ["params", "rate"]
    assert Own(nn.Linear(4, 4), 0.25).config.lr == 0.25


def test_constructor_and_json_take_the_same_keys() -> None:
    params = {"muon_lr": 0.5, "matrices": None, "health": False, "consolidate_on_save": True}
    assert Muon(nn.Linear(4, 4), **params).config == MuonConfig.from_params(params)


def test_the_page_of_settings_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "settings_table.py"))
    assert script["PAGE"].read_text() == script["page"](), "run: python scripts/settings_table.py"
    assert all(f"\n| `{name}` | " in script["page"]() for name in MuonConfig.model_fields)
