"""NorMuon's rows, kinds of weight decay and the places of row moments, each against its reference."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed_muon import ConfigError, Muon, MuonConfig
from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.math.newton_schulz import reference_orthogonalize
from deepspeed_muon.math.updates import AdamStep, adam_step_
from deepspeed_muon.ops.torch_operators import cautious_apply_
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.placement import (
    flat_placement,
    replicated_placement,
    sharded_placement,
)
from deepspeed_muon.plan.rows import RowPlaces, row_places
from deepspeed_muon.variants.normuon import MOMENTS, finish, reference_finish
from deepspeed_muon.variants.variant import Sums
from tests.support.comparisons import close
from tests.support.layouts import fragments_of
from tests.support.reference import decayed_step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 8, 2), (2, 1, 4), (2, 6, 1)])
def test_rows_match_the_reference(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    moments = torch.rand(shape[:2]) * 0.1
    expected_moments = moments.double()
    updates = torch.randn(shape).mul_(torch.logspace(-4, 1, shape[1]).unsqueeze(-1)).to(dtype)
    result = finish(updates, {MOMENTS: moments}, {"beta2": torch.full((shape[0], 1), 0.9)}, Sums())
    assert result.dtype == torch.float32
    for number in range(shape[0]):
        update, moment = reference_finish(updates[number], expected_moments[number], beta2=0.9)
        # A dozen fp32 roundings (6e-8) of sums of positive numbers.
        close(result[number].double(), update, rtol=1e-6, atol=0)
        close(moments[number].double(), moment, rtol=1e-6, atol=0)


def test_rows_keep_the_norm_and_zero_stays_zero() -> None:
    torch.manual_seed(2)
    updates = torch.randn(2, 6, 5)
    updates[0, 2] = 0.0
    updates[1] = 0.0
    moments = torch.zeros(2, 6)
    result = finish(updates, {MOMENTS: moments}, {"beta2": torch.full((2, 1), 0.95)}, Sums())
    close(result[0].norm(), updates[0].norm(), rtol=1e-6, atol=0)
    assert not result[0, 2].any() and not result[1].any()
    first = result[0].norm(dim=-1)
    assert float(first[first > 0].max() / first[first > 0].min()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("mode", ["decoupled", "independent", "cautious"])
def test_adam_decays_by_its_mode(mode: str) -> None:
    torch.manual_seed(3)
    param, grad = torch.randn(64), torch.randn(64)
    first, second = torch.randn(64), torch.rand(64)
    settings = AdamStep(lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3, step=3, decay_mode=mode)  # type: ignore[arg-type]
    m = 0.9 * first.double() + 0.1 * grad.double()
    v = 0.95 * second.double() + 0.05 * grad.double() ** 2
    update = m / (1 - 0.9**3) / ((v / (1 - 0.95**3)).sqrt() + 1e-8)
    expected = decayed_step(param, update, lr=0.1, weight_decay=0.3, mode=mode)
    adam_step_([(param, grad, first, second)], settings=settings)
    close(param.double(), expected, rtol=1e-5, atol=1e-6)


def test_cautious_apply_matches_the_reference() -> None:
    torch.manual_seed(4)
    param, update = torch.randn(257), torch.randn(257).bfloat16()
    update[:3] = 0.0
    expected = decayed_step(param, update.double() * 2.0, lr=0.1, weight_decay=0.5, mode="cautious")
    # Two fragments with an element between them that stays.
    table = torch.tensor([[0, 0, 0, 0, 100, 0], [0, 101, 0, 101, 156, 0]])
    rates = torch.tensor([[0.2, 0.05]], dtype=torch.float64)
    expected[100] = param[100]
    cautious_apply_([param], [update], table, rates)
    close(param.double(), expected, rtol=1e-6, atol=1e-6)


def covered(layouts: tuple[RowPlaces, ...], rank: int) -> list[tuple[int, int]]:
    """Return the compact places that a rank keeps, with the rows."""
    runs = [(f.partition_offset, f.numel) for each in layouts if (f := each.on(rank))]
    return sorted(runs)


def test_rows_belong_to_the_rank_of_their_first_element() -> None:
    first = MatrixLayout("a", 4, 3, 0, flat_placement(2, 12, 9))
    second = MatrixLayout("b", 2, 5, 0, flat_placement(14, 10, 9))
    layouts = row_places((first, second))
    # Ranks hold 9 elements each: "a" lies at 2..13, its rows begin at 2, 5, 8, 11; "b" at 14..23, at 14 and 19.
    assert [(f.rank, f.matrix_offset, f.numel) for f in fragments_of(layouts[0])] == [(0, 0, 3), (1, 3, 1)]
    assert [(f.rank, f.matrix_offset, f.numel) for f in fragments_of(layouts[1])] == [(1, 0, 1), (2, 1, 1)]
    for rank in range(3):
        ends = 0
        for offset, numel in covered(layouts, rank):
            assert offset == ends
            ends += numel


def test_rows_of_thin_and_replicated_matrices() -> None:
    tall = MatrixLayout("tall", 7, 1, 0, sharded_placement(0, 7, 2))
    wide = MatrixLayout("wide", 1, 7, 0, sharded_placement(2, 7, 2))
    layouts = row_places((tall, wide))
    assert [f.numel for f in fragments_of(layouts[0])] == [2, 2, 2, 1]
    assert [(f.rank, f.partition_offset) for f in fragments_of(layouts[1])] == [(0, 2)]
    whole = MatrixLayout("whole", 4, 3, 1, replicated_placement(0, 12, 2))
    (layout,) = row_places((whole,))
    assert layout.replicated and [f.numel for f in fragments_of(layout)] == [4, 4]


def test_modes_that_contradict_each_other_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"weight_decay_mode: 'cautious' needs adam_w_mode true"):
        MuonConfig.from_params({"weight_decay_mode": "cautious", "adam_w_mode": False})
    with pytest.raises(ConfigError, match=r"optimizer\.params\.variant"):
        MuonConfig.from_params({"variant": "adamuon"})
    with pytest.raises(ConfigError, match=r"optimizer\.params\.beta2"):
        MuonConfig.from_params({"beta2": 1.0})


def test_a_group_of_the_caller_may_set_its_own() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    named = list(model.named_parameters())
    groups = [{"params": [named[0]], "weight_decay_mode": "cautious", "beta2": 0.5}, {"params": [named[1]]}]
    optimizer = Muon(groups, variant="normuon", weight_decay=0.1, muon_lr=0.1)
    assert [group["beta2"] for group in optimizer.param_groups] == [0.5, 0.95]
    grad = torch.randn(4, 4)
    for _, param in named:
        param.grad = grad.clone()
    optimizer.step()
    first, second = (optimizer.state[param]["row_second_moment"] for _, param in named)
    # Both matrices run in one batch and have the same rows, of which 1 - beta2 is taken: 0.5 and 0.05.
    close(first, second * 10, rtol=1e-5, atol=0)
    old = {**optimizer.state_dict()}
    old["param_groups"] = [
        {k: v for k, v in group.items() if k not in ("beta2", "weight_decay_mode")}
        for group in old["param_groups"]
    ]
    optimizer.load_state_dict(old)
    assert [g["weight_decay_mode"] for g in optimizer.param_groups] == ["cautious", "decoupled"]


def test_rows_of_blocks_and_of_transposed_matrices() -> None:
    """Each row of each block has a number; of a matrix stored input x output, each column."""
    grid = MatrixLayout("g", 3, 10, 0, flat_placement(0, 30, 12), col_blocks=(4, 6), row_blocks=(1, 2))
    (layout,) = row_places((grid,))
    # Rows of blocks begin at 0, 4 | 10, 14 | 20, 24; ranks hold 12, 12 and 6 elements.
    assert [(f.rank, f.matrix_offset, f.numel) for f in fragments_of(layout)] == [
        (0, 0, 3),
        (1, 3, 2),
        (2, 5, 1),
    ]
    assert [layout.rank_at(row) for row in range(6)] == [0, 0, 0, 1, 1, 2]
    flipped = MatrixLayout("t", 4, 5, 0, flat_placement(0, 20, 7), row_blocks=(2, 2), transposed=True)
    (layout,) = row_places((flipped,))
    # Columns of blocks begin at 0 to 4 and 10 to 14; ranks hold 7, 7 and 6 elements.
    assert layout.numel == 10
    assert [(f.rank, f.matrix_offset, f.numel) for f in fragments_of(layout)] == [
        (0, 0, 5),
        (1, 5, 4),
        (2, 9, 1),
    ]


@pytest.mark.parametrize("transposed", [False, True])
def test_parts_of_fused_projections_are_normalised_apart(transposed: bool) -> None:
    """Unequal parts, stored output x input or the other way round: each part's outputs, to each part's own norm."""
    torch.manual_seed(6)
    layer = nn.Module()
    layer.fused = nn.Linear(6, 20, bias=False)
    weight = layer.fused.weight
    if transposed:
        weight.data = weight.data.T.contiguous()
    start, grad = weight.detach().clone(), torch.randn_like(weight)
    optimizer = Muon(
        layer,
        muon_lr=0.1,
        momentum=0.0,
        variant="normuon",
        ns_dtype="fp32",
        ns_backend="torch",
        matrices={"fused.*": {"split": [8, 12], "transposed": transposed}},
    )
    weight.grad = grad.clone()
    optimizer.step()
    outputs = (start - weight.detach()).T if transposed else start - weight.detach()
    direction = grad.T if transposed else grad
    moments = []
    for part, moved in zip(direction.split([8, 12]), outputs.split([8, 12]), strict=True):
        factor = reference_orthogonalize(part, resolve_schedule("quintic", 5))
        expected, moment = reference_finish(factor, torch.zeros(len(part)), beta2=0.95)
        moments.append(moment)
        scale = max(1.0, len(part) / 6) ** 0.5
        # Newton-Schulz in fp32 on Gaussian matrices: 1e-5 at most.
        close(moved.double(), 0.1 * scale * expected, rtol=1e-3, atol=1e-5)
    kept = optimizer.state[weight]["row_second_moment"]
    close(kept.double(), torch.cat(moments), rtol=1e-4, atol=0)
