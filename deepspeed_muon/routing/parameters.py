"""The parameters of a model as the model sees them: all their names, their true shapes, what holds them.

Under ``zero.Init`` every parameter looks one-dimensional and its shape as a layer is kept in ``ds_shape``. A parameter
that several modules share has all of their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from deepspeed_muon.routing.pipeline_module import is_pipeline, pipeline_kinds
from deepspeed_muon.routing.shapes import AttentionShape, attention_shapes, nearest_attention, true_shape

__all__ = ["NamedParameter", "model_parameters_by_name"]

# Modules of stacked experts that store (experts, in, out) without saying so.
_TRANSPOSED_EXPERTS = frozenset({"Llama4TextExperts"})


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """One parameter as the model sees it.

    Attributes:
        names: Every dotted name under which the model reaches it, first one first; empty when unknown.
        param: The parameter itself.
        module_kinds: What the modules that hold it are: a subset of {"embedding", "head", "tied", "convolution",
            "grouped convolution", "transposed convolution", "experts", "transposed", "interleaved"}.
        heads: Attention heads by DeepSpeed's tag, 1 where there is none.
        attention: The heads of the attention modules around it, where their configuration says.
    """

    names: tuple[str, ...]
    param: nn.Parameter
    module_kinds: frozenset[str] = frozenset()
    heads: int = 1
    attention: AttentionShape | None = None

    @property
    def name(self) -> str:
        """The first name, or a description by shape for an unnamed parameter."""
        return self.names[0] if self.names else f"<unnamed {'x'.join(map(str, true_shape(self.param)))}>"


def model_parameters_by_name(model: nn.Module) -> dict[int, NamedParameter]:
    """Collect every parameter of ``model`` with all of its names and the kinds of module that hold it.

    Args:
        model: Any module; nothing is mutated.

    Returns:
        ``id(param)`` to :class:`NamedParameter`, in the order of ``model.named_parameters()``.
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
        )
        for key, param in params.items()
    }


def _kinds_by_module(module: nn.Module) -> Iterator[tuple[nn.Parameter, str]]:
    """Yield what the type of a module says of the parameters that it holds itself."""
    own: list[nn.Parameter] = list(module.parameters(recurse=False))
    filters = [param for name, param in module.named_parameters(recurse=False) if name == "weight"]
    kind = type(module).__name__
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "Embedding" in kind:
        yield from ((param, "embedding") for param in own)
    # A transposed convolution has its input first, a grouped one several matrices: neither is one filter bank.
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        yield from ((param, "transposed convolution") for param in filters)
    elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        name = "convolution" if module.groups == 1 else "grouped convolution"
        yield from ((param, name) for param in filters)
    if "Experts" in kind:
        yield from ((param, "experts") for param in own)
    # Input x output: Hugging Face's linear layer of GPT-2, and the stacked experts that say so or are known to.
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
