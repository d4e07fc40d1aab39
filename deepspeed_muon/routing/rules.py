"""Which parameters Muon updates, which AdamW updates, and why.

A setting of the caller decides first, then the layer's *true* shape (:func:`true_shape`), then what its module is,
where it stands in the model, and only then its name. For a parameter with several names all of them count, so that a
head that is tied to an embedding counts as the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.config.values import MatricesConfig
from deepspeed_muon.errors import RoutingError
from deepspeed_muon.logs import warn
from deepspeed_muon.routing.ends import Places
from deepspeed_muon.routing.evidence import Claim, NamedParameter
from deepspeed_muon.routing.names import bare_name, known, matches, plain_name
from deepspeed_muon.routing.parameters import claims_by_place
from deepspeed_muon.routing.route import Algorithm, MatrixKind, Route, Rule, rows_of
from deepspeed_muon.routing.shapes import (
    cut_into_heads,
    leaf_name,
    share_of_blocks,
    split_output,
    true_shape,
)

_FILTERS = ("convolution", "grouped convolution", "transposed convolution")
# A matrix of AdamW is worth a warning from so many elements on, if only a guess sends it there.
_LARGE = 65_536
_TRAINABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def route_parameters(
    parameters: Sequence[NamedParameter],
    config: MuonConfig | None = None,
    *,
    explicit: Mapping[int, Algorithm] | None = None,
    partial: bool = False,
) -> list[Route]:
    """Decide the algorithm of every parameter.

    The first rule that applies decides: frozen; the caller's explicit choice; ``exclude``; ``include``; not a
    matrix; what claims it for AdamW (norm, embedding, output head, ...); otherwise Muon.

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
    if any(item.layer is None for item in parameters):
        by_name = claims_by_place(parameters, Places())
        parameters = [
            item if item.layer is not None else replace(item, claims=tuple(by_name.get(id(item.param), ())))
            for item in parameters
        ]
    routes = [_route(item, config, explicit or {}) for item in parameters]
    if not partial:
        check_routes([(item.names, route) for item, route in zip(parameters, routes, strict=True)], config)
    return routes


def check_routes(routed: Sequence[tuple[Sequence[str], Route]], config: MuonConfig) -> None:
    """Compare the names of all parameters of a whole model, and their routes, with the settings.

    Raises:
        RoutingError: If a pattern matches nothing, or no heads were found.
    """
    names = [name for parameter_names, _ in routed for name in parameter_names]
    muon = [
        name for parameter_names, route in routed if route.algorithm == "muon" for name in parameter_names
    ]
    no_name = "matches no parameter name; names look like"
    for key, candidates, what in (
        ("matrices", muon, "matches no parameter that goes to Muon; their names look like"),
        ("include", names, no_name),
        ("exclude", names, no_name),
    ):
        for pattern in getattr(config, key):
            if not matches(pattern, candidates, key):
                raise RoutingError(f"optimizer.params.{key}: pattern {pattern!r} {what} {candidates[:3]}")
    by_config = [pattern for pattern, entry in config.matrices.items() if entry.heads == "config"]
    per_head = [name for parameter_names, route in routed if route.per_head for name in parameter_names]
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


def warn_of_large_guesses(routes: Sequence[Route]) -> None:
    """Warn of large matrices that go to AdamW because of a guess."""
    large = [
        route
        for route in routes
        if route.algorithm == "adamw"
        and not route.certain
        and route.numel >= _LARGE
        and min(route.shape[-2:]) >= 16
        and route.rule in ("shape", "no_product")
    ]
    if not large:
        return
    rows = rows_of(large)
    shown = "; ".join(f"{row['name']} {row['shape']} ({row['reason']})" for row in rows[:5])
    warn(
        "deepspeed_muon: %s of many elements to AdamW because of a guess: %s%s. Name them in 'include' if they are "
        "matrices (of three dimensions: stacks of them), in 'exclude' if not",
        f"{len(large)} parameters go" if len(large) > 1 else "a parameter goes",
        shown,
        "; ..." if len(rows) > 5 else "",
    )


