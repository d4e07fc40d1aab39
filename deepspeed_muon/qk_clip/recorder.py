"""Recorders of attention logits, which also describe the rows that produce the queries and keys of an attention module.

A recorder belongs to one attention module. It stores the largest logit of each query head on the module's device and
never waits for it. The optimizer reads all recorders once per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask

from deepspeed_muon.errors import ConfigError
from deepspeed_muon.routing.shapes import true_shape

HeadRole = Literal["query", "key", "rotated_query"]
# A function returns the rows of a boolean mask from one query to before another.
Mask = Tensor | BlockMask | Callable[[int, int], Tensor]

# How many logits are computed at once: 64 MiB in float32.
_BLOCK_NUMEL = 1 << 24


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The rows of all heads in one parameter: a block for each head, at a constant stride.

    Attributes:
        parameter: Dotted name.
        role: Whether the rows produce queries or keys.
        heads: Number of blocks: the query heads, or the key heads.
        rows: Rows of a block.
        stride: Rows from the start of one block to the next.
        start: First row of the first block.
        row_numel: Elements of a row; 1 for a bias.
        total: Rows of the parameter, which a wrong description would not match.
    """

    parameter: str
    role: HeadRole
    heads: int
    rows: int
    stride: int
    start: int = 0
    row_numel: int = 1
    total: int = 0


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """One attention layer.

    Attributes:
        layer: Dotted name of its module.
        heads: Query heads.
        rows: The rows that produce its queries and keys.
    """

    layer: str
    heads: int
    rows: tuple[HeadRows, ...]


