"""A rank whose model has another size or dtype: DeepSpeed's broadcast aborted or hung before anything was compared."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch

import deepspeed_muon
from tests.support import training
from tests.support.models import build


def try_model(rank: int, world_size: int, *, stage: int, how: str, client: str) -> Any:
    """Start an engine whose model differs on the last rank."""
    odd = rank == world_size - 1
    model = build("toy", exact=False)
    if how == "shape" and odd:
        model.lm_head.weight = torch.nn.Parameter(torch.randn(29, 17))
    if how == "dtype" and odd:
        model.lm_head.to(torch.float64)
    if how == "missing" and odd:
        del model.lm_head
    if how == "all" and odd:
        model = build("toy", width=20)
    config = training.ds_config(stage)
    given: dict[str, Any] = {"model_parameters": list(model.parameters())}
    if client == "instance":
        del config["optimizer"]
        given = {"optimizer": deepspeed_muon.Muon(model, lr=0.02)}
    try:
        engine, *_ = deepspeed.initialize(model=model, config=config, **given)
    except deepspeed_muon.RankDisagreementError as error:
        return {"message": str(error)}
    engine.destroy()
    return {"message": ""}


@pytest.mark.parametrize(
    ("stage", "how", "client", "said"),
    [
        (0, "shape", "config", ["parameter lm_head.weight", "float32 [29, 16]", "float32 [29, 17]"]),
        (2, "dtype", "instance", ["parameter lm_head.weight", "float32 [29, 16]", "float64 [29, 16]"]),
        (3, "missing", "config", ["parameter lm_head.weight", "<absent>"]),
        (1, "all", "config", ["parameter embed.weight", "float32 [29, 20]"]),
    ],
)
def test_every_rank_names_the_parameter(
    ranks: Any, stage: int, how: str, client: str, said: list[str]
) -> None:
    for report in ranks(2).run(try_model, stage=stage, how=how, client=client, timeout=60):
        assert all(part in report["message"] for part in [*said, "ranks [0]", "ranks [1]"]), report
        assert report["message"].count("\n") <= 21
