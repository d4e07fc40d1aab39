"""Write one safetensors set with the full optimizer state, from a running engine, by all ranks in parallel.

A set is a folder with safetensors files and an index, ``muon_index.json``. Each file ("shard") holds full tensors,
however the ranks have partitioned them. The ranks write in rounds: in each round every rank receives, in one
all-to-all, the next few megabytes of the file that it writes (a :class:`Piece`) and appends them. So pieces bound the
memory, whatever the size of the model.

The new set replaces the one before atomically. The first rank locks the folder and writes a random id into the lock
file; all ranks read it, because shards of a rank with another folder would be lost. Then each step is on the disk
before the next one begins:

1. Every rank writes its shards under temporary names, syncs and renames them, and syncs the folder.
2. All ranks agree that their shards are there.
3. The first rank writes the index under a temporary name, syncs it, checks that every shard is there with its size, and
   renames the index over the old one. This rename is the commit.
4. It syncs the folder.
5. It removes the shards that the new index does not name.

If anything fails before the rename, the first rank removes the files of this save. If it dies, or if it is unknown
whether the rename happened, all files are left, and the next save removes those that its index does not name.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import secrets
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
    folder_of,
    fsync_folder,
    lock,
    make_folder,
    read_regular,
    regular_size,
    replace,
    replace_file,
    temporary_path,
    unlink,
    unlock,
)
from deepspeed_muon.checkpoint.index import (
    FORMAT,
    INDEX_NAME,
    ITEM_BYTES,
    OURS,
    SHARD_PATTERN,
    CheckpointIndex,
    FileRecord,
    ParameterRecord,
    Shapes,
    json_settings,
    load_index,
    shard_header,
    software_versions,
    tensor_name,
)
from deepspeed_muon.checkpoint.parameters import (
    LiveState,
    PartitionedParameter,
    Transfer,
    collect,
    require_all_ranks,
    require_fp32,
    slices_by_name,
    transfers,
)
from deepspeed_muon.config.settings import refuse_unusable
from deepspeed_muon.errors import CheckpointError, MuonError, RankMissingError
from deepspeed_muon.logs import logger
from deepspeed_muon.transport.agreement import RankFacts, Scope, agree, raise_on_all_ranks
from deepspeed_muon.transport.all_to_all import exchange_tensors
from deepspeed_muon.transport.ranks import Ranks, all_ranks, is_first_rank

DEFAULT_SHARD_BYTES = 2 << 30
# The largest piece that a rank receives in a round; it bounds the buffers.
_PIECE_BYTES = 4 << 20

LOCK_NAME = ".muon_save.lock"
# Shards, and what killed saves leave of shards and of indexes.
_FILES_OF_SAVES = re.compile(
    rf"{SHARD_PATTERN.pattern}|\.({SHARD_PATTERN.pattern}|{re.escape(INDEX_NAME)})\.[0-9a-f]{{12}}\.tmp"
)

# Replicas of a parameter are compared in their first elements, and may differ by this share of the largest.
_COMPARED_NUMEL = 64
_REPLICA_TOLERANCE = 1e-2


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
    require_all_ranks(engine)
    writer: FolderWriter | None = None
    with contextlib.ExitStack() as stack:
        with save_failure(f"{out_dir}: {UNTOUCHED}"):
            # 1. Check the arguments, describe the state, lock the folder. All ranks raise if one does, or differs.
            with raise_on_all_ranks(CheckpointError) as facts:
                folder = checked_folder(out_dir, shard_bytes)
                state = collect(engine)
                state.host.require_restored()
                require_fp32(state)
                index_fields = _index_fields(state)
                make_folder(folder)
                if is_first_rank():
                    writer = stack.enter_context(contextlib.closing(FolderWriter(folder)))
                _add_facts(facts, state, folder, shard_bytes)
            save_id = _require_shared_folder(folder, writer)
            # 2. Plan from metadata: the first rank of each data-parallel group describes the group's parameters.
            described = [p.metadata() for p in state.parameters.values() if p.group_rank == 0]
            gathered = all_ranks().all_gather(described, purpose="plan of a save").values()
            parameters = list(chain.from_iterable(gathered))
            plan = SavePlan(slices_by_name(parameters), shard_bytes, save_id, all_ranks().size)
            _compare_replicas(state, parameters)
        # 3. Write the shards and replace the index.
        fill = functools.partial(_exchange_pieces, state, plan)
        write_set(folder, plan, fill, index_fields, writer, all_ranks())
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
    facts.record("global_steps", state.host.counters()["global_steps"])
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


def _require_shared_folder(folder: Path, writer: FolderWriter | None) -> str:
    """Return the id of the save; raise on every rank unless all ranks see the same folder.

    Must be called by all ranks, by the first one with the ``writer`` of the folder.
    """
    local_id = "" if writer is None else writer.save_id
    save_id = str(next(iter(all_ranks().all_gather(local_id, purpose="naming of a save").values())))
    # The path may name another folder on another machine, whose lock file has another id or is missing.
    content = b""
    with raise_on_all_ranks(CheckpointError):
        with contextlib.suppress(OSError, CheckpointError):
            content = read_regular(folder / LOCK_NAME, 64)
        if content != save_id.encode():
            raise CheckpointError(
                f"{os.path.abspath(folder)}: this rank does not see what rank 0 wrote into {folder}. All ranks must "
                f"share the folder: name it by its absolute path on a file system that every machine mounts. Nothing "
                f"was written, {UNTOUCHED}"
            )
    return save_id


def _compare_replicas(state: LiveState, parameters: Sequence[PartitionedParameter]) -> None:
    """Raise on every rank if groups that claim the same slice of a parameter have different values.

    Must be called by all ranks. A tensor-parallel shard that nothing marks as one looks like a replica. Replicas may
    drift apart in their last bits, where kernels add in another order; shards differ by as much as their elements.

    Args:
        state: Of this rank.
        parameters: Of every data-parallel group.
    """
    replicas = Counter((p.name, p.tensor_slice) for p in parameters)
    # All ranks count the same metadata, so all of them return or none does.
    if max(replicas.values()) == 1:
        return
    # Of each replica the rank whose fragment begins the slice reports the first elements.
    local_values = {}
    for parameter in state.parameters.values():
        is_replica = replicas[parameter.name, parameter.tensor_slice] > 1
        for fragment in parameter.local_fragments("fp32") if is_replica else ():
            if fragment.matrix_offset == 0:
                numel = min(fragment.numel, _COMPARED_NUMEL)
                values = state.elements(parameter, "fp32", fragment.partition_offset, numel)
                local_values[parameter.name] = values.tolist()
    # Every rank compares the same gathered values, so all of them raise or none does.
    first: dict[str, tuple[int, list[float]]] = {}
    gathered = all_ranks().all_gather(local_values, purpose="comparison of replicas")
    for rank, values_by_name in gathered.items():
        for name, values in values_by_name.items():
            first_rank, expected = first.setdefault(name, (rank, values))
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
            "zero_stage": int(state.host.engine.zero_optimization_stage()),
            "world_size": all_ranks().size,
        },
        "optimizer": state.optimizer.config.model_dump(mode="json"),
        "groups": [json_settings(group) for group in state.optimizer.param_groups],
        "progress": state.host.progress(),
    }


# ---- which rank writes what --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank appends to its current file in one round: elements ``[start, stop)`` of the file's tensors.

    Attributes:
        file: Name of the file.
        start: The first element, counted over all tensors of the file.
        stop: The element after the last.
        is_last: Whether it completes the file.
    """

    file: str
    start: int
    stop: int
    is_last: bool


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


