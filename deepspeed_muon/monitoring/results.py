"""What an iteration hands to the check: directions, orthogonalised blocks, updates, and who has their other parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

__all__ = ["Finish", "Member", "Result", "Together"]

# Matrix index and number of its block.
Member = tuple[int, int]


class Finish(Protocol):
    """What turns orthogonalised blocks into updates; :class:`deepspeed_muon.transport.row_moments.RowMoments`."""

    def normalize(self, blocks: Sequence[Member], updates: Tensor, /) -> Tensor:
        """Return the updates of orthogonalised ``(blocks, rows, cols)``, of the same shape and Frobenius norms.

        The blocks of a call are all transposed, or none is.
        """

    def take_back(self, block: Member, /) -> None:
        """Restore what was kept of a block before this step."""

    def start_anew(self, block: Member, /) -> None:
        """Forget what was kept of a block."""


@dataclass(frozen=True, slots=True)
class Together:
    """The ranks that orthogonalised matrices together, each of which has a part of the result.

    Attributes:
        group: Those ranks.
        dim: The dimension that is cut: 0 for rows, 1 for columns.
        sizes: Length along ``dim`` of every rank's part.
        iterate: Runs the iteration on all of them, called as ``iterate(parts, settings=...)``.
        counts: Whether this rank counts and reports what is wrong.
    """

    group: dist.ProcessGroup
    dim: int
    sizes: tuple[int, ...]
    iterate: Callable[..., Tensor]
    counts: bool


@dataclass(slots=True)
class Result:
    """What came out of one call of the iteration.

    Attributes:
        members: Index of the matrix, and number of its block, of each entry.
        inputs: ``(entries, rows, cols)``: the directions that were put in.
        blocks: What came out, of the same shape; in fp32 once an entry was redone.
        scales: Factor of the scale rule for each entry.
        finish: What comes between iteration and update.
        together: The ranks that have the other parts of the blocks; ``None`` for whole blocks.
        updates: What is applied: ``finish`` of the blocks, or the blocks.
    """

    members: Sequence[Member]
    inputs: Tensor
    blocks: Tensor
    scales: Sequence[float]
    finish: Finish | None = None
    together: Together | None = None
    updates: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Finish the blocks."""
        self.updates = (
            self.blocks if self.finish is None else self.finish.normalize(self.members, self.blocks)
        )
