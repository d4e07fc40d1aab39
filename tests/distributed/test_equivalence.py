"""The contract: an update depends on no stage, rank, cut, accumulation or setting, and it is the reference's.

A new variant is tested here by being registered.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from deepspeed_muon.math.newton_schulz import DTYPES
from deepspeed_muon.variants import VARIANTS
from tests.support import tensor_parallel, training
from tests.support.contract import compare, compare_matrices
from tests.support.engines import ENGINES
from tests.support.models import MATRICES
from tests.support.rounding import BF16_MODEL, HALF_MODEL
from tests.support.thinning import each_value, full, usual

CASES = list(product((0, 1, 2, 3), (1, 2, 3, 4), (1, 2), (0.0, 0.5)))
# The fast core: every stage with every world size once, accumulation and clipping alternating (pairwise).
CORE = {
    (stage, world, accumulation, clipping)
    for stage, world, accumulation, clipping in CASES
    if (accumulation == 2) == bool((stage + world) % 2) and (clipping > 0) == bool((stage + world // 2) % 2)
}
# Every stage once.
OLD_DEEPSPEED = {(0, 2, 1, 0.5), (1, 3, 1, 0.0), (2, 2, 1, 0.5), (3, 4, 2, 0.5)}


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("stage", "world", "accumulation", "clipping"), usual(CASES, CORE, compat=OLD_DEEPSPEED)
)
def test_matches_the_reference(
    ranks: Any, stage: int, world: int, accumulation: int, clipping: float
) -> None:
    results = ranks(world).run(training.train, stage=stage, accumulation=accumulation, clipping=clipping)
    compare(results, "toy", accumulation * world, clipping)
    total = sum(result["orthogonalized"] for result in results)
    assert total == len(MATRICES["toy"]), "Newton-Schulz runs once per matrix and step over all ranks"


# Ranks, and how many of them share a model. Tensor parallelism cuts rows and columns, heads and parts.
RANKS = ((1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (4, 4))
INVARIANCE = each_value(product(VARIANTS, range(4), RANKS, (1, 2)))


@pytest.mark.parametrize(("variant", "stage", "ranks_and_size", "accumulation"), INVARIANCE)
def test_invariance(
    ranks: Any, variant: str, stage: int, ranks_and_size: tuple[int, int], accumulation: int
) -> None:
    """Heads, unequal parts, weights stored as input x output; also where a matrix is cut by rows or columns."""
    world, size = ranks_and_size
    model = {"style": "sliced", "kind": "fused", "tensor_size": size}
    settings = {"stage": stage, "accumulation": accumulation, "clipping": 0.5}
    params = {**tensor_parallel.BLOCKS, "variant": variant}
    results = ranks(world).run(tensor_parallel.train, params=params, **model, **settings)
    replicas = accumulation * world // size
    compare(results, "fused", replicas, 0.5, variant=variant, grids="fused-over-ranks")


# Experts, convolutions, prime sizes, partitions without a matrix, heads.
KINDS: dict[str, dict[str, Any]] = {
    "toy": {},
    "mixed": {},
    "wide": {},
    "single": {},
    "heads": {"matrices": {"*": {"heads": "config"}}},
}
# What else decides where fragments lie and travel.
LAYOUTS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "offload": {"stage": 2, "zero": training.OFFLOAD},
    "round-robin": {"stage": 2, "zero": {"round_robin_gradients": True}},
    "sub-groups": {"stage": 3, "zero": {"sub_group_size": 150}},
    "chunks": {"stage": 3, "params": {"exchange_chunk_numel": 300}},
    "chunks without overlap": {
        "stage": 1,
        "params": {"exchange_chunk_numel": 300, "exchange_overlap": False},
    },
}


@pytest.mark.parametrize(
    ("variant", "kind", "name", "world"),
    each_value(product(VARIANTS, KINDS, LAYOUTS, [2, 4])),
)
def test_layouts(ranks: Any, variant: str, kind: str, name: str, world: int) -> None:
    settings = dict(LAYOUTS[name])
    params = {"variant": variant, **KINDS[kind], **settings.pop("params", {})}
    results = ranks(world).run(training.train, kind=kind, clipping=0.5, params=params, **settings)
    compare(results, kind, world, 0.5, variant=variant)
    for result in results:
        assert result["bytes_sent"] == result["planned_bytes"]
    assert sum(result["orthogonalized"] for result in results) == len(MATRICES[kind])


# Each row changes one thing of a stage; tests/conformance has the ways of gradients at stages 1 and 2.
# The matrices of the toy model have 80 to 768 elements.
NAMES = (
    *("1-overlap-round-robin", "2-offload", "3-overlap", "3-sub-groups", "3-persistent", "3-zero-init"),
    *("3-offload-both-pinned", "3-hpz", "3-not-contiguous"),
)
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: ENGINES[name] for name in NAMES},
    "0-chunks": {"stage": 0, "params": {"exchange_chunk_numel": 300}},
    "2-round-robin": {"stage": 2, "zero": {"round_robin_gradients": True}},
    "2-data-efficiency": {
        "stage": 2,
        "extra": {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True}}},
    },
}
OLD_DEEPSPEED_TOO = {"0-chunks", "2-offload", "2-round-robin", "3-sub-groups", "3-zero-init"}


@pytest.mark.parametrize("name", usual(SETTINGS, SETTINGS, compat=OLD_DEEPSPEED_TOO))
@pytest.mark.parametrize("world", [full(2), 3])
def test_settings(ranks: Any, name: str, world: int) -> None:
    if "hpz" in name:
        world = 4  # in pairs
    settings = {"accumulation": 2, "clipping": 0.5, **SETTINGS[name]}
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


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("stage", "world", "kind", "variant", "mode"),
    [
        full(0, 2, "toy", "muon", "independent"),
        (1, 2, "toy", "muon", "cautious"),
        full(3, 2, "toy", "muon", "independent"),
        full(0, 2, "mixed", "normuon", "cautious"),
        pytest.param(1, 2, "toy", "normuon", "independent", marks=pytest.mark.compat),
        pytest.param(3, 2, "mixed", "normuon", "decoupled", marks=pytest.mark.compat),
        (3, 4, "toy", "normuon", "cautious"),
        full(2, 3, "mixed", "normuon", "cautious"),
        full(3, 3, "wide", "normuon", "independent"),
    ],
)
def test_kinds_of_decay(ranks: Any, stage: int, world: int, kind: str, variant: str, mode: str) -> None:
    """Row moments divide by what the iteration left of a row: its rounding goes in once more, within the tolerance."""
    settings = {"variant": variant, "weight_decay_mode": mode}
    results = ranks(world).run(training.train, stage=stage, kind=kind, clipping=0.5, params=settings)
    compare(results, kind, world, 0.5, variant=variant, decay_mode=mode)
