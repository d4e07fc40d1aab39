"""Which file of a consolidated checkpoint holds what, which rank writes it, and in which pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deepspeed_muon.checkpoint.live import LiveState
from deepspeed_muon.checkpoint.shards import ITEM_BYTES, PlannedTensor, pack

__all__ = ["Piece", "Run", "SavePlan"]

# The largest piece that a rank receives at once, which bounds the buffers beside the shard itself.
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank appends to its current file in one round.

    Attributes:
        shard: Number of the file.
        start: First element of the file's tensors, taken together, that it holds.
        stop: First element that it does not hold.
    """

    shard: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Run:
    """Elements that travel, or are copied, from one partition into one piece."""

    source: int
    parameter: int
    key: str
    partition_offset: int
    piece_offset: int
    numel: int


class SavePlan:
    """Which file holds what, who writes it, and in which pieces; equal on all ranks of the group.

    Attributes:
        state: What there is to save.
        shards: The tensors of every file.
        sizes: The elements of every file.
        writers: The rank that writes each file.
        piece_numel: Elements of the largest piece.
    """

    def __init__(self, state: LiveState, shard_bytes: int) -> None:
        """Make the plan; nothing is sent.

        Args:
            state: What there is to save.
            shard_bytes: Intended size of a file; bounds the pieces too.
        """
        self.state = state
        self._number = {p.route.name: number for number, p in enumerate(state.parameters)}
        tensors = [
            PlannedTensor(parameter.route.name, key, parameter.shape_of(key))
            for parameter in state.parameters
            for key in state.keys(parameter)
        ]
        total = sum(tensor.numel for tensor in tensors) * ITEM_BYTES
        # Small models too are written by all ranks.
        target = min(shard_bytes, max(-(-total // state.world_size), 1))
        self.shards = pack(tensors, target)
        self.sizes = sizes = [sum(tensor.numel for tensor in shard) for shard in self.shards]
        self.writers = _balanced(sizes, state.world_size)
        self.piece_numel = piece = (
            max(1 << 10, min(_PIECE_BYTES, shard_bytes // (2 * state.world_size))) // ITEM_BYTES
        )
        self._pieces: list[list[Piece]] = [[] for _ in range(state.world_size)]
        for shard, (size, writer) in enumerate(zip(sizes, self.writers, strict=True)):
            self._pieces[writer].extend(
                Piece(shard, start, min(start + piece, size)) for start in range(0, size, piece)
            )

    def rounds(self) -> Iterator[list[Piece | None]]:
        """Yield the piece of every rank, or ``None`` for ranks that are done."""
        for number in range(max(map(len, self._pieces))):
            yield [pieces[number] if number < len(pieces) else None for pieces in self._pieces]

    def runs(self, writer: int, piece: Piece) -> Iterator[Run]:
        """Yield everything that ``piece`` consists of, in an order that all ranks share."""
        offset = 0
        for tensor in self.shards[piece.shard]:
            begin, end = max(piece.start - offset, 0), min(piece.stop - offset, tensor.numel)
            if begin < end:
                number = self._number[tensor.parameter]
                parameter = self.state.parameters[number]
                base = offset - piece.start
                if parameter.replicated:
                    start = parameter.fragments_of(tensor.key)[0].partition_offset + begin
                    yield Run(writer, number, tensor.key, start, base + begin, end - begin)
                else:
                    for run in parameter.runs(tensor.key, begin, end):
                        where = base + run.matrix_offset
                        yield Run(run.rank, number, tensor.key, run.partition_offset, where, run.numel)
            offset += tensor.numel
            if offset >= piece.stop:
                return

    def digest(self) -> str:
        """Return a text that is equal where plans are."""
        records = [
            (
                p.route.name,
                p.route.shape,
                p.route.algorithm,
                self.state.step(p.partition),
                p.fragments,
                self.state.keys(p),
            )
            for p in self.state.parameters
        ]
        return hashlib.sha256(repr((records, self.writers)).encode()).hexdigest()


def _balanced(sizes: Sequence[int], world_size: int) -> list[int]:
    """Give every file to the rank that has least to write, largest files first."""
    load = [0] * world_size
    writers = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        writers[number] = min(range(world_size), key=lambda rank: (load[rank], rank))
        load[writers[number]] += sizes[number]
    return writers
