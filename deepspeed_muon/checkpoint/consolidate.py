"""Write the state of a running engine as one safetensors set, by all ranks in parallel.

:mod:`deepspeed_muon.checkpoint.plan` says how the tensors get into the files, and
:mod:`deepspeed_muon.checkpoint.commit` how the new set replaces the one before.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deepspeed_muon.checkpoint.commit import FolderWriter, UnsettledError, make_folder, removed_on_failure
from deepspeed_muon.checkpoint.host import require_all_ranks
from deepspeed_muon.checkpoint.index import CheckpointIndex, FileRecord, ParameterRecord, described
from deepspeed_muon.checkpoint.live import LiveState, collect
from deepspeed_muon.checkpoint.plan import SavePlan, log_stage, write_shards
from deepspeed_muon.checkpoint.sealed import json_settings, refusing
from deepspeed_muon.checkpoint.settings import read_progress
from deepspeed_muon.checkpoint.shards import DEFAULT_SHARD_BYTES, files_of, remove_shards, shard_name
from deepspeed_muon.errors import CheckpointError, MuonError, RankMissingError
from deepspeed_muon.plan.rows import ROW_STATE_KEY
from deepspeed_muon.transport.agreement import RankFacts, Scope, agree
from deepspeed_muon.transport.members import everyone, is_first_rank

__all__ = ["consolidate"]


def consolidate(
    engine: Any,
    out_dir: str | os.PathLike[str],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
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
        _save(state, plan, folder, writer)
    finally:
        if writer is not None:
            writer.close()
    return folder


def _save(state: LiveState, plan: SavePlan, folder: Path, writer: FolderWriter | None) -> None:
    """Write shards and index in the order of :mod:`deepspeed_muon.checkpoint.commit`."""
    log_stage(folder, "start")
    files: dict[str, FileRecord] = {}
    untouched = f"{folder}: what it held before is untouched"
    with _rank_lost(untouched):
        save_id = str(next(iter(everyone().gather(secrets.token_hex(6), what="naming of a save").values())))
        first = _first_shard(state, len(plan.shards))
        names = [shard_name(save_id, first + number) for number in range(len(plan.shards))]
        with removed_on_failure(folder, files, BaseException):
            error = write_shards(plan, folder, names, files)
    if error is not None:
        remove_shards(folder, files)
    # From here on the other ranks may know that this rank's shards are there, and rank 0 may write the index.
    with _rank_lost(_UNKNOWN.format(folder=folder) if writer is None else untouched, UnsettledError):
        # If one rank has no shards, every rank raises this error: nobody writes the index.
        with removed_on_failure(folder, files):
            agree(RankFacts({}), error=error, kind=CheckpointError)
        log_stage(folder, "shards written")
        own = (files, _records(plan, names) if state.rank == 0 else {})
        shares = list(everyone().gather(own, what="gathering of the index").values())
    with removed_on_failure(folder, files):
        index, failure = (None, None) if writer is None else _commit(writer, state, shares, save_id)
        _announce(folder, failure)
    log_stage(folder, "index written")
    if writer is not None and index is not None:
        writer.clear(index)
    log_stage(folder, "done")


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
    if dist.is_initialized() and dist.get_world_size() > 1:
        committed = "the new set is complete and in place, but not every rank may know"
        knows = is_first_rank() and failure is None
        left = f"{folder}: {committed}" if knows else _UNKNOWN.format(folder=folder)
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
    facts = RankFacts({})
    writer: FolderWriter | None = None
    try:
        if shard_bytes < 1:
            raise CheckpointError(f"shard_bytes must be positive, got {shard_bytes}")
        state = collect(engine)
        plan = SavePlan(state, shard_bytes)
        with refusing(f"{folder}: cannot be made"):
            make_folder(folder)
        if is_first_rank():
            writer = FolderWriter(folder)
        compared = {
            "out_dir": str(folder),
            "global_steps": str(state.host.counters()["global_steps"]),
            "optimizer steps": _described_steps(state),
            "plan of the save": plan.digest(),
        }
        facts = RankFacts(compared, scope=Scope.of(state.group))
    except Exception as caught:
        error = caught
    try:
        agree(facts, error=error, kind=CheckpointError)
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


def _first_shard(state: LiveState, count: int) -> int:
    """Return the number of this group's first file; groups that hold different parameters count on."""
    if not dist.is_initialized() or dist.get_world_size() == state.world_size:
        return 0
    own = Scope.of(state.group).name
    per_group = dict(everyone().gather((own, count), what="numbering of shards").values())
    return sum(number for scope, number in per_group.items() if scope < own)


def _records(plan: SavePlan, names: Sequence[str]) -> dict[str, ParameterRecord]:
    """Return the record of every parameter of this rank's group."""
    state, where = plan.state, files_of(plan.shards, names)
    return {
        parameter.route.name: ParameterRecord(
            **described(parameter.route),
            rows=parameter.row_count if ROW_STATE_KEY in state.keys(parameter) else 0,
            step=state.step(parameter.partition),
            group=parameter.group,
            tensors=where[parameter.route.name],
        )
        for parameter in state.parameters
    }


_Share = tuple[dict[str, FileRecord], dict[str, ParameterRecord]]


def _index(state: LiveState, shares: Sequence[_Share]) -> CheckpointIndex:
    files = {name: record for own, _ in shares for name, record in own.items()}
    parameters = {name: record for _, own in shares for name, record in own.items()}
    return CheckpointIndex.made_now(
        source={"writer": "engine", "zero_stage": state.host.zero_stage, "world_size": state.world_size},
        optimizer=state.optimizer.config.model_dump(mode="json"),
        groups=[json_settings(group) for group in state.optimizer.param_groups],
        progress=read_progress(state.host),
        files=dict(sorted(files.items())),
        parameters=parameters,
    )
