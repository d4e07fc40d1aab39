"""Which parameter Muon updates, which AdamW updates, and why.

Decided from the layer's *true* shape and its names: under ``zero.Init`` every parameter looks one-dimensional and
its shape as a layer is kept in ``ds_shape``. A parameter that several modules share is judged by all of its names,
so that a tied head is recognised as the embedding that it is.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy

from deepspeed_muon.errors import ParameterTypeError, RoutingError
from deepspeed_muon.logs import warn
from deepspeed_muon.plan.owners import grid_blocks
from deepspeed_muon.routing.parameters import NamedParameter, model_parameters_by_name, true_shape
from deepspeed_muon.routing.shapes import ShapeRules, cut_into_heads, leaf_name, split_output

__all__ = [
    "Algorithm",
    "NamedParameter",
    "Route",
    "check_routes",
    "model_parameters_by_name",
    "route_parameters",
    "true_shape",
    "warn_without_muon",
]

Algorithm = Literal["muon", "adamw", "frozen"]
MatrixKind = Literal["matrix", "convolution", "experts"]

# Components of a dotted name. An embedding is recognised anywhere in the path, a head only as the module that holds
# the weight: BERT's "attention.output.dense.weight" is a hidden matrix.
_EMBEDDING_COMPONENTS = frozenset(
    {"wte", "wpe", "tok_embeddings", "shared_embedding", "relative_attention_bias"}
)
_HEAD_COMPONENTS = frozenset({"lm_head", "embed_out", "unembed"})
# Names that also occur inside a block ("layers.3.attention.output.weight"), and mean a head only outside of one.
_TOP_LEVEL_HEAD_COMPONENTS = frozenset(
    {"output_layer", "output", "head", "classifier", "score", "logits", "predictions"}
)
_ROUTER_COMPONENTS = frozenset({"wg", "shared_expert_gate"})


@dataclass(frozen=True, slots=True)
class Route:
    """Where one parameter goes.

    Attributes:
        name: First dotted name.
        shape: True shape of the layer.
        algorithm: ``muon``, ``adamw`` or ``frozen``.
        reason: The rule that decided, in words.
        parts: Sizes along the layer's output that are orthogonalised separately (attention heads, parts of a fused
            projection); empty for all of it together.
        kind: How a Muon parameter is read as a matrix; see :attr:`matrix_shape`.
        transposed: Whether the weight is stored as input x output, so that the output is its last dimension.
    """

    name: str
    shape: tuple[int, ...]
    algorithm: Algorithm
    reason: str
    parts: tuple[int, ...] = ()
    kind: MatrixKind = "matrix"
    transposed: bool = False

    @property
    def row_blocks(self) -> tuple[int, ...]:
        """Rows of the stored matrix that are orthogonalised separately; empty for all together."""
        own = () if self.transposed else self.parts
        if self.kind == "experts":
            return (own or (self.shape[1],)) * self.shape[0]
        return own

    @property
    def col_blocks(self) -> tuple[int, ...]:
        """Columns of the stored matrix that are orthogonalised separately; empty for all together."""
        return self.parts if self.transposed else ()

    @property
    def heads(self) -> int:
        """The number of blocks that are orthogonalised separately, 1 for the whole matrix."""
        return max(1, len(self.row_blocks)) * max(1, len(self.col_blocks))

    @property
    def grid(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Row and column blocks where :attr:`heads` does not describe them: they are unequal, or columns."""
        if len(set(self.row_blocks)) > 1 or self.col_blocks:
            return self.row_blocks, self.col_blocks
        return None

    def kinds_of_blocks(self) -> tuple[tuple[int, int, int], ...]:
        """Return count, rows and columns of every kind of block that is orthogonalised by itself."""
        rows, cols = self.matrix_shape
        return grid_blocks(self.row_blocks or (rows,), self.col_blocks or (cols,))

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the row-major matrix: a filter bank is ``out x (in * kernel)``, experts are stacked."""
        if self.kind == "experts":
            return self.shape[0] * self.shape[1], self.shape[2]
        return self.shape[0], torch.Size(self.shape[1:]).numel()


def route_parameters(
    parameters: Sequence[NamedParameter],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    explicit: Mapping[int, Algorithm] | None = None,
    min_muon_params: int = 0,
    partial: bool = False,
    rules: ShapeRules | None = None,
) -> list[Route]:
    """Decide the algorithm of every parameter.

    The first rule that applies decides: frozen; the caller's explicit choice; ``exclude``; ``include``; not a
    matrix; embedding; output head; MoE router; otherwise Muon.

    Args:
        parameters: The parameters of all groups, in order.
        include: Patterns of names that go to Muon although a rule would send them to AdamW. A pattern is a shell
            glob over the dotted name, or a regular expression after ``re:``.
        exclude: Patterns of names that go to AdamW. Wins over ``include``.
        explicit: ``id(param)`` to the algorithm that the caller's own param group asks for.
        min_muon_params: The number of Muon matrices that the caller expects at least.
        partial: Whether these are only a part of the model (one stage of a pipeline), so that what a pattern matches
            and what goes to Muon may be elsewhere; whoever knows all parts calls :func:`check_routes`.
        rules: How weights divide into matrices; ``None`` for whole ones.

    Returns:
        One route per parameter, in the same order.

    Raises:
        RoutingError: If a pattern matches nothing, Muon is asked for something that is not a matrix, a weight does not
            divide as asked, a parameter cannot be trained, or fewer matrices than expected were found.
    """
    all_names = [name for item in parameters for name in item.names]
    expert_parents = _parents_of_experts(all_names)
    rules = rules or ShapeRules()
    routes = [_route(item, include, exclude, explicit or {}, expert_parents, rules) for item in parameters]
    if not partial:
        _refuse_idle_rules(parameters, routes, rules)
        check_routes(
            routes,
            all_names,
            include=include,
            exclude=exclude,
            min_muon_params=min_muon_params,
            rules=rules,
        )
    return routes


def check_routes(
    routes: Sequence[Route],
    names: Sequence[str],
    *,
    include: Sequence[str],
    exclude: Sequence[str],
    min_muon_params: int,
    rules: ShapeRules | None = None,
) -> None:
    """Raise where the routes of a whole model are not what the settings expect.

    Args:
        routes: The routes of all parameters.
        names: All names of those parameters.
        include: As for :func:`route_parameters`, like the rest.
        exclude: See there.
        min_muon_params: See there.
        rules: See there.

    Raises:
        RoutingError: If a pattern matches nothing, no heads were found, or fewer matrices than expected went to Muon.
    """
    rules = rules or ShapeRules()
    for key, patterns in (
        ("include", include),
        ("exclude", exclude),
        ("split", rules.split),
        ("heads", rules.heads),
        ("transposed", rules.transposed),
    ):
        for pattern in patterns:
            if not any(_matches(pattern, name, key) for name in names):
                raise RoutingError(
                    f"optimizer.params.{key}: pattern {pattern!r} matches no parameter name; "
                    f"names look like {list(names[:3])}"
                )
    if rules.per_head and not any("heads separately" in route.reason for route in routes):
        raise RoutingError(
            "optimizer.params.per_head_muon: no attention projection was recognised, so no heads would be separate. "
            "They are found by name (q_proj, k_proj, v_proj and the like) with the head counts of the model's config "
            "(num_attention_heads, num_key_value_heads, head_dim; a client optimizer needs model=). A fused projection "
            "needs 'split' too. Otherwise write the counts as 'heads': {pattern: count}, or unset per_head_muon"
        )
    found = sum(route.algorithm == "muon" for route in routes)
    if found < min_muon_params:
        raise RoutingError(
            f"optimizer.params.min_muon_params expects at least {min_muon_params} Muon matrices and routing found "
            f"{found}; the summary of routes says why each of the others went elsewhere:\n{format_routes(routes)}"
        )


def warn_without_muon(routes: Sequence[Route]) -> None:
    """Warn where no parameter of a whole model goes to Muon: right for training a head only, else a slip.

    Args:
        routes: The routes of all parameters.
    """
    if any(route.algorithm == "muon" for route in routes):
        return
    shapes = ", ".join(f"{route.name} {list(route.shape)} ({route.reason})" for route in routes[:5])
    warn(
        "deepspeed_muon: no parameter goes to Muon, so this is a plain AdamW run. The first of %d parameters: %s. "
        "Use 'include' patterns if that is not meant; min_muon_params 1 makes it an error",
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
            f"{what} is expanded (strides {param.stride()}): several of its elements are one in memory; pass a "
            f"contiguous copy"
        )


def _route(
    item: NamedParameter,
    include: Sequence[str],
    exclude: Sequence[str],
    explicit: Mapping[int, Algorithm],
    expert_parents: frozenset[str],
    rules: ShapeRules,
) -> Route:
    _refuse_untrainable(item)
    shape = true_shape(item.param)
    kind = _matrix_kind(item, shape)
    algorithm, reason = _decide(item, kind, len(shape), include, exclude, explicit, expert_parents)
    if algorithm != "muon":
        return Route(item.name, shape, algorithm, reason)
    if kind is None:
        raise RoutingError(
            f"parameter {item.name} of shape {list(shape)} was sent to Muon ({reason}) but Muon orthogonalises "
            f"matrices, plain convolutions and stacked experts, none of them empty; remove it from the pattern or group"
        )
    transposed = kind != "convolution" and (
        "transposed" in item.module_kinds
        or _chosen(item, dict.fromkeys(rules.transposed, True), "transposed")
    )
    if kind == "experts":
        reason += f", {shape[0]} experts separately"
    parts, how = _divide(item, shape, kind, bool(transposed), rules)
    return Route(item.name, shape, algorithm, reason + how, parts, kind, bool(transposed))


def _divide(
    item: NamedParameter, shape: tuple[int, ...], kind: MatrixKind, transposed: bool, rules: ShapeRules
) -> tuple[tuple[int, ...], str]:
    """Return the sizes of what is orthogonalised separately along the output, and the words for it."""
    output = shape[-1] if transposed else shape[1] if kind == "experts" else shape[0]
    parts: tuple[int, ...] = (output,)
    how = ", stored as input x output" if transposed else ""
    rule = _chosen(item, rules.split, "split")
    if rule is not None:
        interleaved = "interleaved" in item.module_kinds
        parts = split_output(
            rule, name=item.name, output=output, attention=item.attention, interleaved=interleaved
        )
        how += f", split into {' + '.join(map(str, parts))}"
    explicit = _chosen(item, rules.heads, "heads")
    heads = cut_into_heads(
        parts,
        name=item.name,
        explicit=explicit,
        tagged=item.heads,
        attention=item.attention,
        derive=rules.per_head and kind == "matrix",
    )
    if max(heads) > 1:
        how += f", {' + '.join(map(str, heads))} heads separately"
    elif rules.per_head and explicit is None and item.attention is not None and kind == "matrix":
        doubt = item.attention.doubt(leaf_name(item.name), output)
        how += "" if doubt is None else f", {doubt}"
    blocks = tuple(size // count for size, count in zip(parts, heads, strict=True) for _ in range(count))
    return (blocks if len(blocks) > 1 else ()), how


def _chosen(item: NamedParameter, rules: Mapping[str, Any], key: str) -> Any:
    """Return what the first pattern that matches the parameter says, or ``None``."""
    for pattern, value in rules.items():
        if any(_matches(pattern, name, key) for name in item.names):
            return value
    return None


def _refuse_idle_rules(
    parameters: Sequence[NamedParameter], routes: Sequence[Route], rules: ShapeRules
) -> None:
    """Raise for a pattern of ``split``, ``heads`` or ``transposed`` that no Muon parameter has."""
    names = [
        name
        for item, route in zip(parameters, routes, strict=True)
        if route.algorithm == "muon"
        for name in item.names
    ]
    for key, patterns in (
        ("split", rules.split),
        ("heads", rules.heads),
        ("transposed", dict.fromkeys(rules.transposed)),
    ):
        for pattern in patterns:
            if not any(_matches(pattern, name, key) for name in names):
                raise RoutingError(
                    f"optimizer.params.{key}: pattern {pattern!r} matches no parameter that goes to Muon; their names "
                    f"look like {names[:3]}"
                )


def _matrix_kind(item: NamedParameter, shape: tuple[int, ...]) -> MatrixKind | None:
    """Say how the parameter can be read as a matrix, or ``None`` if it cannot."""
    if len(shape) < 2 or min(shape) == 0:
        return None
    if len(shape) == 2:
        return "matrix"
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
    ndim: int,
    include: Sequence[str],
    exclude: Sequence[str],
    explicit: Mapping[int, Algorithm],
    expert_parents: frozenset[str],
) -> tuple[Algorithm, str]:
    if not item.param.requires_grad:
        return "frozen", "requires_grad is False"
    if id(item.param) in explicit:
        return explicit[id(item.param)], "the caller's param group says so"
    for pattern in exclude:
        if any(_matches(pattern, name, "exclude") for name in item.names):
            return "adamw", f"exclude pattern {pattern!r}"
    for pattern in include:
        if any(_matches(pattern, name, "include") for name in item.names):
            return "muon", f"include pattern {pattern!r}"
    if kind is None:
        for other in ("grouped convolution", "transposed convolution"):
            if other in item.module_kinds:
                return "adamw", f"filters of a {other}"
        what = {0: "a scalar", 1: "a vector", 2: "an empty matrix"}.get(
            ndim, f"{ndim}-dimensional, not a matrix"
        )
        return "adamw", what
    if "embedding" in item.module_kinds:
        return "adamw", "weight of an embedding module"
    if "head" in item.module_kinds:
        return "adamw", "output head of the model"
    if "tied" in item.module_kinds:
        # The stages update their copies separately and must get the same bits: only an elementwise update gives that.
        return "adamw", "tied between the stages of a pipeline"
    # Stacked experts have a row of biases for each of them.
    if kind == "matrix" and any(name.lower().endswith(("_bias", ".bias")) for name in item.names):
        return "adamw", "biases"
    for name in item.names:
        reason = _reason_by_name(name, expert_parents)
        if reason:
            return "adamw", reason
    return "muon", {
        "matrix": "hidden matrix",
        "convolution": "filters of a convolution",
        "experts": "hidden matrices",
    }[kind]


def _reason_by_name(name: str, expert_parents: frozenset[str]) -> str | None:
    components = name.lower().split(".")
    holder = (
        components[-2] if len(components) > 1 and components[-1] in ("weight", "bias") else components[-1]
    )
    for component in components:
        if _names_an_embedding(component):
            return f"embedding by name ({component})"
    in_block = any(component.isdigit() for component in components)
    if holder in _HEAD_COMPONENTS or (holder in _TOP_LEVEL_HEAD_COMPONENTS and not in_block):
        return f"output head by name ({holder})"
    parent = ".".join(name.split(".")[:-2])
    # A router may be a module of several layers: "router.classifier.weight", "router.layer.weight".
    if "router" in components:
        return "MoE router by name (router)"
    if holder in _ROUTER_COMPONENTS or (holder == "gate" and parent in expert_parents):
        return f"MoE router by name ({holder})"
    # DeepSpeed's residual experts: it weighs the experts against the dense layer, token by token.
    if holder == "coefficient" and ".".join((*name.split(".")[:-2], "deepspeed_moe")) in expert_parents:
        return f"MoE router by name ({holder})"
    return None


def _names_an_embedding(component: str) -> bool:
    if component in _HEAD_COMPONENTS:
        return False
    return component in _EMBEDDING_COMPONENTS or "embed" in component or component.endswith("emb")


def _parents_of_experts(names: Iterable[str]) -> frozenset[str]:
    """Return the module paths that hold a child called ``experts``: a ``gate`` beside it is a router."""
    return frozenset(
        ".".join(parts[: parts.index("experts")]) for name in names if "experts" in (parts := name.split("."))
    )


def _matches(pattern: str, name: str, key: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.search(pattern[3:], name) is not None
        except re.error as error:
            raise RoutingError(
                f"optimizer.params.{key}: {pattern!r} is not a regular expression: {error}"
            ) from error
    return fnmatch.fnmatchcase(name, pattern)


def format_routes(routes: Sequence[Route]) -> str:
    """Return the routing table as text, one line per parameter."""
    width = max((len(route.name) for route in routes), default=0)
    return "\n".join(
        f"{route.algorithm:<6} {route.name:<{width}} {'x'.join(map(str, route.shape)) or 'scalar':<14} {route.reason}"
        for route in routes
    )


def summarize_routes(routes: Sequence[Route]) -> str:
    """Return one line a reader can check at a glance: how many tensors and elements went where."""
    parts = []
    for algorithm in ("muon", "adamw", "frozen"):
        chosen = [route for route in routes if route.algorithm == algorithm]
        if chosen:
            numel = sum(torch.Size(route.shape).numel() for route in chosen)
            parts.append(f"{algorithm} {len(chosen)} tensors / {numel:,} elements")
    return "; ".join(parts)
