"""Write one safetensors set: the state of a running engine, by all ranks in parallel, or DeepSpeed's saved files.

:mod:`deepspeed_muon.checkpoint.commit` says how the tensors get into the files, and how the new set replaces the one
before. A conversion of files takes the same steps as the ranks of an engine, as a single rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.checkpoint.commit import (
    DEFAULT_SHARD_BYTES,
    LOCK_NAME,
    FolderWriter,
    Piece,
    SavePlan,
    log_stage,
    write_shards,
)
from deepspeed_muon.checkpoint.deepspeed_files import DeepSpeedFiles
from deepspeed_muon.checkpoint.files import folder_of, make_folder, read_regular, refusing
from deepspeed_muon.checkpoint.index import FORMAT, OURS, CheckpointIndex, json_settings, software_versions
from deepspeed_muon.checkpoint.live import LiveState, collect, require_all_ranks
from deepspeed_muon.checkpoint.parameters import HeldParameter, Transfer, put_together
from deepspeed_muon.errors import CheckpointError, MuonError, RankMissingError
from deepspeed_muon.transport.agreement import RankFacts, Scope, agree, raise_on_all_ranks
from deepspeed_muon.transport.ranks import Ranks, all_ranks, is_first_rank, phase

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
    writer: FolderWriter | None = None
    with contextlib.ExitStack() as locked:
        with rank_lost(f"{out_dir}: what it held before is untouched"):
            with raise_on_all_ranks(CheckpointError) as agreed:
                folder = _checked_folder(out_dir, shard_bytes)
                state = collect(engine)
                state.host.require_restored()
                about = _about(state)
                make_folder(folder)
                if is_first_rank():
                    writer = locked.enter_context(contextlib.closing(FolderWriter(folder)))
                _add_facts(agreed, state, folder, shard_bytes)
            save_id = require_one_folder(folder, writer)
            # What every data-parallel group holds, from the first rank of each.
            own = [each.without_tensors() for each in state.parameters.values() if each.rank == 0]
            held = list(chain.from_iterable(all_ranks().gather(own, what="plan of a save").values()))
            plan = SavePlan(put_together(held), shard_bytes, save_id, all_ranks().size)
            _compare_copies(state, held)
        write_set(folder, plan, _Exchange(state, plan).fill, about, writer, all_ranks())
    return folder


def _checked_folder(out_dir: Any, shard_bytes: Any) -> Path:
    """Return the folder of a save; raise a CheckpointError if it is none, or files cannot have that size."""
    folder = folder_of("out_dir", out_dir)
    if not isinstance(shard_bytes, int) or isinstance(shard_bytes, bool) or shard_bytes < 1:
        raise CheckpointError(f"shard_bytes must be a positive number of bytes, got {shard_bytes!r}")
    return folder


def _add_facts(agreed: RankFacts, state: LiveState, folder: Path, shard_bytes: int) -> None:
    """Add what must be equal before a save: on all ranks, and between the ranks that hold the same parameters."""
    agreed.tell("out_dir", folder)
    agreed.tell("global_steps", state.host.counters()["global_steps"])
    agreed.tell("shard_bytes", shard_bytes)
    for held in state.groups:
        scope = Scope.among(held[0].holders, held[0].rank)
        place = "" if scope.size == all_ranks().size else f" of ranks {scope.name}"
        steps: dict[int, str] = {}
        for each in held:
            steps.setdefault(each.record.step, each.name)
        shown = ", ".join(f"{step} ({name}, ...)" for step, name in sorted(steps.items()))
        agreed.tell(f"optimizer steps{place}", shown, scope)
        told = repr([(each.own_name, each.part, each.placement, each.record) for each in held])
        agreed.tell(f"plan of the save{place}", hashlib.sha256(told.encode()).hexdigest(), scope)


def _compare_copies(state: LiveState, held: Sequence[HeldParameter]) -> None:
    """Raise on every rank if a parameter that several groups seem to hold alike differs: a shard without a mark.

    Must be called by all ranks. Of each such parameter the first elements are compared. Copies may drift apart in their
    last bits, where kernels add in another order; shards differ by as much as their elements do.
    """
    copies = Counter((each.name, each.part) for each in held)
    if max(copies.values()) == 1:
        return
    own = {}
    for each in state.parameters.values():
        begin = [fragment for fragment in each.local_fragments("fp32") if fragment.matrix_offset == 0]
        for fragment in begin if copies[each.name, each.part] > 1 else ():
            start = state.tensor(each.bound, "fp32").narrow(0, fragment.partition_offset, fragment.numel)
            own[each.name] = start[:_COMPARED].tolist()
    first: dict[str, tuple[int, list[float]]] = {}
    for rank, found in all_ranks().gather(own, what="comparison of copies").items():
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


def _about(state: LiveState) -> dict[str, Any]:
    """Return what the index says of the run."""
    return {
        "source": {
            "writer": "engine",
            "optimizer": OURS,
            "zero_stage": int(state.host.engine.zero_optimization_stage()),
            "world_size": all_ranks().size,
        },
        "optimizer": state.optimizer.config.model_dump(mode="json"),
        "groups": [json_settings(group) for group in state.optimizer.param_groups],
        "progress": state.host.progress(),
    }


class _Exchange:
    """Brings every rank its piece of a round with one all-to-all."""

    def __init__(self, state: LiveState, plan: SavePlan) -> None:
        self._state, self._plan = state, plan
        # All rounds share the buffers: to allocate them in each round would cost more than the copies.
        self._outgoing, self._incoming = (
            torch.empty(0, dtype=torch.float32, device=state.device) for _ in range(2)
        )

    def _elements(self, transfer: Transfer) -> Tensor:
        """Return the elements of a transfer that this rank sends."""
        own = self._state.parameters[transfer.held.name]
        start = own.offset(transfer.key, own.rank, transfer.start)
        return self._state.elements(own, transfer.key, start, transfer.numel)

    def fill(self, pieces: Sequence[Piece | None], content: Tensor) -> None:
        """Send every rank its piece of this round; this rank's own comes into ``content``, on the CPU."""
        rank = all_ranks().position
        moves = [
            (each, writer)
            for writer, piece in enumerate(pieces)
            if piece is not None
            for each in self._plan.transfers(piece, writer)
        ]
        for each, writer in moves:
            if each.source == writer == rank:
                each.put(self._elements(each), content)
        if all(each.source == writer for each, writer in moves):
            return
        # All ranks list the moves in the same order, so a sender and a receiver cut their buffers alike.
        sent = [(each, writer) for each, writer in moves if each.source == rank != writer]
        received = [each for each, writer in moves if each.source != rank == writer]
        received.sort(key=lambda each: each.source)
        out_splits, in_splits = [0] * len(pieces), [0] * len(pieces)
        for each, writer in sent:
            out_splits[writer] += each.numel
        for each in received:
            in_splits[each.source] += each.numel
        outgoing, incoming = self._outgoing.resize_(sum(out_splits)), self._incoming.resize_(sum(in_splits))
        places = outgoing.split([each.numel for each, _ in sent])
        for (each, _), place in zip(sent, places, strict=True):
            place.copy_(self._elements(each))
        with phase("exchange of a checkpoint's pieces", None):
            dist.all_to_all_single(incoming, outgoing, in_splits, out_splits)
        for each, place in zip(received, incoming.split([each.numel for each in received]), strict=True):
            each.put(place, content)


