"""A record of the placement of every parameter, inside every optimizer state that DeepSpeed saves.

DeepSpeed's own files do not tell where a parameter is under round-robin gradients or split groups, and at stage 0 they
have no names. The record gives the rule of each parameter, a
:class:`~deepspeed_muon.plan.placement.Placement`, so its size does not grow with the number of ranks. A file has a
record for each data-parallel group of its rank. The ranks of a group divide its parameters: each describes some in its
own file, with the part of the whole tensor that it is. The record consists of numbers, strings, lists
and dicts, so that torch loads it with ``weights_only``.

Every save has a random id, which is in each rank's files: files of two saves are not read together, even if both are of
the same step.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from deepspeed_muon.checkpoint.index import Count, Dimension, ParameterRecord, checked
from deepspeed_muon.checkpoint.live import LiveParameter, LiveState, collect
from deepspeed_muon.checkpoint.parts import HeldParameter
from deepspeed_muon.checkpoint.sealed import refusing
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import warn
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.placement import Placement, Places
from deepspeed_muon.plan.rows import RowPlaces, row_places
from deepspeed_muon.plan.slices import TensorSlice, whole_slice
from deepspeed_muon.transport.agreement import Scope

RECORD_KEY = "deepspeed_muon_layout"
RECORD_VERSION = 1
SAVE_KEY = "deepspeed_muon_save"
"""Where a file with a model has the id of its save; in the state of an optimizer it is in the record."""
# More blocks than any matrix has: a damaged number must not take memory.
_MOST_BLOCKS = 1 << 20


class _Whole(BaseModel):
    """The whole tensor of an entry whose parameter is a part of it.

    Attributes:
        shape: Of the whole tensor.
        dim: The dimension that is cut.
        ranges: As :class:`~deepspeed_muon.plan.slices.TensorSlice` has them.
        heads: Blocks of the whole tensor.
        grid: Their rows and columns, see :class:`~deepspeed_muon.checkpoint.index.ParameterRecord`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: Annotated[tuple[Dimension, ...], Field(min_length=1, max_length=64)]
    dim: Count
    ranges: Annotated[tuple[tuple[Count, Count], ...], Field(min_length=1)]
    heads: Dimension = 1
    grid: tuple[tuple[Dimension, ...], tuple[Dimension, ...]] | None = None


