"""Every schedule, method and dtype that a configuration can name, over spectra with condition numbers up to 1e8."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.errors import ConfigError
from deepspeed_muon.math.coefficients import band_of, resolve_schedule, steps_that_need_an_exact_input
from deepspeed_muon.math.newton_schulz import orthogonalize, restart_steps
from tests.support.thinning import usual

SHAPES = [(3, 9), (16, 400), (400, 16), (48, 300), (100, 700), (64, 64)]
CONDITIONS = [1e1, 1e3, 1e4, 1e6, 1e8]

# A user's own tables: that of cans with the margin for rounding that it lacks, in fp16 and in bf16.
CANS = resolve_schedule("cans")
FP16_CANS, BF16_CANS = ([[a / s, b / s**3, c / s**5] for a, b, c in CANS] for s in (1.002, 1.01))
SCHEDULES: dict[str, dict[str, Any]] = {
    "quintic": {"ns_schedule": "quintic"},
    "quintic-3": {"ns_schedule": "quintic", "ns_steps": 3},
    "quintic-10": {"ns_schedule": "quintic", "ns_steps": 10},
    "polar_express-3": {"ns_schedule": "polar_express", "ns_steps": 3},
    "polar_express": {"ns_schedule": "polar_express"},
    "polar_express-8": {"ns_schedule": "polar_express", "ns_steps": 8},
    "polar_express-10": {"ns_schedule": "polar_express", "ns_steps": 10},
    "polar_express_5": {"ns_schedule": "polar_express_5"},
    "cans": {"ns_schedule": "cans"},
    "deepseekv4": {"ns_schedule": "deepseekv4"},
    "own-table-fp16": {"ns_schedule": FP16_CANS},
    "own-table-bf16": {"ns_schedule": BF16_CANS},
}
REFUSED = {"bf16": {"cans", "own-table-fp16"}, "fp16": {"cans"}, "fp32": set()}

# How far a result may lie above the band of its schedule, relative to it. bf16 keeps 8 bits: the Gram matrix that two
# steps share drifts by 3 %, which the last step of a schedule turns into up to 12 %. fp16 rounds 8 times finer.
ABOVE_THE_BAND = {"bf16": 0.12, "fp16": 0.015, "fp32": 1e-3}

# The long matrix of all cases runs with the marker `full`.
CORE = [
    *product(["polar_express"], ABOVE_THE_BAND),
    *product(["quintic", "polar_express_5", "polar_express-8", "own-table-bf16"], ["bf16"]),
    *product(["cans"], ["bf16", "fp16"]),
]


@functools.cache
def inputs(shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return left and right singular vectors and singular values of a batch of matrices of one shape, float64."""
    rows, cols = shape
    short = min(shape)
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    exponents = torch.linspace(0, 1, short, dtype=torch.float64)
    values = torch.stack([condition**-exponents for condition in CONDITIONS])
    random = torch.rand(len(CONDITIONS), short, generator=generator, dtype=torch.float64)
    scattered = torch.tensor(CONDITIONS, dtype=torch.float64).view(-1, 1) ** -random
    # One direction far above equal ones.
    spiked = torch.tensor(CONDITIONS, dtype=torch.float64).view(-1, 1) ** -(exponents > 0).double()
    values = torch.cat((values, scattered, spiked))
    left, right = (
        torch.linalg.qr(torch.randn(len(values), side, short, generator=generator, dtype=torch.float64)).Q
        for side in shape
    )
    return left, right, values


@pytest.mark.parametrize(("schedule", "dtype"), usual(product(SCHEDULES, ABOVE_THE_BAND), CORE))
def test_no_update_is_wrong(schedule: str, dtype: Any) -> None:
    """No direction of an update is too long, and none that Newton-Schulz can see is too short."""
    params = {**SCHEDULES[schedule], "ns_dtype": dtype}
    if schedule in REFUSED[dtype]:
        with pytest.raises(ConfigError, match="no margin for the rounding"):
            MuonConfig.from_params(params)
        return
    for method, shape in product(("gram", "standard"), SHAPES):
        settings = MuonConfig.from_params({**params, "ns_method": method}).ns_settings(torch.device("cpu"))
        band = band_of(settings.coefficients)
        left, right, values = inputs(shape)
        matrices = ((left * values.unsqueeze(-2)) @ right.mT).float()  # (batch, rows, cols)
        result = orthogonalize(matrices, settings=settings).double()
        largest = float(torch.linalg.matrix_norm(result, 2).max())
        assert largest <= band.high * (1 + ABOVE_THE_BAND[dtype]), (method, shape)
        lengths = torch.einsum("nik,nij,njk->nk", left, result, right)
        is_settled = values / values.norm(dim=-1, keepdim=True) >= 0.05
        assert float(lengths[is_settled].min()) >= 0.8 * band.low, (method, shape)


def test_only_steep_steps_restart_more_often() -> None:
    """The quintic keeps its restarts; Polar Express has no drifted Gram matrix before its steps 2 to 4."""
    for steps in range(1, 12):
        assert not steps_that_need_an_exact_input(resolve_schedule("quintic", steps))
    assert not steps_that_need_an_exact_input(resolve_schedule("deepseekv4"))
    for name in ("polar_express", "polar_express_5"):
        rows = resolve_schedule(name)  # type: ignore[arg-type]
        assert restart_steps(rows, torch.bfloat16) == restart_steps(rows, torch.float16) == {1, 2, 3}
        assert restart_steps(rows, torch.float32) == {3}
    assert restart_steps(resolve_schedule("polar_express", 10), torch.bfloat16) == {1, 2, 3, 5, 7, 9}
