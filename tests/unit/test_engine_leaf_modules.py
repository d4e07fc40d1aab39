"""Which modules become leaf modules of ZeRO, and how they are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.utils import get_z3_leaf_modules, set_z3_leaf_modules, unset_z3_leaf_modules
from torch import Tensor, nn

from deepspeed_muon.engine.workarounds.experts import mark_moe_layers, prepare_inputs


class Layer(nn.Module):
    """An MoE layer that remembers whether its input requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.seen: list[bool] = []

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        self.seen.append(hidden.requires_grad)
        output: Tensor = self.experts[0](hidden)
        return output


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(4, 4)


def test_layers_with_experts_are_marked() -> None:
    model = Model()
    model.layers[1].requires_grad_(False)
    assert mark_moe_layers(model) == ["layers.0", "layers.1"], "frozen experts are gathered too"
    assert get_z3_leaf_modules(model) == list(model.layers)
    assert mark_moe_layers(model) == ["layers.0", "layers.1"]


def test_marks_of_the_user_stay() -> None:
    model = Model()
    unset_z3_leaf_modules(model, [Layer])
    assert mark_moe_layers(model) == []
    model = Model()
    set_z3_leaf_modules(model, [Model])
    assert mark_moe_layers(model) == [""], "the layers lie inside of a leaf module"


def test_experts_of_some_ranks_are_left_out() -> None:
    """Those of ``deepspeed.moe`` and AutoEP."""
    model = Model()
    for param in model.layers[0].experts.parameters():
        param.allreduce = False  # type: ignore[attr-defined]
    assert mark_moe_layers(model) == ["layers.1"]


def test_a_model_is_no_layer() -> None:
    """As a leaf module it would be gathered whole, and its inputs have no gradient."""
    assert mark_moe_layers(Layer()) == []


def test_a_container_is_a_leaf_below_stage_3_only() -> None:
    """Stage 3 reduced no gradient of its parameters, because nobody calls it."""
    model = nn.Sequential(
        nn.ModuleDict({"gate": nn.Linear(4, 2), "experts": nn.ModuleList([nn.Linear(4, 4)])})
    )
    assert mark_moe_layers(model, called_only=True) == []
    assert mark_moe_layers(model) == ["0"]


@pytest.mark.parametrize("call", ["position", "keyword"])
def test_inputs_get_a_gradient(call: str) -> None:
    """DeepSpeed's hooks see positional inputs only."""
    model = Model()
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    mark_moe_layers(model)
    prepare_inputs(model)
    seen: list[Any] = []
    layer.register_forward_pre_hook(lambda module, args: seen.append(args))
    x = torch.ones(3, 4)
    if call == "position":
        layer(x)
    else:
        layer(hidden=x)
    with torch.no_grad():
        layer(x)
    inner = x.requires_grad_() * 2
    layer(inner)
    assert layer.seen == [True, False, True]
    assert [len(args) for args in seen] == [1, 1, 1]
    assert seen[2][0] is inner
