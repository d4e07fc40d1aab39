"""Small models whose shapes are chosen to be awkward, and their data."""

from __future__ import annotations

from collections.abc import Container
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 29

# What the small decoders of transformers have in common.
SMALL_DECODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",
}


class Linear(nn.Module):
    """A linear layer that multiplies in float64, whatever its weight is.

    So the gradients of the fp32 and of the float64 run differ by one rounding only, and a tolerance of 1e-5 measures
    the optimizer instead of the rounding of the model.
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
    """Embedding, blocks of the given hidden sizes, a narrow bottleneck (2 x n and n x 2), output head."""

    def __init__(
        self, width: int = 16, hidden: tuple[int, ...] = (16, 48, 5), exact: bool = True, thin: bool = True
    ) -> None:
        super().__init__()
        self.exact = exact
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, size, exact) for size in hidden)
        self.thin = Block(width, 2, exact) if thin else None
        self.lm_head = Linear(width, VOCAB, exact=exact)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.before_blocks(x.double() if self.exact else x)
        for block in self.blocks:
            x = block(x)
        x = self.after_blocks(x)
        return F.cross_entropy(self.logits(x).flatten(0, 1).double(), targets.flatten())

    def before_blocks(self, x: Tensor) -> Tensor:
        return x

    def after_blocks(self, x: Tensor) -> Tensor:
        return x if self.thin is None else self.thin(x)

    def logits(self, x: Tensor) -> Tensor:
        return self.lm_head(x)


class Unused(Toy):
    """A model with a matrix and a vector that are not used in the loss at first."""

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

    def before_blocks(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(x))


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

    def before_blocks(self, x: Tensor) -> Tensor:
        return self.self_attn(x)


class Mixed(Toy):
    """A convolution (kernel flattened), a grouped one, and a stack of three experts, besides the usual matrices."""

    def __init__(self, **_: object) -> None:
        super().__init__(width=12, hidden=(20,), thin=False)
        self.conv = nn.Conv1d(12, 12, 3, padding=1)
        self.grouped = nn.Conv1d(12, 12, 3, padding=1, groups=4)
        self.experts = nn.Module()
        self.experts.up_proj = nn.Parameter(torch.randn(3, 10, 12) / 12**0.5)

    def after_blocks(self, x: Tensor) -> Tensor:
        for conv in (self.conv, self.grouped):
            weight, bias = conv.weight.double(), conv.bias.double()
            x = x + torch.tanh(F.conv1d(x.mT, weight, bias, padding=1, groups=conv.groups)).mT
        up = self.experts.up_proj.double()
        return x + torch.einsum(
            "blh,ehi,e->bli", torch.tanh(torch.einsum("bli,hi->blh", x, up[0])), up, x.new_ones(3)
        )


class Adapted(nn.Module):
    """A frozen linear layer with a trainable low-rank update beside it (LoRA)."""

    def __init__(self, base: Linear, rank: int = 2) -> None:
        super().__init__()
        # Under zero.Init the weight is divided over the ranks already.
        rows, cols = getattr(base.weight, "ds_shape", base.weight.shape)
        self.base = base.requires_grad_(False)
        self.lora_a = Linear(cols, rank)
        self.lora_b = Linear(rank, rows)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


class Adapters(Toy):
    """A frozen model that trains low-rank adapters on its blocks, the gains and the head."""

    def __init__(self, **_: object) -> None:
        super().__init__(hidden=(16, 48), thin=False)
        self.embed.requires_grad_(False)
        for block in self.blocks:
            block.up, block.down = Adapted(block.up), Adapted(block.down)


class Tied(Toy):
    """A model whose output head is its embedding."""

    def __init__(self, **_: object) -> None:
        super().__init__(thin=False)
        del self.lm_head

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embed.weight.double())


class Conv1D(nn.Module):
    """A linear layer stored as input x output, recognised by its name and ``nf`` as Hugging Face's is."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.double()


class FusedExperts(nn.Module):
    """Three experts, all of which are used, stored as (expert, in, out) or (expert, out, in)."""

    def __init__(self, width: int, hidden: int, *, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        shapes = [(3, 2 * hidden, width), (3, width, hidden)]
        if is_transposed:
            shapes = [(e, c, r) for e, r, c in shapes]
        self.gate_up_proj = nn.Parameter(torch.randn(shapes[0]) / width**0.5)
        self.down_proj = nn.Parameter(torch.randn(shapes[1]) / hidden**0.5)
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(3, 2 * hidden))

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.gate_up_proj.double(), self.down_proj.double()
        if not self.is_transposed:
            up, down = up.mT, down.mT
        both = torch.einsum("bli,eio->eblo", x, up) + self.gate_up_proj_bias.double()[:, None, None]
        gate, value = both.chunk(2, dim=-1)
        return torch.einsum("eblo,eoi->bli", torch.tanh(gate) * torch.tanh(value), down)


