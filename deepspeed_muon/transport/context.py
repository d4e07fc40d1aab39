"""What every part of a step needs to know, and the counters of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.transport.wire import Wire


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
        wire_dtype: Dtype of directions and updates, also of those that do not travel.
        wire: How they travel.
        ns_settings: The Newton-Schulz iteration.
        stats: Counters of the optimizer; mutated.
    """

    number: int
    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    device: torch.device
    wire_dtype: torch.dtype
    wire: Wire
    ns_settings: NsSettings
    stats: StepStats

    @property
    def batch_below(self) -> int:
        """Blocks with a shorter short side than this are orthogonalised in batches.

        Above it a CPU multiplies matrices faster one at a time, and a single matrix fills a GPU: at 2048 it is still
        136 tiles of 128 x 128 on the 132 multiprocessors of an H100, two waves for the work of one.
        """
        return 256 if self.device.type == "cpu" else 2049
