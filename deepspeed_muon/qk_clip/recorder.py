"""Recording attention logits for QK-clip: in modules of one's own, and in Hugging Face's models.

A recorder belongs to one attention module and keeps the largest logit of each of its query heads, on the module's
device and without waiting for it. The optimizer reads all recorders once per step.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_muon.errors import ConfigError
from deepspeed_muon.qk_clip.heads import AttentionHeads, HeadRows
from deepspeed_muon.qk_clip.logits import logit_bounds, max_logits
from deepspeed_muon.routing.rules import true_shape

__all__ = ["QkRecorder", "attach_to_hugging_face", "detach", "find_recorders"]

_ATTRIBUTE = "_deepspeed_muon_recorder"
_PREFIX = "qk_clip_"
_RECORDABLE = ("sdpa", "eager")

_USERS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""How many optimizers clip each model of Hugging Face."""


class QkRecorder:
    """Keeps the largest attention logit of each head of one attention module until the optimizer's next step.

    Assign it to an attribute of the attention module (it is neither a module nor a parameter), and call :meth:`record`
    in ``forward`` while training::

        self.recorder = QkRecorder.separate(heads=8, key_heads=2, query="q_proj", key="k_proj")
        ...
        if self.training:
            self.recorder.record(q, k, scale=q.shape[-1] ** -0.5)

    Attributes:
        exact: Whether :meth:`record` computes logits; otherwise it bounds them by the lengths of queries and keys, at a
            fraction of the cost. The optimizer sets it for the next step, equally on all ranks.
    """

    def __init__(self, heads: int, rows: tuple[HeadRows, ...]) -> None:
        """Describe the rows; :meth:`separate`, :meth:`fused` and :meth:`latent` do it for the usual layouts.

        Args:
            heads: Query heads.
            rows: The rows that make queries and keys; ``parameter`` is the name of a submodule with ``weight`` and
                perhaps ``bias``, relative to the module that the recorder is an attribute of.

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
        self._largest: Tensor | None = None
        self._bounds: Tensor | None = None

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
            query: Name of the submodule that makes the queries.
            key: Name of the submodule that makes the keys.
        """
        rows = (
            HeadRows(query, "query", heads, head_dim, head_dim, total=heads * head_dim),
            HeadRows(
                key, "key", key_heads or heads, head_dim, head_dim, total=(key_heads or heads) * head_dim
            ),
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
            nope_dim: Width of the part of queries and keys without rotation.
            rope_dim: Width of the rotated part, whose key all heads share.
            value_dim: Width of the values.
            query: Name of the submodule that makes per head the plain, then the rotated queries.
            key_value: Name of the submodule that makes per head the plain keys, then the values.
        """
        stride, key_stride = nope_dim + rope_dim, nope_dim + value_dim
        rows = (
            HeadRows(query, "query", heads, nope_dim, stride, total=heads * stride),
            HeadRows(query, "rotated_query", heads, rope_dim, stride, nope_dim, total=heads * stride),
            HeadRows(key_value, "key", heads, nope_dim, key_stride, total=heads * key_stride),
        )
        return cls(heads, rows)

    def record(
        self, query: Tensor, key: Tensor, *, scale: float, causal: bool = True, mask: Tensor | None = None
    ) -> None:
        """Take the logits of queries and keys into account; see :func:`deepspeed_muon.qk_clip.logits.max_logits`.

        Args:
            query: ``(batch, heads, queries, width)``, as the attention kernel gets them.
            key: ``(batch, key heads, keys, width)``, before or after they are repeated for the query heads.
            scale: Factor of the logits.
            causal: Whether later keys are hidden.
            mask: What else is hidden.
        """
        if query.shape[1] != self.heads:
            raise ConfigError(f"QkRecorder of {self.heads} heads got queries of shape {tuple(query.shape)}")
        bounds = logit_bounds(query, key, scale=scale)
        self._bounds = bounds if self._bounds is None else torch.maximum(self._bounds, bounds)
        if self.exact:
            self.record_maxima(max_logits(query, key, scale=scale, causal=causal, mask=mask))

    def record_logits(self, logits: Tensor) -> None:
        """Take logits into account that the module has made itself.

        Args:
            logits: ``(batch, heads, queries, keys)``, scaled, masked, before the softmax. Not mutated.
        """
        self.record_maxima(logits.detach().amax(dim=(0, 2, 3)))

    def record_maxima(self, largest: Tensor) -> None:
        """Take the largest logit of every head into account (what FlexAttention returns as ``max_scores``, reduced).

        Args:
            largest: ``(heads,)``.
        """
        if largest.shape != (self.heads,):
            raise ConfigError(f"QkRecorder of {self.heads} heads got maxima of shape {tuple(largest.shape)}")
        largest = largest.detach().float()
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    @property
    def largest(self) -> Tensor | None:
        """The largest logit of every head since :meth:`clear`, ``(heads,)`` fp32, or ``None``."""
        return self._largest

    @property
    def bounds(self) -> Tensor | None:
        """What :meth:`record` knows the logits of every head not to exceed, ``(heads,)`` fp32, or ``None``."""
        return self._bounds

    def clear(self) -> None:
        """Forget what was recorded."""
        self._largest = self._bounds = None


def find_recorders(model: nn.Module) -> list[tuple[AttentionHeads, QkRecorder]]:
    """Return all recorders that are attributes of modules, with the rows of their layers by parameter name.

    Args:
        model: The whole model; under ``zero.Init`` too.

    Raises:
        ConfigError: If a recorder names a module or rows that are not there.
    """
    found = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        for recorder in vars(module).values():
            if isinstance(recorder, QkRecorder) and id(recorder) not in seen:
                seen.add(id(recorder))
                rows = tuple(
                    row
                    for block in recorder.rows
                    for row in _resolve(block, module, name or type(module).__name__)
                )
                prefix = f"{name}." if name else ""
                rows = tuple(replace(row, parameter=prefix + row.parameter) for row in rows)
                found.append((AttentionHeads(name, recorder.heads, rows), recorder))
    return found


def _resolve(block: HeadRows, module: nn.Module, layer: str) -> Iterator[HeadRows]:
    """Yield the rows of the weight and of the bias of the submodule that a description names."""
    try:
        projection = module.get_submodule(block.parameter)
        projection.get_parameter("weight")
    except AttributeError:
        raise ConfigError(f"qk_clip: attention layer {layer} has no {block.parameter}.weight") from None
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
        if shape[0] != (block.total or shape[0]) or shape[0] < block.stop:
            raise ConfigError(
                f"qk_clip: {layer}.{block.parameter}.{kind} has {shape[0]} rows, not the "
                f"{block.total or block.stop} of {block.heads} heads of {block.rows} {block.role} rows"
            )
        row_numel = torch.Size(shape[1:]).numel()
        yield replace(block, parameter=f"{block.parameter}.{kind}", row_numel=row_numel)


def attach_to_hugging_face(model: nn.Module) -> list[nn.Module]:
    """Let the attention layers of Hugging Face's models inside ``model`` record their logits.

    Their attention implementation, ``sdpa`` or ``eager``, becomes ``qk_clip_sdpa`` or ``qk_clip_eager``: a function of
    transformers' ``AttentionInterface`` that records while the layer trains and then calls the original one. Layers
    that have a recorder keep it.

    Args:
        model: Any module. Mutated: every attention layer gets a recorder.

    Returns:
        The models of Hugging Face that record now, each until :func:`detach` was called as often as this.

    Raises:
        ConfigError: If a model's attention cannot be recorded, or the clip would have no effect on its logits.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    recording = []
    for pretrained in _outermost(model, transformers.PreTrainedModel):
        recorders = {
            module: recorder
            for name, module in pretrained.named_modules()
            if (recorder := _recorder_for(module, name, pretrained)) is not None
        }
        if not recorders:
            continue
        _record_in(pretrained)
        for module, recorder in recorders.items():
            setattr(module, _ATTRIBUTE, recorder)
        _USERS[pretrained] = _USERS.get(pretrained, 0) + 1
        recording.append(pretrained)
    return recording


def detach(references: Sequence[weakref.ref[nn.Module]]) -> None:
    """Take the recorders out of models that nobody else clips, and give them their attention implementation back.

    Args:
        references: What :func:`attach_to_hugging_face` returned, referred to weakly. Models that exist are mutated.
    """
    pretrained: Any
    for pretrained in [model for reference in references if (model := reference()) is not None]:
        _USERS[pretrained] -= 1
        if _USERS[pretrained]:
            continue
        del _USERS[pretrained]
        for module in pretrained.modules():
            if hasattr(module, _ATTRIBUTE):
                delattr(module, _ATTRIBUTE)
        implementation = str(pretrained.config._attn_implementation)
        pretrained.set_attn_implementation(implementation.removeprefix(_PREFIX))


def _outermost(model: nn.Module, kind: type) -> Iterator[Any]:
    """Yield the submodules of a type that are not inside another one of it."""
    if isinstance(model, kind):
        yield model
        return
    for child in model.children():
        yield from _outermost(child, kind)


def _record_in(pretrained: Any) -> None:
    """Switch a model to the recording twin of its attention implementation."""
    current = str(pretrained.config._attn_implementation)
    if current.removeprefix(_PREFIX) not in _RECORDABLE:
        raise ConfigError(
            f"optimizer.params.qk_clip: attn_implementation {current!r} of {type(pretrained).__name__} cannot be "
            f"recorded; load the model with attn_implementation 'sdpa' or 'eager'"
        )
    register_attention_functions()
    if not current.startswith(_PREFIX):
        pretrained.set_attn_implementation(_PREFIX + current)
    if not str(pretrained.config._attn_implementation).startswith(_PREFIX):
        raise ConfigError(
            f"optimizer.params.qk_clip: {type(pretrained).__name__} does not use transformers' AttentionInterface; "
            f"give its attention modules a deepspeed_muon.QkRecorder"
        )


def register_attention_functions() -> None:
    """Register ``qk_clip_sdpa`` and ``qk_clip_eager`` with transformers; doing it again changes nothing.

    Raises:
        ConfigError: If transformers is too old to have an ``AttentionInterface``.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise ConfigError(
            "optimizer.params.qk_clip needs a transformers that has AttentionInterface (4.53 or newer); give the "
            "attention modules a deepspeed_muon.QkRecorder instead"
        ) from error
    for base in _RECORDABLE:
        AttentionInterface.register(_PREFIX + base, _recording(base))
        AttentionMaskInterface.register(_PREFIX + base, ALL_MASK_ATTENTION_FUNCTIONS[base])


def _recording(base: str) -> Callable[..., Any]:
    """Return an attention function that records and then calls the implementation ``base``."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        recorder = getattr(module, _ATTRIBUTE, None)
        if recorder is not None and module.training:
            scaling = kwargs.get("scaling")
            causal = kwargs.get("is_causal")
            causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
            recorder.record(
                query,
                key,
                scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
                # As in the implementations: a mask says all, causality included.
                causal=causal and attention_mask is None and query.shape[2] > 1,
                mask=attention_mask,
            )
        if base == "eager":
            function = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        else:
            function = ALL_ATTENTION_FUNCTIONS[base]
        return function(module, query, key, value, attention_mask, *args, **kwargs)

    return attention


def _recorder_for(module: nn.Module, name: str, pretrained: Any) -> QkRecorder | None:
    """Return a recorder for an attention layer of the known kinds, ``None`` for every other module."""
    config = getattr(module, "config", None) or pretrained.config
    latent = _is_linear(module, "kv_b_proj") and hasattr(config, "qk_nope_head_dim")
    plain = _is_linear(module, "q_proj") and _is_linear(module, "k_proj")
    fused = next((each for each in ("qkv_proj", "query_key_value", "c_attn") if hasattr(module, each)), None)
    if not (latent or plain or fused) or not hasattr(config, "num_attention_heads"):
        return None
    existing = next((each for each in vars(module).values() if isinstance(each, QkRecorder)), None)
    if existing is not None:
        return existing
    where = f"optimizer.params.qk_clip: attention layer {name} ({type(module).__name__})"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ConfigError(
            f"{where} has attn_logit_softcapping, which bounds the logits already; unset qk_clip"
        )
    if any(isinstance(getattr(module, each, None), nn.Module) for each in ("q_norm", "k_norm")):
        raise ConfigError(
            f"{where} normalises queries or keys, so the size of their weights has no part in the logits; unset qk_clip"
        )
    if fused:
        raise ConfigError(
            f"{where} makes queries and keys in {fused}; say where their rows are with a "
            f"deepspeed_muon.QkRecorder.fused that is an attribute of the layer"
        )
    heads = int(config.num_attention_heads)
    if latent:
        return QkRecorder.latent(
            heads=heads,
            nope_dim=int(config.qk_nope_head_dim),
            rope_dim=int(config.qk_rope_head_dim),
            value_dim=int(config.v_head_dim),
            query="q_b_proj" if _is_linear(module, "q_b_proj") else "q_proj",
        )
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = true_shape(module.get_parameter("q_proj.weight"))[0] // heads
    return QkRecorder.separate(heads=heads, key_heads=key_heads, head_dim=head_dim)


def _is_linear(module: nn.Module, name: str) -> bool:
    child = getattr(module, name, None)
    return isinstance(child, nn.Module) and isinstance(getattr(child, "weight", None), Tensor)
