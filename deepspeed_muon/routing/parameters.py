"""The parameters of a model with all their names, and what names and modules tell about them.

A parameter that several modules share has a name in each of them. The kinds of module that hold it, and its dotted
names, tell embeddings, heads and routers from hidden matrices.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn

from deepspeed_muon.errors import RoutingError
from deepspeed_muon.plan.layout import TensorShards
from deepspeed_muon.routing.route import Rule
from deepspeed_muon.routing.shapes import (
    AttentionShape,
    attention_shapes,
    leaf_name,
    true_shape,
)

# Modules of stacked experts that store (experts, in, out) without the attribute is_transposed.
_TRANSPOSED_EXPERTS = frozenset({"Llama4TextExperts"})
# The last projection of a model is taken for a head if it has so many times fewer outputs than inputs.
_FEW = 8

# Components of a dotted name. An embedding's may stand anywhere in the path; a head's must be that of the module that
# holds the weight, because BERT's "attention.output.dense.weight" is a hidden matrix.
_EMBEDDING_COMPONENTS = frozenset({"wte", "wpe"})
_HEAD_COMPONENTS = frozenset({"lm_head", "lm_heads", "embed_out", "unembed", "shared_head"})
# These names mean a head only outside of numbered layers ("layers.3.attention.output.weight" is none).
_TOP_LEVEL_HEAD_COMPONENTS = frozenset(
    {
        "fc",
        "head",
        "heads",
        "logits",
        "logits_dense",
        "logits_proj",
        "output",
        "output_layer",
        "output_projection",
        "predictions",
        "proj_out",
        "qa_outputs",
        "score",
    }
)
_TOP_LEVEL_HEAD_ENDINGS = ("classifier", "_head", "_predictor", "_outputs")
# Tables of relative positions begin so, whatever module holds them.
_RELATIVE_POSITIONS = ("rel_pos", "relative_position", "relative_attention_bias")
_ROUTER_COMPONENTS = frozenset({"wg", "shared_expert_gate"})
# Parameters that multiply elementwise or nothing, by the end of their names: learned inputs, gains, the rates and
# shortcuts of state-space and recurrent models.
_NO_PRODUCT = frozenset(
    {
        "A_log",
        "D",
        "bias_u",
        "bias_v",
        "gamma",
        "latent_query",
        "latents",
        "latents_1d",
        "latents_2d",
        "mask_token",
        "pos_bias_u",
        "pos_bias_v",
        "probe",
        "queries",
        "query",
        "query_tokens",
        "register_tokens",
        "scale",
        "time_decay",
        "time_faaaa",
        "time_first",
    }
)
# The halves of LoRA in peft and in DeepSpeed's OptimizedLinear: x goes through A, then through B.
_LORA_A = frozenset({"lora_a", "lora_weight_1"})
_LORA_B = frozenset({"lora_b", "lora_weight_2"})
# Wrappers, in peft each followed by the name of an adapter: what lies in one belongs to the module around it.
_WRAPPERS = frozenset({"modules_to_save"}) | _LORA_A | _LORA_B
# Names that peft gives to the module that it wraps.
_BASES = frozenset({"base_layer", "original_module"})


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """One parameter as the model sees it.

    Attributes:
        names: Every dotted name under which the model reaches it; empty if unknown.
        param: The parameter itself.
        module_kinds: The kinds of module that hold it: a subset of {"embedding", "head", "tied", "convolution",
            "grouped convolution", "transposed convolution", "experts", "transposed", "interleaved", "adapter",
            "LoRA of experts"}.
        attention: The heads of the attention module around it, if a configuration tells them.
        shards: How tensor parallelism cuts it; ``None`` if it does not, or nobody has told.
    """

    names: tuple[str, ...]
    param: nn.Parameter
    module_kinds: frozenset[str] = frozenset()
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
            shapes.get(names[key][0].rpartition(".")[0]),
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


@dataclass(frozen=True, slots=True)
class ModelNames:
    """What the names of a whole model's matrices tell about each of them; paths are without peft's wrappers.

    Attributes:
        expert_parents: Paths of the modules that hold a child called ``experts``: a ``gate`` beside it is a router.
        heads: Paths of the modules that hold the matrix of an output head.
    """

    expert_parents: frozenset[str]
    heads: frozenset[str]

    @classmethod
    def read(cls, matrices: Iterable[tuple[Sequence[str], tuple[int, ...]]]) -> ModelNames:
        """Read names and shape of every matrix, in the model's order; a shared one has several names."""
        parents: set[str] = set()
        heads: dict[str, str] = {}
        tied: set[str] = set()
        for names, shape in matrices:
            for name in names:
                path = _holder(name)
                parts = path.split(".")
                if "experts" in parts:
                    parents.add(".".join(parts[: parts.index("experts")]))
                container = _head_around(parts)
                # Of several matrices in a head ("classifier.dense", "classifier.out_proj") the last one that changes
                # the width makes the outputs, or the one that is tied to the embedding.
                square = path != container and shape[0] == shape[1]
                if container is not None and container not in tied and not square:
                    heads[container] = path
                    if len(names) > 1:
                        tied.add(container)
        return cls(frozenset(parents), frozenset(heads.values()))


