"""Write the state of a running engine as one safetensors set, by all ranks in parallel.

:mod:`deepspeed_muon.checkpoint.parts` says how the tensors get into the files, and
:mod:`deepspeed_muon.checkpoint.commit` how the new set replaces the one before.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.checkpoint.atomic import FolderWriter, make_folder
from deepspeed_muon.checkpoint.commit import rank_lost, require_one_folder, write_set
from deepspeed_muon.checkpoint.index import OURS
from deepspeed_muon.checkpoint.live import LiveState, collect, require_all_ranks
from deepspeed_muon.checkpoint.parts import (
    DEFAULT_SHARD_BYTES,
    HeldParameter,
    Piece,
    SavePlan,
    Transfer,
    check_shard_bytes,
    put_together,
    transfers_of,
)
from deepspeed_muon.checkpoint.sealed import folder_of, json_settings, refusing
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.transport.agreement import RankFacts, Scope, together
from deepspeed_muon.transport.ranks import all_ranks, is_first_rank, phase

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
    with rank_lost(f"{out_dir}: what it held before is untouched"), contextlib.ExitStack() as locked:
        folder, state, writer = _open(engine, out_dir, shard_bytes, locked)
        save_id = require_one_folder(folder, writer)
        # What every data-parallel group holds, from the first rank of each.
        own = [each.without_tensors() for each in state.parameters if each.rank == 0]
        held = list(chain.from_iterable(all_ranks().gather(own, what="plan of a save").values()))
        parts = put_together(held)
        records = {name: first.record for name, (first, *_) in parts.items()}
        plan = SavePlan(records, shard_bytes, save_id, state.world_size)
        _compare_copies(state, held)
        locked.pop_all()  # write_set closes the writer
    fill = _Exchange(state, plan, parts).fill
    write_set(folder, plan, fill, functools.partial(_about, state), writer, all_ranks())
    return folder


def _open(
    engine: Any, out_dir: Any, shard_bytes: Any, locked: contextlib.ExitStack
) -> tuple[Path, LiveState, FolderWriter | None]:
    """Make the folder, locked by the first rank until ``locked`` ends; all ranks raise if one of them fails or differs.

    Returns:
        The folder, what this rank holds, and the writer on the first rank.
    """
    writer: FolderWriter | None = None
    with together(CheckpointError) as agreed:
        folder = folder_of("out_dir", out_dir)
        check_shard_bytes(shard_bytes)
        state = collect(engine)
        state.host.require_restored()
        with refusing(f"{folder}: cannot be made"):
            make_folder(folder)
        if is_first_rank():
            writer = FolderWriter(folder)
            locked.callback(writer.close)
        _add_facts(agreed, state, folder, shard_bytes)
    return folder, state, writer


def _add_facts(agreed: RankFacts, state: LiveState, folder: Path, shard_bytes: int) -> None:
    """Add what must be equal before a save: on all ranks, and between the ranks that hold the same parameters."""
    agreed.facts.update(
        out_dir=str(folder),
        global_steps=str(state.host.counters()["global_steps"]),
        shard_bytes=str(shard_bytes),
    )
    for held in state.groups:
        scope = Scope.among(held[0].holders, held[0].rank)
        place = "" if scope.size == state.world_size else f" of ranks {scope.name}"
        steps: dict[int, str] = {}
        for each in held:
            steps.setdefault(each.record.step, each.name)
        shown = ", ".join(f"{step} ({name}, ...)" for step, name in sorted(steps.items()))
        agreed.facts[f"optimizer steps{place}"] = shown
        told = repr([(each.route, each.part, each.placement, each.record) for each in held])
        agreed.facts[f"plan of the save{place}"] = hashlib.sha256(told.encode()).hexdigest()
        agreed.scopes.update({f"{fact}{place}": scope for fact in ("optimizer steps", "plan of the save")})


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
            "zero_stage": state.host.zero_stage,
            "world_size": state.world_size,
        },
        "optimizer": state.optimizer.config.model_dump(mode="json"),
        "groups": [json_settings(group) for group in state.optimizer.param_groups],
        "progress": state.host.progress(),
    }


class _Exchange:
    """Brings every rank its piece of a round with one all-to-all."""

    def __init__(
        self, state: LiveState, plan: SavePlan, parts: Mapping[str, Sequence[HeldParameter]]
    ) -> None:
        self._state, self._plan, self._parts = state, plan, parts
        self._by_name = state.by_name
        # All rounds share the buffers: to allocate them in each round would cost more than the copies.
        self._outgoing, self._incoming = (
            torch.empty(0, dtype=torch.float32, device=state.device) for _ in range(2)
        )

    def _elements(self, transfer: Transfer) -> Tensor:
        """Return the elements of a transfer that this rank sends."""
        own = self._by_name[transfer.held.name]
        flat = self._state.tensor(own.bound, transfer.key)
        return flat.narrow(0, own.offset(transfer.key, own.rank, transfer.start), transfer.numel)

    def fill(self, pieces: Sequence[Piece | None], content: Tensor) -> None:
        """Send every rank its piece of this round; this rank's own comes into ``content``, on the CPU."""
        rank = self._state.rank
        moves = [
            (each, writer) for writer, piece in enumerate(pieces) for each in self._transfers(writer, piece)
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

    def _transfers(self, writer: int, piece: Piece | None) -> Iterator[Transfer]:
        """Yield everything that a rank's piece consists of, in an order that all ranks share."""
        for name, key, start, stop, piece_start in self._plan.ranges(piece) if piece else ():
            parts = self._parts[name]
            yield from transfers_of(parts, key, start, stop, piece_start=piece_start, writer=writer)
