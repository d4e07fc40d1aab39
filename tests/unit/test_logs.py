"""Who speaks where several ranks would say the same."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from deepspeed_muon.logs import logger, warn, warn_on_each_machine


def say(rank: int, world_size: int) -> list[str]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    warn("%s of all", rank)
    logger.warning("%s of its own", rank)
    logger.removeHandler(handler)
    return heard


def test_what_every_rank_would_say_is_said_by_the_first(ranks: Any) -> None:
    assert ranks(2).run(say) == [["0 of all", "0 of its own"], ["1 of its own"]]


@pytest.mark.parametrize(("local_rank", "said"), [(None, 1), ("0", 1), ("3", 0)])
def test_what_a_machine_lacks_is_said_once_a_machine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, local_rank: str | None, said: int
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    with caplog.at_level(logging.WARNING):
        warn_on_each_machine("no %s", "compiler")
    assert [record.getMessage() for record in caplog.records] == ["no compiler"] * said
