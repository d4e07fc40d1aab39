"""Stores momentum as int8: one code for each element, and one fp32 scale for each block of 256 elements.

Blocks are counted from the first element of a parameter. A block that two ranks share has a scale on both. Example:
ranks 0 and 1 hold the elements 0 to 599 and 600 to 999 of a parameter. Rank 0 has the blocks [0, 256), [256, 512) and
[512, 600), rank 1 has [600, 768) and [768, 1000). On a single rank the block [512, 768) has one scale. A checkpoint
that is restored there requantises that block and reproduces all others bit for bit.

In ``optimizer.state`` of a partition, ``momentum_buffer`` is the codes, in the shape of the partition, and
``momentum_scale`` is the scales of its fragments, concatenated in their order in the partition.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.config.values import StatePolicy
from deepspeed_muon.ops.torch_operators import BLOCK, from_codes, quantize
from deepspeed_muon.plan.placement import Fragment
from deepspeed_muon.step.step_set import Partition, State

SCALE_KEY = "momentum_scale"
"""The scales in the state of a partition, beside ``momentum_buffer``."""


class Int8Blocks:
    """The blocks of the int8 momentum in one rank's partition.

    Attributes:
        count: The number of blocks, which is that of scales.
    """

    def __init__(self, fragments: Iterable[Fragment]) -> None:
        """Number the blocks of the fragments in a partition."""
        self._fragments = sorted(fragments, key=lambda fragment: fragment.partition_offset)
        # Elements 600 to 999 are in the blocks 2 and 3 of their parameter: two scales.
        counts = (
            -(-(f.matrix_offset + f.numel) // BLOCK) - f.matrix_offset // BLOCK for f in self._fragments
        )
        *self._first_scales, self.count = accumulate(counts, initial=0)
        self._offsets = [fragment.partition_offset for fragment in self._fragments]

    def row(self, offset: int) -> tuple[int, int]:
        """Return elements of the block before the element at ``offset``, and the index of the block's scale.

        They are a row of the table ``blocks`` of ``momentum_pack_int8_``.
        """
        number = bisect_right(self._offsets, offset) - 1
        fragment = self._fragments[number]
        block, before = divmod(fragment.matrix_offset + offset - fragment.partition_offset, BLOCK)
        return before, self._first_scales[number] + block - fragment.matrix_offset // BLOCK

    def decode(self, codes: Tensor, scales: Tensor, offset: int, numel: int) -> Tensor:
        """Return momentum ``[offset, offset + numel)`` of the partition, which is in one fragment: ``(numel,)`` fp32.

        ``codes`` and ``scales`` are those of the partition.
        """
        before, first = self.row(offset)
        scales = scales.narrow(0, first, -(-(before + numel) // BLOCK))  # of the blocks of these elements
        return from_codes(codes.narrow(0, offset, numel), scales, before)

    def decode_all(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the momentum of the partition, fp32 like ``codes``; padding is 0."""
        values = torch.zeros_like(codes, dtype=torch.float32)
        for fragment in self._fragments:
            offset, numel = fragment.partition_offset, fragment.numel
            values.narrow(0, offset, numel).copy_(self.decode(codes, scales, offset, numel))
        return values

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes, int8 like ``values``, and scales ``(count,)`` of a partition's flat fp32 momentum."""
        codes = torch.zeros_like(values, dtype=torch.int8)  # padding keeps 0
        scales = torch.zeros(self.count, dtype=torch.float32, device=values.device)
        for fragment, first in zip(self._fragments, self._first_scales, strict=True):
            offset, numel = fragment.partition_offset, fragment.numel
            new_codes, new_scales = quantize(values.narrow(0, offset, numel), fragment.matrix_offset % BLOCK)
            codes.narrow(0, offset, numel).copy_(new_codes)
            scales.narrow(0, first, len(new_scales)).copy_(new_scales)
        return codes, scales


def scales_of(entry: dict[str, Any], partition: Partition, count: int) -> Tensor:
    """Return the scales of a partition with int8 momentum, ``(count,)`` fp32; create them if ``entry`` has none."""
    if SCALE_KEY not in entry:
        entry[SCALE_KEY] = torch.zeros(count, dtype=torch.float32, device=partition.tensor.device)
    scales: Tensor = entry[SCALE_KEY]
    partition.check_numel(scales, count, "scales of the momentum")
    return scales


def convert_momentum(partition: Partition, state: State, policy: StatePolicy, blocks: Int8Blocks) -> None:
    """Convert the momentum of a partition, not yet in the dtype of ``policy``, to or from int8; mutates ``state``."""
    entry = state[partition.tensor]
    momentum = entry["momentum_buffer"]
    if policy.quantizes_momentum:
        codes, entry[SCALE_KEY] = blocks.encode(momentum.detach().float().contiguous().view(-1))
        entry["momentum_buffer"] = codes.view(partition.tensor.shape)
    else:
        values = blocks.decode_all(momentum.view(-1), entry.pop(SCALE_KEY))
        dtype = policy.dtype("momentum_buffer", partition.tensor.dtype)
        entry["momentum_buffer"] = values.view(partition.tensor.shape).to(dtype)
