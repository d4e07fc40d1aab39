"""Which parameters Muon updates, which AdamW updates, and why.

The layer's *true* shape (:func:`true_shape`) and its names decide. For a parameter with several names all of them
count, so that a head that is tied to an embedding counts as the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.config.values import MatricesConfig
from deepspeed_muon.errors import ParameterTypeError, RoutingError
from deepspeed_muon.logs import warn
from deepspeed_muon.routing.parameters import ModelNames, NamedParameter, matches, rule_by_name
from deepspeed_muon.routing.route import (
    Algorithm,
    MatrixKind,
    Route,
    Rule,
)
from deepspeed_muon.routing.shapes import (
    cut_into_heads,
    leaf_name,
    share_of_blocks,
    split_output,
    true_shape,
)

_TRAINABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# The longest kernel. A longer last dimension is more likely the input width of stacked matrices.
_MAX_KERNEL = 64


def route_parameters(
    parameters: Sequence[NamedParameter],
    config: MuonConfig | None = None,
    *,
    explicit: Mapping[int, Algorithm] | None = None,
    partial: bool = False,
) -> list[Route]:
    """Decide the algorithm of every parameter.

    The first rule that applies decides: frozen; the caller's explicit choice; ``exclude``; ``include``; not a
    matrix; embedding; output head; MoE router; otherwise Muon.

    Args:
        parameters: The parameters of all groups, in order.
        config: The settings; only the name patterns count. ``None`` for the defaults.
        explicit: ``id(param)`` to the algorithm that the caller's own param group asks for.
        partial: Whether these are one stage of a pipeline. Then a pattern may match in another stage, and the caller
            that knows all stages calls :func:`check_routes`.

    Returns:
        One route per parameter, in the same order.

    Raises:
        RoutingError: If a pattern matches nothing, a parameter that shall go to Muon is no matrix, a weight does not
            divide as asked, a parameter cannot be trained, or fewer matrices than expected were found.
    """
    config = config or MuonConfig()
    for item in parameters:
        _refuse_untrainable(item)
    shapes = [(item.names, _whole_shape(item)) for item in parameters]
    model = ModelNames.read((names, shape) for names, shape in shapes if len(shape) > 1)
    routes = [_route(item, config, explicit or {}, model) for item in parameters]
    if not partial:
        check_routes([(item.names, route) for item, route in zip(parameters, routes, strict=True)], config)
    return routes


def check_routes(routed: Sequence[tuple[Sequence[str], Route]], config: MuonConfig) -> None:
    """Compare the names of all parameters of a whole model, and their routes, with the settings.

    Raises:
        RoutingError: If a pattern matches nothing, or no heads were found.
    """
    names = [name for own, _ in routed for name in own]
    muon = [name for own, route in routed if route.algorithm == "muon" for name in own]
    no_name = "matches no parameter name; names look like"
    for key, known, what in (
        ("matrices", muon, "matches no parameter that goes to Muon; their names look like"),
        ("include", names, no_name),
        ("exclude", names, no_name),
    ):
        for pattern in getattr(config, key):
            if not matches(pattern, known, key):
                raise RoutingError(f"optimizer.params.{key}: pattern {pattern!r} {what} {known[:3]}")
    by_config = [pattern for pattern, entry in config.matrices.items() if entry.heads == "config"]
    per_head = [name for own, route in routed if route.per_head for name in own]
    if by_config and not any(matches(pattern, per_head, "matrices") for pattern in by_config):
        raise RoutingError(
            "optimizer.params.matrices: 'heads' is 'config' and no attention projection was recognised, so no heads "
            "would be separate. They are found by name (q_proj, k_proj, v_proj and the like) with the head counts of "
            "the model's config (num_attention_heads, num_key_value_heads, head_dim; a client optimizer needs model=). "
            "A fused projection needs 'split' too. Otherwise write their number, or leave 'heads' out"
        )


def warn_without_muon(routes: Sequence[Route]) -> None:
    """Warn if no parameter of a whole model goes to Muon: right for training a head only, else a mistake."""
    if any(route.algorithm == "muon" for route in routes):
        return
    shapes = ", ".join(f"{route.name} {list(route.shape)} ({route.reason})" for route in routes[:5])
    warn(
        "deepspeed_muon: no parameter goes to Muon, so this is a plain AdamW run. The first of %d parameters: %s. "
        "Use 'include' patterns if that is not meant",
        len(routes),
        shapes,
    )


def _refuse_untrainable(item: NamedParameter) -> None:
    """Raise for a parameter that no step could update."""
    param = item.param
    if is_lazy(param):
        raise RoutingError(
            f"parameter {', '.join(item.names) or '<unnamed>'} has no shape yet: run the model once, so that its lazy "
            f"modules make their weights, before the optimizer is made"
        )
    if not param.requires_grad:
        return
    what = f"parameter {item.name} of shape {list(true_shape(param))}"
    if param.is_complex():
        raise ParameterTypeError(
            f"{what} is complex ({param.dtype}), which neither Muon nor AdamW updates here; keep it as a real "
            f"parameter and use torch.view_as_complex in forward, freeze it, or leave it to another optimizer"
        )
    data: Any = param.data
    if is_traceable_wrapper_subclass(data):
        kind = type(data).__name__
        raise ParameterTypeError(
            f"{what} is a {kind}, whose elements lie in other tensors, and only ordinary tensors can be trained here. "
            f"DeepSpeed's ZeRO and AutoTP divide ordinary parameters themselves: leave out fully_shard (FSDP2), "
            f"parallelize_module and the like"
        )
    if not param.is_complex() and param.dtype not in _TRAINABLE:
        raise ParameterTypeError(
            f"{what} is {param.dtype}, and only float32, float64, bfloat16 and float16 can be trained here; keep the "
            f"parameter in one of them and convert it in forward, freeze it, or leave it to another optimizer"
        )
    if param.layout != torch.strided:
        raise ParameterTypeError(
            f"{what} has the layout {param.layout}; only dense parameters can be trained here"
        )
    if not param.is_leaf and not param.retains_grad:
        raise RoutingError(
            f"{what} is computed from other tensors, not a leaf: it has no gradient of its own"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(param.shape, param.stride(), strict=True)):
        raise RoutingError(
            f"{what} is expanded (strides {param.stride()}): some of its elements share memory; pass a "
            f"contiguous copy"
        )


def _route(
    item: NamedParameter,
    config: MuonConfig,
    explicit: Mapping[int, Algorithm],
    model: ModelNames,
) -> Route:
    shape = true_shape(item.param)
    kind = _matrix_kind(item, shape)
    whole_shape = _whole_shape(item)
    algorithm, rule, reason = _decide(item, kind, whole_shape, config, explicit, model)
    if algorithm != "muon":
        return Route(item.name, shape, algorithm, reason, rule=rule)
    if kind is None:
        raise RoutingError(
            f"parameter {item.name} of shape {list(shape)} was sent to Muon ({reason}) but Muon orthogonalises "
            f"matrices, plain convolutions and stacked experts, none of them empty; remove it from the pattern or group"
        )
    asked = _asked(item, config)
    transposed = kind != "convolution" and (
        "transposed" in item.module_kinds if asked.transposed is None else asked.transposed
    )
    if kind == "experts":
        reason += f", {shape[0]} experts separately"
    parts, per_head, how = _divide(item, whole_shape, kind, transposed, asked)
    shards = item.shards
    if shards is not None:
        fused = asked.split is not None
        parts, shards = share_of_blocks(parts, shards, name=item.name, fused=fused, transposed=transposed)
        how += f", {len(shards.sizes)} tensor-parallel ranks"
    parts = parts if len(parts) > 1 else ()
    return Route(item.name, shape, algorithm, reason + how, parts, kind, transposed, per_head, rule, shards)


def _whole_shape(item: NamedParameter) -> tuple[int, ...]:
    """Return the shape of the layer's weight, also if this rank has a shard of it."""
    shape = list(true_shape(item.param))
    if item.shards is not None and item.shards.dim is not None:
        shape[item.shards.dim] = sum(item.shards.sizes)
    return tuple(shape)


