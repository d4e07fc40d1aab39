"""A record of the placement of every parameter, inside every optimizer state that DeepSpeed saves.

DeepSpeed's own files do not tell where a parameter is under round-robin gradients or split groups, and at stage 0 they
have no names. The record gives the rule of each parameter, a
:class:`~deepspeed_muon.plan.placement.Placement`, so its size does not grow with the number of ranks. A file has a
record for each data-parallel group of its rank; the file of the group's first rank describes its parameters, each with
the part of the whole tensor that it is. The record consists of numbers, strings, lists and dicts, so that torch loads
it with ``weights_only``.

Every save has a random id, which is in each rank's files: files of two saves are not read together, even if both are of
the same step.
"""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from deepspeed_muon.checkpoint.files import refusing
from deepspeed_muon.checkpoint.index import checked
from deepspeed_muon.checkpoint.live import LiveParameter, LiveState, collect
from deepspeed_muon.checkpoint.parameters import Count, HeldParameter, ParameterRecord
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import warn
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.plan.placement import Fragment, Placement, TensorSlice, whole_slice
from deepspeed_muon.transport.agreement import Scope

RECORD_KEY = "deepspeed_muon_layout"
RECORD_VERSION: Literal[3] = 3
SAVE_KEY = "deepspeed_muon_save"
"""Where a file with a model has the id of its save; in the state of an optimizer it is in the record."""


class _Entry(ParameterRecord):
    """One parameter of the record: the whole tensor, the part of it that the ranks hold, and where that lies.

    Attributes:
        name: Dotted name of the whole tensor.
        partition: Index of the flat partition in every rank's file.
        spread: The numbers of its :attr:`placement`.
        cut: Which part of the whole tensor the ranks hold, as dimension and ranges of a
            :class:`~deepspeed_muon.plan.placement.TensorSlice`; ``None`` for all of it.
        row_fragments: The numbers of the fragments of the row state, see :attr:`.HeldParameter.row_fragments`.
        weight_key: The key of its weights in the model's ``state_dict()`` where that is not its name, empty where it is
            not in there; only at stage 0 in fp32, whose files have the weights nowhere else.
    """

    name: str
    partition: Count
    spread: Annotated[tuple[Count, ...], Field(min_length=7, max_length=7)]
    cut: tuple[Count, Annotated[tuple[tuple[Count, Count], ...], Field(min_length=1)]] | None = None
    row_fragments: tuple[tuple[Count, Count, Count, Count], ...] = ()
    weight_key: str | None = None

    @property
    def placement(self) -> Placement:
        """Where its elements are; raises a ValueError if they cannot be there."""
        return Placement(*self.spread)

    @property
    def part(self) -> TensorSlice:
        """Which part of the whole tensor it is; raises a ValueError if it is none."""
        return (
            whole_slice(self.name, self.shape)
            if self.cut is None
            else TensorSlice(self.name, self.shape, *self.cut)
        )

    @property
    def rows_by_owner(self) -> tuple[Fragment, ...]:
        """Where its row state is; raises a ValueError if it cannot be there."""
        return tuple(Fragment(*numbers) for numbers in self.row_fragments)


class _Group(BaseModel):
    """What a rank's file says of one data-parallel group that the rank is in.

    Attributes:
        name: Of the group.
        rank: Of the file inside the group.
        world_size: Ranks over which the parameters are spread.
        parameters: All parameters; only the group's first rank describes them, or every rank if each holds all.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    rank: Count
    world_size: Annotated[int, Field(ge=1, le=1 << 24, strict=True)]
    parameters: tuple[_Entry, ...]

    @model_validator(mode="after")
    def _consistent(self) -> _Group:
        """Raise if two parameters share a name or an element of a partition, or if one cannot be where it is said."""
        names: set[str] = set()
        partitions: dict[int, list[tuple[str, Placement]]] = {}
        for entry in self.parameters:
            if entry.name in names:
                raise ValueError(f"two parameters are called {entry.name}")
            names.add(entry.name)
            _require_fit(entry, self.world_size)
            partitions.setdefault(entry.partition, []).append((entry.name, entry.placement))
        for partition, members in partitions.items():
            _refuse_overlaps(partition, members)
        return self

    def held(self, files: tuple[int, ...]) -> Iterator[HeldParameter]:
        """Yield what the files of the group's ranks hold of each parameter, before any step."""
        for entry in self.parameters:
            record = ParameterRecord.of(entry, group=entry.group)
            place = entry.placement, entry.rows_by_owner, files, entry.partition
            yield HeldParameter(record, entry.part, *place)


