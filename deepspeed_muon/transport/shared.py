"""Matrices that ranks of a data-parallel group orthogonalise together: the exchange brings each of them some rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.math.newton_schulz import NsSettings, runs_gram
from deepspeed_muon.monitoring.check import PipelineWatch
from deepspeed_muon.monitoring.results import Result, Together
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.transport.members import Members
from deepspeed_muon.transport.sharded import orthogonalize_sharded
from deepspeed_muon.transport.waiting import group_timeout, phase

__all__ = ["ShareGroups", "SharedMatrices"]


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


class SharedMatrices:
    """Orthogonalises the slabs of one exchange plan's shared matrices."""

    def __init__(
        self,
        matrices: Sequence[MatrixLayout],
        *,
        rank: int,
        group: dist.ProcessGroup | None,
        groups: ShareGroups,
        ns_settings: NsSettings,
        wire_dtype: torch.dtype,
        watch: PipelineWatch,
    ) -> None:
        """Keep the settings; nothing is made or sent.

        Args:
            matrices: Of the plan, slabs among them.
            rank: This rank inside the data-parallel group.
            group: The data-parallel group, ``None`` for the default one.
            groups: Where the groups of sharers are kept.
            ns_settings: The iteration.
            wire_dtype: Dtype of the updates.
            watch: Checks the results.
        """
        self._matrices = matrices
        self._rank = rank
        self._group = group
        self._groups = groups
        self._ns_settings = ns_settings
        self._wire_dtype = wire_dtype
        self._watch = watch

    def wanted_groups(self) -> set[tuple[int, ...]]:
        """Return the global ranks of the groups that this rank shares matrices in."""
        return {self._global_ranks(slab) for slab in self._matrices if self._rank in slab.sharers}

    def counts_for(self, index: int) -> bool:
        """Return whether this rank is the one of a shared matrix's ranks that counts it."""
        return self._matrices[index].sharers[0] == self._rank

    def run(self, indices: Sequence[int], local: Callable[[int], Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield ``(index, flat update in the wire dtype)`` of this rank's slabs.

        Must be called by all ranks that share them, and be exhausted. All ranks go through the plan in one order, so
        that two ranks never wait for each other in different matrices.

        Args:
            indices: Slabs that this rank has, in the order of the plan.
            local: Returns the direction of one, ``(rows, cols)``.
        """
        for result in self._watch.settled((self._iterated(index, local(index)) for index in indices), local):
            yield from result.completed()

    def _iterated(self, index: int, direction: Tensor) -> Result:
        slab = self._matrices[index]
        assert slab.shards is not None
        rows, cols = slab.logical_shape
        # A matrix that is not elongated runs the iteration that it runs on one rank.
        gram = runs_gram(min(rows, cols), max(rows, cols), self._ns_settings.method)
        group, sizes = self._group_of(slab), slab.shards.sizes
        iterate = functools.partial(orthogonalize_sharded, group=group, shard_dim=-2, shard_sizes=sizes)
        together = Together(group, 0, sizes, iterate, counts=self.counts_for(index))
        settings = replace(self._ns_settings, method="gram" if gram else "standard")
        with self._watch.span("newton_schulz"), phase(f"iteration of {slab.name}", group):
            blocks = iterate(direction.unsqueeze(0), settings=settings)

        def complete(blocks: Tensor) -> Iterable[tuple[int, Tensor]]:
            return [(index, blocks[0].to(self._wire_dtype).reshape(-1))]

        return Result([(index, 0)], blocks, complete, together=together)

    def _group_of(self, slab: MatrixLayout) -> dist.ProcessGroup:
        return self._groups.get(self._global_ranks(slab))

    def _global_ranks(self, slab: MatrixLayout) -> tuple[int, ...]:
        if self._group is None:
            return slab.sharers
        return tuple(dist.get_global_rank(self._group, rank) for rank in slab.sharers)
