"""Write one safetensors set from a running engine, by all ranks in parallel.

Tensors are packed into files and files are given to ranks. The files are written in rounds: in each, every rank
receives one piece of the file that it writes, through one all-to-all, and appends it. So memory is bounded by the
pieces, not by the model or its largest tensor. Files get their names when they are complete and synced, and the
index, which alone makes them a checkpoint, comes last.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.checkpoint.index import (
    FORMAT,
    INDEX_NAME,
    CheckpointIndex,
    FileRecord,
    ParameterRecord,
)
from deepspeed_muon.checkpoint.live import (
    LiveParameter,
    LiveState,
    collect,
    hyperparameters,
    read_progress,
    software_versions,
)
from deepspeed_muon.checkpoint.shards import (
    DEFAULT_SHARD_BYTES,
    ITEM_BYTES,
    PlannedTensor,
    ShardFile,
    pack,
    remove_stale,
    shard_name,
    write_aside,
)
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.transport.agreement import Claim, agree

__all__ = ["Stage", "consolidate"]

Stage = Literal["start", "shards", "piece", "shards written", "index written", "done"]
"""Points of a save at which ``on_stage`` is called, in this order; ``piece`` once a round."""

# The largest piece that a rank receives at once. Larger ones are not faster.
_PIECE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class _Piece:
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
class _Run:
    """Elements that travel, or are copied, from one partition into one piece."""

    source: int
    parameter: int
    key: str
    partition_offset: int
    piece_offset: int
    numel: int


class _Plan:
    """Which file holds what, who writes it, and in which pieces; equal on all ranks of the group."""

    def __init__(self, state: LiveState, shard_bytes: int) -> None:
        self.state = state
        self._number = {p.route.name: number for number, p in enumerate(state.parameters)}
        tensors = [
            PlannedTensor(parameter.route.name, key, parameter.route.shape)
            for parameter in state.parameters
            for key in state.keys(parameter)
        ]
        total = sum(tensor.numel for tensor in tensors) * ITEM_BYTES
        # Small models too are written by all ranks.
        target = min(shard_bytes, max(-(-total // state.world_size), 1))
        self.shards = pack(tensors, target)
        sizes = [sum(tensor.numel for tensor in shard) for shard in self.shards]
        self.writers = _balanced(sizes, state.world_size)
        piece = max(1 << 10, min(_PIECE_BYTES, shard_bytes // (2 * state.world_size))) // ITEM_BYTES
        self._pieces: list[list[_Piece]] = [[] for _ in range(state.world_size)]
        for shard, (size, writer) in enumerate(zip(sizes, self.writers, strict=True)):
            self._pieces[writer].extend(
                _Piece(shard, start, min(start + piece, size)) for start in range(0, size, piece)
            )

    def rounds(self) -> Iterator[list[_Piece | None]]:
        """Yield the piece of every rank, or ``None`` for ranks that are done."""
        for number in range(max(map(len, self._pieces))):
            yield [pieces[number] if number < len(pieces) else None for pieces in self._pieces]

    def runs(self, writer: int, piece: _Piece) -> Iterator[_Run]:
        """Yield everything that ``piece`` consists of, in an order that all ranks share."""
        offset = 0
        for tensor in self.shards[piece.shard]:
            begin, end = max(piece.start - offset, 0), min(piece.stop - offset, tensor.numel)
            if begin < end:
                number = self._number[tensor.parameter]
                parameter = self.state.parameters[number]
                base = offset - piece.start
                if parameter.replicated:
                    start = parameter.fragments[0].partition_offset + begin
                    yield _Run(writer, number, tensor.key, start, base + begin, end - begin)
                else:
                    for run in parameter.runs(begin, end):
                        where = base + run.matrix_offset
                        yield _Run(run.rank, number, tensor.key, run.partition_offset, where, run.numel)
            offset += tensor.numel
            if offset >= piece.stop:
                return

    def digest(self) -> str:
        """Return a text that is equal where plans are."""
        records = [
            (p.route.name, p.route.shape, p.route.algorithm, self.state.step(p.partition), p.fragments)
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


def consolidate(
    engine: Any,
    out_dir: str | os.PathLike[str],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_stage: Callable[[Stage], None] | None = None,
) -> Path:
    """Write the whole optimizer state of ``engine`` as one safetensors set with a JSON index.

    Must be called by all ranks, between steps, with the same arguments; ``out_dir`` must be on a file system that they
    share. For every parameter it holds the fp32 master and the momentum, or both Adam moments, in the parameter's true
    shape. A checkpoint that ``out_dir`` held before stays valid until the new one is complete, and is removed then.
    Frozen parameters and buffers are not part of it.

    Args:
        engine: A ``DeepSpeedEngine`` with our optimizer.
        out_dir: The folder; made if needed.
        shard_bytes: Intended size of a file. Bounds the memory too.
        on_stage: Called on this rank at every point of the save, for tests.

    Returns:
        The folder.

    Raises:
        CheckpointError: On every rank, when one of them could not write. Nothing that loads was left behind.
    """
    folder = Path(out_dir)
    reached: Callable[[Stage], None] = on_stage or (lambda stage: None)
    state, plan = _prepare(engine, folder, shard_bytes)
    reached("start")
    save_id = _shared_save_id()
    first = _first_shard(state, len(plan.shards))
    names = [shard_name(save_id, first + number) for number in range(len(plan.shards))]
    files: dict[str, FileRecord] = {}
    try:
        error = _write_shards(plan, folder, names, files, reached)
        _agree(error)
        reached("shards written")
        everyone = _gather((files, _records(plan, names) if state.rank == 0 else {}))
        index = _index(state, everyone)
        _agree(_write_index(folder, index) if _is_first() else None)
    except BaseException:
        for name in files:
            (folder / name).unlink(missing_ok=True)
        raise
    reached("index written")
    if _is_first():
        remove_stale(folder, index.files)
    reached("done")
    return folder


def _prepare(engine: Any, folder: Path, shard_bytes: int) -> tuple[LiveState, _Plan]:
    """Make the plan and the folder; every rank raises if one of them fails or differs."""
    error: Exception | None = None
    claim = Claim({})
    try:
        if shard_bytes < 1:
            raise CheckpointError(f"shard_bytes must be positive, got {shard_bytes}")
        state = collect(engine)
        plan = _Plan(state, shard_bytes)
        folder.mkdir(parents=True, exist_ok=True)
        claim = Claim({"out_dir": str(folder), "plan of the save": plan.digest()}, scope=_scope(state))
    except OSError as caught:
        error = CheckpointError(f"{folder}: cannot be made: {caught}")
    except Exception as caught:
        error = caught
    if error is not None:
        claim = Claim({}, failure=f"{type(error).__name__}: {error}")
    agree(claim, error=error, kind=CheckpointError)
    return state, plan


def _scope(state: LiveState) -> str:
    return "world" if state.group is None else str(dist.get_process_group_ranks(state.group))


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _shared_save_id() -> str:
    names = [secrets.token_hex(6)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(names, src=0)
    return str(names[0])


def _write_shards(
    plan: _Plan,
    folder: Path,
    names: Sequence[str],
    files: dict[str, FileRecord],
    reached: Callable[[Stage], None],
) -> Exception | None:
    """Write this rank's files. Its failure is returned: the other ranks still need its fragments."""
    state = plan.state
    error: Exception | None = None
    current: ShardFile | None = None
    reached("shards")
    for pieces in plan.rounds():
        content = _exchange(plan, pieces)
        own = pieces[state.rank]
        if own is not None and error is None:
            name = names[own.shard]
            try:
                if own.start == 0:
                    current = ShardFile(folder / name, plan.shards[own.shard])
                assert current is not None and content is not None
                current.write(content)
                if own.stop == sum(tensor.numel for tensor in plan.shards[own.shard]):
                    files[name] = current.finish()
            except OSError as caught:
                error = CheckpointError(f"{folder / name}: {caught}")
                if current is not None:
                    current.discard()
        reached("piece")
    return error


