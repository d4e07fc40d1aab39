"""Makes the route of every parameter, checks the settings against all routes, and warns of guesses.

A setting of the caller decides between Muon and AdamW first, else :mod:`deepspeed_muon.routing.algorithm`. Shapes are
those before ZeRO 3 partitions a weight (:func:`true_shape`). All names of a parameter count, so that a head that is
tied to an embedding counts as the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.config.values import MatricesConfig
from deepspeed_muon.errors import RoutingError
from deepspeed_muon.logs import warn
from deepspeed_muon.routing.algorithm import PERHAPS_HEAD, Structure, claims_of_model, decide
from deepspeed_muon.routing.evidence import Claim, NamedParameter
from deepspeed_muon.routing.names import matches, plain_name
from deepspeed_muon.routing.parameters import refuse_lazy
from deepspeed_muon.routing.route import Algorithm, MatrixKind, Route, rows_of
from deepspeed_muon.routing.shapes import check_heads, leaf_name, shard_blocks, split_output, true_shape

# The user is warned of weights with at least this many elements whose algorithm is a guess.
_LARGE = 65_536
_DEFAULTS = MuonConfig()
_TRAINABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def route_parameters(
    parameters: Sequence[NamedParameter],
    config: MuonConfig | None = None,
    *,
    explicit: Mapping[int, Algorithm] | None = None,
    partial: bool = False,
) -> list[Route]:
    """Decide the algorithm of every parameter.

    The first rule that applies decides: frozen; the caller's explicit choice; ``exclude``; ``include``; not a matrix; a
    claim for AdamW (norm, embedding, output head, ...); otherwise Muon. For the arguments see
    :func:`routes_if_trained`.

    Returns:
        One route per parameter, in the same order.
    """
    routes = routes_if_trained(parameters, config, explicit=explicit, partial=partial)
    return [current_route(member, route) for member, route in zip(parameters, routes, strict=True)]


def routes_if_trained(
    parameters: Sequence[NamedParameter],
    config: MuonConfig | None = None,
    *,
    explicit: Mapping[int, Algorithm] | None = None,
    partial: bool = False,
    unrouted: Sequence[str] = (),
) -> list[Route | None]:
    """Decide the algorithm of every parameter as if none were frozen.

    Args:
        parameters: The parameters of all groups, in order.
        config: The settings; only the name patterns count. ``None`` for the defaults.
        explicit: ``id(param)`` to the algorithm that the caller's param group sets.
        partial: Whether these are the parameters of one pipeline stage. Then a pattern may match in another stage, and
            :func:`check_routes` is left to the caller, with the routes of all stages.
        unrouted: Names of the model's parameters that are in no group, which patterns may match.

    Returns:
        One route per parameter, in the same order; ``None`` for frozen ones that cannot be trained.

    Raises:
        RoutingError: If a pattern matches nothing, no attention heads were found, or a parameter that is not frozen
            goes to Muon and is not a matrix, does not divide as the settings say, or cannot be trained.
    """
    config = config or _DEFAULTS
    for member in parameters:
        refuse_lazy(member.names, member.param)
    # Parameters without modules have only the claims of names and shapes.
    if any(member.layer is None for member in parameters):
        by_name = claims_of_model(parameters, Structure())
        parameters = [
            member
            if member.layer is not None
            else replace(member, claims=tuple(by_name.get(id(member.param), ())))
            for member in parameters
        ]
    routes: list[Route | None] = []
    for member in parameters:
        try:
            _refuse_untrainable(member)
            routes.append(_route(member, config, explicit or {}))
        except RoutingError:
            if member.param.requires_grad:
                raise
            routes.append(None)
    # Head counts and sections of a tensor-parallel shard are checked once an engine says how it is cut.
    routed = [(m, route) for m, route in zip(parameters, routes, strict=True) if route is not None]
    if not partial and not any(m.awaits_shards for m, route in routed if route.algorithm == "muon"):
        frozen = [name for member in parameters if not member.param.requires_grad for name in member.names]
        check_routes([(m.names, route) for m, route in routed], config, frozen=(*frozen, *unrouted))
    return routes


def current_route(member: NamedParameter, if_trained: Route | None) -> Route:
    """Return the route of a parameter, which depends on whether it is frozen now.

    Args:
        member: The parameter.
        if_trained: Its route if it were trained; ``None`` if it cannot be.

    Raises:
        RoutingError: If it was unfrozen and cannot be trained.
    """
    shape = true_shape(member.param)
    if not member.param.requires_grad:
        return Route(member.name, shape, "frozen", "requires_grad is False", rule="frozen")
    if if_trained is None:
        raise RoutingError(
            f"parameter {member.name} of shape {list(shape)} was unfrozen after the optimizer was made, and could not "
            f"be routed then; make a new optimizer"
        )
    return if_trained


def check_routes(
    routed: Sequence[tuple[Sequence[str], Route]], config: MuonConfig, *, frozen: Sequence[str] = ()
) -> None:
    """Check the settings against the names and routes of all parameters of a complete model.

    A pattern may match only parameters that are ``frozen`` or in no group.

    Raises:
        RoutingError: If a pattern matches nothing, or no heads were found.
    """
    names = [*(name for parameter_names, _ in routed for name in parameter_names), *frozen]
    muon = [n for param_names, route in routed if route.algorithm == "muon" for n in param_names] + [*frozen]
    no_name = "matches no parameter name; names look like"
    for key, candidates, problem in (
        ("matrices", muon, "matches no parameter that goes to Muon; their names look like"),
        ("include", names, no_name),
        ("exclude", names, no_name),
    ):
        for pattern in getattr(config, key):
            if not matches(pattern, candidates, key):
                raise RoutingError(f"optimizer.params.{key}: pattern {pattern!r} {problem} {candidates[:3]}")
    # A "heads": "config" that divides no weight is a mistake that would otherwise go unnoticed.
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
    """Warn if Muon updates no parameter of a complete model: a mistake, unless only a head is trained."""
    if any(route.algorithm == "muon" for route in routes):
        return
    shapes = ", ".join(f"{route.name} {list(route.shape)} ({route.reason})" for route in routes[:5])
    is_flat = all(len(route.shape) < 2 for route in routes)
    warn(
        "deepspeed_muon: no parameter goes to Muon, so this is a plain AdamW run. The first of %d parameters: %s. %s",
        len(routes),
        shapes,
        "None has two dimensions. FSDP flattens weights, and Muon needs matrices: use DDP or DeepSpeed in its place"
        if is_flat
        else "Use 'include' patterns if that is not meant",
    )


def warn_of_large_guesses(routes: Sequence[Route]) -> None:
    """Warn of large weights whose algorithm is a guess, and of weights of Muon that may be heads; the largest first."""
    guesses = [route for route in routes if not route.certain]
    rows = rows_of([r for r in guesses if r.numel >= _LARGE or r.reason.startswith(PERHAPS_HEAD)])
    if not rows:
        return
    rows.sort(key=lambda row: row["elements"], reverse=True)
    shown = "; ".join(
        f"{row['name']} {row['shape']} to {'Muon' if row['algorithm'] == 'muon' else 'AdamW'} ({row['reason']})"
        for row in rows[:5]
    )
    warn(
        "deepspeed_muon: the algorithm of %s is a guess: %s%s. Name those that Muon should train in 'include', the "
        "others in 'exclude'",
        "a weight" if sum(row["tensors"] for row in rows) == 1 else "weights",
        shown,
        "; ..." if len(rows) > 5 else "",
    )


def _refuse_untrainable(member: NamedParameter) -> None:
    """Raise for a parameter that no step could update."""
    param = member.param
    text = f"parameter {member.name} of shape {list(true_shape(param))}"
    if param.is_complex():
        raise RoutingError(
            f"{text} is complex ({param.dtype}), which neither Muon nor AdamW updates here; keep it as a real "
            f"parameter and use torch.view_as_complex in forward, freeze it, or leave it to another optimizer"
        )
    kind = type(param.data).__name__
    is_wrapper: bool = is_traceable_wrapper_subclass(param.data)
    if is_wrapper:
        raise RoutingError(
            f"{text} is a {kind}, whose elements lie in other tensors, and only ordinary tensors can be trained here. "
            f"DeepSpeed's ZeRO and AutoTP divide ordinary parameters themselves: leave out fully_shard (FSDP2), "
            f"parallelize_module and the like"
        )
    if param.dtype not in _TRAINABLE:
        raise RoutingError(
            f"{text} is {param.dtype}, and only float32, float64, bfloat16 and float16 can be trained here; keep the "
            f"parameter in one of them and convert it in forward, freeze it, or leave it to another optimizer"
        )
    if param.layout != torch.strided:
        raise RoutingError(f"{text} has the layout {param.layout}; only dense parameters can be trained here")
    if param.is_inference():
        raise RoutingError(f"{text} was made in inference mode, so that it never requires a gradient")
    if not param.is_leaf and not param.retains_grad:
        raise RoutingError(
            f"{text} is computed from other tensors, not a leaf: it has no gradient of its own"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(param.shape, param.stride(), strict=True)):
        raise RoutingError(
            f"{text} is expanded (strides {param.stride()}): some of its elements share memory; pass a "
            f"contiguous copy"
        )


def _route(member: NamedParameter, config: MuonConfig, explicit: Mapping[int, Algorithm]) -> Route:
    shape = true_shape(member.param)
    # 1. Which algorithm?
    # If several patterns of "matrices" match, the first one with a key decides that key.
    entries: dict[str, Any] = {}
    for pattern, entry in config.matrices.items():
        if matches(pattern, member.names, "matrices"):
            entries = {**entry.model_dump(exclude_none=True), **entries}
    settings = MatricesConfig(**entries)
    # A setting that asks for Muon makes a 3-dimensional weight a stack of matrices (_matrix_kind). "heads": "config" is
    # not one, as it is meant for broad patterns such as "*".
    is_set_to_muon = (
        explicit.get(id(member.param)) == "muon"
        or _matching_pattern(member, config, "include") is not None
        or settings.split is not None
        or settings.transposed is not None
        or isinstance(settings.heads, (int, list))
    )
    kind = _matrix_kind(member, shape, is_set_to_muon=is_set_to_muon)
    algorithm, claim = _choose_algorithm(member, kind, config, explicit)
    if algorithm != "muon":
        return Route(member.name, shape, algorithm, claim.reason, rule=claim.rule, certain=claim.certain)
    if kind is None:
        remedy = "remove it from the pattern or group"
        if member.layer is None and len(shape) > 2:
            remedy = "if it is the weight of a convolution, pass the model, as deepspeed_muon.Muon(groups, model=model)"
        raise RoutingError(
            f"parameter {member.name} of shape {list(shape)} was sent to Muon ({claim.reason}) but Muon orthogonalises "
            f"matrices, plain convolutions and stacks of matrices, none of them empty; {remedy}"
        )
    # 2. How is it stored?
    transposed = kind != "convolution" and bool(
        (member.layer.transposed if member.layer is not None else None)
        if settings.transposed is None
        else settings.transposed
    )
    reason = claim.reason
    # The weight of stacked experts is (experts, rows, cols), or 2-dimensional: (experts * rows, cols).
    stack = member.layer.stack if len(shape) == 2 and member.layer is not None else 0
    experts = (stack or math.prod(shape[:-2])) if kind == "experts" else 1
    if kind == "experts":
        reason += f", {experts} {'experts' if _is_experts(member) else 'matrices'} separately"
    if stack and member.shards is not None:
        raise RoutingError(
            f"parameter {member.name} of shape {list(shape)} stacks {stack} experts along dimension 0 and is sharded "
            f"over tensor-parallel ranks, so that no rank has complete rows of every expert: send it to AdamW with "
            f"optimizer.params.exclude"
        )
    # 3. Into which blocks does it divide, in the unsharded layer and in this rank's shard?
    blocks, per_head, description = _output_blocks(member, kind, experts, transposed, settings)
    shards = member.shards
    if shards is not None:
        fused = settings.split is not None
        blocks, shards = shard_blocks(blocks, shards, name=member.name, fused=fused, transposed=transposed)
        description += f", {len(shards.sizes)} tensor-parallel ranks"
    blocks = blocks if len(blocks) > 1 else ()
    return Route(
        member.name,
        shape,
        algorithm,
        reason + description,
        output_blocks=blocks,
        kind=kind,
        transposed=transposed,
        per_head=per_head,
        rule=claim.rule,
        shards=shards,
        certain=claim.certain,
        stack=stack,
    )


def _output_blocks(
    member: NamedParameter, kind: MatrixKind, experts: int, transposed: bool, settings: MatricesConfig
) -> tuple[tuple[int, ...], bool, str]:
    """Return the sizes of the blocks along the output, whether they are heads, and a description for the reason.

    The blocks are those of the unsharded layer, even if this rank has a shard of it.
    """
    if member.awaits_shards:  # unknown before an engine says how it is cut
        return (0,), False, ""
    shape = member.full_shape
    # Example: 16 experts of Llama 4, (16, 5120, 16384) and stored as input x output, have 16384 outputs each. "gate_up"
    # splits them into blocks of 8192 columns in each of the 16 matrices.
    rows = math.prod(shape[:-1]) // experts if kind == "experts" else shape[0]  # of one matrix
    output = shape[-1] if transposed else rows
    sizes: tuple[int, ...] = (output,)
    description = ", stored as input x output" if transposed else ""
    if settings.split is not None:
        sizes = split_output(
            settings.split,
            name=member.name,
            output=output,
            attention=member.attention,
            interleaved=member.layer is not None and member.layer.interleaved,
        )
        description += f", split into {' + '.join(map(str, sizes))}"
    # Heads divide each part again.
    attention = member.attention if settings.heads == "config" and kind == "matrix" else None
    counts: int | Sequence[int] = (1,) * len(sizes)
    if attention is not None:
        counts = attention.heads_by_projection(leaf_name(plain_name(member.name)), sizes)
    elif isinstance(settings.heads, (int, list)):
        counts = settings.heads
    heads = check_heads(sizes, counts, name=member.name)
    per_head = max(heads) > 1
    if per_head:
        description += f", {' + '.join(map(str, heads))} heads separately"
    elif attention is not None:
        why = attention.why_undivided(leaf_name(plain_name(member.name)), output)
        description += "" if why is None else f", {why}"
    # sizes (4096, 1024, 1024) with 32, 8 and 8 heads: 48 blocks of 128
    blocks = tuple(size // count for size, count in zip(sizes, heads, strict=True) for _ in range(count))
    return blocks, per_head, description


def _matching_pattern(member: NamedParameter, config: MuonConfig, key: str) -> str | None:
    """Return the first pattern of ``include`` or ``exclude`` that matches the parameter, or ``None``."""
    return next((pattern for pattern in getattr(config, key) if matches(pattern, member.names, key)), None)


def _matrix_kind(
    member: NamedParameter, shape: tuple[int, ...], *, is_set_to_muon: bool
) -> MatrixKind | None:
    """Return how the parameter can be read as a matrix, or ``None`` if it cannot.

    If a setting selects it for Muon, a 3-dimensional parameter counts as a stack even if it is not named ``experts``.
    """
    if len(shape) < 2 or min(shape) == 0 or member.kind == "LoRA of experts":
        return None
    if len(shape) == 2:
        return "experts" if member.layer is not None and member.layer.stack else "matrix"
    if member.kind == "convolution":
        return "convolution"
    # (out, in / groups, *kernel), or transposed (in, out / groups, *kernel)
    is_filters = member.kind in ("grouped convolution", "transposed convolution")
    if len(shape) == 3 and not is_filters and _is_experts(member):
        return "experts"
    # Without the module, the "weight" of a stack has the same name and number of dimensions as that of a convolution.
    is_stack = member.kind in ("weight", "bare", "experts", "linear") or (
        member.layer is None and member.names and not any(name.endswith("weight") for name in member.names)
    )
    return "experts" if is_set_to_muon and is_stack else None


def _is_experts(member: NamedParameter) -> bool:
    """Return whether a 3-dimensional weight (experts, out, in) belongs to a mixture of experts."""
    return member.kind == "experts" or any("experts" in plain_name(name).split(".") for name in member.names)


def _choose_algorithm(
    member: NamedParameter, kind: MatrixKind | None, config: MuonConfig, explicit: Mapping[int, Algorithm]
) -> tuple[Algorithm, Claim]:
    """Return the algorithm and the claim that decides it, which may be a setting."""
    if id(member.param) in explicit:
        return explicit[id(member.param)], Claim("group", "the caller's param group says so")
    if (pattern := _matching_pattern(member, config, "exclude")) is not None:
        return "adamw", Claim("exclude", f"exclude pattern {pattern!r}")
    if (pattern := _matching_pattern(member, config, "include")) is not None:
        return "muon", Claim("include", f"include pattern {pattern!r}")
    return decide(member, kind)
