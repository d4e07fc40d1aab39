"""One step of one step set: the loop over the chunks of its matrices, and AdamW for the rest.

:meth:`StepRunner.run` reads top to bottom. What a rank does in one chunk, at ZeRO 3 on two ranks with matrices ``A``
(owned by rank 0) and ``B`` (owned by rank 1), each rank with one half of both:

1. ``_pack``: both ranks update the momentum of their halves of ``A`` and ``B`` and write the directions to the
   fragment buffer, in the wire dtype.
2. gather: rank 1 sends its half of ``A`` to rank 0 and receives rank 0's half of ``B``.
3. ``_orthogonalize``: rank 1 assembles ``B``, runs Newton-Schulz on it, has the result checked
   (:mod:`.orthogonalize`, :mod:`.check`), and writes the update over the directions in its owner buffer.
4. scatter: rank 1 sends rank 0's half of the update of ``B`` back, and receives its half of the update of ``A``.
5. ``_apply``: both ranks decay their halves of the fp32 weights of ``A`` and ``B`` and subtract the updates
   (:func:`apply` has the formula).

An *update* is the orthogonalised direction ``O``: it is sent without its scale, which the rate in step 5 has.

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

from deepspeed_muon.ops.torch_operators import Column, cautious_apply_, in_buffers
from deepspeed_muon.plan.chunks import build_exchange_plan
from deepspeed_muon.plan.layout import PartitionIndex, PlanIndex
from deepspeed_muon.plan.owners import assign
from deepspeed_muon.plan.placement import Floats, Fragment
from deepspeed_muon.step.adamw import AdamW
from deepspeed_muon.step.check import DeferredCheck, ResultCheck
from deepspeed_muon.step.int8 import Int8Blocks, convert_momentum, scales_of
from deepspeed_muon.step.orthogonalize import LocalOrthogonalizer, batches
from deepspeed_muon.step.row_state import OwnedRows, RowStorage, remove_unused_rows, row_fragments
from deepspeed_muon.step.step_set import State, StepContext
from deepspeed_muon.step.tables import ChunkTable
from deepspeed_muon.step.tensor_parallel import TensorParallelOrthogonalizer
from deepspeed_muon.step.tensors import RateTable, StepTensors, state_of
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
            self.row_fragments = row_fragments(self.assignment)
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
        # 3. what reads and writes the partitions of Muon
        self._partitions = [partition for partition in step_set.partitions if partition.muon]
        # Passes take a list of their tensors; tables name them by their positions in it.
        list_position = {partition.index: position for position, partition in enumerate(self._partitions)}
        self._rates = RateTable(matrices, context.variant, list_position, config.momentum_warmup)
        self._passes = context.passes
        self.adam = AdamW(context)
        quantized = self._partitions if self._policy.quantizes_momentum else []
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
        for partition in self._partitions:
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

        All ranks start the exchanges in one order. Without overlap, a chunk is applied before the next one is gathered.
        With overlap, chunk 1 is gathered while chunk 0 is orthogonalised, and scattered while chunk 2 is.
        Example of three chunks that are exchanged, a line for each turn, one before and one after the loop::

            gather 0    AdamW; half of the local chunks
            gather 1    orthogonalise 0, scatter 0
            gather 2    orthogonalise 1, scatter 1                                  apply 0
                        orthogonalise 2, scatter 2; other half of the local chunks; apply 1
                                                                                    apply 2

        So local chunks, in which nothing is sent, hide the first gather and the last scatter. A step set of ZeRO is
        Muon's or AdamW's, so that AdamW stands beside an exchange only at stage 0 and under ``BF16_Optimizer``.
        """
        with (
            self.step_set.flat_partitions() as flat,
            self._tensors(active, grads, groups, state, flat) as step,
        ):
            if self.check.recorder.sampling:
                self._record_weights(groups, flat)
            # What is active is equal on all ranks, so they skip the same chunks.
            chunks = [(n, chunk) for n, chunk in enumerate(self.plan.chunks) if step.active(chunk.matrices)]
            local = [number for number, chunk in chunks if chunk.kind == "local"]
            exchanged = [number for number, chunk in chunks if chunk.kind != "local"]
            flights = [self._exchange.open(number, slot) for slot, number in enumerate(exchanged)]
            overlap = self.context.overlap and len(flights) > 0
            half = len(local) // 2 if overlap else len(local)
            self._pack_and_gather(flights[0] if flights else None, step)
            self.adam.step(active, grads, groups, state, flat)
            self._run_local(local[:half], step)
            turns = zip([None, *flights], flights, [*flights[1:], None], strict=False)
            for scattered, gathered, following in turns:
                if overlap:
                    self._pack_and_gather(following, step)
                    self._orthogonalize_and_scatter(gathered, step)
                    if following is None:
                        self._run_local(local[half:], step)
                    self._receive_and_apply(scattered, step)
                else:
                    self._orthogonalize_and_scatter(gathered, step)
                    self._receive_and_apply(gathered, step)
                    self._pack_and_gather(following, step)
            if overlap:
                self._receive_and_apply(flights[-1], step)

    @contextlib.contextmanager
    def _tensors(
        self,
        active: Sequence[bool],
        grads: Mapping[PartitionIndex, Tensor],
        groups: Mapping[PartitionIndex, dict[str, Any]],
        state: State,
        flat: Mapping[PartitionIndex, Tensor],
    ) -> Iterator[StepTensors]:
        """Collect what the step reads and writes of Muon's partitions; the arguments are those of :meth:`run`.

        Missing state is created, also in a step without gradients: a state dict has all of its entries or none. Row
        state that was copied to the device is written back in the end.
        """
        self.convert_momentum(state)
        partitions = self._partitions
        # 1. the matrices of which any rank has a gradient, (matrices,); slices of one stack are active together
        active_matrices, mask = active[: len(self.step_set.matrices)], None
        if not all(active_matrices):
            of_plan = [active[origin] for origin in self.assignment.origin]
            mask = torch.tensor(of_plan, dtype=torch.bool, device="cpu")
        # 2. the optimizer state of each partition, and the rates: a warm-up of momentum depends on the step's number
        entries = [state_of(partition, state, self._policy) for partition in partitions]
        numbers = [int(entry["step"]) for entry in entries]
        rates = self._rates.of([groups[partition.index] for partition in partitions], numbers)
        # 3. the row state of the variant, and the scales of int8 momentum
        vectors, scales = dict[PartitionIndex, Tensor](), list[Tensor]()
        for partition, entry in zip(partitions, entries, strict=True):
            remove_unused_rows(entry, self.context.variant)
            if self._row_storage is not None:
                vectors[partition.index] = self._row_storage.vector_of(partition, entry)
            if self._policy.quantizes_momentum:
                scales.append(scales_of(entry, partition, self.int8_blocks[partition.index].count))
        rows: contextlib.AbstractContextManager[OwnedRows | None] = contextlib.nullcontext()
        if self._row_storage is not None and any(active_matrices):
            rows = self._row_storage.opened(vectors, rates.settings)
        with rows as row_state:
            yield StepTensors(
                mask,
                rates,
                flat=[flat[partition.index] for partition in partitions],
                momentum=[entry["momentum_buffer"].view(-1) for entry in entries],
                grads=self.step_set.gradients_of_muon(grads, flat, active_matrices),
                row_state=row_state,
                passes=self._passes,
                momentum_scales=scales if self._policy.quantizes_momentum else None,
            )

    def _pack_and_gather(self, flight: InFlight | None, step: StepTensors) -> None:
        """Pack a chunk, and start to send its directions to the owners; ``None`` is no chunk."""
        if flight is not None:
            self._pack(flight, step)
            self._exchange.start("gather", flight)

    def _orthogonalize_and_scatter(self, flight: InFlight, step: StepTensors) -> None:
        """Wait for the directions of a chunk, orthogonalise them, and start to send the updates to the partitions."""
        with self.check.recorder.span("gather"):
            self._exchange.wait("gather", flight)
        self._orthogonalize(flight, step)
        self._exchange.start("scatter", flight)

    def _receive_and_apply(self, flight: InFlight | None, step: StepTensors) -> None:
        """Wait for the updates of a chunk, and apply them to the weights; ``None`` is no chunk."""
        if flight is not None:
            with self.check.recorder.span("scatter"):
                self._exchange.wait("scatter", flight)
            self._apply(flight, step)

    def _run_local(self, numbers: Sequence[int], step: StepTensors) -> None:
        """Do what is to be done in chunks in which nothing is sent."""
        for number in numbers:
            flight = self._exchange.open(number, None)
            self._pack(flight, step)
            self._orthogonalize(flight, step)
            self._apply(flight, step)

    def _pack(self, flight: InFlight, step: StepTensors) -> None:
        """Update the momentum of a chunk's matrices, and write their directions to the local or fragment buffer."""
        table, context, buffer = self._tables[flight.number], self.context, flight.fragment_buffer
        # 1. momentum and directions, where the momentum is; the buffers get copies from offloaded partitions
        device = step.momentum[0].device
        # Not written for matrices without a gradient: nothing reads the old content.
        local = torch.empty(table.local_numel, dtype=context.wire_dtype, device=device)
        fragments = buffer if device == buffer.device else torch.empty_like(buffer, device=device)
        pack(table, step, local, fragments)
        # 2. the buffers, on the device of the exchange
        flight.local_buffer = local.to(context.device)
        if fragments is not buffer and flight.chunk.kind == "all_to_all":
            buffer.copy_(fragments)

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

    def _apply(self, flight: InFlight, step: StepTensors) -> None:
        """Decay the weights of a chunk's matrices in this rank's partitions, and subtract the updates."""
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


