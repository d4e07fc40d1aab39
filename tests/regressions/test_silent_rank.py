"""A rank that lived but never came to the step left the others waiting long past the process group's time-out.

DeepSpeed's data-parallel groups have torch's default time-out of 30 minutes, not the user's, and so had the exchange.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import deepspeed_muon
from deepspeed_muon.checkpoint import consolidate, restore
from deepspeed_muon.engine import configure
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.transport.all_to_all import ChunkExchange
from deepspeed_muon.transport.ranks import group_timeout, phase
from tests.support import training
from tests.support.harness import RanksFailed, run_ranks
from tests.support.models import batch
from tests.support.rank_worker import GROUP_TIMEOUT_VARIABLE
from tests.support.thinning import usual

SILENT = 1
# Long enough for ranks that come on a busy machine. The silent rank comes never: without the time-out the harness would
# end the test.
TIMEOUT = 6.0


def wait_for(path: Path) -> None:
    """Live, and do nothing, until the others are done."""
    while not path.exists():
        time.sleep(0.1)


def leave_alone(rank: int, world_size: int, *, stage: int, where: str, folder: str) -> None:
    """Come to ``where`` on all ranks but one, and write down how that ended."""
    answer = Path(folder) / "outcome"
    config = training.ds_config(stage, params={"exchange_chunk_numel": 90})
    silent = rank == SILENT
    if where == "start":
        if silent:
            configure.agree = lambda *args, **kwargs: wait_for(answer)
        attempt: Any = lambda: training.make_engine(config)  # noqa: E731
    else:
        engine = training.make_engine(config)
        training.run_step(engine, 0, rank, world_size, 1)
        engine.backward(engine(*batch(1, rank)))
        saved = str(Path(folder) / "set")
        if where == "restore":
            consolidate(engine, saved)
        actions = {
            "consolidate": lambda: consolidate(engine, saved),
            "restore": lambda: restore(engine, saved),
        }
        attempt = actions.get(where, engine.step)
        if silent and where in ("gather", "scatter"):
            original, calls = ChunkExchange.start, []

            def stall(exchange: ChunkExchange, *args: Any) -> Any:
                calls.append(1)
                # Gathers 0 and 1 come before the first scatter.
                if len(calls) == {"gather": 2, "scatter": 3}[where]:
                    wait_for(answer)
                return original(exchange, *args)

            ChunkExchange.start = stall
        elif silent:
            attempt = lambda: wait_for(answer)  # noqa: E731
    # A save says what it left behind, and then the same.
    expected = CheckpointError if where == "consolidate" else deepspeed_muon.RankMissingError
    error = ""
    try:
        attempt()
    except expected as caught:
        error = str(caught)
    except RuntimeError:
        if not silent:
            raise
    if not silent:
        partial = answer.with_suffix(".new")
        partial.write_text(json.dumps({"error": error}))
        os.replace(partial, answer)


CASES = [
    (0, "step", "exchange of gradient flags"),
    # Where ZeRO divides gradients, the norm is reduced before their flags.
    (1, "step", "norm of the gradients"),
    (3, "gather", "gather of chunk 1 of step set 0"),
    (3, "scatter", "scatter of chunk 0 of step set 0"),
    (2, "start", "comparison of settings"),
    (1, "consolidate", "agreement on a checkpoint"),
    (1, "restore", "agreement on a checkpoint"),
]


@pytest.mark.parametrize(("stage", "where", "said"), usual(CASES, CASES[:1]))
def test_the_wait_ends_as_the_time_out_says(tmp_path: Path, stage: int, where: str, said: str) -> None:
    """The error names what the ranks were doing and who gave no sign."""
    # Collectives that broke leave nothing that the harness could clean up.
    with contextlib.suppress(RanksFailed):
        run_ranks(
            leave_alone,
            2,
            {"stage": stage, "where": where, "folder": str(tmp_path)},
            env={GROUP_TIMEOUT_VARIABLE: str(TIMEOUT)},
        )
    outcome = json.loads((tmp_path / "outcome").read_text())
    assert f"in the {said} with ranks [0, 1]: no sign of ranks [1]" in outcome["error"], outcome
    assert f"time-out is {TIMEOUT:g} s" in outcome["error"]


def timeouts(rank: int, world_size: int) -> list[float]:
    """Return the time-out of a group before, inside and after a phase, and after one that failed."""
    group = dist.new_group(timeout=timedelta(hours=2))
    group_timeouts = [group_timeout(group)]
    with phase("test", group):
        group_timeouts.append(group_timeout(group))
    group_timeouts.append(group_timeout(group))
    with contextlib.suppress(ValueError), phase("test", group):
        raise ValueError
    return [limit.total_seconds() for limit in (*group_timeouts, group_timeout(group)) if limit is not None]


def test_foreign_collectives_keep_their_time_out(ranks: Any) -> None:
    """A group has the default group's time-out while collectives of ours run, and its own again afterwards."""
    for result in ranks(2).run(timeouts):
        assert result == [7200.0, 1800.0, 7200.0, 7200.0]
