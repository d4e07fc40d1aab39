"""How ranks agree: on settings and plans once at start, on missing and non-finite gradients in every step.

A rank that fails must still take part in the exchange, or the others would wait for it. So failures travel as data
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

# Lines of differences in an error; a model of another size differs in all its parameters.
_LINES = 20

_COMPARED: dict[type[MuonError], str] = {
    PlanMismatchError: "comparison of plans",
    CheckpointError: "agreement on a checkpoint",
}


@dataclass(frozen=True, slots=True)
class RankFacts:
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

    def digests(self) -> dict[str, str]:
        """Return a digest of the facts of each scope, the default one included."""
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
    """Compare this rank's facts with those of the other ranks and raise on every rank when they differ.

    Must be called by all ``members``; in a single process it only raises ``error``. Digests travel first, and the
    facts themselves only when those differ.

    Args:
        own_facts: What this rank says.
        error: The exception that this rank caught before, in place of its facts; it is raised here after the others
            were told.
        kind: Class of the error that is raised on the other ranks.
        members: The ranks that compare; all of the default process group where nothing is given.

    Raises:
        MuonError: ``error`` itself on the ranks that failed; ``kind`` where another rank failed or differs, with
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
    # Every rank sees the same digests, so that all of them take part in the second exchange or none.
    if all(known.setdefault(*item) == item[1] for _, own in summaries.values() for item in own.items()):
        return
    differences = _differences(members.gather(own_facts, what=what))
    if differences:
        more = [f"... and {len(differences) - _LINES} more"] if len(differences) > _LINES else []
        raise kind("the ranks do not agree:\n" + "\n".join(differences[:_LINES] + more))


def _differences(facts_of: Mapping[int, RankFacts]) -> list[str]:
    """Describe every fact on which the ranks of one scope differ, each value once with the ranks that hold it.

    All scopes are looked at on every rank: the ranks of the others would wait for those that raise.
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
    """Return texts cut to so many characters, from a little before the first one that differs."""
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
    """Return a text that is equal on the ranks of one process group and differs between groups."""
    return "world" if group is None else ",".join(map(str, dist.get_process_group_ranks(group)))


def gather_flags(flags: Tensor, *, group: dist.ProcessGroup | None) -> Tensor:
    """Return the elementwise maximum of ``flags`` over the group.

    Must be called by all ranks of ``group``.

    Args:
        flags: uint8, any shape, on a device that the group's backend can send. Mutated.
        group: The data-parallel group.

    Returns:
        ``flags``.
    """
    with phase("exchange of gradient flags", group):
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return flags


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