def _first_shard(state: LiveState, count: int) -> int:
    """Return the number of this group's first file; groups that hold different parameters count on."""
    if not dist.is_initialized() or dist.get_world_size() == state.world_size:
        return 0
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, (_scope(state), count))
    per_group = dict(counts)
    earlier = [scope for scope in sorted(per_group) if scope < _scope(state)]
    return sum(per_group[scope] for scope in earlier)


def _exchange(plan: _Plan, pieces: Sequence[_Piece | None]) -> Tensor | None:
    """Send every rank its piece of this round; return this rank's own, on the CPU."""
    state = plan.state
    sent: list[list[_Run]] = [[] for _ in pieces]
    received: list[list[_Run]] = [[] for _ in pieces]
    local: list[_Run] = []
    traffic = False
    for writer, piece in enumerate(pieces):
        if piece is None:
            continue
        for run in plan.runs(writer, piece):
            traffic = traffic or run.source != writer
            if run.source == writer == state.rank:
                local.append(run)
            elif run.source == state.rank:
                sent[writer].append(run)
            elif writer == state.rank:
                received[run.source].append(run)
    own = pieces[state.rank]
    content = None if own is None else torch.empty(own.stop - own.start, dtype=torch.float32)
    if content is not None:
        for run in local:
            content.narrow(0, run.piece_offset, run.numel).copy_(_source(state, run))
    if traffic:
        out_splits = [sum(run.numel for run in runs) for runs in sent]
        in_splits = [sum(run.numel for run in runs) for runs in received]
        outgoing = torch.empty(sum(out_splits), dtype=torch.float32, device=state.device)
        offset = 0
        for run in (run for runs in sent for run in runs):
            outgoing.narrow(0, offset, run.numel).copy_(_source(state, run))
            offset += run.numel
        incoming = torch.empty(sum(in_splits), dtype=torch.float32, device=state.device)
        dist.all_to_all_single(incoming, outgoing, in_splits, out_splits, group=state.group)
        offset = 0
        for run in (run for runs in received for run in runs):
            assert content is not None
            content.narrow(0, run.piece_offset, run.numel).copy_(incoming.narrow(0, offset, run.numel))
            offset += run.numel
    return content


