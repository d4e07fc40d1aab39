"""The two passes over fragments: where directions lie, what is copied for a batch at once, a variant's functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed_muon import Muon
from deepspeed_muon.ops.dispatch import flat_passes
from deepspeed_muon.plan.chunks import ExchangePlan, Segment, build_exchange_plan
from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.placement import sharded_placement
from deepspeed_muon.step import orthogonalize
from deepspeed_muon.step.runner import apply, pack
from deepspeed_muon.step.tables import ChunkTable
from deepspeed_muon.step.tensors import Rates, StepTensors
from tests.support.comparisons import close


def plan_of(rows: int, count: int, ranks: int = 1) -> ExchangePlan:
    """Plan equal matrices of 8 columns that lie one after the other, each cut evenly over the ranks."""
    numel = 8 * rows
    shard = numel // ranks
    matrices = [
        MatrixLayout(f"matrix {number}", rows, 8, 0, sharded_placement(number * shard, numel, shard))
        for number in range(count)
    ]
    return build_exchange_plan(matrices, [0] * count, rank=0, world_size=ranks, chunk_numel=1 << 20)


def rates_of(count: int, *, momentum: float, step: float = 1.0) -> Rates:
    return Rates(
        torch.tensor([(momentum, 0.0)] * count, dtype=torch.float64),
        torch.tensor([(step, 1.0)] * count, dtype=torch.float64),
        None,
        [(1.0,)] * count,
        torch.zeros(count, 0, dtype=torch.float64),
    )


def step_of(
    momentum: Tensor, grad: Tensor, rates: Rates, *, active: list[bool], param: Tensor | None = None
) -> StepTensors:
    """Return a step on one partition."""
    flat = [momentum if param is None else param]
    mask = None if all(active) else torch.tensor(active)
    return StepTensors(mask, rates, flat, [momentum], [grad], None, flat_passes("torch"))


def made(rows: int, order: list[int]) -> tuple[ChunkTable, torch.Tensor, torch.Tensor]:
    """Pack the directions of equal matrices of 8 columns in one partition; the gradient is 0, 1, 2, ..."""
    plan = plan_of(rows, len(order))
    table = ChunkTable(plan, plan.chunks[0], [order], {0: 0})
    grad = torch.arange(8.0 * rows * len(order))
    rates = rates_of(len(order), momentum=0.0)
    step = step_of(torch.zeros_like(grad), grad, rates, active=[True] * len(order))
    directions = torch.full((table.local_numel,), torch.nan)
    pack(table, step, directions, torch.empty(0))
    return table, directions, grad


def test_small_matrices_follow_in_the_order_of_the_batch() -> None:
    order = [2, 0, 1]
    table, directions, grad = made(4, order)
    batch = table.segments_of(tuple(order))
    assert batch.is_single and torch.equal(directions.view(3, 32), grad.view(3, 32)[order])
    assert batch.local[0].in_buffer(directions).is_contiguous() and batch.local[0].buffer_offset == 0
    assert not table.segments_of((0, 2, 1)).is_single
    assert table.segments_of((0, 1)).is_single and table.segments_of((0, 1)).local[0].buffer_offset == 32


def test_sizes_that_would_be_misaligned_are_copied_together() -> None:
    table, directions, grad = made(3, [0, 1])
    batch = table.segments_of((0, 1))
    assert batch.is_single and table.local_numel == 64
    (copy,) = batch.local
    assert torch.equal(copy.in_buffer(directions).reshape(2, 24), grad.view(2, 24))


def test_equal_pieces_of_a_batch_are_copied_together() -> None:
    """On three ranks: the pieces of four matrices as one copy, which is all of them in order."""
    plan = plan_of(6, 4, ranks=3)
    (chunk,) = plan.chunks
    table = ChunkTable(plan, chunk, [[0, 1, 2, 3]], {0: 0})
    batch = table.segments_of((0, 1, 2, 3))
    assert not batch.local and len(batch.owner) == 1 and batch.is_single
    received = torch.arange(float(chunk.owner_buffer.numel))
    matrices = torch.full((4 * 48,), -1.0)
    for copy in batch.owner:
        copy.in_matrices(matrices).copy_(copy.in_buffer(received))
    expected = torch.full((4, 48), -1.0)
    for index, segment in chunk.owner_buffer.segments:
        for piece in range(segment.fragments):
            start, position = (
                segment.buffer_offset + piece * segment.fragment_distance,
                segment.matrix_offset + piece * 16,
            )
            expected[index, position : position + 16] = received[start : start + 16]
    assert torch.equal(matrices.view(4, 48), expected) and (expected >= 0).all()
    # Any other batch finds the same, matrix by matrix.
    for indices in ([1, 3], [3, 0], [2]):
        matrices = torch.full((48 * len(indices),), -1.0)
        for copy in table.segments_of(tuple(indices)).owner:
            copy.in_matrices(matrices).copy_(copy.in_buffer(received))
        assert torch.equal(matrices.view(-1, 48), expected[indices])


def test_unequally_spaced_pieces_are_not_joined() -> None:
    def copy(matrix: int, offset: int, numel: int = 4) -> Segment:
        return Segment(8 * matrix, numel, offset)

    first = copy(0, 0)
    two = first.joined(copy(1, 6), 8)
    assert two is not None and two.shape == (2, 1, 4) and two.buffer_distance == 6
    assert two.joined(copy(2, 12), 8) is not None
    assert two.joined(copy(2, 13), 8) is None, "another distance in the buffer"
    assert two.joined(copy(3, 12), 8) is None, "a matrix is left out"
    assert first.joined(copy(1, 6, 5), 8) is None, "another length"
    assert copy(0, 6).joined(copy(1, 0), 8) is None, "backwards"


def test_a_matrix_without_a_gradient_is_left_alone() -> None:
    plan = plan_of(4, 3)
    table = ChunkTable(plan, plan.chunks[0], [[0, 1, 2]], {0: 0})
    momentum, param, grad = torch.zeros(96), torch.ones(96), torch.ones(96)
    active = [True, False, True]
    step = step_of(momentum, grad, rates_of(3, momentum=0.0), active=active, param=param)
    directions = torch.zeros(96)
    pack(table, step, directions, torch.empty(0))
    apply(step.active_fragments(table.pack_table), step, [directions])
    for tensor, changed in ((momentum, 1.0), (param, 0.0)):
        assert (tensor[:32] == changed).all() and (tensor[64:] == changed).all()
        assert (tensor[32:64] == 1.0 - changed).all()


# A stack of blocks went through the iteration in one batch, however large it was.


def updated(monkeypatch: pytest.MonkeyPatch, bound: int) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    """Update five experts of 6 x 4 once; return the weights and the shapes that went through the iteration."""
    monkeypatch.setattr(orthogonalize, "BATCH_NUMEL", bound)
    weight = nn.Parameter(torch.zeros(5, 6, 4))
    optimizer = Muon([("layers.0.experts.up", weight)], muon_lr=1.0, ns_dtype="fp32", ns_backend="torch")
    weight.grad = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(3))
    optimizer._bind_to_parameters()
    strategy = optimizer.runners[0]._orthogonalizer
    original, shapes = strategy.newton_schulz, []

    def noting(x: torch.Tensor, **settings: Any) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return original(x, **settings)

    strategy.newton_schulz = noting
    optimizer.step()
    return weight.detach().clone(), shapes


def test_a_large_stack_runs_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    together, once = updated(monkeypatch, 1 << 25)
    apart, chunked = updated(monkeypatch, 2 * 6 * 4)
    assert once == [(5, 6, 4)]
    assert chunked == [(2, 6, 4), (2, 6, 4), (1, 6, 4)]
    # The same products in batches of other sizes, whose sums round differently; five steps in fp32.
    close(apart, together, rtol=0, atol=1e-5)


def test_stacks_with_gaps_between_them_run_together() -> None:
    """Two stacks of 182 elements, each at a multiple of 32: one step as if each were alone."""
    torch.manual_seed(0)
    start, gradients = torch.randn(2, 2, 7, 13), torch.randn(2, 2, 7, 13)
    together, alone = ([nn.Parameter(param_start.clone()) for param_start in start] for _ in range(2))
    names = ("up.experts.weight", "down.experts.weight")
    optimizers = [Muon(zip(names, together, strict=True), lr=0.02, ns_dtype="fp32")]
    optimizers += [Muon([(names[0], param_start)], lr=0.02, ns_dtype="fp32") for param_start in alone]
    for params in (together, alone):
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.clone()
    for optimizer in optimizers:
        optimizer.step()
    for param, reference in zip(together, alone, strict=True):
        # Batches of other sizes round differently; five steps in fp32.
        close(param, reference, rtol=0, atol=1e-5)
