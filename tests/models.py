"""Small models whose shapes are chosen to be awkward, and their data."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 29


class Linear(nn.Module):
    """A linear layer that multiplies in float64, whatever its weight is.

    So the gradients that the fp32 and the float64 runs hand to their optimizers differ by one rounding only, and a
    tolerance of 1e-5 measures the optimizer instead of the model's own round-off.
    """

    def __init__(self, inputs: int, outputs: int, *, exact: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.exact = exact
        nn.init.normal_(self.weight, std=inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.exact:
            return F.linear(x.double(), self.weight.double())
        return F.linear(x.to(self.weight.dtype), self.weight)


class Block(nn.Module):
    """Two matrices around a non-linearity, with a residual path and a gain vector."""

    def __init__(self, width: int, hidden: int, exact: bool) -> None:
        super().__init__()
        self.up = Linear(width, hidden, exact=exact)
        self.down = Linear(hidden, width, exact=exact)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.gain


class Toy(nn.Module):
    """Embedding, blocks of the given hidden sizes, a scalar bottleneck (1 x n and n x 1), output head."""

    def __init__(
        self, width: int = 16, hidden: tuple[int, ...] = (16, 48, 5), exact: bool = True, thin: bool = True
    ) -> None:
        super().__init__()
        self.exact = exact
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, size, exact) for size in hidden)
        self.thin = Block(width, 1, exact) if thin else None
        self.lm_head = Linear(width, VOCAB, exact=exact)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.exact:
            x = x.double()
        for block in self.blocks:
            x = block(x)
        if self.thin is not None:
            x = self.thin(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1).double(), targets.flatten())


class Unused(Toy):
    """A model with a matrix and a vector that take no part in the loss at first."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.idle = Linear(16, 24, exact=self.exact)
        self.idle_gain = nn.Parameter(torch.ones(7))
        self.use_idle = False

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = super().forward(tokens, targets)
        if self.use_idle:
            x = self.embed(tokens)
            loss = (
                loss
                + self.idle(x.double() if self.exact else x).square().mean()
                + self.idle_gain.square().sum()
            )
        return loss


class Wide(Toy):
    """One matrix larger than all the rest together, between prime sizes."""

    def __init__(self, **_: object) -> None:
        super().__init__(width=13, hidden=(211, 7), thin=False)


class Single(Toy):
    """A single small matrix: fewer matrices than ranks."""

    def __init__(self, **_: object) -> None:
        super().__init__(width=6, hidden=(), thin=False)
        self.mix = Linear(6, 6)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens).double()
        return F.cross_entropy(self.lm_head(x + torch.tanh(self.mix(x))).flatten(0, 1), targets.flatten())


class Attention(nn.Module):
    """Grouped-query projections of 4 query and 2 key heads of width 4, mixed without a softmax."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = Linear(width, 16)
        self.k_proj = Linear(width, 8)
        self.o_proj = Linear(16, width)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.k_proj(x)
        return x + self.o_proj(torch.tanh(self.q_proj(x)) * torch.cat((keys, keys), dim=-1))


class Heads(Toy):
    """A model with a Hugging Face style configuration, for per-head orthogonalisation."""

    def __init__(self, **_: object) -> None:
        super().__init__(width=16, hidden=(24,), thin=False)
        self.config = SimpleNamespace(
            num_attention_heads=4, num_key_value_heads=2, hidden_size=16, head_dim=4
        )
        self.self_attn = Attention(16)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.self_attn(self.embed(tokens).double())
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


class Mixed(Toy):
    """A convolution (kernel flattened), a grouped one, and a stack of three experts, besides the usual matrices."""

    def __init__(self, **_: object) -> None:
        super().__init__(width=12, hidden=(20,), thin=False)
        self.conv = nn.Conv1d(12, 12, 3, padding=1)
        self.grouped = nn.Conv1d(12, 12, 3, padding=1, groups=4)
        self.experts = nn.Module()
        self.experts.up_proj = nn.Parameter(torch.randn(3, 10, 12) / 12**0.5)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens).double()
        for block in self.blocks:
            x = block(x)
        for conv in (self.conv, self.grouped):
            weight, bias = conv.weight.double(), conv.bias.double()
            x = x + torch.tanh(F.conv1d(x.mT, weight, bias, padding=1, groups=conv.groups)).mT
        up = self.experts.up_proj.double()
        x = x + torch.einsum(
            "blh,ehi,e->bli", torch.tanh(torch.einsum("bli,hi->blh", x, up[0])), up, x.new_ones(3)
        )
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


MODELS: dict[str, type[Toy]] = {
    "toy": Toy,
    "unused": Unused,
    "wide": Wide,
    "single": Single,
    "heads": Heads,
    "mixed": Mixed,
}

MATRICES: dict[str, set[str]] = {
    "toy": {f"blocks.{i}.{part}.weight" for i in range(3) for part in ("up", "down")}
    | {"thin.up.weight", "thin.down.weight"},
    "wide": {f"blocks.{i}.{part}.weight" for i in range(2) for part in ("up", "down")},
    "single": {"mix.weight"},
    "mixed": {"blocks.0.up.weight", "blocks.0.down.weight", "conv.weight", "experts.up_proj"},
    "heads": {f"blocks.0.{part}.weight" for part in ("up", "down")}
    | {f"self_attn.{p}_proj.weight" for p in "qko"},
}
MATRICES["unused"] = MATRICES["toy"] | {"idle.weight"}


def build(kind: str, *, seed: int = 0, **kwargs: object) -> Toy:
    """Make a model with the weights that ``seed`` determines."""
    torch.manual_seed(seed)
    return MODELS[kind](**kwargs)  # type: ignore[arg-type]


def batch(step: int, micro: int, rows: int = 4, length: int = 12) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of one micro-batch: number ``micro`` of all ranks together in ``step``."""
    generator = torch.Generator().manual_seed(10_000 * step + micro)
    tokens = torch.randint(VOCAB, (rows, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
