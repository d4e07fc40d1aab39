"""A model with one of DeepSpeed's mixture-of-experts layers, and the same model without DeepSpeed for the reference."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models import VOCAB, Linear

WIDTH, HIDDEN, EXPERTS = 12, 18, 4
GATE = "moe.deepspeed_moe.gate.wg.weight"
EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts"
MOE_MATRICES = {"mix.weight"} | {
    f"{EXPERT}.{number}.{suffix}.weight" for number in range(EXPERTS) for suffix in ("up", "down")
}
AUXILIARY = 0.1


class Expert(nn.Module):
    """Two matrices and a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.up = Linear(WIDTH, HIDDEN)
        self.down = Linear(HIDDEN, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.gain


class PlainMoE(nn.Module):
    """Every token goes to its most probable expert, weighted by the probability; named as DeepSpeed's layer is."""

    def __init__(self) -> None:
        super().__init__()
        inner = self.deepspeed_moe = nn.Module()
        inner.gate = nn.Module()
        inner.gate.wg = nn.Linear(WIDTH, EXPERTS, bias=False)
        inner.experts = nn.Module()
        inner.experts.deepspeed_experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        tokens = x.flatten(0, 1)
        probabilities = torch.softmax(tokens @ self.deepspeed_moe.gate.wg.weight.mT, dim=1)
        weight, chosen = probabilities.max(dim=1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.deepspeed_moe.experts.deepspeed_experts):
            assigned = chosen == number
            out[assigned] = expert(tokens[assigned]) * weight[assigned, None]
        share = F.one_hot(chosen, EXPERTS).to(x.dtype).mean(0)
        auxiliary = EXPERTS * (probabilities.mean(0) * share).sum()
        return out.view_as(x), auxiliary, None


class MoEToy(nn.Module):
    """Embedding, a matrix, a mixture of experts, output head."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = Linear(WIDTH, WIDTH)
        self.moe = moe
        self.lm_head = Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens).double()
        x = x + torch.tanh(self.mix(x))
        routed, auxiliary, _ = self.moe(x)
        logits = self.lm_head(x + routed)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + AUXILIARY * auxiliary


def build_plain() -> MoEToy:
    """Make the reference's model."""
    torch.manual_seed(0)
    return MoEToy(PlainMoE())


def build_deepspeed(ep_size: int, ep_rank: int) -> MoEToy:
    """Make the model of one rank, with its share of the same experts.

    Args:
        ep_size: Ranks that the experts are divided over.
        ep_rank: Which share.
    """
    from deepspeed.moe.layer import MoE

    model = MoEToy(
        MoE(WIDTH, Expert(), num_experts=EXPERTS, ep_size=ep_size, k=1, drop_tokens=False, use_rts=False)
    )
    source = build_plain().state_dict()
    local = EXPERTS // ep_size
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(source[global_name(name, ep_rank * local)])
    return model


def global_name(name: str, first: int) -> str:
    """Return the name that a parameter of a rank whose first expert is number ``first`` has in the whole model."""
    if not name.startswith(EXPERT):
        return name
    number, rest = name[len(EXPERT) + 1 :].split(".", 1)
    return f"{EXPERT}.{int(number) + first}.{rest}"
