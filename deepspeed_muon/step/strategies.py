"""Strategies: a matrix is orthogonalised whole at its owner, or cut over a process group. All results are checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.monitoring.check import Member, Result, ResultCheck, Together
from deepspeed_muon.ops import BATCH_NUMEL
from deepspeed_muon.plan.exchange import ExchangePlan
from deepspeed_muon.plan.layout import Block, MatrixLayout
from deepspeed_muon.step.passes import Rates, Step, read
from deepspeed_muon.step.tables import ChunkTable
from deepspeed_muon.transport.exchange import InFlight, StepContext, aligned
from deepspeed_muon.transport.ranks import phase
from deepspeed_muon.transport.row_state import RowsAtOwner
from deepspeed_muon.transport.sharded import orthogonalize_sharded

# (batch, rows, cols) -> the same in the settings' dtype; called as ``orthogonalize(x, settings=...)``.
Orthogonalize = Callable[..., Tensor]
# Indices of matrices of one shape, and their updates or those of this rank's parts: ``(matrices, elements)`` in the
# communication dtype.
Updates = Iterator[tuple[Sequence[int], Tensor]]


class Directions(Protocol):
    """The directions of one chunk, as matrices."""

    @property
    def rates(self) -> Rates:
        """How each matrix of the plan is updated."""

    @property
    def finish(self) -> RowsAtOwner | None:
        """Turns orthogonalised blocks into updates, as the variant says; ``None`` if they are the updates."""

    def stacked(self, indices: Sequence[int], /) -> Tensor:
        """Return matrices of one shape, or this rank's parts: ``(matrices, rows, cols)`` in the communication dtype."""


class Strategy(Protocol):
    """One way to turn the directions of matrices into updates."""

    def updates(self, owned: Sequence[int], directions: Directions, /) -> Updates:
        """Yield the checked updates of all matrices in ``owned``, each once; must be exhausted."""


class ChunkDirections:
    """The directions of one chunk's owned matrices: this rank's fragments, and what the gather brought."""

    def __init__(
        self, plan: ExchangePlan, context: StepContext, table: ChunkTable, flight: InFlight, step: Step
    ) -> None:
        """Keep the arguments; nothing is copied. The matrices lie in ``flight.idle``, as far as it goes."""
        self.rates = step.weights.rates
        self.finish = step.finish
        self._matrices = plan.matrices
        self._context = context
        self._table = table
        self._flight = flight
        self._idle = flight.idle

    def stacked(self, indices: Sequence[int]) -> Tensor:
        """Return ``(matrices, rows, cols)``. Matrices that lie whole on this rank are used in place."""
        first, batch = self._matrices[indices[0]], self._table.batch(indices)
        shape, numel = (len(indices), first.rows, first.cols), len(indices) * first.numel
        directions = self._flight.directions
        if batch.start is not None:
            return directions.narrow(0, batch.start, numel).view(shape)
        full = self._empty(numel)
        for copy in batch.own:
            copy.in_batch(full).copy_(copy.in_buffer(directions))
        for copy in batch.travelled if self._flight.chunk.gathers else ():
            read(copy.in_batch(full), copy.in_buffer(self._flight.receive_buffer), self._context.codec)
        return full.view(shape)

    def _empty(self, numel: int) -> Tensor:
        """Return flat memory in the communication dtype that nobody else uses before the chunk is done."""
        if self._idle is None or self._idle.numel() < aligned(numel):
            return torch.empty(numel, dtype=self._context.comm_dtype, device=self._context.device)
        place, self._idle = self._idle.tensor_split([aligned(numel)])
        return place.narrow(0, 0, numel)


