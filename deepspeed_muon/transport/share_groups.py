"""The process groups of ranks that orthogonalise matrices together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist

from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.transport.members import Members
from deepspeed_muon.transport.waiting import group_timeout, phase

__all__ = ["ShareGroups", "global_ranks"]


class ShareGroups:
    """The process groups of ranks that share matrices."""

    def __init__(self, members: Members) -> None:
        """Start without groups.

        Args:
            members: The ranks of the engine.
        """
        self._members = members
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    @property
    def can_open(self) -> bool:
        """Whether groups can be made: torch has all ranks of the program make each of them.

        It could have the members alone make it (``use_local_synchronization``), but then names it by how many groups a
        rank is in, which differs between ranks.
        """
        return self._members.are_everyone

    def open(self, wanted: Iterable[Sequence[int]]) -> None:
        """Make the groups that any rank needs.

        Must be called by all ranks of the engine, which are all of the default process group.

        Args:
            wanted: Global ranks of the groups that this rank needs.
        """
        forming = "forming of groups that share matrices"
        asked = self._members.gather(sorted({tuple(ranks) for ranks in wanted}), what=forming)
        with phase(forming, None):
            for ranks in sorted({ranks for own in asked.values() for ranks in own}):
                group = dist.new_group(list(ranks), timeout=group_timeout())
                if dist.get_rank() in ranks:
                    self._groups[ranks] = group

    def get(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Return the group of some global ranks, which :meth:`open` has made."""
        return self._groups[tuple(ranks)]


def global_ranks(matrix: MatrixLayout, group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the ranks that share a matrix, as the default process group numbers them.

    Args:
        matrix: With its sharers, as the data-parallel group numbers them.
        group: That group; ``None`` for the default one.
    """
    if group is None:
        return matrix.sharers
    return tuple(dist.get_global_rank(group, rank) for rank in matrix.sharers)
