"""One step of one step set: the loop over the chunks of its matrices, and AdamW for the rest.

:meth:`StepRunner.run` reads top to bottom. What a rank does in one chunk, at ZeRO 3 on two ranks with matrices ``A``
(owned by rank 0) and ``B`` (owned by rank 1), each rank with one half of both:

1. ``_pack``: both ranks update the momentum of their halves of ``A`` and ``B`` and write the directions to the
   fragment buffer, in the wire dtype.
2. gather: rank 1 sends its half of ``A`` to rank 0 and receives rank 0's half of ``B``.
3. ``_orthogonalize``: rank 1 assembles ``B``, runs Newton-Schulz on it, has the result checked
   (:mod:`.orthogonalize`, :mod:`.check`), and writes the update over the directions in its owner buffer.
4. scatter: rank 1 sends rank 0's half of the update of ``B`` back, and receives its half of the update of ``A``.
5. ``_update_weights``: both ranks decay and update their halves of the fp32 weights of ``A`` and ``B``
   (:func:`.tables.apply` has the formula).

A matrix that is on its owner alone skips 2 and 4. Of replicated matrices (stage 0) the owner broadcasts the update in
place of 4.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.plan.chunks import build_exchange_plan
from deepspeed_muon.plan.layout import PartitionIndex, PlanIndex
from deepspeed_muon.plan.owners import assign
from deepspeed_muon.plan.placement import Floats, Fragment
from deepspeed_muon.step.check import DeferredCheck, ResultCheck
from deepspeed_muon.step.int8 import Int8Blocks, convert_momentum, scales_of
from deepspeed_muon.step.orthogonalize import LocalOrthogonalizer, batches
from deepspeed_muon.step.row_state import OwnedRows, RowStorage
from deepspeed_muon.step.state import AdamW, State, passes_for, row_state_of, state_of
from deepspeed_muon.step.step_set import StepContext
from deepspeed_muon.step.tables import ChunkTable, RateTable, StepTensors, apply, pack
from deepspeed_muon.step.tensor_parallel import TensorParallelOrthogonalizer
from deepspeed_muon.transport.all_to_all import ChunkExchange, InFlight


class StepRunner:
    """Runs the step of one :class:`StepSet`.

    Attributes:
        assignment: The owners of the matrices, by which :attr:`plan` was made.
        row_fragments: Where the row state of each matrix of the plan is stored; empty where the variant has none.
    """

    def __init__(self, context: StepContext, *, load: Floats) -> None:
        """Make the exchange plan; nothing is sent.

        ``load`` has the operations of each rank from other sets, and is mutated: the new work is added.
        """
        self.context = context
        self.step_set = step_set = context.step_set
        config, self._policy = context.config, context.policy
        # 1. who owns what, and what is sent in which chunk
        self.assignment = assign(step_set.matrices, context.ns_settings, load, divisor=config.cut_divisor)
        self.plan = build_exchange_plan(
            self.assignment.matrices,
            self.assignment.owners,
            rank=step_set.rank,
            world_size=step_set.world_size,
            chunk_numel=config.exchange_chunk_numel,
        )
        self.row_fragments: Sequence[Fragment] = ()
        self._row_storage: RowStorage | None = None
        if context.variant.row_factors is not None:
            self.row_fragments = self.assignment.row_fragments()
            self._row_storage = RowStorage(self.plan, self.row_fragments, context)
        # 2. what sends, orthogonalises and checks
        self._exchange = ChunkExchange(
            self.plan,
            context.buffers,
            context.counts,
            step_set.group,
            dtype=context.wire_dtype,
            number=context.number,
            overlap=context.overlap,
        )
        matrices = self.plan.matrices
        check_type = ResultCheck if context.device.type == "cpu" else DeferredCheck
        self.check = check_type(
            context.recorder, matrices, ns=context.ns_settings, origin=self.assignment.origin
        )
        local = LocalOrthogonalizer(matrices, context, self.check)
        group = step_set.tensor_group
        self._orthogonalizer = local if group is None else TensorParallelOrthogonalizer(local, group)
        # 3. what reads and writes the partitions
        self._muon = [partition for partition in step_set.partitions if partition.muon]
        # Passes take a list of the tensors of Muon's partitions; tables name them by their positions in it.
        list_position = {partition.index: position for position, partition in enumerate(self._muon)}
        self._rates = RateTable(matrices, context.variant, list_position, config.momentum_warmup)
        self._passes = passes_for(context)
        self.adam = AdamW(context)
        quantized = self._muon if self._policy.quantizes_momentum else []
        int8_blocks = [self.int8_blocks[partition.index] for partition in quantized]
        self._tables = [
            ChunkTable(self.plan, chunk, batches(matrices, context, chunk.owned), list_position, int8_blocks)
            for chunk in self.plan.chunks
        ]

    @functools.cached_property
    def int8_blocks(self) -> dict[PartitionIndex, Int8Blocks]:
        """The blocks of the int8 momentum, by the index of the partition."""
        by_partition = zip(self.step_set.partitions, self.step_set.local_fragments(), strict=True)
        return {
            partition.index: Int8Blocks(fragment for _, fragment in fragments)
            for partition, fragments in by_partition
            if partition.muon
        }

    def convert_momentum(self, state: State) -> None:
        """Convert momentum that was loaded as int8, or is to be stored as int8, to the dtype in which it is stored."""
        for partition in self._muon:
            momentum = state[partition.tensor].get("momentum_buffer")
            if momentum is not None and (momentum.dtype == torch.int8) != self._policy.quantizes_momentum:
                convert_momentum(partition, state, self._policy, self.int8_blocks[partition.index])

    def inputs(self) -> Iterator[Tensor]:
        """Yield empty tensors like those that this rank orthogonalises in a step with a gradient of every matrix."""
        for chunk in self.plan.chunks:
            yield from self._orthogonalizer.inputs(chunk.owned)

    def connect(self) -> None:
        """Exchange every chunk once, whatever its buffers hold; see :meth:`.BoundSteps.connect`."""
        for number, chunk in enumerate(self.plan.chunks):
            if chunk.kind != "local":
                flight = self._exchange.open(number, number)
                self._exchange.start("gather", flight)
                self._exchange.wait("gather", flight)
                self._exchange.start("scatter", flight)
                self._exchange.wait("scatter", flight)

    def run(
        self,
        active: Sequence[bool],
        grads: Mapping[PartitionIndex, Tensor],
        groups: Mapping[PartitionIndex, dict[str, Any]],
        state: State,
    ) -> None:
        """Update all partitions of the set in place.

        Must be called by all ranks of the data- and the tensor-parallel group with the same ``active``: for each
        parameter of the set, matrices first, whether any rank has a gradient of it. Flat gradients, and the param
        groups with the rates, are by partition index. Missing entries of ``state``, the optimizer's, are created.
        """
        with self.step_set.flat_partitions() as flat, self._begin(active, grads, groups, state, flat) as step:
            if self.check.recorder.sampling:
                self._record_weights(groups, flat)
            # What is active is equal on all ranks, so they skip the same chunks.
            chunks = [(n, chunk) for n, chunk in enumerate(self.plan.chunks) if step.active(chunk.matrices)]
            exchanged = [number for number, chunk in chunks if chunk.kind != "local"]
            local = [number for number, chunk in chunks if chunk.kind == "local"]
            # Each exchanged chunk is packed and gathered, orthogonalised and scattered, and applied. With overlap these
            # happen in three successive turns, so that chunk t + 1 is gathered and chunk t - 1 scattered while chunk t
            # is orthogonalised. Without overlap, one turn does all three.
            ahead = int(self.context.overlap)
            # Example with overlap and two exchanged chunks, turn by turn:
            #   -1: gather 0                 first half of the local matrices
            #    0: gather 1                 orthogonalise 0, scatter 0
            #    1:                          orthogonalise 1, scatter 1, second half; apply 0
            #    2:                          apply 1
            # One half of the local matrices hides the first gather, the other half (a single chunk too) hides the last
            # scatter. Without overlap, or with nothing exchanged, "half" is all of them.
            half = len(local) // 2 if ahead and exchanged else len(local)
            flights: list[InFlight] = []
            for turn in range(-ahead, max(len(exchanged), 1) + ahead):
                if turn + ahead < len(exchanged):
                    flights.append(self._exchange.open(exchanged[turn + ahead], turn + ahead))
                    self._pack(flights[-1], step)
                    self._exchange.start("gather", flights[-1])  # all-to-all: directions to the owners
                if turn == -ahead:
                    self.adam.update_partitions(active, grads, groups, state, flat)
                    self._update_local(local[:half], step)
                if 0 <= turn < len(exchanged):
                    with self.check.recorder.span("gather"):
                        self._exchange.wait("gather", flights[turn])
                    self._orthogonalize(flights[turn], step)
                    self._exchange.start("scatter", flights[turn])  # all-to-all: updates to the partitions
                if turn == len(exchanged) - 1:
                    self._update_local(local[half:], step)
                if 0 <= turn - ahead < len(exchanged):
                    with self.check.recorder.span("scatter"):
                        self._exchange.wait("scatter", flights[turn - ahead])
                    self._update_weights(flights[turn - ahead], step)

    @contextlib.contextmanager
    def _begin(
        self,
        active: Sequence[bool],
        grads: Mapping[PartitionIndex, Tensor],
        groups: Mapping[PartitionIndex, dict[str, Any]],
        state: State,
        flat: Mapping[PartitionIndex, Tensor],
    ) -> Iterator[StepTensors]:
        """Read the rates, momentum and row state of this step; write row state back that was copied to the device."""
        self.convert_momentum(state)
        indices = [partition.index for partition in self._muon]
        active_matrices = active[: len(self.step_set.matrices)]
        mask = None
        if not all(active_matrices):  # slices of one stack are active together
            of_plan = [active[origin] for origin in self.assignment.origin]
            mask = torch.tensor(of_plan, dtype=torch.bool, device="cpu")  # (matrices,)
        # The number of this step, from 1, for the momentum's warm-up; state_of increments the counter below.
        steps = {partition.index: int(state[partition.tensor].get("step", 0)) + 1 for partition in self._muon}
        rates = self._rates.of({index: groups[index] for index in indices}, steps)
        states = [state_of(partition, state, self._policy) for partition in self._muon]
        # Row state and scales are made also in a step without gradients: a state dict has all of its entries or none.
        variant = self.context.variant
        row_counts = {} if self._row_storage is None else self._row_storage.counts
        row_vectors = {
            partition.index: vector
            for partition in self._muon
            if (vector := row_state_of(partition, state, variant, row_counts.get(partition.index, 0)))
            is not None
        }
        momentum_scales = None
        if self._policy.quantizes_momentum:
            momentum_scales = [
                scales_of(partition_state, partition, self.int8_blocks[partition.index].count)
                for partition_state, partition in zip(states, self._muon, strict=True)
            ]
        rows: contextlib.AbstractContextManager[OwnedRows | None] = contextlib.nullcontext()
        if any(active_matrices) and self._row_storage is not None:
            rows = self._row_storage.opened(row_vectors, rates.settings)
        with rows as row_state:
            yield StepTensors(
                mask,
                rates,
                flat=[flat[index] for index in indices],
                momentum=[partition_state["momentum_buffer"].view(-1) for partition_state in states],
                grads=self.step_set.gradients_of_muon(grads, flat, active_matrices),
                row_state=row_state,
                passes=self._passes,
                momentum_scales=momentum_scales,
            )

    def _pack(self, flight: InFlight, step: StepTensors) -> None:
        """Update the momentum of a chunk's matrices, and write their directions to the local or fragment buffer."""
        table, context, send = self._tables[flight.number], self.context, flight.fragment_buffer
        # 1. momentum and directions, where the momentum is; the buffers get copies from offloaded partitions
        device = step.momentum[0].device
        # Not written for matrices without a gradient: nothing reads the old content.
        local = torch.empty(table.local_numel, dtype=context.wire_dtype, device=device)
        sent = send if device == send.device else torch.empty_like(send, device=device)
        pack(table, step, local, sent)
        # 2. the buffers, on the device of the exchange
        flight.local_buffer = local.to(context.device)
        if sent is not send and flight.chunk.kind == "all_to_all":
            send.copy_(sent)

    def _orthogonalize(self, flight: InFlight, step: StepTensors) -> None:
        """Turn the directions of a chunk's owned matrices into updates, which overwrite them where they are stored."""
        table, owned = self._tables[flight.number], step.active(flight.chunk.owned)
        directions_of = functools.partial(self._directions, flight)
        for indices, result in self._orthogonalizer.orthogonalized(owned, directions_of, step):
            updates = result.contiguous().view(-1)  # (matrices * rows * cols,)
            segments = table.segments_of(indices)
            # Each segment is a strided copy: (matrices, fragments, elements).
            for segment in segments.owner:
                segment.in_buffer(flight.owner_buffer).copy_(segment.in_matrices(updates))
            for segment in segments.local:
                segment.in_buffer(flight.local_buffer).copy_(segment.in_matrices(updates))

    def _directions(self, flight: InFlight, indices: tuple[PlanIndex, ...]) -> Tensor:
        """Return the directions of owned matrices of one shape, ``(matrices, rows, cols)``.

        They are a view of the buffer where they follow each other in it.
        """
        # 1. where the fragments of these matrices are: in what the holders sent, or on this rank alone
        first, segments = self.plan.matrices[indices[0]], self._tables[flight.number].segments_of(indices)
        shape = len(indices), first.rows, first.cols
        sources, buffer = segments.local, flight.local_buffer
        if flight.chunk.kind == "all_to_all":
            sources, buffer = segments.owner, flight.owner_buffer
        # 2. as one tensor
        if segments.is_single:
            return sources[0].in_buffer(buffer).contiguous().view(shape)
        directions = torch.empty(math.prod(shape), dtype=self.context.wire_dtype, device=self.context.device)
        for segment in sources:
            segment.in_matrices(directions).copy_(segment.in_buffer(buffer))
        return directions.view(shape)

    def _update_weights(self, flight: InFlight, step: StepTensors) -> None:
        """Decay and update the weights of a chunk's matrices in this rank's partitions."""
        # The table says for each fragment in which of the two buffers its update is.
        table = step.active_fragments(self._tables[flight.number].apply_table)
        apply(table, step, [flight.local_buffer, flight.fragment_buffer])
        del flight.local_buffer  # as large as what this rank owns

    def _record_weights(
        self, groups: Mapping[PartitionIndex, dict[str, Any]], flat: Mapping[PartitionIndex, Tensor]
    ) -> None:
        """Record weights of the sampled matrices that this rank owns, from its own fragments of them."""
        for index in itertools.chain.from_iterable(chunk.owned for chunk in self.plan.chunks):
            matrix = self.plan.matrices[index]
            fragment = matrix.placement.fragment_on(self.plan.rank) if self.check.watches(index) else None
            if fragment is not None:
                weights = flat[matrix.partition].narrow(0, fragment.partition_offset, fragment.numel)
                rate = float(groups[matrix.partition]["lr"])
                self.check.recorder.keep_weights(matrix.name, weights, rate)

    def _update_local(self, numbers: Sequence[int], step: StepTensors) -> None:
        """Update the matrices of chunks in which nothing is sent."""
        for number in numbers:
            flight = self._exchange.open(number, None)
            self._pack(flight, step)
            self._orthogonalize(flight, step)
            self._update_weights(flight, step)
