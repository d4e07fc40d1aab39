"""The program that runs several ranks on one GPU, on the CPU: the same cases, with the same limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu import ranks as program
from tests.support.harness import RankPool


@pytest.mark.full  # the tests of engines have the same placements and kinds of state
def test_fragments_cut_blocks_and_row_state_agree_with_the_reference(
    ranks: Callable[[int], RankPool],
) -> None:
    cases = [case.name for case in program.CASES]
    lines = ranks(4).run(program.check_all, cases=cases, timeout=200)[0]
    assert [line.split("  ")[0] for line in lines] == ["ok"] * len(cases), lines
