"""Layout records in the files of a checkpoint: read together, and divided again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from deepspeed_muon.checkpoint.layout_record import RECORD_KEY


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("t/*optim_states.pt")) or [folder / "t" / "mp_rank_00_model_states.pt"]


def inner_state(content: Any) -> Any:
    if "optimizer_state_dict" in content:
        content = content["optimizer_state_dict"]
        return content.get("base_optimizer_state") or content["optimizer_state_dict"]
    return content["optimizer"]


def joined_record(folder: Path) -> dict[str, Any]:
    """Return the record of the one group of all ranks, with all of its parameters."""
    first = inner_state(torch.load(files_of(folder)[0], weights_only=False))[RECORD_KEY]
    record = copy.deepcopy({**first, **first["groups"][0]})
    del record["groups"], record["rank"]
    return record


def record_of_rank(record: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return what the file of a rank has of a record of :func:`joined_record`."""
    common = {
        key: record[key]
        for key in ("version", "save", "order", "row_order", "precision", "optimizer")
        if key in record
    }
    group = {key: record[key] for key in ("name", "world_size", "parameters") if key in record}
    if rank:
        group["parameters"] = []
    return {**common, "groups": [{**group, "rank": rank}]}