def rule_by_name(name: str, model: ModelNames) -> tuple[Rule, str] | None:
    """Return the rule that sends a parameter of this name to AdamW, with its words; ``None`` if no rule does.

    Args:
        name: Dotted name.
        model: The names of the whole model.
    """
    lora_a = not _LORA_A.isdisjoint(name.lower().split("."))
    name = _looked_through(name)
    components = name.lower().split(".")
    holder = leaf_name(name)
    if name.rpartition(".")[2] in _NO_PRODUCT or holder.startswith(_RELATIVE_POSITIONS):
        return "no_product", f"not the weight of a product ({holder})"
    for position, component in enumerate(components):
        # "image_embed" may hold a whole encoder.
        if _names_an_embedding(component) and _named_below(_holder(name).split("."), position) <= 1:
            return "embedding", f"embedding by name ({component})"
    if _holder(name) in model.heads:
        return "head", f"output head by name ({holder})"
    parent = ".".join(name.split(".")[:-2])
    # A router may have several layers: "router.classifier.weight", "router_mlp.fc1.weight".
    for component in components:
        if "router" in component:
            return "router", f"MoE router by name ({component})"
    if holder in _ROUTER_COMPONENTS or (holder == "gate" and parent in model.expert_parents):
        return "router", f"MoE router by name ({holder})"
    # Of DeepSpeed's residual experts: it weighs the experts against the dense layer for each token.
    if holder == "coefficient" and ".".join((*name.split(".")[:-2], "deepspeed_moe")) in model.expert_parents:
        return "router", f"MoE router by name ({holder})"
    return ("adapter", "the half A of a LoRA adapter") if lora_a else None


def _looked_through(name: str) -> str:
    """Return the name without peft's wrappers: ``lm_head.lora_B.default.weight`` gives ``lm_head.weight``."""
    kept: list[str] = []
    parts = iter(name.split("."))
    for part in parts:
        if part.lower() in _WRAPPERS:
            adapter = next(parts, "")
            # A module of that name that is none of peft's has no adapter's name.
            kept += [adapter] * (adapter in ("weight", "bias"))
        elif part not in _BASES:
            kept.append(part)
    return ".".join(kept)


def _holder(name: str) -> str:
    """Return the path of the module that holds a parameter, or the parameter's own if it is no module's ``weight``."""
    name = _looked_through(name)
    path, _, last = name.rpartition(".")
    return path if path and last in ("weight", "bias") else name


def _head_around(parts: Sequence[str]) -> str | None:
    """Return the path of the output head that a module lies in, with at most one named module between."""
    for position, part in enumerate(parts):
        in_block = any(above.isdigit() for above in parts[:position])
        if _named_below(parts, position) <= 1 and _names_a_head(part.lower(), in_block):
            # A list of heads ("lm_heads.3.weight") has one for each codebook.
            return ".".join(parts[: position + (2 if part.lower() == "lm_heads" else 1)])
    return None


def _named_below(parts: Sequence[str], position: int) -> int:
    """Return how many modules of a path below a position have a name and no number."""
    return sum(not below.isdigit() for below in parts[position + 1 :])


def _names_a_head(component: str, in_block: bool) -> bool:
    if component in _HEAD_COMPONENTS:
        return True
    if in_block or component.startswith("pre"):
        return False
    return component in _TOP_LEVEL_HEAD_COMPONENTS or component.endswith(_TOP_LEVEL_HEAD_ENDINGS)


def _names_an_embedding(component: str) -> bool:
    # A projection of embeddings ("embeddings_project", "embedding_hidden_mapping_in") is a hidden matrix.
    if component in _HEAD_COMPONENTS or "proj" in component or "mapping" in component:
        return False
    return component in _EMBEDDING_COMPONENTS or "embed" in component or component.endswith("emb")


def matches(pattern: str, names: Iterable[str], key: str) -> bool:
    """Return whether a shell glob, or a regular expression after ``re:``, fits one of some dotted names.

    Args:
        pattern: What the user wrote.
        names: The dotted names.
        key: The key of ``optimizer.params`` that holds the pattern, for the error.

    Raises:
        RoutingError: If the text after ``re:`` is no regular expression.
    """
    if not pattern.startswith("re:"):
        return any(fnmatch.fnmatchcase(name, pattern) for name in names)
    try:
        return any(re.search(pattern[3:], name) for name in names)
    except re.error as error:
        raise RoutingError(
            f"optimizer.params.{key}: {pattern!r} is not a regular expression: {error}"
        ) from error
