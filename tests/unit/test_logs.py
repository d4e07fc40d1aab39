"""Who speaks where several ranks would say the same."""

from __future__ import annotations

import contextlib
import io
import logging
from typing import Any

import pytest

import deepspeed_muon
from deepspeed_muon.logs import announce, logger, warn, warn_on_each_machine
from tests.support import training


def say(rank: int, world_size: int) -> list[str]:
    messages = training.heard()
    warn("%s of all", rank)
    logger.warning("%s of its own", rank)
    return messages


def test_a_message_of_all_ranks_is_said_by_the_first(ranks: Any) -> None:
    assert ranks(2).run(say) == [["0 of all", "0 of its own"], ["1 of its own"]]


@pytest.mark.parametrize(("local_rank", "said"), [(None, 1), ("0", 1), ("3", 0)])
def test_a_lack_of_a_machine_is_said_once_a_machine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, local_rank: str | None, said: int
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    with caplog.at_level(logging.WARNING):
        warn_on_each_machine("no %s", "compiler")
    assert [record.getMessage() for record in caplog.records] == ["no compiler"] * said


def announced(rank: int, world_size: int, *, shown: bool) -> tuple[str, list[str]]:
    """Announce something, where the program shows messages of the level INFO or not; return stderr and the messages."""
    messages: list[str] = []
    handler = logging.Handler(logging.INFO if shown else logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            announce("%d engines", 1)
            announce("built", on_any_rank=True)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return stderr.getvalue(), messages


@pytest.mark.parametrize("shown", [False, True])
def test_important_messages_are_always_said(ranks: Any, shown: bool) -> None:
    for rank, (stderr, messages) in enumerate(ranks(2).run(announced, shown=shown)):
        lines = ["1 engines"] * (rank == 0) + ["built"]
        assert (stderr.splitlines(), messages) == (([], lines) if shown else (lines, []))


def start(rank: int, world_size: int) -> tuple[str, list[bool]]:
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        engine = training.make_engine(training.ds_config(2))
    active = [deepspeed_muon.is_active(engine), deepspeed_muon.is_active(object())]
    return stderr.getvalue(), active


def test_an_engine_says_in_one_line_that_this_muon_runs(ranks: Any) -> None:
    for rank, (stderr, active) in enumerate(ranks(2).run(start)):
        said = [line for line in stderr.splitlines() if line.startswith("deepspeed_muon")]
        assert len(said) == (rank == 0) and active == [True, False]
        if said:
            assert f"deepspeed_muon {deepspeed_muon.__version__}: Muon for 8 tensors (" in said[0]
            assert "AdamW for" in said[0] and "kernels: " in said[0]
