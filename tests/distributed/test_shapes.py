"""Weights that are more than one matrix: fused projections, heads, stacked experts, convolutions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepspeed_muon.checkpoint.index import load_index
from tests.support import training
from tests.support.checkpoints import assert_equal, load, save
from tests.support.contract import compare, compare_matrices
from tests.support.models import FUSED_PARAMS, FUSED_SPLITS, MATRICES
from tests.support.rounding import BF16_MODEL
from tests.support.thinning import full

WITHOUT_HEADS = {"matrices": FUSED_SPLITS}


@pytest.mark.parametrize(
    ("stage", "world", "zero"),
    [
        full(0, 2, {}),
        full(1, 3, {}),
        full(2, 4, {"round_robin_gradients": True}),
        pytest.param(3, 2, {"sub_group_size": 400}, marks=pytest.mark.compat),
        full(3, 4, {}),
        full(1, 2, training.OFFLOAD),
    ],
)
def test_fused_projections_and_their_heads(ranks: Any, stage: int, world: int, zero: dict[str, Any]) -> None:
    """Parts of rows and of columns, heads inside them, experts stored either way round."""
    arguments = {"stage": stage, "zero": zero, "zero_init": stage == 3, "clipping": 0.5}
    results = ranks(world).run(training.train, kind="fused", params=FUSED_PARAMS, **arguments)
    compare(results, "fused", world, 0.5)
    assert sum(result["orthogonalized"] for result in results) == len(MATRICES["fused"])
    for result in results:  # kernels are chosen before the first step, for what runs and for nothing else
        prepared, ran, expected_shapes = result["shapes"]
        assert prepared == ran == expected_shapes
    assert any(result["shapes"][0] for result in results)


def test_bf16_optimizer_splits_too(ranks: Any) -> None:
    """BF16_Optimizer, which DeepSpeed's own per_head_muon passes by. The bound is argued in test_equivalence."""
    arguments = {"stage": 1, "precision": "bf16", "extra": training.FP32_SUMS}
    results = ranks(2).run(training.train, kind="fused", params=FUSED_PARAMS, **arguments)
    compare_matrices(results, "fused", 2, 0.0, BF16_MODEL)


@pytest.mark.parametrize(("stage", "world"), [full(0, 2), full(1, 3), full(2, 2), (3, 4)])
def test_convolutions(ranks: Any, stage: int, world: int) -> None:
    """Conv1d, 2d and 3d are one filter bank each; depthwise and transposed ones go to AdamW."""
    results = ranks(world).run(training.train, stage=stage, kind="convolutions", zero_init=stage == 3)
    compare(results, "convolutions", world, 0.0)


def test_fused_weights_are_restored_exactly(ranks: Any, tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "kind": "fused", "params": WITHOUT_HEADS}
    saved = ranks(3).run(save, stage=2, **arguments)[0]
    assert_equal(saved, ranks(2).run(load, stage=3, **arguments)[0])
    assert load_index(tmp_path).parameters["self_attn.c_attn.weight"].transposed