def shard_name(save_id: str, number: int) -> str:
    """Return the file name of a shard. No other save has the ``save_id``, so none has a file of that name."""
    return f"muon-{save_id}-{number:05d}.safetensors"


class SavePlan:
    """The files of a set, their tensors, the rank that writes each and its pieces.

    Made from metadata alone, and equal on all ranks.

    Attributes:
        files: Name of each file to the shapes of its tensors.
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
        self._records = {name: first.record for name, (first, *_) in slices.items()}
        tensors = {
            tensor_name(key, name): record.shape_of(key)
            for name, record in self._records.items()
            for key in record.tensor_keys
        }
        # Small models too are written by all ranks.
        bytes_per_rank = -(-sum(map(math.prod, tensors.values())) * ITEM_BYTES // world_size)
        shards = pack(tensors, min(shard_bytes, max(bytes_per_rank, 1)))
        self.files = {shard_name(save_id, number): shard for number, shard in enumerate(shards)}
        # Each rank has two buffers of a piece. The buffers of all ranks together are no larger than a file.
        piece_bytes = max(1 << 10, min(_PIECE_BYTES, shard_bytes // (2 * world_size)))
        self.piece_numel = numel = piece_bytes // ITEM_BYTES
        # The largest files first, each to the rank with the least to write.
        self._pieces: list[list[Piece]] = [[] for _ in range(world_size)]
        load = [0] * world_size
        numel_of = {file: sum(map(math.prod, shard.values())) for file, shard in self.files.items()}
        for file, size in sorted(numel_of.items(), key=lambda item: -item[1]):
            rank = load.index(min(load))
            load[rank] += size
            self._pieces[rank] += [
                Piece(file, start, min(start + numel, size), start + numel >= size)
                for start in range(0, size, numel)
            ]

    def rounds(self) -> Iterator[tuple[Piece | None, ...]]:
        """Yield the piece of every rank in each round; ``None`` for ranks that are done."""
        return zip_longest(*self._pieces)

    def transfers(self, piece: Piece, writer: int = 0) -> Iterator[Transfer]:
        """Yield the transfers that make up the piece of a rank, in an order that all ranks share."""
        offset = 0  # where the tensor begins, in elements of the file
        for tensor, shape in self.files[piece.file].items():
            numel = math.prod(shape)
            start, stop = max(piece.start - offset, 0), min(piece.stop - offset, numel)
            if start < stop:
                key, _, name = tensor.partition("/")
                piece_start = piece.start - offset
                yield from transfers(
                    self._slices[name], key, start, stop, piece_start=piece_start, writer=writer
                )
            offset += numel
            if offset >= piece.stop:
                return

    def records(self) -> dict[str, ParameterRecord]:
        """Return the record of every parameter, with the names of its files."""
        file_of = {tensor: file for file, tensors in self.files.items() for tensor in tensors}
        return {
            name: record.model_copy(
                update={"tensors": {key: file_of[tensor_name(key, name)] for key in record.tensor_keys}}
            )
            for name, record in self._records.items()
        }


# ---- from partitions to files ------------------------------------------------------------------------------


def _exchange_pieces(
    state: LiveState, plan: SavePlan, pieces: Sequence[Piece | None], content: Tensor
) -> None:
    """Send every rank its piece of a round with one all-to-all. Must be called by all ranks.

    Args:
        state: Of this rank.
        plan: Of the save.
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

    def __init__(self, path: Path, tensors: Shapes) -> None:
        """Open the file under its temporary name and write the header for ``tensors``."""
        self._path = path
        self._temporary = temporary_path(path)
        entries, nbytes = shard_header(tensors)
        header = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
        # safetensors: the length of the header in 8 bytes, the JSON padded to a multiple of 8, then the tensors.
        header += b" " * (-len(header) % 8)
        self._expected_bytes = 8 + len(header) + nbytes
        self._written_bytes = 0
        self._sha256 = hashlib.sha256()
        self._file = open(self._temporary, "wb")  # noqa: SIM115 - closed by close()
        try:
            self._append(len(header).to_bytes(8, "little") + header)
        except OSError:
            self.close()
            raise

    def write(self, elements: Tensor) -> None:
        """Append the next elements: one-dimensional, contiguous, fp32, on the CPU."""
        assert elements.dtype == torch.float32 and elements.device.type == "cpu"
        self._append(memoryview(elements.detach().numpy().data).cast("B"))

    def _append(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        self._written_bytes += self._file.write(data)

    def finish(self) -> FileRecord:
        """Sync the file, give it its name and return its record. The folder is not synced."""
        assert self._written_bytes == self._expected_bytes, (self._written_bytes, self._expected_bytes)
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
                current.append(ShardFile(path, plan.files[piece.file]))
            current[0].write(content.narrow(0, 0, piece.stop - piece.start))
            if piece.is_last:
                records[piece.file] = current.pop().finish()
        except OSError as error:
            errors.append(CheckpointError(f"{path}: {error}; {UNTOUCHED}"))

    # Two buffers (piece_numel,) fp32: one is exchanged while the thread writes the other.
    contents = [torch.empty(plan.piece_numel, dtype=torch.float32, device="cpu") for _ in range(2)]
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="deepspeed_muon-save") as thread:
            # Each piece is appended while the next one is exchanged.
            writing = thread.submit(append, None, contents[0])
            for number, pieces in enumerate(plan.rounds()):
                content = contents[number % 2]
                fill(pieces, content)
                writing.result()  # the other buffer is free now
                writing = thread.submit(append, pieces[rank], content)
                _log_progress(folder, "piece")
            writing.result()
    finally:
        thread.shutdown(cancel_futures=True)  # an interrupt of the block above may leave it writing
        for file in current:
            file.close()
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
        writer: Of the folder, on the first rank.
        ranks: The ranks that save.

    Returns:
        The index, on the first rank.

    Raises:
        CheckpointError: On every rank. The message says which set the folder holds.
    """
    untouched = f"{folder}: {UNTOUCHED}"
    # All that the other ranks can say once the first one may be renaming the index.
    outcome = f"{folder}: it holds the new set or the one before, complete; 'checkpoint inspect' says which"
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
                parameters=plan.records(),
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


class FolderWriter:
    """The process that writes the index of a folder; its lock keeps other saves out until :meth:`close`.

    Another save would remove the shards of this one, which no index names yet.

    Attributes:
        save_id: Random; in the names of all files of this save and, meanwhile, in the lock file.
    """

    def __init__(self, folder: Path) -> None:
        """Lock a folder, which must exist.

        Raises:
            CheckpointError: If another save is writing into it, or it cannot be written to.
        """
        self.save_id = secrets.token_hex(6)
        self._folder = folder
        self._lock: int | None = None
        # Which files close() removes: those of this save, until it renames its index.
        self._is_stale: Callable[[str], bool] = lambda name: self.save_id in name
        path = folder / LOCK_NAME
        try:
            self._lock = lock(path, os.O_RDWR | os.O_CREAT)
            # Network file systems show the content to other machines once the file is closed.
            with open(path, "wb") as file:
                file.write(self.save_id.encode())
        except BlockingIOError:
            raise CheckpointError(
                f"{folder}: another save is writing into this folder; wait for it, or name another folder"
            ) from None
        except OSError as error:
            self._release()
            raise CheckpointError(f"{path}: {error}; {UNTOUCHED}") from error
        if self._lock is None:
            logger.warning(
                "deepspeed_muon: %s is on a file system without locks: never run two saves into it at once. Files that "
                "killed saves leave there are not removed",
                folder,
            )

    def commit(self, index: CheckpointIndex) -> None:
        """Make ``index`` the index of the folder. Its shards, and their names, must be on the disk.

        Raises:
            CheckpointError: Saying which set the folder holds.
        """
        # Without a lock another save may be writing shards that no index names yet. Then only the files of the set that
        # is replaced are removed.
        replaced_files: set[str] = set()
        if self._lock is None:
            with contextlib.suppress(CheckpointError):
                replaced_files.update(load_index(self._folder).files)

        def check_shards() -> None:
            for name, record in index.files.items():
                size = regular_size(self._folder / name)
                if size != record.bytes:
                    raise CheckpointError(f"{name} has {size} bytes, {record.bytes} were written")
            self._is_stale = lambda name: False  # until the rename returns, either index may be there

        replace_file(self._folder / INDEX_NAME, index.to_bytes(), check=check_shards)
        is_locked = self._lock is not None
        self._is_stale = lambda name: name not in index.files and (is_locked or name in replaced_files)

    def close(self) -> None:
        """Remove files of saves that no index names, and release the lock."""
        # Before the lock is released: the shards of the next save are in no index yet.
        remove_stale(self._folder, self._is_stale)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            # Removed before it is unlocked, so nobody removes a file that another save has locked.
            unlink(self._folder / LOCK_NAME)
            unlock(self._lock)
            self._lock = None


def remove_stale(folder: Path, is_stale: Callable[[str], bool]) -> None:
    """Remove stale shards and temporary files of saves, with a warning for those that cannot be removed.

    Args:
        folder: A consolidated set.
        is_stale: Whether no index names a file. Only asked about files of saves; others are never removed.
    """
    errors: list[OSError] = []
    names: list[str] = []
    try:
        names = [name for name in os.listdir(folder) if _FILES_OF_SAVES.fullmatch(name) and is_stale(name)]
    except OSError as error:
        errors.append(error)
    for name in names:
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            errors.append(error)
    if errors:
        logger.warning(
            "deepspeed_muon: %s: %d files that no index names could not be removed; the next save tries again: %s",
            folder,
            len(errors),
            errors[0],
        )
