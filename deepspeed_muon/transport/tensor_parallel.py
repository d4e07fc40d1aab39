"""Orthogonalising matrices that a tensor-parallel group shares.

Every data-parallel group of ZeRO holds its own tensor-parallel shard of a matrix and brings it together on one rank,
the shard's owner. The owners of the shards of one matrix are the ranks of one tensor-parallel group. Here they meet:

* ``gather``: each matrix goes whole to one of them, which orthogonalises it and sends the shards of the update back.
  The matrices of a chunk are dealt out by their cost, so that all of them work at the same time.
* ``distributed``: the matrix stays sharded, see :mod:`deepspeed_muon.transport.sharded`.

A matrix that tensor parallelism does not cut is held whole by all of them. One orthogonalises it and sends the update
to the others, in both modes: so the copies stay equal, bit for bit, whatever kernels run where.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.math.flops import orthogonalize_flops
from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.monitoring.check import PipelineWatch
from deepspeed_muon.monitoring.results import Result, Together
from deepspeed_muon.plan.layout import MatrixLayout, TensorShards
from deepspeed_muon.transport.pipeline import StepStats
from deepspeed_muon.transport.sharded import orthogonalize_sharded
from deepspeed_muon.transport.waiting import phase

__all__ = ["TensorParallelExchange", "TensorParallelMode"]

TensorParallelMode = Literal["gather", "distributed"]

# Matrices whose short side is shorter than this are orthogonalised together: on a CPU bmm is slower than mm above it.
_BATCH_BELOW = 256

# Matrix index to this rank's shard (or its copy) of the direction, flat, in the wire dtype.
LocalOf = Callable[[int], Tensor]
# Matrix indices to their updates, flat: the ordinary path for matrices that lie whole on this rank.
WholeOf = Callable[[Sequence[int]], Iterator[tuple[int, Tensor]]]


class TensorParallelExchange:
    """Turns the directions of matrices that a tensor-parallel group shares into updates."""

    def __init__(
        self,
        matrices: Sequence[MatrixLayout],
        *,
        group: dist.ProcessGroup,
        mode: TensorParallelMode,
        device: torch.device,
        wire_dtype: torch.dtype,
        ns_settings: NsSettings,
        orthogonalize: Callable[..., Tensor],
        chunk_numel: int,
        stats: StepStats,
        watch: PipelineWatch,
    ) -> None:
        """Keep the settings; nothing is allocated or sent.

        Args:
            matrices: All matrices of the exchange plan, equal on all ranks of ``group`` but for what they hold.
            group: The tensor-parallel process group.
            mode: What happens to a matrix that is cut over the group.
            device: Where the exchange and the products run.
            wire_dtype: Dtype of what is sent.
            ns_settings: The iteration.
            orthogonalize: What runs it on whole matrices.
            chunk_numel: Upper bound of the elements that are gathered at once; a larger matrix goes alone.
            stats: Counters to increase. A matrix that stays sharded counts on the group's first rank.
            watch: Checks the results.
        """
        self._matrices = matrices
        self._group = group
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._mode = mode
        self._device = device
        self._wire_dtype = wire_dtype
        self._ns_settings = ns_settings
        self._orthogonalize = orthogonalize
        self._chunk_numel = chunk_numel
        self._stats = stats
        self._watch = watch

    def run(self, owned: Sequence[int], *, local: LocalOf, whole: WholeOf) -> Iterator[tuple[int, Tensor]]:
        """Yield ``(matrix index, flat update of this rank's shard in the wire dtype)`` for all of ``owned``.

        Must be called by all ranks of the group with the same ``owned``, and be exhausted.

        Args:
            owned: Active matrices of which this rank holds a whole shard or a whole copy.
            local: Returns that shard or copy.
            whole: Orthogonalises matrices that lie whole on this rank, blocks included.
        """
        copies = [index for index in owned if self._shards(index).dim is None]
        cut = [index for index in owned if self._shards(index).dim is not None]
        for part in self._parts(copies):
            yield from self._copied(part, whole)
        if self._mode == "distributed":
            yield from self._distributed(cut, local)
            return
        for part in self._parts(cut):
            yield from self._gathered(part, local)

    def _shards(self, index: int) -> TensorShards:
        shards = self._matrices[index].shards
        assert shards is not None, "the adapter says of every matrix how the group shares it"
        return shards

    def _logical_shape(self, index: int) -> tuple[int, int]:
        return self._matrices[index].logical_shape

    def _parts(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Cut a list into runs of bounded size, alike on all ranks of the group."""
        part: list[int] = []
        filled = 0
        for index in indices:
            rows, cols = self._logical_shape(index)
            if part and filled + rows * cols > self._chunk_numel:
                yield part
                part, filled = [], 0
            part.append(index)
            filled += rows * cols
        if part:
            yield part

    def _owners(self, part: Sequence[int]) -> dict[int, int]:
        """Deal the matrices out over the group, longest first to the rank that has least."""
        load = [0.0] * self._world_size
        owners = {}
        cost = {index: orthogonalize_flops(*self._logical_shape(index)) for index in part}
        for index in sorted(part, key=lambda i: (-cost[i], i)):
            owners[index] = min(range(self._world_size), key=lambda rank: (load[rank], rank))
            load[owners[index]] += cost[index]
        return owners

    def _copied(self, part: Sequence[int], whole: WholeOf) -> Iterator[tuple[int, Tensor]]:
        """Matrices that every rank of the group holds whole: one orthogonalises, all apply its result."""
        owners = self._owners(part)
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        updates: dict[int, Tensor] = {}
        for index, update in whole([index for index in part if owners[index] == self._rank]):
            updates[index] = update
        mine = [updates[index] for index in part if owners[index] == self._rank]
        pieces = {rank: mine if rank in others else [] for rank in range(self._world_size)}
        numel = {index: self._matrices[index].numel for index in part}
        wanted = {
            rank: [numel[index] for index in part if owners[index] == rank] if rank in others else []
            for rank in range(self._world_size)
        }
        received = self._exchange(pieces, wanted)
        for rank in others:
            theirs = [index for index in part if owners[index] == rank]
            updates.update(zip(theirs, received[rank], strict=True))
        yield from updates.items()

    def _gathered(self, part: Sequence[int], local: LocalOf) -> Iterator[tuple[int, Tensor]]:
        """Matrices that are cut over the group: each one goes whole to its owner and comes back in shards."""
        owners = self._owners(part)
        ranks = range(self._world_size)
        of_rank = {rank: [index for index in part if owners[index] == rank] for rank in ranks}
        mine = of_rank[self._rank]
        pieces = {rank: [local(index) for index in of_rank[rank]] for rank in ranks}
        wanted = {rank: [self._shard_numel(index, rank) for index in mine] for rank in ranks}
        received = self._exchange(pieces, wanted)
        arrived = {
            index: [received[rank][number].view(self._shard_shape(index, rank)) for rank in ranks]
            for number, index in enumerate(mine)
        }

        def whole(index: int) -> Tensor:
            dim = self._shards(index).dim
            assert dim is not None
            return torch.cat(arrived[index], dim=dim)

        back: dict[tuple[int, int], Tensor] = {}
        results = (
            self._iterated(batch, torch.stack([whole(i) for i in batch])) for batch in self._batches(mine)
        )
        for result in self._watch.settled(results, whole):
            for index, update in result.completed():
                layout = self._shards(index)
                assert layout.dim is not None
                shards = update.view(self._logical_shape(index)).split(layout.sizes, dim=layout.dim)
                back.update(((index, rank), shard.reshape(-1)) for rank, shard in enumerate(shards))
        outgoing = {rank: [back[index, rank] for index in mine] for rank in ranks}
        returned = {rank: [self._shard_numel(index, self._rank) for index in of_rank[rank]] for rank in ranks}
        updates = self._exchange(outgoing, returned)
        for rank in ranks:
            yield from zip(of_rank[rank], updates[rank], strict=True)

    def _iterated(self, batch: Sequence[int], blocks: Tensor) -> Result:
        """Orthogonalise matrices that are whole here, ``(matrices, rows, cols)``."""
        with self._watch.span("newton_schulz"):
            result = self._orthogonalize(blocks, settings=self._ns_settings)
        self._stats.matrices_orthogonalized += len(batch)
        return self._result(batch, result)

    def _result(self, batch: Sequence[int], blocks: Tensor, together: Together | None = None) -> Result:
        def complete(blocks: Tensor) -> Iterator[tuple[int, Tensor]]:
            return zip(batch, blocks.to(self._wire_dtype).reshape(len(batch), -1), strict=True)

        return Result([(index, 0) for index in batch], blocks, complete, together=together)

    def _distributed(self, cut: Sequence[int], local: LocalOf) -> Iterator[tuple[int, Tensor]]:
        """Matrices that are cut over the group and stay cut."""

        def shard(index: int) -> Tensor:
            return local(index).view(self._shard_shape(index, self._rank))

        results = (self._iterated_together(batch, shard) for batch in self._batches(cut))
        for result in self._watch.settled(results, shard):
            yield from result.completed()

    def _iterated_together(self, batch: Sequence[int], shard: LocalOf) -> Result:
        """Orthogonalise matrices of which every rank of the group has a shard."""
        layout = self._shards(batch[0])
        assert layout.dim is not None
        iterate = functools.partial(
            orthogonalize_sharded, group=self._group, shard_dim=layout.dim - 2, shard_sizes=layout.sizes
        )
        first = self._rank == 0
        together = Together(self._group, layout.dim, layout.sizes, iterate, counts=first)
        names = ", ".join(self._matrices[index].name for index in batch[:3])
        with self._watch.span("newton_schulz"), phase(f"iteration of {names}", self._group):
            blocks = iterate(torch.stack([shard(index) for index in batch]), settings=self._ns_settings)
        self._stats.matrices_orthogonalized += len(batch) if first else 0
        return self._result(batch, blocks, together)

    def _batches(self, indices: Sequence[int]) -> list[list[int]]:
        """Group small matrices of equal shape and cut, alike on all ranks; large ones stay alone."""
        alike: dict[object, list[int]] = {}
        for index in indices:
            alike.setdefault((self._logical_shape(index), self._shards(index)), []).append(index)
        batches: list[list[int]] = []
        for members in alike.values():
            rows, cols = self._logical_shape(members[0])
            size = max(1, self._chunk_numel // (rows * cols)) if min(rows, cols) < _BATCH_BELOW else 1
            batches.extend(members[start : start + size] for start in range(0, len(members), size))
        return batches

    def _shard_shape(self, index: int, rank: int) -> tuple[int, int]:
        layout = self._shards(index)
        rows, cols = self._logical_shape(index)
        return (layout.sizes[rank], cols) if layout.dim == 0 else (rows, layout.sizes[rank])

    def _shard_numel(self, index: int, rank: int) -> int:
        rows, cols = self._shard_shape(index, rank)
        return rows * cols

    def _exchange(
        self, pieces: dict[int, list[Tensor]], wanted: dict[int, list[int]]
    ) -> dict[int, list[Tensor]]:
        """Send flat pieces to every rank; return what each rank sent, cut to the wanted lengths.

        What a rank keeps for itself goes through the same buffer, without being sent.
        """
        ranks = range(self._world_size)
        flat = [piece.to(self._device) for rank in ranks for piece in pieces[rank]]
        send = torch.cat(flat) if flat else torch.empty(0, dtype=self._wire_dtype, device=self._device)
        out = [sum(piece.numel() for piece in pieces[rank]) for rank in ranks]
        into = [sum(wanted[rank]) for rank in ranks]
        received = torch.empty(sum(into), dtype=self._wire_dtype, device=self._device)
        size = received.element_size()
        # As bytes: gloo does not know every half format, and no backend computes on this data.
        with phase("exchange between tensor-parallel ranks", self._group):
            dist.all_to_all_single(
                received.view(torch.uint8),
                send.view(torch.uint8),
                [count * size for count in into],
                [count * size for count in out],
                group=self._group,
            )
        self._stats.bytes_sent += (sum(out) - out[self._rank]) * size
        self._stats.exchanges += 1
        parts = received.split(into)
        return {rank: list(parts[rank].split(wanted[rank])) if wanted[rank] else [] for rank in ranks}
