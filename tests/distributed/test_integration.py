"""Registration, client optimizers, schedulers, resuming, and the comparison with torch.optim.Muon."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

import deepspeed_muon
from deepspeed_muon.optimizer import Muon
from tests.support import training
from tests.support.contract import reference
from tests.support.models import MATRICES, batch, build
from tests.support.reference import relative
from tests.support.thinning import each_value

STEPS = 3


def client(rank: int, world_size: int, *, stage: int, how: str) -> Any:
    """Train with our optimizer passed to ``deepspeed.initialize`` in one of several ways."""
    settings = dict(training.MUON_PARAMS)
    config = training.ds_config(stage, clipping=0.5)
    if how != "config":
        del config["optimizer"]
    model = build("toy")
    named = list(model.named_parameters())
    optimizer: Any = {
        "config": lambda: None,
        "instance-named": lambda: Muon(named, **settings),
        "instance-model": lambda: Muon(model, **settings),
        "instance-groups": lambda: Muon(
            [
                {"params": [(n, p) for n, p in named if p.ndim == 2]},
                {"params": [(n, p) for n, p in named if p.ndim != 2]},
            ],
            **settings,
        ),
        "callable": lambda: lambda params: Muon(params, model=model, **settings),
    }[how]()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), optimizer=optimizer, config=config
    )
    for step in range(5):
        training.run_step(engine, step, rank, world_size, 1)
    params = training.full_masters(engine)
    tags = [
        tag for p in engine.module.parameters() for tag in ("use_muon", "muon_num_heads") if hasattr(p, tag)
    ]
    engine.destroy()
    return {"params": params, "tags": tags}


@pytest.mark.compat
@pytest.mark.parametrize(
    ("how", "stage"),
    each_value(
        product(["config", "instance-named", "instance-model", "instance-groups", "callable"], [0, 2, 3])
    ),
)
def test_all_ways_of_passing_the_optimizer(ranks: Any, stage: int, how: str) -> None:
    result = ranks(2).run(client, stage=stage, how=how)[0]
    start, end, _, _ = reference("toy", 2, 0.5)
    for name in end:
        assert relative(result["params"][name], end[name], start[name]) <= 2.5e-5, name
    assert not result["tags"], "with these tags stages 1 and 2 would run DeepSpeed's own path as well"


def unnamed_client(rank: int, world_size: int, *, only_matrices: bool) -> str:
    model = build("toy")
    params = [p for n, p in model.named_parameters() if n in MATRICES["toy"] or not only_matrices]
    config = training.ds_config(2)
    del config["optimizer"]
    try:
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=Muon(params, **training.MUON_PARAMS), config=config
        )
    except deepspeed_muon.RoutingError as error:
        return str(error)
    names = ",".join(route.name for route in deepspeed_muon.routes(engine))
    engine.destroy()
    return names


def test_unnamed_parameters_are_checked_by_name(ranks: Any) -> None:
    """An embedding must not go to Muon because nobody told its name."""
    message = ranks(2).run(unnamed_client, only_matrices=False)[0]
    assert "embed.weight" in message and "named_parameters" in message
    assert set(ranks(2).run(unnamed_client, only_matrices=True)[0].split(",")) == MATRICES["toy"]


def config_types(rank: int, world_size: int) -> list[str]:
    """Which class each spelling of the type gives, registered and not."""
    found = []

    def optimizer_of(kind: str) -> str:
        config = training.ds_config(1)
        config["optimizer"] = {"type": kind, "params": {"lr": 0.01}}
        engine = training.make_engine(config)
        name = (
            f"{type(engine.basic_optimizer).__module__.split('.')[0]}.{type(engine.basic_optimizer).__name__}"
        )
        engine.destroy()
        return name

    deepspeed_muon.register()
    deepspeed_muon.register()
    found += [optimizer_of(kind) for kind in ("Muon", "muon", "MUON")]
    deepspeed_muon.unregister()
    deepspeed_muon.unregister()
    assert not deepspeed_muon.is_registered()
    try:
        found.append(optimizer_of("Muon"))
    finally:
        deepspeed_muon.register()
    found.append(optimizer_of("muon"))
    return found


def test_registration(ranks: Any) -> None:
    ours, theirs = "deepspeed_muon.Muon", "deepspeed.MuonWithAuxAdam"
    assert ranks(1).run(config_types)[0] == [ours, ours, ours, theirs, ours]


def hooked_twice(rank: int, world_size: int) -> str:
    from deepspeed.runtime.engine import DeepSpeedEngine

    ours = DeepSpeedEngine._configure_optimizer
    DeepSpeedEngine._configure_optimizer = lambda *args: ours(*args)
    try:
        deepspeed_muon.unregister()
    except deepspeed_muon.RegistrationError as error:
        return str(error)
    finally:
        DeepSpeedEngine._configure_optimizer = ours
    return ""


def test_unregister_refuses_to_cut_off_another_hook(ranks: Any) -> None:
    assert "_configure_optimizer was hooked again" in ranks(1).run(hooked_twice)[0]


SCHEDULERS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"},
    "WarmupDecayLR": {
        "warmup_min_lr": 0.001,
        "warmup_max_lr": 0.01,
        "warmup_num_steps": 2,
        "total_num_steps": 9,
    },
    "WarmupCosineLR": {"total_num_steps": 9, "warmup_num_steps": 2, "warmup_min_ratio": 0.1},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 3},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2},
    "torch": {},
}


def scheduled(rank: int, world_size: int, *, stage: int, name: str) -> Any:
    """Return the rates of Muon and AdamW in every step."""
    config = training.ds_config(stage, params={"lr": 0.01, "muon_lr": 0.02, "adam_lr": 0.001})
    arguments: dict[str, Any] = {}
    if name == "torch":
        arguments["lr_scheduler"] = lambda opt: torch.optim.lr_scheduler.LambdaLR(
            opt, lambda step: 1 / (step + 1)
        )
    else:
        config["scheduler"] = {"type": name, "params": SCHEDULERS[name]}
    model = build("toy")
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config, **arguments
    )
    optimizer = deepspeed_muon.muon_optimizer(engine)
    rates = []
    for step in range(5):
        rates.append([group["lr"] for group in optimizer.param_groups])
        training.run_step(engine, step, rank, world_size, 1)
    algorithms = [group["algorithm"] for group in optimizer.param_groups]
    engine.destroy()
    return {"rates": rates, "algorithms": algorithms}


@pytest.mark.compat
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_schedulers_keep_the_ratio_of_the_rates(ranks: Any, name: str, stage: int) -> None:
    report = ranks(1).run(scheduled, stage=stage, name=name)[0]
    assert report["algorithms"] == ["muon", "adamw"]
    for muon, adam in report["rates"]:
        assert muon == pytest.approx(20 * adam), report["rates"]
    assert len({muon for muon, _ in report["rates"]}) > 1, "the schedule moves"
    shared = [muon / 2 for muon, _ in report["rates"]]
    if name == "OneCycle":
        assert max(shared) == pytest.approx(0.01), "the configured number stands for the shared rate"


def warned_of_rates(
    rank: int, world_size: int, *, params: dict[str, Any], scheduler: dict[str, Any]
) -> list[str]:
    """Make an engine; return what was said of its rates."""
    config = training.ds_config(1)
    config["optimizer"]["params"] = params
    config["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, **scheduler}}
    messages = training.heard()
    training.make_engine(config).destroy()
    return [text for text in messages if "_lr" in text]


def test_rates_that_nobody_chose_are_told(ranks: Any) -> None:
    """Without warmup_max_lr DeepSpeed's schedules go to 0.001; an AdamW rate under 'original' hardly moves a matrix."""
    pool = ranks(2)
    first, other = pool.run(warned_of_rates, params={"muon_lr": 0.02}, scheduler={})
    assert not other, "rank 0 speaks for all"
    assert len(first) == 1 and "adam_lr 1.5e-05 instead of 0.0003. Set warmup_max_lr to 0.02" in first[0]
    assert "muon_lr 0.001 instead of 0.02" in first[0]
    first, _ = pool.run(warned_of_rates, params={"lr": 3e-4}, scheduler={"warmup_max_lr": 3e-4})
    assert len(first) == 1 and "set adjust_lr_fn to 'match_rms_adamw'; else set muon_lr" in first[0]
    for params, peak in (({"muon_lr": 0.02}, 0.02), ({"lr": 3e-4, "adjust_lr_fn": "match_rms_adamw"}, 3e-4)):
        assert pool.run(warned_of_rates, params=params, scheduler={"warmup_max_lr": peak}) == [[], []]


