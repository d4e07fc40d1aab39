"""Recording of attention logits in Hugging Face's models: replaces their attention functions by ones that record."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_muon.errors import ConfigError
from deepspeed_muon.qk_clip.recorder import QkRecorder, projection_of, recorders_of
from deepspeed_muon.routing.shapes import true_shape

_ATTRIBUTE = "_deepspeed_muon_recorder"
# Norms of queries and keys, but not those inside a low-rank projection ("q_a_layernorm") or of its input
# ("q_input_norm").
_QK_NORM = re.compile(r"(q|k|qk|query|key)_(layer_?)?norms?")

_USERS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The number of optimizers that clip each model of Hugging Face."""


def attach(model: nn.Module) -> list[nn.Module]:
    """Make the attention layers of Hugging Face's models inside ``model`` record their logits.

    Every function of transformers' ``AttentionInterface`` (sdpa, flash, flex, kernels of the hub, those of programs)
    and the eager one in the file of a layer are replaced by functions that record, if the layer has a recorder and is
    in training mode, and then call them. These stay. A layer that has a recorder already records with that one.

    Args:
        model: Any module. Mutated: every attention layer gets a recorder.

    Returns:
        The models of Hugging Face that record now, until :func:`detach` has been called as often as this function.

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
        # Before the layers are changed, because it may raise.
        for module in recorders:
            _record_in(module, pretrained)
        for module, recorder in recorders.items():
            setattr(module, _ATTRIBUTE, recorder)
        _USERS[pretrained] = _USERS.get(pretrained, 0) + 1
        recording.append(pretrained)
    return recording


def detach(references: Sequence[weakref.ref[nn.Module]]) -> None:
    """Remove the recorders from models that no other optimizer clips.

    Args:
        references: Weak references to what :func:`attach` returned. Models that still exist are mutated.
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


def _outermost(model: nn.Module, kind: type) -> Iterator[Any]:
    """Yield the submodules of a type that are not inside another one of it."""
    if isinstance(model, kind):
        yield model
        return
    for child in model.children():
        yield from _outermost(child, kind)


def _record_in(module: nn.Module, pretrained: Any) -> None:
    """Replace the attention functions that a layer can call; repeated, those that were registered since."""
    files = [vars(sys.modules[ancestor.__module__]) for ancestor in type(module).__mro__]
    table = next(
        (file["ALL_ATTENTION_FUNCTIONS"] for file in files if "ALL_ATTENTION_FUNCTIONS" in file), None
    )
    if table is None or not hasattr(sys.modules["transformers"], "AttentionMaskInterface"):
        raise ConfigError(
            f"optimizer.params.qk_clip: {type(module).__name__} does not use transformers' AttentionInterface (4.53 or "
            f"newer); give the attention modules a deepspeed_muon.QkRecorder"
        )
    # transformers does not register eager attention: the file of each model has a function of its own.
    eager = [file for file in files if "eager_attention_forward" in file]
    for file in eager:
        file["eager_attention_forward"] = _recording("eager", file["eager_attention_forward"])
    for name, function in type(table)().items():
        table.register(name, _recording(name, function))
    current = str(_config_of(module, pretrained)._attn_implementation)
    if not (eager if current == "eager" else hasattr(table.get(current), _ATTRIBUTE)):
        raise ConfigError(
            f"optimizer.params.qk_clip: transformers has no function for attn_implementation {current!r} of "
            f"{type(module).__name__}; register it before, or unset qk_clip"
        )


