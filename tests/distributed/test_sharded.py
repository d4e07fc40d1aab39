"""orthogonalize_sharded against the unsharded iteration and the float64 reference, on real process groups."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed_muon import NsSettings, orthogonalize, orthogonalize_sharded, sharded
from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.reference import newton_schulz
from tests.support.comparisons import relative, within
from tests.support.matrices import matrix
from tests.support.rounding import iteration_limit
from tests.support.thinning import usual
from tests.support.training import refusal

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

SHAPES = [(1, 1), (1, 9), (9, 1), (17, 17), (13, 31), (31, 13), (64, 256), (256, 64), (96, 200)]
KINDS = ["gaussian", "low-rank", "ill-conditioned", "tiny", "tiniest", "huge"]


def settings(dtype: str = "fp32", method: str = "gram") -> NsSettings:
    return NsSettings(resolve_schedule("quintic"), method, DTYPES[dtype])  # type: ignore[arg-type]


def cases(world_size: int, dtype: str, method: str, count: int) -> list[dict[str, Any]]:
    """Draw shapes, spectra, cuts and batches from a fixed seed: every shape and both sides come up, some often."""
    draw = random.Random(f"{world_size} {dtype} {method}")
    results = []
    for number in range(count):
        rows, cols = SHAPES[number % len(SHAPES)]
        dim = -2 if (number // len(SHAPES)) % 2 else -1
        cuts = sorted(draw.randint(0, (rows, cols)[dim]) for _ in range(world_size - 1))
        ends = [0, *cuts, (rows, cols)[dim]]
        sizes = [b - a for a, b in itertools.pairwise(ends)]
        # What a half format adds to the null space of a small low-rank matrix is as large as the matrix, and the
        # unsharded iteration errs by 0.6 there: nothing to compare.
        kinds = [kind for kind in KINDS if kind != "low-rank" or dtype == "fp32" or min(rows, cols) >= 64]
        kinds = [draw.choice(kinds) for _ in range(draw.choice([1, 1, 3]))]
        results.append({"shape": [rows, cols], "dim": dim, "sizes": sizes, "kinds": kinds})
    return results


def batch_of(case: dict[str, Any]) -> torch.Tensor:
    return torch.stack([matrix(kind, *case["shape"]) for kind in case["kinds"]])


def shards_of_results(
    rank: int, world_size: int, *, dtype: str, method: str, count: int
) -> list[torch.Tensor]:
    """Orthogonalise every case; return this rank's shards."""
    results = []
    for case in cases(world_size, dtype, method, count):
        shard = batch_of(case).split(case["sizes"], dim=case["dim"])[rank]
        before = shard.clone()
        result = orthogonalize_sharded(
            shard, group=dist.group.WORLD, shard_dim=case["dim"], settings=settings(dtype, method)
        )
        assert result.shape == shard.shape and result.dtype == DTYPES[dtype]
        assert torch.equal(shard, before), "the input is the caller's"
        results.append(result)
    return results


@functools.cache
def reference(kind: str, rows: int, cols: int, dtype: str) -> tuple[torch.Tensor, float]:
    """Return the result in float64, and how far one in another dtype may be from it."""
    full = matrix(kind, rows, cols)
    return newton_schulz(full, settings().coefficients), iteration_limit(full, DTYPES[dtype])


CASES = list(itertools.product([1, 2, 3, 4], DTYPES, ["gram", "standard"]))
CORE = {(3, "fp32", "gram"), (2, "bf16", "gram"), (4, "fp16", "standard")}


@pytest.mark.parametrize(("world", "dtype", "method"), usual(CASES, CORE))
def test_shards_give_the_result_of_the_matrix(ranks: Any, world: int, dtype: str, method: str) -> None:
    """Uneven and empty shards, both sides, wide and tall, batches, tiny and huge scales."""
    count = 2 * len(SHAPES)
    by_rank = ranks(world).run(shards_of_results, dtype=dtype, method=method, count=count)
    for case, *shards in zip(cases(world, dtype, method, count), *by_rank, strict=True):
        results = torch.cat(shards, dim=case["dim"])
        for kind, full, result in zip(case["kinds"], batch_of(case), results, strict=True):
            exact, limit = reference(kind, *case["shape"], dtype)
            unsharded = orthogonalize(full, settings=settings(dtype, method))
            within(relative(result, exact), limit, f"{kind} {case['shape']}")
            # Each of the two is within the limit of float64.
            difference = float((result.double() - unsharded.double()).norm() / exact.norm())
            within(difference, 2 * limit, f"{kind} {case['shape']}, not sharded")


