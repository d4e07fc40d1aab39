"""The float64 reference against definitions that share nothing with it, its settings, and its page in the docs."""

from __future__ import annotations

import math
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_muon import MuonConfig
from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.reference import ReferenceMuon, newton_schulz
from deepspeed_muon.variants import VARIANTS
from tests.support.comparisons import close
from tests.support.matrices import matrix
from tests.support.oracle import Oracle
from tests.support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


def single(weight: torch.Tensor) -> list[torch.Tensor]:
    return [weight]


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (17, 17), (13, 31), (96, 200)])
def test_newton_schulz_is_a_polynomial_of_the_singular_values(shape: tuple[int, int]) -> None:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix("gaussian", *shape).double()
    left, s, right = torch.linalg.svd(x / x.norm(), full_matrices=False)
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    close(newton_schulz(x, resolve_schedule("quintic")), left * s @ right, rtol=1e-9, atol=1e-12)


def test_adamw_is_torchs() -> None:
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(7, dtype=torch.float64))
    weights = {"w": param.detach().clone()}
    reference = ReferenceMuon({}, adam_lr=0.1, weight_decay=0.2, betas=(0.8, 0.9))
    optimizer = torch.optim.AdamW([param], lr=0.1, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-10)
    for _ in range(3):
        param.grad = torch.randn(7, dtype=torch.float64)
        reference.step(weights, {"w": param.grad})
        optimizer.step()
    close(weights["w"], param.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("clipping", [0.5, 1e3])
def test_the_oracle_clips_as_torch_does(clipping: float) -> None:
    """Gradients whose norm is below the limit are left alone: their size is in the moments."""
    model = nn.Linear(3, 2, dtype=torch.float64)
    oracle = Oracle({}, clipping=clipping)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    assert oracle.update(model) == pytest.approx(math.sqrt(8), rel=1e-12)
    nn.utils.clip_grad_norm_(model.parameters(), clipping)
    for name, param in model.named_parameters():
        # 1 - beta1 is 0.1; both add 1e-6, DeepSpeed to the norm before it is divided and torch after it.
        close(oracle.state[name, "exp_avg"], 0.1 * param.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_written_out(nesterov: bool) -> None:
    """Two steps of one matrix by numbers: the second direction is that of both gradients."""
    torch.manual_seed(1)
    weight, first, second = torch.randn(3, 4, 6, dtype=torch.float64)
    weights = {"w": weight.clone()}
    reference = ReferenceMuon(
        {"w": single}, momentum=0.9, nesterov=nesterov, weight_decay=0.5, adjust_lr_fn="match_rms_adamw"
    )
    reference.step(weights, {"w": first})
    reference.step(weights, {"w": second})
    for u in (
        (0.19 * first, 0.081 * first + 0.19 * second)
        if nesterov
        else (0.1 * first, 0.09 * first + 0.1 * second)
    ):
        weight = 0.99 * weight - 0.02 * 0.2 * math.sqrt(6) * newton_schulz(u, resolve_schedule("quintic"))
    close(weights["w"], weight, rtol=1e-12, atol=1e-14)


def test_rows_of_variants_are_of_equal_size() -> None:
    """NorMuon's after its first step, MuonEq's before orthogonalisation."""
    torch.manual_seed(2)
    grad = torch.randn(5, 9, dtype=torch.float64)
    grad *= torch.logspace(-1, 1, 5)[:, None]
    rows = ReferenceMuon({}, variant="normuon").update_of(grad).norm(dim=1)
    close(rows, rows[:1].expand(5), rtol=1e-5, atol=0)
    equal = grad / grad.norm(dim=1, keepdim=True)
    update = ReferenceMuon({}, variant="muon_eq").update_of(grad)
    close(update, ReferenceMuon({}).update_of(equal), rtol=1e-12, atol=0)


def test_a_zero_gradient_moves_nothing_and_none_leaves_the_state() -> None:
    weights = {"w": torch.ones(2, 3, dtype=torch.float64), "idle": torch.ones(2, dtype=torch.float64)}
    for variant in VARIANTS:
        reference = ReferenceMuon({"w": single}, variant=variant)
        reference.step(weights, {"w": torch.zeros(2, 3)})
        close(weights["w"], torch.ones(2, 3, dtype=torch.float64), rtol=1e-14, atol=0)
        assert not any("idle" in key for key in reference.state)


def test_defaults_are_those_of_the_configuration() -> None:
    config = MuonConfig()
    unset: dict[str, Any] = {"muon_lr": 0.02, "adam_lr": 3e-4, "coefficients": resolve_schedule("quintic")}
    for field in fields(ReferenceMuon):
        if field.name not in ("matrices", "steps", "state"):
            expected = unset.get(field.name) or getattr(config, field.name)
            assert field.default == expected, field.name


def test_the_example_prints_a_small_difference(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "compare_with_reference.py"))
    printed = capsys.readouterr().out
    assert printed.startswith("Muon for 0.weight, 2.weight: largest difference ")
    # Ten steps in fp32 of weights below 1.
    assert 0 < float(printed.split()[-1]) < 2e-6


def test_the_page_shows_the_file() -> None:
    page = (ROOT / "docs" / "how_it_works.md").read_text()
    shown = load_script("docs_hooks").on_page_markdown(page)
    source = (ROOT / "deepspeed_muon" / "reference.py").read_text()
    assert f"```python\n{source}```\n" in shown and "<!-- source: " not in shown
