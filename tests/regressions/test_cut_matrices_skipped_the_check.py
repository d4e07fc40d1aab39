"""With tensor parallelism weights became non-finite, or 1e10, and ``redone`` and ``failed`` stayed 0.

The matrices that tensor parallelism cuts went from the iteration to the weights without the check that every other
matrix passes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import deepspeed_muon
from deepspeed_muon.math.coefficients import band_of, resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.monitoring.measure import norm_bounds
from deepspeed_muon.monitoring.recorder import StepRecorder
from deepspeed_muon.plan.layout import MatrixLayout, TensorShards
from deepspeed_muon.plan.placement import sharded_placement
from deepspeed_muon.reference import newton_schulz
from deepspeed_muon.step import tensor_parallel as strategy
from deepspeed_muon.step.check import DistributedIteration, Result, ResultCheck
from deepspeed_muon.step.sharded import orthogonalize_sharded
from tests.support import tensor_parallel
from tests.support.comparisons import relative, within
from tests.support.contract import reference
from tests.support.models import MATRICES, batch
from tests.support.rounding import iteration_limit, limits
from tests.support.training import ds_config, heard, refusal

MODES = ("gather", "distributed")
CUT = sorted(name for name in MATRICES["even"] if "blocks" in name)


def train_scaled(
    rank: int,
    world_size: int,
    *,
    mode: str,
    factors: tuple[float, ...] = (1.0,),
    params: dict[str, Any] | None = None,
    garbage: int = 0,
) -> dict[str, Any]:
    """Train one step a factor, with the loss times it; return whole masters, counters, log and the error.

    The first ``garbage`` iterations of cut matrices on rank 1 return NaN.
    """
    messages = heard()
    left = [garbage if rank == 1 else 0]

    def spoiling(iterate: Any) -> Any:
        def broken(*args: Any, **kwargs: Any) -> torch.Tensor:
            left[0] -= 1
            return iterate(*args, **kwargs) * (float("nan") if left[0] >= 0 else 1.0)

        return broken

    config = ds_config(1, params={"tensor_parallel_mode": mode, **(params or {})})
    error = ""
    with mock.patch.object(strategy, "orthogonalize_sharded", spoiling(strategy.orthogonalize_sharded)):
        engine = tensor_parallel.make_engine("megatron", 2, config)
        optimizer = deepspeed_muon.muon_optimizer(engine)
        for runner in optimizer.runners:
            whole = runner._strategy._local
            whole._orthogonalize = spoiling(whole._orthogonalize)
        group = optimizer.runners[0].step_set.tensor_group
        masters = [tensor_parallel.assembled(engine, None, group)]
        for step, factor in enumerate(factors):
            engine.backward(engine(*batch(step, rank // 2)) * factor)
            if said := refusal(engine.step):
                error = f"step {step}: {said}"
            masters.append(tensor_parallel.assembled(engine, None, group))
    return {"masters": masters, **deepspeed_muon.health(engine), "messages": messages, "error": error}


def total(results: list[dict[str, Any]], counter: str) -> int:
    """Each rank reports its own counts until a sample is taken."""
    return sum(result[counter] for result in results)


@pytest.mark.parametrize("mode", MODES)
def test_an_overflowing_wire_spoils_nothing(ranks: Any, mode: str) -> None:
    """Directions beyond fp16's 65504 are infinite: no iteration can help, so the matrices keep their weights."""
    params = {"wire_dtype": "fp16", "nonfinite_grad": "error", "weight_decay": 0.0}
    results = ranks(2).run(train_scaled, mode=mode, factors=(1e12, 1.0), params=params)
    for result in results:
        start, spoilt, after = result["masters"]
        assert all(bool(torch.isfinite(value).all()) for value in (*spoilt.values(), *after.values()))
        for name in MATRICES["even"]:
            assert torch.equal(spoilt[name], start[name]), name
        # The step after the one that left the updates out raises before it changes anything.
        assert result["error"].startswith("step 1: NumericalError: "), result["error"]
        assert all(torch.equal(after[name], spoilt[name]) for name in after)
    assert total(results, "failed") == len(MATRICES["even"]) and total(results, "redone") == 0
    said = [message for result in results for message in result["messages"] if "blocks.0.up" in message]
    assert len(said) == 1 and "(16 x 16)" in said[0] and "wire_dtype fp16" in said[0]


@pytest.mark.kernels
@pytest.mark.parametrize("mode", MODES)
def test_one_wrong_result_is_redone(ranks: Any, mode: str) -> None:
    """Where a matrix stays cut, the ranks come to one verdict, also where only one of them sees the NaN."""
    results = ranks(2).run(train_scaled, mode=mode, garbage=1)
    assert total(results, "failed") == 0 and total(results, "redone") >= 1
    start, end, _, _ = reference("even", 1, 0.0, steps=1)
    allowed = limits(reference, "even", 1, 0.0, steps=1)
    for name in MATRICES["even"]:
        error = relative(results[0]["masters"][1][name], end[name], start[name])
        within(error, allowed.paths[name], f"path of {name}")


