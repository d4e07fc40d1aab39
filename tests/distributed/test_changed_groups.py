"""A program's optimizer whose param groups no longer fit when the engine is made, or later.

Parameters are frozen and unfrozen, the engine's model tells more than the program did, dtypes are mixed.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn

import deepspeed_muon
from deepspeed_muon import Muon
from tests.support import training
from tests.support.comparisons import relative, within
from tests.support.contract import backward
from tests.support.models import MATRICES, batch, build
from tests.support.oracle import Oracle, matrices_of
from tests.support.rounding import limits
from tests.support.thinning import full

LATE = "blocks.0."


def own_engine(model: nn.Module, optimizer: Any, stage: int, **settings: Any) -> Any:
    """Return an engine around an optimizer of the program's own."""
    config = training.ds_config(stage, **settings)
    params = config.pop("optimizer")["params"]
    return training.initialize(model, config, optimizer=optimizer(params))


def freeze(model: nn.Module, *prefixes: str) -> nn.Module:
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(prefixes))
    return model


def unfreeze(
    rank: int, world_size: int, *, stage: int, when: str, own: bool = True, precision: str = "fp32"
) -> dict[str, Any]:
    """Unfreeze a block before the engine is made, or after the first step; report masters, warnings and records."""
    model = freeze(build("toy", exact=precision == "fp32"), LATE)
    config = training.ds_config(stage, precision=precision)
    optimizer = Muon(model, **config.pop("optimizer")["params"]) if own else None
    if when == "before":
        model.requires_grad_(True)
    elif not own:
        config = training.ds_config(stage, precision=precision)
    engine = training.initialize(model, config, optimizer=optimizer)
    messages = training.heard()
    for step in range(4):
        training.run_step(engine, step, rank, world_size, 1)
        if step == 0:
            model.requires_grad_(True)
    return {
        "params": training.full_masters(engine),
        "messages": [text for text in messages if "unfrozen" in text],
        "routes": {route.name: route.algorithm for route in deepspeed_muon.routes(engine)},
    }


def hide_gradients(model: nn.Module, *, late: bool) -> dict[str, Tensor | None]:
    """Take away the gradients of the late block, or of everything else; return them."""
    named = {n: p for n, p in model.named_parameters() if n.startswith(LATE) == late}
    hidden = {name: param.grad for name, param in named.items()}
    for param in named.values():
        param.grad = None
    return hidden


@functools.lru_cache
def late_reference() -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Train in float64 with one oracle for what is trained from the start, and one that begins a step later."""
    norms = []
    model = build("toy")
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    model.double()
    early, late = (Oracle(matrices_of(MATRICES["toy"])) for _ in range(2))
    for step in range(4):
        backward(model, step, 2)
        hidden = hide_gradients(model, late=True)
        norms.append(early.update(model))
        hide_gradients(model, late=False)
        for name, grad in hidden.items():
            model.get_parameter(name).grad = grad if step else None
        if step:
            late.update(model)
    return start, {name: param.detach() for name, param in model.named_parameters()}, norms


@pytest.mark.parametrize("own", [True, full(False)], ids=["client", "configured"])
def test_a_parameter_unfrozen_later_trains_at_stage_0(ranks: Any, own: bool) -> None:
    """With a momentum of zero, as with torch.optim, and the others do not notice."""
    start, end, _ = late_reference()
    allowed = limits(late_reference).paths
    for report in ranks(2).run(unfreeze, stage=0, when="later", own=own):
        assert report["params"].keys() == end.keys() and "frozen" not in report["routes"].values()
        for name, value in report["params"].items():
            within(relative(value, end[name], start[name]), allowed[name], f"path of {name}")


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "bf16"), (1, "fp32"), full(1, "bf16"), full(2, "fp32"), (3, "fp32")]
)
def test_a_parameter_that_the_wrapper_cannot_take_is_named_once(
    ranks: Any, stage: int, precision: str
) -> None:
    first, _ = ranks(2).run(unfreeze, stage=stage, when="later", precision=precision)
    assert not any(name.startswith(LATE) for name in first["params"])
    (message,) = first["messages"]
    for name in (f"{LATE}up.weight", f"{LATE}down.weight", f"{LATE}gain", "before deepspeed.initialize"):
        assert name in message


@pytest.mark.parametrize("stage", [0, full(1), 2, 3])
def test_a_parameter_unfrozen_before_the_engine_is_made_trains(ranks: Any, stage: int) -> None:
    (first, *_), expected = (
        ranks(2).run(unfreeze, stage=stage, when="before", own=own) for own in (True, False)
    )
    assert first["messages"] == [] and LATE + "gain" in first["params"]
    training.assert_same_bits(first, expected[0], "params")


def disagree(rank: int, world_size: int) -> str:
    """Return what a step raises for which the ranks unfroze different parameters."""
    model = freeze(build("toy"), LATE)
    engine = training.initialize(model, training.ds_config(0))
    training.run_step(engine, 0, rank, world_size, 1)
    model.blocks[0].up.weight.requires_grad_(rank == 1)
    return training.refusal(lambda: training.run_step(engine, 1, rank, world_size, 1))


def test_ranks_that_unfreeze_different_parameters_raise(ranks: Any) -> None:
    """DeepSpeed's all-reduce would wait for ever."""
    for message in ranks(2).run(disagree, timeout=60):
        assert message.startswith("RankDisagreementError: the ranks do not agree"), message
        assert "parameters unfrozen since the last step" in message
        assert "ranks [0]: none" in message and f"ranks [1]: {LATE}up.weight" in message


