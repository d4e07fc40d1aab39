"""A record of where every parameter lies, inside every optimizer state that DeepSpeed saves.

DeepSpeed's own files do not say where a parameter lies when gradients are dealt round-robin or groups are split, and
at stage 0 they have no names. The record gives the rule of each parameter, a
:class:`~deepspeed_muon.plan.spread.Spread`, so its size does not grow with the number of ranks. A file has a record for
each data-parallel group of its rank. The ranks of a group divide its parameters: each describes some in its own file,
and each parameter says which part of the whole tensor it is. The record consists of numbers, strings, lists and dicts,
so that torch loads it with ``weights_only``.

Every save has a random id, which is in each rank's files: files of two saves are not read together, even if both are of
the same step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, PrivateAttr, model_validator

from deepspeed_muon.checkpoint.index import Count, Dimension, InPartitions, ParameterKind, checked
from deepspeed_muon.checkpoint.sealed import refusing
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.rows import RowPlaces, row_places
from deepspeed_muon.plan.slices import TensorSlice, whole_slice
from deepspeed_muon.plan.spread import Places, Spread

RECORD_KEY = "deepspeed_muon_layout"
RECORD_VERSION = 1
SAVE_KEY = "deepspeed_muon_save"
"""Where a file with a model has the id of its save; in the state of an optimizer it is in the record."""
# More blocks than any matrix has: a damaged number must not take memory.
_MOST_BLOCKS = 1 << 20


def _spread(value: Any) -> Spread:
    if isinstance(value, Spread):
        return value
    if not isinstance(value, (list, tuple)) or [type(number) for number in value] != [int] * 7:
        raise ValueError(f"{value!r} is not seven whole numbers")
    return Spread(*value)


class RecordedPart(BaseModel):
    """Which part of a whole tensor a parameter is, where it is not all of it.

    Attributes:
        shape: Of the whole tensor.
        dim: The dimension that is cut.
        ranges: As :class:`~deepspeed_muon.plan.slices.TensorSlice` has them.
        heads: Blocks of the whole tensor.
        grid: Their rows and columns, see :class:`~deepspeed_muon.checkpoint.index.ParameterKind`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: Annotated[tuple[Dimension, ...], Field(min_length=1, max_length=64)]
    dim: Count
    ranges: Annotated[tuple[tuple[Count, Count], ...], Field(min_length=1)]
    heads: Dimension = 1
    grid: tuple[tuple[Dimension, ...], tuple[Dimension, ...]] | None = None


class RecordedParameter(ParameterKind, InPartitions):
    """One parameter of the record.

    Attributes:
        name: Dotted name of the whole tensor.
        partition: Index of the flat partition in every rank's file.
        spread: Where it lies; the file has the numbers of the rule.
        rows: Length of NorMuon's ``row_second_moment``; 0 where there is none.
        whole: Which part of the whole tensor it is; ``None`` for all of it.
    """

    name: str
    partition: Count
    spread: Annotated[Spread, PlainValidator(_spread)]
    rows: Count = 0
    whole: RecordedPart | None = None
    _row_places: RowPlaces | None = PrivateAttr(None)

    @property
    def part(self) -> TensorSlice:  # type: ignore[override]
        """Which part of the whole tensor it is.

        Raises:
            ValueError: If it is none.
        """
        if self.whole is None:
            return whole_slice(self.name, self.shape)
        return TensorSlice(self.name, self.whole.shape, self.whole.dim, self.whole.ranges)

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
            self.spread,
            row_blocks=row_blocks,
            col_blocks=col_blocks,
            transposed=self.transposed,
        )


class LayoutRecord(BaseModel):
    """The record of a data-parallel group, checked: nothing lies in two places, or where something else lies.

    Attributes:
        world_size: Ranks over which the parameters are spread.
        optimizer: The settings of the optimizer.
        parameters: All parameters.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    world_size: Annotated[int, Field(ge=1, le=1 << 24, strict=True)]
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
    if entry.part.own_shape != entry.shape:
        raise ValueError(f"{where}shape {list(entry.shape)} is not that of its part {entry.whole}")
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
    files: dict[str, dict[int, int]] = {}
    members: dict[tuple[int, str], Mapping[str, Any]] = {}
    found = []
    with refusing(f"{where}: layout record refused"):
        for number, each in enumerate(contents):
            for group in each["groups"]:
                name, rank = group["name"], group["rank"]
                if not isinstance(name, str) or files.setdefault(name, {}).setdefault(rank, number) != number:
                    raise ValueError(
                        f"files {files[name][rank]} and {number} are both of rank {rank} of group {name}"
                    )
                members[number, name] = group
        for name, ranks in files.items():
            numbers = [ranks[rank] for rank in sorted(ranks)]
            parts = [members[number, name] for number in numbers]
            if all(entry["spread"][-1] for entry in parts[0]["parameters"]):
                # At stage 0 each file that there is says and holds all of it.
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
