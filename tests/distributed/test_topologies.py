"""One checkpoint for every layout: saved at one (stage, data, tensor, expert, pipeline), the same bits at another.

Each change goes two ways: by the API, ``consolidate`` and ``restore``; and by the command line, from DeepSpeed's own
files. Both sets must hold the same, and both must restore it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepspeed_muon import cli
from deepspeed_muon.checkpoint import load_index
from tests.support import topologies


def at(ranks: int, kind: str, stage: int, size: int = 1, **settings: Any) -> tuple[int, dict[str, Any]]:
    """Return a number of ranks and the topology on them; ``size`` is the tensor, expert or pipeline size."""
    return ranks, {"kind": kind, "stage": stage, "size": size, **settings}


ROUND = {"zero": {"round_robin_gradients": True}}
SMALL = {"zero": {"sub_group_size": 300}}
OFFLOAD = {"zero": {"offload_optimizer": {"device": "cpu"}}}

CHANGES = {
    # tensor parallelism: with it, without it, of another size, the other convention
    "tensor 2 to data 3": (at(4, "megatron", 1, 2), at(3, "data", 3)),
    "data 3 to tensor 2": (at(3, "data", 2, **ROUND), at(4, "megatron", 3, 2)),
    "tensor 2 to tensor 4": (at(4, "megatron", 3, 2), at(4, "megatron", 2, 4)),
    "tensor 4 to tensor 2 alone": (at(4, "megatron", 0, 4), at(2, "megatron", 1, 2)),
    "tensor 2 to AutoTP 2": (at(2, "megatron", 2, 2), at(4, "autotp", 1, 2)),
    "AutoTP 2 to data 1": (at(4, "autotp", 3, 2), at(1, "data", 0)),
    "data 2 to AutoTP 2": (at(2, "data", 0), at(4, "autotp", 2, 2)),
    "AutoTP 4 to tensor 2": (at(4, "autotp", 0, 4), at(4, "megatron", 0, 2)),
    "tensor 2 offloaded to data 2": (at(4, "megatron", 2, 2, **OFFLOAD), at(2, "data", 3, **SMALL)),
    # experts
    "experts over 2 to 1": (at(4, "experts", 1, 2), at(3, "experts", 2)),
    "experts over 1 to 4": (at(2, "experts", 2), at(4, "experts", 1, 4)),
    "experts over 4 to 2": (at(4, "experts", 2, 4), at(2, "experts", 0, 2)),
    "experts over 2 without ZeRO to 4": (at(4, "experts", 0, 2), at(4, "experts", 2, 4)),
    "experts over 2 offloaded to 2": (at(4, "experts", 2, 2, **OFFLOAD), at(2, "experts", 1, 2)),
    "experts over 2, NorMuon, to 1": (
        at(4, "experts", 1, 2, params={"variant": "normuon"}),
        at(2, "experts", 2, params={"variant": "normuon"}),
    ),
    # stages of a pipeline
    "2 stages to 4": (at(4, "pipeline", 1, 2), at(4, "pipeline", 1, 4)),
    "4 stages to 2 without ZeRO": (at(4, "pipeline", 1, 4), at(2, "pipeline", 0, 2)),
    "2 stages to 1": (at(2, "pipeline", 1, 2), at(3, "pipeline", 1, 1)),
    "1 stage to 2": (at(2, "pipeline", 1, 1), at(4, "pipeline", 1, 2)),
    # the stage and the number of ranks alone
    "data 4 to data 3": (at(4, "data", 3, **SMALL), at(3, "data", 1, **ROUND)),
}
CORE = ("tensor 2 to AutoTP 2", "experts over 4 to 2", "2 stages to 1")


def tensors_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        found.update(load_file(path))
    return found


@pytest.mark.parametrize(
    "change", [pytest.param(name, marks=[] if name in CORE else [pytest.mark.full]) for name in CHANGES]
)
def test_the_same_bits_at_another_topology(
    ranks: Any, tmp_path: Path, change: str, record_property: Any
) -> None:
    (size, topology), (to_size, to_topology) = CHANGES[change]
    saved = topologies.together(ranks(size).run(topologies.save, folder=str(tmp_path), topology=topology))
    sets = [tmp_path / "set", tmp_path / "by_command"]
    assert cli.main(["checkpoint", "consolidate", str(tmp_path / "saved"), str(sets[1])]) == 0
    files = [tensors_of(each) for each in sets]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        assert torch.equal(tensor, files[1][name]), name
    for name, tensor in saved["fp32"].items():
        assert torch.equal(files[0][f"fp32/{name}"].double(), tensor), name
    assert load_index(sets[0]).parameters.keys() == saved["fp32"].keys()
    results = ranks(to_size).run(topologies.load, folders=list(map(str, sets)), topology=to_topology)
    worst = max(
        topologies.worst_difference(saved, topologies.together([rank[number] for rank in results]))
        for number in range(len(sets))
    )
    record_property("worst difference", worst)
    print(f"{change}: worst difference {worst:g}")
    assert worst == 0.0
