"""``momentum_warmup`` and ``update_scale`` under DeepSpeed: against float64, and bit for bit against a program.

The program writes the momentum of every step into the param groups, and the rate of the matrices
has the factor, whose inverse is in their weight decay. All numbers are sums of powers of two, so that products are
exact.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import deepspeed_muon
from deepspeed_muon.checkpoint import consolidate
from deepspeed_muon.tools.convert import convert_to_universal
from deepspeed_muon.variants import VARIANTS
from tests.support import training
from tests.support.contract import compare
from tests.support.models import batch
from tests.support.native_ops import REPOSITORY
from tests.support.thinning import each_value, full

MOMENTA = [0.5, 0.625, 0.75, 0.875, 0.875, 0.875]
"""The momentum of the first steps with the warm-up of ``SET``."""
SET = {
    "muon_lr": 2.0**-6,
    "muon_weight_decay": 2.0**-3,
    "momentum": 0.875,
    "momentum_warmup": {"from": 0.5, "steps": 3},
    "update_scale": 0.25,
}
BY_HAND = {"muon_lr": 2.0**-8, "muon_weight_decay": 2.0**-1, "momentum": 0.875}


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("stage", "world", "variant"), each_value(product((3, 1, 2, 0), (2, 4, 1), VARIANTS))
)
def test_matches_the_reference(ranks: Any, stage: int, world: int, variant: str) -> None:
    params = {"variant": variant, "update_scale": 0.3, "momentum_warmup": {"from": 0.5, "steps": 2}}
    results = ranks(world).run(training.train, stage=stage, kind="mixed", clipping=0.5, params=params)
    compare(results, "mixed", world, 0.5, variant=variant, warmup=(0.5, 2), update_scale=0.3)


def train(
    rank: int,
    world_size: int,
    *,
    stage: int,
    is_set: bool,
    steps: tuple[int, int] = (0, 5),
    poisoned: int | None = None,
    params: dict[str, Any] | None = None,
    load: str = "",
    save: str = "",
    **settings: Any,
) -> dict[str, Any]:
    """Take steps with the settings or by hand, one of them with a gradient of infinity; report the state.

    ``load`` and ``save`` are folders of DeepSpeed's checkpoints, ``save`` also of a consolidated set.
    """
    params = {**(SET if is_set else BY_HAND), **(params or {})}
    engine = training.make_engine(training.ds_config(stage, params=params, **settings))
    if load:
        engine.load_checkpoint(load)
    for step in range(*steps):
        if not is_set:
            for group in deepspeed_muon.muon_optimizer(engine).param_groups:
                group["momentum"] = MOMENTA[step - (poisoned is not None and step > poisoned)]
        if step == poisoned and rank == 0:
            engine.backward(engine(*batch(step, rank)) * float("inf"))
            engine.step()
            engine.zero_grad()
        else:
            training.run_step(engine, step, rank, world_size, 1)
    if save:
        engine.save_checkpoint(save)
        consolidate(engine, f"{save}/set")
    return {**training.outcome(engine), "skipped": engine.skipped_steps}


CASES: list[dict[str, Any]] = [
    {"stage": 3, "zero": {"sub_group_size": 200}, "params": {"momentum_dtype": "int8"}},
    {"stage": 2, "precision": "fp16", "poisoned": 1, "params": {"variant": "normuon"}},
    {"stage": 0, "poisoned": 1, "params": {"momentum_dtype": "bf16", "weight_decay_mode": "cautious"}},
]
LONG: list[dict[str, Any]] = [
    {"stage": 1, "poisoned": 2, "precision": "bf16"},
    {"stage": 3, "poisoned": 0, "precision": "fp16", "zero": {"sub_group_size": 200}},
    {"stage": 1, "params": {"momentum_dtype": "int8", "variant": "muon_eq"}},
    {"stage": 2, "zero": training.OFFLOAD, "poisoned": 3},
    {"stage": 0, "precision": "fp16", "poisoned": 2, "params": {"momentum_dtype": "int8"}},
]


@pytest.mark.parametrize("case", [*CASES, *map(full, LONG)], ids=str)
def test_equals_a_program_that_writes_momentum(ranks: Any, case: dict[str, Any]) -> None:
    """Also after a skipped step, in every dtype of momentum, and in sub-groups, for each of which step() is called."""
    result, by_hand = (ranks(2).run(train, is_set=is_set, **case)[0] for is_set in (True, False))
    assert result["skipped"] == by_hand["skipped"] == ("poisoned" in case)
    training.assert_same_bits(result, by_hand, "params", "momentum", "exp_avg")


@pytest.mark.parametrize(
    ("stage", "world", "how"),
    [
        *((1, 4, "progress"), full(3, 2, "deepspeed")),
        *(full(0, 2, "state"), full(2, 3, "state"), full(3, 4, "progress"), full(2, 4, "universal")),
    ],
)
def test_goes_on_after_a_resume(ranks: Any, tmp_path: Path, stage: int, world: int, how: str) -> None:
    """DeepSpeed's checkpoint at the same scale, or a consolidated set at another one, as another run or as the same."""
    ranks(2).run(train, stage=3, is_set=True, steps=(0, 2), save=str(tmp_path))
    changes: dict[str, Any] = {"load": str(tmp_path)}
    if how == "universal":
        convert_to_universal(tmp_path / "global_step2", tmp_path / "universal" / "step2")
        changes = {"load": f"{tmp_path}/universal", "extra": {"checkpoint": {"load_universal": True}}}
    elif how != "deepspeed":
        restored = {"path": f"{tmp_path}/set", "progress": how == "progress"}
        changes = {"params": {"restore_from": restored}}
    # By hand the saved settings are replaced: the rate and decay that the set has are those of the settings.
    arguments = {"stage": stage, "steps": (2, 4), **changes}
    result = ranks(world).run(train, is_set=True, **arguments)[0]
    by_hand = ranks(world).run(resumed_by_hand, **arguments)[0]
    training.assert_same_bits(result, by_hand, "params", "momentum", "exp_avg")


