"""Updates of replicated matrices cross the link between two machines once, however many ranks a machine has.

Every rank needs every update. If the owner sent a copy to each rank, as many copies would cross the link of its machine
as other machines have ranks. So an update travels in two turns: *across* machines, between the ranks with the same
place on each of them; then *inside* every machine, from each rank to all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Machines", "Relay"]


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines with an equal number of consecutive ranks of a data-parallel group; at least two of each.

    Attributes:
        count: The number of machines.
        ranks: Ranks of each.
    """

    count: int
    ranks: int

    @classmethod
    def of(cls, nodes: Sequence[int] | None) -> Machines | None:
        """Return the machines of a group from the machine of every rank, ``None`` if the group is not so regular."""
        if not nodes:
            return None
        count = len(set(nodes))
        ranks = len(nodes) // count
        regular = list(nodes) == [node for node in range(count) for _ in range(ranks)]
        return cls(count, ranks) if regular and count > 1 and ranks > 1 else None

    def across(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the place of ``rank`` on their machine, one of each machine, itself included."""
        return tuple(range(rank % self.ranks, self.count * self.ranks, self.ranks))

    def inside(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the machine of ``rank``, itself included."""
        first = rank - rank % self.ranks
        return tuple(range(first, first + self.ranks))


@dataclass(frozen=True, slots=True)
class Relay:
    """The two turns of one rank's updates of a chunk. The held buffer has a part for each rank of a machine.

    Attributes:
        across: The ranks of the first turn, ascending, this one included.
        inside: The ranks of the second turn, likewise.
        received: Units that each of ``across`` sends to this rank in the first turn.
        parts: Units that each of ``inside`` sends to the others in the second turn, in the order of the held buffer.
    """

    across: tuple[int, ...]
    inside: tuple[int, ...]
    received: tuple[int, ...]
    parts: tuple[int, ...]

    @property
    def position(self) -> int:
        """The number of this rank among ``inside``, and of its part of the held buffer."""
        return next(place for place, rank in enumerate(self.inside) if rank in self.across)

    @property
    def own_units(self) -> int:
        """Units of this rank's own updates, of which every rank of ``across`` gets a copy."""
        return self.received[self.across.index(self.inside[self.position])]

    @property
    def sent_units(self) -> tuple[int, int]:
        """Units that this rank sends to others in each turn."""
        return self.own_units * (len(self.across) - 1), self.parts[self.position] * (len(self.inside) - 1)
