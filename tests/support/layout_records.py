"""Layout records in the files of a checkpoint: read together, and divided again."""

from __future__ import annotations

import copy
from itertools import zip_longest
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


def whole_record(folder: Path) -> dict[str, Any]:
    """Return the record of the one group of all ranks, with all of its parameters."""
    records = [inner_state(torch.load(path, weights_only=False))[RECORD_KEY] for path in files_of(folder)]
    groups = [record["groups"][0] for record in records]
    record = copy.deepcopy({**records[0], **groups[0]})
    del record["groups"], record["rank"]
    dealt = zip_longest(*(group["parameters"] for group in groups))
    record["parameters"] = [entry for turn in dealt for entry in turn if entry is not None]
    return record


def part_of(record: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Return what the file of a rank has of a record of :func:`whole_record`."""
    common = {key: record[key] for key in ("version", "save", "optimizer") if key in record}
    group = {key: record[key] for key in ("name", "world_size", "parameters") if key in record}
    if isinstance(group["parameters"], list):
        group["parameters"] = group["parameters"][rank::ranks]
    return {**common, "groups": [{**group, "rank": rank}]}
