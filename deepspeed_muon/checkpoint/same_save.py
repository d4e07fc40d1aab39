"""Whether the files of a DeepSpeed checkpoint belong to one save: a folder can be put together from several.

Every rank writes a file of its own. What they must have in common is compared: the steps of the optimizer, settings of
param groups, loss scale, layout, and the progress that the model's files tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed_muon.checkpoint.index import COUNTERS, SCALE_KEYS
from deepspeed_muon.checkpoint.layout_record import RECORD_KEY
from deepspeed_muon.checkpoint.sealed import is_json
from deepspeed_muon.errors import CheckpointError

__all__ = ["refuse_mixed_models", "refuse_mixed_ranks"]

_PROGRESS_KEYS = (*COUNTERS, "dp_world_size")


def refuse_mixed_ranks(
    files: Sequence[Path], inner: Sequence[Mapping[str, Any]], wrappers: Sequence[Mapping[str, Any]]
) -> None:
    """Raise if the optimizer files of the ranks are not of one save.

    Args:
        files: One of every rank; only named.
        inner: What each holds of the optimizer inside ZeRO's wrapper.
        wrappers: What each holds of the wrapper; empty at stage 0.

    Raises:
        CheckpointError: Naming two files and the first fact in which they differ.
    """
    all_facts = []
    for number, path in enumerate(files):
        try:
            all_facts.append(_facts(inner[number], wrappers[number] if wrappers else {}))
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: not the state of an optimizer: {error}") from error
    for path, facts in zip(files[1:], all_facts[1:], strict=True):
        _compare(files[0], all_facts[0], path, facts)


def refuse_mixed_models(models: Mapping[Path, Any], file: Path, inner: Mapping[str, Any]) -> None:
    """Raise if the model's files are not of the save of the optimizer's.

    Args:
        models: The model's files; the first one's progress is what the others must have.
        file: An optimizer file; only named.
        inner: What it holds of the optimizer; our own says which step of the engine it is of.

    Raises:
        CheckpointError: Naming two files and the first fact in which they differ.
    """
    progress = {
        path: {key: model.get(key) for key in _PROGRESS_KEYS if isinstance(model, Mapping)}
        for path, model in models.items()
    }
    first = next(iter(models))
    for path, facts in progress.items():
        _compare(first, progress[first], path, facts)
    record = inner.get(RECORD_KEY)
    if isinstance(record, Mapping) and "global_steps" in record:
        facts = {**progress[first], "global_steps": record["global_steps"]}
        _compare(first, progress[first], file, facts)


def _facts(inner: Mapping[str, Any], wrapper: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the optimizer files of all ranks of one save have in common, the steps first."""
    facts: dict[str, Any] = {
        f"step of partition {index}": int(state["step"])
        for index, state in sorted(inner["state"].items())
        if "step" in state
    }
    for index, group in enumerate(inner["param_groups"]):
        for key, value in group.items():
            value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if is_json(value):
                facts[f"{key} of param group {index}"] = value
    scaler = wrapper.get("loss_scaler")
    facts |= {f"{key} of the loss scale": getattr(scaler, key, None) for key in SCALE_KEYS}
    facts |= {key: wrapper.get(key) for key in ("zero_stage", "partition_count", "ds_version")}
    return {**facts, "layout": inner.get(RECORD_KEY)}


def _compare(first: Path, expected: Mapping[str, Any], other: Path, found: Mapping[str, Any]) -> None:
    """Raise if two files of one checkpoint differ in what they must have in common."""
    for key in (*expected, *(key for key in found if key not in expected)):
        mine, theirs = expected.get(key), found.get(key)
        if mine != theirs:
            said = "another one" if key == "layout" else f"{mine} in the first, {theirs} in the second"
            raise CheckpointError(
                f"{first} and {other} are of different checkpoints: {key} is {said}. Copy all files of one save into "
                f"the folder"
            )
