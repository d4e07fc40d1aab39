"""Consolidated checkpoints: saved at one topology, exactly equal at another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_muon.checkpoint import consolidate, load_index, restore
from deepspeed_muon.checkpoint.sources import ConsolidatedSource
from tests.support import training
from tests.support.checkpoints import (
    NEXT_LOSS_HALF,
    PERSISTENT,
    ROUND,
    SMALL,
    assert_equal,
    load,
    save,
    tensors_of,
)
from tests.support.models import MATRICES
from tests.support.oracle import in_8_bits
from tests.support.snapshots import differences, snapshot
from tests.support.thinning import each_value, full
from tests.support.training import OFFLOAD

# Every stage and every number of ranks on both sides; every setting that changes the layout on one of them.
CORE = [
    (0, 1, {}, 3, 2, SMALL),
    (0, 3, {}, 1, 2, ROUND),
    (1, 2, ROUND, 3, 3, PERSISTENT),
    (1, 4, {}, 0, 2, {}),
    (2, 3, ROUND, 2, 2, {}),
    (2, 2, OFFLOAD, 1, 4, {}),
    (3, 2, SMALL, 2, 3, ROUND),
    (3, 4, {}, 3, 1, OFFLOAD),
    (3, 3, OFFLOAD, 0, 1, {}),
    (3, 1, {}, 3, 4, SMALL),
]


@pytest.mark.compat
@pytest.mark.parametrize(("stage", "size", "zero", "to_stage", "to_size", "to_zero"), each_value(CORE))
def test_restored_exactly_at_another_topology(
    ranks: Any, tmp_path: Path, stage: int, size: int, zero: Any, to_stage: int, to_size: int, to_zero: Any
) -> None:
    """Into an engine that has trained: DeepSpeed keeps references to its state, which is overwritten in place."""
    saved = ranks(size).run(save, folder=str(tmp_path), stage=stage, zero=zero)[0]
    loaded = ranks(to_size).run(load, folder=str(tmp_path), stage=to_stage, zero=to_zero, trained=2)[0]
    assert_equal(saved, loaded)
    assert saved["rates"][0] > 0 and len(list(tmp_path.glob("*.safetensors"))) > 3


CODES = {"momentum_dtype": "int8"}


@pytest.mark.parametrize(
    ("stage", "size", "zero", "to_stage", "to_size", "to_zero"),
    [
        (1, 2, ROUND, 3, 3, SMALL),
        (2, 2, OFFLOAD, 2, 4, {}),
        (3, 4, SMALL, 1, 1, {}),
        (3, 2, {}, 0, 2, {}),
        (0, 1, {}, 3, 4, {}),
        *(
            full(*each)
            for each in (
                (1, 3, {}, 2, 2, OFFLOAD),
                (1, 4, ROUND, 1, 2, OFFLOAD),
                (2, 3, ROUND, 3, 4, OFFLOAD),
                (2, 1, {}, 1, 4, ROUND),
                (3, 3, OFFLOAD, 2, 3, ROUND),
                (3, 1, SMALL, 3, 2, {}),
                (0, 4, {}, 2, 3, {}),
            )
        ),
    ],
)
def test_int8_momentum_at_another_topology(
    ranks: Any, tmp_path: Path, stage: int, size: int, zero: Any, to_stage: int, to_size: int, to_zero: Any
) -> None:
    """A block that neither side cuts keeps its codes and its scale; those at a cut are quantised again."""
    arguments = {"folder": str(tmp_path), "params": CODES}
    saved = ranks(size).run(save, stage=stage, zero=zero, **arguments)[0]
    loaded = ranks(to_size).run(load, stage=to_stage, zero=to_zero, trained=1, **arguments)[0]
    training.assert_same_int8_momentum(loaded, saved)
    assert_equal(saved, {**loaded, "momentum_buffer": saved["momentum_buffer"]}, next_loss=1e-4)


@pytest.mark.parametrize(("before", "after"), [({}, CODES), (CODES, {}), (CODES, {"momentum_dtype": "bf16"})])
def test_momentum_of_another_dtype(ranks: Any, tmp_path: Path, before: Any, after: Any) -> None:
    saved = ranks(2).run(save, folder=str(tmp_path), stage=1, params=before)[0]
    loaded = ranks(3).run(load, folder=str(tmp_path), stage=3, params=after)[0]
    for name, value in saved["momentum_buffer"].items():
        expected = in_8_bits(value, loaded["cuts"][name]) if after == CODES else value
        if after not in (CODES, {}):
            expected = value.bfloat16().double()
        torch.testing.assert_close(loaded["momentum_buffer"][name], expected, rtol=1e-6, atol=0)
    assert loaded["loss"] == pytest.approx(saved["loss"], rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_whole_matrix(ranks: Any, tmp_path: Path, stage: int, size: int) -> None:
    """From one topology into all sixteen, with another layout of the same stage on either side."""
    zero = {0: {}, 1: ROUND, 2: OFFLOAD, 3: SMALL}
    other = {0: {}, 1: OFFLOAD, 2: ROUND, 3: OFFLOAD}
    saved = ranks(size).run(save, folder=str(tmp_path), stage=stage, zero=zero[stage])[0]
    for to_stage in range(4):
        for to_size in range(1, 5):
            loaded = ranks(to_size).run(load, folder=str(tmp_path), stage=to_stage, zero=other[to_stage])[0]
            assert_equal(saved, loaded)


@pytest.mark.parametrize(
    ("stage", "to_stage", "precision"),
    each_value(
        (*way, precision) for way in [(3, 0), (0, 1), (1, 2), (2, 3)] for precision in ("bf16", "fp16")
    ),
)
def test_half_precision(ranks: Any, tmp_path: Path, precision: str, stage: int, to_stage: int) -> None:
    """Masters are exact, and the weights of the forward pass are their rounding, on all ranks."""
    settings = {"precision": precision}
    saved = ranks(2).run(save, folder=str(tmp_path), stage=stage, **settings)[0]
    loaded = ranks(3).run(load, folder=str(tmp_path), stage=to_stage, **settings)
    for one in loaded:
        assert_equal(saved, one, next_loss=NEXT_LOSS_HALF)
        assert one["loss"] == loaded[0]["loss"]


def test_before_the_first_step(ranks: Any, tmp_path: Path) -> None:
    saved = ranks(2).run(save, folder=str(tmp_path), stage=2, steps=0)[0]
    loaded = ranks(3).run(load, folder=str(tmp_path), stage=3, steps=0, trained=1)[0]
    assert not saved["momentum_buffer"] and not loaded["momentum_buffer"]
    assert_equal(saved, loaded)


@pytest.mark.parametrize("kind", ["wide", *(full(kind) for kind in ("single", "unused"))])
def test_awkward_models(ranks: Any, tmp_path: Path, kind: str) -> None:
    saved = ranks(4).run(save, folder=str(tmp_path), stage=3, kind=kind)[0]
    loaded = ranks(3).run(load, folder=str(tmp_path), stage=2, kind=kind)[0]
    assert_equal(saved, loaded)


def test_saving_again_replaces_the_old_files(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(save, folder=str(tmp_path), stage=1)
    before = set(load_index(tmp_path).files)
    saved = ranks(3).run(save, folder=str(tmp_path), stage=3, steps=3)[0]
    index = load_index(tmp_path)
    assert not before & set(index.files)
    assert {path.name for path in tmp_path.iterdir()} == {"muon_index.json", *index.files}
    assert {n for n, r in index.parameters.items() if r.algorithm == "muon"} == MATRICES["toy"]
    assert index.progress.global_steps == 3 and index.groups[0]["momentum"] == 0.95
    # Plain safetensors with true shapes.
    tensors = tensors_of(tmp_path)
    for key in ("fp32", "momentum_buffer"):
        for name, expected in saved[key].items():
            assert torch.equal(tensors[f"{key}/{name}"].double(), expected), (key, name)
    assert_equal(saved, ranks(2).run(load, folder=str(tmp_path), stage=2, steps=3)[0])


# Consolidating weights of other strides (``channels_last``, stage 0) ended in a RuntimeError of ``view``.


class Filters(nn.Module):
    """Two convolutions, one of them AdamW's, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)
        self.grouped = nn.Conv2d(8, 8, 3, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.grouped(self.conv(x).relu()).pow(2).mean()


def engine_of(seed: int) -> Any:
    torch.manual_seed(seed)
    model = Filters()
    engine = training.initialize(
        model, training.ds_config(0), model_parameters=list(model.named_parameters())
    )
    model.to(memory_format=torch.channels_last)  # DeepSpeed does not broadcast weights of such strides
    assert not model.conv.weight.is_contiguous()
    return engine


def train(engine: Any, step: int) -> None:
    torch.manual_seed(100 + step)
    engine.backward(engine(torch.randn(2, 4, 6, 6)))
    engine.step()


def save_and_continue(rank: int, world_size: int, *, folder: str) -> list[str]:
    """Save after two steps and continue in a new engine; return what differs there, then and one step later."""
    first, second = engine_of(0), engine_of(1)
    for step in range(2):
        train(first, step)
    consolidate(first, folder)
    for name, param in first.module.named_parameters():
        source = ConsolidatedSource(folder)
        saved = source.read(name, "fp32", 0, param.numel())
        source.close()
        assert torch.equal(saved, param.detach().reshape(-1)), name
    train(second, 0)  # so that the restored state takes the place of another one
    strides = [param.stride() for param in second.module.parameters()]
    restore(second, folder)
    found = differences(snapshot(first), snapshot(second))
    for engine in (first, second):
        train(engine, 2)
    found += differences(snapshot(first), snapshot(second))
    assert [param.stride() for param in second.module.parameters()] == strides
    return found


@pytest.mark.parametrize("count", [full(1), 2])
def test_saved_and_restored_in_row_major_order(ranks: Any, tmp_path: Path, count: int) -> None:
    assert ranks(count).run(save_and_continue, folder=str(tmp_path / "set")) == [[]] * count
