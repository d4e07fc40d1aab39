"""Registration, client optimizers, schedulers, resuming, and the comparison with torch.optim.Muon."""

from __future__ import annotations

import copy
import functools
import logging
import sys
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed_muon
from deepspeed_muon import RoutingError
from deepspeed_muon.optimizer import Muon
from tests.support import training
from tests.support.contract import STEPS, compare_paths, reference, train_reference
from tests.support.models import MATRICES, batch, build
from tests.support.oracle import Oracle
from tests.support.rounding import limits
from tests.support.thinning import each_value, full


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
    engine = training.initialize(model, config, optimizer=optimizer)
    training.train_steps(engine, STEPS, rank, world_size)
    tags = {
        tag for p in engine.module.parameters() for tag in vars(p) if tag in ("use_muon", "muon_num_heads")
    }
    return {"params": training.full_masters(engine), "tags": sorted(tags)}


@pytest.mark.compat
@pytest.mark.parametrize(
    ("how", "stage"),
    each_value(
        product(["config", "instance-named", "instance-model", "instance-groups", "callable"], [0, 2, 3])
    ),
)
def test_all_forms_of_passing_the_optimizer(ranks: Any, stage: int, how: str) -> None:
    result = ranks(2).run(client, stage=stage, how=how)[0]
    start, end, _, _ = reference("toy", 2, 0.5)
    compare_paths(result["params"], start, end, limits(reference, "toy", 2, 0.5))
    assert not result["tags"], "with these tags stages 1 and 2 would run DeepSpeed's own path as well"


def unnamed_client(rank: int, world_size: int) -> list[str]:
    """Return the names that are Muon's of an optimizer that got some parameters, and none of their names."""
    model = build("toy")
    params = [p for n, p in model.named_parameters() if n in MATRICES["toy"] or n == "embed.weight"]
    config = training.ds_config(2)
    optimizer = Muon(params, **config.pop("optimizer")["params"])
    assert len(optimizer.param_groups) == 1
    engine = training.initialize(model, config, optimizer=optimizer)
    return [route.name for route in deepspeed_muon.routes(engine) if route.algorithm == "muon"]


def test_unnamed_parameters_are_routed_by_name(ranks: Any) -> None:
    """An embedding must not go to Muon because nobody told its name."""
    assert set(ranks(2).run(unnamed_client)[0]) == MATRICES["toy"]


def config_types(rank: int, world_size: int) -> list[str]:
    """Which class each spelling of the type gives, registered and not."""

    def optimizer_of(kind: str) -> str:
        config = training.ds_config(1)
        config["optimizer"] = {"type": kind, "params": {"lr": 0.01}}
        made = type(training.make_engine(config).basic_optimizer)
        return f"{made.__module__.partition('.')[0]}.{made.__name__}"

    deepspeed_muon.register()
    deepspeed_muon.register()
    classes = [optimizer_of(kind) for kind in ("Muon", "muon", "MUON")]
    deepspeed_muon.unregister()
    deepspeed_muon.unregister()
    try:
        classes.append(optimizer_of("Muon"))
    finally:
        deepspeed_muon.register()
    classes.append(optimizer_of("muon"))
    return classes


def test_registration(ranks: Any) -> None:
    ours, theirs = "deepspeed_muon.Muon", "deepspeed.MuonWithAuxAdam"
    assert ranks(1).run(config_types)[0] == [ours, ours, ours, theirs, ours]


TWO_OF_NINE = {"warmup_num_steps": 2, "total_num_steps": 9}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"},
    "WarmupDecayLR": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, **TWO_OF_NINE},
    "WarmupCosineLR": {"warmup_min_ratio": 0.1, **TWO_OF_NINE},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 3},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2},
}


