"""A stack of blocks went through the iteration in one batch, however large it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_muon import Muon
from deepspeed_muon.step import strategies


def updated(monkeypatch: pytest.MonkeyPatch, bound: int) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    """Update five experts of 6 x 4 once; return the weights and the shapes that went through the iteration."""
    monkeypatch.setattr(strategies, "BATCH_NUMEL", bound)
    weight = nn.Parameter(torch.zeros(5, 6, 4))
    optimizer = Muon([("layers.0.experts.up", weight)], muon_lr=1.0, ns_dtype="fp32", ns_backend="torch")
    weight.grad = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(3))
    optimizer._bind_plain()
    whole = optimizer._runners[0]._strategy
    original, shapes = whole._orthogonalize, []

    def noting(x: torch.Tensor, **settings: Any) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return original(x, **settings)

    whole._orthogonalize = noting
    optimizer.step()
    return weight.detach().clone(), shapes


def test_a_large_stack_runs_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    together, once = updated(monkeypatch, 1 << 25)
    apart, parts = updated(monkeypatch, 2 * 6 * 4)
    assert once == [(5, 6, 4)]
    assert parts == [(2, 6, 4), (2, 6, 4), (1, 6, 4)]
    # The same products in batches of other sizes, whose sums round differently; five steps in fp32.
    torch.testing.assert_close(apart, together, rtol=0, atol=1e-5)
