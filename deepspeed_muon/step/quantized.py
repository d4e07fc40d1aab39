"""Momentum in 8 bits: where its blocks lie in the partitions, and the scale of blocks that are cut.

A partition has its codes where the momentum of fp32 would be, and one scale for each block of which it has elements:
block by block of the parameters' fragments, in their order in the partition. Where a block is cut, by a partition or
between runs of a stack that are updated apart, all parts have the scale of the whole block. So its new largest
magnitude is computed before the pass, and the ranks that hold parts of it send it to each other. This is why codes do
not depend on where ZeRO cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepspeed_muon.config.values import StatePolicy
from deepspeed_muon.ops.dispatch import FlatPasses
from deepspeed_muon.ops.torch_operators import BLOCK, block_scales, from_codes
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.placement import Fragment, Placement
from deepspeed_muon.step.passes import COLUMNS
from deepspeed_muon.step.state import State, refuse_other_layout
from deepspeed_muon.step.step_set import BoundPartition, StepSet
from deepspeed_muon.transport.all_to_all import StepContext, start_all_to_all
from deepspeed_muon.transport.ranks import phase

SCALE_KEY = "momentum_scale"
"""The scales in the state of a partition, beside ``momentum_buffer``."""


def is_coded(own: Mapping[str, Any]) -> bool:
    """Return whether the state of a partition has its momentum in 8 bits."""
    return "momentum_buffer" in own and own["momentum_buffer"].dtype == torch.int8


def scales_of(own: dict[str, Any], partition: BoundPartition, count: int) -> Tensor:
    """Return the scales of a momentum in 8 bits from the state of its partition; create what is missing.

    Raises:
        BindingError: If the state was saved with another layout.
    """
    if SCALE_KEY not in own:
        own[SCALE_KEY] = torch.zeros(count, device=partition.tensor.device)
    scales: Tensor = own[SCALE_KEY]
    refuse_other_layout(scales, count, "scales of the momentum", partition)
    return scales


def first_scales(fragments: Sequence[Fragment]) -> tuple[list[int], int]:
    """Return the number of the first scale of each fragment of a rank's partition, and how many scales there are."""
    starts, total = [0] * len(fragments), 0
    for number in sorted(range(len(fragments)), key=lambda number: fragments[number].partition_offset):
        each = fragments[number]
        starts[number] = total
        total += -(-(each.matrix_offset + each.numel) // BLOCK) - each.matrix_offset // BLOCK
    return starts, total


def read_codes(
    codes: Tensor, scales: Tensor, fragment: Fragment, first_scale: int, start: int, numel: int
) -> Tensor:
    """Return the momentum of elements of one fragment of a flat partition, fp32.

    Args:
        codes: Of the partition.
        scales: Of the partition.
        fragment: It holds the elements.
        first_scale: From :func:`first_scales`.
        start: The first of the elements in the partition.
        numel: Their number.
    """
    skipped, inside = divmod(fragment.matrix_offset % BLOCK + start - fragment.partition_offset, BLOCK)
    own = scales.narrow(0, first_scale + skipped, -(-(inside + numel) // BLOCK))
    return from_codes(codes.narrow(0, start, numel), own, inside)


class _CutBlock(NamedTuple):
    """This rank's part of a block that is cut.

    Attributes:
        position: Of the partition.
        start: First element there.
        numel: Elements.
        scale: Number of the block's scale there.
        matrix: Index of a matrix of the plan with its rates.
        ranks: Other ranks of the group that have parts of it.
    """

    position: int
    start: int
    numel: int
    scale: int
    matrix: int
    ranks: tuple[int, ...]


class MomentumBlocks:
    """The blocks of the momentum of one step set on this rank."""

    def __init__(
        self,
        step_set: StepSet,
        matrices: Sequence[MatrixLayout],
        origin: Sequence[int],
        positions: Mapping[int, int],
        context: StepContext,
    ) -> None:
        """Find the blocks that are cut; nothing is sent.

        Args:
            step_set: The step set.
            matrices: Those of the plan: runs of blocks of the step set's.
            origin: The number of each in the step set.
            positions: Index of each partition of Muon to its position.
            context: Of the step set.
        """
        self._matrices, self._origin, self._context = matrices, origin, context
        self._whole, self._positions, self._rank = step_set.matrices, positions, step_set.rank
        self._held: dict[int, Fragment] = {}
        self._first: dict[int, int] = {}
        self.scale_counts: dict[int, int] = {}
        found = (
            (number, each, each.placement.fragment_on(self._rank)) for number, each in enumerate(self._whole)
        )
        here = [(number, each, fragment) for number, each, fragment in found if fragment is not None]
        for index in positions:
            own = {number: fragment for number, each, fragment in here if each.partition == index}
            starts, self.scale_counts[index] = first_scales([*own.values()])
            self._held |= own
            self._first |= dict(zip(own, starts, strict=True))
        self._cut = self._cut_blocks()
        self._slots = {key: slot for slot, key in enumerate(self._cut)}
        self._device = step_set.partitions[0].tensor.device if step_set.partitions else torch.device("cpu")
        self._prepare_exchange()
        rows = [
            (positions[self._whole[n].partition], each.partition_offset, *([0] * 2), each.numel, n)
            for n, each in self._held.items()
        ]
        self._all = torch.tensor(rows, dtype=torch.int64).view(-1, COLUMNS)
        self._all[:, 2:4] = self._all[:, :2]

    def _cut_blocks(self) -> dict[tuple[int, int], _CutBlock]:
        """Return this rank's parts of cut blocks by parameter and block, in an order that all ranks share."""
        ends: dict[int, set[int]] = {number: set() for number in self._held}
        matrix_of: dict[int, int] = {}
        for index, (matrix, number) in enumerate(zip(self._matrices, self._origin, strict=True)):
            matrix_of.setdefault(number, index)
            if number in self._held:
                first = matrix.first_row * matrix.cols
                ends[number] |= {first, first + matrix.numel}
        found: dict[tuple[int, int], _CutBlock] = {}
        for number, fragment in sorted(self._held.items()):
            whole = self._whole[number]
            start, stop = fragment.matrix_offset, fragment.matrix_offset + fragment.numel
            inside = {end for end in ends[number] if start < end < stop} | {start, stop}
            for block in sorted({end // BLOCK for end in inside if end % BLOCK and end < whole.numel}):
                begin, end = max(block * BLOCK, start), min((block + 1) * BLOCK, stop)
                found[number, block] = _CutBlock(
                    self._positions[whole.partition],
                    fragment.partition_offset + begin - start,
                    end - begin,
                    self._first[number] + block - start // BLOCK,
                    matrix_of[number],
                    self._others(whole.placement, block),
                )
        return found

    def _others(self, placement: Placement, block: int) -> tuple[int, ...]:
        """Return the other ranks that have elements of a block of a parameter."""
        if placement.replicated:
            return ()
        last = min((block + 1) * BLOCK, placement.numel) - 1
        ranks = range(placement.rank_of(block * BLOCK), placement.rank_of(last) + 1)
        return tuple(rank for rank in ranks if rank != self._rank)

    def _prepare_exchange(self) -> None:
        """Make the tensors that say what is read, compared and sent of the cut blocks."""
        parts, device = [*self._cut.values()], self._device
        # A part of a block repeats its first element, which changes no largest magnitude.
        inside = np.arange(BLOCK)
        places = [each.start + np.where(inside < each.numel, inside, 0) for each in parts]
        of_position: dict[int, list[int]] = {}
        for slot, each in enumerate(parts):
            of_position.setdefault(each.position, []).append(slot)
        self._reads = [
            (
                position,
                torch.tensor(slots, device=device),
                torch.from_numpy(np.stack([places[slot] for slot in slots])).to(device),
                torch.tensor([parts[slot].scale for slot in slots], device=device),
            )
            for position, slots in of_position.items()
        ]
        rows = [(0, slot * BLOCK, 0, slot * BLOCK, BLOCK, each.matrix) for slot, each in enumerate(parts)]
        self._table = torch.tensor(rows, dtype=torch.int64).view(-1, COLUMNS)
        by_rank: list[list[int]] = [[] for _ in range(self._context.world_size)]
        for slot, each in enumerate(parts):
            for rank in each.ranks:
                by_rank[rank].append(slot)
        self._splits = [len(slots) for slots in by_rank]
        sent = [slot for slots in by_rank for slot in slots]
        self._sent = torch.tensor(sent, dtype=torch.int64, device=self._context.device)
        self._sends = self._context.world_size > 1 and any(_is_cut(each.placement) for each in self._whole)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends each step."""
        return len(self._sent) * torch.int32.itemsize

    def table(self, packed: Tensor) -> Tensor:
        """Return what the pass needs of the blocks of each fragment of a table.

        Returns:
            ``(fragments, 4)``, int64: elements of its first block before it, the number of that block's scale, and the
            numbers among the cut blocks of its first and of its last block, -1 of one that lies in it whole.
        """
        rows = []
        for *_, numel, index in packed.tolist():
            number, matrix = self._origin[index], self._matrices[index]
            fragment = matrix.placement.fragment_on(self._rank)
            assert fragment is not None
            start = matrix.first_row * matrix.cols + fragment.matrix_offset
            rows.append(self._block_row(number, start, numel))
        return torch.tensor(rows, dtype=torch.int64).view(-1, 4)

    def _block_row(self, number: int, start: int, numel: int) -> tuple[int, int, int, int]:
        first, last = start // BLOCK, (start + numel - 1) // BLOCK
        scale = self._first[number] + first - self._held[number].matrix_offset // BLOCK
        slots = self._slots.get((number, first), -1), self._slots.get((number, last), -1)
        return start % BLOCK, scale, *slots

    def begin(
        self,
        codes: Sequence[Tensor],
        scales: Sequence[Tensor],
        grads: Sequence[Tensor],
        rates: Tensor,
        mask: Tensor | None,
        passes: FlatPasses,
    ) -> Tensor:
        """Find the new scales of the cut blocks and write them.

        Must be called by all ranks of the group.

        Args:
            codes: The momentum, by position of the partition.
            scales: Its scales; those of cut blocks are mutated.
            grads: What enters the momentum.
            rates: As :attr:`.Rates.momentum`.
            mask: As :attr:`.Step.mask`.
            passes: They update the cut blocks exactly as they will update the others.

        Returns:
            ``(cut blocks, 2)``, fp32 on the device of the scales: old and new scale.
        """
        old = torch.zeros(len(self._cut), device=self._device)
        dtype = torch.promote_types(torch.float32, grads[0].dtype) if grads else torch.float32
        values, entering = torch.zeros((2, len(self._cut), BLOCK), dtype=dtype, device=self._device)
        for position, slots, places, of_scales in self._reads:
            old[slots] = scales[position][of_scales]
            values[slots] = codes[position][places].to(dtype) * old[slots].unsqueeze(1)
            entering[slots] = grads[position][places].to(dtype)
        active = None if mask is None else mask[self._table[:, COLUMNS - 1]]
        rows = self._table if active is None else self._table[active]
        flat = values.view(-1)
        passes.momentum_pack([flat], [entering.view(-1)], [torch.empty_like(flat)], rows, rates)
        largest = self._exchanged(values.abs().amax(1).float())
        new = block_scales(largest)
        if active is not None:
            new = torch.where(active.to(self._device), new, old)
        for position, slots, _, of_scales in self._reads:
            scales[position][of_scales] = new[slots]
        return torch.stack((old, new), 1)

    def _exchanged(self, largest: Tensor) -> Tensor:
        """Return the largest magnitudes of the whole blocks for those of this rank's parts."""
        if not self._sends:
            return largest
        # As integers, so that NaN is larger than infinity.
        bits = largest.view(torch.int32).to(self._context.device)
        send = bits[self._sent]
        arrived, group = torch.empty_like(send), self._context.group
        with phase("scales of cut blocks of the momentum", group):
            start_all_to_all(arrived, send, self._splits, self._splits, group=group).wait()
        self._context.stats.count_exchange(send.nbytes)
        bits = bits.scatter_reduce(0, self._sent, arrived, "amax")
        return bits.to(largest.device).view(torch.float32)

    def quantize(self, values: Sequence[Tensor], passes: FlatPasses) -> tuple[list[Tensor], list[Tensor]]:
        """Return codes and scales of flat partitions of momentum; the codes of the padding are 0.

        Must be called by all ranks of the group. It is a step of the pass with decay 0.

        Args:
            values: fp32, by position of the partition.
            passes: Native or torch passes.
        """
        codes = [torch.zeros_like(each, dtype=torch.int8) for each in values]
        scales = [torch.zeros(count, device=self._device) for count in self.scale_counts.values()]
        rates = torch.zeros((max(len(self._matrices), len(self._whole)), 2), dtype=torch.float64)
        cut = self.begin(codes, scales, values, rates, None, passes)
        blocks = [
            self._block_row(number, fragment.matrix_offset, fragment.numel)
            for number, fragment in self._held.items()
        ]
        outs = [torch.empty_like(each, dtype=torch.bfloat16) for each in values]
        table = torch.tensor(blocks, dtype=torch.int64).view(-1, 4)
        passes.momentum_pack_int8(codes, scales, values, outs, self._all, rates, table, cut)
        return codes, scales

    def elements(self, number: int, own: Mapping[str, Any], start: int, numel: int) -> Tensor:
        """Return elements of the momentum of a matrix from the state of its partition, fp32.

        Args:
            number: Of the matrix in the step set.
            own: The state, with codes and scales.
            start: The first of the elements in the flat partition; this rank has all of them.
            numel: Their number.
        """
        codes, scales = own["momentum_buffer"].view(-1), own[SCALE_KEY]
        return read_codes(codes, scales, self._held[number], self._first[number], start, numel)

    def read(self, index: int, own: Mapping[str, Any]) -> Tensor:
        """Return the momentum of a flat partition from its state, fp32; the padding is 0."""
        found = torch.zeros_like(own["momentum_buffer"].view(-1), dtype=torch.float32)
        for number, fragment in self._held.items():
            if self._whole[number].partition == index:
                place = fragment.partition_offset, fragment.numel
                found.narrow(0, *place).copy_(self.elements(number, own, *place))
        return found


def convert_momentum(
    partitions: Sequence[BoundPartition],
    state: State,
    policy: StatePolicy,
    blocks: Callable[[], MomentumBlocks],
    passes: FlatPasses,
) -> None:
    """Bring momentum that was saved in 8 bits, or shall be kept in 8 bits, into the dtype that it is kept in.

    Must be called by all ranks of the group.

    Args:
        partitions: Those of Muon in one step set, by position.
        state: The optimizer's state. Mutated; partitions without momentum stay without.
        policy: The dtype of the state.
        blocks: Returns the blocks of the step set, which are needed only where something is converted.
        passes: Native or torch passes.
    """
    every = [(each, state[each.tensor]) for each in partitions]
    known = [(each, own) for each, own in every if "momentum_buffer" in own]
    if all(is_coded(own) == policy.quantizes_momentum for _, own in known):
        return
    for each, own in known:
        if is_coded(own):
            dtype = policy.dtype("momentum_buffer", each.tensor.dtype)
            read = blocks().read(each.index, own).view(each.tensor.shape)
            own["momentum_buffer"] = read.to(torch.float32 if dtype == torch.int8 else dtype)
        own.pop(SCALE_KEY, None)
    if policy.quantizes_momentum:
        found = [own.get("momentum_buffer", torch.zeros_like(each.tensor)) for each, own in every]
        values = [each.detach().float().contiguous().view(-1) for each in found]
        codes, scales = blocks().quantize(values, passes)
        for (each, own), *new in zip(every, codes, scales, strict=True):
            if "momentum_buffer" in own:
                own["momentum_buffer"], own[SCALE_KEY] = new[0].view(each.tensor.shape), new[1]


def _is_cut(placement: Placement) -> bool:
    """Return whether any two ranks have parts of one block of a parameter; the same on all ranks."""
    if placement.replicated or placement.head == placement.numel:
        return False
    further = placement.numel - placement.head > placement.body
    return placement.head % BLOCK > 0 or (further and placement.body % BLOCK > 0)
