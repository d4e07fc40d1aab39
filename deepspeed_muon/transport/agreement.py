"""How ranks agree: on settings and plans once at start, on missing and non-finite gradients in every step.

A rank that fails must still take part in the exchange, or the others would wait for it. So failures travel as data
and every rank raises.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.errors import MuonError, RankDisagreementError

__all__ = ["Claim", "agree", "gather_flags", "gradient_flags"]

# On so many CPU ranks flags go from each to each: one hop, where gloo's all-reduce has two for each other rank. On four
# ranks of two cores that takes a third of the time or less (benchmarks/collectives.py).
_DIRECT_UP_TO = 16


@dataclass(frozen=True, slots=True)
class Claim:
    """What one rank says of itself at a point where all ranks must be equal.

    Attributes:
        facts: Name of each setting to a text that must be the same on all ranks that are compared.
        scope: Ranks with equal scope are compared with each other (a data-parallel group).
        failure: The error text of a rank that could not get this far.
        scopes: Scope of single facts, where it is not ``scope`` (ranks that share some of their parameters).
    """

    facts: dict[str, str]
    scope: str = "world"
    failure: str | None = None
    scopes: dict[str, str] = field(default_factory=dict)

    def scope_of(self, fact: str) -> str:
        """Return the scope in which a fact is compared."""
        return self.scopes.get(fact, self.scope)


def agree(
    claim: Claim, *, error: Exception | None = None, kind: type[MuonError] = RankDisagreementError
) -> None:
    """Compare this rank's claim with those of all ranks and raise on every rank when they differ.

    Must be called by all ranks of the default process group; without one it only raises ``error``.

    Args:
        claim: What this rank says.
        error: The exception that this rank caught before; it is raised here after the others were told.
        kind: Class of the error that is raised on the other ranks.

    Raises:
        MuonError: ``error`` itself on the ranks that failed; ``kind`` where another rank failed or differs, with
            the ranks, the setting and both values.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        if error is not None:
            raise error
        return
    claims: list[Claim | None] = [None] * dist.get_world_size()
    dist.all_gather_object(claims, claim)
    if error is not None:
        raise error
    known = [c for c in claims if c is not None]
    failures = [f"rank {rank}: {c.failure}" for rank, c in enumerate(known) if c.failure is not None]
    if failures:
        raise kind("another rank could not start, so this one stops too:\n" + "\n".join(failures))
    differences = _differences(known)
    if differences:
        raise kind("the ranks do not agree:\n" + "\n".join(differences))


def _differences(claims: list[Claim]) -> list[str]:
    """Describe every fact on which the ranks of one scope differ, each value once with the ranks that hold it.

    All scopes are looked at on every rank: the ranks of the others would wait for those that raise.
    """
    lines = []
    for name in sorted({name for claim in claims for name in claim.facts}):
        by_scope: dict[str, dict[str, list[int]]] = {}
        for rank, claim in enumerate(claims):
            holders = by_scope.setdefault(claim.scope_of(name), {})
            holders.setdefault(claim.facts.get(name, "<absent>"), []).append(rank)
        for holders in by_scope.values():
            if len(holders) > 1:
                values = "; ".join(f"ranks {held}: {_short(value)}" for value, held in holders.items())
                lines.append(f"{name}: {values}")
    return lines


def _short(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def gather_flags(flags: Tensor, *, group: dist.ProcessGroup | None) -> Tensor:
    """Return the elementwise maximum of ``flags`` over the group.

    Must be called by all ranks of ``group``.

    Args:
        flags: uint8, any shape, on a device that the group's backend can send. May be mutated.
        group: The data-parallel group.

    Returns:
        uint8, of the same shape.
    """
    ranks = dist.get_world_size(group)
    if flags.device.type != "cpu" or ranks > _DIRECT_UP_TO:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        return flags
    copies = flags.unsqueeze(0).repeat(ranks, *[1] * flags.ndim)
    received = torch.empty_like(copies)
    dist.all_to_all_single(received, copies, group=group)
    return received.amax(dim=0)


def gradient_flags(fragments: list[Tensor]) -> Tensor:
    """Return one row ``(has a non-zero element, has a non-finite element)`` per fragment, uint8 on their device.

    Args:
        fragments: One-dimensional views of gradients, all on one device. Empty lists give a ``(0, 2)`` tensor.
    """
    if not fragments:
        return torch.zeros((0, 2), dtype=torch.uint8)
    # The maximum norm is 0 for all zeros, inf or NaN for anything non-finite. A GPU has one multi-tensor kernel for it;
    # on a CPU it takes twenty times as long as both ends.
    if fragments[0].device.type == "cpu":
        ends = [torch.stack([end(fragment) for fragment in fragments]) for end in (torch.amin, torch.amax)]
        largest = torch.maximum(*(each.abs() for each in ends))
    else:
        largest = torch.stack(torch._foreach_norm(fragments, float("inf")))
    return torch.stack((largest != 0, ~torch.isfinite(largest)), dim=1).to(torch.uint8)
