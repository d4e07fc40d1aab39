"""Load full parameters and state into a running engine, whatever its ZeRO stage and number of ranks.

Everything that can be wrong is checked first, by all ranks together, and only then is anything changed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_muon.checkpoint.index import INDEX_NAME, STATE_KEYS, ParameterRecord
from deepspeed_muon.checkpoint.live import (
    LiveParameter,
    LiveState,
    collect,
    write_progress,
)
from deepspeed_muon.checkpoint.sources import ConsolidatedSource, StateSource
from deepspeed_muon.config import GROUP_KEYS
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.pipelines import is_divided
from deepspeed_muon.plan.layout import Fragment
from deepspeed_muon.plan.rows import ROW_STATE_KEY
from deepspeed_muon.transport.agreement import Claim, agree
from deepspeed_muon.zero.checkpointing import refresh_low_precision

__all__ = ["CONSOLIDATED_FOLDER", "restore", "restore_from_source"]

logger = logging.getLogger("deepspeed_muon")

CONSOLIDATED_FOLDER = "muon_consolidated"
"""Where ``consolidate_on_save`` writes, inside the folder of DeepSpeed's tag."""

# What a scheduler or the user changes in the course of a run. The algorithm itself belongs to the model.
_RESTORED_SETTINGS = (GROUP_KEYS - {"muon_lr", "adam_lr", "muon_weight_decay", "adam_weight_decay"}) | {
    "initial_lr",
    "lr_ratio",
}


def restore(
    engine: Any, folder: str | os.PathLike[str], *, hyperparameters: bool = True, progress: bool = True
) -> Path:
    """Continue from a consolidated checkpoint, at any ZeRO stage and on any number of ranks.

    Must be called by all ranks, before or between steps. Masters, momentum and moments become exactly what was saved,
    and the weights of the forward pass their rounding. Everything is checked before anything is changed.

    Args:
        engine: A ``DeepSpeedEngine`` with our optimizer.
        folder: A consolidated checkpoint, or a DeepSpeed checkpoint (its folder or its tag's folder) that was saved
            with ``consolidate_on_save``.
        hyperparameters: Take rates and other settings of the param groups from the checkpoint, as
            ``engine.load_checkpoint`` does; otherwise those of the configuration stay.
        progress: Restore step counters, scheduler and loss scale too.

    Returns:
        The folder that was read.

    Raises:
        CheckpointError: On every rank, naming file and parameter, if the checkpoint is damaged, incomplete, refused
            or of another model. The engine is unchanged then.
    """
    found: Path | None = None
    error: Exception | None = None
    source: StateSource | None = None
    try:
        found = find_consolidated(Path(folder))
        source = ConsolidatedSource(found)
    except Exception as caught:
        error = caught
    restore_from_source(engine, source, hyperparameters=hyperparameters, progress=progress, error=error)
    assert found is not None
    return found


def find_consolidated(folder: Path) -> Path:
    """Return the folder with the index: ``folder`` itself, or inside a DeepSpeed checkpoint.

    Raises:
        CheckpointError: If there is none.
    """
    candidates = [folder, folder / CONSOLIDATED_FOLDER]
    try:
        tag = (folder / "latest").read_text().strip()
        if tag and Path(tag).name == tag:
            candidates.append(folder / tag / CONSOLIDATED_FOLDER)
    except OSError:
        pass
    for candidate in candidates:
        if (candidate / INDEX_NAME).is_file():
            return candidate
    raise CheckpointError(
        f"{folder}: no {INDEX_NAME} there, nor in {', '.join(map(str, candidates[1:]))}: not a consolidated "
        f"checkpoint, or its save did not finish"
    )


