"""One step of one step set: the loop over the chunks of its matrices, and AdamW for the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.config import MuonConfig
from deepspeed_muon.monitoring.check import ResultCheck
from deepspeed_muon.monitoring.recorder import StepRecorder, Travelling
from deepspeed_muon.ops import matrix_norms
from deepspeed_muon.plan.exchange import Chunk, Segment
from deepspeed_muon.plan.rows import RowPlaces, row_places
from deepspeed_muon.step.adam import AdamUpdates
from deepspeed_muon.step.assignment import planned
from deepspeed_muon.step.directions import ChunkDirections, Step
from deepspeed_muon.step.gradients import GradientInspection, GradientReport
from deepspeed_muon.step.momentum import LocalDirections, MomentumSource
from deepspeed_muon.step.placements import CutOverGroup, Orthogonalize, Placement, WholeAtOwner
from deepspeed_muon.step.state import State, StatePolicy, passes_for, row_state_of, state_of
from deepspeed_muon.step.step_set import Refresh, StepSet
from deepspeed_muon.step.tensor_parallel import OverTensorGroup
from deepspeed_muon.step.update_rule import BlockScales, UpdateTable
from deepspeed_muon.transport.buffers import ExchangeBuffers
from deepspeed_muon.transport.context import StepContext, StepStats
from deepspeed_muon.transport.exchange import ChunkExchange, Travel, cut, part_of
from deepspeed_muon.transport.row_state import RowStateExchange
from deepspeed_muon.transport.wire import wire_for
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
        overlap: Whether chunks travel while others are orthogonalised.
    """

    device: torch.device
    orthogonalize: Orthogonalize
    stats: StepStats
    recorder: StepRecorder
    buffers: ExchangeBuffers
    policy: StatePolicy
    overlap: bool


@dataclass(frozen=True, slots=True)
class PendingUpdates:
    """Updates of a step whose scatter is still in flight. It holds no gradient.

    Attributes:
        runner: The runner of the step set.
        travel: The chunk that is in flight.
        active: Whether any rank has a gradient, one flag for each matrix of the exchange plan.
        table: How the updates reach the weights.
        next_slot: The slot for the first chunk of the next step set.
    """

    runner: StepRunner
    travel: Travel
    active: Sequence[bool]
    table: UpdateTable
    next_slot: int

    def wait_and_apply(self) -> None:
        """Wait for the updates, apply them, and refresh the weights of the forward pass; communicates nothing."""
        self.runner.apply_arrived(self.travel, self.active, self.table, refresh=self.runner.step_set.refresh)


