"""The update does not depend on the tensor-parallel degree: every case against one process in float64."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import tensor_parallel, training
from tests.support.comparisons import all_within, relative
from tests.support.contract import (
    compare,
    compare_matrices,
    compare_norms,
    compare_paths,
    reference,
    train_reference,
)
from tests.support.models import MATRICES, build
from tests.support.oracle import Oracle, matrices_of
from tests.support.rounding import BF16_MODEL, FP32_MODEL, Arithmetic, limits
from tests.support.thinning import full, usual

CASES = list(itertools.product((0, 1, 2, 3), ((2, 2), (4, 2), (4, 4))))
OLD_DEEPSPEED_TOO = {(1, (4, 2)), (3, (4, 2))}
CORE = OLD_DEEPSPEED_TOO | {(0, (4, 2)), (2, (4, 4))}


@pytest.mark.parametrize(("stage", "ranks_and_size"), usual(CASES, CORE, compat=OLD_DEEPSPEED_TOO))
def test_megatron_style(ranks: Any, stage: int, ranks_and_size: tuple[int, int]) -> None:
    """Column- and row-parallel matrices, cut along short and long sides, and one that all ranks hold."""
    world, size = ranks_and_size
    clipping = 0.5 if (stage + size) % 2 else 0.0
    results = ranks(world).run(
        tensor_parallel.train, tensor_size=size, stage=stage, clipping=clipping, accumulation=2
    )
    compare(results, "even", 2 * world // size, clipping)
    assert sum(result["orthogonalized"] for result in results) == len(MATRICES["even"])
    for result in results:
        prepared, ran, expected_shapes = result["shapes"]
        assert prepared == ran == expected_shapes


@pytest.mark.parametrize(("stage", "size"), [(0, 2), full(1, 2), full(3, 2), full(2, 4)])
def test_int8_momentum(ranks: Any, stage: int, size: int) -> None:
    """Blocks are counted in each shard: the codes are other ones than without tensor parallelism, and as good."""
    results = ranks(4).run(
        tensor_parallel.train, tensor_size=size, stage=stage, params={"momentum_dtype": "int8"}
    )
    compare_matrices(results, "even", 4 // size, 0.0, Arithmetic(momentum=torch.int8))
    momentum = reference("even", 4 // size, 0.0)[3]
    # Half a code of 127 a step, which the decay keeps from adding up.
    errors = {name: relative(results[0]["momentum"][name], momentum[name]) for name in MATRICES["even"]}
    all_within(errors, 0.03, "momentum of")


@pytest.mark.parametrize("stage", [0, full(1), full(2), 3])
def test_autotp(ranks: Any, stage: int) -> None:
    """``tensor_parallel.autotp_size`` 2 on two data-parallel ranks."""
    clipping = 0.5 if stage % 2 else 0.0
    results = ranks(4).run(tensor_parallel.train, style="autotp", stage=stage, clipping=clipping)
    compare_matrices(results, "even", 2, clipping, FP32_MODEL)
    assert sum(result["orthogonalized"] for result in results) == len(MATRICES["even"])


def in_order(shards: Tensor, dim: int) -> Tensor:
    """Undo a cut in which each of two ranks has a half of each of two parts."""
    return shards.unflatten(dim, (2, 2, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def test_autotp_cuts_fused_blocks(ranks: Any) -> None:
    """The parts that its record tells of are orthogonalised apart, as ``split`` asks."""
    halves = {"matrices": {"*.up.weight": {"split": "gate_up"}}}
    results = ranks(2).run(tensor_parallel.train, style="autotp-halves", params=halves)
    params = results[0]["params"]
    for name in MATRICES["even"] - {"mix.weight"}:
        params[name] = in_order(params[name], int("down" in name))
    compare_matrices(results, "even", 1, 0.0, FP32_MODEL, grids="even-halves")


def test_heads_of_the_configuration(ranks: Any) -> None:
    """``heads: config`` takes the counts of the model: two query heads and one key head on each of two ranks."""
    results = ranks(2).run(
        tensor_parallel.train, style="sliced", kind="heads", params={"matrices": {"*": {"heads": "config"}}}
    )
    compare(results, "heads", 1, 0.0)


def test_bf16(ranks: Any) -> None:
    results = ranks(4).run(
        tensor_parallel.train, precision="bf16", params={"wire_dtype": "auto", "ns_dtype": "bf16"}
    )
    arithmetic = replace(BF16_MODEL, products=torch.bfloat16, exchanged=torch.bfloat16)
    compare_matrices(results, "even", 2, 0.0, arithmetic)


@pytest.mark.parametrize("style", ["megatron", "autotp"])
def test_clipping_in_bf16_without_zero(ranks: Any, style: str) -> None:
    """DeepSpeed's norm has the shards of the first tensor-parallel rank only."""
    settings = {"stage": 0, "precision": "bf16", "clipping": 0.5, "params": {"wire_dtype": "auto"}}
    results = ranks(2).run(tensor_parallel.train, style=style, **settings)
    # A shard that is left out changes the norm by 10 % and more.
    compare_matrices(results, "even", 1, 0.5, replace(BF16_MODEL, exchanged=torch.bfloat16))


