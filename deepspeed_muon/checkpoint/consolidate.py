"""Write one safetensors set with the full optimizer state, from a running engine, by all ranks in parallel.

A set is a folder with safetensors files and an index, ``muon_index.json``. Each file ("shard") holds full tensors,
however the ranks have partitioned them. The ranks write in rounds: in each round every rank receives, in one
all-to-all, the next few megabytes of the file that it writes (a :class:`Piece`) and appends them. So pieces bound the
memory, whatever the size of the model.

The new set replaces the one before atomically. The first rank locks the folder and makes an empty file with the random
id of the save in its name; all ranks look for it, because shards of a rank with another folder would be lost. Then each
step is on the disk before the next one begins:

1. Every rank writes its shards under temporary names, syncs and renames them, and syncs the folder.
2. All ranks agree that their shards are there.
3. The first rank writes the index into the file with the id, syncs it, checks that every shard is there with its size,
   and renames it over the old index. This rename is the commit.
4. It syncs the folder.
5. It removes the shards that the new index does not name.

If anything fails before the rename, the first rank removes the files of this save. If it dies, or if it is unknown
whether the rename happened, all files are left, and the next save removes those that its index does not name.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import re
import secrets
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.checkpoint.files import (
    UNTOUCHED,
    exclusive,
    folder_of,
    fsync_folder,
    make_folder,
    refusing,
    regular_size,
    replace,
    temporary_path,
)
from deepspeed_muon.checkpoint.index import (
    CONSOLIDATED_FOLDER,
    FORMAT,
    INDEX_NAME,
    ITEM_BYTES,
    OURS,
    SHARD_PATTERN,
    CheckpointIndex,
    FileLayout,
    FileRecord,
    Shapes,
    json_settings,
    load_index,
    software_versions,
    tensor_name,
)
from deepspeed_muon.checkpoint.parameters import (
    LiveState,
    PartitionedParameter,
    TensorSlice,
    Transfer,
    collect,
    require_checkpointable,
    require_fp32,
    slices_by_name,
    transfers,
)
from deepspeed_muon.config.settings import refuse_unusable
from deepspeed_muon.errors import CheckpointError, MuonError, RankMissingError
from deepspeed_muon.logs import logger
from deepspeed_muon.transport.agreement import RankFacts, Scope, agree, raise_on_all_ranks
from deepspeed_muon.transport.all_to_all import exchange_tensors
from deepspeed_muon.transport.ranks import Ranks, all_ranks

DEFAULT_SHARD_BYTES = 2 << 30
# The largest piece that a rank receives in a round; it bounds the buffers.
_PIECE_BYTES = 4 << 20

LOCK_NAME = ".muon_save.lock"
# Weights of another kind, and the state of Hugging Face's Trainer.
_OTHER_CHECKPOINTS = re.compile(r".*\.(safetensors|gguf)|pytorch_model.*\.bin|trainer_state\.json")
# Shards, and the temporary shards and indexes that killed saves leave behind.
_FILES_OF_SAVES = re.compile(
    rf"{SHARD_PATTERN.pattern}|\.({SHARD_PATTERN.pattern}|{re.escape(INDEX_NAME)})\.[0-9a-f]{{12}}\.tmp"
)

# The first elements of a parameter's replicas are compared; they may differ by this fraction of the largest.
_COMPARED_NUMEL = 64
_REPLICA_TOLERANCE = 1e-2
# What the folder holds if it is unknown whether the index was renamed.
_ONE_OF_TWO = "it holds the new set or the one before, complete; 'checkpoint inspect' says which"


def consolidate(
    engine: Any,
    out_dir: str | os.PathLike[str],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Path:
    """Write the full optimizer state of ``engine`` as one safetensors set with a JSON index.

    Must be called by all ranks, between steps, with the same arguments; ``out_dir`` must be on a file system that they
    share. The set holds the fp32 master and the momentum, or both Adam moments, of every trained parameter, in the
    parameter's full shape; frozen parameters and buffers are not part of it. A set that ``out_dir`` held before stays
    valid until the new one is complete, and is then removed: whatever fails or dies, the folder holds one of the two.

    Args:
        engine: A ``DeepSpeedEngine`` with our optimizer. Not changed.
        out_dir: The folder; made if needed.
        shard_bytes: Size of a file, in bytes; a larger tensor has a file of its own. It also bounds the memory.

    Returns:
        The folder.

    Raises:
        CheckpointError: On every rank, if one of them cannot write or died, if the ranks disagree on the number of
            steps taken, or if another save is writing into ``out_dir``. The message says which set the folder holds.
    """
    require_checkpointable(engine)
    ranks = all_ranks()
    writer: FolderWriter | None = None
    with contextlib.ExitStack() as stack:
        with save_failure(f"{out_dir}: {UNTOUCHED}"):
            # 1. Check the arguments, describe the state, lock the folder. All ranks raise if one does, or differs.
            with raise_on_all_ranks(CheckpointError) as facts:
                folder = checked_folder(out_dir, shard_bytes)
                state = collect(engine)
                state.bound_engine.require_restored()
                require_fp32(state)
                index_fields = _index_fields(state)
                make_folder(folder)
                if ranks.position == 0:
                    writer = stack.enter_context(folder_writer(folder))
                _add_facts(facts, state, folder, shard_bytes)
            # 2. Plan from metadata: the first rank of each data-parallel group describes the group's parameters.
            described = [p.metadata() for p in state.parameters.values() if p.group_rank == 0]
            gathered = ranks.all_gather((writer and writer.save_id, described), purpose="plan of a save")
            save_ids, of_groups = zip(*gathered.values(), strict=True)
            save_id, parameters = str(save_ids[0]), list(chain(*of_groups))
            with raise_on_all_ranks(CheckpointError):
                _require_shared(folder, save_id)
                plan = SavePlan(slices_by_name(parameters), shard_bytes, save_id, ranks.size)
            _compare_replicas(state, parameters)
        # 3. Write the shards and replace the index.
        fill = functools.partial(_exchange_pieces, state, plan)
        write_set(folder, plan, fill, index_fields, writer, ranks)
    return folder


def checked_folder(out_dir: object, shard_bytes: object) -> Path:
    """Return the folder to write to; raise a CheckpointError if one of the arguments cannot be used."""
    folder = folder_of("out_dir", out_dir)
    if not isinstance(shard_bytes, int) or isinstance(shard_bytes, bool) or shard_bytes < 1:
        raise CheckpointError(f"shard_bytes must be a positive number of bytes, got {shard_bytes!r}")
    return folder


def _add_facts(facts: RankFacts, state: LiveState, folder: Path, shard_bytes: int) -> None:
    """Add what must be equal before a save: on all ranks, and within each data-parallel group."""
    facts.record("out_dir", folder)
    facts.record("global_steps", state.bound_engine.counters()["global_steps"])
    facts.record("shard_bytes", shard_bytes)
    for parameters in state.groups:
        scope = Scope.among(parameters[0].members, parameters[0].group_rank)
        suffix = "" if scope.size == all_ranks().size else f" of ranks {scope.name}"
        name_by_step: dict[int, str] = {}
        for parameter in parameters:
            name_by_step.setdefault(parameter.record.step, parameter.name)
        steps = ", ".join(f"{step} ({name}, ...)" for step, name in sorted(name_by_step.items()))
        facts.record(f"optimizer steps{suffix}", steps, scope)
        plan = repr([(p.local_name, p.tensor_slice, p.placement, p.record) for p in parameters])
        facts.record(f"plan of the save{suffix}", hashlib.sha256(plan.encode()).hexdigest(), scope)


def _require_shared(folder: Path, save_id: str) -> None:
    """Raise unless this rank sees what the first one made in the folder; a path may lead elsewhere on each machine."""
    if not os.path.lexists(_id_file(folder, save_id)):
        raise CheckpointError(
            f"{os.path.abspath(folder)}: this rank does not see what rank 0 wrote into {folder}. All ranks must share "
            f"the folder: name it by its absolute path on a file system that every machine mounts. Nothing was "
            f"written, {UNTOUCHED}"
        )


def _compare_replicas(state: LiveState, parameters: Sequence[PartitionedParameter]) -> None:
    """Raise on every rank if groups that claim the same slice of a parameter have different values.

    Must be called by all ranks. A tensor-parallel shard that nothing marks as one looks like a replica. Replicas may
    drift apart in their last bits, where kernels add in another order; shards differ as much as any two matrices.

    Args:
        state: This rank's state.
        parameters: The parameters of all data-parallel groups.
    """
    replicas = Counter((p.name, p.tensor_slice) for p in parameters)
    # All ranks count the same metadata, so all of them return or none does.
    if max(replicas.values()) == 1:
        return
    # Of each replica the rank whose fragment begins the slice reports the first elements.
    local_values: dict[tuple[str, TensorSlice], list[float]] = {}
    for parameter in state.parameters.values():
        is_replica = replicas[parameter.name, parameter.tensor_slice] > 1
        for fragment in parameter.local_fragments("fp32") if is_replica else ():
            if fragment.matrix_offset == 0:
                numel = min(fragment.numel, _COMPARED_NUMEL)
                values = state.elements(parameter, "fp32", fragment.partition_offset, numel)
                local_values[parameter.name, parameter.tensor_slice] = values.tolist()
    # Every rank compares the same gathered values, so all of them raise or none does.
    first: dict[tuple[str, TensorSlice], tuple[int, list[float]]] = {}
    gathered = all_ranks().all_gather(local_values, purpose="comparison of replicas")
    for rank, values_by_slice in gathered.items():
        for (name, tensor_slice), values in values_by_slice.items():
            first_rank, expected = first.setdefault((name, tensor_slice), (rank, values))
            pairs = list(zip(expected, values, strict=False))
            limit = _REPLICA_TOLERANCE * max(abs(value) for pair in pairs for value in pair)
            if any(abs(a - b) > limit for a, b in pairs):
                raise CheckpointError(
                    f"parameter {name}: ranks {first_rank} and {rank} hold different values, and nothing says that "
                    f"they hold different slices of it. Mark it (tensor_model_parallel, partition_dim) before "
                    f"deepspeed.initialize; engine.save_checkpoint saves it as it is"
                )


def _index_fields(state: LiveState) -> dict[str, Any]:
    """Return the entries of the index that describe the run; raise for settings that no load would take."""
    refuse_unusable(state.optimizer.param_groups, state.optimizer.config, {})
    return {
        "source": {
            "writer": "engine",
            "optimizer": OURS,
            "zero_stage": int(state.bound_engine.engine.zero_optimization_stage()),
            "world_size": all_ranks().size,
        },
        "optimizer": state.optimizer.config.model_dump(mode="json"),
        "groups": [json_settings(group) for group in state.optimizer.param_groups],
        "progress": state.bound_engine.progress(),
    }


# ---- which rank writes what --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank appends to its current file in one round: elements ``[start, stop)`` of the file's tensors.

    Attributes:
        file: Name of the file.
        start: The first element, counted over all tensors of the file.
        stop: The element after the last.
    """

    file: str
    start: int
    stop: int


