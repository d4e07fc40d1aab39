"""Which file of a consolidated checkpoint holds what, which rank writes it, and how the elements come to that rank.

A file holds whole tensors, whoever holds their parts: all ranks are told what each data-parallel group holds. The ranks
write in rounds. In each round one all-to-all brings every rank one piece of the file that it writes, and the rank
appends it. So the pieces bound the memory, whatever the size of the model and of its largest tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.checkpoint.index import FileRecord, described
from deepspeed_muon.checkpoint.live import HeldParameter, LiveState
from deepspeed_muon.checkpoint.shards import ITEM_BYTES, PlannedTensor, ShardFile, fsync_folder, pack
from deepspeed_muon.checkpoint.sources import views
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import logger
from deepspeed_muon.plan.slices import TensorSlice, add_up
from deepspeed_muon.plan.spread import runs_within
from deepspeed_muon.transport.waiting import phase

__all__ = ["Piece", "Transfer", "SavePlan", "Stage", "log_stage", "write_shards"]

Stage = Literal["start", "shards", "piece", "shards written", "index written", "done"]
"""Points of a save that the log names at level DEBUG, in this order; ``piece`` once a round."""

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
class Transfer:
    """Consecutive elements of a part that go from the partition of a rank into a piece.

    Attributes:
        source: The rank.
        name: Of the whole tensor.
        key: ``fp32`` or a state key.
        part: The part.
        start: The first of the elements, counted in the part.
        numel: How many they are.
        piece_start: Which element of the whole tensor comes first in the piece; negative if it begins later in it.
    """

    source: int
    name: str
    key: str
    part: TensorSlice
    start: int
    numel: int
    piece_start: int

    def put(self, elements: Tensor, piece: Tensor) -> None:
        """Copy the elements to their places in the piece."""
        stop = self.start + self.numel
        for own, whole in views(self.part, self.start, stop, elements, self.start, piece, self.piece_start):
            whole.copy_(own)


class SavePlan:
    """Which file holds what, who writes it, and in which pieces; equal on all ranks.

    Attributes:
        state: What this rank holds.
        parts: Name of each whole tensor to the parts of it that groups of ranks hold, copies left out.
        shards: The tensors of every file.
        sizes: The elements of every file.
        writers: The rank that writes each file.
        piece_numel: Elements of the largest piece.
    """

    def __init__(self, state: LiveState, held: Iterable[HeldParameter], shard_bytes: int) -> None:
        """Make the plan from metadata.

        Args:
            state: What this rank holds.
            held: What every data-parallel group of the engine holds, in the same order on all ranks.
            shard_bytes: The intended size of a file; it bounds the pieces too.

        Raises:
            CheckpointError: If the parts of a tensor do not add up to it. The same on all ranks.
        """
        self.state = state
        self._by_name = state.by_name
        self.parts = _put_together(held)
        # By identity: the ranks of one group are one object, and too many to compare for every parameter.
        copied = {id(each.ranks): each.ranks for parts in self.parts.values() for each in parts}
        self._members = {key: frozenset(ranks) for key, ranks in copied.items()}
        tensors = [
            PlannedTensor(name, key, parts[0].part_of(key).shape)
            for name, parts in self.parts.items()
            for key in parts[0].keys
        ]
        total = sum(tensor.numel for tensor in tensors) * ITEM_BYTES
        # Small models too are written by all ranks.
        target = min(shard_bytes, max(-(-total // state.world_size), 1))
        self.shards = pack(tensors, target)
        self.sizes = sizes = [sum(tensor.numel for tensor in shard) for shard in self.shards]
        self.writers = _balanced(sizes, state.world_size)
        piece_bytes = max(1 << 10, min(_PIECE_BYTES, shard_bytes // (2 * state.world_size)))
        self.piece_numel = piece = piece_bytes // ITEM_BYTES
        self._pieces: list[list[Piece]] = [[] for _ in range(state.world_size)]
        for shard, (size, writer) in enumerate(zip(sizes, self.writers, strict=True)):
            self._pieces[writer].extend(
                Piece(shard, start, min(start + piece, size)) for start in range(0, size, piece)
            )

    def rounds(self) -> Iterator[tuple[Piece | None, ...]]:
        """Yield the piece of every rank, or ``None`` for ranks that are done."""
        return zip_longest(*self._pieces)

    def transfers(self, writer: int, piece: Piece) -> Iterator[Transfer]:
        """Yield everything that ``piece`` consists of, in an order that all ranks share."""
        offset = 0
        for tensor in self.shards[piece.shard]:
            begin, end = max(piece.start - offset, 0), min(piece.stop - offset, tensor.numel)
            if begin < end:
                place = piece.start - offset
                for held in self.parts[tensor.parameter]:
                    part = held.part_of(tensor.key)
                    own = part.before(begin), part.before(end)
                    for source, start, stop in self._holders(held, tensor.key, writer, *own):
                        yield Transfer(source, tensor.parameter, tensor.key, part, start, stop - start, place)
            offset += tensor.numel
            if offset >= piece.stop:
                return

    def _holders(
        self, held: HeldParameter, key: str, writer: int, start: int, stop: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield global rank, start and stop of each run of a part's elements ``[start, stop)`` that one rank holds."""
        places = held.places_of(key)
        if start == stop:
            return
        if places.replicated:
            yield writer if writer in self._members[id(held.ranks)] else held.ranks[0], start, stop
            return
        for rank, first, last in runs_within(places, start, stop):
            yield held.ranks[rank], first, last

    def source(self, transfer: Transfer) -> Tensor:
        """Return the elements of a transfer that this rank sends."""
        parameter = self._by_name[transfer.name]
        own = parameter.own_fragment(transfer.key)
        assert own is not None
        flat = self.state.tensor(parameter.partition, transfer.key)
        return flat.narrow(0, own.partition_offset + transfer.start - own.matrix_offset, transfer.numel)