def require_one_folder(folder: Path, writer: FolderWriter | None) -> str:
    """Raise on every rank unless all of them see the same folder. Must be called by all ranks.

    Args:
        folder: As this rank calls it.
        writer: Of the folder, on the first rank.

    Returns:
        The id of the save.
    """
    own = "" if writer is None else writer.save_id
    save_id = str(next(iter(all_ranks().gather(own, what="naming of a save").values())))
    seen = b""
    with raise_on_all_ranks(CheckpointError):
        with contextlib.suppress(OSError, CheckpointError):
            seen = read_regular(folder / LOCK_NAME, 64)
        if seen != save_id.encode():
            raise CheckpointError(
                f"{os.path.abspath(folder)}: this rank does not see there what rank 0 wrote into {folder}. All ranks "
                f"must share the folder: name it by its absolute path on a file system that every machine mounts. "
                f"Nothing was written, what it held before is untouched"
            )
    return save_id


def write_set(
    folder: Path,
    plan: SavePlan,
    fill: Callable[[Sequence[Piece | None], Tensor], None],
    about: dict[str, Any],
    writer: FolderWriter | None,
    ranks: Ranks,
) -> CheckpointIndex | None:
    """Replace the set of a folder, in the order above. Must be called by all ``ranks``.

    Args:
        folder: Where the set is to be.
        plan: What to write.
        fill: See :func:`write_shards`.
        about: The entries of the index besides files and parameters.
        writer: Of the folder, on the first rank.
        ranks: The ranks that save.

    Returns:
        The index, on the first rank.

    Raises:
        CheckpointError: On every rank. The message says which set the folder holds.
    """
    untouched = f"{folder}: what it held before is untouched"
    # All that the other ranks know as soon as the first one may write the index.
    unknown = f"{folder}: it holds the new set or the one before, complete; 'checkpoint inspect' says which"
    index: CheckpointIndex | None = None
    failure: CheckpointError | None = None
    log_stage(folder, "start")
    with rank_lost(untouched):
        log_stage(folder, "shards")
        files, error = write_shards(plan, ranks.position, fill, folder)
    with rank_lost(unknown if writer is None else untouched):
        agree(error=error, kind=CheckpointError, ranks=ranks)
        log_stage(folder, "shards written")
        shares = ranks.gather(files, what="gathering of the index").values()
    if writer is not None:
        try:
            every = dict(sorted((name, share[name]) for share in shares for name in share))
            content = {**about, "files": every, "parameters": plan.records()}
            index = CheckpointIndex(format=FORMAT, versions=software_versions(), **content)
            writer.commit(index)
        except CheckpointError as caught:
            failure = caught
        except Exception as caught:
            text = f"the index cannot be made: {type(caught).__name__}: {caught}"
            failure = CheckpointError(f"{untouched}: {text}")
        unknown = str(
            failure or f"{folder}: the new set is complete and in place, but not every rank may know"
        )
    with rank_lost(unknown):
        agree(error=failure, kind=CheckpointError, ranks=ranks)
    log_stage(folder, "index written")
    return index


