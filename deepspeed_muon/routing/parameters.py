"""The parameters of a model with all their names, and with the kinds of module that hold them.

A parameter that several modules share has a name in each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn

from deepspeed_muon.plan.layout import TensorShards
from deepspeed_muon.routing.shapes import AttentionShape, attention_shapes, nearest_attention, true_shape

# Modules of stacked experts that store (experts, in, out) without the attribute is_transposed.
_TRANSPOSED_EXPERTS = frozenset({"Llama4TextExperts"})
# The last projection of a model is taken for a head if it has so many times fewer outputs than inputs.
_FEW = 8


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """One parameter as the model sees it.

    Attributes:
        names: Every dotted name under which the model reaches it; empty if unknown.
        param: The parameter itself.
        module_kinds: The kinds of module that hold it: a subset of {"embedding", "head", "tied", "convolution",
            "grouped convolution", "transposed convolution", "experts", "transposed", "interleaved", "adapter",
            "LoRA of experts"}.
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
        for param, kind in chain(_kinds_by_module(module), _outputs(module), _adapters(module)):
            kinds.setdefault(id(param), set()).add(kind)
    last = _last_layer(model)
    if isinstance(last, nn.Linear) and _has_few_outputs(last):
        kinds.setdefault(id(last.weight), set()).add("head")
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


def _outputs(module: nn.Module) -> Iterator[tuple[nn.Parameter, str]]:
    """Yield the embeddings and heads of a Hugging Face model: what its accessors name, and the outputs of a task.

    Those of a task are projections to few outputs that lie outside of the base model, whatever their names.
    """
    for kind, getter in (("head", "get_output_embeddings"), ("embedding", "get_input_embeddings")):
        part = _call_quietly(module, getter)
        if isinstance(part, nn.Module):
            yield from ((param, kind) for param in part.parameters(recurse=False))
    prefix = getattr(module, "base_model_prefix", None)
    base = getattr(module, prefix, None) if isinstance(prefix, str) and prefix else None
    if isinstance(base, nn.Module) and base is not module:
        inside = {id(part) for part in base.modules()}
        for part in module.modules():
            if isinstance(part, nn.Linear) and id(part) not in inside and _has_few_outputs(part):
                yield from ((param, "head") for name, param in part.named_parameters() if name == "weight")


def _adapters(module: nn.Module) -> Iterator[tuple[nn.Parameter, str]]:
    """Yield the weights of peft's adapters around a module, but for a plain LoRA's."""
    experts = getattr(module, "num_experts", 1)
    of_experts = isinstance(experts, int) and experts > 1  # target_parameters
    for name in getattr(module, "adapter_layer_names", ()):
        held = getattr(module, name, None)
        half = name in ("lora_A", "lora_B")
        if isinstance(held, nn.Module) and (of_experts or not half):
            yield from ((param, "LoRA of experts" if half else "adapter") for param in held.parameters())


def _last_layer(model: nn.Module) -> nn.Module:
    """Return the last layer of nested ``nn.Sequential``, the one container whose order of layers is known."""
    while isinstance(model, nn.Sequential) and len(model):
        model = model[-1]
    return model


def _has_few_outputs(layer: nn.Linear) -> bool:
    return layer.out_features * _FEW <= layer.in_features


def _call_quietly(model: nn.Module, method: str) -> Any:
    """Call a Hugging Face accessor if the model has one; models without a head raise, others want arguments."""
    function = getattr(model, method, None)
    if function is None:
        return None
    try:
        return function()
    except (NotImplementedError, AttributeError, TypeError):
        return None


def is_pipeline(model: nn.Module) -> bool:
    """Return whether ``model`` is a ``deepspeed.pipe.PipelineModule``."""
    return all(hasattr(model, name) for name in ("forward_funcs", "tied_modules", "stage_id", "num_stages"))


def is_divided(model: Any) -> bool:
    """Return whether ``model`` is a pipeline of which each rank holds one of several stages."""
    return is_pipeline(model) and model.num_stages > 1


def pipeline_kinds(model: Any) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of this rank's stage that are its output ``head``, or ``tied`` between stages."""
    found: dict[str, list[nn.Parameter]] = {"head": [], "tied": list(model.tied_modules.parameters())}
    last = model.forward_funcs[-1] if model.forward_funcs else None
    if model.stage_id == model.num_stages - 1 and isinstance(last, nn.Module):
        matrices = [param for param in last.parameters() if len(true_shape(param)) > 1]
        # A transformer block has several matrices; a last layer with only one is the projection onto the outputs.
        if len(matrices) == 1:
            found["head"] = matrices
    return found
