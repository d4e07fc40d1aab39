"""The routes of more than sixty architectures of transformers are those of the table, which was read line by line."""

from __future__ import annotations

import json

import pytest

from tests.support.architectures import routes_of, table

transformers = pytest.importorskip("transformers", minversion="5.0")


def test_there_are_more_than_sixty() -> None:
    assert len(table()) >= 60


@pytest.mark.parametrize(
    ("name", "settings", "routes"), [(name, *each) for name, each in table().items()], ids=list(table())
)
def test_routes(name: str, settings: str, routes: list[str]) -> None:
    assert routes_of(name, json.loads(settings)) == routes, (
        f"transformers {transformers.__version__}; if the routes are right: python -m tests.support.architectures"
    )
