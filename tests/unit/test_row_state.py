"""Reading and writing the row state of blocks where it is stored."""

from __future__ import annotations

import pytest
import torch

from deepspeed_muon.plan.layout import MatrixLayout
from deepspeed_muon.plan.placement import flat_placement
from deepspeed_muon.step.row_state import OwnedRows
from deepspeed_muon.variants import VARIANTS

BETA2 = 0.5


def two_matrices(vector: torch.Tensor, *, adjacent: bool) -> OwnedRows:
    """Return the rows of two 4 x 3 matrices in a vector: one after the other, or with two numbers between them."""
    matrices = [MatrixLayout(name, 4, 3, 0, flat_placement(0, 12, 12)) for name in "ab"]
    rows = {0: vector[:4], 1: vector[4:8] if adjacent else vector[6:10]}
    return OwnedRows(matrices, VARIANTS["normuon"], [(BETA2,)] * 2, rows)


@pytest.mark.parametrize("adjacent", [True, False])
def test_wrong_blocks_keep_their_rows(adjacent: bool) -> None:
    before = torch.arange(10.0)
    vector, blocks = before.clone(), [(0, 0), (1, 0)]
    rows = two_matrices(vector, adjacent=adjacent)
    results = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    _, new = rows.scale_rows(blocks, results, torch.float32)
    assert torch.equal(vector, before), "nothing is stored before the result was checked"
    rows.write(blocks, new, torch.tensor([True, False]))
    stored = rows.rows
    assert torch.equal(stored[0], before[:4])
    expected = before[4:8] if adjacent else before[6:10]
    torch.testing.assert_close(stored[1], expected.lerp(results[1].square().mean(1), 1 - BETA2))
    rows.write(blocks, new)
    assert torch.equal(torch.stack([stored[0], stored[1]]), new)


def test_blocks_may_begin_anew() -> None:
    rows = two_matrices(torch.full((10,), 7.0), adjacent=True)
    results = torch.ones(1, 4, 3)
    _, new = rows.scale_rows([(1, 0)], results, torch.float32, anew=True)
    assert torch.equal(new, torch.full((1, 4), 1 - BETA2))


@pytest.mark.parametrize("transposed", [False, True])
def test_every_block_of_a_grid_has_separate_rows(transposed: bool) -> None:
    """Blocks of unequal size, two below and two beside each other: rows are those of outputs in either orientation."""
    heights, widths = (2, 4), (3, 5)
    matrix = MatrixLayout(
        "w", 6, 8, 0, flat_placement(0, 48, 48), row_blocks=heights, col_blocks=widths, transposed=transposed
    )
    vector = torch.zeros(matrix.output_count)
    rows = OwnedRows([matrix], VARIANTS["normuon"], [(BETA2,) * 4], {0: vector})
    for number in range(4):
        row, col = divmod(number, 2)
        outputs = widths[col] if transposed else heights[row]
        assert not rows.stored([(0, number)]).any(), "another block has written there"
        rows.write([(0, number)], torch.full((1, outputs), number + 1.0))
    # As inputs x outputs, each row block has a number for every column, else each row one for every column block.
    expected = (
        [1.0] * 3 + [2.0] * 5 + [3.0] * 3 + [4.0] * 5 if transposed else [1.0, 2.0] * 2 + [3.0, 4.0] * 4
    )
    assert vector.tolist() == expected