class QkRecorder:
    """Stores the largest attention logit of each head of one attention module until the optimizer's next step.

    Assign it to an attribute of the attention module (it is neither a module nor a parameter), and call :meth:`record`
    in ``forward`` while training::

        self.recorder = QkRecorder.separate(heads=8, key_heads=2, head_dim=64)  # of self.q_proj and self.k_proj
        ...
        if self.training:
            self.recorder.record(q, k, scale=q.shape[-1] ** -0.5)

    Attributes:
        largest: The largest logit of every head since :meth:`clear`, ``(heads,)`` fp32, or ``None``.
        bounds: Upper bounds of the logits of every head since :meth:`clear`, ``(heads,)`` fp32, or ``None``.
        exact: Whether :meth:`record` computes logits; otherwise it bounds them by the norms of queries and keys, at a
            fraction of the cost. The optimizer sets it for the next step, to the same value on all ranks.
    """

    def __init__(self, heads: int, rows: tuple[HeadRows, ...]) -> None:
        """Describe the rows; :meth:`separate`, :meth:`fused` and :meth:`latent` do it for the usual layouts.

        Args:
            heads: Query heads.
            rows: The rows that produce queries and keys; ``parameter`` is the name of a submodule with ``weight`` and
                perhaps ``bias``, relative to the module that has the recorder as an attribute.

        Raises:
            ConfigError: If key heads do not divide the query heads.
        """
        for block in rows:
            if block.heads < 1 or heads % block.heads or block.rows < 1 or block.start < 0:
                raise ConfigError(
                    f"QkRecorder: {block.parameter} has {block.heads} heads of {block.rows} rows, which do not fit "
                    f"{heads} query heads"
                )
        self.heads = heads
        self.rows = rows
        self.exact = True
        self.largest: Tensor | None = None
        self.bounds: Tensor | None = None

    @classmethod
    def separate(
        cls,
        *,
        heads: int,
        head_dim: int,
        key_heads: int | None = None,
        query: str = "q_proj",
        key: str = "k_proj",
    ) -> QkRecorder:
        """Describe a projection for queries and one for keys.

        Args:
            heads: Query heads.
            head_dim: Rows of a head in both.
            key_heads: Key heads, each shared by ``heads / key_heads`` query heads; as many as queries by default.
            query: Name of the submodule that produces the queries.
            key: Name of the submodule that produces the keys.
        """
        keys = key_heads or heads
        rows = (
            HeadRows(query, "query", heads, head_dim, head_dim, total=heads * head_dim),
            HeadRows(key, "key", keys, head_dim, head_dim, total=keys * head_dim),
        )
        return cls(heads, rows)

    @classmethod
    def fused(
        cls,
        projection: str,
        *,
        heads: int,
        head_dim: int,
        key_heads: int | None = None,
        interleaved: bool = False,
    ) -> QkRecorder:
        """Describe one projection for queries, keys and values.

        Args:
            projection: Name of the submodule.
            heads: Query heads.
            head_dim: Rows of a head.
            key_heads: Key heads; as many as queries by default, and always if ``interleaved``.
            interleaved: Whether each head's query, key and value follow each other (GPT-NeoX), instead of all queries,
                then all keys, then all values.
        """
        keys = heads if interleaved else key_heads or heads
        # Rows with 2 heads of 64: q0 q1 k0 k1 v0 v1, or interleaved q0 k0 v0 q1 k1 v1. The first key head starts at row
        # 128 or 64; from one head to the next there are 64 or 192 rows.
        stride = 3 * head_dim if interleaved else head_dim
        start = head_dim if interleaved else heads * head_dim
        total = (heads + 2 * keys) * head_dim
        rows = (
            HeadRows(projection, "query", heads, head_dim, stride, total=total),
            HeadRows(projection, "key", keys, head_dim, stride, start, total=total),
        )
        return cls(heads, rows)

    @classmethod
    def latent(
        cls,
        *,
        heads: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        query: str = "q_b_proj",
        key_value: str = "kv_b_proj",
    ) -> QkRecorder:
        """Describe the up-projections of multi-head latent attention (DeepSeek).

        Args:
            heads: Heads.
            nope_dim: Dimension of queries and keys without rotary embedding.
            rope_dim: Dimension of those with rotary embedding, whose key all heads share.
            value_dim: Width of the values.
            query: Name of the submodule that produces per head the queries without, then those with rotation.
            key_value: Name of the submodule that produces per head the keys without rotation, then the values.
        """
        # Rows of q_b_proj: nope and rope of head 0, then of head 1. Rows of kv_b_proj: key and value of head 0, then of
        # 1.
        stride, key_stride = nope_dim + rope_dim, nope_dim + value_dim
        rows = (
            HeadRows(query, "query", heads, nope_dim, stride, total=heads * stride),
            HeadRows(query, "rotated_query", heads, rope_dim, stride, nope_dim, total=heads * stride),
            HeadRows(key_value, "key", heads, nope_dim, key_stride, total=heads * key_stride),
        )
        return cls(heads, rows)

    def record(
        self, query: Tensor, key: Tensor, *, scale: float, causal: bool = True, mask: Mask | None = None
    ) -> None:
        """Record the largest logits of queries and keys; see :func:`max_logits`.

        Args:
            query: ``(batch, heads, queries, width)``, as the attention kernel gets them.
            key: ``(batch, key heads, keys, width)``, before or after they are repeated for the query heads.
            scale: Factor of the logits.
            causal: Whether later keys are masked.
            mask: A further mask.
        """
        if query.shape[1] != self.heads:
            raise ConfigError(f"QkRecorder of {self.heads} heads got queries of shape {tuple(query.shape)}")
        # Both are maxima over all micro-batches until the optimizer's step.
        bounds = logit_bounds(query, key, scale=scale)
        self.bounds = bounds if self.bounds is None else torch.maximum(self.bounds, bounds)
        if self.exact:
            self.record_maxima(max_logits(query, key, scale=scale, causal=causal, mask=mask))

    def record_logits(self, logits: Tensor) -> None:
        """Record the maxima of logits that the module has computed.

        Args:
            logits: ``(batch, heads, queries, keys)``, scaled, masked, before the softmax. Not mutated.
        """
        self.record_maxima(logits.detach().amax(dim=(0, 2, 3)))

    def record_maxima(self, largest: Tensor) -> None:
        """Record the largest logit of every head (FlexAttention's ``max_scores``, reduced over the other dimensions).

        Args:
            largest: ``(heads,)``.
        """
        if largest.shape != (self.heads,):
            raise ConfigError(f"QkRecorder of {self.heads} heads got maxima of shape {tuple(largest.shape)}")
        largest = largest.detach().float()
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    def clear(self) -> None:
        """Forget the recorded logits."""
        self.largest = self.bounds = None