def _refuse_untrainable(item: NamedParameter) -> None:
    """Raise for a parameter that no step could update."""
    param = item.param
    if is_lazy(param):
        raise RoutingError(
            f"parameter {', '.join(item.names) or '<unnamed>'} has no shape yet: run the model once, so that its lazy "
            f"modules make their weights, before the optimizer is made"
        )
    if item.is_frozen:
        return
    what = f"parameter {item.name} of shape {list(true_shape(param))}"
    if param.is_complex():
        raise RoutingError(
            f"{what} is complex ({param.dtype}), which neither Muon nor AdamW updates here; keep it as a real "
            f"parameter and use torch.view_as_complex in forward, freeze it, or leave it to another optimizer"
        )
    kind = type(param.data).__name__
    is_wrapper: bool = is_traceable_wrapper_subclass(param.data)
    if is_wrapper:
        raise RoutingError(
            f"{what} is a {kind}, whose elements lie in other tensors, and only ordinary tensors can be trained here. "
            f"DeepSpeed's ZeRO and AutoTP divide ordinary parameters themselves: leave out fully_shard (FSDP2), "
            f"parallelize_module and the like"
        )
    if not param.is_complex() and param.dtype not in _TRAINABLE:
        raise RoutingError(
            f"{what} is {param.dtype}, and only float32, float64, bfloat16 and float16 can be trained here; keep the "
            f"parameter in one of them and convert it in forward, freeze it, or leave it to another optimizer"
        )
    if param.layout != torch.strided:
        raise RoutingError(f"{what} has the layout {param.layout}; only dense parameters can be trained here")
    if not param.is_leaf and not param.retains_grad:
        raise RoutingError(
            f"{what} is computed from other tensors, not a leaf: it has no gradient of its own"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(param.shape, param.stride(), strict=True)):
        raise RoutingError(
            f"{what} is expanded (strides {param.stride()}): some of its elements share memory; pass a "
            f"contiguous copy"
        )


def _route(item: NamedParameter, config: MuonConfig, explicit: Mapping[int, Algorithm]) -> Route:
    shape = true_shape(item.param)
    asked = _asked(item, config)
    says_matrix = (
        explicit.get(id(item.param)) == "muon"
        or _chosen(item, config, "include") is not None
        or asked.split is not None
        or asked.transposed is not None
        or isinstance(asked.heads, (int, list))
    )
    kind = _matrix_kind(item, shape, asked=says_matrix)
    algorithm, claim = _decide(item, kind, config, explicit)
    if algorithm != "muon":
        return Route(item.name, shape, algorithm, claim.reason, rule=claim.rule, certain=claim.certain)
    if kind is None:
        raise RoutingError(_no_matrix_message(item, shape, claim.reason))
    transposed = kind != "convolution" and bool(
        (item.layer.transposed if item.layer is not None else None)
        if asked.transposed is None
        else asked.transposed
    )
    reason = claim.reason
    stack = item.layer.stack if len(shape) == 2 and item.layer is not None else 0
    experts = (stack or math.prod(shape[:-2])) if kind == "experts" else 1
    if kind == "experts":
        reason += f", {experts} {'experts' if _is_experts(item) else 'matrices'} separately"
    if stack and item.shards is not None:
        raise RoutingError(
            f"parameter {item.name} of shape {list(shape)} holds {stack} experts one below the other and is cut over "
            f"tensor-parallel ranks, so that no rank has whole rows of each; exclude it"
        )
    parts, per_head, how = _divide(item, kind, experts, transposed, asked)
    shards = item.shards
    if shards is not None:
        fused = asked.split is not None
        parts, shards = share_of_blocks(parts, shards, name=item.name, fused=fused, transposed=transposed)
        how += f", {len(shards.sizes)} tensor-parallel ranks"
    parts = parts if len(parts) > 1 else ()
    return Route(
        item.name,
        shape,
        algorithm,
        reason + how,
        parts,
        kind,
        transposed,
        per_head,
        claim.rule,
        shards,
        claim.certain,
        stack,
    )


def _no_matrix_message(item: NamedParameter, shape: tuple[int, ...], reason: str) -> str:
    text = f"parameter {item.name} of shape {list(shape)} was sent to Muon ({reason}) but "
    if item.layer is None and len(shape) > 2 and min(shape) > 0:
        return (
            f"{text}nothing says whether it holds the filters of a convolution or a stack of matrices, or whether the "
            f"convolution is in groups: pass the model, as deepspeed_muon.Muon(groups, model=model)"
        )
    return (
        f"{text}Muon orthogonalises matrices, plain convolutions and stacks of matrices, none of them empty; remove it "
        f"from the pattern or group"
    )


