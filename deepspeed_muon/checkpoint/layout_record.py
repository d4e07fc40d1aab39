"""A record of the layout of all parameters, inside every optimizer state dict that DeepSpeed saves.

DeepSpeed's own files do not say where a parameter is under round-robin gradients or split groups, and at stage 0 they
have no names. The record has the :class:`~deepspeed_muon.plan.placement.Placement` of each parameter, a rule of a few
numbers, so its size does not grow with the number of ranks. A file has an entry for each data-parallel group of its
rank; the file of the group's first rank describes the group's parameters, each with its slice of the full tensor. The
record consists of numbers, strings, lists and dicts, which torch loads with ``weights_only``.

Every save has a random id, which is in each rank's files, so that files of two saves are never read together, even if
both are of the same step.
"""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from deepspeed_muon.checkpoint.files import refusing
from deepspeed_muon.checkpoint.index import Count, checked
from deepspeed_muon.checkpoint.parameters import (
    LiveState,
    PartitionedParameter,
    bound_engine_of,
    collect,
)
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import warn
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.plan.placement import Placement
from deepspeed_muon.transport.agreement import Scope

RECORD_KEY = "deepspeed_muon_layout"
RECORD_VERSION: Literal[5] = 5
SAVE_KEY = "deepspeed_muon_save"
"""Key of the save's id in a file with a model; in the state of an optimizer the id is in the record."""


# ---- the schema --------------------------------------------------------------------------------------------


class _Group(BaseModel):
    """What a rank's file says of one data-parallel group of the rank.

    Attributes:
        name: The name of the group, equal in the files of all its ranks.
        rank: The rank inside the group whose file it is.
        world_size: Ranks of the group.
        parameters: All parameters, without state, in the file of the group's first rank, and in every file if each rank
            has all.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    rank: Count
    world_size: Annotated[int, Field(ge=1, le=1 << 24, strict=True)]
    parameters: tuple[PartitionedParameter, ...]

    @model_validator(mode="after")
    def _validate(self) -> _Group:
        """Raise if two parameters share a name or elements of a partition, or if a placement is impossible."""
        names: set[str] = set()
        placements_in: dict[int, list[tuple[str, Placement]]] = {}
        for parameter in self.parameters:
            if parameter.name in names:
                raise ValueError(f"two parameters are called {parameter.name}")
            names.add(parameter.name)
            _require_fit(parameter, self.world_size)
            placements_in.setdefault(parameter.partition, []).append((parameter.name, parameter.placement))
        for partition, placements in placements_in.items():
            _refuse_overlaps(partition, placements)
        return self


class LayoutRecord(BaseModel):
    """The record in a rank's file.

    Attributes:
        version: :data:`RECORD_VERSION`.
        save: Random id of the save.
        order: See :func:`order_of`.
        row_order: See :func:`row_order_of`.
        precision: See :func:`precision_of`.
        optimizer: The settings of the optimizer.
        groups: The data-parallel groups of the rank.
        weight_keys: By name of a parameter, the key of its weights in the model's ``state_dict()`` if that is not its
            name. Only at stage 0 in fp32, whose files have the weights nowhere else.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[5] = RECORD_VERSION
    save: str
    order: str
    row_order: str
    precision: str
    optimizer: dict[str, Any]
    groups: tuple[_Group, ...]
    weight_keys: dict[str, str] = {}


def _require_fit(parameter: PartitionedParameter, world_size: int) -> None:
    """Raise unless a placement has all elements of its parameter, on ranks that exist."""
    where, placement = f"parameter {parameter.name}: ", parameter.placement
    tensor_slice = parameter.tensor_slice
    if tensor_slice.shape != parameter.record.shape:
        raise ValueError(f"{where}{tensor_slice} is no slice of shape {list(parameter.record.shape)}")
    numel = math.prod(tensor_slice.local_shape)
    if placement.numel != numel or parameter.partition < 0:
        raise ValueError(f"{where}partition {parameter.partition} has {placement.numel} of {numel} elements")
    if placement.ranks.stop > world_size or placement.replicas not in (0, world_size):
        raise ValueError(f"{where}ranks {placement.ranks} are not those of {world_size}")
    if parameter.record.step or parameter.record.rows or parameter.record.tensors:
        raise ValueError(f"{where}a layout has no state")
    end = 0
    # Fragments of row state follow each other without gaps.
    for rows in parameter.row_fragments:
        if rows.matrix_offset != end or rows.rank >= world_size:
            raise ValueError(f"{where}its row state is not {rows}")
        end += rows.numel
    if end > numel:
        raise ValueError(f"{where}it has {end} rows of {numel} elements")


