"""Directions of one chunk: where they lie, and which matrices need no stacking."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import NsSettings
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.spread import sharded_spread
from deepspeed_muon.step.directions import together
from deepspeed_muon.step.momentum import LocalDirections, MomentumSource
from deepspeed_muon.transport.context import StepContext, StepStats
from deepspeed_muon.transport.wire import Wire


def made(rows: int, count: int, order: list[int]) -> tuple[LocalDirections, torch.Tensor]:
    """Make the directions of equal matrices of 8 columns in one partition; the gradient is 0, 1, 2, ..."""
    numel = 8 * rows
    layouts = [
        MatrixLayout(f"m{i}", rows, 8, 0, sharded_spread(i * numel, numel, numel)) for i in range(count)
    ]
    grad = torch.arange(count * numel, dtype=torch.float32)

    def pack(buf: torch.Tensor, g: torch.Tensor, out: torch.Tensor, momentum: float, nesterov: bool) -> None:
        buf.copy_(g)
        out.copy_(g)

    source = MomentumSource(torch.zeros_like(grad), grad, 0.9, True, pack)
    settings = NsSettings(resolve_schedule("quintic"))
    wire = Wire(torch.float32)
    context = StepContext(0, None, 0, 1, torch.device("cpu"), torch.float32, wire, settings, StepStats())
    held = [layout.spread.on(0) for layout in layouts]
    directions = LocalDirections(layouts, held, {0: source}, context)
    directions.prepare(order)
    return directions, grad


def parts_of(directions: LocalDirections, order: Sequence[int]) -> list[torch.Tensor]:
    return [direction for _, direction in filter(None, map(directions.get, order))]


def test_small_matrices_follow_each_other_in_the_order_of_the_batch() -> None:
    order = [2, 0, 1]
    directions, grad = made(rows=4, count=3, order=order)
    parts = parts_of(directions, order)
    whole = together(parts)
    assert whole is not None and whole.data_ptr() == parts[0].data_ptr()
    assert torch.equal(whole.view(3, 32), grad.view(3, 32)[order])
    assert together(parts[::-1]) is None


def test_sizes_that_would_be_misaligned_are_not_puttogether() -> None:
    directions, grad = made(rows=3, count=2, order=[0, 1])
    parts = parts_of(directions, (0, 1))
    assert all(part.data_ptr() % 64 == 0 for part in parts)
    assert together(parts) is None
    assert torch.equal(torch.stack(parts), grad.view(2, 24))
    directions.release([0])
    assert torch.equal(*parts_of(directions, [1]), grad[24:])