def shard_name(save_id: str, number: int) -> str:
    """Return the file name of a shard. No other save has the ``save_id``, so none has a file of that name."""
    return f"muon-{save_id}-{number:05d}.safetensors"


def pack(tensors: Shapes, shard_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    """Divide tensors into files, in order. A file exceeds ``shard_bytes`` only if it holds a single tensor."""
    shards: list[dict[str, tuple[int, ...]]] = []
    size = 0
    for name, shape in tensors.items():
        nbytes = math.prod(shape) * ITEM_BYTES
        if not shards or size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += nbytes
    return shards


class SavePlan:
    """What is in the files of a set, the rank that writes each file, and its pieces.

    Made from metadata alone, and equal on all ranks.

    Attributes:
        parameters: The record of every parameter, with the names of its files.
        layouts: The layout of each file.
        piece_numel: Elements of the largest piece.
    """

    def __init__(
        self,
        slices: Mapping[str, Sequence[PartitionedParameter]],
        shard_bytes: int,
        save_id: str,
        world_size: int = 1,
    ) -> None:
        """Make the plan.

        Args:
            slices: The slices of each parameter, by name, in the same order on all ranks.
            shard_bytes: Size of a file; it also bounds the pieces.
            save_id: Becomes part of the names of the files.
            world_size: Ranks that write.
        """
        self._slices = slices
        records = {name: first.record for name, (first, *_) in slices.items()}
        shapes = {
            tensor_name(key, name): record.shape_of(key)
            for name, record in records.items()
            for key in record.tensor_keys
        }
        # Small models too are written by all ranks.
        bytes_per_rank = -(-sum(map(math.prod, shapes.values())) * ITEM_BYTES // world_size)
        shards = pack(shapes, min(shard_bytes, max(bytes_per_rank, 1)))
        self.layouts = {shard_name(save_id, n): FileLayout.of(shard) for n, shard in enumerate(shards)}
        file_of = {tensor: file for file, layout in self.layouts.items() for tensor in layout.starts}
        self.parameters = {
            name: record.model_copy(
                update={"tensors": {key: file_of[tensor_name(key, name)] for key in record.tensor_keys}}
            )
            for name, record in records.items()
        }
        # Each rank has two buffers of a piece. The buffers of all ranks together are no larger than a file.
        piece_bytes = max(1 << 10, min(_PIECE_BYTES, shard_bytes // (2 * world_size)))
        self.piece_numel = step = piece_bytes // ITEM_BYTES
        # The largest files first, each to the rank with the least to write.
        self._pieces: list[list[Piece]] = [[] for _ in range(world_size)]
        load = [0] * world_size
        for file, layout in sorted(self.layouts.items(), key=lambda item: -item[1].numel):
            rank = load.index(min(load))
            load[rank] += layout.numel
            self._pieces[rank] += [
                Piece(file, start, min(start + step, layout.numel)) for start in range(0, layout.numel, step)
            ]
        # Of each file the names of the tensors and their first elements, in which a piece is looked up.
        self._tensors = {
            file: (list(layout.starts), list(layout.starts.values())) for file, layout in self.layouts.items()
        }

    def rounds(self) -> Iterator[tuple[Piece | None, ...]]:
        """Yield the piece of every rank in each round; ``None`` for ranks that are done."""
        return zip_longest(*self._pieces)

    def transfers(self, piece: Piece, writer: int = 0) -> Iterator[Transfer]:
        """Yield the transfers that make up the piece of a rank, in an order that all ranks share."""
        names, starts = self._tensors[piece.file]
        # From the tensor in which the piece begins to the one in which it ends.
        for index in range(bisect_right(starts, piece.start) - 1, bisect_right(starts, piece.stop - 1)):
            key, _, name = names[index].partition("/")
            piece_start = piece.start - starts[index]  # counted in the tensor
            stop = min(piece.stop - starts[index], math.prod(self.parameters[name].shape_of(key)))
            yield from transfers(
                self._slices[name], key, max(piece_start, 0), stop, piece_start=piece_start, writer=writer
            )


# ---- from partitions to files ------------------------------------------------------------------------------


def _exchange_pieces(
    state: LiveState, plan: SavePlan, pieces: Sequence[Piece | None], content: Tensor
) -> None:
    """Send every rank its piece of a round with one all-to-all. Must be called by all ranks.

    Args:
        state: This rank's state.
        plan: The plan of the save.
        pieces: The piece of every rank.
        content: Receives this rank's piece, ``(piece_numel,)`` fp32 on the CPU. Mutated.
    """
    rank = all_ranks().position
    # 1. List all transfers of the round; every rank gets the same list.
    planned = [
        (transfer, writer)
        for writer, piece in enumerate(pieces)
        if piece is not None
        for transfer in plan.transfers(piece, writer)
    ]
    # 2. Write what is local into the piece; sort the rest by receiver and by sender.
    sent: list[list[Tensor]] = [[] for _ in pieces]
    received: list[list[Transfer]] = [[] for _ in pieces]
    for transfer, writer in planned:
        if transfer.source == rank:
            parameter, offset = state.parameters[transfer.parameter.name], transfer.fragment.partition_offset
            elements = state.elements(parameter, transfer.key, offset, transfer.numel)  # (numel,) fp32
            if writer == rank:
                transfer.write(elements, content)
            else:
                sent[writer].append(elements)
        elif writer == rank:
            received[transfer.source].append(transfer)
    # All ranks have the same list, so all of them skip the collective or none does.
    if all(transfer.source == writer for transfer, writer in planned):
        return
    # 3. Exchange, and write what was received into the piece.
    numels = [[transfer.numel for transfer in from_rank] for from_rank in received]
    like = torch.empty(0, dtype=torch.float32, device=state.device)
    purpose = "exchange of a checkpoint's pieces"
    by_source = exchange_tensors(sent, numels, like=like, group=None, purpose=purpose)
    for transfer, elements in zip(chain(*received), chain(*by_source), strict=True):
        transfer.write(elements, content)


class ShardFile:
    """One safetensors file that is written piece by piece, under a temporary name until :meth:`finish`."""

    def __init__(self, path: Path, layout: FileLayout) -> None:
        """Open the file under its temporary name and write the header of the layout."""
        self._path, self._temporary = path, temporary_path(path)
        self._expected_bytes = layout.nbytes
        self._written_bytes = 0
        self._sha256 = hashlib.sha256()
        self._file = open(self._temporary, "wb")  # noqa: SIM115 - closed by close()
        try:
            self._append(layout.header)
        except BaseException:
            self.close()
            raise

    def write(self, elements: Tensor) -> None:
        """Append the next elements: one-dimensional, contiguous, fp32, on the CPU."""
        assert elements.dtype == torch.float32 and elements.device.type == "cpu"
        self._append(memoryview(elements.detach().numpy().data).cast("B"))

    def _append(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        self._written_bytes += self._file.write(data)

    @property
    def is_complete(self) -> bool:
        """Whether all of the file is written."""
        return self._written_bytes == self._expected_bytes

    def finish(self) -> FileRecord:
        """Sync the file, give it its name and return its record. The folder is not synced."""
        assert self.is_complete, (self._written_bytes, self._expected_bytes)
        self._file.close()
        replace(self._temporary, self._path)
        return FileRecord(bytes=self._written_bytes, sha256=self._sha256.hexdigest())

    def close(self) -> None:
        """Close a file that is not finished. It keeps its temporary name."""
        with contextlib.suppress(OSError):
            self._file.close()


def _write_shards(
    plan: SavePlan,
    rank: int,
    fill: Callable[[Sequence[Piece | None], Tensor], None],
    folder: Path,
) -> tuple[dict[str, FileRecord], Exception | None]:
    """Write this rank's files, and return their records and the first error.

    A failure of the disk is returned, not raised: the other ranks still need this rank's elements.
    """
    records: dict[str, FileRecord] = {}
    current: list[ShardFile] = []  # the file that is being written, if any
    errors: list[CheckpointError] = []

    def append(piece: Piece | None, content: Tensor) -> None:
        # Runs in the thread. After an error nothing more is written, but the exchanges go on for the other ranks.
        if piece is None or errors:
            return
        path = folder / piece.file
        try:
            if not current:
                current.append(ShardFile(path, plan.layouts[piece.file]))
            current[0].write(content.narrow(0, 0, piece.stop - piece.start))
            if current[0].is_complete:
                records[piece.file] = current.pop().finish()
        except OSError as error:
            errors.append(CheckpointError(f"{path}: {error}; {UNTOUCHED}"))

    def close_current() -> None:
        for file in current:
            file.close()

    # Two buffers (piece_numel,) fp32: one is exchanged while the thread writes the other.
    contents = [torch.empty(plan.piece_numel, dtype=torch.float32, device="cpu") for _ in range(2)]
    with contextlib.ExitStack() as stack:
        stack.callback(close_current)
        thread = ThreadPoolExecutor(1, thread_name_prefix="deepspeed_muon-save")
        stack.callback(thread.shutdown)  # waits again, if an interrupt ends the wait of the next line
        stack.enter_context(thread)
        # Each piece is appended while the next one is exchanged.
        writing = thread.submit(append, None, contents[0])
        for number, pieces in enumerate(plan.rounds()):
            content = contents[number % 2]
            fill(pieces, content)
            writing.result()  # the other buffer is free now
            writing = thread.submit(append, pieces[rank], content)
            _log_progress(folder, "piece")
        writing.result()
    if records and not errors:
        try:
            fsync_folder(folder)
        except OSError as error:
            errors.append(CheckpointError(f"{folder}: {error}; {UNTOUCHED}"))
    return records, errors[0] if errors else None


def _log_progress(folder: Path, stage: str) -> None:
    logger.debug("deepspeed_muon: save to %s: %s", folder, stage)


# ---- the commit --------------------------------------------------------------------------------------------


def write_set(
    folder: Path,
    plan: SavePlan,
    fill: Callable[[Sequence[Piece | None], Tensor], None],
    index_fields: Mapping[str, Any],
    writer: FolderWriter | None,
    ranks: Ranks,
) -> CheckpointIndex | None:
    """Replace the set of a folder, in the order of the module's docstring. Must be called by all ``ranks``.

    Args:
        folder: Where the set is written.
        plan: What is written.
        fill: Called in each round with the pieces of all ranks; writes this rank's piece into a CPU tensor.
        index_fields: The entries of the index besides files and parameters.
        writer: The writer of the folder, on the first rank.
        ranks: The ranks that save.

    Returns:
        The index, on the first rank.

    Raises:
        CheckpointError: On every rank. The message says which set the folder holds.
    """
    untouched = f"{folder}: {UNTOUCHED}"
    # All that the other ranks can say once the first one may be renaming the index.
    outcome = f"{folder}: {_ONE_OF_TWO}"
    index: CheckpointIndex | None = None
    failure: CheckpointError | None = None
    _log_progress(folder, "start")
    # 1. Every rank writes its shards. An error is only returned, and raised by all ranks in step 2.
    with save_failure(untouched):
        _log_progress(folder, "shards")
        files, error = _write_shards(plan, ranks.position, fill, folder)
    # 2. All ranks agree that their shards are on the disk, before the first rank renames the index.
    with save_failure(outcome if writer is None else untouched):
        agree(error=error, kind=CheckpointError, ranks=ranks)
        _log_progress(folder, "shards written")
        files_by_rank = ranks.all_gather(files, purpose="gathering of the index")
    # 3. The first rank replaces the index. It must not raise here, since the other ranks wait in step 4.
    if writer is not None:
        try:
            all_files = dict(sorted(chain.from_iterable(files.items() for files in files_by_rank.values())))
            index = CheckpointIndex(
                format=FORMAT,
                versions=software_versions(),
                files=all_files,
                parameters=plan.parameters,
                **index_fields,
            )
            writer.commit(index)
        except CheckpointError as caught:
            failure = caught
        except Exception as caught:
            reason = f"the index cannot be made: {type(caught).__name__}: {caught}"
            failure = CheckpointError(f"{untouched}: {reason}")
        complete = f"{folder}: the new set is complete and in place, but not every rank may know"
        outcome = str(failure or complete)
    # 4. All ranks return, or raise the error of the first rank.
    with save_failure(outcome):
        agree(error=failure, kind=CheckpointError, ranks=ranks)
    _log_progress(folder, "index written")
    return index


@contextlib.contextmanager
def save_failure(outcome: str) -> Iterator[None]:
    """Turn a collective that failed because a rank died or is missing into a CheckpointError.

    Args:
        outcome: Which set the folder holds then.
    """
    try:
        yield
    except (MuonError, RuntimeError) as error:
        # Other errors of ours say what happened. The backends of torch raise RuntimeError if a peer is gone.
        if isinstance(error, MuonError) and not isinstance(error, RankMissingError):
            raise
        raise CheckpointError(f"{outcome}. The ranks did not finish the save together: {error}") from error


def _id_file(folder: Path, save_id: str) -> Path:
    """Return the empty file that says which save is writing into a folder."""
    return folder / f".{INDEX_NAME}.{save_id}.tmp"


@contextlib.contextmanager
def folder_writer(folder: Path) -> Iterator[FolderWriter]:
    """Lock a folder, which must exist, and yield its writer; at the end, remove files of saves that no index names.

    Another save would remove the shards of this one, which no index names yet.

    Raises:
        CheckpointError: If another save is writing into the folder, it cannot be written to, or is not for a set.
    """
    busy = f"{folder}: another save is writing into this folder; wait for it, or name another folder"
    with exclusive(folder / LOCK_NAME, busy) as is_locked:
        writer = FolderWriter(folder, is_locked)
        try:
            with refusing(f"{folder}: {UNTOUCHED}"):
                _refuse_other_checkpoints(folder)
                _id_file(folder, writer.save_id).touch()
            yield writer
        finally:
            # Before the lock is released: the shards of the next save are in no index yet.
            remove_stale(folder, writer.is_stale)


def _refuse_other_checkpoints(folder: Path) -> None:
    """Raise if a folder without a set holds other weights, or what Hugging Face's Trainer saves."""
    names = sorted(os.listdir(folder))
    foreign = [
        name for name in names if _OTHER_CHECKPOINTS.fullmatch(name) and not _FILES_OF_SAVES.fullmatch(name)
    ]
    if foreign and INDEX_NAME not in names:
        raise CheckpointError(
            f"{folder}: holds {foreign[0]}, which is of another checkpoint: name a folder for the set alone, such as "
            f"{folder / CONSOLIDATED_FOLDER}; {UNTOUCHED}"
        )


class FolderWriter:
    """The process that writes the index of a folder, made by :func:`folder_writer`.

    Attributes:
        save_id: Random; in the names of all files of this save.
        is_stale: Which files of saves are removed at the end, by name: those of this save, until it renames its index.
    """

    def __init__(self, folder: Path, is_locked: bool) -> None:
        """Draw the id. Nothing is written."""
        self.save_id = secrets.token_hex(6)
        self._folder, self._is_locked = folder, is_locked
        self.is_stale: Callable[[str], bool] = lambda name: self.save_id in name

    def commit(self, index: CheckpointIndex) -> None:
        """Make ``index`` the index of the folder. Its shards, and their names, must be on the disk.

        Raises:
            CheckpointError: Saying which set the folder holds.
        """
        # Without a lock, another save may be writing shards that no index names yet, so only the files of the set that
        # is replaced are removed.
        replaced_files: set[str] = set()
        if not self._is_locked:
            with contextlib.suppress(CheckpointError):
                replaced_files.update(load_index(self._folder).files)
        # The file with the id becomes the index.
        temporary, of_this_save, outcome = _id_file(self._folder, self.save_id), self.is_stale, UNTOUCHED

        def check_shards() -> None:
            nonlocal outcome
            for name, record in index.files.items():
                size = regular_size(self._folder / name)
                if size != record.bytes:
                    raise CheckpointError(f"{name} has {size} bytes, {record.bytes} were written")
            # Until the rename returns, either index may be there.
            self.is_stale = lambda name: False
            outcome = _ONE_OF_TWO

        try:
            with open(temporary, "wb") as file:
                file.write(index.to_bytes())
            replace(temporary, self._folder / INDEX_NAME, check=check_shards)
            outcome = (
                "the new set is in place and complete, but its index may not be on the disk: after a power cut the set "
                "before it may be back, complete too. Save again"
            )
            fsync_folder(self._folder)
        except (OSError, CheckpointError) as error:
            if os.path.lexists(temporary):  # a rename can report an error after it was done
                self.is_stale, outcome = of_this_save, UNTOUCHED
            raise CheckpointError(f"{self._folder / INDEX_NAME}: {error}; {outcome}") from error
        self.is_stale = lambda name: (
            name not in index.files and (self._is_locked or name in replaced_files or self.save_id in name)
        )


def remove_stale(folder: Path, is_stale: Callable[[str], bool]) -> None:
    """Remove stale shards and temporary files of saves, with a warning if one cannot be removed.

    Args:
        folder: A consolidated set.
        is_stale: Whether no index names a file. Only asked about files of saves; others are never removed.
    """
    try:
        for name in os.listdir(folder):
            if _FILES_OF_SAVES.fullmatch(name) and is_stale(name):
                (folder / name).unlink(missing_ok=True)
    except OSError as error:
        logger.warning(
            "deepspeed_muon: %s: not all files that no index names could be removed; the next save tries again: %s",
            folder,
            error,
        )