def restore_from_source(
    engine: Any,
    source: StateSource | None,
    *,
    hyperparameters: bool = True,
    progress: bool = True,
    state_too: bool = True,
    error: Exception | None = None,
) -> None:
    """Check a source against the engine on all ranks, then fill the engine from it.

    Args:
        engine: A ``DeepSpeedEngine`` with our optimizer.
        source: Where to read from; closed in any case. ``None`` if this rank could not open it.
        hyperparameters: See :func:`restore`.
        progress: See :func:`restore`.
        state_too: Load momentum and moments, not the masters alone.
        error: Why ``source`` could not be opened.

    Raises:
        CheckpointError: See :func:`restore`.
    """
    claim = Claim({})
    state: LiveState | None = None
    try:
        if error is None:
            assert source is not None
            state = collect(engine)
            _compare(state, source, state_too)
            rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
            source.verify(rank, size)
            claim = Claim({"checkpoint": source.digest()})
    except Exception as caught:
        error = caught
    try:
        if error is not None:
            claim = Claim({}, failure=f"{type(error).__name__}: {error}")
        agree(claim, error=error, kind=CheckpointError)
        assert source is not None and state is not None
        _fill(state, source, hyperparameters=hyperparameters, progress=progress, state_too=state_too)
    finally:
        if source is not None:
            source.close()


def _compare(state: LiveState, source: StateSource, state_too: bool) -> None:
    """Raise if the checkpoint is not one of this model, with every parameter that differs."""
    live, saved = state.by_name, source.parameters
    problems = []
    missing = [name for name in live if name not in saved]
    # A stage of a pipeline has a part of the model; what the other stages have is no fault.
    extra = [] if is_divided(state.engine.module) else [name for name in saved if name not in live]
    for name in missing:
        twin = next((other for other in extra if saved[other].shape == live[name].route.shape), None)
        hint = f" (renamed? it has {twin} of the same shape)" if twin else ""
        problems.append(f"parameter {name} is not in the checkpoint{hint}")
    problems += [f"parameter {name} is in the checkpoint, but not in the optimizer" for name in extra]
    for name in live.keys() & saved.keys():
        problems += _differences(live[name], saved[name], state_too)
    if problems:
        more = f"\nand {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(
            f"{source.where} is not a checkpoint of this model:\n" + "\n".join(sorted(problems)[:20]) + more
        )


def _differences(parameter: LiveParameter, record: ParameterRecord, state_too: bool) -> list[str]:
    route, file = parameter.route, record.tensors["fp32"]
    if record.shape != tuple(route.shape):
        return [
            f"parameter {route.name} has shape {list(route.shape)}, in the checkpoint {list(record.shape)} ({file})"
        ]
    if state_too and record.algorithm != route.algorithm:
        return [
            f"parameter {route.name} goes to {route.algorithm} ({route.reason}), in the checkpoint to "
            f"{record.algorithm} ({file}); set include / exclude in optimizer.params as the saved run did"
        ]
    if state_too and record.rows and parameter.rows and record.rows != parameter.row_count:
        return [
            f"parameter {route.name} has {parameter.row_count} row moments of NorMuon, in the checkpoint {record.rows} "
            f"({record.tensors[ROW_STATE_KEY]}): it was divided into other blocks"
        ]
    return []


@torch.no_grad()
def _fill(
    state: LiveState, source: StateSource, *, hyperparameters: bool, progress: bool, state_too: bool
) -> None:
    """Write the source into this rank's partitions. All checks are done; what fails here is the disk."""
    steps = _steps(state, source) if state_too else {}
    if state_too:
        _say_what_happens_to_rows(state, source)
    try:
        for parameter in state.parameters:
            rows = (ROW_STATE_KEY,) if parameter.rows else ()
            for key in ("fp32", *((*STATE_KEYS[parameter.route.algorithm], *rows) if state_too else ())):
                target = _target(state, parameter, key, steps)
                if target is None:
                    continue
                empty = key not in source.parameters[parameter.route.name].tensors
                for run in _local_runs(state, parameter, key):
                    destination = target.narrow(0, run.partition_offset, run.numel)
                    if empty:
                        destination.zero_()
                    else:
                        destination.copy_(
                            source.read(parameter.route.name, key, run.matrix_offset, run.numel)
                        )
    except Exception as error:
        raise CheckpointError(
            f"reading {source.where} failed after it was verified; the engine now holds a part of it and must be made "
            f"anew: {error}"
        ) from error
    for parameter in state.parameters:
        own = state.optimizer.state.get(parameter.partition.tensor)
        if own and state_too:
            own["step"] = steps[parameter.partition.index]
    refresh_low_precision(state.engine.optimizer)
    if progress and source.progress is not None:
        write_progress(state.engine, source.progress)
    if hyperparameters:
        _restore_settings(state, source)


