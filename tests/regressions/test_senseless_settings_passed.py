"""Settings that nobody can mean were accepted: ``ns_eps: 1e30`` stopped Muon in silence, ``true`` was a rate of 1.

A key of several kinds got a message of several lines, none of which named all that is allowed.
"""

from __future__ import annotations

import inspect
import json
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deepspeed_muon import ConfigError, Muon, MuonConfig
from deepspeed_muon.config.values import REMOVED

RATES = ("lr", "muon_lr", "adam_lr", "weight_decay", "muon_weight_decay", "adam_weight_decay")
NUMBERS = (*RATES, "momentum", "eps", "beta2", "ns_steps")
FLAGS = ("nesterov", "adam_w_mode", "consolidate_on_save")

SENSELESS: list[tuple[dict[str, Any], str]] = [
    *(({key: 1e30}, f"{key}: must be at most") for key in (*RATES, "eps")),
    *(({key: True}, f"{key}: must be a number (got True)") for key in NUMBERS),
    *(
        ({key: "1e-4"}, f"{key}: must be a number, not a text: write 0.0001 without quotes")
        for key in NUMBERS
    ),
    *(({key: "x"}, f"{key}: must be a number (got 'x')") for key in NUMBERS),
    *(({key: "no"}, f"{key}: must be true or false (got 'no')") for key in FLAGS),
    ({"nesterov": 2}, "nesterov: must be true or false (got 2)"),
    ({"exchange_overlap": "no"}, "exchange_overlap: must be true or false (got 'no')"),
    ({"exchange_overlap": 2}, "exchange_overlap: must be true or false (got 2)"),
    ({"lr": Decimal("0.1")}, "lr: must be a number"),
    ({"lr": torch.tensor([0.1, 0.2])}, "lr: must be a number"),
    ({"eps": 1e-46}, "eps: must be at least 1e-30"),
    ({"betas": [0, 0]}, "betas[1]: must be above 0 (got 0)"),
    ({"betas": [0.9, True]}, "betas[1]: must be a number"),
    ({"betas": "0.9"}, "betas: must be a number, not a text"),
    ({"weight_decay": 3, "weight_decay_mode": "independent"}, "weight_decay: must be at most 1 with"),
    ({"health": 1e9}, "health: must be at most"),
    ({"health": "5"}, "health: must be a number, not a text: write 5"),
    ({"health": {"check": "no"}}, "health: 'health.check' is no setting since version 0.3"),
    ({"health": "no"}, "health: must be a number (got 'no')"),
    ({"qk_clip": {"threshold": True}}, "qk_clip.threshold: must be a number"),
    ({"exchange_chunk_numel": 1e15}, "exchange_chunk_numel: must be at most"),
    ({"matrices": 3}, "matrices: must be an object: name pattern to an object"),
    (
        {"matrices": {"a.*": {"split": "qk"}}},
        "matrices['a.*'].split: must be 'qkv', 'gate_up', a list of whole",
    ),
    ({"matrices": {"a.*": {"split": [4, "4"]}}}, "matrices['a.*'].split: must be 'qkv', 'gate_up', a list"),
    (
        {"matrices": {"a.*": {"heads": 0}}},
        "matrices['a.*'].heads: must be 'config', a whole number of at least 1",
    ),
    ({"matrices": {"a.*": {"heads": [True]}}}, "matrices['a.*'].heads: must be 'config', a whole number"),
    ({"ns_schedule": "quintuple"}, "ns_schedule: must be one of 'quintic'"),
    ({"ns_schedule": [[1, 2]]}, "ns_schedule: must be one of 'quintic'"),
    ({"ns_schedule": [["3.4", -4.7, 2.0]]}, "ns_schedule: must be one of 'quintic'"),
]


@pytest.mark.parametrize(("params", "said"), SENSELESS, ids=lambda value: str(value)[:40])
def test_one_line_says_what_is_allowed(params: dict[str, Any], said: str) -> None:
    """The JSON and the constructor share the check."""
    with pytest.raises(ConfigError) as caught:
        MuonConfig.from_params(params)
    assert f"optimizer.params.{said}" in str(caught.value) and "\n" not in str(caught.value)
    if params.keys() <= inspect.signature(Muon).parameters.keys():
        with pytest.raises(ConfigError) as again:
            Muon(nn.Linear(4, 4), **params)
        assert str(again.value) == str(caught.value)


@pytest.mark.parametrize("key", REMOVED)
def test_a_setting_that_is_gone_says_since_when_and_what_to_do(key: str) -> None:
    section, _, inner = key.rpartition(".")
    with pytest.raises(ConfigError) as caught:
        MuonConfig.from_params({section: {"path": "a", inner: 2}} if section else {key: 2})
    assert f"'{key}' is no setting since version 0.3; {REMOVED[key]}" in str(caught.value)


def test_each_bad_key_has_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        MuonConfig.from_params(
            {"lr": -1, "matrices": {"a": {"split": 1}, "b": {"heads": "x"}}, "tensor_parallel_mode": 1}
        )
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "optimizer.params.lr",
        "optimizer.params.matrices['a'].split",
        "optimizer.params.matrices['b'].heads",
        "optimizer.params.tensor_parallel_mode",
    ]


def test_what_people_run_is_accepted() -> None:
    """Ends of the ranges, sign descent's first moment, Inception's eps, whole numbers as floats, numpy's numbers."""
    for params in (
        {"lr": 0, "weight_decay": 0, "momentum": 0},
        {"lr": 1000, "eps": 1, "betas": [0, 0.99]},
        {
            "lr": np.float64(0.1),
            "eps": np.float32(1e-8),
            "ns_steps": np.int64(5),
            "nesterov": np.bool_(False),
        },
        {"exchange_chunk_numel": 1e8, "ns_steps": 5.0, "nesterov": 0, "health": 1e6},
        {
            "lr": torch.tensor(0.1),
            "betas": (0.9, np.float64(0.95)),
            "matrices": {"a": {"heads": np.int64(2)}},
        },
        {"matrices": {"a": {"split": [0.5, 0.5], "heads": [4, 2]}, "b": {"split": "qkv", "heads": "config"}}},
        {"matrices": {"c": {"split": [4, 4], "transposed": True}, "d": {}}},
    ):
        config = MuonConfig.from_params(params)
        assert MuonConfig.from_params(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": 1e30}, "param group 1.lr: must be at most"),
        ({"muon_lr": True}, "param group 1.muon_lr: must be a number"),
        ({"eps": "1e-8"}, "param group 1.eps: must be a number, not a text"),
        ({"betas": (0, 0)}, "param group 1.betas[1]: must be above 0"),
        ({"nesterov": "no"}, "param group 1.nesterov: must be true or false"),
        ({"lr": torch.tensor([0.1, 0.2])}, "param group 1.lr: must be a number"),
    ],
)
def test_param_groups_share_the_check(settings: dict[str, Any], said: str) -> None:
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    groups = [{"params": list(layer.parameters())} for layer in layers]
    with pytest.raises(ConfigError) as caught:
        Muon([groups[0], {**groups[1], **settings}], model=layers)
    assert said in str(caught.value)