class _Entry(ParameterRecord):
    """One parameter of the record, as the ranks of the group hold it.

    Attributes:
        name: Dotted name of the whole tensor.
        partition: Index of the flat partition in every rank's file.
        spread: The numbers of its :attr:`placement`.
        whole: Which part of the whole tensor it is; ``None`` for all of it.
    """

    name: str
    partition: Count
    spread: Annotated[tuple[Count, ...], Field(min_length=7, max_length=7)]
    whole: _Whole | None = None

    @property
    def placement(self) -> Placement:
        """Where its elements are; raises a ValueError if they cannot be there."""
        return Placement(*self.spread)

    @property
    def part(self) -> TensorSlice:
        """Which part of the whole tensor it is; raises a ValueError if it is none."""
        if self.whole is None:
            return whole_slice(self.name, self.shape)
        return TensorSlice(self.name, self.whole.shape, self.whole.dim, self.whole.ranges)

    def matrix(self) -> MatrixLayout:
        """Return the layout of a parameter with rows; raises a ValueError if they do not fit."""
        row_blocks, col_blocks = self.grid or ((), ())
        if self.transposed:
            stripes = len(row_blocks) or self.heads
            rows = self.numel * stripes // self.rows
        else:
            rows = self.rows // (len(col_blocks) or 1)
        cols = self.numel // rows
        if self.grid is None and self.heads > 1:
            row_blocks = (rows // self.heads,) * self.heads
        return MatrixLayout(
            self.name,
            rows,
            cols,
            self.partition,
            self.placement,
            row_blocks=row_blocks,
            col_blocks=col_blocks,
            transposed=self.transposed,
        )

    def held(self, rows: RowPlaces | None, files: tuple[int, ...]) -> HeldParameter:
        """Return what the files hold of it, before any step; the record has no rows yet."""
        whole = {} if self.whole is None else self.whole.model_dump(exclude={"dim", "ranges"})
        record = ParameterRecord.of(self, group=self.group, **whole)
        return HeldParameter(record, self.part, self.placement, rows, files, self.partition)


class LayoutRecord(BaseModel):
    """The record of a data-parallel group, checked: no two parameters share an element of a partition.

    Attributes:
        world_size: Ranks over which the parameters are spread.
        optimizer: The settings of the optimizer.
        parameters: All parameters.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    world_size: Annotated[int, Field(ge=1, le=1 << 24, strict=True)]
    optimizer: dict[str, Any]
    parameters: Annotated[tuple[_Entry, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> LayoutRecord:
        names: set[str] = set()
        partitions: dict[int, list[tuple[str, Places]]] = {}
        for entry in self.parameters:
            if entry.name in names:
                raise ValueError(f"two parameters are called {entry.name}")
            names.add(entry.name)
            _require_fit(entry, self.world_size)
            partitions.setdefault(entry.partition, []).append((entry.name, entry.placement))
        for partition, members in partitions.items():
            _refuse_overlaps(partition, members)
        places = self._row_places()
        for entry in self.parameters:
            if entry.rows and entry.rows != places[entry.name].numel:
                raise ValueError(f"parameter {entry.name}: {entry.rows} row moments do not fit")
        return self

    def _row_places(self) -> dict[str, RowPlaces]:
        places = row_places([entry.matrix() for entry in self.parameters if entry.rows])
        return {each.matrix.name: each for each in places}

    def held(self, files: Sequence[int]) -> list[HeldParameter]:
        """Return what the files of the group's ranks hold of each parameter, before any step."""
        rows, holders = self._row_places(), tuple(files)
        return [entry.held(rows.get(entry.name), holders) for entry in self.parameters]


def _require_fit(entry: _Entry, world_size: int) -> None:
    """Raise unless a parameter has as many elements as its placement, on ranks that exist."""
    where = f"parameter {entry.name}: "
    if entry.part.own_shape != entry.shape:
        raise ValueError(f"{where}shape {list(entry.shape)} is not that of its part {entry.whole}")
    placement = entry.placement
    if placement.numel != entry.numel:
        raise ValueError(f"{where}its placement has {placement.numel} of {entry.numel} elements")
    if placement.ranks.stop > world_size or placement.copies not in (0, world_size):
        raise ValueError(f"{where}ranks {placement.ranks} are not those of {world_size}")
    if entry.rows and entry.heads > min(entry.rows, _MOST_BLOCKS):
        raise ValueError(f"{where}{entry.heads} blocks do not fit {entry.rows} row moments")


def _refuse_overlaps(partition: int, members: Sequence[tuple[str, Places]]) -> None:
    """Raise if two parameters share elements of a rank's partition.

    Between the ranks where a placement begins, goes on and ends, all fragments are alike, so these ranks stand for all.
    """
    every = {rank for _, p in members for rank in (p.ranks.start, p.ranks.start + 1, p.ranks.stop - 1)}
    looked_at = sorted(every)
    taken: dict[int, list[tuple[int, int, str]]] = {}
    for name, places in members:
        first, last = (
            bisect_left(looked_at, places.ranks.start),
            bisect_right(looked_at, places.ranks.stop - 1),
        )
        for fragment in filter(None, map(places.on, looked_at[first:last])):
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


def read_records(contents: Sequence[Any], where: str) -> list[tuple[LayoutRecord, list[int]]]:
    """Check what the files hold under :data:`RECORD_KEY`, for each data-parallel group.

    Args:
        contents: What every file holds, in the order of the ranks.
        where: The first file, for errors.

    Returns:
        The record of each group, and the numbers of its ranks' files.

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
            f"load it with engine.load_checkpoint, at the same ZeRO stage and number of ranks, and save it again"
        )
    groups: dict[str, dict[int, tuple[int, Mapping[str, Any]]]] = {}
    found = []
    with refusing(f"{where}: layout record refused"):
        for number, each in enumerate(contents):
            for group in each["groups"]:
                name, rank = group["name"], group["rank"]
                other, _ = groups.setdefault(name, {}).setdefault(rank, (number, group))
                if other != number:
                    raise ValueError(f"files {other} and {number} are both of rank {rank} of group {name}")
        for name, ranks in groups.items():
            numbers = [ranks[rank][0] for rank in sorted(ranks)]
            parts = [ranks[rank][1] for rank in sorted(ranks)]
            if all(entry["spread"][-1] for entry in parts[0]["parameters"]):
                # At stage 0 each file describes and holds all of it.
                numbers, parts = numbers[:1], parts[:1]
            elif sorted(ranks) != list(range(parts[0]["world_size"])):
                raise ValueError(f"of group {name} there are files of ranks {sorted(ranks)}")
            # The parameters were dealt to the ranks one by one.
            dealt = zip_longest(*(part["parameters"] for part in parts))
            whole = {
                "world_size": parts[0]["world_size"],
                "optimizer": content["optimizer"],
                "parameters": [entry for turn in dealt for entry in turn if entry is not None],
            }
            found.append((checked(LayoutRecord, whole, f"{where}: layout record refused:\n"), numbers))
    return found


def add_record_to_state_dict(engine: Any) -> None:
    """Let the optimizer of ``engine``, which must be ours, add the record to every state dict that it returns."""
    reference = weakref.ref(engine)  # the optimizer must not keep the engine alive
    warned = False

    def add_record(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        nonlocal warned
        live = reference()
        if live is None:
            return
        try:
            state_dict[RECORD_KEY] = record_of(collect(live))
        except CheckpointError as error:
            # DeepSpeed's own resume works without the record. Without the reason a reader would take the state for that
            # of another optimizer.
            save_id = live.basic_optimizer.host.save_id
            state_dict[RECORD_KEY] = {"version": RECORD_VERSION, "save": save_id, "missing": str(error)}
            if not warned:
                warn(
                    "deepspeed_muon: the saved optimizer state has no record of its layout: %s. engine.load_checkpoint "
                    "resumes it at the same ZeRO stage and number of ranks; 'checkpoint consolidate' and 'universal' "
                    "cannot read it",
                    error,
                )
            warned = True

    engine.basic_optimizer.register_state_dict_post_hook(add_record)


def record_of(state: LiveState) -> Mapping[str, Any]:
    """Return this rank's part of the record."""
    if state.host.save_id is None:
        raise CheckpointError("engine.save_checkpoint did not write it")
    return {
        "version": RECORD_VERSION,
        "save": state.host.save_id,
        "optimizer": state.optimizer.config.model_dump(mode="json"),
        "groups": [_record_of_group(state, held) for held in state.groups],
    }


def _record_of_group(state: LiveState, held: Sequence[LiveParameter]) -> dict[str, Any]:
    """Return this rank's part of the record of one data-parallel group."""
    order = {route.name: number for number, route in enumerate(state.optimizer.routes)}
    entries = [_entry(each) for each in sorted(held, key=lambda each: order[each.route.name])]
    first = held[0]
    # Where every rank holds everything, only one of them writes a file.
    in_one_file = all(each.placement.replicated for each in held)
    return {
        "name": Scope.among(first.holders, first.rank).name,
        "rank": first.rank,
        "world_size": len(first.holders),
        "parameters": entries if in_one_file else entries[first.rank :: len(first.holders)],
    }


def _entry(parameter: LiveParameter) -> dict[str, Any]:
    own = ParameterRecord.of(parameter.route, group=parameter.record.group, rows=parameter.row_count)
    entry = {
        "name": parameter.name,
        **own.model_dump(mode="json", exclude_defaults=True),
        "partition": parameter.partition,
        "spread": parameter.placement.numbers(),
    }
    if not parameter.part.is_whole:
        kept = {"shape", "heads", "grid"}
        whole = parameter.record.model_dump(mode="json", include=kept, exclude_defaults=True)
        entry["whole"] = {
            **whole,
            "dim": parameter.part.dim,
            "ranges": list(map(list, parameter.part.ranges)),
        }
    return entry
