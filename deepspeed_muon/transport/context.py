"""What every part of a step needs to know, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from deepspeed_muon.math.newton_schulz import NsSettings

__all__ = ["StepContext", "StepStats"]


@dataclass(slots=True)
class StepStats:
    """What this rank did since the counters were last reset.

    Attributes:
        bytes_sent: Bytes that left this rank in the all-to-alls of a step (own fragments are not sent).
        matrices_orthogonalized: Matrices that went through Newton-Schulz on this rank; a stack that several owners
            divide counts once, where its first blocks are.
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
        number: Of the step set, for errors.
        group: The data-parallel process group; ``None`` in a single process.
        rank: This rank inside the group.
        world_size: Its size.
        device: Where the exchange and the iteration run; the partitions may be elsewhere (offload).
        wire_dtype: Dtype in which directions and updates travel, and to which they are rounded where they stay.
        ns_settings: The Newton-Schulz iteration.
        stats: Counters of the optimizer; mutated.
    """

    number: int
    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    device: torch.device
    wire_dtype: torch.dtype
    ns_settings: NsSettings
    stats: StepStats

    @property
    def batch_below(self) -> int:
        """Blocks whose short side is shorter than this are orthogonalised together.

        On a CPU a product of several matrices is slower than one at a time from there on; on a GPU one such matrix
        fills the chip (two waves of 128 x 128 tiles on 132 multiprocessors).
        """
        return 256 if self.device.type == "cpu" else 2048
