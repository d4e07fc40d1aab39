"""Which cases of a matrix run in every test run; the others are marked ``full``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

__all__ = ["each_value", "pairwise"]

_Part = tuple[tuple[int, Any], ...]


def pairwise(cases: Iterable[Sequence[Any]]) -> list[Any]:
    """Keep cases in which every pair of values that occurs is there; greedily, the first of equals."""
    return _thinned([tuple(case) for case in cases], 2)


def each_value(cases: Iterable[Sequence[Any]]) -> list[Any]:
    """Keep cases in which every value of every parameter is there."""
    return _thinned([tuple(case) for case in cases], 1)


def _thinned(cases: list[tuple[Any, ...]], size: int) -> list[Any]:
    missing = {part for case in cases for part in _parts(case, size)}
    kept = set()
    while missing:
        best = max(range(len(cases)), key=lambda number: len(_parts(cases[number], size) & missing))
        kept.add(best)
        missing -= _parts(cases[best], size)
    return [
        pytest.param(*case, marks=[] if number in kept else [pytest.mark.full])
        for number, case in enumerate(cases)
    ]


def _parts(case: tuple[Any, ...], size: int) -> set[_Part]:
    return set(combinations(enumerate(case), size))
