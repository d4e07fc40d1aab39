"""The same contract under the settings that people use: every variant must give the reference's update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deepspeed_muon.math.newton_schulz import DTYPES
from tests.support import training
from tests.support.contract import compare, compare_matrices
from tests.support.models import MATRICES
from tests.support.rounding import BF16_MODEL, HALF_MODEL
from tests.support.thinning import each_value, full, usual

# Each row changes one thing of a stage; tests/conformance has the ways of gradients at stages 1 and 2.
# The matrices of the toy model have 80 to 768 elements.
VARIANTS: dict[str, dict[str, Any]] = {
    "stage2-round-robin": {"stage": 2, "zero": {"round_robin_gradients": True}},
    "stage3-overlap": {"stage": 3, "zero": {"overlap_comm": True}},
    "stage3-small-buckets": {
        "stage": 3,
        "zero": {"reduce_bucket_size": 200, "stage3_prefetch_bucket_size": 100},
    },
    "stage3-all-reduce": {"stage": 3, "zero": {"reduce_scatter": False}},
    "stage3-sub-groups": {"stage": 3, "zero": {"sub_group_size": 150}},
    "stage3-persistent": {"stage": 3, "zero": {"stage3_param_persistence_threshold": 500}},
    "stage3-zero-init": {"stage": 3, "zero_init": True},
    "stage3-zero-init-sub-groups": {"stage": 3, "zero_init": True, "zero": {"sub_group_size": 100}},
    "stage1-offload": {"stage": 1, "zero": training.OFFLOAD},
    "stage2-offload": {"stage": 2, "zero": training.OFFLOAD},
    "stage3-offload": {"stage": 3, "zero": training.OFFLOAD},
    "stage3-offload-both": {
        "stage": 3,
        "zero": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    },
    "stage0-chunks": {"stage": 0, "params": {"exchange_chunk_numel": 300}},
    "stage3-hpz": {"stage": 3, "zero": {"zero_hpz_partition_size": 2}},
    "stage3-hpz-zero-init": {
        "stage": 3,
        "zero": {"zero_hpz_partition_size": 2, "sub_group_size": 300},
        "zero_init": True,
    },
    "stage1-not-contiguous": {"stage": 1, "zero": {"contiguous_gradients": False}},
    "stage3-not-contiguous": {"stage": 3, "zero": {"contiguous_gradients": False}},
    "stage1-overlap-round-robin": {"stage": 1, "zero": {"overlap_comm": True, "round_robin_gradients": True}},
    "stage2-data-efficiency": {
        "stage": 2,
        "extra": {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True}}},
    },
}
OLD_DEEPSPEED_TOO = {
    "stage2-round-robin",
    "stage3-sub-groups",
    "stage3-zero-init",
    "stage2-offload",
    "stage0-chunks",
}


# Near to another row of the table, or to other tests.
FULL = {
    "stage3-small-buckets",
    "stage3-all-reduce",
    "stage3-zero-init-sub-groups",
    "stage1-offload",
    "stage3-offload",
    "stage3-hpz-zero-init",
    "stage1-not-contiguous",
}


@pytest.mark.parametrize("name", usual(VARIANTS, VARIANTS.keys() - FULL, compat=OLD_DEEPSPEED_TOO))
@pytest.mark.parametrize("world", [full(2), 3])
def test_variant_matches_the_reference(ranks: Any, name: str, world: int) -> None:
    if "hpz" in name:
        world = 4  # in pairs
    settings = {"accumulation": 2, "clipping": 0.5, **VARIANTS[name]}
    results = ranks(world).run(training.train, **settings)
    compare(results, "toy", 2 * world, 0.5)
    assert sum(result["orthogonalized"] for result in results) == len(MATRICES["toy"])


@pytest.mark.parametrize(
    ("stage", "precision"),
    each_value(
        pytest.param(stage, precision, marks=[pytest.mark.compat] * (stage % 2))
        for stage in range(4)
        for precision in ("bf16", "fp16")
    ),
)
def test_half_precision(ranks: Any, stage: int, precision: str) -> None:
    params = {"wire_dtype": "auto", "ns_dtype": "auto"}
    results = ranks(2).run(training.train, stage=stage, precision=precision, clipping=0.5, params=params)
    assert results[0]["skipped"] == 0
    # The dtypes that ``auto`` takes on some machine.
    dtype = DTYPES[precision]
    arithmetic = replace(HALF_MODEL[precision], products=torch.bfloat16, exchanged=dtype)
    compare_matrices(results, "toy", 2, 0.5, arithmetic)


@pytest.mark.parametrize(
    ("stage", "accumulation_dtype"), [(1, "fp32"), (2, "bf16"), full(2, "fp32"), full(1, "bf16")]
)
def test_bf16_wrappers(ranks: Any, stage: int, accumulation_dtype: str) -> None:
    """Stage 1 with fp32 accumulation is BF16_Optimizer, all others are the ZeRO wrapper."""
    extra = {"data_types": {"grad_accum_dtype": accumulation_dtype}}
    results = ranks(3).run(training.train, stage=stage, precision="bf16", accumulation=2, extra=extra)
    compare_matrices(results, "toy", 6, 0.0, BF16_MODEL)