class StepRunner:
    """Runs the step of one :class:`StepSet`."""

    def __init__(
        self,
        step_set: StepSet,
        config: MuonConfig,
        resources: StepResources,
        *,
        load: list[float],
        number: int = 0,
        leaves_pending: bool = False,
        follows_pending: bool = False,
    ) -> None:
        """Make the exchange plan; nothing is sent.

        Args:
            step_set: Partitions and layouts.
            config: The optimizer's settings.
            resources: Shared with the other sets.
            load: Operations that each rank already has from other sets. Mutated: the new work is added.
            number: The number of the set, for errors.
            leaves_pending: Whether the last updates may still be in flight while the next set is updated.
            follows_pending: Whether updates of the previous set may still be in flight when this one begins.
        """
        self.step_set = step_set
        self._leaves_pending = leaves_pending
        self._policy = resources.policy
        self._overlap = resources.overlap
        dtype = config.resolved_wire_dtype(step_set.model_dtype)
        self.context = context = StepContext(
            number,
            step_set.group,
            step_set.rank,
            step_set.world_size,
            resources.device,
            dtype,
            wire_for(config.wire_format, dtype),
            config.ns_settings(resources.device),
            resources.stats,
        )
        self.assignment, self.plan = planned(
            step_set,
            config,
            device=resources.device,
            load=load,
        )
        self._held = [matrix.spread.on(step_set.rank) for matrix in self.plan.matrices]
        self._scales = BlockScales(self.plan.matrices)
        self._exchange = ChunkExchange(
            self.plan,
            context,
            resources.buffers,
            overlap=self._overlap,
            leaves_pending=leaves_pending,
            follows_pending=follows_pending,
        )
        self._place(config, resources)
        self._variant = VARIANTS[config.variant]
        self._rows = (
            RowStateExchange(self.plan, context, self._variant, step_set.tensor_group)
            if self._variant.finish is not None
            else None
        )
        self._passes = {
            partition.index: passes_for(partition, config, resources.policy)
            for partition in step_set.partitions
            if partition.muon
        }
        self.inspection = GradientInspection(step_set, resources.device)
        self._adam = AdamUpdates(step_set, config, resources.policy)
        self.adam = self._adam.kernel

    def _place(self, config: MuonConfig, resources: StepResources) -> None:
        """Make the placement."""
        matrices, context, tensor_group = self.plan.matrices, self.context, self.step_set.tensor_group
        self._check = ResultCheck(
            resources.recorder,
            matrices,
            device=context.device,
            ns=context.ns_settings,
            norms=matrix_norms(config.ns_backend, context.device),
        )
        self._whole = WholeAtOwner(matrices, context, resources.orthogonalize, self._check)
        self._placement: Placement = self._whole
        if tensor_group is not None:
            distributed = config.tensor_parallel_mode == "distributed"
            self._placement = OverTensorGroup(
                matrices,
                context,
                group=tensor_group,
                whole=self._whole,
                cut=CutOverGroup(matrices, context, self._check, group=tensor_group) if distributed else None,
                chunk_numel=config.exchange_chunk_numel,
            )

    @property
    def wire_bytes_per_step(self) -> int:
        """Bytes that this rank sends to data-parallel ranks in a step in which every matrix has a gradient."""
        rows = 0 if self._rows is None else self._rows.sent_elements
        return self.plan.sent_elements * self.context.wire.dtype.itemsize + rows * torch.float32.itemsize

    @property
    def row_places(self) -> tuple[RowPlaces, ...]:
        """Where the variant's row state lies, for each matrix of the set; empty if it has none."""
        return row_places(self.step_set.matrices) if self._variant.state else ()

    def inspect_gradients(self, grads: Mapping[int, Tensor]) -> GradientReport:
        """Find out, together with the group, which parameters have a gradient and whether all are finite.

        Must be called by all ranks of the group.

        Args:
            grads: Partition index to its gradient, flat and contiguous; a missing one counts as zero.
        """
        return self.inspection.report(grads, self.take_failed())

    def take_failed(self) -> list[str]:
        """Return the names of the matrices whose update this rank left out, and forget them."""
        names = self.failed_names()
        self._check.failed_last.clear()
        return names

    def failed_names(self) -> list[str]:
        """Return the names of the matrices whose update this rank left out."""
        failed = {self.assignment.origin[index] for index in self._check.failed_last}
        return [self.step_set.matrices[number].name for number in sorted(failed)]

    def run(
        self,
        report: GradientReport,
        grads: Mapping[int, Tensor],
        groups: Mapping[int, dict[str, Any]],
        state: State,
        *,
        previous: PendingUpdates | None = None,
    ) -> PendingUpdates | None:
        """Update all partitions of the set in place.

        Must be called by all ranks of the group with the same report.

        Args:
            report: The outcome of :meth:`inspect_gradients`.
            grads: Partition index to its gradient, flat and contiguous.
            groups: Partition index to the param group with its rates.
            state: The optimizer's state. Mutated; missing entries are created.
            previous: Pending updates of the previous set; they are applied.

        Returns:
            The pending updates of this set, if it was made with ``leaves_pending``.
        """
        with self.step_set.flat_partitions() as flat, self._begin(report, grads, groups, state, flat) as step:
            chunks = [chunk for chunk in self.plan.chunks if chunk.active(step.active)]
            moving = [chunk for chunk in chunks if chunk.scatters]
            staying = [chunk for chunk in chunks if not chunk.scatters]
            slot = 0 if previous is None else previous.next_slot
            # With overlap a chunk's gather starts one turn before it is orthogonalised, and its updates are applied one
            # turn after; what travels is never waited for at once.
            early = late = int(self._overlap)
            # Half of what never moves hides the first gather, half the last scatter.
            half = len(staying) - (len(staying) // 2 if early and moving else 0)
            pending = self._leaves_pending and bool(moving)
            travels: list[Travel] = []
            for turn in range(-early, max(len(moving), 1) + late - pending):
                if turn + early < len(moving):
                    travels.append(self._exchange.open(moving[turn + early], slot + turn + early))
                    self._pack(travels[-1], step)
                    self._exchange.gather(travels[-1])
                if turn == -early:
                    self._adam.run(report.active, grads, groups, state, flat)
                    if previous is not None:
                        previous.wait_and_apply()
                    self._update_in_place(staying[:half], step)
                if 0 <= turn < len(moving):
                    self._wait_for_gather(travels[turn])
                    travel = travels[turn]
                    self._orthogonalize(travel.chunk, travel.owned, step, idle=travel.idle)
                    self._exchange.scatter(travels[turn])
                if turn == len(moving) - 1:
                    self._update_in_place(staying[half:], step)
                if 0 <= turn - late < len(moving):
                    self.apply_arrived(travels[turn - late], step.active, step.table)
        if not pending:
            return None
        next_slot = (slot + len(moving)) % self._exchange.slots
        return PendingUpdates(self, travels[-1], step.active, step.table, next_slot)

    @contextlib.contextmanager
    def _begin(
        self,
        report: GradientReport,
        grads: Mapping[int, Tensor],
        groups: Mapping[int, dict[str, Any]],
        state: State,
        flat: Mapping[int, Tensor],
    ) -> Iterator[Step]:
        """Read the rates and momentum of this step; bring the row state to the owners, and back at the end."""
        muon = [partition for partition in self.step_set.partitions if partition.muon]
        sources: dict[int, MomentumSource] = {}
        for partition in muon:
            own, group = state_of(partition, state, self._policy), groups[partition.index]
            sources[partition.index] = MomentumSource(
                own["momentum_buffer"].view(-1),
                grads.get(partition.index),
                float(group["momentum"]),
                bool(group["nesterov"]),
                self._passes[partition.index].momentum_pack,
            )
        active = [report.active[origin] for origin in self.assignment.origin]
        directions = LocalDirections(self.plan.matrices, self._held, sources, self.context)
        table = UpdateTable(self.plan.matrices, self._scales, groups, self._passes, flat)
        rows = self._rows
        if rows is None or not any(active):
            yield Step(active, directions, table, None)
            return
        kept = {
            partition.index: row_state_of(partition, state, self._variant, rows.numel(partition.index))
            for partition in muon
        }
        settings = [
            {each.name: float(groups[matrix.partition][each.name]) for each in self._variant.settings}
            for matrix in self.plan.matrices
        ]
        finish = rows.gather(kept, settings)
        yield Step(active, directions, table, finish)
        rows.scatter(finish, kept)

    def _pack(self, travel: Travel, step: Step) -> None:
        """Update the momentum of a chunk's matrices and put the directions that travel into the send buffer."""
        # The momentum of a replicated matrix is updated on every rank, and its direction travels nowhere.
        step.directions.prepare(self._in_batches(travel.chunk, step.active, others=not travel.chunk.gathers))
        for segment in travel.chunk.held_buffer.segments if travel.chunk.gathers else ():
            # The buffer keeps old data for a matrix without a gradient: nobody reads it.
            if step.active[segment.matrix]:
                place = cut(travel.held, segment)
                if self.context.wire.exact:
                    step.directions.write(segment.matrix, place.view(-1))
                    continue
                made = torch.empty(segment.numel, dtype=self.context.wire_dtype, device=self.context.device)
                step.directions.write(segment.matrix, made)
                self._write(place, made.unsqueeze(0), "direction")

    def _wait_for_gather(self, travel: Travel) -> None:
        with self._check.recorder.span("gather"):
            self._exchange.wait("gather", travel)

    def _orthogonalize(
        self, chunk: Chunk, buffer: Tensor | None, step: Step, *, idle: Tensor | None = None
    ) -> None:
        """Orthogonalise the owned matrices of a chunk; apply what stays, and put what travels into ``buffer``.

        There the updates overwrite the directions that the gather brought. The matrices lie in ``idle`` meanwhile.
        """
        outgoing: dict[int, list[Segment]] = {}
        for segment in chunk.owned_buffer.segments:
            outgoing.setdefault(segment.matrix, []).append(segment)
        owned = [index for index in chunk.owned if step.active[index]]
        directions = ChunkDirections(self.plan, self.context, step, chunk, buffer, idle)
        for index, update in self._placement.updates(owned, directions):
            segments = outgoing.get(index, [])
            for segment in segments:
                assert buffer is not None
                self._write(cut(buffer, segment), part_of(update, segment), "update")
            if buffer is not None and segments and self.plan.matrices[index].replicated:
                # All copies of a replicated matrix get the same numbers, also the owner's.
                update = self.context.wire.read(cut(buffer, segments[0]), segments[0].numel).view(-1)
            own = self._held[index]
            if own is not None:
                step.table.apply(index, own, update.narrow(0, own.matrix_offset, own.numel))
        step.directions.release(chunk.active(step.active))

    def _write(self, place: Tensor, values: Tensor, what: Travelling) -> None:
        """Write what travels to its place in a buffer; note in sampled steps what the wire loses."""
        wire, recorder = self.context.wire, self._check.recorder
        wire.write(place, values)
        if recorder.sampling and not wire.exact:
            recorder.keep_loss(what, values, wire.read(place[: len(values)], values.shape[1]))

    def _update_in_place(self, chunks: Sequence[Chunk], step: Step) -> None:
        """Update the matrices of chunks in which nothing moves."""
        for chunk in chunks:
            step.directions.prepare(self._in_batches(chunk, step.active, others=True))
            self._orthogonalize(chunk, None, step)

    def apply_arrived(
        self,
        travel: Travel,
        active: Sequence[bool],
        table: UpdateTable,
        *,
        refresh: Refresh | None = None,
    ) -> None:
        """Wait for the scatter of a chunk and apply its updates; call ``refresh`` for every fragment that changed."""
        with self._check.recorder.span("scatter"):
            self._exchange.wait("scatter", travel)
        for segment in travel.chunk.held_buffer.segments:
            own = self._held[segment.matrix]
            if own is not None and active[segment.matrix]:
                update = self.context.wire.read(cut(travel.held, segment), segment.numel)
                table.apply(segment.matrix, own, update.view(-1))
                if refresh is not None:
                    refresh(own.partition_offset, own.numel)

    def _in_batches(self, chunk: Chunk, active: Sequence[bool], *, others: bool) -> list[int]:
        """Return the active matrices that this rank owns in the order of its batches, and then ``others`` or not."""
        owned = [index for index in chunk.owned if active[index]]
        rest = (index for index in chunk.active(active) if self.plan.owners[index] != self.plan.rank)
        return [index for batch in self._whole.batches(owned) for index in batch] + [*rest] * others