def scheduled(rank: int, world_size: int, *, stage: int, name: str) -> Any:
    """Return the rates of Muon and AdamW in every step."""
    config = training.ds_config(stage, params={"lr": 0.01, "muon_lr": 0.02, "adam_lr": 0.001})
    config["scheduler"] = {"type": name, "params": SCHEDULERS[name]}
    engine = training.make_engine(config)
    optimizer = deepspeed_muon.muon_optimizer(engine)
    rates = []
    for step in range(5):
        rates.append([group["lr"] for group in optimizer.param_groups])
        training.run_step(engine, step, rank, world_size, 1)
    return {"rates": rates, "algorithms": [group["algorithm"] for group in optimizer.param_groups]}


@pytest.mark.compat
@pytest.mark.parametrize(("name", "stage"), each_value(product(SCHEDULERS, (0, 2))))
def test_schedulers_keep_the_ratio_of_the_rates(ranks: Any, name: str, stage: int) -> None:
    """DeepSpeed's, which write one rate; torch's multiply each group's own (test_torch_schedulers)."""
    report = ranks(1).run(scheduled, stage=stage, name=name)[0]
    assert report["algorithms"] == ["muon", "adamw"]
    for muon, adam in report["rates"]:
        assert muon == pytest.approx(20 * adam), report["rates"]
    assert len({muon for muon, _ in report["rates"]}) > 1, "the schedule moves"
    shared = [muon / 2 for muon, _ in report["rates"]]
    if name == "OneCycle":
        assert max(shared) == pytest.approx(0.01), "the configured number stands for the shared rate"


def one_rate(rank: int, world_size: int, *, stage: int) -> list[str]:
    """Train under a scheduler of torch that writes one number into all groups; return the warnings."""
    messages = training.heard()
    config = training.ds_config(stage, params={"muon_lr": 0.02, "adam_lr": 3e-4})
    engine = training.initialize(
        build("toy"),
        config,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=9),
    )
    training.train_steps(engine, 3, rank, world_size)
    return [text for text in messages if "with one rate" in text]


@pytest.mark.parametrize("stage", [0, 2, full(3)])
def test_one_rate_for_both_halves_is_a_warning(ranks: Any, stage: int) -> None:
    """It was silent, although DeepSpeed's own schedulers of that kind keep the ratio here."""
    first, second = ranks(2).run(one_rate, stage=stage)
    assert len(first) == 1 and "with one rate, 0.00" in first[0] and not second


def second_name(rank: int, world_size: int) -> list[Any]:
    """Return what trains under the type ``deepspeed_muon``, and the error where the package is not registered."""
    config = training.ds_config(1)
    config["optimizer"]["type"] = "deepspeed_muon"
    is_ours = deepspeed_muon.is_active(training.initialize(build("toy"), config))
    deepspeed_muon.unregister()
    try:
        return [is_ours, training.refusal(lambda: training.initialize(build("toy"), config), AssertionError)]
    finally:
        deepspeed_muon.register()


def test_a_forgotten_import_fails_immediately_under_our_name(ranks: Any) -> None:
    """Under ``Muon`` DeepSpeed's own one trained in silence."""
    ((is_ours, error),) = ranks(1).run(second_name)
    assert is_ours and "deepspeed_muon is not a supported DeepSpeed Optimizer" in error


def without_a_section(rank: int, world_size: int) -> list[str]:
    """Return what is said of a program's AdamW where DEEPSPEED_MUON is set."""
    messages, model, config = training.heard(), build("toy"), training.ds_config(1)
    del config["optimizer"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "_deepspeed_muon_switch", ModuleType("_deepspeed_muon_switch"))
        training.initialize(model, config, optimizer=torch.optim.AdamW(model.parameters()))
    return messages


def test_the_switch_without_an_optimizer_section_is_a_warning(ranks: Any) -> None:
    """AdamW trained in silence."""
    (messages,) = ranks(1).run(without_a_section)
    (message,) = [text for text in messages if "DEEPSPEED_MUON is set" in text]
    assert "trains with the AdamW that the program passes" in message and "no optimizer section" in message


