"""Layout records in the files of a checkpoint: read together, written as older releases did."""

from __future__ import annotations

import copy
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from deepspeed_muon.checkpoint.layout_record import RECORD_KEY
from deepspeed_muon.engine.ordering import ORDER_KEY
from deepspeed_muon.plan.spread import Spread, fragments_of


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("t/*optim_states.pt")) or [folder / "t" / "mp_rank_00_model_states.pt"]


def inner_state(content: Any) -> Any:
    if "optimizer_state_dict" in content:
        content = content["optimizer_state_dict"]
        return content.get("base_optimizer_state") or content["optimizer_state_dict"]
    return content["optimizer"]


def whole_record(folder: Path) -> dict[str, Any]:
    """Return the record of all ranks together, without its checksum."""
    records = [inner_state(torch.load(path, weights_only=False))[RECORD_KEY] for path in files_of(folder)]
    dealt = zip_longest(*(record["parameters"] for record in records))
    record = copy.deepcopy(records[0])
    del record["digest"]
    record["parameters"] = [entry for turn in dealt for entry in turn if entry is not None]
    return record


def as_version_1(record: dict[str, Any]) -> None:
    """Write every fragment down, as releases before 0.3 did."""
    record["version"] = 1
    for entry in record["parameters"]:
        spread = Spread(*entry.pop("spread"))
        del entry["rows"]  # the oldest had none
        fragments = [[f.rank, f.matrix_offset, f.partition_offset, f.numel] for f in fragments_of(spread)]
        entry.update(fragments=fragments, replicated=spread.copies > 1)


def write_version_1(folder: Path) -> None:
    """Give every rank's file the whole record, with all fragments, and no digest of the order."""
    record = whole_record(folder)
    as_version_1(record)
    for path in files_of(folder):
        content = torch.load(path, weights_only=False)
        inner = inner_state(content)
        inner[RECORD_KEY] = record
        inner.pop(ORDER_KEY, None)
        torch.save(content, path)
