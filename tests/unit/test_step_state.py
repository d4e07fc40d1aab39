"""State in half precision: its dtype and the kernels of AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_muon.config.values import StatePolicy
from deepspeed_muon.math.updates import AdamStep
from deepspeed_muon.reference import ReferenceMuon
from deepspeed_muon.step.adamw import torch_step


def random(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("momentum_dtype", "half_states", "master", "momentum", "moments"),
    [
        (None, False, torch.float32, torch.float32, torch.float32),
        (None, False, torch.bfloat16, torch.float32, torch.float32),
        (None, False, torch.float64, torch.float64, torch.float64),
        ("bf16", False, torch.float32, torch.bfloat16, torch.float32),
        (None, True, torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ("fp32", True, torch.bfloat16, torch.float32, torch.bfloat16),
    ],
)
def test_policy(
    momentum_dtype: str | None,
    half_states: bool,
    master: torch.dtype,
    momentum: torch.dtype,
    moments: torch.dtype,
) -> None:
    policy = StatePolicy(momentum_dtype, half_states)
    assert policy.make("momentum_buffer", torch.empty(3, dtype=master)).dtype == momentum
    assert policy.make("exp_avg_sq", torch.empty(3, dtype=master)).dtype == moments


@pytest.mark.parametrize(
    ("master", "moments"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
    ],
)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("kernel", ["torch", "deepspeed"])
def test_adam_kernels(kernel: str, decoupled: bool, master: torch.dtype, moments: torch.dtype) -> None:
    """One step of each kernel in each pair of dtypes, on a length that no vector divides."""
    run: Any = torch_step
    if kernel == "deepspeed":
        from deepspeed_muon.engine.offload import CpuAdam

        run = CpuAdam()
    numel = 1003
    param, grad = 0.02 * random(numel, torch.float32, 0), random(numel, torch.float32, 1)
    param, grad = param.to(master), grad.to(master)
    exp_avg, exp_avg_sq = random(numel, moments, 2), random(numel, torch.float32, 3).square().to(moments)
    step = AdamStep(0.01, (0.9, 0.95), 1e-8, 0.1, 3, decoupled)
    weight = param.double()
    state = {("param", "exp_avg"): exp_avg.double(), ("param", "exp_avg_sq"): exp_avg_sq.double()}
    reference = ReferenceMuon(
        {}, adam_lr=0.01, eps=1e-8, weight_decay=0.1 if decoupled else 0.0, steps=2, state=state
    )
    # Adam's L2 term is decay as a term of the gradient.
    reference.step({"param": weight}, {"param": grad.double() if decoupled else grad + 0.1 * weight})
    run([(param, grad, exp_avg, exp_avg_sq)], settings=step)
    for tensor, exact in zip((param, exp_avg, exp_avg_sq), (weight, *state.values()), strict=True):
        # Half a unit for the one rounding into the stored dtype, a few fp32 units for the arithmetic; a parameter is
        # off by a few fp32 units of the update too, whose quotient is at most 30 here.
        bound = exact.abs() * (0.51 * torch.finfo(tensor.dtype).eps + 1e-6) + 1e-6
        assert ((tensor.double() - exact).abs() <= bound).all()
