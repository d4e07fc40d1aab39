"""Process groups of some ranks of a data-parallel group: those that share matrices, and those that relay updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist

from deepspeed_muon.transport.members import Members
from deepspeed_muon.transport.waiting import group_timeout, phase

__all__ = ["Subgroups", "global_ranks"]


class Subgroups:
    """Makes and keeps such process groups; ``members`` are the ranks of the engine."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    @property
    def can_open(self) -> bool:
        """Whether groups can be made: in torch all ranks of the program must make each group.

        With ``use_local_synchronization`` the members alone could, but torch would name the group by a count of groups
        that differs between ranks.
        """
        return self._members.are_everyone

    def open(self, wanted: Iterable[Sequence[int]]) -> None:
        """Make the groups that any rank needs; ``wanted`` are those of this rank, as global ranks.

        Must be called by all ranks of the default process group.
        """
        forming = "forming of groups that share matrices or relay updates"
        own = sorted({tuple(ranks) for ranks in wanted})
        if not any(self._members.sum([len(own)], what=forming)):
            return
        asked = self._members.gather(own, what=forming)
        with phase(forming, None):
            for ranks in sorted({ranks for each in asked.values() for ranks in each}):
                group = dist.new_group(list(ranks), timeout=group_timeout())
                if dist.get_rank() in ranks:
                    self._groups[ranks] = group

    def get(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Return the group of these global ranks, which :meth:`open` has made."""
        return self._groups[tuple(ranks)]


def global_ranks(ranks: Sequence[int], group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the global ranks of ranks of the data-parallel ``group``; ``None`` is a single process."""
    if group is None:
        return tuple(ranks)
    return tuple(dist.get_global_rank(group, rank) for rank in ranks)
