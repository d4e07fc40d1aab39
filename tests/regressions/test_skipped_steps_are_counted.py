"""A step that was skipped for its gradients: DeepSpeed's counter and scheduler went on as if it had been taken.

``engine.skipped_steps`` stayed 0 and the rate moved on wherever this optimizer skips by itself: at stage 0 in fp32,
and in bf16 where ZeRO looks at no gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import training
from tests.support.models import MATRICES, batch
from tests.support.snapshots import changed, tensors_of

SCHEDULE = {
    "type": "WarmupLR",
    "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10, "warmup_type": "linear"},
}


def poisoned(
    rank: int,
    world_size: int,
    *,
    stage: int,
    precision: str,
    name: str,
    clipping: float,
    extra: dict[str, Any],
) -> Any:
    """Step 2 of 4 has a NaN in the gradient of one parameter on the last rank."""
    config = training.ds_config(
        stage, precision=precision, clipping=clipping, accumulation=2, extra={"scheduler": SCHEDULE, **extra}
    )
    engine = training.make_engine(config, exact=False)
    param = dict(engine.module.named_parameters())[name]
    counts, applied, rates = [], [], []
    unchanged = True
    for step in range(4):
        handle = None
        if step == 1 and rank == world_size - 1:
            handle = param.register_hook(lambda grad: torch.full_like(grad, float("nan")))
        before = tensors_of(engine)
        for micro in range(2):
            loss = engine(*batch(step, micro * world_size + rank))
            engine.backward(loss)
            engine.step()
        if step == 1:
            unchanged = not changed(before, tensors_of(engine))
        if handle is not None:
            handle.remove()
        counts.append(engine.skipped_steps)
        applied.append(engine.was_step_applied() if hasattr(engine, "was_step_applied") else step != 1)
        rates.append(engine.get_lr()[0])
    report = {"counts": counts, "applied": applied, "rates": rates, "unchanged": unchanged}
    engine.destroy()
    return report


FP16 = {"fp16": {"hysteresis": 1, "initial_scale_power": 8}}
CASES = [
    # stage, precision, clipping, further configuration
    (0, "fp32", 0.0, {}),
    (0, "fp32", 0.5, {}),
    (1, "fp32", 0.0, {}),
    (2, "fp32", 0.0, {}),
    (3, "fp32", 0.0, {}),
    (0, "bf16", 0.0, {}),
    (1, "bf16", 0.0, {}),
    (1, "bf16", 0.0, {"data_types": {"grad_accum_dtype": "bf16"}}),
    (2, "bf16", 0.0, {}),
    (2, "bf16", 0.5, {}),
    (3, "bf16", 0.0, {}),
    (2, "bf16", 0.0, {"bf16": {"check_grad_overflow": False}}),
    (1, "fp32", 0.0, {"zero_optimization": {"compute_grad_norm": False}}),
    (0, "fp16", 0.0, FP16),
    (2, "fp16", 0.0, FP16),
    (3, "fp16", 0.0, FP16),
]
# Muon's matrix and AdamW's, each way of skipping once at least.
NAMES = ["embed.weight", "blocks.1.up.weight"]
SHORT = {(0, NAMES[0]), (0, NAMES[1]), (11, NAMES[1]), (12, NAMES[0])}


@pytest.mark.parametrize(
    ("stage", "precision", "clipping", "extra", "name"),
    [
        pytest.param(*case, name, marks=[] if (number, name) in SHORT else pytest.mark.full)
        for number, case in enumerate(CASES)
        for name in NAMES
    ],
)
def test_once_for_each_step_of_the_engine(
    ranks: Any, stage: int, precision: str, clipping: float, extra: dict[str, Any], name: str
) -> None:
    assert "blocks.1.up.weight" in MATRICES["toy"] and "embed.weight" not in MATRICES["toy"]
    for report in ranks(2).run(
        poisoned, stage=stage, precision=precision, clipping=clipping, name=name, extra=extra
    ):
        assert report["unchanged"], "nothing moves, whichever parameter's gradient it is"
        assert report["counts"] == [0, 1, 1, 1]
        assert report["applied"] == [True, False, True, True]
        first, second, third, fourth = report["rates"]
        assert first == second < third < fourth, "the scheduler rests in a skipped step, as DeepSpeed has it"
