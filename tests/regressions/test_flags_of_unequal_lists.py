"""Ranks of a tensor-parallel group whose AdamW parameters differed exchanged flags by position: wrong ones, or none.

A parameter then took part in a step, or was skipped, by the flag of another one; with lists of unequal length the ranks
waited for each other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support import tensor_parallel, training
from tests.support.training import ds_config


def start(rank: int, world_size: int, *, stage: int, how: str) -> str:
    """Start an engine whose AdamW parameters are others, or others in order, on the last rank of the group."""
    mpu = tensor_parallel.Mpu(2)
    model = tensor_parallel.megatron_model(mpu.tensor)
    last = rank % 2 == 1
    extra = {"first": nn.Parameter(torch.ones(3)), "second": nn.Parameter(torch.ones(5))}
    if how == "more" and last:
        extra["third"] = nn.Parameter(torch.ones(2))
    for name in sorted(extra, reverse=how == "order" and last):
        model.register_parameter(
            "renamed" if how == "name" and last and name == "first" else name, extra[name]
        )
    return training.refusal(lambda: training.initialize(model, ds_config(stage), mpu=mpu))


@pytest.mark.parametrize(
    ("stage", "how", "said"),
    [
        (0, "more", ["rank 0: embed.weight", "rank 1: third"]),
        (1, "order", ["rank 0: first", "rank 1: second"]),
        (1, "name", ["rank 0: first", "rank 1: renamed"]),
    ],
)
def test_refused_on_every_rank(ranks: Any, stage: int, how: str, said: list[str]) -> None:
    for message in ranks(2).run(start, stage=stage, how=how):
        assert message.startswith("PlanMismatchError: ") and "different parameters" in message, message
        assert all(words in message for words in said), message
