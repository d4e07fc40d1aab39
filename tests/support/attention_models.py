"""Small models with real softmax attention whose logits are large, in the layouts that QK-clip knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_muon import QkRecorder
from tests.support.models import MATRICES, MODELS, Linear, Toy

HEADS, KEY_HEADS, WIDTH = 4, 2, 4
NOPE, ROPE, VALUE = 4, 2, 3
# Queries and keys start so large that most heads are above it.
THRESHOLD = 2.0
SCALE = 0.5


class BiasedLinear(Linear):
    """A linear layer with a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.bias = nn.Parameter(torch.linspace(-1, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias.double()


class Attending(nn.Module):
    """What the layouts share; ``seen`` collects queries and keys while ``keep`` is set."""

    recorder: QkRecorder

    def __init__(self) -> None:
        super().__init__()
        self.keep = False
        self.seen: list[tuple[Tensor, Tensor]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend causally; ``(batch, heads, positions, width)`` each."""
        if self.keep:
            self.seen.append((q.detach(), k.detach()))
        if self.training:
            self.recorder.record(q, k, scale=SCALE)
        group = q.shape[1] // k.shape[1]
        out = F.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True, scale=SCALE
        )
        return out.transpose(1, 2).flatten(2)


def heads_of(x: Tensor, heads: int) -> Tensor:
    """Divide the last dimension into heads."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Grouped(Attending):
    """Separate projections, two query heads for each key head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = Linear(width, HEADS * WIDTH)
        self.k_proj = Linear(width, KEY_HEADS * WIDTH)
        self.v_proj = Linear(width, KEY_HEADS * WIDTH)
        self.o_proj = Linear(HEADS * WIDTH, width)
        self.recorder = QkRecorder.separate(heads=HEADS, key_heads=KEY_HEADS, head_dim=WIDTH)
        enlarge(self.q_proj, self.k_proj)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads_of(self.q_proj(x), HEADS), self.k_proj(x), self.v_proj(x)
        return x + self.o_proj(self.attend(q, heads_of(k, KEY_HEADS), heads_of(v, KEY_HEADS)))


class Fused(Attending):
    """One projection with a bias for queries, keys and values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = BiasedLinear(width, (HEADS + 2 * KEY_HEADS) * WIDTH)
        self.o_proj = Linear(HEADS * WIDTH, width)
        self.recorder = QkRecorder.fused("qkv", heads=HEADS, key_heads=KEY_HEADS, head_dim=WIDTH)
        enlarge(self.qkv)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split((HEADS * WIDTH, KEY_HEADS * WIDTH, KEY_HEADS * WIDTH), dim=-1)
        return x + self.o_proj(
            self.attend(heads_of(q, HEADS), heads_of(k, KEY_HEADS), heads_of(v, KEY_HEADS))
        )


class Latent(Attending):
    """Multi-head latent attention with one shared positional key, without the rotation itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_b_proj = Linear(width, HEADS * (NOPE + ROPE))
        self.kv_a_proj = Linear(width, 6 + ROPE)
        self.kv_b_proj = Linear(6, HEADS * (NOPE + VALUE))
        self.o_proj = Linear(HEADS * VALUE, width)
        self.recorder = QkRecorder.latent(heads=HEADS, nope_dim=NOPE, rope_dim=ROPE, value_dim=VALUE)
        enlarge(self.q_b_proj, self.kv_a_proj)

    def forward(self, x: Tensor) -> Tensor:
        q = heads_of(self.q_b_proj(x), HEADS)
        latent, shared = self.kv_a_proj(x).split((6, ROPE), dim=-1)
        nope, v = heads_of(self.kv_b_proj(latent), HEADS).split((NOPE, VALUE), dim=-1)
        k = torch.cat((nope, heads_of(shared, 1).expand(-1, HEADS, -1, -1)), dim=-1)
        return x + self.o_proj(
            self.attend(q, k, F.pad(v, (0, NOPE + ROPE - VALUE)))[..., self.value_columns()]
        )

    def value_columns(self) -> Tensor:
        """Return the places of the values, which were padded to the width of the queries."""
        return torch.arange(HEADS * (NOPE + ROPE)).unflatten(0, (HEADS, -1))[:, :VALUE].flatten()


def enlarge(*layers: nn.Module) -> None:
    """Multiply weights, and so the logits."""
    for layer in layers:
        with torch.no_grad():
            layer.weight.mul_(3.0)


LAYOUTS: dict[str, type[Attending]] = {"grouped": Grouped, "fused_attention": Fused, "latent": Latent}


class AttendingToy(Toy):
    """Embedding, attention, one block, output head."""

    layout = "grouped"

    def __init__(self, **_: Any) -> None:
        super().__init__(width=16, hidden=(24,), thin=False)
        self.attn: Any = LAYOUTS[self.layout](16)

    def before_blocks(self, x: Tensor) -> Tensor:
        return self.attn(x)


for name, layout in LAYOUTS.items():
    MODELS[name] = type(f"{layout.__name__}Toy", (AttendingToy,), {"layout": name})
    MATRICES[name] = {f"blocks.0.{layer}.weight" for layer in ("up", "down")} | {
        f"attn.{layer}.weight" for layer, _ in layout(16).named_children()
    }
