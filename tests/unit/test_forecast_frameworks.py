"""The rows of other frameworks' settings: the formula of each, written out from its source, takes the same steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_muon import MuonConfig
from deepspeed_muon.forecast.frameworks import FRAMEWORKS, SOURCES, FrameworkSettings
from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.reference import ReferenceMuon, newton_schulz
from tests.support.comparisons import close

LR, DECAY = 0.03, 0.2
Theirs = Mapping[str, Any]
Orthogonalize = Callable[[Tensor], Tensor]


def mean_of_gradients(grads: list[Tensor], beta: float) -> Tensor:
    """``buf.lerp_(grad, 1 - beta)``."""
    buf = torch.zeros_like(grads[0])
    for grad in grads:
        buf = buf + (1 - beta) * (grad - buf)
    return buf


def sum_of_gradients(grads: list[Tensor], mu: float) -> Tensor:
    """``buf.mul_(mu).add_(grad)``."""
    buf = torch.zeros_like(grads[0])
    for grad in grads:
        buf = mu * buf + grad
    return buf


def decoupled(weight: Tensor, update: Tensor, scale: float) -> Tensor:
    """``p.mul_(1 - lr * weight_decay); p.add_(update, alpha=-lr * scale)``."""
    return weight * (1 - LR * DECAY) - LR * scale * update


# Each function returns the weight after a step, from the weight before it and the gradients of all steps so far.


def megatron(weight: Tensor, grads: list[Tensor], theirs: Theirs, orthogonalize: Orthogonalize) -> Tensor:
    rows, cols = weight.shape
    scale = {
        "spectral": max(rows, cols) ** 0.5,
        "unit_rms_norm": (rows / cols) ** 0.5,
        "shape_scaling": max(1, rows / cols) ** 0.5,
    }[theirs["muon_scale_mode"]]
    update = orthogonalize(mean_of_gradients(grads, 0.95))
    return decoupled(weight, update, theirs.get("muon_extra_scale_factor", 1.0) * scale)


def verl(weight: Tensor, grads: list[Tensor], theirs: Theirs, orthogonalize: Orthogonalize) -> Tensor:
    assert theirs["muon_match_adamw_update_rms"]
    beta1 = theirs["betas"][0]
    factor = math.sqrt((1.0 - beta1) / (1.0 + beta1))
    return megatron(weight, grads, {**theirs, "muon_extra_scale_factor": factor}, orthogonalize)


def pytorch(weight: Tensor, grads: list[Tensor], theirs: Theirs, orthogonalize: Orthogonalize) -> Tensor:
    rows, cols = weight.shape
    matched = theirs["adjust_lr_fn"] == "match_rms_adamw"
    scale = 0.2 * math.sqrt(max(rows, cols)) if matched else math.sqrt(max(1, rows / cols))
    buf = mean_of_gradients(grads, 0.95)
    return decoupled(weight, orthogonalize(grads[-1] + 0.95 * (buf - grads[-1])), scale)


def keller(weight: Tensor, grads: list[Tensor], theirs: Theirs, orthogonalize: Orthogonalize) -> Tensor:
    assert not theirs
    rows, cols = weight.shape
    buf = mean_of_gradients(grads, 0.95)
    update = orthogonalize(grads[-1] + 0.95 * (buf - grads[-1]))
    return decoupled(weight, update, max(1, rows / cols) ** 0.5)


def dion(weight: Tensor, grads: list[Tensor], theirs: Theirs, orthogonalize: Orthogonalize) -> Tensor:
    rows, cols = weight.shape
    scale = {"rms_norm": 0.2 * math.sqrt(max(rows, cols)), "spectral_norm": math.sqrt(rows / cols)}
    return decoupled(weight, orthogonalize(sum_of_gradients(grads, 0.95)), scale[theirs["adjust_lr"]])


def xtuner(weight: Tensor, grads: list[Tensor], theirs: Theirs, orthogonalize: Orthogonalize) -> Tensor:
    """Its ``MuonConfig`` asks for Nesterov momentum."""
    rows, cols = weight.shape
    scale = {"rms_norm": 0.2 * math.sqrt(max(rows, cols)), "spectral_norm": math.sqrt(rows / cols)}
    update = orthogonalize(grads[-1] + 0.95 * sum_of_gradients(grads, 0.95))
    return decoupled(weight, update, scale[theirs["adjust_lr"]])


def moonlight(weight: Tensor, grads: list[Tensor], theirs: Theirs, orthogonalize: Orthogonalize) -> Tensor:
    assert not theirs
    update = orthogonalize(grads[-1] + 0.95 * sum_of_gradients(grads, 0.95))
    return decoupled(weight, update, 0.2 * math.sqrt(max(weight.shape)))


def nanochat(weight: Tensor, grads: list[Tensor], theirs: Theirs, orthogonalize: Orthogonalize) -> Tensor:
    """Without what the row says remains different."""
    assert not theirs
    buf, v = torch.zeros_like(weight), torch.zeros(len(weight), 1, dtype=weight.dtype)
    for number, grad in enumerate(grads):
        done = min(number / 400, 1)
        momentum = (1 - done) * 0.85 + done * 0.97
        buf = buf + (1 - momentum) * (grad - buf)
        g = orthogonalize(grad + momentum * (buf - grad))
        v_mean = g.square().mean(dim=-1, keepdim=True)
        v = v + (1 - 0.9) * (v_mean - v)
        step_size = v.clamp_min(1e-10).rsqrt()
        g = g * step_size * (g.norm() / (g * step_size).norm())
    lr = LR * max(1.0, weight.shape[-2] / weight.shape[-1]) ** 0.5
    mask = (g * weight) >= 0
    return weight - (lr * g + LR * DECAY * weight * mask)


FORMULAS = {
    "Megatron-LM": megatron,
    "verl": verl,
    "torch": pytorch,
    "Keller Jordan": keller,
    "DeepSpeed": keller,
    "Dion": dion,
    "Moonlight": moonlight,
    "xtuner": xtuner,
    "nanochat": nanochat,
}


def test_every_framework_has_a_source() -> None:
    assert {row.framework for row in FRAMEWORKS} == FORMULAS.keys() == SOURCES.keys()


@pytest.mark.parametrize("shape", [(24, 16), (16, 40), (20, 20)])
@pytest.mark.parametrize("row", FRAMEWORKS, ids=lambda row: f"{row.framework}-{dict(row.theirs)}")
def test_takes_the_same_steps(row: FrameworkSettings, shape: tuple[int, int]) -> None:
    config = MuonConfig.from_params(row.ours)
    if row.framework == "nanochat" and shape[0] < shape[1]:
        pytest.skip("its moments of wide matrices are those of columns, as the row says")
    elsewhere = ("ns_schedule", "clip")  # clipping changes the gradients, before the step
    settings: dict[str, Any] = {key: value for key, value in row.ours.items() if key not in elsewhere}
    reference = ReferenceMuon(
        {"w": lambda weight: [weight]},
        muon_lr=LR,
        weight_decay=DECAY,
        coefficients=config.coefficients(),
        **settings,
    )
    generator = torch.Generator().manual_seed(0)
    ours = {"w": torch.randn(shape, generator=generator, dtype=torch.float64)}
    theirs = ours["w"].clone()
    # A large first gradient: a momentum that differs gives another direction in later steps.
    grads = [
        scale * torch.randn(shape, generator=generator, dtype=torch.float64) for scale in (9.0, 1.0, 1.0)
    ]
    for number, grad in enumerate(grads, 1):
        theirs = FORMULAS[row.framework](
            theirs, grads[:number], row.theirs, lambda u: newton_schulz(u, config.coefficients())
        )
        reference.step(ours, {"w": grad})
    # NorMuon adds 1e-8 to the root of a moment, where nanochat bounds the moment.
    close(ours["w"], theirs, rtol=1e-6 if row.framework == "nanochat" else 1e-10, atol=1e-9)


def test_the_iteration_of_the_rows_is_ours() -> None:
    """Quintic unless a row says otherwise; coefficients of others are settings of their own."""
    schedules = {row.framework: row.ours["ns_schedule"] for row in FRAMEWORKS if "ns_schedule" in row.ours}
    assert schedules == {"nanochat": "polar_express_5"} and len(resolve_schedule("polar_express_5")) == 5
