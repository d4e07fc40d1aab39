"""Every registered variant against its float64 reference: the update depends on no stage, rank, cut or accumulation.

A new variant is tested here by being registered.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from deepspeed_muon.variants import VARIANTS
from tests.support import tensor_parallel, training
from tests.support.contract import compare
from tests.support.models import MATRICES
from tests.support.thinning import pairwise

# Ranks, and how many of them share a model. Tensor parallelism cuts rows and columns, heads and parts.
RANKS = ((1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (4, 4))
CASES = pairwise(itertools.product(VARIANTS, range(4), RANKS, (1, 2)))


@pytest.mark.parametrize(("variant", "stage", "ranks_and_size", "accumulation"), CASES)
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
SETTINGS: dict[str, dict[str, Any]] = {
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
    pairwise(itertools.product(VARIANTS, KINDS, SETTINGS, [2, 4])),
)
def test_other_settings(ranks: Any, variant: str, kind: str, name: str, world: int) -> None:
    settings = dict(SETTINGS[name])
    params = {"variant": variant, **KINDS[kind], **settings.pop("params", {})}
    results = ranks(world).run(training.train, kind=kind, clipping=0.5, params=params, **settings)
    compare(results, kind, world, 0.5, variant=variant)
    for result in results:
        assert result["bytes_sent"] == result["planned_bytes"]
    assert sum(result["orthogonalized"] for result in results) == len(MATRICES[kind])
