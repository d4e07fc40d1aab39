"""A record of where every parameter lies, inside every optimizer state that DeepSpeed saves.

DeepSpeed's own files do not say where a parameter lies when gradients are dealt round-robin or groups are split, and
at stage 0 they have no names. The record gives the rule of each parameter, a
:class:`~deepspeed_muon.plan.spread.Spread`, so its size does not grow with the number of ranks. The ranks divide the
parameters: each describes some in its own file. The record consists of numbers, strings, lists and dicts, so that torch
loads it with ``weights_only``.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, PrivateAttr, model_validator

from deepspeed_muon.checkpoint.index import Count, InPartitions, ParameterKind, checked, described
from deepspeed_muon.checkpoint.live import LiveState, collect
from deepspeed_muon.checkpoint.sealed import refusing
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import warn
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.rows import RowPlaces, row_places
from deepspeed_muon.plan.spread import Fragment, Places, Spread, spread_of

__all__ = [
    "RECORD_KEY",
    "LayoutRecord",
    "RecordedParameter",
    "add_record_to_state_dict",
    "common_part",
    "read_record",
]

RECORD_KEY = "deepspeed_muon_layout"
RECORD_VERSION = 2
# More blocks than any matrix has: a damaged number must not take memory.
_MOST_BLOCKS = 1 << 20
# Until version 1 every rank's file held the fragments of all parameters on all ranks.
_WITH_FRAGMENTS = 1


def _spread(value: Any) -> Spread:
    if isinstance(value, Spread):
        return value
    if not isinstance(value, (list, tuple)) or [type(number) for number in value] != [int] * 7:
        raise ValueError(f"{value!r} is not seven whole numbers")
    return Spread(*value)


class RecordedParameter(ParameterKind, InPartitions):
    """One parameter of the record.

    Attributes:
        name: Dotted name.
        partition: Index of the flat partition in every rank's file.
        spread: Where it lies; the file has the numbers of the rule.
        rows: Length of NorMuon's ``row_second_moment``; 0 where there is none.
    """

    name: str
    partition: Count
    spread: Annotated[Spread, PlainValidator(_spread)]
    rows: Count = 0
    _row_places: RowPlaces | None = PrivateAttr(None)

    @property
    def row_places(self) -> RowPlaces | None:  # type: ignore[override]
        """Where the row moments lie; known once all parameters of the partition are."""
        return self._row_places

    def matrix(self) -> MatrixLayout:
        """Return the layout of a parameter with row moments.

        Raises:
            ValueError: If its rows do not fit.
        """
        row_blocks, col_blocks = self.grid or ((), ())
        stripes = len(row_blocks) or self.heads
        rows = self.rows
        if self.transposed:
            rows = self.numel * stripes // rows
        cols = self.numel // rows
        if self.grid is None and self.heads > 1:
            row_blocks = (rows // self.heads,) * self.heads
        return MatrixLayout(
            self.name,
            rows,
            cols,
            self.partition,
            self.spread,
            row_blocks=row_blocks,
            col_blocks=col_blocks,
            transposed=self.transposed,
        )


class LayoutRecord(BaseModel):
    """The record of all ranks together, checked: nothing lies in two places, or where something else lies.

    Attributes:
        version: :data:`RECORD_VERSION`, or 1.
        world_size: Ranks over which the parameters are spread.
        optimizer: The settings of the optimizer.
        global_steps: Of the engine; absent from older records.
        parameters: All parameters.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1, 2]
    world_size: Annotated[int, Field(ge=1, le=1 << 24, strict=True)]
    global_steps: Count | None = None
    optimizer: dict[str, Any]
    parameters: Annotated[tuple[RecordedParameter, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> LayoutRecord:
        names: set[str] = set()
        partitions: dict[int, list[tuple[str, Places]]] = {}
        for entry in self.parameters:
            if entry.name in names:
                raise ValueError(f"two parameters are called {entry.name}")
            names.add(entry.name)
            _require_fit(entry, self.world_size)
            partitions.setdefault(entry.partition, []).append((entry.name, entry.spread))
        for partition, members in partitions.items():
            _refuse_overlaps(partition, members)
        with_rows = [entry for entry in self.parameters if entry.rows]
        for entry, places in zip(with_rows, row_places([entry.matrix() for entry in with_rows]), strict=True):
            if places.numel != entry.rows:
                raise ValueError(f"parameter {entry.name}: {entry.rows} row moments do not fit")
            entry._row_places = places
        return self


def _require_fit(entry: RecordedParameter, world_size: int) -> None:
    """Raise unless a parameter has as many elements as its spread, on ranks that exist."""
    where = f"parameter {entry.name}: "
    if entry.spread.numel != entry.numel:
        raise ValueError(f"{where}its spread has {entry.spread.numel} of {entry.numel} elements")
    if entry.spread.ranks.stop > world_size or entry.spread.copies not in (0, world_size):
        raise ValueError(f"{where}ranks {entry.spread.ranks} are not those of {world_size}")
    if entry.rows and (entry.algorithm != "muon" or entry.rows > entry.numel):
        raise ValueError(f"{where}{entry.rows} row moments do not fit")
    if entry.heads > entry.numel:
        raise ValueError(f"{where}{entry.heads} heads do not fit shape {list(entry.shape)}")
    if entry.rows and entry.heads > min(entry.rows, _MOST_BLOCKS):
        raise ValueError(f"{where}{entry.heads} blocks do not fit {entry.rows} row moments")


def _refuse_overlaps(partition: int, members: Sequence[tuple[str, Places]]) -> None:
    """Raise if two parameters share elements of a rank's partition.

    Between the ranks where a spread begins, goes on and ends, all fragments are alike, so these ranks stand for all.
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


def common_part(content: Any) -> Any:
    """Return what the files of all ranks of one save have in common of what they hold under :data:`RECORD_KEY`."""
    if not isinstance(content, Mapping) or content.get("version") != RECORD_VERSION:
        return content
    return {key: value for key, value in content.items() if key != "parameters"}


def read_record(contents: Sequence[Any], where: str) -> LayoutRecord:
    """Check what the files hold under :data:`RECORD_KEY`.

    Args:
        contents: What every rank's file holds, in the order of the ranks.
        where: The first file, for errors.

    Raises:
        CheckpointError: If it is no record, or describes what cannot be.
    """
    content = contents[0]
    version = content.get("version") if isinstance(content, Mapping) else content
    if not isinstance(content, Mapping) or version not in (_WITH_FRAGMENTS, RECORD_VERSION):
        raise CheckpointError(f"{where}: layout record of version {version!r}")
    if "missing" in content:
        raise CheckpointError(
            f"{where}: was saved without a record of its layout ({content['missing']}): load it with "
            f"engine.load_checkpoint, at the same ZeRO stage and number of ranks"
        )
    with refusing(f"{where}: layout record refused"):
        whole = _from_fragments(content) if version == _WITH_FRAGMENTS else _put_together(contents)
    return checked(LayoutRecord, whole, f"{where}: layout record refused:\n")


def _put_together(contents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the record with the parameters of all ranks' parts, which were dealt to them one by one."""
    dealt = zip_longest(*(each["parameters"] for each in contents))
    entries = [entry for turn in dealt for entry in turn if entry is not None]
    if _digest(entries) != contents[0]["digest"]:
        raise ValueError(
            f"its parts, {len(entries)} parameters in {len(contents)} files, are not those that were saved"
        )
    return {**_without(contents[0], "digest"), "parameters": entries}


def _without(content: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in keys}


def _digest(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return a checksum of the parameters, whichever file each is in."""
    found = hashlib.sha256()
    for text in sorted(json.dumps(entry, sort_keys=True) for entry in entries):
        found.update(text.encode())
    return found.hexdigest()


def _from_fragments(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of version 1 with rules in place of its lists of fragments."""
    entries = []
    for entry in content["parameters"]:
        if not isinstance(entry["replicated"], bool):
            raise ValueError(f"replicated is {entry['replicated']!r}")
        spread = spread_of([Fragment(*f) for f in entry["fragments"]], replicated=entry["replicated"])
        rows = max((row[1] + row[3] for row in entry.get("rows", ())), default=0)
        kept = _without(entry, "fragments", "replicated", "rows")
        entries.append({**kept, "spread": spread.numbers(), "rows": rows})
    return {**content, "parameters": entries}


def add_record_to_state_dict(engine: Any) -> None:
    """Let the optimizer of ``engine``, which must be ours, add the record to every state dict that it returns."""
    engine.basic_optimizer.register_state_dict_post_hook(_RecordHook(engine))


class _RecordHook:
    """Adds the record to a state dict. It refers to the engine weakly: the optimizer must not keep it alive."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self._warned = False

    def __call__(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        engine = self._engine()
        if engine is None:
            return
        try:
            state_dict[RECORD_KEY] = _record(collect(engine))
        except CheckpointError as error:
            # DeepSpeed's own resume works without the record. A reader must learn why there is none, or it would take
            # the state for that of another optimizer.
            state_dict[RECORD_KEY] = {"version": RECORD_VERSION, "missing": str(error)}
            if not self._warned:
                warn(
                    "deepspeed_muon: the saved optimizer state has no record of its layout: %s. engine.load_checkpoint "
                    "resumes it at the same ZeRO stage and number of ranks; 'checkpoint consolidate' and 'universal' "
                    "cannot read it",
                    error,
                )
            self._warned = True


def _record(state: LiveState) -> Mapping[str, Any]:
    order = {route.name: number for number, route in enumerate(state.optimizer.routes)}
    parameters = sorted(state.parameters, key=lambda parameter: order[parameter.route.name])
    entries = [
        {
            "name": parameter.route.name,
            **described(parameter.route),
            "partition": parameter.partition.index,
            "group": parameter.group,
            "spread": parameter.spread.numbers(),
            "rows": parameter.row_count,
        }
        for parameter in parameters
    ]
    # Where every rank holds everything, only one of them writes a file.
    in_one_file = all(parameter.spread.replicated for parameter in parameters)
    return {
        "version": RECORD_VERSION,
        "world_size": state.world_size,
        "global_steps": state.host.counters()["global_steps"],
        "optimizer": state.optimizer.config.model_dump(mode="json"),
        "digest": _digest(entries),
        "parameters": entries if in_one_file else entries[state.rank :: state.world_size],
    }
