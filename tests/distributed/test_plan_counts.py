"""What the plan predicts is what runs: owners, operations and bytes of real ranks, counted while they train."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspeed_muon.step import bound
from deepspeed_muon.step.gradient_status import read_together
from tests.support import training
from tests.support.counting import count_a_step, counted
from tests.support.thinning import full, pairwise, usual


def assert_as_predicted(result: dict[str, Any], *keys: str) -> None:
    for key in keys:
        really, predicted = result[key]
        assert really == predicted, (key, result)


# Every stage and number of ranks up to four once or twice; the rest, and eight ranks, are the long matrix.
CORE = {(3, 1), (0, 2), (1, 2), (2, 4), (3, 4)}


@pytest.mark.parametrize(("stage", "world"), usual(product((0, 1, 2, 3), (1, 2, 4, 8)), CORE))
def test_predictions_are_what_runs(ranks: Any, stage: int, world: int) -> None:
    method = "gram" if (stage + world) % 2 else "standard"
    for result in ranks(world).run(count_a_step, stage=stage, method=method):
        assert_as_predicted(result, "owners", "flops", "exchange")
        reserved, bound = result["buffers"]
        assert reserved <= bound, result
        # ZeRO pads flat buffers and shards, and sends flags and norms: parts of a percent of 14 thousand elements.
        really, predicted = result["zero"]
        assert really == pytest.approx(predicted, rel=0.02), result


@pytest.mark.parametrize(
    ("stage", "world", "kind", "params"),
    [
        (0, 2, "mixed", {}),
        full(1, 4, "mixed", {}),
        full(2, 3, "heads", {"matrices": {"*": {"heads": "config"}}}),
        full(3, 2, "mixed", {}),
        (3, 4, "heads", {"matrices": {"*": {"heads": "config"}}}),
        (2, 4, "mixed", {"variant": "normuon"}),
        (3, 3, "heads", {"variant": "normuon", "matrices": {"*": {"heads": "config"}}}),
    ],
)
def test_stacks_in_pieces(ranks: Any, stage: int, world: int, kind: str, params: dict[str, Any]) -> None:
    """Experts and heads that lie whole on a rank stay there; the planner counts the same."""
    found = ranks(world).run(count_a_step, stage=stage, method="standard", kind=kind, params=params)
    assert found[0]["pieces"] > len(found[0]["owners"][0]), "something is in pieces"
    for result in found:
        assert_as_predicted(result, "owners", "flops", "exchange")


@pytest.mark.parametrize(
    ("stage", "world", "optimizer"),
    pairwise(
        product((1, 2, 3), (1, 2, 4), ("ours", "ours, int8 momentum", "ours, int8 momentum, bf16 masters"))
    ),
)
def test_memory_is_what_is_kept(ranks: Any, stage: int, world: int, optimizer: str) -> None:
    """Of a decoder whose partitions need no padding and cut no block of 256 elements."""
    count = "benchmarks.state_memory:count_bytes"
    for found in ranks(world).run(count, model="tiny", stage=stage, optimizer=optimizer):
        predicted = found.pop("plan")
        for role in ("weights", "master_weights", "gradients", "gradient_copy", "momentum", "moments"):
            # Views of gradients, which keep them whole: at stage 2 those of a matrix at either end of a partition.
            cut = 2 * 2 * 176 * 64 if role == "gradients" and stage == 2 else 0
            assert 0 <= found[role] - predicted[role] <= cut, (role, found, predicted)
        assert found["exchange_buffers"] <= predicted["exchange_buffers"]


def call_collectives(rank: int, world_size: int) -> dict[str, float]:
    own, each = torch.ones(100), torch.ones(100 * world_size)
    # The names of torch 2.13 and newer, which torch.distributed's older functions call.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with counted() as counts:
        all_gather(each, own)
        reduce_scatter(own, each)
        all_gather(each, own, async_op=True).wait()
        dist.all_reduce(own)
        dist.all_reduce(own[:16])
        dist.all_to_all_single(each, each.clone())
    return counts.sent


def test_collectives_are_counted_by_any_name(ranks: Any) -> None:
    """The all-reduce of 64 bytes and the all-to-all are none of ZeRO's."""
    expected = {"_allgather_base_": 2 * 1200.0, "_reduce_scatter_base_": 1200.0, "allreduce_": 2 * 300.0}
    assert ranks(4).run(call_collectives) == [expected] * 4


class ScalarReads(TorchDispatchMode):
    """Counts the numbers that Python reads from the device: on a GPU the host waits for each.

    Without a GPU all is on the CPU. What would be there on a GPU too is what ``engine.step()`` has read together, and
    what is computed of nothing else.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count, self.copies, self.on_cpu = 0, 0, list[Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        known = bool(given) and all(any(each is other for other in self.on_cpu) for each in given)
        self.count += not known and func.overloadpacket.__name__ == "_local_scalar_dense"
        result = func(*args, **(kwargs or {}))
        self.on_cpu += [each for each in tree_leaves(result) if known and isinstance(each, Tensor)]
        return result

    def read_together(self, tensors: Any) -> list[Tensor]:
        self.copies += 1
        found = read_together(tensors)
        self.on_cpu += found
        return found


def waits_of_a_step(rank: int, world_size: int, *, stage: int, precision: str) -> list[int]:
    """Count the copies of several tensors to the CPU in ``engine.step()``, and the numbers it reads besides."""
    engine = training.make_engine(training.ds_config(stage, clipping=1.0, precision=precision))
    training.run_step(engine, 0, rank, world_size, 1)
    tokens, targets = training.batch(1, rank)
    engine.backward(engine(tokens, targets))
    with ScalarReads() as reads, mock.patch.object(bound, "read_together", reads.read_together):
        engine.step()
    return [reads.copies, reads.count]


@pytest.mark.parametrize(
    ("stage", "dtype"), [(1, "bf16"), (1, "fp16"), (2, "fp16"), (3, "bf16"), (3, "fp16")]
)
def test_the_host_waits_once_before_a_step(ranks: Any, stage: int, dtype: str) -> None:
    """Flags, overflow and norm are read at once; DeepSpeed looks at the norm, at ZeRO 1 and 2 again for each group."""
    assert ranks(2).run(waits_of_a_step, stage=stage, precision=dtype) == [[1, 0]] * 2
