"""The parameters of a model with all their names, and with the kinds of module that hold them.

A parameter that several modules share has a name in each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from deepspeed_muon.plan.layout import TensorShards
from deepspeed_muon.routing.pipeline_module import is_pipeline, pipeline_kinds
from deepspeed_muon.routing.shapes import AttentionShape, attention_shapes, nearest_attention, true_shape

__all__ = ["NamedParameter", "model_parameters_by_name"]

# Modules of stacked experts that store (experts, in, out) without the attribute is_transposed.
_TRANSPOSED_EXPERTS = frozenset({"Llama4TextExperts"})


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """One parameter as the model sees it.

    Attributes:
        names: Every dotted name under which the model reaches it; empty if unknown.
        param: The parameter itself.
        module_kinds: The kinds of module that hold it: a subset of {"embedding", "head", "tied", "convolution",
            "grouped convolution", "transposed convolution", "experts", "transposed", "interleaved"}.
        heads: Attention heads by DeepSpeed's tag, 1 without a tag.
        attention: The heads of the attention module around it, if a configuration tells them.
        shards: How tensor parallelism cuts it; ``None`` if it does not, or nobody has told.
    """

    names: tuple[str, ...]
    param: nn.Parameter
    module_kinds: frozenset[str] = frozenset()
    heads: int = 1
    attention: AttentionShape | None = None
    shards: TensorShards | None = None

    @property
    def name(self) -> str:
        """The first name, or the shape if the parameter has no name."""
        return self.names[0] if self.names else f"<unnamed {'x'.join(map(str, true_shape(self.param)))}>"


def model_parameters_by_name(
    model: nn.Module, shards: Mapping[int, TensorShards] | None = None
) -> dict[int, NamedParameter]:
    """Return ``id(param)`` to :class:`NamedParameter`, in the order of ``model.named_parameters()``.

    Args:
        model: The module.
        shards: ``id(param)`` of the matrices that tensor parallelism cuts, to how it does.
    """
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    kinds: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        params[id(param)] = param
    for module in model.modules():
        for param, kind in _kinds_by_module(module):
            kinds.setdefault(id(param), set()).add(kind)
    for kind, getter in (("head", "get_output_embeddings"), ("embedding", "get_input_embeddings")):
        module = _call_quietly(model, getter)
        if isinstance(module, nn.Module):
            for param in module.parameters(recurse=False):
                kinds.setdefault(id(param), set()).add(kind)
    if is_pipeline(model):
        for kind, params_of_kind in pipeline_kinds(model).items():
            for param in params_of_kind:
                kinds.setdefault(id(param), set()).add(kind)
    shapes = attention_shapes(model)
    return {
        key: NamedParameter(
            tuple(names[key]),
            param,
            frozenset(kinds.get(key, ())),
            getattr(param, "muon_num_heads", None) or 1,
            nearest_attention(shapes, names[key][0]),
            (shards or {}).get(key),
        )
        for key, param in params.items()
    }


def _kinds_by_module(module: nn.Module) -> Iterator[tuple[nn.Parameter, str]]:
    """Yield the parameters that a module holds itself, each with a kind that the type of the module implies."""
    own: list[nn.Parameter] = list(module.parameters(recurse=False))
    filters = [param for name, param in module.named_parameters(recurse=False) if name == "weight"]
    kind = type(module).__name__
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "Embedding" in kind:
        yield from ((param, "embedding") for param in own)
    # A transposed convolution has its input first, a grouped one has several matrices: neither is one matrix.
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        yield from ((param, "transposed convolution") for param in filters)
    elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        name = "convolution" if module.groups == 1 else "grouped convolution"
        yield from ((param, name) for param in filters)
    if "Experts" in kind:
        yield from ((param, "experts") for param in own)
    # Stored as input x output: Hugging Face's linear layer of GPT-2, and stacked experts that are marked or listed so.
    if (kind == "Conv1D" and hasattr(module, "nf")) or (
        "Experts" in kind and (getattr(module, "is_transposed", False) or kind in _TRANSPOSED_EXPERTS)
    ):
        yield from ((param, "transposed") for param in own)
    if getattr(module, "is_concatenated", True) is False:
        yield from ((param, "interleaved") for param in own)


def _call_quietly(model: nn.Module, method: str) -> Any:
    """Call a Hugging Face accessor if the model has one; models without a head raise from it."""
    function = getattr(model, method, None)
    if function is None:
        return None
    try:
        return function()
    except (NotImplementedError, AttributeError):
        return None
