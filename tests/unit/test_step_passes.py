"""The two passes over fragments: where directions lie, which matrices need no stacking, a variant's functions."""

from __future__ import annotations

import torch

from deepspeed_muon.ops import FlatPasses, flat_passes
from deepspeed_muon.step.passes import Rate, Row, Step, Weights, apply, pack
from deepspeed_muon.step.strategies import joined
from deepspeed_muon.variants import VARIANTS, Variant


def made(rows: int, count: int, order: list[int]) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Make the directions of equal matrices of 8 columns in one partition; the gradient is 0, 1, 2, ..."""
    numel = 8 * rows
    grad = torch.arange(count * numel, dtype=torch.float32)

    def momentum_pack(
        buf: torch.Tensor, g: torch.Tensor, out: torch.Tensor, momentum: float, nesterov: bool
    ) -> None:
        buf.copy_(g)
        out.copy_(g)

    passes = FlatPasses("test", momentum_pack, lambda *_: None)
    rates = [Rate(0.9, True, 1.0, 1.0, False, (1.0,))] * count
    weights = Weights([True] * count, rates, {}, {0: passes}, VARIANTS["muon"])
    step = Step(weights, {0: torch.zeros_like(grad)}, {0: grad}, None)
    return pack([Row(i, 0, i * numel, 0, numel) for i in order], step, torch.float32), grad


def test_small_matrices_follow_each_other_in_the_order_of_the_batch() -> None:
    order = [2, 0, 1]
    directions, grad = made(rows=4, count=3, order=order)
    parts = [directions[index] for index in order]
    whole = joined(parts)
    assert whole is not None and whole.data_ptr() == parts[0].data_ptr()
    assert torch.equal(whole.view(3, 32), grad.view(3, 32)[order])
    assert joined(parts[::-1]) is None


def test_sizes_that_would_be_misaligned_are_not_joined() -> None:
    directions, grad = made(rows=3, count=2, order=[0, 1])
    parts = [directions[0], directions[1]]
    assert all(part.data_ptr() % 64 == 0 for part in parts)
    assert joined(parts) is None
    assert torch.equal(torch.stack(parts), grad.view(2, 24))


def test_a_variant_may_change_gradients_and_updates_of_fragments() -> None:
    """Signs of the gradient, and updates in proportion to the weights: of the fragment alone, not its neighbours."""
    variant = Variant("test", before_momentum=lambda g, _: g.sign(), before_apply=lambda u, w: u * w.abs())
    param, grad = torch.randn(2, 10, generator=torch.Generator().manual_seed(7))
    before, momentum = param.clone(), torch.zeros(10)
    rates = [Rate(0.5, False, 0.1, 1.0, False, (1.0,))]
    weights = Weights([True], rates, {0: param}, {0: flat_passes("torch")}, variant)
    row = Row(0, 0, 2, 0, 6)
    direction = pack([row], Step(weights, {0: momentum}, {0: grad}, None), torch.float32)[0]
    assert torch.equal(direction, 0.5 * grad[2:8].sign()) and torch.equal(momentum[2:8], direction)
    apply(row, weights, direction)
    torch.testing.assert_close(param[2:8], before[2:8] - 0.1 * direction * before[2:8].abs())
    outside = [0, 1, 8, 9]
    assert torch.equal(param[outside], before[outside]) and not momentum[outside].any()
