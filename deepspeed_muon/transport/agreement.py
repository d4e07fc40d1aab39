"""How ranks agree: on settings and plans at start, on zero and non-finite gradients in every step.

A rank that fails must still take part in the collective, or the others would wait for it. So failures travel as data
and every rank raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.errors import CheckpointError, MuonError, PlanMismatchError, RankDisagreementError
from deepspeed_muon.transport.members import Members, everyone
from deepspeed_muon.transport.waiting import phase

__all__ = ["RankFacts", "agree", "gather_flags", "gradient_flags", "group_rank_scope"]

# An error lists at most this number of differences: models of two sizes differ in every parameter.
_LINES = 20

_COMPARED: dict[type[MuonError], str] = {
    PlanMismatchError: "comparison of plans",
    CheckpointError: "agreement on a checkpoint",
}


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What the ranks compare before they move anything, from one rank.

    Attributes:
        facts: Name of each setting to a text that must be equal on all ranks of its scope.
        scope: Ranks with equal scope are compared with each other (a data-parallel group).
        failure: The error text of a rank that could not get this far.
        scopes: The scopes of facts that have another one than ``scope``.
    """

    facts: dict[str, str]
    scope: str = "world"
    failure: str | None = None
    scopes: dict[str, str] = field(default_factory=dict)

    def scope_of(self, fact: str) -> str:
        """Return the scope in which a fact is compared."""
        return self.scopes.get(fact, self.scope)

    def digests(self) -> dict[str, str]:
        """Return a digest of the facts of each scope."""
        sums = {scope: hashlib.sha256() for scope in (self.scope, *self.scopes.values())}
        for name, value in sorted(self.facts.items()):
            sums[self.scope_of(name)].update(repr((name, value)).encode())
        return {scope: each.hexdigest() for scope, each in sums.items()}


def agree(
    own_facts: RankFacts,
    *,
    error: Exception | None = None,
    kind: type[MuonError] = RankDisagreementError,
    members: Members | None = None,
) -> None:
    """Compare this rank's facts with those of the other ranks and raise on every rank if they differ.

    Must be called by all ``members``; in a single process it only raises ``error``. Digests travel first, the facts
    only if the digests differ.

    Args:
        own_facts: The facts of this rank.
        error: An exception that this rank caught before. The other ranks learn of it; then it is raised.
        kind: Class of the error on the other ranks.
        members: The ranks that compare; by default all of the default process group.

    Raises:
        MuonError: ``error`` itself on the ranks that failed; ``kind`` if another rank failed or differs, with
            the ranks, the setting and both values.
    """
    members = everyone() if members is None else members
    if error is not None:
        own_facts = RankFacts({}, failure=f"{type(error).__name__}: {error}")
    if not members.groups:
        if error is not None:
            raise error
        return
    what = _COMPARED.get(kind, "comparison of settings")
    summaries = members.gather((own_facts.failure, own_facts.digests()), what=what)
    if error is not None:
        raise error
    failures = [f"rank {rank}: {text}" for rank, (text, _) in summaries.items() if text is not None]
    if failures:
        raise kind("another rank could not start, so this one stops too:\n" + "\n".join(failures))
    known: dict[str, str] = {}
    # Every rank sees the same digests, so all of them take part in the second collective or none does.
    if all(known.setdefault(*item) == item[1] for _, own in summaries.values() for item in own.items()):
        return
    differences = _differences(members.gather(own_facts, what=what))
    if differences:
        more = [f"... and {len(differences) - _LINES} more"] if len(differences) > _LINES else []
        raise kind("the ranks do not agree:\n" + "\n".join(differences[:_LINES] + more))


def _differences(facts_of: Mapping[int, RankFacts]) -> list[str]:
    """Describe every fact on which the ranks of a scope differ: each value with the ranks that have it.

    Every rank looks at all scopes, because all ranks must raise: the others would wait for those that do.
    """
    lines = []
    for name in sorted({name for own in facts_of.values() for name in own.facts}):
        by_scope: dict[str, dict[str, list[int]]] = {}
        for rank, own in facts_of.items():
            holders = by_scope.setdefault(own.scope_of(name), {})
            holders.setdefault(own.facts.get(name, "<absent>"), []).append(rank)
        for holders in by_scope.values():
            if len(holders) > 1:
                shown = _where_they_differ(list(holders))
                values = "; ".join(
                    f"ranks {held}: {text}" for text, held in zip(shown, holders.values(), strict=True)
                )
                lines.append(f"{name}: {values}")
    return lines


def _where_they_differ(texts: Sequence[str], limit: int = 400) -> list[str]:
    """Return at most ``limit`` characters of each text, from a little before the first difference."""
    pairs = enumerate(zip(*texts, strict=False))
    same = next((place for place, each in pairs if len(set(each)) > 1), min(map(len, texts)))
    start = 0 if same < limit // 2 else same - limit // 4
    return [
        ("..." if start else "")
        + text[start : start + limit]
        + (f"... ({len(text)} characters)" if len(text) > start + limit else "")
        for text in texts
    ]


def group_rank_scope(group: dist.ProcessGroup | None) -> str:
    """Return a text that is equal on the ranks of a process group and differs between groups."""
    return "world" if group is None else ",".join(map(str, dist.get_process_group_ranks(group)))


def gather_flags(flags: Tensor, *, group: dist.ProcessGroup | None) -> Tensor:
    """Set ``flags`` (uint8) to their elementwise maximum over the group and return them.

    Must be called by all ranks of ``group``, with flags on a device from which its backend can send.
    """
    with phase("exchange of gradient flags", group):
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return flags


def gradient_flags(fragments: list[Tensor]) -> Tensor:
    """Return one row ``(has a non-zero element, has a non-finite element)`` per fragment, uint8 on their device."""
    if not fragments:
        return torch.zeros((0, 2), dtype=torch.uint8)
    # The largest magnitude is 0 for all zeros, inf or NaN for anything non-finite. A GPU has a multi-tensor kernel for
    # it; on a CPU that takes twenty times as long as minimum and maximum.
    if fragments[0].device.type == "cpu":
        ends = [torch.stack([end(fragment) for fragment in fragments]) for end in (torch.amin, torch.amax)]
        largest = torch.maximum(*(each.abs() for each in ends))
    else:
        largest = torch.stack(torch._foreach_norm(fragments, float("inf")))
    return torch.stack((largest != 0, ~torch.isfinite(largest)), dim=1).to(torch.uint8)
