"""What users trust of DeepSpeed's own Muon: its numbers, in the settings in which they depend on how gradients travel.

Every case takes the whole gradient of the whole batch, clipped by nothing, through the float64 reference.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import pytest

import deepspeed_muon
from tests.support import training
from tests.support.contract import STEPS, compare, compare_norms, compare_paths, train_reference
from tests.support.models import MATRICES, batch, build
from tests.support.oracle import Oracle, matrices_of
from tests.support.rounding import limits
from tests.support.thinning import full, usual

# The four matrices of "wide" do not fill three partitions evenly: at least one is cut.
PATHS: dict[str, dict[str, Any]] = {
    "all-reduce": {"reduce_scatter": False},
    "reduce-scatter": {"reduce_scatter": True},
    "reduce-by-rank": {"reduce_scatter": True, "use_multi_rank_bucket_allreduce": False},
    # A gradient that no bucket holds takes another way, and gradients that are not copied into one another's buffer.
    "extra-large": {"reduce_bucket_size": 100, "contiguous_gradients": True},
    "not-contiguous": {"reduce_bucket_size": 100, "contiguous_gradients": False},
    "overlap": {"overlap_comm": True, "contiguous_gradients": True},
}
CORE = {
    (1, "gram", "reduce-scatter", 1),
    (2, "standard", "all-reduce", 1),
    (2, "gram", "overlap", 3),
    (1, "standard", "extra-large", 1),
    (2, "standard", "not-contiguous", 3),
}
CASES = list(product((1, 2), ("gram", "standard"), PATHS, (1, 3)))


@pytest.mark.kernels
@pytest.mark.parametrize(("stage", "method", "path", "accumulation"), usual(CASES, CORE))
def test_a_cut_matrix_gets_the_update_of_its_full_gradient(
    ranks: Any, stage: int, method: str, path: str, accumulation: int
) -> None:
    settings: dict[str, Any] = {"zero": PATHS[path], "params": {"ns_method": method}}
    results = ranks(3).run(training.train, stage=stage, kind="wide", accumulation=accumulation, **settings)
    compare(results, "wide", 3 * accumulation, 0.0)
    assert all(travelling > 0 for *_, travelling in [max(r["layout"]) for r in results]), "no matrix was cut"


@functools.lru_cache
def reference_on_sums() -> tuple[Any, Any, list[float]]:
    """Train the reference on the sums of two micro-batches."""
    return train_reference(build("toy"), Oracle(matrices_of(MATRICES["toy"])), 2, STEPS, share=1.0)


def train_by_hand(
    rank: int, world_size: int, *, stage: int, how: str = "engine", extra: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train with ``engine.backward``, or with ``backward()`` of the loss itself."""
    engine = training.make_engine(training.ds_config(stage, extra=extra))
    norms = []
    for step in range(STEPS):
        loss = engine(*batch(step, rank))
        if how == "engine":
            engine.backward(loss)
        elif how == "loss":
            loss.backward()
        else:
            engine.scale(loss).backward()
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return {
        **training.outcome(engine),
        "norms": norms,
        "steps": engine.global_steps,
        "skipped": engine.skipped_steps + deepspeed_muon.muon_optimizer(engine).skipped_steps,
    }


@pytest.mark.parametrize(("stage", "how"), [(1, "scale"), (2, "loss"), (3, "loss")])
def test_plain_backward_of_the_loss(ranks: Any, stage: int, how: str) -> None:
    """``loss.backward()`` without ``engine.backward``, as torch programs write it. DeepSpeed refuses it at stage 0."""
    results = ranks(2).run(train_by_hand, stage=stage, how=how)
    assert all(report["steps"] == STEPS and report["skipped"] == 0 for report in results)
    compare(results, "toy", 2, 0.0)


@pytest.mark.parametrize("stage", [2, full(1), full(0)])
def test_gradients_that_are_summed_over_the_ranks(ranks: Any, stage: int) -> None:
    """``gradient_allreduce_op: sum``: momentum and norm are those of the sum. DeepSpeed refuses it at stage 3."""
    start, end, norms = reference_on_sums()
    allowed = limits(reference_on_sums)
    for report in ranks(2).run(train_by_hand, stage=stage, extra={"gradient_allreduce_op": "sum"}):
        compare_paths(report["params"], start, end, allowed)
        compare_norms(report["norms"], norms, allowed.norms)