def _source(state: LiveState, run: _Run) -> Tensor:
    parameter: LiveParameter = state.parameters[run.parameter]
    return state.tensor(parameter.partition, run.key).narrow(0, run.partition_offset, run.numel)


def _records(plan: _Plan, names: Sequence[str]) -> dict[str, ParameterRecord]:
    """Return the record of every parameter of this rank's group."""
    state = plan.state
    where: dict[str, dict[str, str]] = {}
    for number, shard in enumerate(plan.shards):
        for tensor in shard:
            where.setdefault(tensor.parameter, {})[tensor.key] = names[number]
    return {
        parameter.route.name: ParameterRecord(
            shape=parameter.route.shape,
            algorithm="muon" if parameter.route.algorithm == "muon" else "adamw",
            heads=parameter.route.heads,
            step=state.step(parameter.partition),
            group=parameter.group,
            tensors=where[parameter.route.name],
        )
        for parameter in state.parameters
    }


_Share = tuple[dict[str, FileRecord], dict[str, ParameterRecord]]


def _gather(share: _Share) -> list[_Share]:
    """Collect what every rank wrote."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [share]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, share)
    return everyone


def _write_index(folder: Path, index: CheckpointIndex) -> Exception | None:
    try:
        write_aside(folder / INDEX_NAME, index.model_dump_json(indent=1).encode())
    except OSError as error:
        return CheckpointError(f"{folder / INDEX_NAME}: {error}")
    return None


def _agree(error: Exception | None) -> None:
    failure = None if error is None else f"{type(error).__name__}: {error}"
    agree(Claim({}, failure=failure), error=error, kind=CheckpointError)


def _index(state: LiveState, everyone: Sequence[_Share]) -> CheckpointIndex:
    files: dict[str, FileRecord] = {}
    parameters: dict[str, ParameterRecord] = {}
    for own_files, own_parameters in everyone:
        files.update(own_files)
        parameters.update(own_parameters)
    engine = state.engine
    return CheckpointIndex(
        format=FORMAT,
        version=1,
        versions=software_versions(),
        source={
            "writer": "engine",
            "zero_stage": int(engine.zero_optimization_stage()),
            "world_size": state.world_size,
        },
        optimizer=state.optimizer.config.model_dump(mode="json"),
        groups=hyperparameters(state.optimizer),
        progress=read_progress(engine),
        files=dict(sorted(files.items())),
        parameters=parameters,
    )