def _divide(
    item: NamedParameter, shape: tuple[int, ...], kind: MatrixKind, transposed: bool, asked: MatricesConfig
) -> tuple[tuple[int, ...], bool, str]:
    """Return the sizes of the blocks along the output, whether heads are among them, and the words for the reason.

    All of them are those of the whole layer, of this ``shape``, also if this rank has a shard of it.
    """
    output = shape[-1] if transposed else shape[1] if kind == "experts" else shape[0]
    parts: tuple[int, ...] = (output,)
    how = ", stored as input x output" if transposed else ""
    if asked.split is not None:
        parts = split_output(
            asked.split,
            name=item.name,
            output=output,
            attention=item.attention,
            interleaved="interleaved" in item.module_kinds,
        )
        how += f", split into {' + '.join(map(str, parts))}"
    attention = item.attention if asked.heads == "config" and kind == "matrix" else None
    counts: int | Sequence[int] = (1,) * len(parts)
    if attention is not None:
        counts = attention.heads_of_parts(leaf_name(item.name), parts)
    elif isinstance(asked.heads, (int, list)):
        counts = asked.heads
    heads = cut_into_heads(parts, counts, name=item.name)
    per_head = max(heads) > 1
    if per_head:
        how += f", {' + '.join(map(str, heads))} heads separately"
    elif attention is not None:
        doubt = attention.doubt(leaf_name(item.name), output)
        how += "" if doubt is None else f", {doubt}"
    blocks = tuple(size // count for size, count in zip(parts, heads, strict=True) for _ in range(count))
    return blocks, per_head, how


def _asked(item: NamedParameter, config: MuonConfig) -> MatricesConfig:
    """Return what ``matrices`` says of a parameter, each of its keys by the first pattern that has it."""
    found: dict[str, Any] = {}
    for pattern, entry in config.matrices.items():
        if matches(pattern, item.names, "matrices"):
            found = {**entry.model_dump(exclude_none=True), **found}
    return MatricesConfig(**found)


def _chosen(item: NamedParameter, config: MuonConfig, key: str) -> str | None:
    """Return the first pattern of a key that matches the parameter, or ``None``."""
    return next((pattern for pattern in getattr(config, key) if matches(pattern, item.names, key)), None)


def _matrix_kind(item: NamedParameter, shape: tuple[int, ...]) -> MatrixKind | None:
    """Return how the parameter can be read as a matrix, or ``None`` if it cannot."""
    if len(shape) < 2 or min(shape) == 0:
        return None
    if len(shape) == 2:
        return None if "LoRA of experts" in item.module_kinds else "matrix"
    if "convolution" in item.module_kinds:
        return "convolution"
    # (experts, out, in), as Hugging Face's mixture-of-experts models keep them.
    in_experts = "experts" in item.module_kinds or any("experts" in name.split(".") for name in item.names)
    if len(shape) == 3 and in_experts:
        return "experts"
    return None


def _decide(
    item: NamedParameter,
    kind: MatrixKind | None,
    shape: tuple[int, ...],
    config: MuonConfig,
    explicit: Mapping[int, Algorithm],
    model: ModelNames,
) -> tuple[Algorithm, Rule, str]:
    """Return the algorithm, the first rule that applies, and its words."""
    if not item.param.requires_grad:
        return "frozen", "frozen", "requires_grad is False"
    if id(item.param) in explicit:
        return explicit[id(item.param)], "group", "the caller's param group says so"
    if (pattern := _chosen(item, config, "exclude")) is not None:
        return "adamw", "exclude", f"exclude pattern {pattern!r}"
    if (pattern := _chosen(item, config, "include")) is not None:
        return "muon", "include", f"include pattern {pattern!r}"
    if kind is None:
        if "LoRA of experts" in item.module_kinds:
            return "adamw", "adapter", "LoRA of stacked experts, whose matrices alternate in one tensor"
        for other in ("grouped convolution", "transposed convolution"):
            if other in item.module_kinds:
                return "adamw", "shape", f"filters of a {other}"
        what = {0: "a scalar", 1: "a vector", 2: "an empty matrix"}
        return "adamw", "shape", what.get(len(shape), f"{len(shape)}-dimensional, not a matrix")
    if 1 in (shape[1:] if kind == "experts" else (shape[0], math.prod(shape[1:]))):
        return "adamw", "shape", "a matrix with a side of 1, which is a vector"
    if "embedding" in item.module_kinds:
        return "adamw", "embedding", "weight of an embedding module"
    if "head" in item.module_kinds:
        return "adamw", "head", "output head of the model"
    if "tied" in item.module_kinds:
        # Each stage updates its own copy, and the copies must stay equal: only an elementwise update ensures that.
        return "adamw", "tied", "tied between the stages of a pipeline"
    # The biases of stacked experts are a matrix with a row for each expert.
    if kind == "matrix" and any(name.lower().endswith(("_bias", "_biases", ".bias")) for name in item.names):
        return "adamw", "bias", "biases"
    for name in item.names:
        found = rule_by_name(name, model)
        if found:
            return "adamw", *found
    if "adapter" in item.module_kinds:
        return "adamw", "adapter", "an adapter of another kind than LoRA"
    words = {
        "matrix": "hidden matrix",
        "convolution": "filters of a convolution",
        "experts": "hidden matrices",
    }
    return "muon", "hidden", words[kind]


def convolution_kind(name: str, shape: Sequence[int], shapes: Mapping[str, Sequence[int]]) -> str | None:
    """Guess the kind of convolution whose filters a parameter is; ``None`` if it seems to be no filters.

    Args:
        name: Dotted name.
        shape: Its shape.
        shapes: Shapes of all parameters, among them the bias beside it.

    Returns:
        A kind of :class:`~deepspeed_muon.routing.parameters.NamedParameter`. Plain filters may be those of a grouped
        convolution with wide groups, and one input may be that of a plain one: shapes do not tell.
    """
    parts = name.split(".")
    if len(shape) not in (3, 4, 5) or parts[-1] != "weight" or "experts" in parts or shape[-1] > _MAX_KERNEL:
        return None
    bias = shapes.get(".".join((*parts[:-1], "bias")))
    if bias is not None and tuple(bias) == (shape[1],) != (shape[0],):
        return "transposed convolution"
    return "grouped convolution" if shape[1] == 1 < shape[0] else "convolution"


def route_saved(
    shapes: Mapping[str, Sequence[int]],
    aliases: Mapping[str, Iterable[str]],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> dict[str, Route]:
    """Route the parameters of a checkpoint as training would, as far as its files tell.

    Training routes parameters by names, shapes and types of modules. Files know no modules, so shapes and biases must
    tell which parameters are filters of convolutions.

    Args:
        shapes: Name of every trained parameter to its shape, in order.
        aliases: Name to further names of the same parameter.
        include: Patterns of names that go to Muon: filters among them are taken for plain ones, stacks for experts.
        exclude: Patterns of names that stay with AdamW.

    Raises:
        RoutingError: If a pattern matches nothing, or Muon is asked for something that is no matrix.
    """
    kinds = {name: convolution_kind(name, shape, shapes) for name, shape in shapes.items()}
    members = [
        NamedParameter(
            (name, *aliases.get(name, ())),
            torch.nn.Parameter(torch.empty(tuple(shape), device="meta")),
            frozenset(("convolution",) if kinds[name] else ("experts",) if len(shape) == 3 else ()),
        )
        for name, shape in shapes.items()
    ]
    found = {}
    for route in route_parameters(members, MuonConfig(include=tuple(include), exclude=tuple(exclude))):
        kind = kinds[route.name]
        # Where the caller's patterns name a parameter, they decide.
        if route.rule == "hidden" and route.kind == "convolution" and kind != "convolution":
            # A plain convolution can have a single input channel, too.
            rule: Rule = "unsure" if kind == "grouped convolution" else "shape"
            route = Route(route.name, route.shape, "adamw", f"filters of a {kind}", rule=rule)
        elif route.rule == "hidden" and route.kind == "experts" and "experts" not in route.name.split("."):
            reason = "3-dimensional, no experts by name"
            route = Route(route.name, route.shape, "adamw", reason, rule="unsure")
        found[route.name] = route
    return found
