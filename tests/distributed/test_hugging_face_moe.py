"""Mixtures of experts of Hugging Face whose ranks choose different experts in the same step."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import set_z3_leaf_modules

import deepspeed_muon
from tests.support import training
from tests.support.moe_hugging_face import (
    EXPERTS,
    HIDDEN,
    INNER,
    blocks_of,
    build,
    muon_names,
    router_names,
    tokens_of,
)
from tests.support.reference import Oracle, relative, worst

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: the extra 'hf'"
)

STEPS = 4
# As in test_hugging_face: a router's gradients are small, and AdamW divides by their size.
EPS = 1e-6


def train(
    rank: int,
    world_size: int,
    *,
    family: str,
    listed: bool,
    stage: int,
    leaf: str = "default",
    optimizer: str = "Muon",
    **settings: Any,
) -> dict[str, Any]:
    """Train on this rank's tokens; report masters, norms and routes."""
    model = build(family, listed=listed)
    layers = blocks_of(model, family)
    zero = settings.pop("zero", {})
    if leaf == "marked":
        set_z3_leaf_modules(model, [type(layers[0])])
    else:
        # DeepSpeed marks the layers of Mixtral and Qwen by itself.
        zero = {**zero, "leaf_module": {"classes": []}}
    config = training.ds_config(stage, clipping=0.5, zero=zero, params={"eps": EPS}, **settings)
    if optimizer != "Muon":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    norms = []
    for step in range(STEPS):
        tokens = tokens_of(step, rank)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    report: dict[str, Any] = {"norms": norms}
    if optimizer == "Muon":
        report["params"] = training.full_masters(engine)
        report["routes"] = {
            route.name: [route.algorithm, route.kind] for route in deepspeed_muon.routes(engine)
        }
    engine.destroy()
    return report


@functools.lru_cache(maxsize=16)
def reference(family: str, listed: bool, world: int) -> tuple[Any, Any, list[float]]:
    """Train in float64 in this process, on the tokens of all ranks."""
    model = build(family, listed=listed)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    model = model.double()
    names = muon_names(family, listed=listed)
    stacks = {name for name, stacked in names.items() if stacked}
    cuts = {}
    if family in ("gpt_oss", "llama4"):
        for name in stacks:
            rows, cols = (INNER, HIDDEN) if "down" in name else (HIDDEN, 2 * INNER)
            cuts[name] = ([rows] * EXPERTS, [cols], True)
    oracle = Oracle(set(names), clipping=0.5, experts=stacks, cuts=cuts)
    oracle.eps = EPS
    norms, apart = [], False
    for step in range(STEPS):
        model.zero_grad()
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
        apart |= len({frozenset(each) for each in used}) == world
        norms.append(oracle.update(model))
    assert apart, "in some step every rank uses other experts than the others"
    return start, {name: param.detach() for name, param in model.named_parameters()}, norms


def experts_with_a_gradient(model: Any, family: str) -> set[tuple[int, int]]:
    """Return the layer and number of each expert that the last backward pass reached."""
    found = set()
    for layer, block in enumerate(blocks_of(model, family)):
        if isinstance(block.experts, torch.nn.ModuleList):
            grads = [expert.down_proj.weight.grad for expert in block.experts]
        else:
            grads = block.experts.down_proj.grad
        found |= {(layer, number) for number, grad in enumerate(grads) if grad is not None and grad.any()}
    return found


def compare(results: list[Any], family: str, listed: bool) -> None:
    start, end, norms = reference(family, listed, len(results))
    names = muon_names(family, listed=listed)
    routes = results[0]["routes"]
    for name, (algorithm, kind) in routes.items():
        assert algorithm == ("muon" if name in names else "adamw"), name
        assert (kind == "experts") == names.get(name, False), (name, kind)
    assert {routes[name][0] for name in router_names(family)} == {"adamw"}
    errors = {}
    for name in end:
        if torch.equal(end[name], start[name].double()):
            assert torch.equal(results[0]["params"][name], end[name]), f"{name} moved without a gradient"
        else:
            errors[name] = relative(results[0]["params"][name], end[name], start[name])
    muon = {name: errors[name] for name in names if name in errors}
    others = {name: error for name, error in errors.items() if name not in names}
    print(family, listed, "muon", worst(list(muon.values())), "others", worst(list(others.values())))
    print({k: v for k, v in errors.items() if v > 1e-4})
    for result in results:
        torch.testing.assert_close(torch.tensor(result["norms"]), torch.tensor(norms), rtol=1e-4, atol=0)
