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

from deepspeed_muon.errors import CheckpointError, MuonError, RankDisagreementError
from deepspeed_muon.transport.ranks import Ranks, all_ranks

# An error lists at most this number of differences, with this number of characters of each value: models of two sizes
# differ in every parameter.
_LINES, _CHARACTERS = 20, 400


@dataclass(frozen=True, slots=True)
class Scope:
    """Ranks that compare a fact with each other, as one of them sees it.

    Attributes:
        name: Equal on these ranks, and different for any other set of ranks.
        position: Number of this rank among them.
        size: The number of these ranks.
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
    """What one rank compares with the others: by scope, texts that must be equal on all ranks of the scope.

    The scope ``None`` is all ranks that take part.
    """

    def record(self, fact: str, value: object, scope: Scope | None = None) -> None:
        """Add a fact, which is compared on the ranks of a scope."""
        self.setdefault(scope, {})[fact] = str(value)


def agree(
    facts: RankFacts | None = None,
    *,
    error: Exception | None = None,
    kind: type[MuonError] = RankDisagreementError,
    ranks: Ranks | None = None,
    purpose: str | None = None,
) -> None:
    """Compare this rank's facts with those of the other ranks and raise on every rank if they differ.

    Must be called by all ``ranks``; in a single process it only raises ``error``. Checksums are compared first, the
    facts only if those differ.

    Args:
        facts: What this rank compares; ``None`` to find out only whether a rank failed.
        error: An exception that this rank caught before. It is raised once the other ranks know of it.
        kind: Class of the error on the other ranks.
        ranks: The ranks that compare; by default all of the default process group.
        purpose: Named in the error if a rank does not take part, such as "comparison of plans".

    Raises:
        MuonError: ``error`` itself on the ranks that failed; ``kind`` if another rank failed or differs, with
            the ranks, the setting and both values.
    """
    ranks = all_ranks() if ranks is None else ranks
    if not ranks.groups:
        if error is not None:
            raise error
        return
    if purpose is None:
        purpose = "agreement on a checkpoint" if kind is CheckpointError else "comparison of settings"
    # 1. compare checksums: a rank that failed has no facts, and its error is all that counts
    every_rank = Scope("all ranks", ranks.position, ranks.size)
    compared = RankFacts() if error is not None or facts is None else facts
    facts_of = {scope or every_rank: sorted(texts.items()) for scope, texts in compared.items()}
    checksums = [int(error is not None), *_checksums(facts_of)]
    # The number of ranks that failed, and eight sums that are zero if all facts are equal.
    failed, *sums = ranks.all_reduce(checksums, "sum", purpose=purpose)
    # Every rank sees the same sums, so all of them take part in the second collective or none does.
    # 2. a rank failed: all of them raise, with the errors of all
    if failed:
        text = None if error is None else f"{type(error).__name__}: {error}"
        failures = ranks.all_gather(text, purpose=purpose)
        if error is not None:
            raise error
        lines = [f"rank {rank}: {text}" for rank, text in failures.items() if text is not None]
        raise kind("another rank failed, so this one stops too:\n" + "\n".join(lines))
    # 3. the facts differ: gather them, and say which
    if not any(sums):
        return
    by_scope = {scope.name: dict(texts) for scope, texts in facts_of.items()}
    differences = _differences(ranks.all_gather(by_scope, purpose=purpose))
    if not differences:  # equal where they can be compared, so that the ranks disagree on who compares
        scopes = ranks.all_gather([(scope.name, scope.size) for scope in facts_of], purpose=purpose)
        differences = [f"the groups of rank {rank}: {names}" for rank, names in scopes.items()]
    more = [f"... and {len(differences) - _LINES} more"] if len(differences) > _LINES else []
    raise kind("the ranks do not agree:\n" + "\n".join(differences[:_LINES] + more))


@contextlib.contextmanager
def raise_on_all_ranks(
    kind: type[MuonError] = RankDisagreementError, *, ranks: Ranks | None = None, purpose: str | None = None
) -> Iterator[RankFacts]:
    """Raise on all ranks if one of them raises in the block, or if they leave it with different facts.

    Must be entered by all ``ranks``; no other rank may wait for one whose block raised. The block fills in the facts
    that it gets. The arguments are those of :func:`agree`.
    """
    facts = RankFacts()
    error: Exception | None = None
    try:
        yield facts
    except Exception as caught:
        error = caught
    agree(facts, error=error, kind=kind, ranks=ranks, purpose=purpose)


def _checksums(facts_of: Mapping[Scope, Sequence[tuple[str, str]]]) -> list[int]:
    """Return numbers whose sums over all ranks are zero if the facts of every scope are equal.

    Each rank of a scope adds the hash of its facts and its own position, and subtracts that of the same facts and the
    next position. If the facts are equal everywhere, each hash is added once and subtracted once. A sum of eight 32-bit
    numbers takes no more memory for more ranks, unlike gathered digests; in float64 it is exact for two million ranks.
    """
    total = np.zeros(8, dtype=np.int64)
    for scope, texts in facts_of.items():
        if scope.size > 1:
            for position, sign in ((scope.position, 1), ((scope.position + 1) % scope.size, -1)):
                # On three ranks: h(0) - h(1), h(1) - h(2) and h(2) - h(0), if the texts are equal.
                digest = hashlib.sha256(repr((scope.name, position, texts)).encode()).digest()
                total += sign * np.frombuffer(digest, dtype="<u4").astype(np.int64)
    numbers: list[int] = total.tolist()
    return numbers


def _differences(facts_of: Mapping[int, Mapping[str, Mapping[str, str]]]) -> list[str]:
    """Describe every fact on which the ranks of a scope differ: each value with the ranks that have it.

    Every rank looks at all scopes, because all ranks must raise: the others would wait for those that do. The facts are
    by rank, name of the scope and name of the fact.
    """
    names = {
        (fact, scope) for scopes in facts_of.values() for scope, facts in scopes.items() for fact in facts
    }
    lines = []
    for fact, scope in sorted(names):
        ranks_by_text: dict[str, list[int]] = {}
        for rank, scopes in facts_of.items():
            if scope in scopes:
                ranks_by_text.setdefault(scopes[scope].get(fact, "<absent>"), []).append(rank)
        if len(ranks_by_text) > 1:
            texts = zip(_where_they_differ(list(ranks_by_text)), ranks_by_text.values(), strict=True)
            lines.append(f"{fact}: " + "; ".join(f"ranks {ranks}: {text}" for text, ranks in texts))
    return lines


def _where_they_differ(texts: Sequence[str]) -> list[str]:
    """Return the characters of each text that an error shows, from a little before the first difference."""
    columns = enumerate(zip(*texts, strict=False))
    equal = next((index for index, characters in columns if len(set(characters)) > 1), min(map(len, texts)))
    start = 0 if equal < _CHARACTERS // 2 else equal - _CHARACTERS // 4
    return [
        ("..." if start else "")
        + text[start : start + _CHARACTERS]
        + (f"... ({len(text)} characters)" if len(text) > start + _CHARACTERS else "")
        for text in texts
    ]