class LayoutRecord(BaseModel):
    """The record in a rank's file.

    Attributes:
        version: :data:`RECORD_VERSION`.
        save: Random id of the save.
        order: See :func:`order_of`.
        row_order: See :func:`row_order_of`.
        optimizer: The settings of the optimizer.
        groups: The data-parallel groups that the rank is in.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[3] = RECORD_VERSION
    save: str
    order: str
    row_order: str
    optimizer: dict[str, Any]
    groups: tuple[_Group, ...]


def _require_fit(entry: _Entry, world_size: int) -> None:
    """Raise unless a parameter has as many elements as its placement, on ranks that exist."""
    where, placement, numel = f"parameter {entry.name}: ", entry.placement, math.prod(entry.part.own_shape)
    if placement.numel != numel:
        raise ValueError(f"{where}its placement has {placement.numel} of {numel} elements")
    if placement.ranks.stop > world_size or placement.copies not in (0, world_size):
        raise ValueError(f"{where}ranks {placement.ranks} are not those of {world_size}")
    if entry.step or entry.rows or entry.tensors:
        raise ValueError(f"{where}a layout has no state")
    end = 0
    for rows in entry.rows_by_owner:
        if rows.matrix_offset != end or rows.rank >= world_size:
            raise ValueError(f"{where}its row state is not {rows}")
        end += rows.numel
    if end > numel:
        raise ValueError(f"{where}it has {end} rows of {numel} elements")


def _refuse_overlaps(partition: int, members: Sequence[tuple[str, Placement]]) -> None:
    """Raise if two parameters share elements of a rank's partition.

    Between the ranks where a placement begins, goes on and ends, all fragments are alike, so these ranks stand for all.
    """
    every = {rank for _, p in members for rank in (p.ranks.start, p.ranks.start + 1, p.ranks.stop - 1)}
    looked_at = sorted(every)
    taken: dict[int, list[tuple[int, int, str]]] = {}
    for name, places in members:
        first, stop = (bisect_left(looked_at, rank) for rank in (places.ranks.start, places.ranks.stop))
        for fragment in filter(None, map(places.on, looked_at[first:stop])):
            taken.setdefault(fragment.rank, []).append((fragment.partition_offset, fragment.numel, name))
    for rank, held in taken.items():
        end, before = 0, ""
        for start, numel, name in sorted(held):
            if start < end:
                raise ValueError(f"{before} and {name} overlap in partition {partition} of rank {rank}")
            end, before = start + numel, name


def save_of(content: Any) -> str | None:
    """Return the id of the save that a file of DeepSpeed is of; ``None`` where another optimizer saved it."""
    if not isinstance(content, Mapping):
        return None
    for key in ("optimizer_state_dict", "base_optimizer_state", "optimizer"):
        if isinstance(content.get(key), Mapping) and SAVE_KEY not in content:
            return save_of(content[key])
    record = content.get(RECORD_KEY)
    found = record.get("save") if isinstance(record, Mapping) else content.get(SAVE_KEY)
    return None if found is None else str(found)


def read_records(
    contents: Sequence[Any], where: str
) -> tuple[dict[str, Any], list[HeldParameter], dict[str, str]]:
    """Check what the files hold under :data:`RECORD_KEY`.

    Args:
        contents: What every file holds, in the order of the ranks.
        where: The first file, for errors.

    Returns:
        The settings of the optimizer, what the files hold of every parameter, before any step, and the keys of weights
        that are not those of their parameters, by the names of these.

    Raises:
        CheckpointError: If it is no record, or describes what cannot be.
    """
    content = contents[0]
    if isinstance(content, Mapping) and "missing" in content:
        raise CheckpointError(
            f"{where}: was saved without a record of its layout ({content['missing']}): load it with "
            f"engine.load_checkpoint, at the same ZeRO stage and number of ranks"
        )
    if not isinstance(content, Mapping) or content.get("version") != RECORD_VERSION or "save" not in content:
        raise CheckpointError(
            f"{where}: its layout record is not of version {RECORD_VERSION}, the only one that this release reads: "
            f"consolidate it with the version of deepspeed_muon that saved it"
        )
    records = [checked(LayoutRecord, each, f"{where}: layout record refused:\n") for each in contents]
    members: dict[str, dict[int, tuple[int, _Group]]] = {}
    found: list[HeldParameter] = []
    with refusing(f"{where}: layout record refused"):
        for number, record in enumerate(records):
            for group in record.groups:
                other, _ = members.setdefault(group.name, {}).setdefault(group.rank, (number, group))
                if other != number:
                    raise ValueError(
                        f"files {other} and {number} are both of rank {group.rank} of group {group.name}"
                    )
        for name, ranks in members.items():
            files = tuple(ranks[rank][0] for rank in sorted(ranks))
            _, first = ranks[min(ranks)]
            if first.parameters and all(entry.placement.replicated for entry in first.parameters):
                files = files[:1]
            elif sorted(ranks) != list(range(first.world_size)):
                raise ValueError(f"of group {name} there are files of ranks {sorted(ranks)}")
            found += first.held(files)
    if not found:
        raise CheckpointError(f"{where}: layout record refused: no parameters")
    entries = (entry for record in records for group in record.groups for entry in group.parameters)
    weight_keys = {entry.name: entry.weight_key for entry in entries if entry.weight_key is not None}
    return records[0].optimizer, found, weight_keys


def add_record_to_state_dict(engine: Any) -> None:
    """Let the optimizer of ``engine``, which must be ours, add the record to every state dict that it returns."""
    reference = weakref.ref(engine)  # the optimizer must not keep the engine alive
    warned = False

    def add_record(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        nonlocal warned
        live = reference()
        if live is None:
            return
        record = {
            "version": RECORD_VERSION,
            "save": live.basic_optimizer.host.save_id,
            "order": order_of(live.basic_optimizer),
            "row_order": row_order_of(live.basic_optimizer),
        }
        try:
            state_dict[RECORD_KEY] = {**record, **record_of(collect(live))}
        except CheckpointError as error:
            # DeepSpeed's own resume works without the record. Without the reason a reader would take the state for that
            # of another optimizer.
            state_dict[RECORD_KEY] = {**record, "missing": str(error)}
            if not warned:
                warn(
                    "deepspeed_muon: the saved optimizer state has no record of its layout: %s. engine.load_checkpoint "
                    "resumes it at the same ZeRO stage and number of ranks; 'checkpoint consolidate' and 'universal' "
                    "cannot read it",
                    error,
                )
            warned = True

    engine.basic_optimizer.register_state_dict_post_hook(add_record)


def order_of(optimizer: Muon) -> str:
    """Return a digest of name, partition and rule of every Muon matrix.

    DeepSpeed's files hold flat partitions without names. An engine with another order would load them into the wrong
    matrices, so the digests are compared before anything of the optimizer is loaded, also where the record is missing.
    """
    matrices = (matrix for runner in optimizer.runners for matrix in runner.step_set.matrices)
    rows = sorted([m.name, m.partition, m.placement.numbers()] for m in matrices)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def row_order_of(optimizer: Muon) -> str:
    """Return a digest of which rank stores which rows of every Muon matrix, empty for a variant without row state.

    The owners store them. These depend on the cost of the iteration (``ns_steps``, ``ns_method``, the kind of device),
    so a run with other settings may have other owners.
    """
    rows = [
        [matrix.name, fragment.rank, fragment.matrix_offset, fragment.partition_offset, fragment.numel]
        for runner in optimizer.runners
        for matrix, fragment in zip(runner.plan.matrices, runner.row_fragments, strict=False)
    ]
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest() if rows else ""


def record_of(state: LiveState) -> Mapping[str, Any]:
    """Return what this rank's record says of the parameters."""
    if state.host.save_id is None:
        raise CheckpointError("engine.save_checkpoint did not write it")
    weight_keys = _weight_keys(state)
    return {
        "optimizer": state.optimizer.config.model_dump(mode="json"),
        "groups": [_record_of_group(state, held, weight_keys) for held in state.groups],
    }