def too_few_functions(rank: int, world_size: int) -> str:
    """Return the error of a schedule that has a function for each of the program's groups."""
    model = build("toy")
    groups = [
        {"params": params} for params in (list(model.blocks.parameters()), list(model.lm_head.parameters()))
    ]
    make = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0] * 2)  # noqa: E731
    return training.refusal(
        lambda: training.initialize(model, training.ds_config(1), model_parameters=groups, lr_scheduler=make)
    )


def test_a_schedule_with_too_few_functions_names_the_groups(ranks: Any) -> None:
    (message,) = ranks(1).run(too_few_functions)
    assert message.startswith("RoutingError: lr_scheduler: Expected 3 lr_lambdas, but got 2")
    assert "has 3: muon of group 0, adamw of group 0, adamw of group 1" in message


def warned_of_rates(
    rank: int, world_size: int, *, params: dict[str, Any], scheduler: dict[str, Any]
) -> list[str]:
    """Make an engine; return what was said of its rates."""
    config = training.ds_config(1)
    config["optimizer"]["params"] = params
    config["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, **scheduler}}
    messages = training.heard()
    training.make_engine(config)
    return [text for text in messages if "_lr" in text]


def test_rates_that_nobody_chose_are_warned_of(ranks: Any) -> None:
    """Without warmup_max_lr DeepSpeed's schedules go to 0.001. Rates without a schedule: test_optimizer."""
    pool = ranks(2)
    both = {"muon_lr": 0.02, "adam_lr": 3e-4}
    first, second = pool.run(warned_of_rates, params=both, scheduler={})
    assert not second, "rank 0 speaks for all"
    assert len(first) == 1 and "adam_lr 1.5e-05 instead of 0.0003. Set warmup_max_lr to 0.02" in first[0]
    assert "muon_lr 0.001 instead of 0.02" in first[0]
    one = {"lr": 3e-4, "adjust_lr_fn": "match_rms_adamw"}
    for params, peak in ((both, 0.02), (one, 3e-4)):
        assert pool.run(warned_of_rates, params=params, scheduler={"warmup_max_lr": peak}) == [[], []]


def warmed_up(rank: int, world_size: int, *, params: dict[str, Any], group: dict[str, Any]) -> list[float]:
    """Return the rates at the end of a WarmupLR that has no warmup_max_lr."""
    config = training.ds_config(1)
    config["optimizer"]["params"] = params
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    model = build("toy")
    groups = [{"params": list(model.parameters()), **group}]
    engine = training.initialize(model, config, model_parameters=groups)
    training.train_steps(engine, 3, rank, world_size)
    return [group["lr"] for group in engine.basic_optimizer.param_groups]


def test_warmup_lr_without_a_peak_rises_to_the_rates_of_the_groups(ranks: Any) -> None:
    """DeepSpeed's default is None there. It ended in a TypeError; equal rates of groups would have been scaled."""
    assert ranks(1).run(warmed_up, params={"muon_lr": 0.02, "adam_lr": 3e-4}, group={})[0] == [0.02, 3e-4]
    assert ranks(1).run(warmed_up, params={"lr": 0.02}, group={"lr": 0.005})[0] == [0.005, 0.005]


def keep_group_settings(rank: int, world_size: int, *, stage: int) -> Any:
    """The no-decay-on-vectors recipe: the caller's two groups with the optimizer from the configuration."""
    model = build("toy")
    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0, "lr": 0.5, "name": "vectors"},
    ]
    engine = training.initialize(model, training.ds_config(stage), model_parameters=groups)
    settings = [
        [g["algorithm"], float(g["lr"]), float(g["weight_decay"]), g.get("name", "")]
        for g in deepspeed_muon.muon_optimizer(engine).param_groups
    ]
    training.run_step(engine, 0, rank, world_size, 1)
    return settings


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_callers_groups_keep_their_settings(ranks: Any, stage: int) -> None:
    assert ranks(2).run(keep_group_settings, stage=stage)[0] == [
        ["muon", 0.02, 0.3, ""],
        ["adamw", 3e-3, 0.3, ""],
        ["adamw", 0.5, 0.0, "vectors"],
    ]


