"""Limits how long a rank waits for others, and names the ranks that did not come.

The exchange runs on DeepSpeed's data-parallel groups. DeepSpeed makes them without a time-out, so they have torch's
default (30 minutes with gloo), whatever the user gave ``init_process_group``. While a collective of this project runs,
its group gets the time-out of the default group; collectives of others keep theirs.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deepspeed_muon.errors import MuonError, RankMissingError

# gloo raises plain RuntimeErrors; these are its and NCCL's words for a rank that is silent or gone.
_SILENCE = re.compile(
    r"time(d)?[ -]?out|connection|pair closure|broken pipe|closed by peer|nccl", re.IGNORECASE
)
# Seconds in which other waiting ranks can report that they wait too.
_GRACE = 3.0


@contextlib.contextmanager
def phase(what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Run collectives of ``group`` with the time-out of the default process group.

    It costs a few microseconds, and communicates only if a collective fails.

    Args:
        what: What the ranks are doing, for the error.
        group: Where the collectives run; ``None`` for the default group.

    Raises:
        RankMissingError: From the collective's own error, with the phase and the missing ranks.
    """
    changed = _shortened(group)
    try:
        yield
    except MuonError:
        raise
    except RuntimeError as error:
        if not _SILENCE.search(str(error)):
            raise
        raise RankMissingError(_report(what, group, error)) from error
    finally:
        for backend, timeout in changed:
            backend._set_default_timeout(timeout)


def group_timeout(group: dist.ProcessGroup | None = None) -> timedelta | None:
    """Return the shortest time-out of a group's backends, ``None`` if they do not say."""
    timeouts = [timeout for _, timeout in _backends(group).values()]
    return min(timeouts, default=None)


def _backends(group: dist.ProcessGroup | None) -> dict[str, tuple[Any, timedelta]]:
    """Return device type to backend and its time-out, for backends whose time-out can be changed."""
    group = dist.group.WORLD if group is None else group
    found: dict[str, tuple[Any, timedelta]] = {}
    if group is None:
        return found
    for device in group._device_types:
        backend = group._get_backend(device)
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if timeout is not None and hasattr(backend, "_set_default_timeout"):
            found[device.type] = (backend, timeout)
    return found


def _shortened(group: dist.ProcessGroup | None) -> list[tuple[Any, timedelta]]:
    """Give a group's backends the shorter time-outs of the default group; return what to restore."""
    if group is None or group is dist.group.WORLD or not dist.is_initialized():
        return []
    wanted = _backends(None)
    changed = []
    for kind, (backend, timeout) in _backends(group).items():
        if kind in wanted and wanted[kind][1] < timeout:
            backend._set_default_timeout(wanted[kind][1])
            changed.append((backend, timeout))
    return changed


def _report(what: str, group: dist.ProcessGroup | None, error: Exception) -> str:
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    absent = _absent(ranks, what)
    who = (
        f"no sign of ranks {absent}"
        if absent
        else "all ranks report a failure, so look at the network and at the first error of each"
    )
    wanted = group_timeout()
    limit = "" if wanted is None else f" The process group's time-out is {wanted.total_seconds():g} s."
    return (
        f"rank {dist.get_rank()} waited in vain in the {what} with ranks {ranks}: {who}.{limit} A rank that ended, "
        f"hangs or does something else than the others leaves them waiting: look at its log. Weights may be updated in "
        f"part; go on from a checkpoint. The collective said: {error}"
    )


def _absent(ranks: list[int], what: str) -> list[int]:
    """Write into the store that this rank is alive and gave up; return the ranks that do not write it soon after."""
    others = [rank for rank in ranks if rank != dist.get_rank()]
    try:
        store = c10d._get_default_store()
        store.set(_key(dist.get_rank()), what)
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline:
            others = [rank for rank in others if not store.check([_key(rank)])]
            if not others:
                break
            time.sleep(0.05)
    except RuntimeError:
        pass  # The process with the store is gone: ranks that have not answered yet stay listed.
    return others


def _key(rank: int) -> str:
    return f"deepspeed_muon/gave_up/{rank}"
