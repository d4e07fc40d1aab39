"""A program's optimizer whose param groups no longer fit when the engine is made, or later.

Parameters are frozen and unfrozen, the engine's model tells more than the program did, dtypes are mixed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed_muon
from deepspeed_muon import Muon
from tests.support import training
from tests.support.models import MATRICES, batch, build
from tests.support.thinning import full

LATE = "blocks.0."


def client_engine(model: nn.Module, optimizer: Any, stage: int, **settings: Any) -> Any:
    """Return an engine around an optimizer of the program's own."""
    config = training.ds_config(stage, **settings)
    params = config.pop("optimizer")["params"]
    return training.initialize(model, config, optimizer=optimizer(params))


def freeze(model: nn.Module, *prefixes: str) -> nn.Module:
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(prefixes))
    return model


def unfreeze(
    rank: int, world_size: int, *, stage: int, when: str, is_client: bool = True, precision: str = "fp32"
) -> dict[str, Any]:
    """Unfreeze a block before the engine is made, or after the first step; report masters, warnings and records."""
    model = freeze(build("toy", exact=precision == "fp32"), LATE)
    config = training.ds_config(stage, precision=precision)
    optimizer = Muon(model, **config.pop("optimizer")["params"]) if is_client else None
    if when == "before":
        model.requires_grad_(True)
    engine = training.initialize(model, config, optimizer=optimizer)
    messages = training.heard()
    for step in range(4):
        training.run_step(engine, step, rank, world_size, 1)
        if step == 0:
            model.requires_grad_(True)
    return {
        "params": training.full_masters(engine),
        "messages": [text for text in messages if "unfrozen" in text],
    }


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(0, "fp32"), (0, "bf16"), (1, "fp32"), full(1, "bf16"), full(2, "fp32"), (3, "fp32")],
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
        ranks(2).run(unfreeze, stage=stage, when="before", is_client=is_client) for is_client in (True, False)
    )
    assert first["messages"] == [] and LATE + "gain" in first["params"]
    training.assert_same_bits(first, expected[0], "params")


def freeze_late(rank: int, world_size: int, *, stage: int, frozen: str) -> list[str]:
    """Freeze all matrices, or all but them, after the optimizer was made; return what moved in two steps."""
    model = build("toy")
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    config = training.ds_config(stage)
    optimizer = Muon(model, **config.pop("optimizer")["params"])
    for name, param in model.named_parameters():
        param.requires_grad_((name in MATRICES["toy"]) != (frozen == "matrices"))
    engine = training.initialize(model, config, optimizer=optimizer)
    for step in range(2):
        training.run_step(engine, step, rank, world_size, 1)
    end = training.full_masters(engine)
    return sorted(name for name, value in end.items() if not torch.equal(value, before[name].double()))


@pytest.mark.parametrize("frozen", ["matrices", "all others"])
@pytest.mark.parametrize("stage", [1, full(2), full(3)])
def test_a_half_that_was_frozen_is_dropped(ranks: Any, stage: int, frozen: str) -> None:
    names = {name for name, _ in build("toy").named_parameters()}
    for moved in ranks(2).run(freeze_late, stage=stage, frozen=frozen):
        assert set(moved) == (names - MATRICES["toy"] if frozen == "matrices" else MATRICES["toy"])


def refused(rank: int, world_size: int, *, how: str, stage: int) -> dict[str, Any]:
    """Report what an engine raises whose optimizer does not fit, and whether the optimizer's groups are as before."""
    model = build("toy")
    pairs = [*model.named_parameters()]
    if how == "outside":
        pairs.append(("temperature", nn.Parameter(torch.ones(1))))
    optimizer = Muon(build("toy").parameters() if how == "another" else pairs, lr=0.02)
    if how == "replaced":
        model.blocks[0].up.weight = nn.Parameter(model.blocks[0].up.weight.detach().clone())
    if how == "scheduled":
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        freeze(model, "embed", "lm_head", *(f"blocks.{n}.gain" for n in range(3)), "thin.gain")
    before = [list(map(id, group["params"])) for group in optimizer.param_groups]
    message = training.refusal(lambda: client_engine(model, lambda _: optimizer, stage))
    after = [list(map(id, group["params"])) for group in optimizer.param_groups]
    return {"message": message, "unchanged": before == after}


ANOTHER = ["ConfigError: the optimizer has parameters that are", "make the optimizer from this model"]
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
        # Without ZeRO nothing trained, and nothing was said.
        ("another", 0, ANOTHER),
        # The optimizer trained on a copy that the model does not have.
        ("replaced", 1, REPLACED),
        # A second try found groups without the parameters that the first one had sorted out.
        ("scheduled", 1, SCHEDULED),
    ],
)
def test_misfits_are_refused_on_all_ranks(ranks: Any, how: str, stage: int, said: list[str]) -> None:
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
    engine = client_engine(model, lambda params: Muon(GIVEN[given](model), **params), stage)
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
    engine = client_engine(Wrapper(model), lambda _: optimizer, 1)
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


def bf16_layer_in_fp32(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """Return the dtypes in which a bf16 layer of an fp32 model computes under ``offload_param``, and what is logged."""
    messages, computed = training.heard(), []
    model = build("toy", exact=False)
    layer = model.get_submodule("blocks.1.down").to(torch.bfloat16)
    layer.register_forward_hook(lambda layer, *_: computed.append(str(layer.weight.dtype)))
    engine = training.initialize(model, training.ds_config(3, zero={"offload_param": {"device": "cpu"}}))
    engine(*batch(0, rank))
    return computed, messages


def test_a_layer_that_offload_param_casts_is_a_warning(ranks: Any) -> None:
    computed, messages = ranks(2).run(bf16_layer_in_fp32)[0]
    assert computed == ["torch.float32"]
    assert any("compute in one" in text and "blocks.1.down.weight is bfloat16" in text for text in messages)


def test_stage_3_refuses_several_dtypes(ranks: Any) -> None:
    for report in ranks(2).run(mixed, stage=3):
        assert report["message"].startswith("ConfigError: ZeRO 3 needs trained parameters of one dtype")
        assert "gain is float32" in report["message"] and "is bfloat16" in report["message"]