def _refuse_overlaps(partition: int, placements: Sequence[tuple[str, Placement]]) -> None:
    """Raise if two parameters share elements of a rank's partition.

    Between the ranks at which some placement begins, continues or ends, fragments repeat from rank to rank, so only
    these ranks are compared.
    """
    # Of a placement on ranks 3 to 1000: ranks 3, 4 and 1000. Rank 500 has the offsets of rank 4.
    ranks = sorted({r for _, p in placements for r in (p.ranks.start, p.ranks.start + 1, p.ranks.stop - 1)})
    spans: dict[int, list[tuple[int, int, str]]] = {}  # by rank: start, numel and name
    for name, placement in placements:
        first, stop = (bisect_left(ranks, rank) for rank in (placement.ranks.start, placement.ranks.stop))
        for fragment in filter(None, map(placement.fragment_on, ranks[first:stop])):
            spans.setdefault(fragment.rank, []).append((fragment.partition_offset, fragment.numel, name))
    for rank, spans_on_rank in spans.items():
        end, previous = 0, ""
        for start, numel, name in sorted(spans_on_rank):
            if start < end:
                raise ValueError(f"{previous} and {name} overlap in partition {partition} of rank {rank}")
            end, previous = start + numel, name


# ---- reading -----------------------------------------------------------------------------------------------


def save_of(content: object) -> str | None:
    """Return the id of the save that one of DeepSpeed's files belongs to; ``None`` if another optimizer saved it."""
    if not isinstance(content, Mapping):
        return None
    for key in ("optimizer_state_dict", "base_optimizer_state", "optimizer"):
        # Descend through the wrappers of the optimizer to its state dict.
        if isinstance(content.get(key), Mapping) and SAVE_KEY not in content:
            return save_of(content[key])
    record = content.get(RECORD_KEY)
    save_id = record.get("save") if isinstance(record, Mapping) else content.get(SAVE_KEY)
    return None if save_id is None else str(save_id)


def read_records(
    contents: Sequence[Any], where: str
) -> tuple[dict[str, Any], list[PartitionedParameter], dict[str, str]]:
    """Check the records of all files and return what they describe.

    Args:
        contents: What every file has under :data:`RECORD_KEY`, in the order of the ranks.
        where: The first file, for errors.

    Returns:
        The settings of the optimizer; the parameters, before any step; and, by name, the keys of weights in the model's
        ``state_dict()`` that are not the names of their parameters.

    Raises:
        CheckpointError: If something is not a record, or describes what is impossible.
    """
    first_content = contents[0]
    if isinstance(first_content, Mapping) and "missing" in first_content:
        raise CheckpointError(
            f"{where}: was saved without a record of its layout ({first_content['missing']}): load it with "
            f"engine.load_checkpoint, at the same ZeRO stage and number of ranks"
        )
    is_record = isinstance(first_content, Mapping) and "save" in first_content
    if not is_record or first_content.get("version") != RECORD_VERSION:
        raise CheckpointError(
            f"{where}: its layout record is not of version {RECORD_VERSION}, the only one that this release reads: "
            f"consolidate it with the version of deepspeed_muon that saved it"
        )
    refusal = f"{where}: layout record refused"
    records = [checked(LayoutRecord, content, f"{refusal}:\n") for content in contents]
    # By name of the group and rank inside it: the number of the file, and what it says.
    groups: dict[str, dict[int, tuple[int, _Group]]] = {}
    parameters: list[PartitionedParameter] = []
    with refusing(refusal):
        for number, record in enumerate(records):
            for group in record.groups:
                # Two files of the same rank of a group are of different saves, or one is a copy.
                first_number, _ = groups.setdefault(group.name, {}).setdefault(group.rank, (number, group))
                if first_number != number:
                    raise ValueError(
                        f"files {first_number} and {number} are both of rank {group.rank} of group {group.name}"
                    )
        for name, ranks in groups.items():
            files = tuple(ranks[rank][0] for rank in sorted(ranks))
            _, first = ranks[min(ranks)]
            # At stage 0 every rank has everything, so the first file is enough.
            if first.parameters and all(parameter.placement.replicated for parameter in first.parameters):
                files = files[:1]
            elif sorted(ranks) != list(range(first.world_size)):
                raise ValueError(f"of group {name} there are files of ranks {sorted(ranks)}")
            parameters += [replace(parameter, members=files) for parameter in first.parameters]
    if not parameters:
        raise CheckpointError(f"{refusal}: no parameters")
    weight_keys = {name: key for record in records for name, key in record.weight_keys.items()}
    return records[0].optimizer, parameters, weight_keys


# ---- writing -----------------------------------------------------------------------------------------------


