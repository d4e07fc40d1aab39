"""The routes of architectures of transformers, timm, diffusers and torchvision are those of the reviewed table."""

from __future__ import annotations

import os

import pytest

from tests.support.architectures import (
    Architecture,
    architectures,
    few_architectures,
    installed_versions,
    routes_now,
    versions_of_table,
)
from tests.support.thinning import usual


@pytest.fixture(scope="module")
def routes(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Route the architectures of this run whose library is installed."""
    params = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    return routes_now(callspec.params["heading"] for callspec in params if callspec)


@pytest.mark.skipif("CI" not in os.environ, reason="other versions are skipped below")
def test_ci_has_the_versions_of_the_table() -> None:
    assert installed_versions() == versions_of_table(), "tests/support/architectures.txt has the versions"


@pytest.mark.parametrize("heading", usual(architectures(), few_architectures()))
def test_routes(heading: str, routes: dict[str, list[str]]) -> None:
    architecture: Architecture = architectures()[heading]
    made_with = versions_of_table().get(architecture.library)  # None for a small structure
    installed = installed_versions().get(architecture.library)
    if installed != made_with:
        pytest.skip(
            f"the table was made with {architecture.library} {made_with}, "
            f"{'not installed' if installed is None else 'installed is ' + installed} (make setup)"
        )
    assert routes[heading] == architecture.routes, (
        f"{architecture.library} {installed}; if the new routes are right: python -m tests.support.architectures"
    )
