"""QK-clip (MuonClip; Kimi K2, arXiv 2507.20534): what keeps attention logits below a threshold.

For each head ``h`` with the largest scaled logit before the softmax, ``S_h``, over the global batch::

    eta_h = min(1, threshold / S_h)
    queries of head h          W <- eta_h^alpha       * W
    keys of a key head         W <- eta_g^(1 - alpha) * W      eta_g: smallest eta of the query heads that it serves
    MLA: rotated queries       W <- eta_h             * W      (the rotated key is shared by all heads and stays)

So the logits of a head become at most ``eta_h`` times what they were. The float64 counterpart is in
:mod:`tests.support.reference_math`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

HeadRole = Literal["query", "key", "rotated_query"]

# How many logits are computed at once: 64 MiB in float32.
_BLOCK_NUMEL = 1 << 24


def clip_factor(largest: float, *, role: HeadRole, threshold: float, alpha: float) -> float:
    """Return what the rows of one head are multiplied by.

    Args:
        largest: Largest logit of the head, or of all query heads that a key head serves. One that is not finite says
            nothing and gives 1.
        role: What the rows make.
        threshold: Logits above it are clipped; positive.
        alpha: Share of the queries, in [0, 1].
    """
    if not math.isfinite(largest) or largest <= threshold:
        return 1.0
    exponent = {"query": alpha, "key": 1.0 - alpha, "rotated_query": 1.0}[role]
    return float((threshold / largest) ** exponent)


@torch.no_grad()
def max_logits(
    query: Tensor, key: Tensor, *, scale: float, causal: bool = True, mask: Tensor | None = None
) -> Tensor:
    """Return the largest scaled logit of every query head over batch and positions.

    The logits are computed in blocks of bounded size and in the inputs' dtype (bf16 rounds a logit by 2^-9 of itself).
    With ``causal``, blocks leave out keys that none of their queries sees.

    Args:
        query: ``(batch, heads, queries, width)``.
        key: ``(batch, key heads, keys, width)``; ``heads`` is a multiple of ``key heads``.
        scale: Factor of the products; positive.
        causal: Whether query ``i`` sees only keys up to ``i``.
        mask: Broadcasts to ``(batch, heads, queries, keys)``: true where a query sees a key, or a float that is added
            to logits. A float counts only where it hides a key (below half of the dtype's range), because scaled
            weights do not change other biases.

    Returns:
        ``(heads,)``, fp32, on the inputs' device; minus infinity for a head that sees nothing.
    """
    batch, heads, queries, width = query.shape
    key_heads, keys = key.shape[1:3]
    group = heads // key_heads
    if query.dtype == torch.float16:
        # Products above 65504 would be infinite before the factor is applied.
        query, scale = query * scale, 1.0
    grouped = query.reshape(batch, key_heads, group, queries, width)
    seen = None if mask is None else _seen(mask, key_heads, group)
    best = torch.full((key_heads, group), -math.inf, dtype=torch.float32, device=query.device)
    rows = max(1, _BLOCK_NUMEL // max(batch * heads * keys, 1))
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        width_of_block = min(keys, stop) if causal else keys
        block = grouped[:, :, :, start:stop].reshape(batch, key_heads, group * (stop - start), width)
        logits = block @ key[:, :, :width_of_block].mT
        logits = logits.view(batch, key_heads, group, stop - start, width_of_block)
        if causal:
            later = torch.ones(stop - start, width_of_block, dtype=torch.bool, device=query.device)
            logits.masked_fill_(later.triu_(start + 1), -math.inf)
        if seen is not None:
            part = seen[..., start:stop, :] if seen.shape[-2] > 1 else seen
            logits.masked_fill_(~part[..., :width_of_block], -math.inf)
        if logits.numel():
            best = torch.maximum(best, logits.amax(dim=(0, 3, 4)).float())
    return best.reshape(heads).mul_(scale)


@torch.no_grad()
def logit_bounds(query: Tensor, key: Tensor, *, scale: float) -> Tensor:
    """Return what the logits of every query head cannot exceed: the longest query times the longest key, per sequence.

    It reads queries and keys once and multiplies no matrices, unlike :func:`max_logits`.

    Args:
        query: ``(batch, heads, queries, width)``.
        key: ``(batch, key heads, keys, width)``.
        scale: Factor of the products; positive.

    Returns:
        ``(heads,)``, fp32.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    longest = [torch.linalg.vector_norm(x, dim=-1, dtype=wide).amax(dim=-1) for x in (query, key)]
    grouped: Tensor = longest[0].unflatten(1, (key.shape[1], -1)) * longest[1].unsqueeze(-1)
    return grouped.amax(dim=0).flatten().mul_(scale).float()


def _seen(mask: Tensor, key_heads: int, group: int) -> Tensor:
    """Return a boolean mask of five dimensions: batch, key heads, heads of each, queries, keys."""
    if mask.dtype != torch.bool:
        mask = mask > torch.finfo(mask.dtype).min / 2
    while mask.ndim < 4:
        mask = mask.unsqueeze(0)
    if mask.shape[1] == 1:
        return mask.unsqueeze(2)
    return mask.reshape(mask.shape[0], key_heads, group, *mask.shape[2:])