def _batch_size(context: StepContext, rows: int, cols: int, *, numel: int = 0) -> int:
    """Return how many blocks of this shape run together, or how many matrices of ``numel`` elements made of them."""
    return max(1, BATCH_NUMEL // (numel or rows * cols)) if min(rows, cols) < context.batch_below else 1


def _blocks(matrix: MatrixLayout) -> Sequence[Block]:
    """Return the blocks of a whole matrix; a matrix that is cut over a group is one block."""
    return [Block(0, 0, *matrix.logical_shape)] if matrix.is_cut else matrix.blocks()


def _batches(
    matrices: Sequence[MatrixLayout], context: StepContext, indices: Sequence[int], *, by_shards: bool = False
) -> list[list[int]]:
    """Group small matrices of equal blocks, with ``by_shards`` only those that are cut alike; large ones stay alone."""
    alike: dict[object, list[int]] = {}
    for index in indices:
        matrix = matrices[index]
        cut = matrix.shards if by_shards else matrix.is_cut
        kind = tuple(_blocks(matrix)), matrix.transposed, cut
        alike.setdefault(kind, []).append(index)
    batches: list[list[int]] = []
    for members in alike.values():
        first = matrices[members[0]]
        block = _blocks(first)[0]
        rows, cols = first.logical_shape
        size = _batch_size(context, block.rows, block.cols, numel=rows * cols)
        batches.extend(members[start : start + size] for start in range(0, len(members), size))
    return batches


class WholeAtOwner:
    """Orthogonalises matrices that are whole on this rank; small blocks of one shape run in one batch."""

    def __init__(
        self,
        matrices: Sequence[MatrixLayout],
        context: StepContext,
        orthogonalize: Orthogonalize,
        check: ResultCheck,
    ) -> None:
        self._matrices = matrices
        self._context = context
        self._orthogonalize = orthogonalize
        self._check = check
        # Almost always a chunk has the same active matrices in every step.
        self._batches = functools.lru_cache(maxsize=64)(functools.partial(_batches, matrices, context))

    def batches(self, indices: Sequence[int]) -> list[list[int]]:
        """Group small matrices of equal blocks; large ones stay alone."""
        return self._batches(tuple(indices))

    def updates(self, owned: Sequence[int], directions: Directions) -> Updates:
        """Yield indices and updates of owned matrices; each matrix once."""
        for result in self._check.settled(self._results(owned, directions)):
            yield from result.stack.take(result)

    def _results(self, owned: Sequence[int], directions: Directions) -> Iterator[_StackResult]:
        context = self._context
        for batch in self.batches(owned):
            stack = _Stack([(index, self._matrices[index]) for index in batch], directions.stacked(batch))
            # A stack with several owners counts at the owner of its first blocks.
            context.stats.matrices_orthogonalized += sum(
                self._matrices[index].first_row == 0 for index in batch
            )
            for members, inputs in stack.groups(context):
                with self._check.recorder.span("newton_schulz"):
                    blocks = self._orthogonalize(inputs, settings=context.ns_settings)
                factors = [(directions.rates.scales[index], number) for index, number in members]
                scales = [each[number] for each, number in factors]
                relative = [each[number] / each[0] for each, number in factors]
                yield _StackResult(
                    members, inputs, blocks, scales, directions.finish, stack=stack, relative=relative
                )


class _Stack:
    """Matrices of one shape: takes their blocks out of the directions, and puts their updates together again."""

    def __init__(self, matrices: Sequence[tuple[int, MatrixLayout]], directions: Tensor) -> None:
        self._indices = [index for index, _ in matrices]
        self._position = {index: position for position, index in enumerate(self._indices)}
        self._blocks = _blocks(matrices[0][1])
        first = matrices[0][1]
        self._contiguous = first.is_cut or first.equal_blocks is not None
        self._directions = directions
        self._update: Tensor | None = None
        self._left = len(self._indices) * len(self._blocks)

    def groups(self, context: StepContext) -> Iterator[tuple[list[Member], Tensor]]:
        """Yield the blocks that run together, as members and ``(blocks, rows, cols)``."""
        if self._contiguous:
            block = self._blocks[0]
            blocks = self._directions.view(-1, block.rows, block.cols)
            members = [(index, number) for index in self._indices for number in range(len(self._blocks))]
            size = _batch_size(context, block.rows, block.cols)
            for start in range(0, len(members), size):
                yield members[start : start + size], blocks[start : start + size]
            return
        of_shape: dict[tuple[int, int], list[Member]] = {}
        for number, block in enumerate(self._blocks):
            for index in self._indices:
                of_shape.setdefault((block.rows, block.cols), []).append((index, number))
        for shape, members in of_shape.items():
            size = _batch_size(context, *shape)
            for start in range(0, len(members), size):
                together = members[start : start + size]
                views = [
                    self._directions[self._position[index]][self._blocks[number].area]
                    for index, number in together
                ]
                yield together, views[0].unsqueeze(0) if len(views) == 1 else torch.stack(views)

    def take(self, result: _StackResult) -> Updates:
        """Take updates of blocks; yield those of the matrices once all of their blocks are there."""
        whole = len(result.members) == len(self._indices) * len(self._blocks)
        if self._contiguous and whole:
            flat = result.updates.to(self._directions.dtype).reshape(len(self._indices), -1)
            yield self._indices, flat
            return
        if self._update is None:
            self._update = torch.empty_like(self._directions)
        for (index, number), done, scale in zip(result.members, result.updates, result.relative, strict=True):
            target = self._update[self._position[index]][self._blocks[number].area]
            target.copy_(done if scale == 1.0 else done.mul_(scale))
        self._left -= len(result.members)
        if not self._left:
            yield self._indices, self._update.reshape(len(self._indices), -1)


@dataclass(slots=True, kw_only=True)
class _StackResult(Result):
    """A result with its stack, and the scale of each entry relative to the first block of its matrix."""

    stack: _Stack
    relative: Sequence[float]


class CutOverGroup:
    """Orthogonalises matrices that stay cut over a tensor-parallel group."""

    def __init__(
        self,
        matrices: Sequence[MatrixLayout],
        context: StepContext,
        check: ResultCheck,
        *,
        group: dist.ProcessGroup,
    ) -> None:
        self._matrices = matrices
        self._context = context
        self._check = check
        self._group = group

    def updates(self, owned: Sequence[int], directions: Directions) -> Updates:
        """Yield indices and updates of this rank's parts of matrices.

        Must be called by all ranks that have parts of the same matrices. All ranks follow the order of the plan, so
        that two ranks never wait for each other in different matrices.

        Args:
            owned: Matrices of which this rank has a part.
            directions: Its ``stacked`` returns this rank's parts.
        """
        results = (
            self._iterated(batch, directions)
            for batch in _batches(self._matrices, self._context, owned, by_shards=True)
        )
        for result in self._check.settled(results):
            flat = result.updates.to(self._context.comm_dtype).reshape(len(result.members), -1)
            yield [index for index, _ in result.members], flat

    def _iterated(self, batch: Sequence[int], directions: Directions) -> Result:
        """Orthogonalise matrices of one shape, cut alike."""
        first = self._matrices[batch[0]]
        assert first.shards is not None and first.shards.dim is not None
        dim, sizes, group = first.shards.dim, first.shards.sizes, self._group
        iterate = functools.partial(orthogonalize_sharded, group=group, shard_dim=dim - 2, shard_sizes=sizes)
        counts = dist.get_rank(group) == 0
        inputs = directions.stacked(batch)
        names = ", ".join(self._matrices[index].name for index in batch[:3])
        with self._check.recorder.span("newton_schulz"), phase(f"iteration of {names}", group):
            blocks = iterate(inputs, settings=self._context.ns_settings)
        first_blocks = sum(self._matrices[index].first_row == 0 for index in batch)
        self._context.stats.matrices_orthogonalized += first_blocks if counts else 0
        scales = [directions.rates.scales[index][0] for index in batch]
        together = Together(group, dim, sizes, iterate, counts)
        members = [(index, 0) for index in batch]
        return Result(members, inputs, blocks, scales, directions.finish, together)
