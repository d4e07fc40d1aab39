"""Writes directions and updates into communication buffers, and reads them again.

A *plain* wire copies them. A *coded* one sends a signed byte for each element and a scale for every block of 256: half
of bf16's bytes, and 2 % for the scales. What the receiver reads differs from what was sent by up to half a step, 1/254
of the largest element of its block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_muon.plan.wire import CODED, PLAIN, WireFormat

_LARGEST = 127.0


@dataclass(frozen=True, slots=True)
class Wire:
    """A plain wire.

    Attributes:
        values: Dtype of directions and updates.
    """

    values: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the buffers."""
        return self.values

    @property
    def format(self) -> WireFormat:
        """The room that a fragment takes in a buffer."""
        return PLAIN

    @property
    def exact(self) -> bool:
        """Whether the receiver reads what was written."""
        return not self.format.block

    def write(self, place: Tensor, values: Tensor) -> None:
        """Write ``(fragments, elements)`` to ``place``, ``(fragments, units)``; one fragment may go to many places."""
        place.copy_(values)

    def read(self, place: Tensor, numel: int) -> Tensor:
        """Return the ``(fragments, numel)`` values in ``place``; the caller must not change them."""
        return place


@dataclass(frozen=True, slots=True)
class CodedWire(Wire):
    """One signed byte for each value and a scale for every block."""

    @property
    def dtype(self) -> torch.dtype:
        """See :class:`Wire`."""
        return torch.uint8

    @property
    def format(self) -> WireFormat:
        """See :class:`Wire`."""
        return CODED

    def write(self, place: Tensor, values: Tensor) -> None:
        """See :class:`Wire`."""
        blocks = self._in_blocks(values)
        scales = blocks.abs().amax(dim=-1).div_(_LARGEST)
        # A block of zeros has no scale. One that is not finite keeps its own, so that the receiver sees it.
        codes = blocks.div_(scales.masked_fill(scales == 0, 1.0).unsqueeze(-1)).round_().to(torch.int8)
        numel = values.shape[1]
        place[:, :numel].copy_(codes.view(len(values), -1)[:, :numel].view(torch.uint8))
        self._scales(place, numel).copy_(scales)

    def read(self, place: Tensor, numel: int) -> Tensor:
        """See :class:`Wire`."""
        blocks = self._in_blocks(place[:, :numel].view(torch.int8))
        blocks.mul_(self._scales(place, numel).unsqueeze(-1))
        return blocks.view(len(place), -1)[:, :numel].to(self.values)

    @staticmethod
    def _in_blocks(values: Tensor) -> Tensor:
        """Return values in fp32 as ``(fragments, blocks, elements)``, with zeros at the end; a copy."""
        fragments, numel = values.shape
        padded = torch.zeros(fragments, -(-numel // CODED.block) * CODED.block, device=values.device)
        padded[:, :numel] = values
        return padded.view(fragments, -1, CODED.block)

    @staticmethod
    def _scales(place: Tensor, numel: int) -> Tensor:
        """Return the scales in ``place``, ``(fragments, blocks)``."""
        blocks = -(-numel // CODED.block)
        return place[:, place.shape[1] - 4 * blocks :].view(torch.float32)


def wire_for(wire_format: WireFormat, values: torch.dtype) -> Wire:
    """Return the wire of a format; ``values`` is the dtype of directions and updates."""
    return CodedWire(values) if wire_format.block else Wire(values)
