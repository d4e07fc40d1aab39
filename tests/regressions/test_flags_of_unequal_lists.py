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
        (0, "more", ["'second', 'embed.weight'", "'second', 'third', 'embed.weight'"]),
        (1, "order", ["'first', 'second', 'embed.weight'", "'second', 'first', 'embed.weight'"]),
        (1, "name", ["'first', 'second', 'embed.weight'", "'renamed', 'second', 'embed.weight'"]),
    ],
)
def test_refused_on_every_rank(ranks: Any, stage: int, how: str, said: list[str]) -> None:
    for message in ranks(2).run(start, stage=stage, how=how):
        assert message.startswith("PlanMismatchError: the ranks do not agree:\nparameters of step set"), (
            message
        )
        shown = [text.partition(";")[0] for text in message.split("ranks [")[1:]]
        for rank, (words, text) in enumerate(zip(said, shown, strict=True)):
            assert text.startswith(f"{rank}]: [") and words in text, message
