"""A model with stacked experts, as Hugging Face's Mixtral has them, and what DeepSpeed's AutoEP makes of it.

AutoEP replaces each mixture-of-experts layer by its own, in which a rank holds some experts of three stacks: ``w1``
(the gate), ``w3`` (up) and ``w2`` (down). The reference trains the same experts under the same names, all of them in
one stack.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models import VOCAB, Linear

WIDTH, HIDDEN, EXPERTS, LAYERS, TOP_K = 12, 18, 4, 2, 2
STACKS = {
    f"model.layers.{layer}.mlp.experts.{suffix}" for layer in range(LAYERS) for suffix in ("w1", "w2", "w3")
}
AUTOEP_MATRICES = STACKS | {
    f"model.layers.{layer}.{suffix}.weight" for layer in range(LAYERS) for suffix in ("up", "down")
}
GATES = {f"model.layers.{layer}.mlp.router.gate.weight" for layer in range(LAYERS)}
# Biases of the last expert's gate: some tokens choose it, few do, none does. The few choose it with a probability that
# AutoEP's fp32 softmax holds well: at -8 its rounding alone came to 2.2e-5 of an update on one processor.
BIAS = {"busy": 0.0, "rare": -6.0, "idle": -1e3}


def autoep_config(size: int, **settings: Any) -> dict[str, Any]:
    """Return the section ``expert_parallel`` of the configuration."""
    return {
        "enabled": True,
        "autoep_size": size,
        "preset_model": "mixtral",
        "top_k": TOP_K,
        "use_grouped_mm": False,
        **settings,
    }


class StackedExperts(nn.Module):
    """The experts as the source of the replacement has them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * HIDDEN, WIDTH))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))


class SourceMoE(nn.Module):
    """What AutoEP finds and replaces; it never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = StackedExperts()


class PlainMoE(nn.Module):
    """What AutoEP's layer computes, in the dtype of its input: every token goes to its most probable experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Module()
        self.router.gate = nn.Linear(WIDTH, EXPERTS)
        inner = self.experts = nn.Module()
        inner.w1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)
        inner.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5)
        inner.w3 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        gate = self.router.gate
        scores = torch.softmax(F.linear(tokens, gate.weight.double(), gate.bias.double()), dim=1)
        weights, chosen = scores.topk(TOP_K, dim=1)
        weights = weights / weights.sum(dim=1, keepdim=True)
        out = torch.zeros_like(tokens)
        stacks = zip(
            self.experts.w1.double(), self.experts.w2.double(), self.experts.w3.double(), strict=True
        )
        for number, (w1, w2, w3) in enumerate(stacks):
            y = (F.silu(tokens @ w1.mT) * (tokens @ w3.mT)) @ w2.mT
            out = out + y * (weights * (chosen == number)).sum(dim=1, keepdim=True)
        return out.view_as(x)


class Layer(nn.Module):
    """Two matrices, then a mixture of experts."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.up = Linear(WIDTH, 2 * WIDTH)
        self.down = Linear(2 * WIDTH, WIDTH)
        self.mlp = kind()

    def forward(self, x: Tensor) -> Tensor:
        # AutoTP's layers compute in the dtype of their weights, the others in float64.
        y = x if isinstance(self.up, Linear) else x.to(self.up.weight.dtype)
        x = x + self.down(torch.tanh(self.up(y)))
        return x + self.mlp(x)


class MixtralToy(nn.Module):
    """Embedding, layers, output head."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.model.layers = nn.ModuleList(Layer(kind) for _ in range(LAYERS))
        self.lm_head = Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens).double()
        for layer in self.model.layers:
            x = layer(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


def build_plain(last: str = "busy") -> MixtralToy:
    """Make the reference's model.

    Args:
        last: How many tokens choose the last expert of a layer: a key of :data:`BIAS`.
    """
    torch.manual_seed(0)
    model = MixtralToy(PlainMoE)
    for layer in model.model.layers:
        nn.init.normal_(layer.mlp.router.gate.weight)
        nn.init.zeros_(layer.mlp.router.gate.bias)
        layer.mlp.router.gate.bias.data[-1] = BIAS[last]
    return model


def source_state(last: str = "busy") -> dict[str, Tensor]:
    """Return the weights of the reference under the names and in the shapes of :func:`build_source`."""
    plain = build_plain(last).state_dict()
    state = {}
    for name, value in plain.items():
        if name.endswith("w1"):
            both = torch.cat([value, plain[name[:-1] + "3"]], dim=1)
            state[name.replace("w1", "gate_up_proj")] = both
        elif not name.endswith("w3"):
            state[name.replace("w2", "down_proj").replace("router.gate", "gate")] = value
    return state


def build_source(last: str = "busy", *, loaded: bool = True) -> MixtralToy:
    """Make the model that is handed to DeepSpeed, with the weights of :func:`build_plain` unless they come later."""
    model = MixtralToy(SourceMoE)
    if loaded:
        model.load_state_dict(source_state(last))
    return model


def compute_exactly(model: nn.Module) -> None:
    """Let the gates that AutoEP made multiply in float64, as all other layers of these models do."""
    for module in model.modules():
        gate = getattr(getattr(module, "router", None), "gate", None)
        if isinstance(gate, nn.Linear):
            gate.__class__ = ExactGate


class ExactGate(nn.Linear):
    """A linear layer with a bias that multiplies in float64, whatever its weight is."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.double(), self.weight.double(), self.bias.double())
