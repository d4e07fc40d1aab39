"""One step of one step set: the loop over the chunks of its matrices, and AdamW for the rest."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.config.values import StatePolicy
from deepspeed_muon.monitoring.check import ResultCheck
from deepspeed_muon.monitoring.recorder import Exchanged, StepRecorder
from deepspeed_muon.ops.dispatch import matrix_norms
from deepspeed_muon.plan.chunks import build_exchange_plan
from deepspeed_muon.plan.owners import assign
from deepspeed_muon.plan.placement import Floats, Fragment
from deepspeed_muon.step.block_sums import BlockSums
from deepspeed_muon.step.passes import ChunkTable, RateTable, Step, apply, pack
from deepspeed_muon.step.quantized import MomentumBlocks, convert_momentum, scales_of
from deepspeed_muon.step.state import AdamW, State, passes_for, row_state_of, state_of
from deepspeed_muon.step.step_set import StepSet
from deepspeed_muon.step.strategies import Orthogonalize, WholeAtOwner, batches
from deepspeed_muon.step.tensor_parallel import OverTensorGroup
from deepspeed_muon.transport.all_to_all import (
    ChunkExchange,
    Codec,
    ExchangeBuffers,
    InFlight,
    StepContext,
    StepStats,
)
from deepspeed_muon.transport.row_state import ROW_BYTES, RowStorage
from deepspeed_muon.variants import VARIANTS


@dataclass(frozen=True, slots=True)
class StepResources:
    """What all step sets of an optimizer share.

    Attributes:
        device: Where the exchange and the iteration run; the partitions may be elsewhere (offload).
        orthogonalize: Runs the Newton-Schulz iteration.
        stats: Counters.
        recorder: Samples and counters of the check.
        buffers: Memory of the exchange.
        policy: Dtype of the state.
        overlap: Whether chunks are exchanged while others are orthogonalised.
    """

    device: torch.device
    orthogonalize: Orthogonalize
    stats: StepStats
    recorder: StepRecorder
    buffers: ExchangeBuffers
    policy: StatePolicy
    overlap: bool


class StepRunner:
    """Runs the step of one :class:`StepSet`.

    Attributes:
        step_set: The set.
        context: What every part of its step needs.
        assignment: The owners of its matrices, by which :attr:`plan` was made.
        plan: The exchange plan.
        rows: Where the row state of the variant is stored; ``None`` if it has none.
        check: Checks and samples the results.
        adam: Updates the parameters that are not Muon's.
    """

    def __init__(
        self,
        step_set: StepSet,
        config: MuonConfig,
        resources: StepResources,
        *,
        load: Floats,
        number: int = 0,
    ) -> None:
        """Make the exchange plan; nothing is sent.

        Args:
            step_set: Partitions and layouts.
            config: The optimizer's settings.
            resources: Shared with the other sets.
            load: Operations that each rank already has from other sets. Mutated: the new work is added.
            number: The number of the set, for errors.
        """
        self.step_set = step_set
        self._policy, self._overlap = resources.policy, resources.overlap
        dtype = config.resolved_wire_dtype(step_set.model_dtype)
        self.context = context = StepContext(
            number,
            step_set.group,
            step_set.rank,
            step_set.world_size,
            resources.device,
            dtype,
            Codec(dtype, config.wire_format),
            config.ns_settings(resources.device),
            resources.stats,
            VARIANTS[config.variant],
            step_set.tensor_group,
        )
        self.assignment = assign(step_set.matrices, context.ns_settings, load)
        self.plan = build_exchange_plan(
            self.assignment.matrices,
            self.assignment.owners,
            rank=step_set.rank,
            world_size=step_set.world_size,
            chunk_numel=config.exchange_chunk_numel,
            wire=config.wire_format,
            row_numel=ROW_BYTES * len(context.variant.state) // context.codec.dtype.itemsize,
        )
        self.rows: RowStorage | None = None
        if context.variant.finish is not None:
            self.rows = RowStorage(self.plan, self.assignment.row_fragments(), context)
        self._exchange = ChunkExchange(self.plan, context, resources.buffers, overlap=self._overlap)
        matrices, device, ns = self.plan.matrices, context.device, context.ns_settings
        norms = matrix_norms(config.ns_backend, device)
        self.check = ResultCheck(
            resources.recorder, matrices, device=device, ns=ns, norms=norms, origin=self.assignment.origin
        )
        whole = WholeAtOwner(matrices, context, resources.orthogonalize, self.check)
        group = step_set.tensor_group
        self._strategy = whole if group is None else OverTensorGroup(whole, config, group)
        self._muon = [partition for partition in step_set.partitions if partition.muon]
        self._positions = numbers = {partition.index: number for number, partition in enumerate(self._muon)}
        self._rates = RateTable(matrices, context.variant, numbers)
        self._passes = passes_for(step_set.partitions, config, resources.policy)
        self._prepare_tables()
        self.adam = AdamW(step_set, config, resources.policy)

    def _prepare_tables(self) -> None:
        """Make the tables, and what the variant, its state and a momentum in 8 bits need; nothing is sent."""
        context, plan = self.context, self.plan
        # With owned matrices in the order in which they run in batches.
        order = functools.partial(batches, plan.matrices, context)
        self._tables = [
            ChunkTable(plan, chunk, order(chunk.owned), self._positions, exact=context.codec.is_uncompressed)
            for chunk in plan.chunks
        ]
        if self._policy.quantizes_momentum:
            for table in self._tables:
                table.blocks = self.blocks.table(table.packed)
        self._sums: list[BlockSums] = []
        if context.variant.apply is not None:
            device = self.step_set.partitions[0].tensor.device
            self._sums = [
                BlockSums(plan, chunk.matrices, table.held, context, device)
                for chunk, table in zip(plan.chunks, self._tables, strict=True)
            ]

    @property
    def row_fragments(self) -> Sequence[Fragment]:
        """Where the row state of each matrix of the plan is stored; empty where the variant has none."""
        return () if self.rows is None else self.rows.fragments

    @functools.cached_property
    def blocks(self) -> MomentumBlocks:
        """The blocks of a momentum in 8 bits."""
        plan, origin = self.plan.matrices, self.assignment.origin
        return MomentumBlocks(self.step_set, plan, origin, self._positions, self.context)

    def convert_momentum(self, state: State) -> None:
        """Bring the momentum of the set into the dtype that it is kept in; collective as :func:`.convert_momentum`."""
        convert_momentum(self._muon, state, self._policy, lambda: self.blocks, self._passes)

    def inputs(self) -> Iterator[Tensor]:
        """Yield empty tensors like those that this rank orthogonalises in a step with a gradient of every matrix."""
        for chunk in self.plan.chunks:
            yield from self._strategy.inputs(chunk.owned)

    @property
    def wire_bytes_per_step(self) -> int:
        """Bytes that this rank sends to data-parallel ranks in a step in which every matrix has a gradient."""
        sums = sum(each.sent_bytes for each in self._sums)
        sent = self.plan.sent_elements * self.context.codec.dtype.itemsize
        cut = self.blocks.sent_bytes if self._policy.quantizes_momentum else 0
        return sent + sums + cut

    def run(
        self,
        flags: Sequence[int],
        grads: Mapping[int, Tensor],
        groups: Mapping[int, dict[str, Any]],
        state: State,
    ) -> None:
        """Update all partitions of the set in place.

        Must be called by all ranks of the group with the same flags.

        Args:
            flags: For each parameter of the set, matrices first, whether any rank has a gradient of it.
            grads: Partition index to its gradient, flat and contiguous.
            groups: Partition index to the param group with its rates.
            state: The optimizer's state. Mutated; missing entries are created.
        """
        with self.step_set.flat_partitions() as flat, self._begin(flags, grads, groups, state, flat) as step:
            chunks = [number for number, chunk in enumerate(self.plan.chunks) if step.active(chunk.matrices)]
            moving = [number for number in chunks if self.plan.chunks[number].scatters]
            local = [number for number in chunks if not self.plan.chunks[number].scatters]
            # With overlap a chunk's gather starts one turn before it is orthogonalised, and its updates are applied one
            # turn after; what is in flight is never waited for at once.
            early = late = int(self._overlap)
            # Half of what never moves hides the first gather, half the last scatter.
            half = len(local) - (len(local) // 2 if early and moving else 0)
            flights: list[InFlight] = []
            for turn in range(-early, max(len(moving), 1) + late):
                if turn + early < len(moving):
                    flights.append(self._exchange.open(moving[turn + early], turn + early))
                    self._pack(flights[-1], step)
                    self._exchange.gather(flights[-1])
                if turn == -early:
                    self.adam.run(flags, grads, groups, state, flat)
                    self._update_in_place(local[:half], step)
                if 0 <= turn < len(moving):
                    self._wait_for_gather(flights[turn])
                    self._orthogonalize(flights[turn], step)
                    self._exchange.scatter(flights[turn])
                if turn == len(moving) - 1:
                    self._update_in_place(local[half:], step)
                if 0 <= turn - late < len(moving):
                    self._apply(flights[turn - late], step)

    @contextlib.contextmanager
    def _begin(
        self,
        flags: Sequence[int],
        grads: Mapping[int, Tensor],
        groups: Mapping[int, dict[str, Any]],
        state: State,
        flat: Mapping[int, Tensor],
    ) -> Iterator[Step]:
        """Read the rates, momentum and row state of this step."""
        self.convert_momentum(state)
        own = [state_of(partition, state, self._policy) for partition in self._muon]
        order = [partition.index for partition in self._muon]
        of_matrices = flags[: len(self.step_set.matrices)]
        mask = None
        if not all(of_matrices):
            mask = torch.tensor([bool(flags[origin]) for origin in self.assignment.origin])
        momentum = [each["momentum_buffer"].view(-1) for each in own]
        weights = [flat[index] for index in order]
        entering = self.step_set.gradients(grads, flat, of_matrices)
        rates = self._rates.of({index: groups[index] for index in order})
        # Also in a step without gradients: a later one would take the state for lost.
        variant, counts = self.context.variant, {} if self.rows is None else self.rows.counts
        vectors = {
            partition.index: row_state_of(partition, state, variant, counts.get(partition.index, 0))
            for partition in self._muon
        }
        is_active = any(of_matrices)
        step = Step(mask, rates, weights, momentum, entering, None, self._passes)
        if self._policy.quantizes_momentum:
            # Also in a step without gradients: a state dict has codes and scales, or neither.
            scales = [
                scales_of(state_of_partition, partition, self.blocks.scale_counts[partition.index])
                for state_of_partition, partition in zip(own, self._muon, strict=True)
            ]
            if is_active:
                cut = self.blocks.begin(momentum, scales, step.grads, rates.momentum, mask, self._passes)
                step = replace(step, quantized=(scales, cut))
        with contextlib.ExitStack() as opened:
            if is_active and self.rows is not None:
                rows = opened.enter_context(self.rows.opened(vectors, rates.settings))
                step = replace(step, finish=rows)
            yield step

    def _pack(self, flight: InFlight, step: Step) -> None:
        """Update the momentum of a chunk's matrices and put the directions that are sent into the send buffer."""
        table, context, send = self._tables[flight.number], self.context, flight.send_buffer
        device, dtype = step.momentum[0].device, context.comm_dtype
        # The buffer keeps old data for a matrix without a gradient: nobody reads it.
        directions = torch.empty(table.room, dtype=dtype, device=device)
        direct = context.codec.is_uncompressed and device == send.device
        room = send if direct else torch.empty(table.sent_room, dtype=dtype, device=device)
        pack(table, step, directions, room)
        flight.directions = directions.to(context.device)
        if direct or not flight.chunk.gathers:
            return
        room = room.to(context.device)
        if context.codec.is_uncompressed:
            send.copy_(room)
            return
        for matrix, segment in table.coded:
            if step.mask is None or step.mask[matrix]:
                fragments = segment.in_matrices(room)
                context.codec.write(segment.in_buffer(send), fragments, self._note("direction"))

    def _wait_for_gather(self, flight: InFlight) -> None:
        with self.check.recorder.span("gather"):
            self._exchange.wait("gather", flight)

    def _orthogonalize(self, flight: InFlight, step: Step) -> None:
        """Orthogonalise the owned matrices of a chunk. The updates overwrite the directions, also what was gathered."""
        table = self._tables[flight.number]
        owned = step.active(flight.chunk.owned)
        codec, note = self.context.codec, self._note("update")
        for indices, found in self._strategy.updates(
            owned, functools.partial(self._directions, flight), step
        ):
            batch, updates = table.batch(indices), found.contiguous().view(-1)
            for segment in batch.received:
                place, fragments = segment.in_buffer(flight.receive_buffer), segment.in_matrices(updates)
                codec.write(place, fragments, note)
                if flight.chunk.copies and not codec.is_uncompressed:
                    # All copies of a replicated matrix get the same numbers, also the owner's.
                    fragments.copy_(codec.read(place, segment.shape[2]))
            for segment in batch.own:
                segment.in_buffer(flight.directions).copy_(segment.in_matrices(updates))
        if step.finish is not None and flight.chunk.copies:
            step.finish.send(owned, flight.chunk.receive_buffer.segments, flight.receive_buffer)

    def _directions(self, flight: InFlight, indices: Sequence[int]) -> Tensor:
        """Return the directions of owned matrices of one shape, ``(matrices, rows, cols)``.

        They are used where they lie if they lie there one after the other.
        """
        first, batch = self.plan.matrices[indices[0]], self._tables[flight.number].batch(indices)
        shape, read = (len(indices), first.rows, first.cols), self.context.codec.read
        if flight.chunk.gathers:
            segments = batch.received
            parts = (read(each.in_buffer(flight.receive_buffer), each.shape[2]) for each in segments)
        else:
            segments = batch.own
            parts = (each.in_buffer(flight.directions) for each in segments)
        if batch.in_order:
            return next(parts).contiguous().view(shape)
        whole = torch.empty(math.prod(shape), dtype=self.context.comm_dtype, device=self.context.device)
        for segment, part in zip(segments, parts, strict=True):
            segment.in_matrices(whole).copy_(part)
        return whole.view(shape)

    def _note(self, what: Exchanged) -> Callable[[Tensor, Tensor], None] | None:
        """Return what notes in sampled steps how much int8 loses."""
        recorder = self.check.recorder
        return functools.partial(recorder.keep_loss, what) if recorder.sampling else None

    def _update_in_place(self, numbers: Sequence[int], step: Step) -> None:
        """Update the matrices of chunks in which nothing moves."""
        for number in numbers:
            chunk = self._exchange.open(number, None)
            self._pack(chunk, step)
            self._orthogonalize(chunk, step)
            self._apply(chunk, step)

    def _apply(self, flight: InFlight, step: Step) -> None:
        """Wait for the scatter of a chunk and apply all its updates."""
        with self.check.recorder.span("scatter"):
            self._exchange.wait("scatter", flight)
        if step.finish is not None and flight.chunk.copies:
            active = step.active(flight.chunk.matrices)
            step.finish.receive(active, flight.chunk.send_buffer.segments, flight.send_buffer)
        table, codec = self._tables[flight.number], self.context.codec
        updates = flight.send_buffer
        if not codec.is_uncompressed:
            updates = torch.empty(table.sent_room, dtype=self.context.comm_dtype, device=updates.device)
            for matrix, segment in table.coded:
                if step.mask is None or step.mask[matrix]:
                    arrived = codec.read(segment.in_buffer(flight.send_buffer), segment.shape[2])
                    segment.in_matrices(updates).copy_(arrived)
        if self.context.variant.apply is not None:
            sums = self._sums[flight.number]
            self.check.add_zero_weights(
                *sums.apply(self.context.variant.apply, step, [flight.directions, updates])
            )
        else:
            apply(step.active_rows(table.held), step, [flight.directions, updates])
        del flight.directions  # as large as what this rank owns
