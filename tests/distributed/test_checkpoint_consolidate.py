"""Consolidated checkpoints: saved at one topology, exactly equal at another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_muon.checkpoint import load_index
from tests.support import training
from tests.support.checkpoints import (
    CODES,
    NORMUON,
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
from tests.support.thinning import each_value, full, usual, with_settings
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
# A block that neither side cuts keeps its codes and its scale; those at a cut are quantised again.
INT8 = [
    (1, 2, ROUND, 3, 3, SMALL),
    full(2, 2, OFFLOAD, 2, 4, {}),
    full(3, 4, SMALL, 1, 1, {}),
    full(3, 2, {}, 0, 2, {}),
    full(0, 1, {}, 3, 4, {}),
    full(1, 3, {}, 2, 2, OFFLOAD),
    full(1, 4, ROUND, 1, 2, OFFLOAD),
    full(2, 3, ROUND, 3, 4, OFFLOAD),
    full(2, 1, {}, 1, 4, ROUND),
    full(3, 3, OFFLOAD, 2, 3, ROUND),
    full(3, 1, SMALL, 3, 2, {}),
    full(0, 4, {}, 2, 3, {}),
]
HALF_CORE = [(3, 2, {}, 0, 3, {}, {"precision": "bf16"}), (1, 2, {}, 2, 3, {}, {"precision": "fp16"})]
HALF = usual(
    [
        (stage, 2, {}, to_stage, 3, {}, {"precision": precision})
        for stage, to_stage in [(3, 0), (0, 1), (1, 2), (2, 3)]
        for precision in ("bf16", "fp16")
    ],
    HALF_CORE,
    compat=HALF_CORE,
)
MODELS = [
    full(3, 4, {}, 1, 2, {}, {"params": NORMUON, "kind": "mixed"}),
    pytest.param(0, 2, {}, 3, 4, {}, {"params": NORMUON, "kind": "mixed"}, marks=pytest.mark.compat),
    full(2, 2, {}, 0, 1, {}, {"params": NORMUON, "kind": "mixed"}),
    *(full(3, 4, {}, 2, 3, {}, {"kind": kind}) for kind in ("wide", "single", "unused")),
]


@pytest.mark.parametrize(
    ("stage", "size", "zero", "to_stage", "to_size", "to_zero", "settings"),
    [
        *with_settings(each_value(CORE), {}),
        *with_settings(INT8, {"params": CODES}),
        *HALF,
        *MODELS,
    ],
)
def test_restored_exactly_on_another_topology(
    ranks: Any,
    tmp_path: Path,
    stage: int,
    size: int,
    zero: Any,
    to_stage: int,
    to_size: int,
    to_zero: Any,
    settings: dict[str, Any],
) -> None:
    """Into an engine that has trained: DeepSpeed keeps references to its state, which is overwritten in place."""
    saved = ranks(size).run(save, folder=str(tmp_path), stage=stage, zero=zero, **settings)[0]
    arguments = {"stage": to_stage, "zero": to_zero, "trained": 2, **settings}
    loaded = ranks(to_size).run(load, folder=str(tmp_path), **arguments)
    for report in loaded:
        assert_equal(saved, report, settings)
        # The weights of the forward pass are the masters' rounding, on all ranks.
        assert report["loss"] == loaded[0]["loss"]
    assert saved["rates"][0] > 0


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_changes_of_stage_and_size(ranks: Any, tmp_path: Path, stage: int, size: int) -> None:
    """From one topology into all sixteen, with another layout of the same stage on either side."""
    zero = {0: {}, 1: ROUND, 2: OFFLOAD, 3: SMALL}
    zero_after = {0: {}, 1: OFFLOAD, 2: ROUND, 3: OFFLOAD}
    saved = ranks(size).run(save, folder=str(tmp_path), stage=stage, zero=zero[stage])[0]
    for to_stage in range(4):
        for to_size in range(1, 5):
            loaded = ranks(to_size).run(
                load, folder=str(tmp_path), stage=to_stage, zero=zero_after[to_stage]
            )[0]
            assert_equal(saved, loaded)


@pytest.mark.parametrize(
    ("before", "after"), [({}, CODES), (CODES, {}), full(CODES, {"momentum_dtype": "bf16"})]
)
def test_momentum_of_another_dtype(ranks: Any, tmp_path: Path, before: Any, after: Any) -> None:
    saved = ranks(2).run(save, folder=str(tmp_path), stage=1, params=before)[0]
    loaded = ranks(3).run(load, folder=str(tmp_path), stage=3, params=after)[0]
    for name, value in saved["momentum_buffer"].items():
        expected = in_8_bits(value, loaded["cuts"][name]) if after == CODES else value
        if after not in (CODES, {}):
            expected = value.bfloat16().double()
        torch.testing.assert_close(loaded["momentum_buffer"][name], expected, rtol=1e-6, atol=0)
    assert loaded["loss"] == pytest.approx(saved["loss"], rel=1e-6)


def load_and_listen(rank: int, world_size: int, **arguments: Any) -> dict[str, Any]:
    log = training.heard()
    return {**load(rank, world_size, **arguments), "log": log}


def test_sets_of_another_variant(ranks: Any, tmp_path: Path) -> None:
    """Without row moments NorMuon starts them from zero, and says so; with them Muon drops them, and says so."""
    folders = [{"folder": str(tmp_path / name)} for name in ("muon", "normuon")]
    for folder, params in zip(folders, ({}, NORMUON), strict=True):
        ranks(2).run(save, stage=1, params=params, **folder)
    result = ranks(2).run(load_and_listen, stage=3, params=NORMUON, trained=1, **folders[0])[0]
    assert result["rows"].keys() == MATRICES["toy"]
    assert not any(rows.any() for rows in result["rows"].values())
    assert any("start anew" in line for line in result["log"])
    result = ranks(2).run(load_and_listen, stage=3, **folders[1])[0]
    assert not result["rows"] and any("are dropped" in line for line in result["log"])


def test_before_the_first_step(ranks: Any, tmp_path: Path) -> None:
    saved = ranks(2).run(save, folder=str(tmp_path), stage=2, steps=0)[0]
    loaded = ranks(3).run(load, folder=str(tmp_path), stage=3, steps=0, trained=1)[0]
    assert not saved["momentum_buffer"] and not loaded["momentum_buffer"]
    assert_equal(saved, loaded)


def test_saving_again_replaces_the_old_files(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(save, folder=str(tmp_path), stage=1)
    before = set(load_index(tmp_path).files)
    saved = ranks(3).run(save, folder=str(tmp_path), stage=3, steps=3)[0]
    index = load_index(tmp_path)
    assert not before & set(index.files) and len(index.files) > 3
    assert {path.name for path in tmp_path.iterdir()} == {"muon_index.json", *index.files}
    assert {n for n, r in index.parameters.items() if r.algorithm == "muon"} == MATRICES["toy"]
    assert index.progress.global_steps == 3 and index.groups[0]["momentum"] == 0.95
    assert_tensors(tmp_path, saved)
    assert_equal(saved, ranks(2).run(load, folder=str(tmp_path), stage=2, steps=3)[0])


def assert_tensors(folder: Path, saved: dict[str, Any]) -> None:
    """Fail unless a set holds masters and momentum in plain safetensors with true shapes."""
    tensors = tensors_of(folder)
    for key in ("fp32", "momentum_buffer"):
        for name, expected in saved[key].items():
            assert torch.equal(tensors[f"{key}/{name}"].double(), expected), (key, name)


@pytest.mark.parametrize("size", [full(1), 2])
def test_weights_in_channels_last(ranks: Any, tmp_path: Path, size: int) -> None:
    """Consolidating weights in ``channels_last`` (stage 0) ended in a RuntimeError of ``view``."""
    arguments = {"folder": str(tmp_path), "stage": 0, "kind": "convolutions", "channels_last": True}
    saved = ranks(size).run(save, **arguments)[0]
    assert_tensors(tmp_path, saved)
    assert_equal(saved, ranks(size).run(load, trained=1, **arguments)[0])