def _weight_keys(state: LiveState) -> dict[str, str]:
    """Return the key of each parameter in the model's ``state_dict()``, where that is not its name.

    A model may override ``state_dict``: a value head around a language model leaves out the prefix of the latter. The
    tensors are the parameters' own, so their addresses identify them.

    Returns:
        Names to keys; an empty key for a parameter that the ``state_dict()`` does not hold.
    """
    engine = state.host.engine
    if engine.optimizer is not state.optimizer:  # a wrapper saves masters by number
        return {}
    # Experts with another number in the whole model have files of their own, with that number in the keys.
    parameters = {
        parameter.name: parameter.bound.tensor
        for parameter in state.parameters.values()
        if parameter.name == parameter.own_name
    }
    saved = {key: tensor for key, tensor in engine.module.state_dict().items() if isinstance(tensor, Tensor)}
    key_at = {_address(tensor): key for key, tensor in saved.items()}
    addresses = set(map(_address, parameters.values()))
    keys = {}
    for name, tensor in parameters.items():
        under_name = None if name not in saved else _address(saved[name])
        # A state_dict of copies is believed to use the names.
        if under_name is None or (under_name != _address(tensor) and under_name in addresses):
            keys[name] = key_at.get(_address(tensor), "")
    return keys


def _address(tensor: Tensor) -> tuple[int, torch.Size]:
    """Return what tells two tensors apart that do not overlap."""
    return tensor.data_ptr(), tensor.shape


