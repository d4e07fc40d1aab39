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
from torch import nn

from deepspeed_muon.errors import RoutingError

__all__ = [
    "Algorithm",
    "NamedParameter",
    "Route",
    "model_parameters_by_name",
    "route_parameters",
    "true_shape",
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
_ROUTER_COMPONENTS = frozenset({"router", "wg", "shared_expert_gate"})


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """One parameter as the model sees it.

    Attributes:
        names: Every dotted name under which the model reaches it, first one first; empty when unknown.
        param: The parameter itself.
        module_kinds: What the modules that hold it are: a subset of {"embedding", "head", "convolution"}.
        heads: Attention heads that are orthogonalised separately (``per_head_muon``), 1 for the whole matrix.
    """

    names: tuple[str, ...]
    param: nn.Parameter
    module_kinds: frozenset[str] = frozenset()
    heads: int = 1

    @property
    def name(self) -> str:
        """The first name, or a description by shape for an unnamed parameter."""
        return self.names[0] if self.names else f"<unnamed {'x'.join(map(str, true_shape(self.param)))}>"


@dataclass(frozen=True, slots=True)
class Route:
    """Where one parameter goes.

    Attributes:
        name: First dotted name.
        shape: True shape of the layer.
        algorithm: ``muon``, ``adamw`` or ``frozen``.
        reason: The rule that decided, in words.
        heads: Row blocks of the matrix that are orthogonalised separately (attention heads, experts).
        kind: How a Muon parameter is read as a matrix; see :attr:`matrix_shape`.
    """

    name: str
    shape: tuple[int, ...]
    algorithm: Algorithm
    reason: str
    heads: int = 1
    kind: MatrixKind = "matrix"

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the row-major matrix: a filter bank is ``out x (in * kernel)``, experts are stacked."""
        if self.kind == "experts":
            return self.shape[0] * self.shape[1], self.shape[2]
        return self.shape[0], torch.Size(self.shape[1:]).numel()


def true_shape(param: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the layer's weight, also when ZeRO-3 has replaced its data by a placeholder."""
    return tuple(getattr(param, "ds_shape", param.shape))


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
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "Embedding" in type(module).__name__:
            for param in module.parameters(recurse=False):
                kinds.setdefault(id(param), set()).add("embedding")
        # A transposed convolution has its input first, a grouped one several matrices: neither is one filter bank.
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and module.groups == 1:
            kinds.setdefault(id(module.weight), set()).add("convolution")
    for kind, getter in (("head", "get_output_embeddings"), ("embedding", "get_input_embeddings")):
        module = _call_quietly(model, getter)
        if isinstance(module, nn.Module):
            for param in module.parameters(recurse=False):
                kinds.setdefault(id(param), set()).add(kind)
    return {
        key: NamedParameter(
            tuple(names[key]),
            param,
            frozenset(kinds.get(key, ())),
            getattr(param, "muon_num_heads", None) or 1,
        )
        for key, param in params.items()
    }


def _call_quietly(model: nn.Module, method: str) -> Any:
    """Call a Hugging Face accessor if the model has one; models without a head raise from it."""
    function = getattr(model, method, None)
    if function is None:
        return None
    try:
        return function()
    except (NotImplementedError, AttributeError):
        return None


def route_parameters(
    parameters: Sequence[NamedParameter],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    explicit: Mapping[int, Algorithm] | None = None,
    min_muon_params: int = 0,
    require_muon: bool = True,
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
        require_muon: Whether no Muon parameter at all is an error.

    Returns:
        One route per parameter, in the same order.

    Raises:
        RoutingError: If a pattern matches nothing, Muon is asked for something that is not a matrix, or fewer
            matrices than expected were found.
    """
    all_names = [name for item in parameters for name in item.names]
    for key, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            if not any(_matches(pattern, name, key) for name in all_names):
                raise RoutingError(
                    f"optimizer.params.{key}: pattern {pattern!r} matches no parameter name; "
                    f"names look like {all_names[:3]}"
                )
    expert_parents = _parents_of_experts(all_names)
    routes = [_route(item, include, exclude, explicit or {}, expert_parents) for item in parameters]
    found = sum(route.algorithm == "muon" for route in routes)
    if require_muon and found == 0:
        shapes = ", ".join(f"{route.name} {list(route.shape)} ({route.reason})" for route in routes[:5])
        raise RoutingError(
            f"no parameter goes to Muon, so this would be a plain AdamW run. The first of {len(routes)} parameters: "
            f"{shapes}. Use 'include' patterns, or optimizer type AdamW."
        )
    if found < min_muon_params:
        raise RoutingError(
            f"optimizer.params.min_muon_params expects at least {min_muon_params} Muon matrices and routing found "
            f"{found}; the summary of routes says why each of the others went elsewhere:\n{format_routes(routes)}"
        )
    return routes


def _route(
    item: NamedParameter,
    include: Sequence[str],
    exclude: Sequence[str],
    explicit: Mapping[int, Algorithm],
    expert_parents: frozenset[str],
) -> Route:
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
    if kind == "experts":
        return Route(item.name, shape, algorithm, f"{reason}, {shape[0]} experts separately", shape[0], kind)
    heads = item.heads
    if heads > 1:
        if shape[0] % heads:
            raise RoutingError(
                f"per_head_muon: {item.name} has {shape[0]} rows, not divisible by {heads} heads"
            )
        reason += f", {heads} heads separately"
    return Route(item.name, shape, algorithm, reason, heads, kind)


def _matrix_kind(item: NamedParameter, shape: tuple[int, ...]) -> MatrixKind | None:
    """Say how the parameter can be read as a matrix, or ``None`` if it cannot."""
    if len(shape) < 2 or min(shape) == 0:
        return None
    if len(shape) == 2:
        return "matrix"
    if "convolution" in item.module_kinds:
        return "convolution"
    # (experts, out, in), as Hugging Face's mixture-of-experts models keep them.
    if len(shape) == 3 and any("experts" in name.split(".") for name in item.names):
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
        what = {0: "a scalar", 1: "a vector", 2: "an empty matrix"}.get(
            ndim, f"{ndim}-dimensional, not a matrix"
        )
        return "adamw", what
    if "embedding" in item.module_kinds:
        return "adamw", "weight of an embedding module"
    if "head" in item.module_kinds:
        return "adamw", "output head of the model"
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
    if holder in _ROUTER_COMPONENTS or (holder == "gate" and parent in expert_parents):
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