def resume_thawed(rank: int, world_size: int, *, folder: str) -> dict[str, Any]:
    """Save with a block that was unfrozen after a step, and go on in another engine."""
    reports = []
    for number in range(2):
        model = build("toy") if number else freeze(build("toy"), LATE)
        engine = training.initialize(model, training.ds_config(0))
        if number:
            assert engine.load_checkpoint(folder)[0] is not None
        else:
            training.run_step(engine, 0, rank, world_size, 1)
            model.requires_grad_(True)
            training.run_step(engine, 1, rank, world_size, 1)
            engine.save_checkpoint(folder)
            deepspeed_muon.checkpoint.consolidate(engine, f"{folder}/set")
        training.run_step(engine, 2, rank, world_size, 1)
        reports.append(training.outcome(engine))
    model = build("toy")
    engine = training.initialize(model, training.ds_config(1))
    deepspeed_muon.checkpoint.restore(engine, f"{folder}/set")
    training.run_step(engine, 2, rank, world_size, 1)
    return {"saved": reports[0], "loaded": reports[1], "restored": training.outcome(engine)}


def test_checkpoints_have_what_was_unfrozen(ranks: Any, tmp_path: Path) -> None:
    report, _ = ranks(2).run(resume_thawed, folder=str(tmp_path))
    assert f"{LATE}up.weight" in report["saved"]["momentum"]
    training.assert_same_bits(report["loaded"], report["saved"])
    assert report["restored"]["params"].keys() == report["saved"]["params"].keys()


SCHEDULES = {
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda step, n=n: 1.0 / (1 + n) for n in range(len(optimizer.param_groups))]
    ),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [0.1 * (1 + n) for n in range(len(optimizer.param_groups))], total_steps=9
    ),
    "WarmupLR": lambda optimizer: deepspeed.runtime.lr_schedules.WarmupLR(
        optimizer, *([peak * (1 + n) for n in range(len(optimizer.param_groups))] for peak in (0.01, 0.1)), 4
    ),
}


def freeze_late(rank: int, world_size: int, *, stage: int, frozen: str, schedule: str) -> dict[str, Any]:
    """Freeze all matrices, or all but them, after optimizer and scheduler were made; report rates and weights."""
    model = build("toy")
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    config = training.ds_config(stage)
    optimizer = Muon(model, **config.pop("optimizer")["params"])
    scheduler = SCHEDULES[schedule](optimizer) if schedule else None
    for name, param in model.named_parameters():
        param.requires_grad_((name in MATRICES["toy"]) != (frozen == "matrices"))
    engine = training.initialize(model, config, optimizer=optimizer, lr_scheduler=scheduler)
    rates = []
    for step in range(2):
        training.run_step(engine, step, rank, world_size, 1)
        rates.append([float(g["lr"]) for g in optimizer.param_groups if g["params"] or stage == 3])
    end = training.full_masters(engine)
    return {
        "rates": rates,
        "moved": sorted(name for name, value in end.items() if not torch.equal(value, before[name].double())),
    }


