"""A gradient that is a strided view stopped ``step()``: "momentum_pack_: grad must be a contiguous ... tensor"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed_muon import Muon
from tests.support import training
from tests.support.models import batch


def transposed(grad: Tensor) -> Tensor:
    return grad.t().contiguous().t()


def stepped(grad: Tensor) -> Tensor:
    return grad.repeat_interleave(2, dim=0)[::2]


def expanded(grad: Tensor) -> Tensor:
    return grad.flatten()[:1].expand(grad.shape)


VIEWS = {"t": transposed, "[::2]": stepped, "expand": expanded}


def updated(view: Any, backend: str, *, contiguous: bool) -> list[Tensor]:
    """Return a matrix of one row (of which any view is flat), a larger one and AdamW's vector after two steps."""
    torch.manual_seed(0)
    params = {
        "thin.weight": nn.Parameter(torch.randn(1, 24)),
        "wide.weight": nn.Parameter(torch.randn(12, 24)),
        "wide.bias": nn.Parameter(torch.randn(24)),
    }
    optimizer = Muon(params.items(), lr=0.1, ns_backend=backend, include=["thin.*"])
    for _ in range(2):
        for param in params.values():
            grad = view(torch.randn_like(param))
            param.grad = grad.contiguous() if contiguous else grad
        optimizer.step()
    return [param.detach() for param in params.values()]


@pytest.mark.parametrize("backend", ["ops", "torch"])
@pytest.mark.parametrize("view", list(VIEWS))
def test_without_deepspeed(view: str, backend: str) -> None:
    found, expected = (updated(VIEWS[view], backend, contiguous=kept) for kept in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def train(rank: int, world_size: int, *, backend: str, view: str) -> dict[str, Tensor]:
    """Train two steps at stage 0, where the optimizer reads the parameters' own gradients."""
    engine = training.make_engine(training.ds_config(0, params={"ns_backend": backend}))
    for step in range(2):
        engine.backward(engine(*batch(step, rank)))
        for param in engine.module.parameters():
            if view and param.ndim > (view == "t"):
                param.grad = VIEWS[view](param.grad)
        engine.step()
    masters = training.full_masters(engine)
    engine.destroy()
    return masters


@pytest.mark.parametrize("backend", ["ops", "torch"])
def test_at_stage_0(ranks: Any, backend: str) -> None:
    expected, *others = (ranks(2).run(train, backend=backend, view=view)[0] for view in ("", "t", "[::2]"))
    for masters in others:
        assert all(torch.equal(masters[name], expected[name]) for name in expected)