@contextlib.contextmanager
def rank_lost(left: str) -> Iterator[None]:
    """Name what is left of a save when a collective fails because a rank died or did not come."""
    try:
        yield
    except (MuonError, RuntimeError) as error:
        if isinstance(error, MuonError) and not isinstance(error, RankMissingError):
            raise
        raise CheckpointError(f"{left}. The ranks did not finish the save together: {error}") from error


def consolidate_files(
    folder: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    **reading: Any,
) -> CheckpointIndex:
    """Convert a checkpoint that DeepSpeed saved to one safetensors set, with some megabytes in memory at a time.

    Args:
        folder: A tag's folder, or the folder with ``latest``: ours, DeepSpeed's own Muon's, or AdamW's.
        out_dir: Where to write; made if needed.
        shard_bytes: Intended size of a file.
        **reading: ``trust``, ``include``, ``exclude`` of :class:`DeepSpeedFiles`.

    Returns:
        The index that was written.

    Raises:
        CheckpointError: Naming the file and the parameter. A set that ``out_dir`` held before is untouched then, unless
            the message says that the new one is in place.
    """
    out = _checked_folder(out_dir, shard_bytes)
    saved = DeepSpeedFiles(folder, **reading)
    make_folder(out)

    def fill(pieces: Sequence[Piece | None], content: Tensor) -> None:
        with refusing(str(saved.folder)):
            for piece in filter(None, pieces):
                saved.copy(plan.transfers(piece), content)

    with contextlib.closing(FolderWriter(out)) as writer:
        plan = SavePlan(saved.parts, shard_bytes, writer.save_id)
        index = write_set(out, plan, fill, saved.about, writer, Ranks())
    assert index is not None
    return index