def add_record_to_state_dict(engine: Any) -> None:
    """Make the optimizer of ``engine``, which must be ours, add the record to every state dict that it returns."""
    engine_reference = weakref.ref(engine)  # the optimizer must not keep the engine alive
    has_warned = False

    def add_record(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        nonlocal has_warned
        engine = engine_reference()
        if engine is None:
            return
        optimizer = engine.basic_optimizer
        record = {
            "version": RECORD_VERSION,
            "save": bound_engine_of(optimizer).save_id,
            "order": order_of(optimizer),
            "row_order": row_order_of(optimizer),
            "precision": precision_of(optimizer),
        }
        try:
            record |= record_of(collect(engine))
        except CheckpointError as error:
            # DeepSpeed's own resume works without the record. The reason tells a reader that the state is ours.
            record["missing"] = str(error)
            if not has_warned:
                warn(
                    "deepspeed_muon: the saved optimizer state has no record of its layout: %s. engine.load_checkpoint "
                    "resumes it at the same ZeRO stage and number of ranks; 'checkpoint consolidate' and 'universal' "
                    "cannot read it",
                    error,
                )
            has_warned = True
        state_dict[RECORD_KEY] = record

    engine.basic_optimizer.register_state_dict_post_hook(add_record)


def order_of(optimizer: Muon) -> str:
    """Return a digest of the name, partition and placement of every Muon matrix.

    DeepSpeed's files hold flat partitions without names, which an engine with another order would load into the wrong
    matrices. So the digests are compared before anything is loaded, also if the rest of the record is missing.
    """
    matrices = (matrix for runner in optimizer.runners for matrix in runner.step_set.matrices)
    rows = sorted([m.name, m.partition, m.placement.numbers()] for m in matrices)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def row_order_of(optimizer: Muon) -> str:
    """Return a digest of which rank stores which rows of every Muon matrix; empty for a variant without row state.

    The owners store them. Owners depend on the cost of the iteration (``ns_steps``, ``ns_method``, the kind of device),
    so a run with other settings may have other owners.
    """
    rows = [
        [matrix.name, fragment.rank, fragment.matrix_offset, fragment.partition_offset, fragment.numel]
        for runner in optimizer.runners
        for matrix, fragment in zip(runner.plan.matrices, runner.row_fragments, strict=False)
    ]
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest() if rows else ""


def precision_of(optimizer: Muon) -> str:
    """Return the dtype of the weights that the forward pass uses, such as ``bfloat16``."""
    return str(optimizer.runners[0].step_set.model_dtype).removeprefix("torch.") if optimizer.runners else ""


def record_of(state: LiveState) -> Mapping[str, Any]:
    """Return what this rank's record says of the parameters."""
    if state.bound_engine.save_id is None:
        raise CheckpointError("engine.save_checkpoint did not write it")
    # In the order of the model, which is the same on every rank.
    position = {name: number for number, name in enumerate(state.bound_engine.parameters)}
    groups = []
    for parameters in state.groups:
        group_rank, members = parameters[0].group_rank, parameters[0].members
        group = _Group(
            name=Scope.among(members, group_rank).name,
            rank=group_rank,
            world_size=len(members),
            # The first rank's file is enough, as a placement says what every rank has; but at stage 0 any file may be
            # read alone. The members are left out, since they grow with the ranks: the reader counts the files.
            parameters=tuple(
                replace(parameter.metadata().with_state({}, 0), members=())
                for parameter in sorted(parameters, key=lambda p: position[p.local_name])
                if group_rank == 0 or parameter.placement.replicated
            ),
        )
        groups.append(group.model_dump(mode="json", exclude_defaults=True))
    settings = state.optimizer.config.model_dump(mode="json")
    return {"optimizer": settings, "groups": groups, "weight_keys": _weight_keys(state)}


def _weight_keys(state: LiveState) -> dict[str, str]:
    """Return by name the key of each parameter in the model's ``state_dict()``, if that is not its name.

    A model may override ``state_dict``: a value head around a language model leaves out the latter's prefix. The
    tensors are those of the parameters, so their addresses identify them; copies are assumed to use the names.
    """
    engine = state.bound_engine.engine
    if engine.optimizer is not state.optimizer:  # a wrapper saves masters by number
        return {}
    weights = {
        key: tensor for key, tensor in engine.module.state_dict().items() if isinstance(tensor, Tensor)
    }
    key_by_address = {_address(tensor): key for key, tensor in weights.items()}
    keys = {}
    for parameter in state.parameters.values():
        address = _address(parameter.local_partition.tensor)
        # Experts that have another number in the full model have files of their own, with that number in the keys.
        is_in_weights = parameter.name == parameter.local_name and address in key_by_address
        # A tied weight has several keys, and one of them may be its name.
        if is_in_weights and (parameter.name not in weights or _address(weights[parameter.name]) != address):
            keys[parameter.name] = key_by_address[address]
    return keys


def _address(tensor: Tensor) -> tuple[int, torch.Size]:
    """Return what distinguishes tensors that do not overlap."""
    return tensor.data_ptr(), tensor.shape