def _recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function that records and then calls the one of a name."""
    if hasattr(function, _ATTRIBUTE):
        return function

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: object, **kwargs: Any
    ) -> Any:
        recorder = getattr(module, _ATTRIBUTE, None)
        # The function that the layer calls, not one that this calls.
        if recorder is not None and module.training and name == module.config._attn_implementation:
            scaling, causal = kwargs.get("scaling"), kwargs.get("is_causal")
            if causal is None:
                causal = getattr(module, "is_causal", True)
            scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
            # As in the implementations: a mask of queries and keys includes causality, one of padding does not.
            whole = mask is not None and len(mask.shape) > 2
            causal = bool(causal) and not whole and query.shape[2] > 1
            complete = whole or name in ("sdpa", "eager")
            visible = mask if complete else _mask_of_arguments(query, key, mask, kwargs)
            recorder.record(query, key, scale=scale, causal=causal, mask=visible)
        return function(module, query, key, value, mask, *args, **kwargs)

    setattr(attention, _ATTRIBUTE, True)
    return attention


def _mask_of_arguments(
    query: Tensor, key: Tensor, padding: Tensor | None, arguments: Mapping[str, Any]
) -> Callable[[int, int], Tensor]:
    """Return what flash attention hides by its arguments: padding, other packed sequences, keys outside of a window.

    Args:
        query: ``(batch, heads, queries, width)``.
        key: ``(batch, key heads, keys, width)``.
        padding: ``(batch, keys)``, zero where a sequence is padded.
        arguments: Of the attention function.
    """
    keys = key.shape[2]
    index = torch.arange(keys, dtype=torch.int64, device=query.device)
    window = arguments.get("sliding_window") or keys
    # Of each position the number of its packed sequence, -1 for padding: (batch or 1, positions).
    sequence = torch.zeros_like(index).unsqueeze(0)
    positions = arguments.get("position_ids")
    if (ends := arguments.get("cu_seq_lens_k")) is not None:
        sequence = torch.bucketize(index, ends, right=True).unsqueeze(0)
    elif positions is not None and positions.shape == (1, keys) and len(query) == 1:
        sequence = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(1)
    if padding is not None:
        sequence = torch.where(padding.bool(), sequence, -1)

    def visible(start: int, stop: int) -> Tensor:
        """Return ``(batch or 1, 1, stop - start or 1, keys)``."""
        shown = (sequence >= 0).unsqueeze(1)
        if query.shape[2] == keys:  # else queries are of another sequence, or follow cached keys
            near = (index[start:stop, None] - index).abs() < window
            shown = shown & near & (sequence[:, start:stop, None] == sequence[:, None])
        return shown.unsqueeze(1)

    return visible


def _recorder_for(module: nn.Module, name: str, pretrained: Any) -> QkRecorder | None:
    """Return a recorder for an attention layer of the known kinds, ``None`` for every other module."""
    config = _config_of(module, pretrained)
    # 1. Which kind of projections the layer has.
    latent = _is_linear(module, "kv_b_proj") and hasattr(config, "qk_nope_head_dim")
    plain = _is_linear(module, "q_proj") and _is_linear(module, "k_proj")
    fused = next((key for key in ("qkv_proj", "query_key_value", "c_attn") if hasattr(module, key)), None)
    if not (latent or plain or fused) or not hasattr(config, "num_attention_heads"):
        return None
    if existing := recorders_of(module):
        return existing[0]
    # 2. Layers on whose logits the clip would have no effect, or whose rows are not known.
    where = f"optimizer.params.qk_clip: attention layer {name} ({type(module).__name__})"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ConfigError(
            f"{where} has attn_logit_softcapping, which bounds the logits already; unset qk_clip"
        )
    if any(
        _QK_NORM.fullmatch(key) for key, child in module.named_children() if type(child) is not nn.Identity
    ):
        raise ConfigError(
            f"{where} normalises queries or keys, so scaling their weights does not change the logits; unset qk_clip"
        )
    if fused:
        raise ConfigError(
            f"{where} produces queries and keys in {fused}; say where their rows are with a "
            f"deepspeed_muon.QkRecorder.fused that is an attribute of the layer"
        )
    # 3. Heads by the rows of the weights: the configuration counts those of the model, and with AutoTP this rank has
    # some.
    if latent:
        query = "q_b_proj" if _is_linear(module, "q_b_proj") else "q_proj"
        nope, rope = int(config.qk_nope_head_dim), int(config.qk_rope_head_dim)
        return QkRecorder.latent(
            heads=_rows(module, name, query) // (nope + rope),
            nope_dim=nope,
            rope_dim=rope,
            value_dim=int(config.v_head_dim),
            query=query,
        )
    query_rows, key_rows = _rows(module, name, "q_proj"), _rows(module, name, "k_proj")
    head_dim = int(getattr(module, "head_dim", None) or query_rows // int(config.num_attention_heads))
    return QkRecorder.separate(
        heads=query_rows // head_dim, key_heads=key_rows // head_dim, head_dim=head_dim
    )


def _config_of(module: nn.Module, pretrained: Any) -> Any:
    return getattr(module, "config", None) or pretrained.config


def _rows(module: nn.Module, name: str, projection: str) -> int:
    return true_shape(projection_of(module, projection, name).get_parameter("weight"))[0]


def _is_linear(module: nn.Module, name: str) -> bool:
    child = getattr(module, name, None)
    return isinstance(child, nn.Module) and isinstance(getattr(child, "weight", None), Tensor)