def resumed_by_hand(
    rank: int, world_size: int, *, stage: int, steps: tuple[int, int], load: str = "", **settings: Any
) -> dict[str, Any]:
    """Resume without the settings, with all that they stand for written into the groups."""
    params = {**BY_HAND, **settings.pop("params", {})}
    engine = training.make_engine(training.ds_config(stage, params=params, **settings))
    if load:
        engine.load_checkpoint(load)
    for step in range(*steps):
        for group in deepspeed_muon.muon_optimizer(engine).param_groups:
            if group["algorithm"] == "muon":
                written = {"lr": BY_HAND["muon_lr"], "weight_decay": BY_HAND["muon_weight_decay"]}
                group.update(written, momentum=MOMENTA[step], update_scale=1.0)
        training.run_step(engine, step, rank, world_size, 1)
    return training.outcome(engine)


# The recipe of docs/usage.md.

TOTAL, PEAK = 1000, {"muon": 0.02, "adamw": 3e-3}
STEPS = [0, 930, 965, 999]
FACTORS = [1.0, 0.75, 0.5, 0.25]
"""Of the learning rates in these steps."""


def follow_the_recipe(rank: int, world_size: int) -> list[Any]:
    """Return momentum and weight decay of four steps of a long run with the schedules of the page."""
    engine = training.make_engine(training.ds_config(1))
    page = (REPOSITORY / "docs" / "usage.md").read_text()
    (block,) = re.findall(
        r"^```python\n((?:(?!```).)*?def set_schedules.*?)^```$", page, re.MULTILINE | re.DOTALL
    )
    names: dict[str, Any] = {"engine": engine, "deepspeed_muon": deepspeed_muon}
    exec(compile(block, "usage.md", "exec"), names)
    assert (names["total_steps"], names["peak"]) == (TOTAL, PEAK)
    groups, written = deepspeed_muon.muon_optimizer(engine).param_groups, []
    for step, factor in zip(STEPS, FACTORS, strict=True):
        for group in groups:
            group["lr"] = factor * PEAK[group["algorithm"]]
        names["set_schedules"](step)
        of_muon = next(group for group in groups if group["use_muon"])
        written.append((of_muon["momentum"], of_muon["weight_decay"]))
    return written


def test_the_recipe_for_schedules(ranks: Any) -> None:
    momenta, decays = zip(*ranks(1).run(follow_the_recipe)[0], strict=True)
    assert momenta == pytest.approx([0.95, 0.95, 0.90, 0.85 + 0.1 / 70])
    assert decays == pytest.approx([0.1, 0.075, 0.05, 0.025])
