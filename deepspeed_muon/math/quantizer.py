"""Linear 8-bit codes by blocks, whose values give the same codes again.

A block of :data:`BLOCK` elements shares one fp32 scale: its largest magnitude divided by 127, cut to 17 significant
bits. A code has 7 bits, so ``code * scale`` is exact in fp32. The largest code of a block is 127, from which the scale
follows again: values that were read from codes have the same codes, wherever and however often they are coded.

Blocks are counted from a parameter's first element, not from a partition's. With 256 elements, blocks of a matrix whose
rows are a multiple of 256 long lie inside its rows, so that a tensor-parallel shard of such rows has the same blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
_LOW_BITS = 7
_SMALLEST = torch.finfo(torch.float32).tiny


def block_scales(largest: Tensor) -> Tensor:
    """Return the scale of each block for its largest magnitude.

    Blocks below ``127 * 2^-126`` count as zero: their scale has no 17 bits.

    Args:
        largest: fp32, not negative; infinity or NaN of a block that is not finite, whose scale is neither.
    """
    # A division by a Python number is a product with its reciprocal on a GPU.
    scales = largest / torch.full_like(largest, 127.0)
    cut = scales.view(torch.int32).bitwise_and(-(1 << _LOW_BITS)).view(torch.float32)
    return torch.where(cut < _SMALLEST, 0.0, cut)


def to_codes(values: Tensor, scales: Tensor) -> Tensor:
    """Return int8 codes, rounded to nearest even; 0 where the scale is 0 or not finite.

    A product with the reciprocal takes half the time of a quotient, and gives the values of codes the same codes.
    With a scale that is not finite such a code stands for NaN: a block with one bad element is bad.

    Args:
        values: fp32 or float64.
        scales: Broadcasts to ``values``.
    """
    return (values * scales.reciprocal()).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)


def from_codes(codes: Tensor, scales: Tensor, phase: int) -> Tensor:
    """Return what codes stand for, fp32.

    Args:
        codes: Flat.
        scales: Of the blocks in which they lie.
        phase: Elements of the first of these blocks before the first code.
    """
    return codes.float().mul_(scales.repeat_interleave(BLOCK)[phase : phase + codes.numel()])
