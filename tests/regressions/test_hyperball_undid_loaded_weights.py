"""A step of hyperball took weights that were loaded or written during a run back to the norm of the first weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_set_full_fp32_param
from torch import Tensor

from tests.support import training
from tests.support.contract import params_of
from tests.support.models import MATRICES, build
from tests.support.thinning import usual

FACTOR = 5.0
LR = 0.02  # of tests.support.training


def put_in(engine: Any, how: str, folder: str) -> None:
    """Replace the matrices by ones of five times their norm, as programs do."""
    if how == "load_checkpoint":
        engine.load_checkpoint(folder, load_optimizer_states=False)
        return
    masters = training.full_masters(engine)
    for name, param in engine.module.named_parameters():
        if name in MATRICES["toy"]:
            safe_set_full_fp32_param(
                param,
                FACTOR * masters[name].view(param.ds_shape if hasattr(param, "ds_shape") else param.shape),
            )


def train(rank: int, world_size: int, *, stage: int, how: str, folder: str) -> list[dict[str, Tensor]]:
    """Return the masters after two steps, with the other weights put in, and a step later."""
    config = training.ds_config(stage, params=params_of("hyperball"))
    if how == "load_checkpoint":
        larger = build("toy", seed=1)
        with torch.no_grad():
            for param in larger.parameters():
                param.mul_(FACTOR)
        other = training.initialize(larger, config)
        other.save_checkpoint(folder)
        other.destroy()
    engine = training.initialize(build("toy", seed=0), config)
    masters = []
    for step in range(2):
        training.run_step(engine, step, rank, world_size, 1)
    masters.append(training.full_masters(engine))
    put_in(engine, how, folder)
    masters.append(training.full_masters(engine))
    training.run_step(engine, 2, rank, world_size, 1)
    masters.append(training.full_masters(engine))
    return masters


@pytest.mark.parametrize(
    ("stage", "how"),
    usual(
        [(stage, how) for stage in (1, 2, 3) for how in ("load_checkpoint", "safe_set_full_fp32_param")],
        [(2, "load_checkpoint"), (3, "safe_set_full_fp32_param")],
    ),
)
def test_weights_that_are_put_in_keep_their_norm(ranks: Any, tmp_path: Path, stage: int, how: str) -> None:
    before, loaded, after = ranks(2).run(train, stage=stage, how=how, folder=str(tmp_path))[0]
    for name in MATRICES["toy"]:
        norm = loaded[name].norm()
        assert norm > 3 * before[name].norm()
        # fp32: some roundings of a sum.
        torch.testing.assert_close(after[name].norm(), norm, rtol=1e-6, atol=0)
        # A chord of the ball; a step along the weights does not show.
        assert 0.5 * LR < float((after[name] - loaded[name]).norm() / norm) < 1.1 * LR