@pytest.mark.parametrize("stage", [full(1), 3])
def test_resuming_on_the_same_topology(ranks: Any, tmp_path: Path, stage: int) -> None:
    """DeepSpeed's own checkpoints carry on as if nothing had happened."""
    results = ranks(4).run(tensor_parallel.train, stage=stage, checkpoint=str(tmp_path))
    compare(results, "even", 2, 0.0)


@functools.cache
def half_idle() -> Any:
    """The reference where the second half of a matrix's inputs is zero: the columns of one of two shards."""
    model = build("even")
    down = model.get_submodule("blocks.0.down")
    is_used = torch.arange(16) < 8
    down.register_forward_pre_hook(lambda _, inputs: (inputs[0] * is_used,))
    return train_reference(model, Oracle(matrices_of(MATRICES["even"])), 1)


def test_a_shard_without_gradient_joins(ranks: Any) -> None:
    """The other shards of its matrix have one: it must neither be left out nor leave the others waiting."""
    start, end, norms = half_idle()
    allowed = limits(half_idle)
    for result in ranks(2).run(tensor_parallel.train, dead=True):
        compare_paths(result["params"], start, end, allowed)
        compare_norms(result["norms"], norms, allowed.norms)


REFUSED = {
    "unmarked": ("values differ between tensor-parallel ranks, but it is not marked", {"mark": "none"}),
    "no dimension": ("without the dimension that is cut (partition_dim)", {"mark": "no dimension"}),
    "uneven": ("its shards are unequal, [[11, 16], [5, 16]]", {"mark": "uneven"}),
}


@pytest.mark.parametrize("difference", list(REFUSED))
def test_refused_on_every_rank(ranks: Any, difference: str) -> None:
    """A shard is never orthogonalised as if it were the matrix."""
    text, arguments = REFUSED[difference]
    for message in ranks(2).run(tensor_parallel.failing, **arguments):
        assert message.startswith("ConfigError: tensor parallelism: "), message
        assert text in message and "optimizer.params.exclude" in message


@pytest.mark.parametrize(("stage", "client"), [full(0, "Muon"), (1, "Muon"), (3, "zero.Init")])
def test_an_optimizer_of_the_program_is_routed_again(ranks: Any, stage: int, client: str) -> None:
    """AutoTP cuts the parameters that it has, and replaces those that were made under zero.Init."""
    # zero.Init divides what AutoTP does not cut over the tensor-parallel ranks, too.
    run = {"style": "autotp", "stage": stage, "params": {"exclude": ["mix.weight"]}}
    expected, results = (
        ranks(2).run(tensor_parallel.train, **run, client=client_kind) for client_kind in ("", client)
    )
    for actual, reference_result in zip(results, expected, strict=True):
        training.assert_same_bits(actual, reference_result, "params", "momentum")


def test_an_optimizer_of_the_program_divides_shards_into_blocks(ranks: Any) -> None:
    params = {"matrices": {"blocks.0.up.weight": {"heads": 2}}}
    expected, actual = (
        ranks(2).run(tensor_parallel.train, params=params, client=client) for client in ("", "Muon")
    )
    training.assert_same_bits(actual[0], expected[0], "params", "momentum")