def pack(table: ChunkTable, step: StepTensors, local_buffer: Tensor, fragment_buffer: Tensor) -> None:
    """Update the momentum of a chunk's active fragments, and write their directions.

    In an ``all_to_all`` chunk all go to the fragment buffer, else all to the local one; both are on the device of the
    momentum.
    """
    fragments, rates = step.active_fragments(table.pack_table), step.rates.momentum
    outputs = [local_buffer, fragment_buffer]
    if step.momentum_scales is None:
        step.passes.momentum_pack(step.momentum, step.grads, outputs, fragments, rates)
        return
    int8_blocks = table.int8_blocks
    if step.mask is not None:
        int8_blocks = int8_blocks[step.mask[table.pack_table[:, Column.MATRIX]]]
    step.passes.momentum_pack_int8(
        step.momentum, step.momentum_scales, step.grads, outputs, fragments, rates, int8_blocks
    )


def apply(table: Tensor, step: StepTensors, updates: Sequence[Tensor]) -> None:
    """Decay the weights of some fragments and subtract their updates, by :func:`.unpack_apply_` or its native twin.

    It is :meth:`deepspeed_muon.reference.ReferenceMuon.apply`::

        W <- W (1 - lr wd) - lr scale O

    ``W`` and ``O`` are ``(numel,)``, a fragment of a matrix and of its orthogonalised direction. :class:`.Rates` has
    ``lr scale`` and the decay factor (``1 - wd`` if independent) of each matrix. Cautious decay shrinks only the
    elements of ``W`` with the sign of ``O``, and those whose ``O`` is zero.

    ``table`` has the rows of :attr:`ChunkTable.apply_table` whose matrix is active, and ``updates`` are its buffers:
    flat, in the wire dtype, on any device.
    """
    if not len(table):
        return
    device, rates = step.flat[0].device, step.rates
    if any(tensor.device != device for tensor in updates):
        table, updates = _moved(table, updates, device)
    cautious = None if rates.cautious is None else rates.cautious[table[:, Column.PARTITION]]
    if cautious is not None:
        cautious_apply_(step.flat, updates, table[cautious], rates.lr_and_decay)
        table = table[~cautious]
    step.passes.unpack_apply(step.flat, updates, table, rates.lr_and_decay)


def _moved(table: Tensor, updates: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Sequence[Tensor]]:
    """Copy the updates of all fragments to a device at once; return the table for the copies, and these."""
    moved = torch.cat(in_buffers(updates, table.tolist())).to(device).split(table[:, Column.NUMEL].tolist())
    table = table.clone()
    # Fragment i is the i-th tensor, from its start.
    table[:, Column.BUFFER] = torch.arange(len(table), dtype=torch.int64, device="cpu")
    table[:, Column.BUFFER_OFFSET] = 0
    return table, moved
