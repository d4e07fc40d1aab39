"""What every part of a step needs to know: the ranks, the device, the communication dtype, the counters.

Directions and updates are sent uncompressed, or as int8: a signed byte for each element and a scale for every block
of 256, half of bf16's bytes and 2 % for the scales. What the receiver reads differs from what was sent by up to half a
step, 1/254 of the largest element of its block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.plan.wire import CODED, PLAIN, WireFormat

_LARGEST = 127.0


@dataclass(frozen=True, slots=True)
class Codec:
    """Writes directions and updates into communication buffers, and reads them again: here uncompressed.

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
class Int8Codec(Codec):
    """One signed byte for each value and a scale for every block."""

    @property
    def dtype(self) -> torch.dtype:
        """See :class:`Codec`."""
        return torch.uint8

    @property
    def format(self) -> WireFormat:
        """See :class:`Codec`."""
        return CODED

    def write(self, place: Tensor, values: Tensor) -> None:
        """See :class:`Codec`."""
        blocks = self._in_blocks(values)
        scales = blocks.abs().amax(dim=-1).div_(_LARGEST)
        # A block of zeros has no scale. One that is not finite keeps its own, so that the receiver sees it.
        codes = blocks.div_(scales.masked_fill(scales == 0, 1.0).unsqueeze(-1)).round_().to(torch.int8)
        numel = values.shape[1]
        place[:, :numel].copy_(codes.view(len(values), -1)[:, :numel].view(torch.uint8))
        self._scales(place, numel).copy_(scales)

    def read(self, place: Tensor, numel: int) -> Tensor:
        """See :class:`Codec`."""
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


def codec_for(wire_format: WireFormat, values: torch.dtype) -> Codec:
    """Return the codec of a format; ``values`` is the dtype of directions and updates."""
    return Int8Codec(values) if wire_format.block else Codec(values)


@dataclass(slots=True)
class StepStats:
    """What this rank did since the last reset of these counters.

    Attributes:
        bytes_sent: Bytes that this rank sent to others in all-to-alls.
        matrices_orthogonalized: Matrices that this rank orthogonalised. A stack with several owners counts once, at the
            owner of its first blocks.
        exchanges: All-to-alls that this rank took part in.
    """

    bytes_sent: int = 0
    matrices_orthogonalized: int = 0
    exchanges: int = 0

    def reset(self) -> None:
        """Set all counters to zero."""
        self.bytes_sent = self.matrices_orthogonalized = self.exchanges = 0

    def count_exchange(self, nbytes: int) -> None:
        """Count one all-to-all in which this rank sends ``nbytes`` to others."""
        self.bytes_sent += nbytes
        self.exchanges += 1


@dataclass(frozen=True, slots=True)
class StepContext:
    """What every part of the step of one step set needs; made once, when the optimizer is bound.

    Attributes:
        number: The number of the step set, for errors.
        group: The data-parallel process group; ``None`` in a single process.
        rank: This rank inside the group.
        world_size: The size of the group.
        device: Where the exchange and the iteration run; the partitions may be elsewhere (offload).
        comm_dtype: Dtype of directions and updates, also of those that do not travel.
        codec: How they travel.
        ns_settings: The Newton-Schulz iteration.
        stats: Counters of the optimizer; mutated.
    """

    number: int
    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    device: torch.device
    comm_dtype: torch.dtype
    codec: Codec
    ns_settings: NsSettings
    stats: StepStats

    @property
    def batch_below(self) -> int:
        """Blocks with a shorter short side than this are orthogonalised in batches.

        Above it a CPU multiplies matrices faster one at a time, and a single matrix fills a GPU: at 2048 it is still
        136 tiles of 128 x 128 on the 132 multiprocessors of an H100, two waves for the work of one.
        """
        return 256 if self.device.type == "cpu" else 2049