@pytest.mark.parametrize("frozen", ["matrices", "all others"])
@pytest.mark.parametrize(
    ("stage", "schedule"),
    [(1, ""), (2, "LambdaLR"), (1, "OneCycleLR"), (2, "WarmupLR"), full(2, ""), full(3, "LambdaLR")],
)
def test_a_half_that_was_frozen_is_dropped(ranks: Any, stage: int, frozen: str, schedule: str) -> None:
    """The rates of the other half are those that its position in the scheduler had before."""
    number = 1 if frozen == "matrices" else 0
    names = {name for name, _ in build("toy").named_parameters()}
    for report in ranks(2).run(freeze_late, stage=stage, frozen=frozen, schedule=schedule):
        expected = names - MATRICES["toy"] if number else MATRICES["toy"]
        assert set(report["moved"]) == expected
        optimizer = Muon(build("toy"), **training.MUON_PARAMS)
        scheduler = SCHEDULES[schedule](optimizer) if schedule else None
        for rates in report["rates"]:
            if scheduler is not None:
                scheduler.step()
            assert rates == [pytest.approx(float(optimizer.param_groups[number]["lr"]))]


def refused(rank: int, world_size: int, *, how: str, stage: int) -> dict[str, Any]:
    """Report what an engine raises whose optimizer does not fit, and whether the optimizer's groups are as before."""
    model = build("toy")
    pairs = [*model.named_parameters()]
    if how == "outside":
        pairs.append(("temperature", nn.Parameter(torch.ones(1))))
    optimizer = Muon(pairs, lr=0.02)
    if how == "replaced":
        model.blocks[0].up.weight = nn.Parameter(model.blocks[0].up.weight.detach().clone())
    if how == "scheduled":
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        freeze(model, "embed", "lm_head", *(f"blocks.{n}.gain" for n in range(3)), "thin.gain")
    before = [list(map(id, group["params"])) for group in optimizer.param_groups]
    message = training.refusal(lambda: own_engine(model, lambda _: optimizer, stage))
    after = [list(map(id, group["params"])) for group in optimizer.param_groups]
    return {"message": message, "unchanged": before == after}


OUTSIDE = [
    "ConfigError: the optimizer has parameters that are",
    "not in the model of deepspeed.initialize: temperature",
]
REPLACED = [f"RoutingError: parameter {LATE}up.weight of the optimizer is not the model's", "pass a function"]
SCHEDULED = [
    "RoutingError: the learning-rate scheduler was made for 2 param groups",
    "pass the scheduler to deepspeed.initialize",
]


