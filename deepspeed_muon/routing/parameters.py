"""The parameters of a model with all their names, and all that its modules say about each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from deepspeed_muon.plan.layout import TensorShards
from deepspeed_muon.routing.ends import Places, end_claims
from deepspeed_muon.routing.evidence import Claim, Layer, NamedParameter
from deepspeed_muon.routing.experts import Mixtures
from deepspeed_muon.routing.layers import Layers, call_quietly
from deepspeed_muon.routing.names import bare_name, holder_path, known, plain_name
from deepspeed_muon.routing.shapes import attention_shapes, true_shape

__all__ = [
    "NamedParameter",
    "claims_by_place",
    "is_divided",
    "is_pipeline",
    "model_parameters_by_name",
    "pipeline_kinds",
]


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
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        params[id(param)] = param
    layers: dict[int, Layer] = {}
    claims: dict[int, list[Claim]] = {}
    reader = Layers()
    for path, module in model.named_modules():
        for param, layer, of_type in reader.read(path, module):
            # A weight that an embedding and a linear layer share is the embedding's.
            if id(param) not in layers or layer.kind == "embedding":
                layers[id(param)] = layer
            claims.setdefault(id(param), []).extend(of_type)
        for param, claim in _adapters(module):
            claims.setdefault(id(param), []).append(claim)
            if claim.reason == _OF_EXPERTS:
                layers[id(param)] = Layer("LoRA of experts")
        _mark_undecayed(module, claims)
    shapes = attention_shapes(model)
    members = [
        NamedParameter(
            tuple(names[key]),
            param,
            layers.get(key, Layer("bare")),
            tuple(claims.get(key, ())),
            shapes.get(names[key][0].rpartition(".")[0]),
            (shards or {}).get(key),
        )
        for key, param in params.items()
    ]
    pipeline = is_pipeline(model)
    by_place = claims_by_place(members, Places.read(model, whole=not pipeline))
    if pipeline:
        reasons = {
            "head": "output head of the model",
            # Each stage updates its own copy, and the copies must stay equal: only an elementwise update ensures that.
            "tied": "tied between the stages of a pipeline",
        }
        for kind, params_of_kind in pipeline_kinds(model).items():
            for param in params_of_kind:
                rule: Any = kind
                by_place.setdefault(id(param), []).append(Claim(rule, reasons[kind]))
    return {
        id(member.param): replace(member, claims=(*member.claims, *by_place.get(id(member.param), ())))
        for member in members
    }


def claims_by_place(members: Sequence[NamedParameter], places: Places) -> dict[int, list[Claim]]:
    """Return by ``id(parameter)`` the claims that follow from the names and shapes of all parameters together.

    Args:
        members: All parameters, in the model's order.
        places: What the modules say; empty if only names are known.
    """
    claims = end_claims(members, places)
    mixtures = Mixtures.read(members)
    for member in members:
        if len(member.whole_shape) < 2:
            continue
        claims_of_member = claims.setdefault(id(member.param), [])
        if (router := mixtures.router(member)) is not None:
            claims_of_member.append(router)
        claims_of_member += _by_name(member)
    return claims


def _by_name(member: NamedParameter) -> Iterator[Claim]:
    """Yield the claims of tables, biases and adapters, by their names."""
    for name in member.names:
        plain = plain_name(name)
        last = bare_name(name)
        holder = holder_path(name).rpartition(".")[2]
        if member.kind in (None, "bare", "experts") and last != "weight" and known(last, "no product"):
            yield Claim("no_product", f"not the weight of a product ({last.lower()})")
        # LayoutLM and T5 keep them in linear layers and embeddings.
        if table := next((part for part in (last, holder) if known(part, "relative positions")), None):
            yield Claim("no_product", f"not the weight of a product ({table.lower()})")
        if len(member.whole_shape) == 2 and known(plain.rpartition(".")[2], "bias"):
            yield Claim("bias", "biases")
        parts = [part for part in name.lower().split(".") if part not in ("weight", "bias", "default")]
        runs = [*parts, *(".".join(parts[i : i + 2]) for i in range(len(parts) - 1))]
        if any(known(run, "LoRA A") for run in runs):
            yield Claim("adapter", "the half A of a LoRA adapter")
        elif any(known(run, "adapter") for run in runs):
            yield Claim("adapter", "an adapter of another kind than LoRA")


_OF_EXPERTS = "LoRA of stacked experts, whose matrices alternate in one tensor"


def _adapters(module: nn.Module) -> Iterator[tuple[nn.Parameter, Claim]]:
    """Yield the weights of peft's adapters around a module, but for a plain LoRA's."""
    experts = getattr(module, "num_experts", 1)
    of_experts = isinstance(experts, int) and experts > 1  # target_parameters
    for name in getattr(module, "adapter_layer_names", ()):
        adapters = getattr(module, name, None)
        half = name in ("lora_A", "lora_B")
        if isinstance(adapters, nn.Module) and (of_experts or not half):
            reason = _OF_EXPERTS if half else "an adapter of another kind than LoRA"
            yield from ((param, Claim("adapter", reason)) for param in adapters.parameters())


def _mark_undecayed(module: nn.Module, claims: dict[int, list[Claim]]) -> None:
    """Claim the bare parameters that a model of timm names as those without weight decay."""
    names = call_quietly(module, "no_weight_decay")
    if not isinstance(names, (set, frozenset, list, tuple)):
        return
    for name, param in module.named_parameters():
        if name in names and not name.endswith(".weight"):
            claims.setdefault(id(param), []).append(
                Claim("no_product", "the model's no_weight_decay() names it")
            )


def is_pipeline(model: nn.Module) -> bool:
    """Return whether ``model`` is a ``deepspeed.pipe.PipelineModule``."""
    return all(hasattr(model, name) for name in ("forward_funcs", "tied_modules", "stage_id", "num_stages"))


def is_divided(model: Any) -> bool:
    """Return whether ``model`` is a pipeline of which each rank holds one of several stages."""
    return is_pipeline(model) and model.num_stages > 1


def pipeline_kinds(model: Any) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of this rank's stage that are its output ``head``, or ``tied`` between stages."""
    params_by_kind: dict[str, list[nn.Parameter]] = {
        "head": [],
        "tied": list(model.tied_modules.parameters()),
    }
    last = model.forward_funcs[-1] if model.forward_funcs else None
    if model.stage_id == model.num_stages - 1 and isinstance(last, nn.Module):
        matrices = [param for param in last.parameters() if len(true_shape(param)) > 1]
        # A transformer block has several matrices; a last layer with only one is the projection onto the outputs.
        if len(matrices) == 1:
            params_by_kind["head"] = matrices
    return params_by_kind
