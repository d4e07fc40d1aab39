"""What a placement hands to the check: directions, orthogonalised blocks, updates, and the ranks with other parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
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


class Window(Generic[R]):
    """Results whose norms are copied to the host together."""

    def __init__(self) -> None:
        self.results: list[R] = []
        self.numel = 0
        self._norms: list[Tensor] = []
        self._host: Tensor | None = None
        self._ready: torch.Event | None = None

    def add(self, result: R, norms: Tensor) -> None:
        """Keep a result with the norms of its entries, which are on the device."""
        self.results.append(result)
        self.numel += result.updates.numel()
        self._norms.append(norms)

    def send(self) -> None:
        """Start the copy to the host in the order of the stream, so that later work does not delay it."""
        if not self._norms:
            return
        norms = torch.cat(self._norms)
        if norms.device.type == "cpu":
            self._host = norms
            return
        self._host = torch.empty(norms.shape, dtype=norms.dtype, pin_memory=True)
        self._host.copy_(norms, non_blocking=True)
        self._ready = torch.Event(device=norms.device.type)
        self._ready.record()

    def read(self) -> list[float]:
        """Wait for the copy and return the norms."""
        if self._ready is not None:
            self._ready.synchronize()
        values: list[float] = [] if self._host is None else self._host.tolist()
        return values
