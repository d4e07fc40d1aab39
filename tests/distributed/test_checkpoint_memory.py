"""Saving, restoring and converting take the memory of some pieces, beside the state that begins to exist.

Counted apart are anonymous memory, and pages of mapped files: the system takes those back when others want them, but
a job's limit counts them.
"""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

from deepspeed_muon.checkpoint import consolidate, restore
from deepspeed_muon.tools.convert import consolidate_files, convert_to_universal
from tests.support import tensor_parallel, training

MEGABYTE = 2**20
# Few inputs, so that the iteration is short.
INPUTS, OUTPUTS, MATRICES, EXPERTS = 128, 8192, 24, 4
MATRIX = INPUTS * OUTPUTS * 4 / MEGABYTE
# Masters and momentum.
STATE = 2 * MATRICES * MATRIX
# A save has pieces of 4 MB: two of its own file; in an exchange at most one for each of the three other ranks, and what
# it receives of its own; and copies of these four in gloo's buffers, if the ranks do not get there at the same time.
PIECES = (2 + 4 + 4) * 4.0
BESIDE = 64.0


class Wide(nn.Linear):
    """A layer with many outputs, which are averaged in groups to as many as the inputs."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__(INPUTS, OUTPUTS // ranks, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(-1, (-1, INPUTS)).mean(-2)


class Layers(nn.Module):
    """One layer after the other; with a tensor-parallel group each rank has some of the outputs."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        size = 1 if group is None else torch.distributed.get_world_size(group)
        self.layers = nn.ModuleList(Wide(size) for _ in range(MATRICES))
        for layer in self.layers if group is not None else ():
            layer.weight.tensor_model_parallel, layer.weight.partition_dim = True, 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Experts(nn.Module):
    """A mixture of experts with as many matrices."""

    def __init__(self, size: int) -> None:
        super().__init__()
        expert = nn.Sequential(*(Wide() for _ in range(MATRICES // EXPERTS)))
        self.moe = MoE(
            INPUTS, expert, num_experts=EXPERTS, ep_size=size, k=1, drop_tokens=False, use_rts=False
        )

    def forward(self, x: Tensor) -> Tensor:
        out, loss, _ = self.moe(x)
        return out.square().mean() + 0.01 * loss


class Peak:
    """The largest growth of memory while it is entered, in MB: anonymous memory, and pages of mapped files."""

    def __enter__(self) -> Peak:
        ctypes.CDLL(None).malloc_trim(0)
        self.start, self._ends = resident(), False
        self.largest = [0.0 for _ in self.start]
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ends:
            growth = [now - before for now, before in zip(resident(), self.start, strict=True)]
            self.largest = list(map(max, self.largest, growth))
            time.sleep(0.0005)

    def __exit__(self, *_: object) -> None:
        self._ends = True
        self._thread.join()

    def found(self) -> dict[str, float]:
        return dict(zip(("peak", "mapped"), self.largest, strict=True))


def resident() -> list[float]:
    with open("/proc/self/status") as file:
        lines = [line.split() for line in file if line.startswith(("RssAnon", "RssFile"))]
    return [int(number) / 1024 for _, number, _ in lines]


def start(world_size: int, rank: int, kind: str, stage: int) -> Any:
    config = training.ds_config(stage, params={"ns_dtype": "fp32"})
    torch.manual_seed(0)
    mpu = tensor_parallel.Mpu(2) if kind == "tensor" else None
    model = Experts(2) if kind == "experts" else Layers(mpu and mpu.tensor)
    return training.initialize(model, config, mpu=mpu)


def save_or_load(
    rank: int, world_size: int, *, folder: str, kind: str, stage: int, save: bool
) -> dict[str, float]:
    """Train a step and save, or restore into an engine that has not trained; return what that took, in MB."""
    engine = start(world_size, rank, kind, stage)
    if save:
        engine.backward(engine(torch.randn(4, INPUTS)))
        engine.step()
    with Peak() as peak:
        if save:
            consolidate(engine, folder)
        else:
            restore(engine, folder)
    state_bytes = sum(training.state_bytes(engine.basic_optimizer.state).values())
    return {**peak.found(), "state": state_bytes / MEGABYTE}


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "stage", "to_kind", "to_stage"),
    [
        ("data", 3, "data", 1),
        ("data", 1, "tensor", 1),
        ("tensor", 2, "data", 3),
        ("experts", 1, "experts", 2),
    ],
)
def test_no_rank_holds_more_than_its_share(
    ranks: Any, tmp_path: Path, kind: str, stage: int, to_kind: str, to_stage: int, record_property: Any
) -> None:
    """Momentum is 24 MB of a rank; the whole state is 192 MB, the weights are 96 MB."""
    folder = str(tmp_path / "set")
    saved = ranks(4).run(save_or_load, folder=folder, kind=kind, stage=stage, save=True)
    loaded = ranks(4).run(save_or_load, folder=folder, kind=to_kind, stage=to_stage, save=False)
    record_property("megabytes", {"whole state": STATE, "saving": saved, "restoring": loaded})
    print(f"whole state {STATE:.0f} MB; saving: {saved}; restoring: {loaded}")
    for found in saved:
        assert found["peak"] <= MATRIX + PIECES, found
    for found in loaded:
        # Momentum begins to exist.
        assert found["peak"] <= found["state"] + BESIDE, found
        assert found["mapped"] <= BESIDE, found
        assert found["state"] < STATE / 3


def save_files(rank: int, world_size: int, *, folder: str) -> None:
    engine = start(world_size, rank, "data", 1)
    engine.backward(engine(torch.randn(4, INPUTS)))
    engine.step()
    engine.save_checkpoint(folder, tag="t")


def converted(rank: int, world_size: int, *, folder: str, to: str) -> dict[str, float]:
    with Peak() as peak:
        if to == "universal":
            convert_to_universal(f"{folder}/t", f"{folder}/universal/t")
        else:
            consolidate_files(folder, f"{folder}/set")
    return peak.found()


@pytest.mark.full
def test_converting_in_one_process(ranks: Any, tmp_path: Path, record_property: Any) -> None:
    """The files of two ranks, each with half of 192 MB and all weights."""
    ranks(2).run(save_files, folder=str(tmp_path))
    for to in ("universal", "set"):
        (found,) = ranks(1).run(converted, folder=str(tmp_path), to=to)
        record_property(to, found)
        print(to, found)
        assert max(found.values()) <= BESIDE, found