# Programs written for DeepSpeed's Muon ended in ``KeyError: 'use_muon'``, or before their first step.
#
# They read the key in the param groups, and they may train nothing but a head, which was refused because nothing is
# left for Muon.


def kinds(optimizer: Any) -> list[tuple[bool, str]]:
    return [(group["use_muon"], group["algorithm"]) for group in optimizer.param_groups]


def test_groups_say_whose_they_are() -> None:
    model = build("toy")
    optimizer = Muon(model, lr=0.02)
    expected = [(True, "muon"), (False, "adamw")]
    assert kinds(optimizer) == expected
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:  # saved before the key was there, or by a program that dropped it
        del group["use_muon"], group["algorithm"], group["lr_ratio"]
    optimizer.load_state_dict(saved)
    assert kinds(optimizer) == kinds(copy.deepcopy(optimizer)) == expected
    rates = {bool(group["use_muon"]): 0.1 if group["use_muon"] else 0.01 for group in optimizer.param_groups}
    assert rates == {True: 0.1, False: 0.01}


def test_groups_keep_their_kind() -> None:
    """A parameter cannot change sides: its state and its place in the exchange are of one algorithm."""
    optimizer = Muon(nn.Linear(4, 4), lr=0.02)
    optimizer.param_groups[0]["use_muon"] = True
    with pytest.raises(RoutingError, match="use_muon is True and cannot become False"):
        optimizer.param_groups[0]["use_muon"] = False


def head_only(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(name in ("lm_head.weight", "blocks.0.gain"))


def test_a_head_alone_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    model = build("toy")
    head_only(model)
    with caplog.at_level(logging.WARNING):
        optimizer = Muon(model, lr=0.01)
        model(*batch(0, 0)).backward()
        optimizer.step()
    said = [record.message for record in caplog.records if "no parameter goes to Muon" in record.message]
    assert len(said) == 1 and "this is a plain AdamW run" in said[0]


def test_weights_that_are_flat_are_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    """Those of FSDP all went to AdamW, with the advice of an 'include' that is refused for them."""
    flat = nn.ParameterList(nn.Parameter(param.detach().flatten()) for param in build("toy").parameters())
    with caplog.at_level(logging.WARNING):
        Muon(flat, lr=0.01)
    assert "None has two dimensions. FSDP flattens weights" in caplog.text and "include" not in caplog.text


def train_head(rank: int, world_size: int, *, stage: int) -> dict[str, Any]:
    """Train the head of a frozen model."""
    model = build("toy")
    head_only(model)
    config = training.ds_config(stage, clipping=0.5)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = training.initialize(model, config, model_parameters=trained)
    training.train_steps(engine, 3, rank, world_size)
    return {
        "params": training.full_masters(engine),
        "kinds": [list(kind) for kind in kinds(deepspeed_muon.muon_optimizer(engine))],
    }


@functools.lru_cache
def head_reference() -> tuple[Any, Any, list[float]]:
    model = build("toy")
    head_only(model)
    start, end, norms = train_reference(model, Oracle({}, clipping=0.5), 2)
    return start, {name: end[name] for name in ("lm_head.weight", "blocks.0.gain")}, norms


@pytest.mark.parametrize("stage", [0, full(2), 3])
def test_a_head_alone_is_trained_by_adamw(ranks: Any, stage: int) -> None:
    start, end, _ = head_reference()
    for report in ranks(2).run(train_head, stage=stage):
        assert report["kinds"] == [[False, "adamw"]]
        assert report["params"].keys() == end.keys()
        compare_paths(report["params"], start, end, limits(head_reference))
