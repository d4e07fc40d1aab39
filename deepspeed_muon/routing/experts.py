"""Mixtures of experts: where they lie in a model, and the routers beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_muon.routing.evidence import Claim, NamedParameter
from deepspeed_muon.routing.names import holder_path, known, plain_name
from deepspeed_muon.routing.shapes import leaf_name


@dataclass(frozen=True, slots=True)
class Mixtures:
    """The modules of a model that hold experts.

    Attributes:
        counts: Path of a module with a child called ``experts`` to the numbers of experts that its parameters show.
        stacks: Path of a module that holds stacked matrices by another name to the sizes of their first dimension.
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
            shape = member.whole_shape
            for name in member.names:
                parts = plain_name(name).split(".")
                if "experts" in parts:
                    position = parts.index("experts")
                    parent = ".".join(parts[:position])
                    counts[parent] |= set()
                    if number := next((part for part in parts[position + 1 :] if part.isdigit()), None):
                        numbers[parent].add(int(number))
                    elif len(shape) == 3:
                        counts[parent].add(shape[0])
                    elif member.layer is not None and member.layer.stack:
                        counts[parent].add(member.layer.stack)
                elif len(shape) == 3 and member.kind in ("weight", "bare", "experts") and shape[0] > 1:
                    depth = 2 if parts[-1] == "weight" else 1
                    stacks[".".join(parts[:-depth])].add(shape[0])
        for parent, expert_numbers in numbers.items():
            counts[parent].add(max(expert_numbers) + 1)
        return cls(dict(counts), dict(stacks))

    def router(self, member: NamedParameter) -> Claim | None:
        """Return the claim of a router; ``None`` for any other parameter."""
        shape = member.whole_shape
        for name in member.names:
            plain = plain_name(name)
            components = plain.lower().split(".")
            # A router may have several layers: "router.classifier.weight", "router_mlp.fc1.weight".
            for component in components:
                if known(component, "router") and (component != "wg" or leaf_name(plain) == "wg"):
                    return Claim("router", f"MoE router by name ({component})")
            parts = holder_path(name).split(".")
            # The parameter of "gate.layer" belongs to the module "gate".
            for depth in range(len(parts) - 1, max(-1, len(parts) - 4), -1):
                parent, below = ".".join(parts[:depth]), parts[depth:]
                if "experts" in below or any(
                    "expert" in part and not known(part, "router") for part in below
                ):
                    continue
                named = next((part for part in below if known(part, "router beside experts")), None)
                if parent in self.counts and len(shape) == 2:
                    if shape[0] in self.counts[parent] or (
                        member.kind == "bare" and shape[1] in self.counts[parent]
                    ):
                        return Claim("router", "MoE router: an output for each expert beside it")
                    if named:
                        return Claim("router", f"MoE router by name ({named})")
                if named == "coefficient" and ".".join((*parts[:depth], "deepspeed_moe")) in self.counts:
                    return Claim("router", f"MoE router by name ({named})")
                if named and parent in self.stacks and set(shape[:2]) & self.stacks[parent]:
                    return Claim(
                        "router", f"MoE router: {named}, beside stacks of as many matrices as it has outputs"
                    )
        return None
