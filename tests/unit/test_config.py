"""Every key of the configuration, and what a wrong one says."""

from __future__ import annotations

import inspect
import json
import math
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import deepspeed_muon
from deepspeed_muon import Muon
from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.math.coefficients import resolve_schedule

ROOT = Path(__file__).resolve().parents[2]


def test_defaults_are_those_of_deepspeeds_muon() -> None:
    config = MuonConfig.from_params(None)
    assert config.muon_defaults() == {
        "lr": 0.02,
        "momentum": 0.95,
        "nesterov": True,
        "weight_decay": 0.0,
        "adjust_lr_fn": "original",
        "update_scale": 1.0,
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
    ("arguments", "keywords", "said"),
    [
        ((0.02, 0.1, 0.95, True), {}, "got 3 more: name them.*ns_schedule .torch's ns_coefficients."),
        ((object(), 0.02), {}, "got 1 more"),
        ((object(),), {"mu": 0.9}, "'mu' is an argument of another Muon; write momentum"),
        ((), {"ns_coefficients": (1, 2, 3), "eps": 1e-7}, "ns_schedule: .*eps is AdamW's"),
        ((), {"epsilon": 1e-8}, "another Muon; write eps"),
        ((), {"momentum_beta": 0.9, "num_ns_steps": 5, "scale_mode": "spectral"}, "(?s)ns_steps.*adjust_lr"),
    ],
)
def test_arguments_of_foreign_muons_name_our_key(arguments: Any, keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Muon(nn.Linear(4, 4), *arguments, **keywords)


def test_schedules() -> None:
    assert len(MuonConfig.from_params({"ns_steps": 9}).coefficients()) == 9
    assert len(MuonConfig.from_params({"ns_schedule": "deepseekv4"}).coefficients()) == 10
    rows = [[3.4445, -4.7750, 2.0315]] * 6
    assert len(MuonConfig.from_params({"ns_schedule": rows}).coefficients()) == 6
    with pytest.raises(ConfigError):
        MuonConfig.from_params({"ns_schedule": rows, "ns_steps": 5})


def test_wire_dtype() -> None:
    auto = MuonConfig.from_params({})
    assert auto.resolved_wire_dtype(torch.float32) == torch.float32
    assert auto.resolved_wire_dtype(torch.bfloat16) == torch.bfloat16
    assert auto.resolved_wire_dtype(torch.float16) == torch.bfloat16
    assert MuonConfig.from_params({"wire_dtype": "fp32"}).resolved_wire_dtype(torch.bfloat16) == torch.float32


def test_the_text_that_ranks_compare_is_canonical() -> None:
    first = MuonConfig.from_params({"lr": 0.1, "momentum": 0.9})
    second = MuonConfig.from_params({"momentum": 0.9, "lr": 0.1})
    texts = [config.model_dump_json() for config in (first, second, MuonConfig.from_params({"lr": 0.1}))]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, (100, True)), (False, (0, False)), (7, (7, True)), (0, (0, False))],
)
def test_health(given: Any, expected: tuple[int, bool]) -> None:
    recorder = Muon(nn.Linear(4, 4), health=given).recorder
    assert (recorder.every, recorder.check) == expected


def test_auto_takes_fp32_for_a_schedule_without_a_margin_for_rounding() -> None:
    gpu = torch.device("cuda")
    assert MuonConfig.from_params({}).ns_settings(gpu).dtype == torch.float16
    assert MuonConfig.from_params({"ns_schedule": "cans"}).ns_settings(gpu).dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("schedule", ["cans", resolve_schedule("cans")])
def test_a_schedule_without_a_margin_is_refused_in_half_precision(schedule: Any, dtype: str) -> None:
    with pytest.raises(ConfigError, match=rf"ns_dtype: '{dtype}' with ns_schedule .* or set it to 'fp32'"):
        MuonConfig.from_params({"ns_schedule": schedule, "ns_dtype": dtype})


def test_the_constructor_shows_every_key() -> None:
    """``help(Muon)`` and ``inspect.signature(Muon)`` say of each key its default, its type and its sentence."""
    shown = inspect.signature(Muon).parameters
    for name, field in MuonConfig.model_fields.items():
        assert shown[name].default == field.get_default(call_default_factory=True)
        assert shown[name].annotation is not inspect.Parameter.empty
        assert f"\n        {name} (" in (Muon.__doc__ or "")
        assert field.description
    assert shown.keys() == {"params", "model", *MuonConfig.model_fields}
    assert "**settings" not in (Muon.__doc__ or "")


