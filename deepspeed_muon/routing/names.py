"""Recognises embeddings, heads and routers by their dotted names, and matches the configuration's name patterns."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from deepspeed_muon.errors import RoutingError
from deepspeed_muon.routing.route import Rule

__all__ = ["leaf_name", "matches", "parents_of_experts", "rule_by_name"]

# Components of a dotted name. An embedding's may stand anywhere in the path; a head's must be that of the module that
# holds the weight, because BERT's "attention.output.dense.weight" is a hidden matrix.
_EMBEDDING_COMPONENTS = frozenset(
    {"wte", "wpe", "tok_embeddings", "shared_embedding", "relative_attention_bias"}
)
_HEAD_COMPONENTS = frozenset({"lm_head", "embed_out", "unembed"})
# These names mean a head only outside of numbered layers ("layers.3.attention.output.weight" is none).
_TOP_LEVEL_HEAD_COMPONENTS = frozenset(
    {"output_layer", "output", "head", "classifier", "score", "logits", "predictions"}
)
_ROUTER_COMPONENTS = frozenset({"wg", "shared_expert_gate"})
# Parameters that multiply nothing: tables that are added or looked up, learned inputs, the decay rates of Mamba.
_NO_PRODUCT = frozenset(
    {
        "a_log",
        "latents",
        "mask_token",
        "queries",
        "query_tokens",
        "register_tokens",
        "rel_pos_h",
        "rel_pos_w",
        "relative_position_bias_table",
    }
)
# Wrappers of peft, each followed by the name of an adapter: what lies in one belongs to the module around it.
_WRAPPERS = frozenset({"modules_to_save", "lora_a", "lora_b"})


def leaf_name(name: str) -> str:
    """Return the module that holds a parameter, in lower case: ``model.layers.0.q_proj.weight`` gives ``q_proj``."""
    parts = name.lower().split(".")
    return parts[-2] if len(parts) > 1 and parts[-1] in ("weight", "bias") else parts[-1]


def rule_by_name(name: str, expert_parents: frozenset[str]) -> tuple[Rule, str] | None:
    """Return the rule that sends a parameter of this name to AdamW, with its words; ``None`` if no rule does.

    Args:
        name: Dotted name.
        expert_parents: From :func:`parents_of_experts`, for the whole model.
    """
    name = _looked_through(name)
    components = name.lower().split(".")
    if components[-1] in _NO_PRODUCT:
        return "no_product", f"not the weight of a product ({components[-1]})"
    holder = leaf_name(name)
    for component in components:
        if _names_an_embedding(component):
            return "embedding", f"embedding by name ({component})"
    in_block = any(component.isdigit() for component in components)
    if holder in _HEAD_COMPONENTS or (holder in _TOP_LEVEL_HEAD_COMPONENTS and not in_block):
        return "head", f"output head by name ({holder})"
    parent = ".".join(name.split(".")[:-2])
    # A router may have several layers: "router.classifier.weight", "router.layer.weight".
    if "router" in components:
        return "router", "MoE router by name (router)"
    if holder in _ROUTER_COMPONENTS or (holder == "gate" and parent in expert_parents):
        return "router", f"MoE router by name ({holder})"
    # Of DeepSpeed's residual experts: it weighs the experts against the dense layer for each token.
    if holder == "coefficient" and ".".join((*name.split(".")[:-2], "deepspeed_moe")) in expert_parents:
        return "router", f"MoE router by name ({holder})"
    return None


def _looked_through(name: str) -> str:
    """Return the name without peft's wrappers: ``lm_head.lora_B.default.weight`` gives ``lm_head.weight``."""
    kept: list[str] = []
    parts = iter(name.split("."))
    for part in parts:
        if part.lower() in _WRAPPERS:
            adapter = next(parts, "")
            kept += [adapter] * (
                adapter in ("weight", "bias")
            )  # a module of that name that is none of peft's
        else:
            kept.append(part)
    return ".".join(kept)


def _names_an_embedding(component: str) -> bool:
    if component in _HEAD_COMPONENTS:
        return False
    return component in _EMBEDDING_COMPONENTS or "embed" in component or component.endswith("emb")


def parents_of_experts(names: Iterable[str]) -> frozenset[str]:
    """Return the module paths that hold a child called ``experts``: a ``gate`` beside it is a router."""
    return frozenset(
        ".".join(parts[: parts.index("experts")]) for name in names if "experts" in (parts := name.split("."))
    )


def matches(pattern: str, name: str, key: str) -> bool:
    """Return whether a shell glob, or a regular expression after ``re:``, fits a dotted name.

    Args:
        pattern: What the user wrote.
        name: The dotted name.
        key: The key of ``optimizer.params`` that holds the pattern, for the error.

    Raises:
        RoutingError: If the text after ``re:`` is no regular expression.
    """
    if pattern.startswith("re:"):
        try:
            return re.search(pattern[3:], name) is not None
        except re.error as error:
            raise RoutingError(
                f"optimizer.params.{key}: {pattern!r} is not a regular expression: {error}"
            ) from error
    return fnmatch.fnmatchcase(name, pattern)
