"""A layer that a program stopped using kept moving on its last gradient, at ZeRO 3 and wherever ZeRO offloads.

A layer used in step 0 alone moved by 0.0187 in steps 0, 1 and 2; the norm that clips counted its old gradient too, and
``safe_get_full_grad`` returned it. The whole matrix of such cases is ``tests/distributed/test_idle_parameters.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

from tests.support import training
from tests.support.idle import OFFLOAD
from tests.support.models import batch
from tests.support.thinning import full


def gradients_between(rank: int, world_size: int, *, zero: dict[str, Any]) -> dict[str, Any]:
    """Use a layer in step 0; in step 1 read its gradient, in step 2 write one by hand."""
    engine = training.make_engine(training.ds_config(3, zero=zero), "switched")
    weight = engine.module.branches.a.up.weight
    read, moved = [], []
    for step in range(3):
        engine.module.used = "a" if step == 0 else ""
        before = training.full_masters(engine)["branches.a.up.weight"]
        engine.backward(engine(*batch(step, rank)))
        read.append(safe_get_full_grad(weight))
        if step == 2:
            safe_set_full_grad(weight, torch.ones_like(read[-1]))
        engine.step()
        moved.append(not torch.equal(training.full_masters(engine)["branches.a.up.weight"], before))
    engine.destroy()
    return {"read": [bool(grad.any()) for grad in read], "moved": moved}


@pytest.mark.parametrize("zero", [full({}), OFFLOAD], ids=["", "offload"])
def test_the_gradient_that_a_program_reads_is_zero(ranks: Any, zero: dict[str, Any]) -> None:
    """And a gradient that it writes for an idle parameter counts."""
    for result in ranks(2).run(gradients_between, zero=zero):
        assert result == {"read": [True, False, False], "moved": [True, False, True]}
