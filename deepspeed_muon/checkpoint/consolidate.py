"""Write one safetensors set from a running engine, by all ranks in parallel.

Tensors are packed into files and files are given to ranks. The files are written in rounds: in each, every rank
receives one piece of the file that it writes, through one all-to-all, and appends it. So memory is bounded by the
pieces, not by the model or its largest tensor. How the new set takes the place of the one before is told in
:mod:`deepspeed_muon.checkpoint.commit`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.checkpoint.commit import FolderWriter, UnsettledError, make_folder
from deepspeed_muon.checkpoint.host import require_all_ranks
from deepspeed_muon.checkpoint.index import (
    CheckpointIndex,
    FileRecord,
    ParameterRecord,
)
from deepspeed_muon.checkpoint.live import (
    LiveParameter,
    LiveState,
    collect,
    hyperparameters,
)
from deepspeed_muon.checkpoint.plan import Piece, Run, SavePlan
from deepspeed_muon.checkpoint.settings import read_progress
from deepspeed_muon.checkpoint.shards import (
    DEFAULT_SHARD_BYTES,
    ShardFile,
    fsync_folder,
    remove_shards,
    shard_name,
)
from deepspeed_muon.errors import CheckpointError, MuonError, RankMissingError
from deepspeed_muon.plan.rows import ROW_STATE_KEY
from deepspeed_muon.transport.agreement import RankFacts, agree, group_rank_scope
from deepspeed_muon.transport.members import everyone
from deepspeed_muon.transport.waiting import phase

__all__ = ["Stage", "consolidate"]

Stage = Literal["start", "shards", "piece", "shards written", "index written", "done"]
"""Points of a save at which ``on_stage`` is called, in this order; ``piece`` once a round."""


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
    shape. A checkpoint that ``out_dir`` held before stays valid until the new one is complete, and is removed then:
    whatever fails or dies, the folder holds one of the two. Frozen parameters and buffers are not part of it.

    Args:
        engine: A ``DeepSpeedEngine`` with our optimizer.
        out_dir: The folder; made if needed.
        shard_bytes: Intended size of a file. Bounds the memory too.
        on_stage: Called on this rank at every point of the save, for tests.

    Returns:
        The folder.

    Raises:
        CheckpointError: On every rank, when one of them could not write or died, when ranks disagree on the steps that
            were taken, or when another save is writing into ``out_dir``. The message says which set the folder holds.
    """
    require_all_ranks(engine)
    folder = Path(out_dir)
    with _rank_lost(f"{folder}: what it held before is untouched"):
        state, plan, writer = _prepare(engine, folder, shard_bytes)
    try:
        _save(state, plan, folder, writer, on_stage or (lambda stage: None))
    finally:
        if writer is not None:
            writer.close()
    return folder


def _save(
    state: LiveState,
    plan: SavePlan,
    folder: Path,
    writer: FolderWriter | None,
    reached: Callable[[Stage], None],
) -> None:
    """Write shards and index in the order of :mod:`deepspeed_muon.checkpoint.commit`."""
    reached("start")
    files: dict[str, FileRecord] = {}
    untouched = f"{folder}: what it held before is untouched"
    with _rank_lost(untouched):
        save_id = _shared_save_id()
        first = _first_shard(state, len(plan.shards))
        names = [shard_name(save_id, first + number) for number in range(len(plan.shards))]
        try:
            error = _write_shards(plan, folder, names, files, reached)
        except BaseException:
            remove_shards(folder, files)
            raise
    if error is not None:
        remove_shards(folder, files)
    # From here on the others may hear that this rank's shards are there, and the first one may write the index.
    with _rank_lost(_UNKNOWN.format(folder=folder) if writer is None else untouched, UnsettledError):
        try:
            _agree(error)
        except CheckpointError:
            # Every rank hears that one of them has no shards: nobody writes the index.
            remove_shards(folder, files)
            raise
        reached("shards written")
        own = (files, _records(plan, names) if state.rank == 0 else {})
        shares = list(everyone().gather(own, what="gathering of the index").values())
    try:
        index = None
        failure: CheckpointError | None = None
        if writer is not None:
            index, failure = _commit(writer, state, shares, save_id)
        _announce(folder, failure)
    except UnsettledError:
        raise
    except CheckpointError:
        remove_shards(folder, files)
        raise
    reached("index written")
    if writer is not None and index is not None:
        writer.clear(index)
    reached("done")


