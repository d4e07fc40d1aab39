"""Mixtures of experts of Hugging Face whose ranks choose different experts in the same step."""

from __future__ import annotations

import functools
import os
from itertools import product
from typing import Any

import pytest
import torch
from deepspeed.utils import set_z3_leaf_modules, unset_z3_leaf_modules

import deepspeed_muon
from tests.support import training
from tests.support.accelerate_ranks import NEEDS_ACCELERATE, reset_hugging_face, use_cpu_ranks
from tests.support.comparisons import all_within, relative
from tests.support.contract import compare_norms
from tests.support.moe_hugging_face import (
    FAMILIES,
    blocks_of,
    build,
    muon_names,
    router_names,
    skip_without,
    stack_cuts,
    tokens_of,
)
from tests.support.oracle import Oracle, matrices_of
from tests.support.rounding import FP32_MODEL, limits
from tests.support.thinning import full, usual

pytestmark = NEEDS_ACCELERATE

STEPS = 3
# As in test_hugging_face: a router's gradients are small, and AdamW divides by their size.
EPS = 1e-6


def make_model(family: str, *, listed: bool, leaf: str, trained: str) -> Any:
    model = build(family, listed=listed)
    layer = type(blocks_of(model, family)[0])
    if leaf == "marked":
        set_z3_leaf_modules(model, [layer])
    elif leaf == "unset":
        unset_z3_leaf_modules(model, [layer])
    for name, param in model.named_parameters():
        param.requires_grad_(trained in name)
    return model


def make_config(stage: int, leaf: str, zero: dict[str, Any]) -> dict[str, Any]:
    if leaf != "default" and stage:
        # DeepSpeed marks the layers of Mixtral and Qwen by itself.
        zero = {**zero, "leaf_module": {"classes": []}}
    return training.ds_config(stage, clipping=0.5, zero=zero, params={"eps": EPS})


def train(
    rank: int,
    world_size: int,
    *,
    family: str,
    listed: bool,
    stage: int,
    leaf: str = "none",
    trained: str = "",
    zero: dict[str, Any] | None = None,
    checkpointed: bool = False,
) -> dict[str, Any]:
    """Train on this rank's tokens; report masters, norms and routes."""
    config = make_config(stage, leaf, zero or {})
    model = make_model(family, listed=listed, leaf=leaf, trained=trained)
    if checkpointed:
        model.gradient_checkpointing_enable()
    engine = training.initialize(model, config)
    norms = []
    for step in range(STEPS):
        tokens = tokens_of(step, rank)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return {"norms": norms, **results_of(engine)}


def results_of(engine: Any) -> dict[str, Any]:
    routes = {route.name: [route.algorithm, route.kind] for route in deepspeed_muon.routes(engine)}
    return {"params": training.full_masters(engine), "routes": routes}


@functools.lru_cache(maxsize=16)
def reference(family: str, listed: bool, world: int, trained: str) -> tuple[Any, Any, list[float]]:
    """Train in float64 in this process, on the tokens of all ranks."""
    model = make_model(family, listed=listed, leaf="none", trained=trained)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    model = model.double()
    names = muon_names(family, listed=listed)
    stacks = {name for name, stacked in names.items() if stacked}
    matrices = matrices_of(names, experts=stacks, grids=stack_cuts(family, stacks))
    oracle = Oracle(matrices, clipping=0.5, eps=EPS)
    norms, apart = [], False
    for step in range(STEPS):
        total: dict[str, Any] = {}
        used = []
        for rank in range(world):
            model.zero_grad()
            tokens = tokens_of(step, rank)
            (model(input_ids=tokens, labels=tokens).loss / world).backward()
            used.append(experts_with_a_gradient(model, family))
            for name, param in model.named_parameters():
                if param.grad is not None:
                    total[name] = total.get(name, 0) + param.grad
        for name, param in model.named_parameters():
            # A gradient of zero is none: an expert whose only token is the last one has no part in the loss.
            param.grad = total[name] if name in total and total[name].any() else None
        apart |= len({frozenset(experts) for experts in used}) == world
        norms.append(oracle.update(model))
    assert apart, "in some step every rank uses other experts than the others"
    return start, {name: param.detach() for name, param in model.named_parameters()}, norms


def experts_with_a_gradient(model: Any, family: str) -> set[tuple[int, int]]:
    """Return the layer and number of each expert that the last backward pass reached."""
    reached = set()
    for layer, block in enumerate(blocks_of(model, family)):
        if isinstance(block.experts, torch.nn.ModuleList):
            grads = [expert.down_proj.weight.grad for expert in block.experts]
        else:
            grads = block.experts.down_proj.grad
            grads = [] if grads is None else grads
        reached |= {(layer, number) for number, grad in enumerate(grads) if grad is not None and grad.any()}
    return reached


