"""Momentum stored as int8: one code an element, and one fp32 scale for each block of 256 elements.

Blocks are counted from the first element of a parameter and end where the fragment ends that holds them, so a scale
belongs to one rank. Example: ranks 0 and 1 hold the elements 0 to 599 and 600 to 999 of a parameter. Rank 0 has the
blocks [0, 256), [256, 512) and [512, 600), rank 1 has [600, 768) and [768, 1000). On a single rank the block [512, 768)
has one scale, so a checkpoint that is restored there has that block quantised again, and all others bit for bit.

``optimizer.state`` of a partition holds the codes as ``momentum_buffer``, where momentum of fp32 would be, and the
scales of its fragments one after the other as ``momentum_scale``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_muon.config.values import StatePolicy
from deepspeed_muon.ops.torch_operators import BLOCK, from_codes, quantize
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.owners import split_shard
from deepspeed_muon.plan.placement import Fragment
from deepspeed_muon.step.state import State, refuse_other_layout
from deepspeed_muon.step.step_set import BoundPartition, StepSet

SCALE_KEY = "momentum_scale"
"""The scales in the state of a partition, beside ``momentum_buffer``."""


class _Range(NamedTuple):
    """Elements of a partition whose blocks follow each other.

    Attributes:
        offset: The first element in the partition.
        numel: Elements.
        before: Elements of the parameter that precede the range in its first block.
        scale: Number of the first block's scale.
    """

    offset: int
    numel: int
    before: int
    scale: int


class Int8Blocks:
    """The blocks of the int8 momentum in one rank's partition.

    Attributes:
        count: Blocks, and scales, of the partition.
    """

    def __init__(self, fragments: Iterable[tuple[Fragment, Sequence[int]]]) -> None:
        """Number the blocks of a partition.

        Args:
            fragments: The fragments of the partition, each with the :func:`block_starts` of its parameter.
        """
        self.count = 0
        self._ranges: list[_Range] = []
        for fragment, starts in sorted(fragments, key=lambda pair: pair[0].partition_offset):
            first, stop = fragment.matrix_offset, fragment.matrix_offset + fragment.numel
            bounds = [first, *(start for start in starts if first < start < stop), stop]
            for begin, end in pairwise(bounds):
                offset = fragment.partition_offset + begin - first
                self._ranges.append(_Range(offset, end - begin, begin % BLOCK, self.count))
                self.count += -(-(begin % BLOCK + end - begin) // BLOCK)
        self._offsets = [each.offset for each in self._ranges]

    def row(self, offset: int) -> tuple[int, int]:
        """Return what ``momentum_pack_int8_`` needs of a fragment that starts at ``offset`` of the partition.

        Returns:
            Elements of the parameter that precede the fragment in its first block, and the number of that block's
            scale.
        """
        blocks = self._ranges[bisect_right(self._offsets, offset) - 1]
        skipped, before = divmod(blocks.before + offset - blocks.offset, BLOCK)
        return before, blocks.scale + skipped

    def decode(self, codes: Tensor, scales: Tensor, offset: int, numel: int) -> Tensor:
        """Return ``numel`` elements of momentum from ``offset`` of the partition on, fp32; 0 between the fragments.

        Args:
            codes: Of the partition, flat, int8.
            scales: Of the partition, ``(count,)``.
            offset: The first element.
            numel: Elements.
        """
        values = torch.zeros(numel, device=codes.device)
        for blocks in self._ranges[max(0, bisect_right(self._offsets, offset) - 1) :]:
            start, stop = max(offset, blocks.offset), min(offset + numel, blocks.offset + blocks.numel)
            if blocks.offset >= offset + numel:
                break
            if start < stop:
                before, scale = self.row(start)
                used = scales.narrow(0, scale, -(-(before + stop - start) // BLOCK))
                decoded = from_codes(codes.narrow(0, start, stop - start), used, before)
                values.narrow(0, start - offset, stop - start).copy_(decoded)
        return values

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes ``(partition numel,)`` and scales ``(count,)`` of a partition's momentum, flat, fp32."""
        codes = torch.zeros_like(values, dtype=torch.int8)
        scales = torch.zeros(self.count, device=values.device)
        for blocks in self._ranges:
            new_codes, new_scales = quantize(values.narrow(0, blocks.offset, blocks.numel), blocks.before)
            codes.narrow(0, blocks.offset, blocks.numel).copy_(new_codes)
            scales.narrow(0, blocks.scale, len(new_scales)).copy_(new_scales)
        return codes, scales


def block_starts(matrix: MatrixLayout) -> tuple[int, ...]:
    """Return the elements of a parameter at which a block starts besides every 256th: almost always none.

    Tensor parallelism may leave a rank some attention heads whole and a share of another. These are orthogonalised
    apart, so no block may reach from one into the next; in few models are heads not multiples of 256 elements. Stacks
    that several owners divide are cut only between blocks (``divisor`` of :func:`.owners.assign`).
    """
    firsts = (share.first_row * share.cols for share in split_shard(matrix))
    return tuple(first for first in firsts if first % BLOCK)


def blocks_by_partition(step_set: StepSet) -> dict[int, Int8Blocks]:
    """Return the blocks of each partition of Muon by the partition's index."""
    return {
        partition.index: Int8Blocks(
            (fragment, block_starts(step_set.matrices[number])) for number, fragment in fragments
        )
        for partition, fragments in zip(step_set.partitions, step_set.local_fragments(), strict=True)
        if partition.muon
    }


def scales_of(own: dict[str, Any], partition: BoundPartition, count: int) -> Tensor:
    """Return the scales from the state of a partition with int8 momentum, ``(count,)``; create what is missing.

    Raises:
        BindingError: If the state was saved with another layout.
    """
    if SCALE_KEY not in own:
        own[SCALE_KEY] = torch.zeros(count, device=partition.tensor.device)
    scales: Tensor = own[SCALE_KEY]
    refuse_other_layout(scales, count, "scales of the momentum", partition)
    return scales


def convert_momentum(
    partition: BoundPartition, state: State, policy: StatePolicy, blocks: Int8Blocks
) -> None:
    """Convert momentum that was loaded as int8, or is to be stored as int8, to the dtype in which it is stored.

    Args:
        partition: A partition of Muon.
        state: The optimizer's state. Mutated; a partition without momentum stays without.
        policy: The dtype of the state.
        blocks: Of the partition.
    """
    own = state[partition.tensor]
    momentum = own["momentum_buffer"]
    if policy.quantizes_momentum:
        codes, own[SCALE_KEY] = blocks.encode(momentum.detach().float().contiguous().view(-1))
        own["momentum_buffer"] = codes.view(partition.tensor.shape)
    else:
        values = blocks.decode(momentum.view(-1), own.pop(SCALE_KEY), 0, momentum.numel())
        dtype = policy.dtype("momentum_buffer", partition.tensor.dtype)
        own["momentum_buffer"] = values.view(partition.tensor.shape).to(dtype)