def _commit(
    writer: FolderWriter, state: LiveState, shares: Sequence[_Share], save_id: str
) -> tuple[CheckpointIndex | None, CheckpointError | None]:
    """Write the index. Its failure is returned: the other ranks wait to hear of it."""
    try:
        index = _index(state, shares)
        writer.commit(index, save_id)
    except CheckpointError as error:
        return None, error
    except Exception as error:
        return None, CheckpointError(f"the index cannot be made: {type(error).__name__}: {error}")
    return index, None


def _announce(folder: Path, failure: CheckpointError | None) -> None:
    """Tell every rank what became of the index; all raise if it was not written, or may not last."""
    said = [(failure is not None, isinstance(failure, UnsettledError), str(failure))]
    first = _is_first()
    if dist.is_initialized() and dist.get_world_size() > 1:
        committed = "the new set is complete and in place, but not every rank may know"
        left = f"{folder}: {committed}" if first and failure is None else _UNKNOWN.format(folder=folder)
        try:
            with _rank_lost(left, UnsettledError):
                dist.broadcast_object_list(said, src=0)
        except UnsettledError:
            if failure is None:
                raise
    if failure is not None:
        raise failure
    failed, unsettled, text = said[0]
    if failed:
        raise (UnsettledError if unsettled else CheckpointError)(f"rank 0: {text}")


_UNKNOWN = "{folder}: it holds the new set or the one before, complete; 'checkpoint inspect' says which"


@contextlib.contextmanager
def _rank_lost(left: str, kind: type[CheckpointError] = CheckpointError) -> Iterator[None]:
    """Name what is left of a save when a collective fails because a rank died or did not come."""
    try:
        yield
    except (MuonError, RuntimeError) as error:
        if isinstance(error, MuonError) and not isinstance(error, RankMissingError):
            raise
        raise kind(f"{left}. The ranks did not finish the save together: {error}") from error


def _prepare(engine: Any, folder: Path, shard_bytes: int) -> tuple[LiveState, SavePlan, FolderWriter | None]:
    """Make the plan and the folder, locked by the first rank; every rank raises if one of them fails or differs."""
    error: Exception | None = None
    claim = RankFacts({})
    writer: FolderWriter | None = None
    try:
        if shard_bytes < 1:
            raise CheckpointError(f"shard_bytes must be positive, got {shard_bytes}")
        state = collect(engine)
        plan = SavePlan(state, shard_bytes)
        make_folder(folder)
        if _is_first():
            writer = FolderWriter(folder)
        facts = {
            "out_dir": str(folder),
            "global_steps": str(state.host.counters()["global_steps"]),
            "optimizer steps": _described_steps(state),
            "plan of the save": plan.digest(),
        }
        claim = RankFacts(facts, scope=group_rank_scope(state.group))
    except OSError as caught:
        error = CheckpointError(f"{folder}: cannot be made: {caught}")
    except Exception as caught:
        error = caught
    if error is not None:
        claim = RankFacts({}, failure=f"{type(error).__name__}: {error}")
    try:
        agree(claim, error=error, kind=CheckpointError)
    except BaseException:
        if writer is not None:
            writer.close()
        raise
    return state, plan, writer


