"""The program that runs several ranks on one GPU, on the CPU: the same cases, with the same limits."""

from __future__ import annotations

from collections.abc import Callable

from tests.gpu import ranks as program
from tests.support.harness import RankPool


def test_fragments_cut_blocks_and_row_state_agree_with_the_reference(
    ranks: Callable[[int], RankPool],
) -> None:
    lines = ranks(4).run(program.check_all, timeout=200)[0]
    assert [line.split("  ")[0] for line in lines] == ["ok"] * len(program.CASES), lines
