"""Finds the mixtures of experts of a model, and the routers beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from deepspeed_muon.routing.evidence import Claim, NamedParameter
from deepspeed_muon.routing.names import holder_path, match_name, plain_name

NumbersOfExperts = Mapping[str, set[int]]
"""Path of a module to the numbers of experts that its parameters imply."""


def numbers_of_experts(members: Sequence[NamedParameter]) -> tuple[NumbersOfExperts, NumbersOfExperts]:
    """Return the numbers of modules with a child ``experts``, and of those with stacked matrices of another name."""
    counts: dict[str, set[int]] = defaultdict(set)
    stacks: dict[str, set[int]] = defaultdict(set)
    largest: dict[str, int] = defaultdict(int)
    for member in members:
        shape = member.full_shape
        for components in (plain_name(name).split(".") for name in member.names):
            if "experts" not in components:
                # "moe.w1" and "moe.w1.weight" are stacks of the module "moe".
                if len(shape) == 3 and member.kind in ("weight", "bare", "experts"):
                    stacks[".".join(components).removesuffix(".weight").rpartition(".")[0]].add(shape[0])
                continue
            position = components.index("experts")
            # DeepSpeed's "moe.deepspeed_moe.experts" has "moe.coefficient" beside it.
            parent = ".".join(components[:position]).removesuffix(".deepspeed_moe")
            if number := next(filter(str.isdigit, components[position + 1 :]), None):
                largest[parent] = max(largest[parent], int(number))  # a module for each expert
            elif len(shape) == 3:
                counts[parent].add(shape[0])  # (experts, rows, cols)
            else:
                counts[parent].add(member.layer.stack if member.layer is not None else 0)  # 0: unknown
    for parent, last in largest.items():
        counts[parent].add(last + 1)  # numbered from 0
    return counts, stacks


def router(member: NamedParameter, experts: NumbersOfExperts, stacks: NumbersOfExperts) -> Claim | None:
    """Return the claim of a router (:func:`numbers_of_experts`); ``None`` for other parameters."""
    shape = member.full_shape
    for name in member.names:
        # 1. by name alone. A router may have several layers: "router.classifier.weight", "router_mlp.fc1.weight".
        for component in plain_name(name).lower().split("."):
            if match_name(component, "router"):
                return Claim("router", f"MoE router by name ({component})")
        components = holder_path(name).split(".")
        # 2. by the experts beside it: up to three levels, because "gate.layer" belongs to the module "gate"
        for depth in range(len(components) - 1, max(-1, len(components) - 4), -1):
            parent, below = ".".join(components[:depth]), components[depth:]
            if len(shape) != 2 or any("expert" in component for component in below):
                continue
            numbers = experts.get(parent, set())
            # (experts, width); a bare parameter may be stored as input x output
            if shape[0] in numbers or (member.kind == "bare" and shape[1] in numbers):
                return Claim("router", "MoE router: an output for each expert beside it")
            named = next((text for text in below if match_name(text, "router beside experts")), None)
            # With expert parallelism a rank has only some of the experts.
            if named and (parent in experts or set(shape) & stacks.get(parent, set())):
                return Claim("router", f"MoE router by name ({named})")
    return None
