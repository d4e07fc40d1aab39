"""Recognises embeddings, heads and routers by their dotted names, and matches the configuration's name patterns."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepspeed_muon.errors import RoutingError
from deepspeed_muon.routing.route import Rule

# Components of a dotted name. An embedding's may stand anywhere in the path; a head's must be that of the module that
# holds the weight, because BERT's "attention.output.dense.weight" is a hidden matrix.
_EMBEDDING_COMPONENTS = frozenset({"wte", "wpe"})
_HEAD_COMPONENTS = frozenset({"lm_head", "embed_out", "unembed", "shared_head"})
# These names mean a head only outside of numbered layers ("layers.3.attention.output.weight" is none).
_TOP_LEVEL_HEAD_COMPONENTS = frozenset(
    {
        "fc",
        "head",
        "heads",
        "logits",
        "logits_proj",
        "output",
        "output_layer",
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
        "gamma",
        "latents",
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


def leaf_name(name: str) -> str:
    """Return the module that holds a parameter, in lower case: ``model.layers.0.q_proj.weight`` gives ``q_proj``."""
    parts = name.lower().split(".")
    return parts[-2] if len(parts) > 1 and parts[-1] in ("weight", "bias") else parts[-1]


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
    # A router may have several layers: "router.classifier.weight", "router.layer.weight".
    for component in components:
        if component.endswith("router"):
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
            return ".".join(parts[: position + 1])
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