def _record_of_group(
    state: LiveState, held: Sequence[LiveParameter], weight_keys: Mapping[str, str]
) -> dict[str, Any]:
    """Return what this rank's file says of one data-parallel group."""
    order = {name: number for number, name in enumerate(state.host.described)}
    described = sorted(held, key=lambda each: order[each.own_name])
    return {
        "name": Scope.among(held[0].holders, held[0].rank).name,
        "rank": held[0].rank,
        "world_size": len(held[0].holders),
        "parameters": [
            _entry(parameter, weight_keys)
            for parameter in described
            if parameter.rank == 0 or parameter.placement.replicated
        ],
    }


def _entry(parameter: LiveParameter, weight_keys: Mapping[str, str]) -> dict[str, Any]:
    part = parameter.part
    layout = ParameterRecord.of(parameter.record, group=parameter.record.group)
    entry = {
        "name": parameter.name,
        **layout.model_dump(mode="json", exclude_defaults=True),
        "partition": parameter.partition,
        "spread": parameter.placement.numbers(),
    }
    if not part.is_whole:
        entry["cut"] = [part.dim, list(map(list, part.ranges))]
    if parameter.row_fragments:
        entry["row_fragments"] = [
            [rows.rank, rows.matrix_offset, rows.partition_offset, rows.numel]
            for rows in parameter.row_fragments
        ]
    if parameter.name in weight_keys:
        entry["weight_key"] = weight_keys[parameter.name]
    return entry
