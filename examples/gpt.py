"""A small GPT with the parts of today's models: RMSNorm, rotary positions, SwiGLU, an untied head.

Every module initialises its own weights in its constructor. That is what ``deepspeed.zero.Init`` needs: it
partitions a module's parameters as soon as the constructor returns, so a later ``model.apply(init)`` would
see empty tensors.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model.

    Raises:
        ValueError: ``dim`` does not divide into ``heads`` heads of an even width (rotary turns channel
        pairs).
    """

    vocab_size: int = 256
    dim: int = 256
    layers: int = 6
    heads: int = 4
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim={self.dim} must be a multiple of 2 * heads = {2 * self.heads}")

    @property
    def hidden(self) -> int:
        """Width of the SwiGLU layer: about 8/3 of ``dim``, which costs as much as a plain MLP of 4 * dim."""
        return max(8, 8 * self.dim // 3 // 8 * 8)


class Linear(nn.Linear):
    """A linear layer without bias; its weights are normal with deviation ``gain / sqrt(in_features)``."""

    def __init__(self, in_features: int, out_features: int, *, gain: float = 1.0) -> None:
        self.gain = gain
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.gain * self.in_features**-0.5)


class Embedding(nn.Embedding):
    """Token embeddings, normal with standard deviation 0.02."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation; the statistics are taken in fp32 whatever the model's dtype."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


def rotary(length: int, width: int, base: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary angles, two fp32 tensors of shape ``[length, width // 2]``."""
    rates = base ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * rates
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the channel pairs ``(i, i + width / 2)`` of ``x``, ``[batch, heads, length, width]``."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj = Linear(config.dim, config.dim)
        self.k_proj = Linear(config.dim, config.dim)
        self.v_proj = Linear(config.dim, config.dim)
        self.o_proj = Linear(config.dim, config.dim, gain=(2 * config.layers) ** -0.5)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        split = (batch, length, self.heads, dim // self.heads)
        q, k, v = (proj(x).view(split).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, dim))


class SwiGLU(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.dim, config.hidden)
        self.up_proj = Linear(config.dim, config.hidden)
        self.down_proj = Linear(config.hidden, config.dim, gain=(2 * config.layers) ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.dim)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config.dim)
        self.mlp = SwiGLU(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """The language model; ``forward`` returns the mean cross-entropy in nats, as a training loop wants it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.lm_head = Linear(config.dim, config.vocab_size, gain=0.1)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss of predicting ``targets`` from ``tokens``; both int64 of shape ``[batch, length]``."""
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Fp32 logits of the next token at every position, ``[batch, length, vocab_size]``."""
        # The tables are made here and not kept as buffers: DeepSpeed casts a model's buffers to bf16 or fp16
        # along with its weights, which would blur the angles of far positions.
        width = self.config.dim // self.config.heads
        cos, sin = rotary(tokens.shape[1], width, self.config.rope_base, tokens.device)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x)).float()