def find_recorders(model: nn.Module) -> list[tuple[AttentionHeads, QkRecorder]]:
    """Return all recorders that are attributes of modules, with the rows of their layers by parameter name.

    Args:
        model: The whole model, which ``zero.Init`` may have divided.

    Raises:
        ConfigError: If a recorder names a module or rows that do not exist.
    """
    recorders = {}
    for name, module in model.named_modules():
        for recorder in recorders_of(module):
            if id(recorder) not in recorders:
                prefix = f"{name}." if name else ""
                rows = tuple(
                    replace(row, parameter=prefix + row.parameter)
                    for block in recorder.rows
                    for row in _resolve(block, module, name or type(module).__name__)
                )
                recorders[id(recorder)] = AttentionHeads(name, recorder.heads, rows), recorder
    return list(recorders.values())


def recorders_of(module: nn.Module) -> list[QkRecorder]:
    """Return the recorders that are attributes of a module."""
    return [value for value in vars(module).values() if isinstance(value, QkRecorder)]


def projection_of(module: nn.Module, name: str, layer: str) -> nn.Module:
    """Return the submodule of an attention layer that produces queries or keys.

    Raises:
        ConfigError: If it has no weight of its own whose rows could be scaled.
    """
    projection: nn.Module | None = dict(module.named_modules(remove_duplicate=False)).get(name)
    if projection is None or not hasattr(projection, "weight"):
        raise ConfigError(f"qk_clip: attention layer {layer} has no {name}.weight")
    if "weight" not in dict(projection.named_parameters(recurse=False)):
        raise ConfigError(
            f"qk_clip: {layer}.{name} computes its weight, as adapters (LoRA) and parametrizations do, so that no "
            f"rows can be scaled; unset optimizer.params.qk_clip"
        )
    return projection


def _resolve(block: HeadRows, module: nn.Module, layer: str) -> Iterator[HeadRows]:
    """Yield the rows of the weight and of the bias of the submodule that a description names."""
    projection = projection_of(module, block.parameter, layer)
    if type(projection).__name__ == "Conv1D":
        raise ConfigError(
            f"qk_clip: {layer}.{block.parameter} is a Conv1D, whose weight is stored as input x output; only "
            f"projections stored as output x input are clipped. Unset optimizer.params.qk_clip"
        )
    for kind in ("weight", "bias"):
        param = getattr(projection, kind, None)
        if param is None:
            continue
        shape = true_shape(param)
        # A wrong number of rows means that heads or head_dim are not those of this layer.
        if shape[0] != block.total:
            raise ConfigError(
                f"qk_clip: {layer}.{block.parameter}.{kind} has {shape[0]} rows, not the {block.total} of "
                f"{block.heads} heads of {block.rows} {block.role} rows"
            )
        row_numel = torch.Size(shape[1:]).numel()
        yield replace(block, parameter=f"{block.parameter}.{kind}", row_numel=row_numel)