def cut_result(rank: int, wholes: torch.Tensor, dim: int) -> tuple[ResultCheck, Result]:
    """Return the result of this rank's parts of ``(3, 12, 20)``, cut over two ranks, and what checks it."""
    length = wholes.shape[1 + dim]
    sizes = (5, length - 5)
    parts = wholes.split(sizes, dim=1 + dim)[rank].contiguous()
    layout = MatrixLayout(
        "w",
        *parts.shape[1:],
        0,
        sharded_placement(0, parts[0].numel(), parts[0].numel()),
        shards=TensorShards(dim, sizes),
    )
    settings = NsSettings(resolve_schedule("quintic"))
    recorder = StepRecorder(every=0, check=True)
    check = ResultCheck(recorder, [layout] * 3, device=torch.device("cpu"), ns=settings)
    iterate = functools.partial(
        orthogonalize_sharded, group=dist.group.WORLD, shard_dim=dim - 2, shard_sizes=sizes
    )
    distributed = DistributedIteration(dist.group.WORLD, dim, sizes, iterate, counts=rank == 0)
    blocks = iterate(parts, settings=settings)
    return check, Result([(0, 0), (1, 0), (2, 0)], parts, blocks, [(1.0,)] * 3, distributed=distributed)


def assert_orthogonalized(update: torch.Tensor, matrix: torch.Tensor) -> None:
    expected = newton_schulz(matrix, resolve_schedule("quintic"))
    within(relative(update, expected), iteration_limit(matrix, torch.float32), "update")


def settle_parts(rank: int, world_size: int, *, dim: int) -> dict[str, Any]:
    """Check two cut matrices of elements of 1e20, whose squares are beyond fp32, and one that is right."""
    generator = torch.Generator().manual_seed(5)
    wholes = torch.randn(3, 12, 20, generator=generator) * torch.tensor([1e20, 1.0, 1e20])[:, None, None]
    check, result = cut_result(rank, wholes, dim)
    check.settle(result)
    return {"wholes": wholes, "updates": result.updates, "redone": check.recorder.redone}


@pytest.mark.parametrize("dim", [0, 1])
def test_squares_beyond_fp32_are_redone(ranks: Any, dim: int) -> None:
    """The plain iteration divides by an infinite norm and returns zeros; scaled first, it gives the right update."""
    results = ranks(2).run(settle_parts, dim=dim)
    assert [result["redone"] for result in results] == [2, 0]
    updates = torch.cat([result["updates"] for result in results], dim=1 + dim)
    for whole, update in zip(results[0]["wholes"], updates, strict=True):
        assert_orthogonalized(update, whole)


def leave_out_parts(rank: int, world_size: int, *, dim: int) -> dict[str, Any]:
    """Check cut matrices as on an accelerator in two steps, in which rank 1 alone has a NaN in the second matrix."""
    wholes = torch.randn(3, 12, 20, generator=torch.Generator().manual_seed(5))
    check, first = cut_result(rank, wholes, dim)
    check.is_deferred = True
    if rank == 1:
        first.blocks[1, 0, 0] = math.nan
    second = replace(first, blocks=first.blocks.clone())
    check.settle(first)
    ((_, flags),) = check.left_out
    check.read_verdicts([1])
    check.settle(second)
    counts = check.recorder.failed, check.recorder.redone
    return {"flags": flags, "counts": counts, "wholes": wholes, "updates": (first.updates, second.updates)}


@pytest.mark.parametrize("dim", [0, 1])
def test_on_an_accelerator_all_ranks_leave_out_what_one_has_wrong(ranks: Any, dim: int) -> None:
    """The next step computes it in fp32 on all of them; one counts it."""
    results = ranks(2).run(leave_out_parts, dim=dim)
    assert [result["flags"].tolist() for result in results] == [[False, True, False]] * 2
    assert [tuple(result["counts"]) for result in results] == [(1, 1), (0, 0)]
    steps = [torch.cat(parts, dim=1 + dim) for parts in zip(*(r["updates"] for r in results), strict=True)]
    assert not steps[0][1].any()
    for step, index in ((0, 0), (0, 2), (1, 0), (1, 1), (1, 2)):
        assert_orthogonalized(steps[step][index], results[0]["wholes"][index])


def train_diverging(rank: int, world_size: int, **settings: Any) -> dict[str, Any]:
    """Train in bf16 with cans, which a configuration refuses."""
    with mock.patch("deepspeed_muon.config.settings.tolerates_rounding", return_value=True):
        return train_scaled(rank, world_size, **settings)


@pytest.mark.parametrize("mode", MODES)
def test_a_diverging_schedule_is_caught(ranks: Any, mode: str) -> None:
    """Cans in bf16 maps singular values just above 1, where rounding puts them, to anything."""
    params = {
        "ns_schedule": "cans", "ns_dtype": "bf16", "ns_backend": "torch", "weight_decay": 0.0,
        "adjust_lr_fn": "original",
    }  # fmt: skip
    results = ranks(2).run(train_diverging, mode=mode, factors=(1.0,) * 3, params=params)
    band = band_of(resolve_schedule("cans"))
    for before, after in zip(results[0]["masters"], results[0]["masters"][1:], strict=False):
        for name in CUT:
            rows, cols = after[name].shape
            largest = 0.02 * max(1.0, rows / cols) ** 0.5 * norm_bounds(rows, cols, band)[1]
            assert float((after[name] - before[name]).norm()) <= largest, name
    if mode == "distributed":
        assert total(results, "redone") > 0
