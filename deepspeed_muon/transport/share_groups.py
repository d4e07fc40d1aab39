"""The process groups of ranks that share matrices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist

from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.transport.members import Members
from deepspeed_muon.transport.waiting import group_timeout, phase

__all__ = ["ShareGroups", "global_ranks"]


class ShareGroups:
    """Makes and keeps the process groups of ranks that share matrices; ``members`` are the ranks of the engine."""

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
        forming = "forming of groups that share matrices"
        asked = self._members.gather(sorted({tuple(ranks) for ranks in wanted}), what=forming)
        with phase(forming, None):
            for ranks in sorted({ranks for own in asked.values() for ranks in own}):
                group = dist.new_group(list(ranks), timeout=group_timeout())
                if dist.get_rank() in ranks:
                    self._groups[ranks] = group

    def get(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Return the group of these global ranks, which :meth:`open` has made."""
        return self._groups[tuple(ranks)]


def global_ranks(matrix: MatrixLayout, group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the global ranks that share a matrix, whose sharers are ranks of the data-parallel ``group``."""
    if group is None:
        return matrix.sharers
    return tuple(dist.get_global_rank(group, rank) for rank in matrix.sharers)