def test_completion_offers_torchs_methods_and_four_of_this_one() -> None:
    offered = {name for name in dir(Muon(nn.Linear(4, 4))) if not name.startswith("_")}
    theirs = {
        name for name in dir(torch.optim.SGD([nn.Parameter(torch.zeros(1))])) if not name.startswith("_")
    }
    assert offered == theirs | {"routes", "health", "kernel_report", "adam_report"}


def test_routes_and_health_take_an_optimizer() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = Muon(model)
    assert deepspeed_muon.routes(optimizer) == deepspeed_muon.routes(model) == optimizer.routes
    assert deepspeed_muon.health(optimizer) == optimizer.health()


def test_type_checkers_know_every_key(tmp_path: Path) -> None:
    """A type checker refuses a misspelt key, a value of the wrong type and arguments by position; the rest is fine."""
    mypy = pytest.importorskip("mypy.api")
    script = runpy.run_path(str(ROOT / "scripts" / "settings_table.py"))
    assert script["KEYWORDS"].read_text() == script["keywords"](), "run: python scripts/settings_table.py"
    program = tmp_path / "program.py"
    program.write_text(
        "from typing import Any\nfrom deepspeed_muon.optimizer import Muon\nmodel: Any = 0\n"
        "Muon(model, 0.02, betas=[0.9, 0.95], health=False, include=['*'], restore_from='set', model=model)\n"
        "Muon(model, mun_lr='x')\nMuon(model, momentum='x')\nMuon(model, 0.02, 0.1)\n"
    )
    # Neither torch nor the rest of the package is looked into, which would take a minute.
    options = ["--follow-imports=skip", "--cache-dir=/dev/null", "--config-file="]
    modules = ("config/__init__", "config/keywords", "config/settings", "optimizer")
    files = [str(ROOT / "deepspeed_muon" / f"{module}.py") for module in modules]
    printed = mypy.run([*options, str(program), *files])[0]
    assert re.findall(r"program\.py:(\d): error", printed) == ["5", "6", "7"], printed
    assert 'Unexpected keyword argument "mun_lr" for "Muon"; did you mean "muon_lr"?' in printed


def test_a_subclass_has_its_signature() -> None:
    class Renamed(Muon):
        def __init__(self, params: Any, rate: float) -> None:
            super().__init__(params, rate)

    assert list(inspect.signature(Renamed).parameters) == ["params", "rate"]
    assert Renamed(nn.Linear(4, 4), 0.25).config.lr == 0.25


def test_constructor_and_json_take_the_same_keys() -> None:
    params = {"muon_lr": 0.5, "matrices": None, "health": False, "consolidate_on_save": True}
    assert Muon(nn.Linear(4, 4), **params).config == MuonConfig.from_params(params)


def test_the_table_of_settings_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "settings_table.py"))
    pages = script["pages"]()
    assert {page: page.read_text() for page in pages} == pages, "run: python scripts/settings_table.py"
    assert all(f"\n| `{name}` | " in script["table"]() for name in MuonConfig.model_fields)


# Settings that nobody can mean were accepted: ``ns_eps: 1e30`` stopped Muon in silence, ``true`` was a rate of 1.

RATES = ("lr", "muon_lr", "adam_lr", "weight_decay", "muon_weight_decay", "adam_weight_decay")
NUMBERS = (*RATES, "momentum", "eps", "beta2", "ns_steps", "update_scale")
FLAGS = ("nesterov", "adam_w_mode", "consolidate_on_save", "exchange_overlap")
CHOICES = ("ns_method", "ns_dtype", "momentum_dtype", "adjust_lr_fn", "nonfinite_grad", "variant")

MATRICES_OF = "matrices.a.*"
SPLITS = f"{MATRICES_OF}.split.literal['qkv','gate_up']: Input should be 'qkv' or 'gate_up'"
HEADS = f"{MATRICES_OF}.heads.literal['config']: Input should be 'config'"
SCHEDULES = "ns_schedule.literal['quintic',"

