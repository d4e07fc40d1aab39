"""Write the state of a running engine as one safetensors set, by all ranks in parallel.

:mod:`deepspeed_muon.checkpoint.plan` says how the tensors get into the files, and
:mod:`deepspeed_muon.checkpoint.commit` how the new set replaces the one before.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deepspeed_muon.checkpoint.commit import (
    FolderWriter,
    UnsettledError,
    make_folder,
    removed_on_failure,
    require_one_folder,
)
from deepspeed_muon.checkpoint.host import require_all_ranks
from deepspeed_muon.checkpoint.index import OURS, CheckpointIndex, FileRecord, ParameterRecord, described
from deepspeed_muon.checkpoint.live import HeldParameter, LiveState, collect
from deepspeed_muon.checkpoint.plan import SavePlan, log_stage, write_shards
from deepspeed_muon.checkpoint.sealed import folder_of, json_settings, refusing
from deepspeed_muon.checkpoint.settings import read_progress
from deepspeed_muon.checkpoint.shards import (
    DEFAULT_SHARD_BYTES,
    check_shard_bytes,
    files_of,
    remove_shards,
    shard_name,
)
from deepspeed_muon.errors import CheckpointError, MuonError, RankMissingError
from deepspeed_muon.plan.rows import ROW_STATE_KEY
from deepspeed_muon.transport.agreement import RankFacts, Scope, agree
from deepspeed_muon.transport.members import everyone, is_first_rank

__all__ = ["consolidate"]

# How many of the first elements of copies are compared, and how far apart they may be, relative to the largest.
_COMPARED = 64
_DRIFT = 1e-2


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
    with _rank_lost(f"{out_dir}: what it held before is untouched"):
        folder, plan, writer, save_id = _prepare(engine, out_dir, shard_bytes)
    try:
        _save(plan, folder, writer, save_id)
    finally:
        if writer is not None:
            writer.close()
    return folder


def _save(plan: SavePlan, folder: Path, writer: FolderWriter | None, save_id: str) -> None:
    """Write shards and index in the order of :mod:`deepspeed_muon.checkpoint.commit`."""
    log_stage(folder, "start")
    files: dict[str, FileRecord] = {}
    untouched = f"{folder}: what it held before is untouched"
    with _rank_lost(untouched):
        names = [shard_name(save_id, number) for number in range(len(plan.shards))]
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
        shares = everyone().gather(files, what="gathering of the index").values()
        every = {name: record for share in shares for name, record in share.items()}
    with removed_on_failure(folder, files):
        index, failure = (None, None) if writer is None else _commit(writer, plan, names, every)
        _announce(folder, failure)
    log_stage(folder, "index written")
    if writer is not None and index is not None:
        writer.clear(index)
    log_stage(folder, "done")


def _commit(
    writer: FolderWriter,
    plan: SavePlan,
    names: Sequence[str],
    files: dict[str, FileRecord],
) -> tuple[CheckpointIndex | None, CheckpointError | None]:
    """Write the index. Its failure is returned: the other ranks wait to hear of it."""
    try:
        index = _index(plan, names, files)
        writer.commit(index)
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


def _prepare(engine: Any, out_dir: Any, shard_bytes: Any) -> tuple[Path, SavePlan, FolderWriter | None, str]:
    """Make the plan and the folder, locked by the first rank; every rank raises if one of them fails or differs.

    Returns:
        The folder, the plan, the writer on the first rank, and the id of the save.
    """
    error: Exception | None = None
    facts = RankFacts({})
    writer: FolderWriter | None = None
    try:
        folder = folder_of("out_dir", out_dir)
        check_shard_bytes(shard_bytes)
        state = collect(engine)
        state.host.require_restored()
        with refusing(f"{folder}: cannot be made"):
            make_folder(folder)
        if is_first_rank():
            writer = FolderWriter(folder)
        facts = _facts(state, folder, shard_bytes)
    except Exception as caught:
        error = caught
    try:
        agree(facts, error=error, kind=CheckpointError)
        save_id = require_one_folder(folder, writer)
        held = _held_anywhere(state)
        plan = SavePlan(state, held, shard_bytes)
        _compare_copies(state, held)
    except BaseException:
        if writer is not None:
            writer.close()
        raise
    return folder, plan, writer, save_id


def _facts(state: LiveState, folder: Path, shard_bytes: int) -> RankFacts:
    """Return what must be equal before a save: on all ranks, and between the ranks that hold the same parameters."""
    facts = {
        "out_dir": str(folder),
        "global_steps": str(state.host.counters()["global_steps"]),
        "shard_bytes": str(shard_bytes),
    }
    scopes: dict[str, Scope] = {}
    for held in state.groups:
        scope = Scope.among(held[0].ranks, held[0].rank)
        place = "" if scope.size == state.world_size else f" of ranks {scope.name}"
        steps: dict[int, str] = {}
        for each in held:
            steps.setdefault(each.step, each.name)
        shown = ", ".join(f"{step} ({name}, ...)" for step, name in sorted(steps.items()))
        facts[f"optimizer steps{place}"] = shown
        told = repr([(each.route, each.part, each.spread, each.group, each.step, each.keys) for each in held])
        facts[f"plan of the save{place}"] = hashlib.sha256(told.encode()).hexdigest()
        scopes |= {f"{fact}{place}": scope for fact in ("optimizer steps", "plan of the save")}
    return RankFacts(facts, scopes=scopes)


def _held_anywhere(state: LiveState) -> list[HeldParameter]:
    """Return what every data-parallel group holds, from the first rank of each. Must be called by all ranks."""
    own = [each.told() for each in state.parameters if each.rank == 0]
    told = everyone().gather(own, what="plan of a save")
    return [each for held in told.values() for each in held]


def _compare_copies(state: LiveState, held: Sequence[HeldParameter]) -> None:
    """Raise on every rank if a parameter that several groups seem to hold alike differs: a shard without a mark.

    Must be called by all ranks. Of each such parameter the first elements are compared. Copies may drift apart in their
    last bits, where kernels add in another order; shards differ by as much as their elements do.
    """
    copies = Counter((each.name, each.part) for each in held)
    if max(copies.values()) == 1:
        return
    own = {}
    for each in state.parameters:
        fragment = each.own_fragment("fp32")
        if copies[each.name, each.part] > 1 and fragment is not None and fragment.matrix_offset == 0:
            start = state.tensor(each.partition, "fp32").narrow(0, fragment.partition_offset, fragment.numel)
            own[each.name] = start[:_COMPARED].tolist()
    first: dict[str, tuple[int, list[float]]] = {}
    for rank, found in everyone().gather(own, what="comparison of copies").items():
        for name, values in found.items():
            other, expected = first.setdefault(name, (rank, values))
            pairs = list(zip(expected, values, strict=False))
            limit = _DRIFT * max(abs(value) for pair in pairs for value in pair)
            if any(abs(mine - theirs) > limit for mine, theirs in pairs):
                raise CheckpointError(
                    f"parameter {name}: ranks {other} and {rank} hold different values, and nothing says that they "
                    f"hold different parts of it. Mark it (tensor_model_parallel, partition_dim) before "
                    f"deepspeed.initialize; engine.save_checkpoint saves it as it is"
                )


def _index(plan: SavePlan, names: Sequence[str], files: dict[str, FileRecord]) -> CheckpointIndex:
    state, where = plan.state, files_of(plan.shards, names)
    parameters = {}
    for name, (first, *_) in plan.parts.items():
        rows = first.part_of(ROW_STATE_KEY).length if ROW_STATE_KEY in first.keys else 0
        parameters[name] = ParameterRecord(
            **described(first.whole), rows=rows, step=first.step, group=first.group, tensors=where[name]
        )
    return CheckpointIndex.made_now(
        source={
            "writer": "engine",
            "optimizer": OURS,
            "zero_stage": state.host.zero_stage,
            "world_size": state.world_size,
        },
        optimizer=state.optimizer.config.model_dump(mode="json"),
        groups=[json_settings(group) for group in state.optimizer.param_groups],
        progress=read_progress(state.host),
        files=dict(sorted(files.items())),
        parameters=parameters,
    )
