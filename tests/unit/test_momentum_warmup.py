"""``momentum_warmup`` without DeepSpeed: the momentum of every step, read from the momentum buffer."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_muon import ConfigError, Muon

WARMUP = {"from": 0.5, "steps": 4}
RISING = [0.5, 0.6, 0.7, 0.8, 0.9, 0.9]
"""The momentum of the first steps with ``WARMUP``, up to 0.9."""


def optimizer_of(**settings: Any) -> Muon:
    layer = nn.Linear(3, 4, bias=False, dtype=torch.float64)
    settings = {"momentum": 0.9, "momentum_warmup": WARMUP, "lr": 0.1, **settings}
    return Muon([("layer.weight", layer.weight)], include=["*"], **settings)


def take_step(optimizer: Muon, gradient: float = 1.0) -> float:
    """Take a step with a constant gradient and return the momentum ``b`` that it had: ``M <- b M + (1 - b)``."""
    (weight,) = optimizer.param_groups[0]["params"]

    def buffer() -> float:
        momentum = optimizer.state[weight].get("momentum_buffer")
        return 0.0 if momentum is None else float(momentum[0, 0])

    before = buffer()
    weight.grad = torch.full_like(weight, gradient)
    optimizer.step()
    return (1 - buffer()) / (1 - before)


def test_momentum_rises_with_the_steps_that_are_taken() -> None:
    """Skipped ones do not count."""
    optimizer = optimizer_of()
    momenta = []
    for number in range(len(RISING)):
        if number in (0, 2, 4):
            take_step(optimizer, math.nan)
        momenta.append(take_step(optimizer))
    assert momenta == pytest.approx(RISING) and optimizer.skipped_steps == 3
    assert optimizer.param_groups[0]["momentum"] == 0.9


def test_a_loaded_state_goes_on() -> None:
    """One without the count of steps, such as that of torch's Muon, begins anew."""
    first = optimizer_of()
    assert [take_step(first) for _ in range(2)] == pytest.approx(RISING[:2])
    saved = copy.deepcopy(first.state_dict())
    for missing, momenta in ((None, RISING[2:]), ("step", RISING)):
        state_dict = copy.deepcopy(saved)
        state_dict["state"][0].pop(missing, None)
        again = optimizer_of()
        again.load_state_dict(state_dict)
        assert [take_step(again) for _ in momenta] == pytest.approx(momenta)
    copied = copy.deepcopy(first)
    assert [take_step(copied) for _ in RISING[2:]] == pytest.approx(RISING[2:])


def test_momentum_rises_to_the_value_in_the_group() -> None:
    """A value that is not above the start of the warm-up is used as it is, also one from a state dict."""
    optimizer = optimizer_of()
    (group,) = optimizer.param_groups
    assert take_step(optimizer) == pytest.approx(0.5)
    group["momentum"] = 0.7
    assert take_step(optimizer) == pytest.approx(0.55)
    group["momentum"] = 0.4
    assert take_step(optimizer) == pytest.approx(0.4)
    again = optimizer_of()
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert take_step(again) == pytest.approx(0.4)
    for momentum in (0.6, 0.3, 0.95):
        again.param_groups[0]["momentum"] = momentum
        assert take_step(again) == pytest.approx(momentum)


def test_groups_have_a_momentum_apiece() -> None:
    layer = nn.Linear(3, 4, bias=False, dtype=torch.float64)
    group: dict[str, Any] = {"params": [("weight", layer.weight)], "momentum": 0.7}
    settings: dict[str, Any] = {"include": ["*"], "momentum_warmup": WARMUP}
    optimizer = Muon([dict(group)], **settings)
    assert [take_step(optimizer) for _ in range(5)] == pytest.approx([0.5, 0.55, 0.6, 0.65, 0.7])
    with pytest.raises(
        ConfigError, match=r"from: 0\.5 must be below momentum, which is 0\.4 .* a param group"
    ):
        Muon([{**group, "momentum": 0.4}], **settings)
