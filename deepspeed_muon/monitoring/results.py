"""What a placement hands to the check: directions, orthogonalised blocks, updates, and the ranks with other parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

# Matrix index and number of its block.
Member = tuple[int, int]


class Finish(Protocol):
    """Turns orthogonalised blocks into updates, as :class:`deepspeed_muon.transport.row_state.RowsAtOwner` does."""

    def finish(self, blocks: Sequence[Member], results: Tensor, /) -> Tensor:
        """Return the updates of orthogonalised ``(blocks, rows, cols)``, of the same shape and Frobenius norms.

        All blocks of a call are transposed, or none is.
        """

    def take_back(self, block: Member, /) -> None:
        """Restore the state that a block had before this step."""

    def keep(self, blocks: Sequence[Member], right: Tensor, /) -> None:
        """Restore the state of the blocks whose flag in ``right`` is not set, without waiting for the device."""

    def start_anew(self, block: Member, /) -> None:
        """Reset the state of a block to its first value."""


@dataclass(frozen=True, slots=True)
class Together:
    """The ranks that orthogonalised matrices together; each has a part of the result.

    Attributes:
        group: The process group of these ranks.
        dim: The dimension that is cut: 0 for rows, 1 for columns.
        sizes: Length along ``dim`` of every rank's part.
        iterate: Runs the iteration on all these ranks, called as ``iterate(parts, settings=...)``.
        counts: Whether this rank counts and reports wrong results.
    """

    group: dist.ProcessGroup
    dim: int
    sizes: tuple[int, ...]
    iterate: Callable[..., Tensor]
    counts: bool


@dataclass(slots=True)
class Result:
    """The result of one call of the iteration.

    Attributes:
        members: Index of the matrix, and number of its block, of each entry.
        inputs: ``(entries, rows, cols)``: the directions.
        blocks: The orthogonalised blocks, of the same shape; in fp32 once an entry was redone.
        scales: Factor of the scale rule for each entry.
        finish: Turns blocks into updates; ``None`` if they are the updates.
        together: The ranks that have the other parts of the blocks; ``None`` for whole blocks.
        updates: The updates to apply.
    """

    members: Sequence[Member]
    inputs: Tensor
    blocks: Tensor
    scales: Sequence[float]
    finish: Finish | None = None
    together: Together | None = None
    updates: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.updates = self.blocks if self.finish is None else self.finish.finish(self.members, self.blocks)


R = TypeVar("R", bound=Result)