def _divide(
    item: NamedParameter, kind: MatrixKind, experts: int, transposed: bool, asked: MatricesConfig
) -> tuple[tuple[int, ...], bool, str]:
    """Return the sizes of the blocks along the output, whether heads are among them, and the words for the reason.

    All of them are those of the whole layer, also if this rank has a shard of it.
    """
    shape = item.whole_shape
    rows = math.prod(shape[:-1]) // experts if kind == "experts" else shape[0]
    output = shape[-1] if transposed else rows
    parts: tuple[int, ...] = (output,)
    how = ", stored as input x output" if transposed else ""
    if asked.split is not None:
        parts = split_output(
            asked.split,
            name=item.name,
            output=output,
            attention=item.attention,
            interleaved=item.layer is not None and item.layer.interleaved,
        )
        how += f", split into {' + '.join(map(str, parts))}"
    attention = item.attention if asked.heads == "config" and kind == "matrix" else None
    counts: int | Sequence[int] = (1,) * len(parts)
    if attention is not None:
        counts = attention.heads_of_parts(leaf_name(plain_name(item.name)), parts)
    elif isinstance(asked.heads, (int, list)):
        counts = asked.heads
    heads = cut_into_heads(parts, counts, name=item.name)
    per_head = max(heads) > 1
    if per_head:
        how += f", {' + '.join(map(str, heads))} heads separately"
    elif attention is not None:
        doubt = attention.doubt(leaf_name(plain_name(item.name)), output)
        how += "" if doubt is None else f", {doubt}"
    blocks = tuple(size // count for size, count in zip(parts, heads, strict=True) for _ in range(count))
    return blocks, per_head, how


def _asked(item: NamedParameter, config: MuonConfig) -> MatricesConfig:
    """Return what ``matrices`` says of a parameter, each of its keys by the first pattern that has it."""
    entries: dict[str, Any] = {}
    for pattern, entry in config.matrices.items():
        if matches(pattern, item.names, "matrices"):
            entries = {**entry.model_dump(exclude_none=True), **entries}
    return MatricesConfig(**entries)


def _chosen(item: NamedParameter, config: MuonConfig, key: str) -> str | None:
    """Return the first pattern of a key that matches the parameter, or ``None``."""
    return next((pattern for pattern in getattr(config, key) if matches(pattern, item.names, key)), None)


def _matrix_kind(item: NamedParameter, shape: tuple[int, ...], *, asked: bool) -> MatrixKind | None:
    """Return how the parameter can be read as a matrix, or ``None`` if it cannot.

    Args:
        item: The parameter.
        shape: Its shape.
        asked: Whether a setting sends it to Muon. Then a stack of matrices needs no experts by name.
    """
    if len(shape) < 2 or min(shape) == 0 or item.kind == "LoRA of experts":
        return None
    if len(shape) == 2:
        return "experts" if item.layer is not None and item.layer.stack else "matrix"
    if item.kind == "convolution":
        return "convolution"
    if len(shape) == 3 and item.kind not in _FILTERS and _is_experts(item):
        return "experts"
    # Without the module, "weight" of a stack and of a convolution look alike.
    is_stack = item.kind in ("weight", "bare", "experts", "linear") or (
        item.layer is None and item.names and not any(name.endswith("weight") for name in item.names)
    )
    return "experts" if asked and is_stack else None


def _is_experts(item: NamedParameter) -> bool:
    """Return whether a stack is one of experts: (experts, out, in), as mixture-of-experts models keep them."""
    return item.kind == "experts" or any("experts" in plain_name(name).split(".") for name in item.names)


# The rules that claim a parameter, the first first. A hidden matrix is what none of the others claims.
_ORDER: tuple[Rule, ...] = (
    "norm",
    "embedding",
    "head",
    "tied",
    "bias",
    "no_product",
    "router",
    "input",
    "adapter",
    "hidden",
)
_WORDS = {"matrix": "hidden matrix", "convolution": "filters of a convolution", "experts": "hidden matrices"}


def _decide(
    item: NamedParameter,
    kind: MatrixKind | None,
    config: MuonConfig,
    explicit: Mapping[int, Algorithm],
) -> tuple[Algorithm, Claim]:
    """Return the algorithm and the first rule that applies."""
    if item.is_frozen:
        return "frozen", Claim("frozen", "requires_grad is False")
    if id(item.param) in explicit:
        return explicit[id(item.param)], Claim("group", "the caller's param group says so")
    if (pattern := _chosen(item, config, "exclude")) is not None:
        return "adamw", Claim("exclude", f"exclude pattern {pattern!r}")
    if (pattern := _chosen(item, config, "include")) is not None:
        return "muon", Claim("include", f"include pattern {pattern!r}")
    if (
        kind == "experts"
        and len(item.whole_shape) > 2
        and not _is_experts(item)
        and 1 not in item.whole_shape
    ):
        return "muon", Claim("include", "a pattern of matrices says so")
    shape = item.whole_shape
    if kind is None:
        return "adamw", _no_matrix(item, shape)
    if 1 in (shape[-2:] if kind == "experts" else (shape[0], math.prod(shape[1:]))):
        return "adamw", Claim("shape", "a matrix with a side of 1, which is a vector")
    claims = sorted(item.claims, key=lambda claim: _ORDER.index(claim.rule))
    if claims and claims[0].rule != "hidden":
        return "adamw", claims[0]
    if claims:
        return "muon", claims[0]
    if len(shape) == 2 and item.names and item.kind in (None, "bare", "experts"):
        claim = _bare_matrix(item)
        return ("muon" if claim.rule == "hidden" else "adamw"), claim
    if item.layer is None:
        return "muon", Claim(
            "hidden", _WORDS[kind] + (" by name" if item.names else " by shape"), certain=False
        )
    if kind == "matrix" and item.kind == "weight" and not item.layer.product:
        return "muon", Claim("hidden", "hidden matrix, by the name weight alone", certain=False)
    return "muon", Claim("hidden", _WORDS[kind])


def _no_matrix(item: NamedParameter, shape: tuple[int, ...]) -> Claim:
    """Return the claim of a parameter that Muon cannot orthogonalise as it is."""
    if item.kind == "LoRA of experts":
        return Claim("adapter", "LoRA of stacked experts, whose matrices alternate in one tensor")
    if item.kind in _FILTERS and item.kind != "convolution":
        return Claim("shape", f"filters of a {item.kind}")
    words = {0: "a scalar", 1: "a vector", 2: "an empty matrix"}
    if len(shape) < 3 or min(shape) == 0:
        return Claim("shape", words.get(len(shape), "an empty tensor"))
    claims = sorted(item.claims, key=lambda claim: _ORDER.index(claim.rule))
    reason = f"{len(shape)}-dimensional, not a matrix"
    # A table that is broadcast over a batch, for one, has a first dimension of 1.
    is_no_stack = 1 in shape or any(known(bare_name(name), "bias") for name in item.names)
    if claims and claims[0].rule != "hidden" and (claims[0].certain or not is_no_stack):
        return claims[0]
    if is_no_stack:
        return Claim("shape", reason)
    return Claim("shape", f"{reason} unless 'include' or 'matrices' says so", certain=False)


def _bare_matrix(item: NamedParameter) -> Claim:
    """Return the claim of a 2-dimensional parameter that is no layer's ``weight``: a table, unless something says more.

    Without the module, the name of a parameter shows that much.
    """
    if item.layer is not None and item.layer.product:
        return Claim("hidden", f"hidden matrix: {item.layer.product}")
    if item.layer is None and any(name.rpartition(".")[2] == "weight" for name in item.names):
        return Claim("hidden", "hidden matrix by name", certain=False)
    last = next((bare_name(name) for name in item.names), "")
    if any(known(part, "LoRA B") for part in item.names[0].lower().split(".")):
        return Claim("hidden", "the half B of a LoRA adapter")
    if any("experts" in plain_name(name).split(".") for name in item.names):
        reason = "perhaps several experts in one matrix; how many is not known"
        return Claim("no_product", reason, certain=False)
    if known(last, "weight"):
        return Claim("hidden", f"hidden matrix by name ({last})", certain=False)
    return Claim(
        "no_product", "a bare parameter, and nothing says that it multiplies activations", certain=False
    )
