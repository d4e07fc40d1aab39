"""Finds the mixtures of experts of a model, and the routers beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_muon.routing.evidence import Claim, NamedParameter
from deepspeed_muon.routing.names import holder_path, match_name, plain_name
from deepspeed_muon.routing.shapes import leaf_name


@dataclass(frozen=True, slots=True)
class Mixtures:
    """The numbers of experts in the modules of a model.

    Attributes:
        counts: Path of a module with a child called ``experts`` to the numbers of experts that its parameters imply.
        stacks: Path of a module with stacked matrices under another name to the sizes of their first dimension.
    """

    counts: dict[str, set[int]]
    stacks: dict[str, set[int]]

    @classmethod
    def read(cls, members: Sequence[NamedParameter]) -> Mixtures:
        """Read the names and shapes of all parameters of a model."""
        numbers: dict[str, set[int]] = defaultdict(set)
        counts: dict[str, set[int]] = defaultdict(set)
        stacks: dict[str, set[int]] = defaultdict(set)
        for member in members:
            shape = member.full_shape
            for name in member.names:
                components = plain_name(name).split(".")
                if "experts" in components:
                    position = components.index("experts")
                    parent = ".".join(components[:position])
                    counts[parent] |= set()  # makes the entry
                    if number := next(filter(str.isdigit, components[position + 1 :]), None):
                        numbers[parent].add(int(number))  # a module for each expert
                    elif len(shape) == 3:
                        counts[parent].add(shape[0])  # (experts, rows, cols)
                    elif member.layer is not None and member.layer.stack:
                        counts[parent].add(member.layer.stack)
                elif len(shape) == 3 and member.kind in ("weight", "bare", "experts") and shape[0] > 1:
                    # "moe.w1" and "moe.w1.weight" are stacks of the module "moe"
                    depth = 2 if components[-1] == "weight" else 1
                    stacks[".".join(components[:-depth])].add(shape[0])
        # Experts are numbered from 0.
        for parent, expert_numbers in numbers.items():
            counts[parent].add(max(expert_numbers) + 1)
        return cls(dict(counts), dict(stacks))

    def router(self, member: NamedParameter) -> Claim | None:
        """Return the claim of a router; ``None`` for any other parameter."""
        shape = member.full_shape
        for name in member.names:
            plain = plain_name(name)
            # 1. by name alone. A router may have several layers: "router.classifier.weight", "router_mlp.fc1.weight".
            for component in plain.lower().split("."):
                if match_name(component, "router") and (component != "wg" or leaf_name(plain) == "wg"):
                    return Claim("router", f"MoE router by name ({component})")
            components = holder_path(name).split(".")
            # 2. by the experts beside it: up to three levels, because "gate.layer" belongs to the module "gate"
            for depth in range(len(components) - 1, max(-1, len(components) - 4), -1):
                parent, below = ".".join(components[:depth]), components[depth:]
                if "experts" in below or any(
                    "expert" in component and not match_name(component, "router") for component in below
                ):
                    continue
                named = next(
                    (component for component in below if match_name(component, "router beside experts")), None
                )
                if parent in self.counts and len(shape) == 2:
                    # (experts, width); a bare parameter may be stored as input x output
                    if shape[0] in self.counts[parent] or (
                        member.kind == "bare" and shape[1] in self.counts[parent]
                    ):
                        return Claim("router", "MoE router: an output for each expert beside it")
                    if named:
                        return Claim("router", f"MoE router by name ({named})")
                if named == "coefficient" and ".".join((*components[:depth], "deepspeed_moe")) in self.counts:
                    return Claim("router", f"MoE router by name ({named})")
                if named and parent in self.stacks and set(shape[:2]) & self.stacks[parent]:
                    return Claim(
                        "router", f"MoE router: {named}, beside stacks of as many matrices as it has outputs"
                    )
        return None