def resumed(
    rank: int, world_size: int, *, stage: int, precision: str, folder: str, phase: str, zero: dict[str, Any]
) -> Any:
    """Train 4 steps, save after 2 (``whole``), or load and train the last 2 (``rest``)."""
    config = training.ds_config(stage, precision=precision, clipping=0.5, zero=zero)
    config["scheduler"] = {"type": "WarmupLR", "params": SCHEDULERS["WarmupLR"]}
    engine = training.make_engine(config, seed=0 if phase == "whole" else 7)
    steps = range(4)
    if phase == "rest":
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
        steps = range(2, 4)
    for step in steps:
        training.run_step(engine, step, rank, world_size, 1)
        if phase == "whole" and step == 1:
            engine.save_checkpoint(folder)
    report = {
        "params": training.full_masters(engine),
        "momentum": training.full_states(engine, "momentum_buffer"),
        "exp_avg": training.full_states(engine, "exp_avg"),
        "exp_avg_sq": training.full_states(engine, "exp_avg_sq"),
        "rates": [float(group["lr"]) for group in engine.basic_optimizer.param_groups],
    }
    engine.destroy()
    return report


@pytest.mark.parametrize(("stage", "precision"), each_value(product([0, 1, 2, 3], ["fp32", "bf16", "fp16"])))
def test_resume_is_bit_identical(ranks: Any, stage: int, precision: str, tmp_path: Path) -> None:
    zero = {"sub_group_size": 200} if stage == 3 else {}
    arguments = {"stage": stage, "precision": precision, "folder": str(tmp_path), "zero": zero}
    whole = ranks(2).run(resumed, phase="whole", **arguments)[0]
    rest = ranks(2).run(resumed, phase="rest", **arguments)[0]
    assert whole["rates"] == rest["rates"]
    for key in ("params", "momentum", "exp_avg", "exp_avg_sq"):
        assert whole[key].keys() == rest[key].keys() and whole[key]
        for name, expected in whole[key].items():
            assert torch.equal(rest[key][name], expected), (key, name)