def _put_together(held: Iterable[HeldParameter]) -> dict[str, tuple[HeldParameter, ...]]:
    """Return the parts of each whole tensor, each once; raise if they do not belong together or do not add up."""
    found: dict[str, dict[TensorSlice, HeldParameter]] = {}
    for each in held:
        found.setdefault(each.name, {}).setdefault(each.part, each)
    for name, parts in found.items():
        first, *others = parts.values()
        expected = (described(first.whole), first.step, first.keys)
        for other in others:
            if (described(other.whole), other.step, other.keys) != expected:
                raise CheckpointError(
                    f"parameter {name}: rank {first.ranks[0]} has {expected}, and rank {other.ranks[0]} "
                    f"{(described(other.whole), other.step, other.keys)}"
                )
        for key in first.keys:
            if not add_up(each.part_of(key) for each in parts.values()):
                shown = ", ".join(f"rank {each.ranks[0]}: {part.ranges}" for part, each in parts.items())
                raise CheckpointError(
                    f"parameter {name} ({key}): its parts along dimension {first.part.dim} do not add up to "
                    f"{first.part.length}: {shown}"
                )
    return {name: tuple(parts.values()) for name, parts in found.items()}


def _balanced(sizes: Sequence[int], world_size: int) -> list[int]:
    """Give every file to the rank that has least to write, largest files first."""
    load = [0] * world_size
    writers = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        writers[number] = min(range(world_size), key=lambda rank: (load[rank], rank))
        load[writers[number]] += sizes[number]
    return writers


def log_stage(folder: Path, stage: Stage) -> None:
    """Say in the log how far a save has come."""
    logger.debug("deepspeed_muon: save to %s: %s", folder, stage)


def write_shards(
    plan: SavePlan, folder: Path, names: Sequence[str], files: dict[str, FileRecord]
) -> Exception | None:
    """Write this rank's files. A failure is returned, not raised: the other ranks still need its fragments."""
    state = plan.state
    buffers = _Buffers(plan.piece_numel, state.device)
    log_stage(folder, "shards")
    with _Writer(plan, folder, names, files) as writer:
        for number, pieces in enumerate(plan.rounds()):
            own = pieces[state.rank]
            content = buffers.content[number % 2]
            writer.wait_for(number - 2)
            _exchange(plan, pieces, content, buffers)
            writer.append(own, content)
            log_stage(folder, "piece")
    if writer.error is None and files:
        try:
            fsync_folder(folder)
        except OSError as error:
            return CheckpointError(f"{folder}: {error}")
    return writer.error