def compare(results: list[Any], family: str, listed: bool, trained: str = "") -> None:
    start, end, norms = reference(family, listed, len(results), trained)
    # The models compute in fp32, their routers and norms in the reference too.
    allowed = limits(reference, family, listed, len(results), trained, arithmetic=FP32_MODEL, seeds=2)
    names = muon_names(family, listed=listed)
    for name, (algorithm, kind) in results[0]["routes"].items():
        expected = "frozen" if trained not in name else "muon" if name in names else "adamw"
        assert algorithm == expected, name
        assert expected != "muon" or (kind == "experts") == names[name], (name, kind)
    errors = {}
    for name, param in results[0]["params"].items():
        if torch.equal(end[name], start[name].double()):
            assert torch.equal(param, end[name]), f"{name} moved without a gradient"
        else:
            errors[name] = relative(param, end[name], start[name])
    assert errors.keys() >= {name for name in end if not torch.equal(end[name], start[name].double())}
    all_within(errors, allowed.paths, "path of")
    for result in results:
        compare_norms(result["norms"], norms, allowed.norms)


# Mixtral's stacks are Qwen's, and AutoEP trains it in test_experts.py.
CORE = [
    ("qwen3_moe", True, 3, 2, "none"),
    ("qwen3_moe", False, 1, 2, "marked"),
]
CASES = usual(product(FAMILIES, (True, False), (3, 2, 1), (2, 4), ("none", "marked")), CORE)


@pytest.mark.parametrize(("family", "listed", "stage", "world", "leaf"), CASES)
def test_matches_the_reference(
    ranks: Any, family: str, listed: bool, stage: int, world: int, leaf: str
) -> None:
    """Whether experts are stacked or modules of their own, and whether the user has marked leaf modules or not."""
    skip_without(family, listed=listed)
    assert router_names(family) <= {name for name, _ in build(family, listed=listed).named_parameters()}
    results = ranks(world).run(train, family=family, listed=listed, stage=stage, leaf=leaf)
    assert all(results[0]["routes"][name][0] == "adamw" for name in router_names(family))
    compare(results, family, listed)


VARIANTS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0, "leaf": "default"},
    "1-offload": {"stage": 1, "zero": training.OFFLOAD},
    "2-checkpointed": {"stage": 2, "checkpointed": True},
    "3-checkpointed": {"stage": 3, "checkpointed": True},
    "3-offload": {
        "stage": 3,
        "zero": {**training.OFFLOAD, "offload_param": {"device": "cpu"}, "sub_group_size": 2000},
    },
    # No layer before the only trained one has a gradient, so the input of its leaf module has none.
    "2-last-layer": {"stage": 2, "trained": "layers.1.mlp."},
    "3-last-layer": {"stage": 3, "trained": "layers.1.mlp."},
}
VARIANT_CASES = usual(product(VARIANTS, (True, False)), {("3-last-layer", False)})


@pytest.mark.parametrize(("variant", "listed"), VARIANT_CASES)
def test_variants(ranks: Any, variant: str, listed: bool) -> None:
    skip_without("deepseek_v3", listed=listed)
    results = ranks(2).run(train, family="deepseek_v3", listed=listed, **VARIANTS[variant])
    compare(results, "deepseek_v3", listed, VARIANTS[variant].get("trained", ""))


def marked_on_one_rank(rank: int, world_size: int, *, stage: int) -> str:
    settings = {"family": "llama4", "listed": True, "stage": stage, "leaf": "unset" if rank else "none"}
    return training.refusal(lambda: train(rank, world_size, **settings))


@pytest.mark.parametrize("stage", [full(2), 3])
def test_marks_that_differ_are_refused_on_every_rank(ranks: Any, stage: int) -> None:
    for message in ranks(2).run(marked_on_one_rank, stage=stage):
        assert "leaf modules (set_z3_leaf_modules)" in message and "layers.0.feed_forward" in message


def accelerate_loop(rank: int, world_size: int, *, listed: bool, by_environment: bool) -> dict[str, Any]:
    """Train with Accelerate, which is told of the MoE layer's class and marks it."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim

    use_cpu_ranks()
    config = make_config(3, "none", {})
    layer = "DeepseekV3MoE"
    if by_environment:
        # What accelerate launch --deepspeed_moe_layer_cls_names sets, and Trainer runs read.
        os.environ["ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"] = layer
    config["train_micro_batch_size_per_gpu"] = 1
    named = None if by_environment else layer
    try:
        plugin = DeepSpeedPlugin(hf_ds_config=config, transformer_moe_cls_names=named)
        accelerator = Accelerator(deepspeed_plugin=plugin)
        model = make_model("deepseek_v3", listed=listed, leaf="none", trained="")
        engine, _ = accelerator.prepare(model, DummyOptim(model.parameters()))
        norms = []
        for step in range(STEPS):
            tokens = tokens_of(step, rank)
            accelerator.backward(engine(input_ids=tokens, labels=tokens).loss)
            norms.append(float(engine.get_global_grad_norm()))
        return {"norms": norms, **results_of(engine)}
    finally:
        reset_hugging_face()


@pytest.mark.parametrize(("listed", "by_environment"), [(True, True), full(False, False)])
def test_accelerate_marks_the_named_layers(ranks: Any, listed: bool, by_environment: bool) -> None:
    skip_without("deepseek_v3", listed=listed)
    results = ranks(2).run(accelerate_loop, listed=listed, by_environment=by_environment)
    compare(results, "deepseek_v3", listed)