def test_full_state_can_be_read_through_deepspeed(ranks: Any) -> None:
    for stage in (1, 2, 3):
        assert ranks(2).run(read_states, stage=stage)[0] <= 1e-6


def read_states(rank: int, world_size: int, *, stage: int) -> float:
    """Return the worst difference between DeepSpeed's own view of the momentum and ours."""
    from deepspeed.utils import safe_get_full_optimizer_state

    engine = training.make_engine(training.ds_config(stage))
    for step in range(2):
        training.run_step(engine, step, rank, world_size, 1)
    ours = training.full_states(engine, "momentum_buffer")
    worst = 0.0
    for name, param in engine.module.named_parameters():
        if name in MATRICES["toy"]:
            theirs = safe_get_full_optimizer_state(param, "momentum_buffer")
            worst = max(worst, float((theirs.double() - ours[name]).abs().max()))
    engine.destroy()
    return worst


def beside_torch(rank: int, world_size: int, *, stage: int) -> dict[str, float]:
    """Train with DeepSpeed and, in the same process, with torch.optim.Muon; both iterate in bf16."""
    settings = {"ns_method": "standard", "ns_dtype": "bf16", "eps": 1e-8}
    engine = training.make_engine(training.ds_config(stage, params=settings))
    model = build("toy")
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    muon = torch.optim.Muon(
        [p for n, p in model.named_parameters() if n in MATRICES["toy"]], lr=0.02, weight_decay=0.1
    )
    adam = torch.optim.AdamW(
        [p for n, p in model.named_parameters() if n not in MATRICES["toy"]],
        lr=3e-3,
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    for step in range(5):
        training.run_step(engine, step, rank, world_size, 1)
        model.zero_grad()
        for micro in range(world_size):
            (model(*batch(step, micro)) / world_size).backward()
        muon.step()
        adam.step()
    masters = training.full_masters(engine)
    engine.destroy()
    expected = copy.deepcopy(dict(model.named_parameters()))
    return {name: relative(masters[name], expected[name].detach(), start[name]) for name in MATRICES["toy"]}


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_agrees_with_torch_muon_in_bf16(ranks: Any, stage: int) -> None:
    # Both round to bf16 (2^-9 relative) after every product, at different places of the same polynomial: an error of a
    # few 2^-9 in the input's small directions is multiplied by up to 480. Measured 0.02 to 0.06 in norm.
    errors = ranks(2).run(beside_torch, stage=stage)[0]
    assert max(errors.values()) <= 0.1, errors


def keep_group_settings(rank: int, world_size: int, *, stage: int) -> Any:
    """The no-decay-on-vectors recipe: the caller's two groups with the optimizer from the configuration."""
    model = build("toy")
    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0, "lr": 0.5, "name": "vectors"},
    ]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=training.ds_config(stage))
    found = [
        [g["algorithm"], float(g["lr"]), float(g["weight_decay"]), g.get("name", "")]
        for g in deepspeed_muon.muon_optimizer(engine).param_groups
    ]
    training.run_step(engine, 0, rank, world_size, 1)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_callers_groups_keep_their_settings(ranks: Any, stage: int) -> None:
    assert ranks(2).run(keep_group_settings, stage=stage)[0] == [
        ["muon", 0.02, 0.3, ""],
        ["adamw", 3e-3, 0.3, ""],
        ["adamw", 0.5, 0.0, "vectors"],
    ]
