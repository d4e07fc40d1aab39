"""What the exchange and the iteration take in memory, and whether chunks may travel while others are orthogonalised.

Muon keeps one number less for each of its elements than AdamW does. The step may use that memory again, and no more
than a twentieth of AdamW's peak besides. Overlap triples the buffers of the exchange: it is given up where three do not
fit. Everything here is counted from shapes that all ranks know, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepspeed_muon.plan.chunks import Link, chunk_limit

__all__ = ["SLOTS", "WINDOW_NUMEL", "StepMemory", "largest_chunk"]

SLOTS = 3
"""Chunks in the buffers with overlap: one arrives, one is orthogonalised, one returns."""

WINDOW_NUMEL = 1 << 25
"""Elements of the results that are checked together. On an accelerator, two such windows are under way."""

# What AdamW keeps of an element at stage 3 in mixed precision: weight, gradient, master weight and two moments.
_ADAMW_BYTES = 2 + 2 + 4 + 4 + 4
_SECOND_MOMENT_BYTES = 4
_MORE_THAN_ADAMW = 0.05
# Small buffers do not decide whether a model fits.
_ALWAYS_FITS = 1 << 26


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Upper bounds for a step of one rank.

    Attributes:
        chunk: Elements that an owner has in the largest chunk.
        blocks: Rows and columns of all kinds of blocks.
        wire_bytes: Bytes of an element of the exchange.
        direction_bytes: Bytes of an element of the directions that do not travel.
        ns_bytes: Bytes of an element of the iteration.
    """

    chunk: int
    blocks: tuple[tuple[int, int], ...]
    wire_bytes: float
    direction_bytes: int
    ns_bytes: int

    def exchange_bytes(self, *, overlap: bool) -> int:
        """Return the bytes of what the chunks in the buffers send and receive."""
        return int(2 * (SLOTS if overlap else 1) * self.wire_bytes * self.chunk)

    def iteration_bytes(self, *, overlap: bool) -> int:
        """Return the bytes of the iteration, and of the directions and results that wait for their check.

        Without overlap the directions lie in a buffer that has been sent.
        """
        products = max((_iteration_numel(*block) for block in self.blocks), default=0)
        largest = max((rows * cols for rows, cols in self.blocks), default=0)
        waiting = min(self.chunk, largest + 2 * WINDOW_NUMEL)
        results = self.ns_bytes * max(0, waiting - largest)
        return self.ns_bytes * products + results + overlap * self.direction_bytes * waiting

    def overlap_fits(self, *, muon: float, others: float) -> bool:
        """Return whether a rank with overlap needs at most a twentieth more than with AdamW, or little at all.

        Args:
            muon: Muon's elements in a rank's partition.
            others: All other elements in it.
        """
        buffers = self.exchange_bytes(overlap=True)
        allowed = _SECOND_MOMENT_BYTES * muon + _MORE_THAN_ADAMW * _ADAMW_BYTES * (muon + others)
        return buffers <= _ALWAYS_FITS or buffers + self.iteration_bytes(overlap=True) <= allowed


def largest_chunk(owned: float, sizes: Iterable[int], bound: int, link: Link | None = None) -> int:
    """Return the elements that an owner has in the largest chunk.

    Args:
        owned: Elements of all matrices that one rank owns.
        sizes: Elements of every matrix that may travel.
        bound: ``exchange_chunk_numel``.
        link: What the network costs, if that is known.
    """
    largest = max(sizes, default=0)
    return int(min(max(owned, largest), max(chunk_limit(int(owned), bound, link=link), largest)))


def _iteration_numel(rows: int, cols: int) -> int:
    """Return the elements that orthogonalising one matrix takes: at most four products of Gram size, or two of each."""
    gram = min(rows, cols) ** 2
    return rows * cols + max(rows * cols + 2 * gram, 4 * gram)
