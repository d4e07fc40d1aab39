"""Matrices that ranks of a data-parallel group orthogonalise together: the exchange brings each of them some rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.math.newton_schulz import NsSettings, runs_gram
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.transport.sharded import orthogonalize_sharded
from deepspeed_muon.transport.watch import PipelineWatch

__all__ = ["ShareGroups", "SharedMatrices"]


class ShareGroups:
    """The process groups of ranks that share matrices."""

    def __init__(self) -> None:
        """Start without groups."""
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def open(self, wanted: Iterable[Sequence[int]]) -> None:
        """Make the groups that any rank needs.

        Must be called by all ranks of the default process group. Torch could have only the members of a group make it
        (``use_local_synchronization``), but it then names it by how many groups a rank is in, which differs.

        Args:
            wanted: Global ranks of the groups that this rank needs.
        """
        asked: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(asked, sorted({tuple(ranks) for ranks in wanted}))
        for ranks in sorted({ranks for own in asked for ranks in own}):
            group = dist.new_group(list(ranks))
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
        for index in indices:
            slab = self._matrices[index]
            assert slab.shards is not None
            direction, sizes = local(index), slab.shards.sizes
            rows, cols = slab.logical_shape
            # A matrix that is not elongated runs the iteration that it runs on one rank.
            gram = runs_gram(min(rows, cols), max(rows, cols), self._ns_settings.method)
            settings = replace(self._ns_settings, method="gram" if gram else "standard")
            group = self._group_of(slab)

            def iterate(
                settings: NsSettings,
                direction: Tensor = direction,
                sizes: Sequence[int] = sizes,
                group: dist.ProcessGroup = group,
            ) -> Tensor:
                return orthogonalize_sharded(
                    direction, group=group, shard_dim=0, settings=settings, shard_sizes=sizes
                )

            with self._watch.span("newton_schulz"):
                update = iterate(settings)
            update = self._watch.checked_slab(
                index,
                direction,
                update,
                group=group,
                again=lambda: iterate(replace(settings, method="standard", dtype=torch.float32)),  # noqa: B023
                counts=self.counts_for(index),
            )
            yield index, update.to(self._wire_dtype).reshape(-1)

    def _group_of(self, slab: MatrixLayout) -> dist.ProcessGroup:
        return self._groups.get(self._global_ranks(slab))

    def _global_ranks(self, slab: MatrixLayout) -> tuple[int, ...]:
        if self._group is None:
            return slab.sharers
        return tuple(dist.get_global_rank(self._group, rank) for rank in slab.sharers)