def subgroup_and_counts(rank: int, world_size: int) -> dict[str, Any]:
    """Two groups of two ranks work on different matrices at once, and each rank alone; count the all-reduces."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    subgroup = groups[rank // 2]
    full = matrix("gaussian", 12 + rank // 2, 40)
    calls: list[int] = []
    original = dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype != torch.float64:  # in which the ranks compare their arguments
            calls.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    shard = full.chunk(2, dim=1)[rank % 2]
    with mock.patch.object(sharded.dist, "all_reduce", counting):
        result = orthogonalize_sharded(shard, group=subgroup, shard_dim=1, settings=settings())
    whole = orthogonalize(full, settings=settings())
    alone = [dist.new_group([member]) for member in range(world_size)][rank]  # a dimension of 1 of a mesh
    assert torch.equal(orthogonalize_sharded(full, group=alone, shard_dim=1, settings=settings()), whole)
    expected = whole.chunk(2, dim=1)[rank % 2]
    outside = refusal(
        lambda: orthogonalize_sharded(full, group=groups[1 - rank // 2], shard_dim=0, settings=settings())
    )
    return {
        "error": relative(result, expected),
        "limit": 2 * iteration_limit(full, torch.float32),
        "calls": calls,
        "outside": outside,
    }


def test_explicit_subgroups_and_one_all_reduce_per_restart(ranks: Any) -> None:
    for rank, result in enumerate(ranks(4).run(subgroup_and_counts)):
        within(result["error"], result["limit"], "not cut")
        assert result["calls"] == [(12 + rank // 2) ** 2] * 2, "the start and the one restart of fp32"
        assert "must be a member" in result["outside"]


def refused(rank: int, world_size: int) -> dict[str, str]:
    """Give arguments of which one rank's does not fit, and return what every rank raised."""
    group = dist.group.WORLD
    good = torch.ones(4, 6)
    odd = rank == 1
    attempts: dict[str, dict[str, Any]] = {
        "group": {"x": good, "group": None},
        "dimension": {"x": good, "shard_dim": 2 if odd else -1},
        "vector": {"x": good[0] if odd else good},
        "integers": {"x": good.long() if odd else good},
        "other side": {"x": torch.ones(5, 6) if odd else good},
        "sides": {"x": good, "shard_dim": 0 if odd else -1},
        "matrices": {"x": good.expand(3, 4, 6) if odd else good},
        "settings": {"x": good, "settings": settings(method="standard" if odd else "gram")},
    }
    messages = {}
    for name, arguments in attempts.items():
        arguments = {"group": group, "shard_dim": -1, "settings": settings(), **arguments}
        call = functools.partial(orthogonalize_sharded, arguments.pop("x"), **arguments)
        messages[name] = refusal(call)
    return messages


def test_misfits_are_refused_on_every_rank(ranks: Any) -> None:
    first, second = ranks(2).run(refused)
    for messages in (first, second):
        assert "no default group" in messages["group"].replace("\n", " ")
        assert all(messages.values())
        assert "length of the other side: ranks [0]: 4; ranks [1]: 5" in messages["other side"]
        assert "shard_dim: ranks [0]: -1; ranks [1]: -2" in messages["sides"]
        assert "matrices: ranks [0]: 1; ranks [1]: 3" in messages["matrices"]
        assert "settings: ranks [0]: " in messages["settings"] and "standard" in messages["settings"]
    assert "rank 1: ConfigError: orthogonalize_sharded needs floating" in first["vector"]
    assert "shape (6,)" in second["vector"]