def _described_steps(state: LiveState) -> str:
    """Return every number of steps that was taken, with the first parameter that took it."""
    first: dict[int, str] = {}
    for parameter in state.parameters:
        first.setdefault(state.step(parameter.partition), parameter.route.name)
    return ", ".join(f"{step} ({name}, ...)" for step, name in sorted(first.items()))


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _shared_save_id() -> str:
    names = [secrets.token_hex(6)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(names, src=0)
    return str(names[0])


def _write_shards(
    plan: SavePlan,
    folder: Path,
    names: Sequence[str],
    files: dict[str, FileRecord],
    reached: Callable[[Stage], None],
) -> Exception | None:
    """Write this rank's files. Its failure is returned: the other ranks still need its fragments."""
    state = plan.state
    buffers = _Buffers(plan.piece_numel, state.device)
    reached("shards")
    with _Writer(plan, folder, names, files) as writer:
        for number, pieces in enumerate(plan.rounds()):
            own = pieces[state.rank]
            content = buffers.content[number % 2]
            writer.wait_for(number - 2)
            _exchange(plan, pieces, content, buffers)
            writer.append(own, content)
            reached("piece")
    if writer.error is None and files:
        try:
            fsync_folder(folder)
        except OSError as error:
            return CheckpointError(f"{folder}: {error}")
    return writer.error


class _Buffers:
    """Memory that all rounds share: the pages of fresh memory cost more than what is copied into them."""

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
        self._thread.shutdown()
        for future in self._pending:
            future.result()
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


def _first_shard(state: LiveState, count: int) -> int:
    """Return the number of this group's first file; groups that hold different parameters count on."""
    if not dist.is_initialized() or dist.get_world_size() == state.world_size:
        return 0
    own = group_rank_scope(state.group)
    per_group = dict(everyone().gather((own, count), what="numbering of shards").values())
    return sum(number for scope, number in per_group.items() if scope < own)


def _exchange(plan: SavePlan, pieces: Sequence[Piece | None], content: Tensor, buffers: _Buffers) -> None:
    """Send every rank its piece of this round; this rank's own comes into ``content``, on the CPU."""
    state = plan.state
    sent: list[list[Run]] = [[] for _ in pieces]
    received: list[list[Run]] = [[] for _ in pieces]
    local: list[Run] = []
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
    for run in local:
        content.narrow(0, run.piece_offset, run.numel).copy_(_source(state, run))
    if traffic:
        out_splits = [sum(run.numel for run in runs) for runs in sent]
        in_splits = [sum(run.numel for run in runs) for runs in received]
        outgoing = buffers.get("outgoing", sum(out_splits))
        offset = 0
        for run in (run for runs in sent for run in runs):
            outgoing.narrow(0, offset, run.numel).copy_(_source(state, run))
            offset += run.numel
        incoming = buffers.get("incoming", sum(in_splits))
        with phase("exchange of a checkpoint's pieces", state.group):
            dist.all_to_all_single(incoming, outgoing, in_splits, out_splits, group=state.group)
        offset = 0
        for run in (run for runs in received for run in runs):
            content.narrow(0, run.piece_offset, run.numel).copy_(incoming.narrow(0, offset, run.numel))
            offset += run.numel


def _source(state: LiveState, run: Run) -> Tensor:
    parameter: LiveParameter = state.parameters[run.parameter]
    return state.tensor(parameter.partition, run.key).narrow(0, run.partition_offset, run.numel)


def _records(plan: SavePlan, names: Sequence[str]) -> dict[str, ParameterRecord]:
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
            grid=parameter.route.grid,
            transposed=parameter.route.transposed,
            rows=parameter.row_count if ROW_STATE_KEY in state.keys(parameter) else 0,
            step=state.step(parameter.partition),
            group=parameter.group,
            tensors=where[parameter.route.name],
        )
        for parameter in state.parameters
    }


_Share = tuple[dict[str, FileRecord], dict[str, ParameterRecord]]


def _agree(error: Exception | None) -> None:
    failure = None if error is None else f"{type(error).__name__}: {error}"
    agree(RankFacts({}, failure=failure), error=error, kind=CheckpointError)


def _index(state: LiveState, shares: Sequence[_Share]) -> CheckpointIndex:
    files: dict[str, FileRecord] = {}
    parameters: dict[str, ParameterRecord] = {}
    for own_files, own_parameters in shares:
        files.update(own_files)
        parameters.update(own_parameters)
    return CheckpointIndex.made_now(
        source={
            "writer": "engine",
            "zero_stage": state.host.zero_stage,
            "world_size": state.world_size,
        },
        optimizer=state.optimizer.config.model_dump(mode="json"),
        groups=hyperparameters(state.optimizer),
        progress=read_progress(state.host),
        files=dict(sorted(files.items())),
        parameters=parameters,
    )
