"""Adds the record of :mod:`deepspeed_muon.checkpoint.layout_record` to every optimizer state that DeepSpeed saves."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed_muon.checkpoint.index import described
from deepspeed_muon.checkpoint.layout_record import RECORD_KEY, RECORD_VERSION
from deepspeed_muon.checkpoint.live import LiveParameter, LiveState, collect
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import warn
from deepspeed_muon.transport.agreement import Scope


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
            state_dict[RECORD_KEY] = record_of(collect(engine))
        except CheckpointError as error:
            # DeepSpeed's own resume works without the record. A reader must learn why there is none, or it would take
            # the state for that of another optimizer.
            state_dict[RECORD_KEY] = {
                "version": RECORD_VERSION,
                "save": engine.basic_optimizer.host.save_id,
                "missing": str(error),
            }
            if not self._warned:
                warn(
                    "deepspeed_muon: the saved optimizer state has no record of its layout: %s. engine.load_checkpoint "
                    "resumes it at the same ZeRO stage and number of ranks; 'checkpoint consolidate' and 'universal' "
                    "cannot read it",
                    error,
                )
            self._warned = True


def record_of(state: LiveState) -> Mapping[str, Any]:
    """Return what this rank's file says of the layout."""
    if state.host.save_id is None:
        raise CheckpointError("engine.save_checkpoint did not write it")
    return {
        "version": RECORD_VERSION,
        "save": state.host.save_id,
        "optimizer": state.optimizer.config.model_dump(mode="json"),
        "groups": [_record_of_group(state, held) for held in state.groups],
    }


def _record_of_group(state: LiveState, held: Sequence[LiveParameter]) -> dict[str, Any]:
    """Return what this rank's file says of the parameters of one data-parallel group."""
    order = {route.name: number for number, route in enumerate(state.optimizer.routes)}
    entries = [_entry(each) for each in sorted(held, key=lambda each: order[each.route.name])]
    first = held[0]
    # Where every rank holds everything, only one of them writes a file.
    in_one_file = all(each.spread.replicated for each in held)
    return {
        "name": Scope.among(first.ranks, first.rank).name,
        "rank": first.rank,
        "world_size": len(first.ranks),
        "parameters": entries if in_one_file else entries[first.rank :: len(first.ranks)],
    }


def _entry(parameter: LiveParameter) -> dict[str, Any]:
    entry = {
        "name": parameter.name,
        **described(parameter.route),
        "partition": parameter.partition.index,
        "group": parameter.group,
        "spread": parameter.spread.numbers(),
        "rows": parameter.row_count,
    }
    if not parameter.part.is_whole:
        whole = described(parameter.whole)
        part = {"dim": parameter.part.dim, "ranges": [list(each) for each in parameter.part.ranges]}
        entry["whole"] = {**{key: whole[key] for key in ("shape", "heads", "grid")}, **part}
    return entry
