"""Saving, restoring and converting take the memory of some pieces, beside the state that begins to exist.

Counted apart are anonymous memory, and pages of mapped files: the system takes those back when others want them, but
a job's limit counts them.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed_muon.checkpoint import consolidate, restore
from deepspeed_muon.tools.convert import consolidate_files, convert_to_universal
from tests.support import tensor_parallel, training

MEGABYTE = 2**20
# glibc: from this size on, memory is returned to the system when it is freed. A new piece may take another part of what
# glibc keeps, and resident memory would say more of the order of allocations than of what is in use.
M_MMAP_THRESHOLD = -3
# Few inputs, so that the iteration is short.
INPUTS, OUTPUTS, MATRICES = 128, 8192, 24
MATRIX = INPUTS * OUTPUTS * 4 / MEGABYTE
# Masters and momentum.
STATE = 2 * MATRICES * MATRIX
# A save has pieces of 4 MB: two of its own file, what it sends and what it receives. A restore reads 16 MB at a time.
# Both bounds are twice that.
PIECES = 2 * (2 + 1 + 1) * 4.0
BESIDE = 2 * 16.0


class Projection(nn.Linear):
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
        self.layers = nn.ModuleList(Projection(size) for _ in range(MATRICES))
        for layer in self.layers if group is not None else ():
            layer.weight.tensor_model_parallel, layer.weight.partition_dim = True, 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@contextlib.contextmanager
def watched_memory() -> Iterator[dict[str, float]]:
    """Yield what is the largest growth of memory at the end, in MB: ``anonymous``, and ``mapped`` pages of files."""
    ctypes.CDLL(None).malloc_trim(0)
    before, is_over = resident(), threading.Event()
    peak = dict.fromkeys(before, 0.0)

    def watch() -> None:
        while not is_over.wait(0.0005):
            peak.update({kind: max(peak[kind], now - before[kind]) for kind, now in resident().items()})

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()


def resident() -> dict[str, float]:
    with open("/proc/self/status") as file:
        sizes = dict(line.split(":") for line in file)
    kinds = {"anonymous": "RssAnon", "mapped": "RssFile"}
    return {kind: int(sizes[key].split()[0]) / 1024 for kind, key in kinds.items()}


def start(world_size: int, rank: int, kind: str, stage: int) -> Any:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MEGABYTE)
    config = training.ds_config(stage, params={"ns_dtype": "fp32"})
    torch.manual_seed(0)
    mpu = tensor_parallel.Mpu(2) if kind == "tensor" else None
    return training.initialize(Layers(mpu and mpu.tensor), config, mpu=mpu)


def trained(world_size: int, rank: int, kind: str, stage: int) -> Any:
    engine = start(world_size, rank, kind, stage)
    engine.backward(engine(torch.randn(4, INPUTS)))
    engine.step()
    return engine


def saved(rank: int, world_size: int, *, folder: str, kind: str, stage: int) -> dict[str, float]:
    """Train a step and save; return what the save took, in MB."""
    engine = trained(world_size, rank, kind, stage)
    with watched_memory() as peak:
        consolidate(engine, folder)
    return peak


def restored(rank: int, world_size: int, *, folder: str, kind: str, stage: int) -> dict[str, float]:
    """Restore into an engine that has not trained; return what that took, in MB, and the state that began to exist."""
    engine = start(world_size, rank, kind, stage)
    with watched_memory() as peak:
        restore(engine, folder)
    state_bytes = sum(training.state_bytes(engine.basic_optimizer.state).values())
    return {**peak, "state": state_bytes / MEGABYTE}


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "stage", "to_kind", "to_stage"),
    [("data", 3, "data", 1), ("data", 1, "tensor", 1), ("tensor", 2, "data", 3)],
)
def test_no_rank_holds_more_than_its_share(
    ranks: Any, tmp_path: Path, kind: str, stage: int, to_kind: str, to_stage: int
) -> None:
    """Momentum is 24 MB of a rank; the whole state is 192 MB, the weights are 96 MB."""
    saving = ranks(4).run(saved, folder=str(tmp_path), kind=kind, stage=stage)
    restoring = ranks(4).run(restored, folder=str(tmp_path), kind=to_kind, stage=to_stage)
    print(f"whole state {STATE:.0f} MB; saving: {saving}; restoring: {restoring}")
    for peak in saving:
        assert peak["anonymous"] <= MATRIX + PIECES, peak
    for peak in restoring:
        # Momentum begins to exist.
        assert peak["anonymous"] <= peak["state"] + BESIDE, peak
        assert peak["mapped"] <= BESIDE, peak
        assert peak["state"] < STATE / 3


def save_files(rank: int, world_size: int, *, folder: str) -> None:
    trained(world_size, rank, "data", 1).save_checkpoint(folder, tag="t")


def converted(rank: int, world_size: int, *, folder: str, to: str) -> dict[str, float]:
    with watched_memory() as peak:
        if to == "universal":
            convert_to_universal(f"{folder}/t", f"{folder}/universal/t")
        else:
            consolidate_files(folder, f"{folder}/set")
    return peak


@pytest.mark.full
def test_converting_in_one_process(ranks: Any, tmp_path: Path) -> None:
    """The files of two ranks, each with half of 192 MB and all weights."""
    ranks(2).run(save_files, folder=str(tmp_path))
    for to in ("universal", "set"):
        (peak,) = ranks(1).run(converted, folder=str(tmp_path), to=to)
        print(to, peak)
        assert max(peak.values()) <= BESIDE, peak