@pytest.mark.parametrize(
    ("how", "stage", "said"),
    [
        # Only the rank that got the elements of such a parameter raised DeepSpeed's KeyError, and the other waited.
        *(("outside", 1, OUTSIDE), full("outside", 2, OUTSIDE), ("outside", 3, OUTSIDE)),
        # The optimizer trained on a copy that the model does not have.
        ("replaced", 1, REPLACED),
        # A second try found groups without the parameters that the first one had sorted out.
        ("scheduled", 1, SCHEDULED),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(ranks: Any, how: str, stage: int, said: list[str]) -> None:
    for report in ranks(2).run(refused, how=how, stage=stage):
        assert report["unchanged"]
        assert report["message"].startswith(said[0]) and said[1] in report["message"], report


class Named(nn.Module):
    """A model whose embedding and convolution only the types of modules tell."""

    def __init__(self) -> None:
        super().__init__()
        self.toy = build("toy")
        self.tok = nn.Embedding(29, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.conv(self.tok(tokens).mT).square().mean()
        return self.toy(tokens, targets) + x  # type: ignore[no-any-return]


GIVEN: dict[str, Any] = {
    "names": lambda model: model.named_parameters(),
    "parameters": lambda model: model.parameters(),
    "groups": lambda model: [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ],
}


def routed(rank: int, world_size: int, *, given: str, stage: int) -> dict[str, Any]:
    """Report the routes in an engine of an optimizer that does not know the model, and those of one that does."""
    torch.manual_seed(0)
    model = Named()
    expected = {route.name: [route.algorithm, route.kind] for route in Muon(model, lr=0.02).routes}
    engine = own_engine(model, lambda params: Muon(GIVEN[given](model), **params), stage)
    training.train_steps(engine, 2, rank, world_size)
    groups = engine.basic_optimizer.param_groups
    return {
        "expected": expected,
        "found": {route.name: [route.algorithm, route.kind] for route in deepspeed_muon.routes(engine)},
        "groups": [[group["algorithm"], group["caller_group"]] for group in groups],
    }


@pytest.mark.parametrize(
    ("given", "stage"), [("names", 2), ("parameters", 3), ("groups", 0), full("groups", 1)]
)
def test_routes_come_from_the_engines_model(ranks: Any, given: str, stage: int) -> None:
    for report in ranks(2).run(routed, given=given, stage=stage):
        assert report["found"] == report["expected"]
        assert report["found"]["conv.weight"] == ["muon", "convolution"]
        assert report["found"]["tok.weight"][0] == "adamw"
        expected = [["muon", 0], ["adamw", 0]] + ([["adamw", 1]] if given == "groups" else [])
        assert report["groups"] == expected


def wrapped(rank: int, world_size: int) -> list[str]:
    """Report the names in an engine whose model wraps the one that the optimizer and its patterns know."""

    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.inner = model

        def forward(self, *args: Any) -> Any:
            return self.inner(*args)

    model = build("toy")
    optimizer = Muon(model.named_parameters(), lr=0.02, exclude=["blocks.0.*"])
    engine = own_engine(Wrapper(model), lambda _: optimizer, 1)
    training.run_step(engine, 0, rank, world_size, 1)
    return [route.name for route in deepspeed_muon.routes(engine) if route.rule == "exclude"]


def test_patterns_for_the_names_of_an_inner_model_still_match(ranks: Any) -> None:
    for names in ranks(2).run(wrapped):
        assert names == [f"inner.{LATE}gain", f"inner.{LATE}up.weight", f"inner.{LATE}down.weight"]


def mixed(rank: int, world_size: int, *, stage: int) -> dict[str, Any]:
    """Train a bf16 model with gains in fp32, without bf16 in the configuration; or report the refusal."""
    model = build("toy", exact=False).to(torch.bfloat16)
    for name, param in model.named_parameters():
        if name.endswith("gain"):
            param.data = param.data.float()
    before = {name: str(param.dtype) for name, param in model.named_parameters()}
    engines: list[Any] = []
    message = training.refusal(lambda: engines.append(training.initialize(model, training.ds_config(stage))))
    if not engines:
        return {"message": message}
    (engine,) = engines
    start = training.full_masters(engine)
    for step in range(2):
        engine.backward(engine(*batch(step, rank)).float())
        engine.step()
    end = training.full_masters(engine)
    return {
        "message": message,
        "unchanged": before == {name: str(param.dtype) for name, param in model.named_parameters()},
        "still": [name for name, value in end.items() if torch.equal(value, start[name])],
    }


@pytest.mark.parametrize("stage", [1, 2])
def test_groups_are_divided_by_dtype(ranks: Any, stage: int) -> None:
    """ZeRO flattens a group into one buffer, whose dtype is the widest: half of the model became fp32."""
    for report in ranks(2).run(mixed, stage=stage):
        assert report == {"message": "", "unchanged": True, "still": []}


def test_stage_3_refuses_several_dtypes(ranks: Any) -> None:
    for report in ranks(2).run(mixed, stage=3):
        assert report["message"].startswith("ConfigError: ZeRO 3 needs trained parameters of one dtype")
        assert "gain is float32" in report["message"] and "is bfloat16" in report["message"]
