"""Which cases of a matrix run in every test run; the others are marked ``full``."""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import combinations
from typing import Any

import pytest

_Values = tuple[tuple[int, str], ...]


def full(*values: Any) -> Any:
    """Return a case that runs in the long matrices only."""
    return pytest.param(*values, marks=pytest.mark.full)


def usual(cases: Iterable[Any], core: Container[Any], *, compat: Container[Any] = ()) -> list[Any]:
    """Return the cases, tuples or single values, of which only those in ``core`` run in every test run.

    Those in ``compat`` run under the oldest supported DeepSpeed too.
    """
    params = []
    for case in cases:
        marks = [pytest.mark.compat] * (case in compat) + [pytest.mark.full] * (case not in core)
        params.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks))
    return params


def with_settings(cases: Iterable[Any], *settings: Any) -> list[Any]:
    """Return the cases, tuples or ``pytest.param``, with further values behind those of each; marks stay."""
    return [pytest.param(*param.values, *settings, marks=param.marks) for param in _params(cases)]


def each_value(cases: Iterable[Any]) -> list[Any]:
    """Keep cases in which every value of every parameter is there; greedily, the first of equals."""
    return _thinned(cases, 1)


def pairwise(cases: Iterable[Any]) -> list[Any]:
    """Keep cases in which every pair of values that occurs is there."""
    return _thinned(cases, 2)


def _thinned(cases: Iterable[Any], size: int) -> list[Any]:
    """Return the cases, tuples or ``pytest.param``, as the latter; their marks stay."""
    params = _params(cases)
    of_params = [_combinations(param.values, size) for param in params]
    missing = set().union(*of_params)
    core_numbers = set()
    while missing:
        best = max(range(len(params)), key=lambda number: len(of_params[number] & missing))
        core_numbers.add(best)
        missing -= of_params[best]
    return [
        param
        if number in core_numbers
        else pytest.param(*param.values, marks=[*param.marks, pytest.mark.full])
        for number, param in enumerate(params)
    ]


def _params(cases: Iterable[Any]) -> list[Any]:
    return [case if hasattr(case, "marks") else pytest.param(*case) for case in cases]


def _combinations(case: tuple[Any, ...], size: int) -> set[_Values]:
    return set(combinations(((position, repr(value)) for position, value in enumerate(case)), size))