def _steps(state: LiveState, source: StateSource) -> dict[int, int]:
    """Return the steps of every partition. Its parameters share one count, which Adam's bias correction uses."""
    found: dict[int, set[int]] = {}
    for parameter in state.parameters:
        found.setdefault(parameter.partition.index, set()).add(source.parameters[parameter.route.name].step)
    for index, steps in found.items():
        if len(steps) > 1:
            logger.warning(
                "deepspeed_muon: parameters that share partition %d now had taken %s steps; %d is used for all of them",
                index,
                sorted(steps),
                max(steps),
            )
    return {index: max(steps) for index, steps in found.items()}


def _target(state: LiveState, parameter: LiveParameter, key: str, steps: Mapping[int, int]) -> Tensor | None:
    """Return the flat tensor to write to, made or cleared where it is state; ``None`` if there is none to restore."""
    partition = parameter.partition
    if key == "fp32":
        return state.tensor(partition, key)
    own = state.optimizer.state[partition.tensor]
    if steps[partition.index] == 0:
        own.clear()
        return None
    if key not in own:
        if key == ROW_STATE_KEY:
            sharing = (other for other in state.parameters if other.partition is partition)
            numel = sum(run.numel for other in sharing for run in _local_runs(state, other, key))
            own[key] = torch.zeros(numel, dtype=torch.float32, device=partition.tensor.device)
        else:
            own[key] = state.optimizer.state_policy.make(key, partition.tensor)
        own.setdefault("step", 0)
    return state.tensor(partition, key)


def _local_runs(state: LiveState, parameter: LiveParameter, key: str) -> list[Fragment]:
    return [fragment for fragment in parameter.fragments_of(key) if fragment.rank == state.rank]


def _say_what_happens_to_rows(state: LiveState, source: StateSource) -> None:
    """Warn where NorMuon's row moments start from zero or are dropped, because the saved run had another variant."""
    without, dropped = [], []
    for parameter in state.parameters:
        record = source.parameters[parameter.route.name]
        if parameter.rows and record.step and not record.rows:
            without.append(parameter.route.name)
        elif record.rows and not parameter.rows:
            dropped.append(parameter.route.name)
    if without:
        logger.warning(
            "deepspeed_muon: %s holds no row moments of NorMuon for %d matrices (%s, ...); they start from zero",
            source.where,
            len(without),
            without[0],
        )
    if dropped:
        logger.warning(
            "deepspeed_muon: %s was saved with variant 'normuon', this run has 'muon': the row moments of %d matrices "
            "are dropped",
            source.where,
            len(dropped),
        )


def _restore_settings(state: LiveState, source: StateSource) -> None:
    """Give every param group the settings that its parameters had, where they had the same."""
    saved: dict[int, set[int]] = {}
    for parameter in state.parameters:
        saved.setdefault(parameter.group, set()).add(source.parameters[parameter.route.name].group)
    for number, origins in saved.items():
        group = state.optimizer.param_groups[number]
        settings = [source.groups[origin] for origin in origins if origin < len(source.groups)]
        # The stages of a pipeline may number their groups differently, and one stage's are saved.
        settings = [
            entry for entry in settings if entry.get("algorithm", group["algorithm"]) == group["algorithm"]
        ]
        if not settings:
            continue
        for key in sorted(_RESTORED_SETTINGS & group.keys()):
            values = [entry[key] for entry in settings if key in entry]
            if len(values) < len(settings):
                continue
            if any(value != values[0] for value in values):
                logger.warning(
                    "deepspeed_muon: param group %d joins parameters that had %s = %s; the configuration's value stays",
                    number,
                    key,
                    values,
                )
                continue
            group[key] = tuple(values[0]) if isinstance(values[0], list) else values[0]
