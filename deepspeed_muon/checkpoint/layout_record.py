"""A record of which rank holds which fragment, inside every optimizer state that DeepSpeed saves.

DeepSpeed's own files do not say where a parameter lies when gradients are dealt round-robin or groups are split, and
at stage 0 they have no names. The record consists of numbers, strings, lists and dicts, so that torch loads it with
``weights_only``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from deepspeed_muon.checkpoint.index import Count, InFragments, ParameterKind, checked, described
from deepspeed_muon.checkpoint.live import LiveState, collect
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import warn
from deepspeed_muon.plan.layout import Fragment

__all__ = ["RECORD_KEY", "LayoutRecord", "RecordedParameter", "add_record_to_state_dict", "read_record"]

RECORD_KEY = "deepspeed_muon_layout"
RECORD_VERSION = 1


def _fragment(value: Any) -> Fragment:
    """Return a fragment, which the file has as rank, offset in the parameter, offset in the partition, length."""
    if isinstance(value, Fragment):
        return value
    if not isinstance(value, (list, tuple)) or [type(number) for number in value] != [int] * 4:
        raise ValueError(f"{value!r} is not four whole numbers")
    return Fragment(*value)


def _numbers(fragments: Iterable[Fragment]) -> list[list[int]]:
    return [[f.rank, f.matrix_offset, f.partition_offset, f.numel] for f in fragments]


_Fragments = tuple[Annotated[Fragment, PlainValidator(_fragment)], ...]


class RecordedParameter(ParameterKind, InFragments):
    """One parameter of the record.

    Attributes:
        name: Dotted name.
        partition: Index of the flat partition in every rank's file.
        replicated: Whether every rank holds all of it.
    """

    name: str
    partition: Count
    replicated: Annotated[bool, Field(strict=True)]
    fragments: _Fragments
    rows: _Fragments = ()


class LayoutRecord(BaseModel):
    """The record, checked: every element of every parameter is in exactly one place on every rank that has it.

    Attributes:
        version: Always :data:`RECORD_VERSION`.
        world_size: Ranks that the fragments speak of.
        optimizer: The settings of the optimizer.
        global_steps: Of the engine; absent from older records.
        parameters: All parameters.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1]
    world_size: Annotated[int, Field(ge=1, le=1 << 24, strict=True)]
    global_steps: Count | None = None
    optimizer: dict[str, Any]
    parameters: Annotated[tuple[RecordedParameter, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _covers(self) -> LayoutRecord:
        names: set[str] = set()
        taken: dict[tuple[str, int, int], list[tuple[int, int, str]]] = {}
        for entry in self.parameters:
            if entry.name in names:
                raise ValueError(f"two parameters are called {entry.name}")
            names.add(entry.name)
            where = f"parameter {entry.name}: "
            if entry.replicated and len(entry.fragments) != self.world_size:
                raise ValueError(f"{where}not on each of {self.world_size} ranks")
            copies = range(self.world_size) if entry.replicated else (None,)
            _require_cover(f"{where}its fragments", entry.fragments, entry.numel, copies)
            if entry.rows:
                if entry.algorithm != "muon" or entry.row_count > entry.numel:
                    raise ValueError(f"{where}{entry.row_count} row moments do not fit")
                _require_cover(f"{where}its row moments", entry.rows, entry.row_count, copies)
            for kind, held in (("fragments", entry.fragments), ("rows", entry.rows)):
                for f in held:
                    if f.rank >= self.world_size:
                        raise ValueError(f"{where}rank {f.rank} is none of {self.world_size}")
                    places = taken.setdefault((kind, entry.partition, f.rank), [])
                    places.append((f.partition_offset, f.numel, entry.name))
        for (_, partition, rank), places in taken.items():
            end, last = 0, ""
            for start, numel, name in sorted(places):
                if start < end:
                    raise ValueError(f"{last} and {name} overlap in partition {partition} of rank {rank}")
                end, last = start + numel, name
        return self


def _require_cover(
    what: str, fragments: Iterable[Fragment], numel: int, copies: Iterable[int | None]
) -> None:
    """Raise unless the fragments hold each of ``numel`` elements once, or once on each of the ranks ``copies``."""
    found: dict[int | None, list[tuple[int, int]]] = {copy: [] for copy in copies}
    for fragment in fragments:
        copy = None if None in found else fragment.rank
        if copy not in found:
            raise ValueError(f"{what} name rank {fragment.rank}, which does not exist")
        found[copy].append((fragment.matrix_offset, fragment.numel))
    for copy, pieces in found.items():
        end = 0
        for start, length in sorted(pieces):
            if start != end:
                raise ValueError(
                    f"{what} {'leave out' if start > end else 'repeat'} elements at {min(start, end)}"
                )
            end += length
        if end != numel:
            on = "" if copy is None else f" on rank {copy}"
            raise ValueError(f"{what} hold {end} of {numel} elements{on}")


def read_record(content: Any, where: str) -> LayoutRecord:
    """Check what the file ``where`` holds under :data:`RECORD_KEY`.

    Raises:
        CheckpointError: If it is no record, or describes what cannot be.
    """
    if not isinstance(content, Mapping) or content.get("version") != RECORD_VERSION:
        version = content.get("version") if isinstance(content, Mapping) else content
        raise CheckpointError(f"{where}: layout record of version {version!r}")
    if "missing" in content:
        raise CheckpointError(
            f"{where}: was saved without a record of its layout ({content['missing']}): load it with "
            f"engine.load_checkpoint, at the same ZeRO stage and number of ranks"
        )
    return checked(LayoutRecord, content, f"{where}: layout record refused:\n")


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
    return {
        "version": RECORD_VERSION,
        "world_size": state.world_size,
        "global_steps": state.host.counters()["global_steps"],
        "optimizer": state.optimizer.config.model_dump(mode="json"),
        "parameters": [
            {
                "name": parameter.route.name,
                **described(parameter.route),
                "partition": parameter.partition.index,
                "group": parameter.group,
                "replicated": parameter.replicated,
                "fragments": _numbers(parameter.fragments),
                "rows": _numbers(parameter.rows),
            }
            for parameter in parameters
        ],
    }
