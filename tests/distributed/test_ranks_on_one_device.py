"""The program that runs several ranks on one GPU, on the CPU: the same cases, with the same limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu import ranks as program
from tests.support.harness import RankPool

ALL = [case.name for case in program.CASES]
# Both placements that cut matrices, and each kind of state; the remaining ones are also in the tests of engines.
SOME = ["fragments, int8 momentum", "shards, row state, bf16"]


@pytest.mark.parametrize(
    "cases", [pytest.param(SOME, id="some"), pytest.param(ALL, id="all", marks=pytest.mark.full)]
)
def test_fragments_cut_blocks_and_row_state_agree_with_the_reference(
    ranks: Callable[[int], RankPool], cases: list[str]
) -> None:
    lines = ranks(4).run(program.check_all, cases=cases, timeout=200)[0]
    assert [line.split("  ")[0] for line in lines] == ["ok"] * len(cases), lines