class FusedAttention(nn.Module):
    """Fused grouped-query projections (4 query and 2 key-value heads of width 4), and a fusion of three equal ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv_proj = Linear(width, 32)
        self.o_proj = Linear(16, width)
        self.c_attn = Conv1D(48, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).split((16, 8, 8), dim=-1)
        x = x + self.o_proj(torch.tanh(q) * torch.cat((k, k), dim=-1) + torch.cat((v, v), dim=-1))
        q, k, v = self.c_attn(x).chunk(3, dim=-1)
        return x + torch.tanh(q) * torch.tanh(k) * torch.tanh(v)


class Fused(Toy):
    """Fused projections of every kind: by rows, by columns, experts as output x input and as input x output."""

    def __init__(self, **_: object) -> None:
        super().__init__(width=16, hidden=(24,), thin=False)
        self.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=4)
        self.self_attn = FusedAttention(16)
        self.experts = FusedExperts(16, 6, is_transposed=False)
        self.turned = FusedExperts(16, 10, is_transposed=True)

    def before_blocks(self, x: Tensor) -> Tensor:
        x = self.self_attn(x)
        # Small branches: with large ones the gradient follows the rounding of the weights instead of the optimizer.
        return x + 0.3 * (self.experts(x) + self.turned(x))


class Convolutions(Toy):
    """Filters of one, two and three dimensions, and those that are no single matrix: grouped and transposed."""

    def __init__(self, **_: object) -> None:
        super().__init__(width=12, hidden=(), thin=False)
        self.plain = nn.ModuleList((nn.Conv1d(12, 12, 3), nn.Conv2d(6, 5, 3), nn.Conv3d(6, 7, (1, 2, 3))))
        self.no_matrix = nn.ModuleList((nn.Conv1d(12, 12, 3, groups=12), nn.ConvTranspose1d(12, 12, 3)))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens).double()
        total = x.new_zeros(())
        for layer in (*self.plain, *self.no_matrix):
            name = type(layer).__name__
            run = getattr(F, f"conv_transpose{name[-2]}d" if "Transpose" in name else f"conv{name[-2]}d")
            weight, bias = layer.weight.double(), layer.bias.double()
            groups = {"groups": layer.groups}
            if weight.ndim == 3:
                x = x + torch.tanh(run(x.mT, weight, bias, padding=1, **groups)).mT
            else:
                image = x.reshape(x.shape[0], weight.shape[1], *((4, -1) if weight.ndim == 4 else (1, 2, -1)))
                total = total + torch.tanh(run(image, weight, bias)).square().mean()
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten()) + total


class Even(Toy):
    """Sizes that divide evenly by the tensor-parallel ranks, wide and tall, and a matrix that is replicated."""

    def __init__(self, exact: bool = True) -> None:
        super().__init__(width=16, hidden=(16, 48, 8), exact=exact, thin=False)
        self.mix = Linear(16, 16, exact=exact)

    def before_blocks(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(x))


class Branch(nn.Module):
    """A matrix and a gain; the gain starts small, where fp32 rounds little."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = Linear(width, hidden)
        self.gain = nn.Parameter(torch.full((hidden,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.up(x)) * self.gain).sum(-1, keepdim=True)


class Branches(nn.Module):
    """Adds the branches that the caller names to the residual path, as a mixture of experts adds those it chooses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = Branch(width, 24)
        self.b = Branch(width, 9)
        self.touch = ""
        """How unused branches get a gradient: not at all, from a run on ``nothing``, or from a run ``times 0``."""

    def forward(self, x: Tensor, used: str) -> Tensor:
        total = x
        for name in "ab":
            branch = self.get_submodule(name)
            if name in used:
                total = total + branch(x)
            elif self.touch == "nothing":
                total = total + branch(x[:0]).sum()
            elif self.touch == "times 0":
                total = total + 0 * branch(x)
        return total


class Switched(Toy):
    """A model with two branches, of which a forward pass uses those that ``used`` names."""

    def __init__(self, **_: object) -> None:
        super().__init__(hidden=(16, 5), thin=False)
        self.branches = Branches(16)
        self.used = ""

    def after_blocks(self, x: Tensor) -> Tensor:
        return self.branches(x, self.used)


_KINDS = (Toy, Unused, Wide, Single, Heads, Mixed, Adapters, Tied, Fused, Convolutions, Even, Switched)
MODELS: dict[str, type[Toy]] = {kind.__name__.lower(): kind for kind in _KINDS}


def _block_matrices(count: int, *more: str) -> set[str]:
    return {f"blocks.{i}.{layer}.weight" for i in range(count) for layer in ("up", "down")} | set(more)


MATRICES: dict[str, set[str]] = {
    "toy": _block_matrices(3, "thin.up.weight", "thin.down.weight"),
    "unused": _block_matrices(3, "thin.up.weight", "thin.down.weight", "idle.weight"),
    "wide": _block_matrices(2),
    "single": {"mix.weight"},
    "heads": _block_matrices(1, *(f"self_attn.{letter}_proj.weight" for letter in "qko")),
    "mixed": _block_matrices(1, "conv.weight", "experts.up_proj"),
    "adapters": {f"blocks.{i}.{layer}.lora_b.weight" for i in range(2) for layer in ("up", "down")},
    "tied": _block_matrices(3),
    "fused": _block_matrices(1, *(f"self_attn.{layer}.weight" for layer in ("qkv_proj", "o_proj", "c_attn")))
    | {f"{stack}.{layer}" for stack in ("experts", "turned") for layer in ("gate_up_proj", "down_proj")},
    "convolutions": {f"plain.{number}.weight" for number in range(3)},
    "even": _block_matrices(3, "mix.weight"),
    "switched": _block_matrices(2, "branches.a.up.weight", "branches.b.up.weight"),
}
"""The parameters of each model that Muon updates."""


# The blocks of "fused" under FUSED_PARAMS: heights, widths, and whether the weight is stored as input x output.
GRIDS: dict[str, dict[str, tuple[list[int], list[int], bool]]] = {
    "fused": {
        "self_attn.qkv_proj.weight": ([4] * 8, [16], False),
        "self_attn.c_attn.weight": ([16], [16, 16, 16], True),
        "experts.gate_up_proj": ([6] * 6, [16], False),
        "experts.down_proj": ([16] * 3, [6], False),
        "turned.gate_up_proj": ([16] * 3, [10, 10], True),
        "turned.down_proj": ([10] * 3, [16], True),
    },
}
# Under tensor parallelism on two or four ranks: heads that are on one of them, and projections that all of them share.
GRIDS["fused-over-ranks"] = {
    **GRIDS["fused"],
    "self_attn.qkv_proj.weight": ([4, 4, 4, 4, 8, 8], [16], False),
    "self_attn.c_attn.weight": ([16], [4] * 12, True),
    "self_attn.o_proj.weight": ([12, 4], [16], False),
}
# Two halves each, as of gate and up.
GRIDS["even-halves"] = {
    f"blocks.{i}.up.weight": ([size // 2] * 2, [16], False) for i, size in enumerate((16, 48, 8))
}
FUSED_SPLITS: dict[str, dict[str, object]] = {
    "*.qkv_proj.weight": {"split": "qkv"},
    "*.c_attn.weight": {"split": [16, 16, 16]},
    "*.gate_up_proj": {"split": "gate_up"},
}
FUSED_PARAMS: dict[str, object] = {"matrices": {**FUSED_SPLITS, "*": {"heads": "config"}}}


def build(kind: str, *, seed: int = 0, **kwargs: object) -> Toy:
    """Make a model with the weights that ``seed`` determines."""
    torch.manual_seed(seed)
    return MODELS[kind](**kwargs)  # type: ignore[arg-type]


def with_plain_linears(model: nn.Module, names: Container[str] | None = None) -> Any:
    """Replace the linear layers of a model, or those called ``names``, by ``nn.Linear``, which AutoTP can cut."""
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, Linear) and (names is None or name in names):
                linear = nn.Linear(*reversed(layer.weight.shape), bias=False)
                linear.weight = layer.weight
                setattr(module, name, linear)
    return model


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    """Take steps from number ``first`` on in this process, without DeepSpeed."""
    for step in range(first, first + steps):
        model.zero_grad()
        model(*batch(step, 0)).backward()
        optimizer.step()


def batch(step: int, micro: int, rows: int = 4, length: int = 12) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of one micro-batch: number ``micro`` of all ranks together in ``step``."""
    generator = torch.Generator().manual_seed(10_000 * step + micro)
    tokens = torch.randint(VOCAB, (rows, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