SENSELESS: list[tuple[dict[str, Any], str]] = [
    *(
        ({key: 1e30}, f"{key}: Input should be less than or equal to")
        for key in (*RATES, "eps", "update_scale")
    ),
    *(({key: True}, f"{key}: Input should be a valid ") for key in NUMBERS),
    *(({key: "1e-4"}, f"{key}: Input should be a valid ") for key in NUMBERS),
    ({"lr": "1e-4"}, "lr: Input should be a valid number: 0.0001 without quotes (YAML wants a point"),
    ({"betas": "auto"}, "betas: Input should be a valid list, and only the Hugging Face integrations"),
    ({"momentum": np.array([0.1, 0.2])}, "momentum: Input should be a valid number (got array("),
    ({"weight_decay": 3, "weight_decay_mode": "independent"}, "weight_decay: must be at most 1 with"),
    ({"lr": "auto"}, "lr: Input should be a valid number, and only the Hugging Face integrations fill in"),
    *(
        ({key: value}, f"{key}: Input should be a valid boolean (got {value!r})")
        for key in FLAGS
        for value in ("no", 2)
    ),
    *(({key: value}, key) for key in RATES for value in (-1.0, math.inf, math.nan, "auto")),
    *(({key: "none of these"}, f"{key}: Input should be '") for key in CHOICES),
    ({"lr": torch.tensor([0.1, 0.2])}, "lr: Input should be a valid number (got tensor("),
    *(({key: 1.0}, f"{key}: Input should be less than 1 (got 1.0)") for key in ("momentum", "beta2")),
    ({"weight_decay_mode": "cautious", "adam_w_mode": False}, "weight_decay_mode: 'cautious' needs adam_w"),
    ({"update_scale": 0}, "update_scale: Input should be greater than 0 (got 0)"),
    ({"eps": 0}, "eps"),
    ({"eps": 1e-46}, "eps: Input should be greater than or equal to 0.0000"),
    ({"betas": [0.9]}, "betas.1: Field required (got [0.9])"),
    *(({"betas": value}, "betas: Input should be a valid list") for value in (0.9, "0.9")),
    ({"betas": [0.9, 0.95, 0.99]}, "betas: List should have at most 2 items"),
    ({"betas": [0.9, 1.5]}, "betas.1"),
    ({"betas": [0, 0]}, "betas.1: Input should be greater than 0 (got 0)"),
    ({"betas": [0.9, True]}, "betas.1: Input should be a valid number"),
    ({"momentum_warmup": 300}, "momentum_warmup: Input should be a valid object"),
    ({"momentum_warmup": {"from": 0.85}}, "momentum_warmup.steps: Field required"),
    ({"momentum_warmup": {"from": 0.85, "steps": 0}}, "momentum_warmup.steps: Input should be greater than"),
    ({"momentum_warmup": {"from": 1, "steps": 9}}, "momentum_warmup.from: Input should be less than 1"),
    ({"momentum": 0.8, "momentum_warmup": {"from": 0.8, "steps": 9}}, "momentum_warmup.from: 0.8 must be"),
    ({"momentum_warmup": {"from": 0.85, "steps": 9, "start": 1}}, "momentum_warmup: unknown key 'start'; "),
    ({"health": -1}, "health: Input should be greater than or equal to 0"),
    ({"health": 1e9}, "health: Input should be less than or equal to 1000000"),
    *(
        ({"health": value}, "health: Input should be a valid integer")
        for value in (True, "5", {"check": "no"})
    ),
    ({"qk_clip": {"threshold": True}}, "qk_clip.threshold: Input should be a valid number"),
    ({"qk_clip": {"treshold": 3}}, "qk_clip: unknown key 'treshold'; did you mean 'threshold'?"),
    ({"qk_clip": True}, "qk_clip: Input should be a valid object (got True)"),
    ({"include": "*.weight"}, "include: Input should be a valid list (got '*.weight')"),
    ({"exchange_chunk_numel": 1e15}, "exchange_chunk_numel: Input should be less than or equal to"),
    *(({"matrices": value}, "matrices: Input should be a valid object") for value in (3, ["*"])),
    ({"matrices": {"a.*": "qkv"}}, f"{MATRICES_OF}: Input should be a valid object"),
    *(({"matrices": {"a.*": {"split": value}}}, SPLITS) for value in ("qk", [4, "4"], [4, 0], [0.5, 1.5])),
    *(({"matrices": {"a.*": {"heads": value}}}, HEADS) for value in (0, [True], [])),
    ({"matrices": {"a.*": {"transposed": "a"}}}, f"{MATRICES_OF}.transposed: Input should be a valid"),
    ({"matrices": {"a.*": {"transpose": True}}}, f"{MATRICES_OF}: unknown key 'transpose'; did you mean"),
    *(({"ns_schedule": value}, SCHEDULES) for value in ("quintuple", [[1, 2]], [["3.4", -4.7, 2.0]])),
    *(({"restore_from": value}, "restore_from.path") for value in ("", {}, {"path": 3})),
    *(({"restore_from": value}, "restore_from: Input should be a valid object") for value in (3, ["a"])),
    ({"restore_from": {"path": "a", "progress": "no"}}, "restore_from.progress"),
    ({"restore_from": {"path": "a", "progres": False}}, "restore_from: unknown key 'progres'; did you"),
]
# The same with a text that does not begin with the key.
SENSELESS = [(params, f"optimizer.params.{said}") for params, said in SENSELESS] + [
    ({"moun_lr": 0.1, "momentm": 0.9}, "unknown key 'moun_lr'; did you mean 'muon_lr'?"),
    ({"moun_lr": 0.1, "momentm": 0.9}, "params: unknown key 'momentm'; did you mean 'momentum'?"),
    ({"zzz": 1}, "known keys: adam_lr"),
    ({"Lr": 0.1}, "did you mean 'lr'?"),
    ({"per_head_muon": True}, "'per_head_muon' is an argument of another Muon; write matrices"),
    ({"torch_adam": True}, "unknown key 'torch_adam'; "),
    ({"learning_rate": 0.1}, "write lr"),
]


