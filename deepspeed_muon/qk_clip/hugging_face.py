"""Recording of attention logits in Hugging Face's models: replaces their attention functions by ones that record."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from deepspeed_muon.errors import ConfigError
from deepspeed_muon.qk_clip.recorder import QkRecorder, projection_of, recorders_of
from deepspeed_muon.routing.shapes import true_shape

_ATTRIBUTE = "_deepspeed_muon_recorder"
_PREFIX = "qk_clip_"
_RECORDABLE = ("sdpa", "eager")
# Norms of queries and keys, but not those inside a low-rank projection ("q_a_layernorm") or of its input
# ("q_input_norm").
_QK_NORM = re.compile(r"(q|k|qk|query|key)_(layer_?)?norms?")

_USERS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The number of optimizers that clip each model of Hugging Face."""


def attach(model: nn.Module) -> list[nn.Module]:
    """Make the attention layers of Hugging Face's models inside ``model`` record their logits.

    Their attention implementation, ``sdpa`` or ``eager``, becomes ``qk_clip_sdpa`` or ``qk_clip_eager``: a function of
    transformers' ``AttentionInterface`` that records if the layer is in training mode, and then calls the original one.
    A layer that has a recorder already records with that one.

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
        _record_in(pretrained)
        for module, recorder in recorders.items():
            setattr(module, _ATTRIBUTE, recorder)
        _USERS[pretrained] = _USERS.get(pretrained, 0) + 1
        recording.append(pretrained)
    return recording


def detach(references: Sequence[weakref.ref[nn.Module]]) -> None:
    """Remove the recorders from models that no other optimizer clips, and restore their attention implementation.

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
        # Also if the program has chosen another implementation since, which then has no prefix.
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
    """Switch a model to the attention implementation that records and then calls its own."""
    current = str(pretrained.config._attn_implementation)
    if current.removeprefix(_PREFIX) not in _RECORDABLE:
        raise ConfigError(
            f"optimizer.params.qk_clip: attn_implementation {current!r} of {type(pretrained).__name__} cannot be "
            f"recorded; load the model with attn_implementation 'sdpa' or 'eager'"
        )
    _register_attention_functions()
    if not current.startswith(_PREFIX):
        pretrained.set_attn_implementation(_PREFIX + current)
    if not str(pretrained.config._attn_implementation).startswith(_PREFIX):
        raise ConfigError(
            f"optimizer.params.qk_clip: {type(pretrained).__name__} does not use transformers' AttentionInterface; "
            f"give its attention modules a deepspeed_muon.QkRecorder"
        )


def _register_attention_functions() -> None:
    """Register ``qk_clip_sdpa`` and ``qk_clip_eager`` with transformers; doing it again changes nothing."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise ConfigError(
            "optimizer.params.qk_clip needs a transformers that has AttentionInterface (4.53 or newer); give the "
            "attention modules a deepspeed_muon.QkRecorder instead"
        ) from error
    for base in _RECORDABLE:
        # transformers makes masks by a function under the same name, and without one passes none.
        AttentionInterface.register(_PREFIX + base, _recording(base))
        AttentionMaskInterface.register(_PREFIX + base, ALL_MASK_ATTENTION_FUNCTIONS[base])


def _recording(base: str) -> Callable[..., Any]:
    """Return an attention function that records and then calls the implementation ``base``."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: object,
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
                # As in the implementations: a mask includes causality.
                causal=causal and attention_mask is None and query.shape[2] > 1,
                mask=attention_mask,
            )
        # transformers does not register eager attention: the file of each model has a function of its own.
        if base == "eager":
            function = _eager_attention(type(module))
        else:
            function = ALL_ATTENTION_FUNCTIONS[base]
        return function(module, query, key, value, attention_mask, *args, **kwargs)

    return attention


def _eager_attention(attention_class: type) -> Any:
    """Return the eager attention in the file of a class or, if there is none, in that of the nearest base class."""
    for ancestor in attention_class.__mro__:
        namespace = vars(sys.modules[ancestor.__module__])
        if "eager_attention_forward" in namespace:
            return namespace["eager_attention_forward"]
    raise ConfigError(
        f"optimizer.params.qk_clip: neither the file of {attention_class.__name__} nor that of a class it derives from "
        f"has an eager_attention_forward; choose another attn_implementation, or unset qk_clip"
    )


def _recorder_for(module: nn.Module, name: str, pretrained: Any) -> QkRecorder | None:
    """Return a recorder for an attention layer of the known kinds, ``None`` for every other module."""
    config = getattr(module, "config", None) or pretrained.config
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


def _rows(module: nn.Module, name: str, projection: str) -> int:
    return true_shape(projection_of(module, projection, name).get_parameter("weight"))[0]


def _is_linear(module: nn.Module, name: str) -> bool:
    child = getattr(module, name, None)
    return isinstance(child, nn.Module) and isinstance(getattr(child, "weight", None), Tensor)