class _Buffers:
    """Memory that all rounds share: to allocate it in each round would cost more than the copies."""

    def __init__(self, piece_numel: int, device: torch.device) -> None:
        self.content = [torch.empty(piece_numel, dtype=torch.float32) for _ in range(2)]
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def get(self, name: str, numel: int) -> Tensor:
        """Return a buffer on the exchange's device; its content is whatever it was."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < numel:
            kept = self._kept[name] = torch.empty(numel, dtype=torch.float32, device=self._device)
        return kept.narrow(0, 0, numel)


class _Writer:
    """Appends pieces to this rank's files in a thread, while the next piece is exchanged.

    The first error is kept and everything after it ignored: the rank goes on to serve the others.
    """

    def __init__(
        self, plan: SavePlan, folder: Path, names: Sequence[str], files: dict[str, FileRecord]
    ) -> None:
        self.error: Exception | None = None
        self._plan = plan
        self._folder = folder
        self._names = names
        self._files = files
        self._current: ShardFile | None = None
        self._pending: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="deepspeed_muon-save")

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._thread.shutdown()
            for future in self._pending:
                future.result()
        except BaseException as interrupt:
            # The thread must not make files after those of the save were removed.
            self.error = self.error or CheckpointError(f"interrupted: {interrupt!r}")
            self._thread.shutdown(cancel_futures=True)
            raise
        finally:
            self._discard()

    def _discard(self) -> None:
        if self._current is not None:
            self._current.discard()

    def append(self, piece: Piece | None, content: Tensor) -> None:
        """Write a piece soon; ``content`` must stay as it is until :meth:`wait_for` its number."""
        self._pending.append(self._thread.submit(self._append, piece, content))

    def wait_for(self, number: int) -> None:
        """Return once the piece appended as number ``number`` is written."""
        if number >= 0:
            self._pending[number].result()

    def _append(self, piece: Piece | None, content: Tensor) -> None:
        if piece is None or self.error is not None:
            return
        path = self._folder / self._names[piece.shard]
        try:
            if self._current is None:
                self._current = ShardFile(path, self._plan.shards[piece.shard])
            self._current.write(content.narrow(0, 0, piece.stop - piece.start))
            if piece.stop == self._plan.sizes[piece.shard]:
                self._files[path.name] = self._current.finish()
                self._current = None
        except OSError as caught:
            self.error = CheckpointError(f"{path}: {caught}")


def _exchange(plan: SavePlan, pieces: Sequence[Piece | None], content: Tensor, buffers: _Buffers) -> None:
    """Send every rank its piece of this round; this rank's own comes into ``content``, on the CPU."""
    state = plan.state
    sent: list[list[Transfer]] = [[] for _ in pieces]
    received: list[list[Transfer]] = [[] for _ in pieces]
    traffic = False
    for writer, piece in enumerate(pieces):
        for transfer in plan.transfers(writer, piece) if piece else ():
            traffic = traffic or transfer.source != writer
            if transfer.source == writer == state.rank:
                transfer.put(plan.source(transfer), content)
            elif transfer.source == state.rank:
                sent[writer].append(transfer)
            elif writer == state.rank:
                received[transfer.source].append(transfer)
    if not traffic:
        return
    out_splits = [sum(transfer.numel for transfer in transfers) for transfers in sent]
    in_splits = [sum(transfer.numel for transfer in transfers) for transfers in received]
    outgoing = buffers.get("outgoing", sum(out_splits))
    leaving = list(chain.from_iterable(sent))
    for transfer, part in zip(leaving, _parts(outgoing, leaving), strict=True):
        part.copy_(plan.source(transfer))
    incoming = buffers.get("incoming", sum(in_splits))
    with phase("exchange of a checkpoint's pieces", None):
        dist.all_to_all_single(incoming, outgoing, in_splits, out_splits)
    arrived = list(chain.from_iterable(received))
    for transfer, part in zip(arrived, _parts(incoming, arrived), strict=True):
        transfer.put(part, content)


def _parts(buffer: Tensor, transfers: Sequence[Transfer]) -> Sequence[Tensor]:
    return buffer.split_with_sizes([transfer.numel for transfer in transfers])
