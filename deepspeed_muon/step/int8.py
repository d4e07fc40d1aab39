"""Stores momentum as int8: one code for each element, and one fp32 scale for each block of 256 elements.

Blocks are counted from the first element of a parameter, and a block also ends where its fragment ends, so that a scale
belongs to one rank. Example: ranks 0 and 1 hold the elements 0 to 599 and 600 to 999 of a parameter. Rank 0 has the
blocks [0, 256), [256, 512) and [512, 600), rank 1 has [600, 768) and [768, 1000). On a single rank the block [512, 768)
has one scale. A checkpoint that is restored there requantises that block and reproduces all others bit for bit.

In ``optimizer.state`` of a partition, ``momentum_buffer`` is the codes, in the shape of the partition, and
``momentum_scale`` is the scales of its fragments, concatenated in their order in the partition.
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
from deepspeed_muon.step.state import State, check_numel
from deepspeed_muon.step.step_set import BoundPartition, StepSet

SCALE_KEY = "momentum_scale"
"""The scales in the state of a partition, beside ``momentum_buffer``."""


class _Range(NamedTuple):
    """Contiguous elements of a partition in which a new block starts every 256 elements.

    Attributes:
        offset: Offset of the first element in the partition.
        numel: Number of elements.
        before: Elements of the parameter's first block in the range that precede the range, on another rank.
        scale: Index of the first block's scale.
    """

    offset: int
    numel: int
    before: int
    scale: int


class Int8Blocks:
    """The blocks of the int8 momentum in one rank's partition.

    Attributes:
        count: The number of blocks, which is that of scales.
    """

    def __init__(self, fragments: Iterable[tuple[Fragment, Sequence[int]]]) -> None:
        """Number the blocks of a partition.

        Args:
            fragments: The partition's fragments, each with the :func:`block_starts` of its parameter.
        """
        self.count = 0
        self._ranges: list[_Range] = []
        for fragment, starts in sorted(fragments, key=lambda pair: pair[0].partition_offset):
            # 1. the ranges in which blocks are counted from one start, as offsets in the parameter
            first, stop = fragment.matrix_offset, fragment.matrix_offset + fragment.numel
            # Example: elements 600 to 999 are the range [600, 1000), 600 % 256 = 88 elements into a block. Its blocks
            # end at 768 and 1000: ceil((88 + 400) / 256) = 2 scales.
            bounds = [first, *(start for start in starts if first < start < stop), stop]
            for begin, end in pairwise(bounds):
                # 2. the same as offsets in the partition; a block that began on another rank has a scale here too
                offset = fragment.partition_offset + begin - first
                self._ranges.append(_Range(offset, end - begin, begin % BLOCK, self.count))
                self.count += -(-(begin % BLOCK + end - begin) // BLOCK)
        self._offsets = [blocks.offset for blocks in self._ranges]

    def row(self, offset: int) -> tuple[int, int]:
        """Return the row of the table ``blocks`` of ``momentum_pack_int8_`` for a fragment at ``offset``.

        Returns:
            Elements of the fragment's first block that precede the fragment, and the index of that block's scale.
        """
        blocks = self._ranges[bisect_right(self._offsets, offset) - 1]
        # as if the range began with its first block, before elements earlier
        skipped, before = divmod(blocks.before + offset - blocks.offset, BLOCK)
        return before, blocks.scale + skipped

    def decode(self, codes: Tensor, scales: Tensor, offset: int, numel: int) -> Tensor:
        """Return momentum ``[offset, offset + numel)`` of the partition, ``(numel,)`` fp32; padding is 0.

        Args:
            codes: Codes of the partition, ``(partition numel,)`` int8.
            scales: Scales of the partition, ``(count,)`` fp32.
            offset: The first element to decode.
            numel: The number of elements to decode.
        """
        values = torch.zeros(numel, device=codes.device)  # (numel,) fp32
        # from the range that contains the first element
        for blocks in self._ranges[max(0, bisect_right(self._offsets, offset) - 1) :]:
            if blocks.offset >= offset + numel:
                break
            start, stop = max(offset, blocks.offset), min(offset + numel, blocks.offset + blocks.numel)
            if start < stop:
                before, scale = self.row(start)
                used = scales.narrow(0, scale, -(-(before + stop - start) // BLOCK))  # (blocks,) fp32
                decoded = from_codes(codes.narrow(0, start, stop - start), used, before)
                values.narrow(0, start - offset, stop - start).copy_(decoded)
        return values

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes, int8 like ``values``, and scales ``(count,)`` of a partition's flat fp32 momentum."""
        codes = torch.zeros_like(values, dtype=torch.int8)  # padding is in no range, and keeps 0
        scales = torch.zeros(self.count, device=values.device)
        for blocks in self._ranges:
            new_codes, new_scales = quantize(values.narrow(0, blocks.offset, blocks.numel), blocks.before)
            codes.narrow(0, blocks.offset, blocks.numel).copy_(new_codes)
            scales.narrow(0, blocks.scale, len(new_scales)).copy_(new_scales)
        return codes, scales


def block_starts(matrix: MatrixLayout) -> tuple[int, ...]:
    """Return the offsets in a parameter at which a block starts in addition to multiples of 256; almost always none.

    A tensor-parallel shard may consist of complete attention heads and of rows of one more head. These slices are
    orthogonalised separately, so no block may extend from one into the next. It matters only where heads are not
    multiples of 256 elements. Stacks with several owners are cut only between blocks (``divisor`` of
    :func:`.owners.assign`).
    """
    starts = (shard_slice.first_row * shard_slice.cols for shard_slice in split_shard(matrix))
    return tuple(start for start in starts if start % BLOCK)


def blocks_by_partition(step_set: StepSet) -> dict[int, Int8Blocks]:
    """Return the blocks of each partition of Muon by the partition's index."""
    return {
        partition.index: Int8Blocks(
            (fragment, block_starts(step_set.matrices[number])) for number, fragment in fragments
        )
        for partition, fragments in zip(step_set.partitions, step_set.local_fragments(), strict=True)
        if partition.muon
    }


def scales_of(entry: dict[str, Any], partition: BoundPartition, count: int) -> Tensor:
    """Return the scales of a partition with int8 momentum, ``(count,)`` fp32; create them if ``entry`` has none.

    Raises:
        BindingError: If the state was saved with another layout.
    """
    if SCALE_KEY not in entry:
        entry[SCALE_KEY] = torch.zeros(count, device=partition.tensor.device)
    scales: Tensor = entry[SCALE_KEY]
    check_numel(scales, count, "scales of the momentum", partition)
    return scales


def convert_momentum(
    partition: BoundPartition, state: State, policy: StatePolicy, blocks: Int8Blocks
) -> None:
    """Convert the momentum of a partition to int8, or from int8, as ``policy`` says.

    Args:
        partition: A partition of Muon whose momentum is not yet in the dtype of ``policy``.
        state: ``optimizer.state``. Mutated.
        policy: The dtypes of the state.
        blocks: The blocks of the partition.
    """
    entry = state[partition.tensor]
    momentum = entry["momentum_buffer"]
    if policy.quantizes_momentum:
        codes, entry[SCALE_KEY] = blocks.encode(momentum.detach().float().contiguous().view(-1))
        entry["momentum_buffer"] = codes.view(partition.tensor.shape)
    else:
        values = blocks.decode(momentum.view(-1), entry.pop(SCALE_KEY), 0, momentum.numel())
        dtype = policy.dtype("momentum_buffer", partition.tensor.dtype)
        entry["momentum_buffer"] = values.view(partition.tensor.shape).to(dtype)
