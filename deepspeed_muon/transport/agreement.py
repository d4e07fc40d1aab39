"""How ranks agree on settings and plans before anything is sent.

A rank that fails must still take part in the collective, or the others would wait for it. So failures are sent as data
and every rank raises. What is equal on all ranks costs one all-reduce of a few numbers, however many ranks there are.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from deepspeed_muon.errors import CheckpointError, MuonError, RankDisagreementError
from deepspeed_muon.transport.ranks import Ranks, all_ranks

# An error lists at most this number of differences: models of two sizes differ in every parameter.
_LINES = 20


@dataclass(frozen=True, slots=True)
class Scope:
    """Ranks that compare a fact with each other, as one of them sees it.

    Attributes:
        name: Equal on these ranks, and another one for other ranks.
        position: Number of this rank among them.
        size: How many they are.
    """

    name: str
    position: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Scope:
        """Return the scope of a process group that this rank is in; ``None`` for a single process."""
        if group is None:
            return cls("single", 0, 1)
        return cls.among(dist.get_process_group_ranks(group), dist.get_rank(group))

    @classmethod
    def among(cls, ranks: Sequence[int], position: int) -> Scope:
        """Return the scope of some global ranks, as the one at a position sees it."""
        shown = ",".join(map(str, ranks))
        if len(ranks) > 64:
            digest = hashlib.sha256(shown.encode()).hexdigest()[:8]
            shown = f"{ranks[0]}...{ranks[-1]} ({len(ranks)} ranks, {digest})"
        return cls(shown, position, len(ranks))


class RankFacts(dict[Scope | None, dict[str, str]]):
    """What the ranks compare before they move anything, from one rank: texts, each equal on all ranks of its scope.

    The scope ``None`` is all ranks that take part.
    """

    def tell(self, fact: str, value: object, scope: Scope | None = None) -> None:
        """Add a fact, which is compared on the ranks of a scope."""
        self.setdefault(scope, {})[fact] = str(value)


def agree(
    own_facts: RankFacts | None = None,
    *,
    error: Exception | None = None,
    kind: type[MuonError] = RankDisagreementError,
    ranks: Ranks | None = None,
    subject: str | None = None,
) -> None:
    """Compare this rank's facts with those of the other ranks and raise on every rank if they differ.

    Must be called by all ``ranks``; in a single process it only raises ``error``. Checksums are compared first, the
    facts only if those differ.

    Args:
        own_facts: The facts of this rank; ``None`` to learn only whether a rank failed.
        error: An exception that this rank caught before. The other ranks learn of it; then it is raised.
        kind: Class of the error on the other ranks.
        ranks: The ranks that compare; by default all of the default process group.
        subject: What the error says if a rank does not join, such as "comparison of plans".

    Raises:
        MuonError: ``error`` itself on the ranks that failed; ``kind`` if another rank failed or differs, with
            the ranks, the setting and both values.
    """
    ranks = all_ranks() if ranks is None else ranks
    if not ranks.groups:
        if error is not None:
            raise error
        return
    if subject is None:
        subject = "agreement on a checkpoint" if kind is CheckpointError else "comparison of settings"
    everyone = Scope("all ranks", ranks.position, ranks.size)
    told = {} if error is not None or own_facts is None else own_facts
    facts = {scope or everyone: sorted(texts.items()) for scope, texts in told.items()}
    failed, *sums = ranks.reduce([int(error is not None), *_checksums(facts)], "sum", what=subject)
    # Every rank sees the same sums, so all of them take part in the second collective or none does.
    if failed:
        text = None if error is None else f"{type(error).__name__}: {error}"
        failures = ranks.gather(text, what=subject)
        if error is not None:
            raise error
        lines = [f"rank {rank}: {text}" for rank, text in failures.items() if text is not None]
        raise kind("another rank could not start, so this one stops too:\n" + "\n".join(lines))
    if not any(sums):
        return
    differences = _differences(ranks.gather({s.name: dict(each) for s, each in facts.items()}, what=subject))
    if not differences:
        groups = ranks.gather([(scope.name, scope.size) for scope in facts], what=subject)
        differences = [f"the groups of rank {rank}: {own}" for rank, own in groups.items()]
    more = [f"... and {len(differences) - _LINES} more"] if len(differences) > _LINES else []
    raise kind("the ranks do not agree:\n" + "\n".join(differences[:_LINES] + more))


@contextlib.contextmanager
def raise_on_all_ranks(
    kind: type[MuonError] = RankDisagreementError,
    *,
    ranks: Ranks | None = None,
    subject: str | None = None,
) -> Iterator[RankFacts]:
    """Let all ranks raise if one of them does in the block, or if they leave it with different facts.

    Must be entered by all ``ranks``. No other rank may wait for one whose block raised.

    Args:
        kind: See :func:`agree`.
        ranks: See :func:`agree`.
        subject: See :func:`agree`.

    Yields:
        The facts to compare, for the block to fill in.
    """
    own_facts = RankFacts()
    error: Exception | None = None
    try:
        yield own_facts
    except Exception as caught:
        error = caught
    agree(own_facts, error=error, kind=kind, ranks=ranks, subject=subject)


def _checksums(facts: Mapping[Scope, Sequence[tuple[str, str]]]) -> list[int]:
    """Return numbers whose sums over all ranks are zero if the facts of every scope are equal.

    Each rank of a scope adds the hash of its facts and its own position, and subtracts that of the same facts and the
    next position. If the facts are equal everywhere, each hash is added once and subtracted once. A sum of eight 32-bit
    numbers takes no more room for more ranks, unlike gathered digests; in float64 it is exact for two million ranks.
    """
    total = np.zeros(8, dtype=np.int64)
    for scope, items in facts.items():
        if scope.size > 1:
            after = (scope.position + 1) % scope.size
            total += _hash(scope.name, scope.position, items) - _hash(scope.name, after, items)
    numbers: list[int] = total.tolist()
    return numbers


def _hash(*parts: object) -> NDArray[np.int64]:
    return np.frombuffer(hashlib.sha256(repr(parts).encode()).digest(), dtype="<u4").astype(np.int64)


def _differences(facts_of: Mapping[int, Mapping[str, Mapping[str, str]]]) -> list[str]:
    """Describe every fact on which the ranks of a scope differ: each value with the ranks that have it.

    Every rank looks at all scopes, because all ranks must raise: the others would wait for those that do.

    Args:
        facts_of: By rank, name of the scope and name of the fact.
    """
    names = {(fact, scope) for own in facts_of.values() for scope, facts in own.items() for fact in facts}
    lines = []
    for fact, scope in sorted(names):
        holders: dict[str, list[int]] = {}
        for rank, own in facts_of.items():
            if scope in own:
                holders.setdefault(own[scope].get(fact, "<absent>"), []).append(rank)
        if len(holders) > 1:
            shown = _where_they_differ(list(holders))
            values = "; ".join(
                f"ranks {held}: {text}" for text, held in zip(shown, holders.values(), strict=True)
            )
            lines.append(f"{fact}: {values}")
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
