"""Collects the parameters of a model with all their names, their layers and the claims on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from deepspeed_muon.errors import RoutingError
from deepspeed_muon.plan.layout import TensorShards
from deepspeed_muon.routing.algorithm import Structure, claims_of_model
from deepspeed_muon.routing.evidence import Claim, Layer, NamedParameter, read_layers
from deepspeed_muon.routing.shapes import AttentionShape, attention_shape, true_shape

# What Megatron and DeepSpeed's AutoTP set on the shards of tensor parallelism, also where one rank has all of a weight.
_SHARD_MARKS = ("tensor_model_parallel", "model_parallel")


def model_parameters_by_name(
    model: nn.Module, shards: Mapping[int, TensorShards] | None = None
) -> dict[int, NamedParameter]:
    """Return ``id(param)`` to :class:`NamedParameter`, in the order of ``model.named_parameters()``.

    Args:
        model: The module.
        shards: ``id(param)`` to the shards of each matrix that tensor parallelism cuts; ``None`` before an engine
            says which those are.
    """
    # 1. all names of every parameter
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        refuse_lazy((name,), param)
        names.setdefault(id(param), []).append(name)
        params[id(param)] = param
    # 2. what each module implies about its parameters
    pipeline = is_pipeline(model)
    # A list of modules alone has no order, and a stage of a pipeline does not have all layers.
    structure = Structure(is_ordered=not pipeline and not isinstance(model, (nn.ModuleList, nn.ModuleDict)))
    layers: dict[int, Layer] = {}
    attention_shapes: dict[str, AttentionShape | None] = {}
    claims: dict[int, list[Claim]] = {key: [] for key in params}
    for path, module in model.named_modules():  # parents before children
        structure.add(path, module)
        # The config of a vision tower differs from that of the language model beside it.
        attention_shapes[path] = attention_shape(module) or attention_shapes.get(path.rpartition(".")[0])
        for param, layer, layer_claims in read_layers(path, module):
            # A weight that an embedding and a linear layer share counts as the embedding's.
            if id(param) not in layers or layer.kind == "embedding":
                layers[id(param)] = layer
            claims[id(param)].extend(layer_claims)
        for param, claim in _adapters(module):
            claims[id(param)].append(claim)
            if claim.reason == _EXPERTS_LORA:
                layers[id(param)] = Layer("LoRA of experts")
    if pipeline:
        for param, claim in _pipeline_claims(model):
            claims[id(param)].append(claim)
    members = [
        NamedParameter(
            names=tuple(names[key]),
            param=param,
            layer=layers.get(key, Layer("bare")),
            claims=tuple(claims[key]),
            attention=attention_shapes.get(names[key][0].rpartition(".")[0]),  # by the path of its module
            shards=(shards or {}).get(key),
            awaits_shards=shards is None and any(getattr(param, mark, False) for mark in _SHARD_MARKS),
        )
        for key, param in params.items()
    ]
    # 3. what all of them imply together
    joint = claims_of_model(members, structure)
    return {member.key: replace(member, claims=(*member.claims, *joint[member.key])) for member in members}


def refuse_lazy(names: Sequence[str], param: nn.Parameter) -> None:
    """Raise for a parameter of a lazy module that has not run yet."""
    if is_lazy(param):
        raise RoutingError(
            f"parameter {', '.join(names) or '<unnamed>'} has no shape yet: run the model once, so that its lazy "
            f"modules make their weights, before the optimizer is made"
        )


_EXPERTS_LORA = "LoRA of stacked experts, whose matrices alternate in one tensor"


def _adapters(module: nn.Module) -> Iterator[tuple[nn.Parameter, Claim]]:
    """Yield the weights of peft's adapters in a module, except those of LoRA on a single matrix."""
    experts = getattr(module, "num_experts", 1)
    of_experts = isinstance(experts, int) and experts > 1  # peft's target_parameters
    for name in getattr(module, "adapter_layer_names", ()):
        adapters = getattr(module, name, None)
        # A and B of LoRA on a single matrix are hidden matrices themselves; all other adapters are AdamW's.
        half = name in ("lora_A", "lora_B")
        if isinstance(adapters, nn.Module) and (of_experts or not half):
            reason = _EXPERTS_LORA if half else "an adapter other than LoRA"
            yield from ((param, Claim("adapter", reason)) for param in adapters.parameters())


def is_pipeline(model: nn.Module) -> bool:
    """Return whether ``model`` is a ``deepspeed.pipe.PipelineModule``."""
    return all(hasattr(model, name) for name in ("forward_funcs", "tied_modules", "stage_id", "num_stages"))


def is_divided(model: Any) -> bool:
    """Return whether ``model`` is a pipeline with several stages, of which a rank has one."""
    return is_pipeline(model) and model.num_stages > 1


def _pipeline_claims(model: Any) -> Iterator[tuple[nn.Parameter, Claim]]:
    """Yield the parameters of this rank's stage of a pipeline that are the output head, or tied between stages."""
    # Each stage updates its own copy, and the copies must stay equal: only an elementwise update ensures that.
    for param in model.tied_modules.parameters():
        yield param, Claim("tied", "tied between the stages of a pipeline")
    last = model.forward_funcs[-1] if model.forward_funcs else None
    if model.stage_id == model.num_stages - 1 and isinstance(last, nn.Module):
        matrices = [param for param in last.parameters() if len(true_shape(param)) > 1]
        # A transformer block has several matrices; a last layer with only one is the projection onto the outputs.
        if len(matrices) == 1:
            yield matrices[0], Claim("head", "output head of the model")
