"""NorMuon's rows, kinds of weight decay and the places of row moments, each against its reference."""

from __future__ import annotations

import textwrap
from unittest import mock

import pytest
import torch
from pydantic import Field
from torch import nn

from deepspeed_muon import Muon
from deepspeed_muon.math.updates import AdamStep, adam_step_, shape_scale
from deepspeed_muon.ops.torch_operators import cautious_apply_
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.owners import Assignment
from deepspeed_muon.plan.placement import Fragment, flat_placement, replicated_placement
from deepspeed_muon.reference import ReferenceMuon
from deepspeed_muon.step.row_state import row_fragments
from deepspeed_muon.variants import variant
from deepspeed_muon.variants.normuon import MOMENTS, row_factors
from tests.support.comparisons import close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 8, 2), (2, 1, 4), (2, 6, 1)])
def test_rows_match_the_reference(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    moments = torch.rand(shape[:2]) * 0.1
    updates = torch.randn(shape).mul_(torch.logspace(-4, 1, shape[1]).unsqueeze(-1)).to(dtype)
    settings = {"beta2": torch.full((shape[0], 1), 0.9)}
    factors, new = row_factors(updates, moments, settings)
    assert factors.dtype == torch.float32
    result = updates * factors.unsqueeze(-1)
    for number, update in enumerate(updates.double()):
        state: dict[tuple[object, ...], torch.Tensor] = {(MOMENTS,): moments[number].double()}
        reference = ReferenceMuon({}, variant="normuon", beta2=0.9, state=state)
        with mock.patch("deepspeed_muon.reference.newton_schulz", return_value=update):
            expected = reference.update_of(update) / shape_scale("original", *update.shape)
        # A dozen fp32 roundings (6e-8) of sums of positive numbers.
        close(result[number].double(), expected, rtol=1e-6, atol=0)
        close(new[number].double(), reference.state[MOMENTS,], rtol=1e-6, atol=0)


def test_rows_keep_the_norm_and_zero_stays_zero() -> None:
    torch.manual_seed(2)
    updates = torch.randn(2, 6, 5)
    updates[0, 2] = 0.0
    updates[1] = 0.0
    moments = torch.zeros(2, 6)
    factors, _ = row_factors(updates, moments, {"beta2": torch.full((2, 1), 0.95)})
    result = updates * factors.unsqueeze(-1)
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
    expected = param.double()
    state: dict[tuple[object, ...], torch.Tensor]
    state = {("param", "exp_avg"): first.double(), ("param", "exp_avg_sq"): second.double()}
    reference = ReferenceMuon(
        {}, adam_lr=0.1, eps=1e-8, weight_decay=0.3, weight_decay_mode=mode, steps=2, state=state
    )
    reference.step({"param": expected}, {"param": grad})
    adam_step_([(param, grad, first, second)], settings=settings)
    close(param.double(), expected, rtol=1e-5, atol=1e-6)


def test_adam_fills_the_counters_of_all_tensors_together() -> None:
    generator = torch.Generator().manual_seed(6)
    tensors = [tuple(torch.rand(numel, generator=generator) for _ in range(4)) for numel in (7, 1, 64)]
    alone = [tuple(tensor.clone() for tensor in of_param) for of_param in tensors]
    settings = AdamStep(lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3, step=3)
    for of_param in alone:
        adam_step_([of_param], settings=settings)  # type: ignore[list-item]
    with mock.patch("torch.full", wraps=torch.full) as full:
        adam_step_(tensors, settings=settings)  # type: ignore[arg-type]
    assert full.call_count == 1
    for of_param, expected in zip(tensors, alone, strict=True):
        assert all(map(torch.equal, of_param, expected))


def test_cautious_apply_matches_the_reference() -> None:
    torch.manual_seed(4)
    param, update = torch.randn(257), torch.randn(257).bfloat16()
    update[:3] = 0.0
    expected = param.double()
    ReferenceMuon({}, weight_decay_mode="cautious").apply(expected, update.double() * 2.0, 0.1, 0.5)
    # Two fragments with an element between them that stays.
    table = torch.tensor([[0, 0, 0, 0, 100, 0], [0, 101, 0, 101, 156, 0]])
    rates = torch.tensor([[0.2, 0.05]], dtype=torch.float64)
    expected[100] = param[100]
    cautious_apply_([param], [update], table, rates)
    close(param.double(), expected, rtol=1e-6, atol=1e-6)


def test_owners_store_the_rows_of_their_matrices() -> None:
    """One vector for each partition; matrices of one shape follow each other, and blocks of one parameter count on."""
    tall, broad = (4, 3), (2, 5)
    matrices = [
        MatrixLayout(f"m{number}", *shape, 0, flat_placement(12 * number, shape[0] * shape[1], 9))
        for number, shape in enumerate((tall, broad, tall))
    ]
    stack = MatrixLayout("s", 6, 2, 1, flat_placement(0, 12, 5), row_blocks=(2, 2, 2))
    pieces = [stack.slice_blocks(0, (2,)), stack.slice_blocks(2, (2, 2))]
    owners, origin = (1, 1, 1, 1, 0), (0, 1, 2, 3, 3)
    assignment = Assignment((*matrices, *pieces), owners, origin, (0.0,) * 5)
    assert row_fragments(assignment) == (
        Fragment(1, 0, 0, 4),
        Fragment(1, 0, 8, 2),
        Fragment(1, 0, 4, 4),
        Fragment(1, 0, 0, 2),
        Fragment(0, 2, 0, 4),
    )


def test_rows_of_replicated_matrices_do_not_depend_on_owners() -> None:
    layout = MatrixLayout("a", 6, 2, 0, replicated_placement(12, 2), row_blocks=(2, 2, 2))
    actual = [
        row_fragments(
            Assignment(
                (layout.slice_blocks(0, (2,)), layout.slice_blocks(2, (2, 2))), owners, (0, 0), (0.0, 0.0)
            )
        )
        for owners in ((0, 1), (1, 0))
    ]
    for fragments in actual:
        assert [(f.matrix_offset, f.partition_offset, f.numel) for f in fragments] == [(0, 0, 2), (2, 2, 4)]


def test_a_group_of_the_caller_may_set_beta2() -> None:
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


def test_outputs_of_blocks_and_of_transposed_matrices() -> None:
    """Each row of each block is an output; of a matrix stored input x output, each column."""
    grid = MatrixLayout("g", 3, 10, 0, flat_placement(0, 30, 12), col_blocks=(4, 6), row_blocks=(1, 2))
    assert grid.output_count == 6
    flipped = MatrixLayout("t", 4, 5, 0, flat_placement(0, 20, 7), row_blocks=(2, 2), transposed=True)
    assert flipped.output_count == 10


@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_of_fused_projections_are_normalised_apart(transposed: bool) -> None:
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
    for block_rows, moved in zip(direction.split([8, 12]), outputs.split([8, 12]), strict=True):
        reference = ReferenceMuon({}, variant="normuon")
        expected = reference.update_of(block_rows)
        moments.append(reference.state[MOMENTS,])
        # Newton-Schulz in fp32 on Gaussian matrices: 1e-5 at most.
        close(moved.double(), 0.1 * expected, rtol=1e-3, atol=1e-5)
    stored = optimizer.state[weight]["row_second_moment"]
    close(stored.double(), torch.cat(moments), rtol=1e-4, atol=0)


def test_the_example_of_a_variant_runs() -> None:
    """A reader of ``variant.py`` can copy it."""
    example = (variant.__doc__ or "").partition("::\n\n")[2].partition("\n\nThe norm of an update")[0]
    names = {"torch": torch, "Field": Field, **vars(variant)}
    exec(textwrap.dedent(example), names)
    declared = names["VARIANT"]
    settings = {setting.name: torch.full((2, 1), setting.default) for setting in declared.settings}
    blocks = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(7))
    factors, new = declared.row_factors(blocks, torch.zeros(2, 3), settings)
    close(factors, torch.ones(2, 3), rtol=1e-5, atol=0)  # in the first step every size is the largest so far
    close(new, blocks.square().mean(-1).sqrt(), rtol=1e-5, atol=0)


def test_settings_that_nothing_reads_are_refused() -> None:
    setting = variant.Setting("decay", 0.5, Field(ge=0), "A setting.")
    with pytest.raises(ValueError, match="only row_factors reads state and settings"):
        variant.Variant("idle", settings=(setting,))
    with pytest.raises(ValueError, match="row_factors needs state"):
        variant.Variant("stateless", row_factors=lambda *_: torch.ones(1))
