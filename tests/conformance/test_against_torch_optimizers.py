"""Step for step with ``torch.optim.Muon`` and ``torch.optim.AdamW``, where the settings say the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_muon import Muon
from tests.support.comparisons import close, relative, within
from tests.support.rounding import iteration_limit
from tests.support.thinning import each_value

STEPS = 4
SHAPES = {"wide.weight": (5, 12), "tall.weight": (12, 5), "square.weight": (8, 8), "narrow.weight": (2, 6)}


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def run(params: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 + step)
        for param in params.values():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


torch_muon = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9"
)


@torch_muon
@pytest.mark.parametrize(
    ("nesterov", "rule", "method"),
    each_value(product((True, False), ("original", "match_rms_adamw"), ("gram", "standard"))),
)
def test_muon_in_fp32(monkeypatch: pytest.MonkeyPatch, nesterov: bool, rule: str, method: str) -> None:
    """Torch iterates in bf16 only; with that rounding taken out, the two are the same function."""
    settings: dict[str, Any] = {"lr": 0.03, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.2}
    settings["adjust_lr_fn"] = rule
    ours, theirs = parameters(), parameters()
    optimizer = Muon(list(ours.items()), ns_method=method, ns_dtype="fp32", **settings)
    run(ours, optimizer)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    run(theirs, torch.optim.Muon(list(theirs.values()), eps=1e-12, **settings))
    for name, start in parameters().items():
        # Each is within that limit of float64.
        limit = 2 * iteration_limit(optimizer.state[ours[name]]["momentum_buffer"], torch.float32)
        within(relative(ours[name].detach(), theirs[name].detach(), start.detach()), limit, f"path of {name}")


@torch_muon
def test_muon_in_bf16() -> None:
    """As it runs: sums in other orders, rounded to bf16 (2^-9 of a singular value) in each of five steps."""
    ours, theirs = parameters(), parameters()
    optimizer = Muon(list(ours.items()), lr=0.03, ns_dtype="bf16", ns_method="standard")
    run(ours, optimizer)
    reference = torch.optim.Muon(list(theirs.values()), lr=0.03, weight_decay=0.0, eps=1e-12)
    run(theirs, reference)
    for name, start in parameters().items():
        momentum = optimizer.state[ours[name]]["momentum_buffer"]
        limit = 2 * iteration_limit(momentum, torch.bfloat16, ["standard"])
        within(relative(ours[name].detach(), theirs[name].detach(), start.detach()), limit, f"path of {name}")
        buffers = (o.state[p[name]]["momentum_buffer"] for o, p in ((optimizer, ours), (reference, theirs)))
        torch.testing.assert_close(*buffers)


@pytest.mark.parametrize(
    ("ours_kwargs", "make"),
    [
        ({}, lambda params, **kw: torch.optim.AdamW(params, **kw)),
        ({"adam_w_mode": False}, lambda params, **kw: torch.optim.Adam(params, **kw)),
    ],
    ids=["AdamW", "Adam"],
)
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.999)])
def test_adamw(
    ours_kwargs: dict[str, Any], make: Callable[..., torch.optim.Optimizer], betas: tuple[float, float]
) -> None:
    """The other half, with everything excluded from Muon: the same kernel, so nearly the same bits."""
    settings: dict[str, Any] = {"lr": 0.01, "betas": betas, "eps": 1e-8, "weight_decay": 0.1}
    ours, theirs = parameters(), parameters()
    run(ours, Muon(list(ours.items()), exclude=["*"], **settings, **ours_kwargs))
    run(theirs, make(list(theirs.values()), **settings))
    for name in SHAPES:
        close(ours[name], theirs[name], rtol=1e-5, atol=1e-7)
