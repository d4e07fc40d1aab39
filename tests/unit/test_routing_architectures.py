"""The routes of more than sixty architectures of transformers are those of the table, which was read line by line."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.architectures import ARCHITECTURES, TABLE, routes_of

transformers = pytest.importorskip("transformers", minversion="5.0")

CASES = [(name, settings) for models in ARCHITECTURES.values() for name, settings in models.items()]


def table() -> dict[str, list[str]]:
    blocks = (block.strip("\n").split("\n") for block in TABLE.read_text().split("\n\n"))
    return {block[0]: block for block in blocks if block[0] and not block[0].startswith("==")}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[str]]:
    return table()


def test_the_table_has_every_architecture() -> None:
    assert list(table()) == [name for name, _ in CASES]
    assert len(CASES) >= 60


@pytest.mark.parametrize(("name", "settings"), CASES, ids=[name for name, _ in CASES])
def test_routes(name: str, settings: dict[str, Any], expected: dict[str, list[str]]) -> None:
    assert routes_of(name, settings) == expected[name], (
        f"transformers {transformers.__version__}; if the routes are right: python -m tests.support.architectures"
    )