@torch.no_grad()
def max_logits(
    query: Tensor, key: Tensor, *, scale: float, causal: bool = True, mask: Mask | None = None
) -> Tensor:
    """Return the largest scaled logit of every query head over batch and positions.

    The logits are computed in blocks of bounded size and in the inputs' dtype (the relative error in bf16 is 2^-9).
    With ``causal``, a block omits the keys that are masked for all of its queries.

    Args:
        query: ``(batch, heads, queries, width)``.
        key: ``(batch, key heads, keys, width)``; ``heads`` is a multiple of ``key heads``.
        scale: Factor of the products; positive.
        causal: Whether query ``i`` attends only to keys up to ``i``.
        mask: Broadcasts to ``(batch, heads, queries, keys)``: true where a query attends to a key, or floats that are
            added to logits. Of these only masks count (below half of the dtype's minimum), because scaled weights do
            not change other biases. Or FlexAttention's ``BlockMask``.

    Returns:
        ``(heads,)``, fp32, on the inputs' device; minus infinity for a head whose keys are all masked.
    """
    batch, heads, queries, width = query.shape
    key_heads, keys = key.shape[1:3]
    group = heads // key_heads
    if query.dtype == torch.float16:
        # Products above 65504 would be infinite before the factor is applied.
        query, scale = query * scale, 1.0
    grouped = query.reshape(batch, key_heads, group, queries, width)  # group: query heads of one key head
    largest = torch.full((key_heads, group), -math.inf, dtype=torch.float32, device=query.device)
    rows = max(1, _BLOCK_NUMEL // max(batch * heads * keys, 1))  # queries at once
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        block_keys = min(keys, stop) if causal else keys
        block = grouped[:, :, :, start:stop].reshape(batch, key_heads, group * (stop - start), width)
        # (batch, key heads, group * rows, keys), so that one product serves all query heads of a key head
        logits = block @ key[:, :, :block_keys].mT
        logits = logits.view(batch, key_heads, group, stop - start, block_keys)
        if causal:
            # Row i of the block is query start + i, from which keys start + i + 1 on are hidden.
            later = torch.ones(stop - start, block_keys, dtype=torch.bool, device=query.device)
            logits.masked_fill_(later.triu_(start + 1), -math.inf)
        if mask is not None:
            visible = _visible(mask, start, stop, keys)[..., :block_keys]
            # (batch or 1, key heads or 1, query heads of each or 1, rows or 1, keys)
            visible = (
                visible.unsqueeze(2) if visible.shape[1] == 1 else visible.unflatten(1, (key_heads, group))
            )
            logits.masked_fill_(~visible, -math.inf)
        if logits.numel():
            # Over batch, queries and keys: (key heads, group).
            largest = torch.maximum(largest, logits.amax(dim=(0, 3, 4)).float())
    return largest.reshape(heads).mul_(scale)


@torch.no_grad()
def logit_bounds(query: Tensor, key: Tensor, *, scale: float) -> Tensor:
    """Return upper bounds of the logits of every query head: per sequence, largest query norm times largest key norm.

    It reads queries and keys once and multiplies no matrices, unlike :func:`max_logits`.

    Args:
        query: ``(batch, heads, queries, width)``.
        key: ``(batch, key heads, keys, width)``.
        scale: Factor of the products; positive.

    Returns:
        ``(heads,)``, fp32.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    # (batch, heads) and (batch, key heads)
    query_norms, key_norms = (
        torch.linalg.vector_norm(x, dim=-1, dtype=dtype).amax(dim=-1) for x in (query, key)
    )
    # (batch, key heads, group)
    bounds: Tensor = query_norms.unflatten(1, (key.shape[1], -1)) * key_norms.unsqueeze(-1)
    return bounds.amax(dim=0).flatten().mul_(scale).float()


def _visible(mask: Mask, start: int, stop: int, keys: int) -> Tensor:
    """Return ``(batch or 1, heads or 1, stop - start or 1, keys)``, true where a key is visible to a query."""
    if isinstance(mask, Tensor):
        while mask.ndim < 4:
            mask = mask.unsqueeze(0)
        rows = mask[..., start:stop, :] if mask.shape[-2] > 1 else mask
        return rows if rows.dtype == torch.bool else rows > torch.finfo(rows.dtype).min / 2
    if not isinstance(mask, BlockMask):
        return mask(start, stop)
    hides, (batch, heads, _, _) = mask.mask_mod, mask.shape
    return create_mask(
        lambda b, h, q, k: hides(b, h, q + start, k), batch, heads, stop - start, keys, mask.kv_indices.device
    )