@pytest.mark.parametrize(("params", "said"), SENSELESS, ids=lambda value: str(value)[:40])
def test_a_line_names_the_allowed_values(params: dict[str, Any], said: str) -> None:
    """The JSON and the constructor share the check."""
    with pytest.raises(ConfigError) as caught:
        MuonConfig.from_params(params)
    assert said in str(caught.value)
    # A line for each of two wrong keys, and for each type of a key.
    several = params.keys() & {"momentm", "matrices", "ns_schedule"}
    assert several or "\n" not in str(caught.value)
    if params.keys() <= inspect.signature(Muon).parameters.keys():
        with pytest.raises(ConfigError) as again:
            Muon(nn.Linear(4, 4), **params)
        assert str(again.value) == str(caught.value)


def test_bad_keys_have_a_line_apiece() -> None:
    matrices = {"a": {"split": 1}, "b": {"heads": "x"}}
    with pytest.raises(ConfigError) as caught:
        MuonConfig.from_params({"lr": -1, "matrices": matrices, "exchange_chunk_numel": -1})
    keys = {"lr", "matrices.a.split", "matrices.b.heads", "exchange_chunk_numel"}
    lines = [line.split(":")[0].removeprefix("optimizer.params.") for line in str(caught.value).splitlines()]
    assert {re.sub(r"\.(literal|list|constrained-int).*", "", line) for line in lines} == keys


@pytest.mark.parametrize(
    "params",
    [
        # Ends of the ranges, sign descent's first moment, Inception's eps.
        {"lr": 0, "weight_decay": 0, "momentum": 0},
        {"lr": 1000, "eps": 1, "betas": [0, 0.99]},
        # Whole numbers as floats, numbers of numpy and torch.
        {"exchange_chunk_numel": 1e8, "ns_steps": 5.0, "nesterov": False, "health": 1e6},
        {
            "lr": np.float64(0.1),
            "eps": np.float32(1e-8),
            "ns_steps": np.int64(5),
            "nesterov": np.bool_(False),
        },
        {
            "lr": torch.tensor(0.1),
            "betas": (0.9, np.float64(0.95)),
            "matrices": {"a": {"heads": 2}},
        },
        {"matrices": {"a": {"split": [8, 4], "heads": [4, 2]}, "b": {"split": "qkv", "heads": "config"}}},
        {"matrices": {"c": {"split": [4, 4], "transposed": True}, "d": {}}},
        {"momentum_warmup": {"from": 0, "steps": 1.0}, "update_scale": 1e-6},
    ],
    ids=str,
)
def test_common_configurations_are_accepted(params: dict[str, Any]) -> None:
    config = MuonConfig.from_params(params)
    assert MuonConfig.from_params(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": 1e30}, "param group 1.lr: Input should be less than or equal to"),
        ({"muon_lr": True}, "param group 1.muon_lr: Input should be a valid number"),
        ({"wieght_decay": 0.1}, "did you mean 'weight_decay'"),
        ({"ns_steps": 3}, "param group 1: 'ns_steps' applies to the whole optimizer, where it is None: set"),
        ({"mu": 0.9}, "param group 1: 'mu' is an argument of another Muon; write momentum"),
        ({"maximize": True}, "param group 1: 'maximize' is an option of torch's optimizers"),
        ({"algorithm": "sgd"}, "'muon' or 'adamw'"),
    ],
)
def test_param_groups_share_the_check(settings: dict[str, Any], said: str) -> None:
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    groups = [{"params": list(layer.parameters())} for layer in layers]
    with pytest.raises(ConfigError, match=re.escape(said)):
        Muon([groups[0], {**groups[1], **settings}], model=layers)


def test_a_group_may_repeat_the_optimizers_settings() -> None:
    """As the groups of programs do that were written for DeepSpeed's Muon, which reads ``ns_method`` there."""
    layer = nn.Linear(4, 4)
    optimizer = Muon([{"params": [layer.weight], "ns_method": "gram"}], model=layer, ns_method="gram")
    assert len(optimizer.param_groups) == 1
