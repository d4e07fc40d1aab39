"""The ranks that train one model together: how each reaches the others, and how long it waits for them.

They need not be all ranks of the program: an ``mpu`` object can give some of them to an engine, and the rest may run
other engines or none. So an engine uses the default process group only if it has all its ranks.

The exchange runs on DeepSpeed's data-parallel groups. DeepSpeed makes them without a time-out, so they have torch's
default (30 minutes with gloo), whatever the user gave ``init_process_group``. While a collective of this package runs,
its group has at most the time-out of the default group (:func:`phase`); other collectives keep theirs.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from deepspeed_muon.errors import MuonError, RankDisagreementError, RankMissingError

Reduction = Literal["sum", "max", "min"]

# gloo raises plain RuntimeErrors; these are its and NCCL's words for a rank that is silent or gone.
_SILENCE = re.compile(
    r"time(d)?[ -]?out|connection|pair closure|broken pipe|closed by peer|nccl", re.IGNORECASE
)
# Seconds in which other waiting ranks can report that they wait too.
_GRACE = 3.0
# How often this process waited for each set of ranks: every barrier uses keys of its own in the store.
_barrier_counts: dict[str, int] = {}
# Groups of which a phase is running.
_in_phase: set[dist.ProcessGroup | None] = set()
# Seconds between two looks at the store; they grow from the first to the last.
_FIRST_LOOK, _LAST_LOOK = 0.001, 0.25
# Seconds that a process waits for gloo's threads at its exit. They need a few milliseconds, and more on a machine that
# has more to run than processors.
_LONGEST_EXIT = 5.0


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of one engine.

    Attributes:
        groups: Process groups of this rank that together reach every rank, one after the other: the row and the column
            of a grid (data-parallel, model-parallel). Empty for a single rank.
    """

    groups: tuple[dist.ProcessGroup, ...] = ()

    @classmethod
    def of(cls, groups: Iterable[dist.ProcessGroup | None]) -> Ranks:
        """Keep the groups that reach further ranks; ``None`` is the default group. All ranks pass the same order."""
        if not dist.is_available() or not dist.is_initialized():
            return cls()
        # A group within one that is kept already (data-parallel within all ranks) would repeat every message.
        needed: list[dist.ProcessGroup] = []
        reached: list[set[int]] = [{dist.get_rank()}]
        for group in groups:
            # Before torch 2.7 the default group has no ranks under the name None.
            group = c10d._get_default_group() if group is None else group
            ranks = set(dist.get_process_group_ranks(group))
            if not any(ranks <= before for before in reached):
                needed.append(group)
                reached.append(ranks)
        return cls(tuple(needed))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(dist.get_world_size(group) for group in self.groups)

    @property
    def are_all(self) -> bool:
        """Whether they are all ranks of the default process group."""
        return not self.groups or self.size == dist.get_world_size()

    @property
    def position(self) -> int:
        """The number of this rank among them, from 0 to ``size - 1``; not its global rank."""
        # As an index of a grid with one dimension for each group, the first of which varies fastest. Example: 6 ranks
        # as a data-parallel group of 3 and a model-parallel group of 2. Rank 2 of the first and rank 1 of the second
        # group is at 2 + 3 * 1 = 5.
        position, stride = 0, 1
        for group in self.groups:
            position += stride * dist.get_rank(group)
            stride *= dist.get_world_size(group)
        return position

    def all_reduce(self, numbers: Sequence[float], how: Reduction, *, purpose: str) -> list[float]:
        """Return the sums, maxima or minima over all ranks, in float64. Must be called by all of them.

        Sums of integers are exact below 2^53. ``purpose`` is named in the error if a rank does not take part.
        """
        reduced = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        for group in self.groups:
            # Where torch puts the objects that it gathers: a GPU where the group reaches no other memory.
            reduced = reduced.to(c10d._get_object_coll_device(group))
            reduced = all_reduce_tensor(reduced, group, purpose=purpose, how=how)
        return list(reduced.tolist())

    def collect(self, items: Sequence[Any], *, most: int, purpose: str) -> list[tuple[int, Any]]:
        """Return items of all ranks, in the order of the ranks, each with its rank. Must be called by all of them.

        One rank after the other broadcasts its items, so that messages do not grow with the number of ranks. The list
        ends at the length ``most``.
        """
        local = [(global_rank(), item) for item in items]
        collected: list[tuple[int, Any]] = []
        is_waiting = bool(local)
        while len(collected) < most:
            # 1. the first rank that has items left to send
            (first,) = self.all_reduce([self.position if is_waiting else self.size], "min", purpose=purpose)
            if int(first) == self.size:
                break
            is_waiting = is_waiting and self.position != int(first)
            # 2. its items, along each dimension of the grid in turn; divmod undoes what "position" computes
            position, message = int(first), [local]
            for group in self.groups:
                position, source = divmod(position, dist.get_world_size(group))
                # Only the rank's own row has the items at first, and then every column has them.
                with phase(purpose, group):
                    dist.broadcast_object_list(message, src=dist.get_global_rank(group, source), group=group)
            collected += message[0]
        return collected[:most]

    def all_gather(self, item: Any, *, purpose: str) -> dict[int, Any]:
        """Return the item of every rank, which can be pickled, by global rank. Called by all of them."""
        item_of = {global_rank(): item}
        for group in self.groups:
            # What the groups before this one gathered is passed on: in the end every rank has every item.
            gathered: list[Any] = [None] * dist.get_world_size(group)
            with phase(purpose, group):
                dist.all_gather_object(gathered, item_of, group=group)
            item_of = {rank: value for items in gathered for rank, value in items.items()}
        return dict(sorted(item_of.items()))

    def barrier(self) -> None:
        """Wait until every rank has called this; raise RankDisagreementError after the default group's time-out.

        It uses the key-value store and no collective, because a rank whose engine has another optimizer does not call
        this and must not be disturbed.
        """
        if self.groups and self.are_all:
            _barrier(list(range(dist.get_world_size())))
            return
        for group in self.groups:
            _barrier(dist.get_process_group_ranks(group))


def all_gather_tensor(tensor: Tensor, group: dist.ProcessGroup, *, purpose: str) -> Tensor:
    """Return the tensors of all ranks of a group, ``(ranks, ...)``; the host does not wait for the device.

    Must be called by all of them, with tensors of one shape and dtype. ``purpose`` is for the error if a rank does not
    take part.
    """
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    with phase(purpose, group):
        dist.all_gather(gathered, tensor, group=group)
    return torch.stack(gathered)


def all_reduce_tensor(
    tensor: Tensor, group: dist.ProcessGroup | None, *, purpose: str, how: Reduction = "sum"
) -> Tensor:
    """All-reduce ``tensor`` in place over a group, and return it. Called as :func:`all_gather_tensor`."""
    operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[how]
    with phase(purpose, group):
        dist.all_reduce(tensor, op=operation, group=group)
    return tensor


def global_rank() -> int:
    """Return the rank of this process in the default process group, 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def all_ranks() -> Ranks:
    """Return all ranks of the default process group."""
    return Ranks.of([None])


def _barrier(ranks: Sequence[int]) -> None:
    """Wait for ranks in the key-value store; see :meth:`Ranks.barrier`."""
    store = c10d._get_default_store()
    name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    _barrier_counts[name] = _barrier_counts.get(name, 0) + 1
    key = f"deepspeed_muon/barrier/{name}/{_barrier_counts[name]}"
    complete = f"{key}/complete"
    # 1. report this rank; the last one completes the barrier
    store.set(f"{key}/{dist.get_rank()}", "here")
    if store.add(f"{key}/count", 1) == len(ranks):
        store.set(complete, "yes")
    # 2. wait for that
    limit, pause = store.timeout.total_seconds(), _FIRST_LOOK  # type: ignore[attr-defined]
    deadline = time.monotonic() + limit
    # store.wait would block the store's connection, which other threads need too.
    while not store.check([complete]):
        if time.monotonic() > deadline:
            missing = [rank for rank in ranks if not store.check([f"{key}/{rank}"])]
            if not missing:  # the last one came just now
                continue
            # Undo it, so that a program that catches the error can try again. This rank's own key remains, so that
            # ranks whose time ends a little later do not report it as missing.
            store.add(f"{key}/count", -1)
            _barrier_counts[name] -= 1
            shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
            raise RankDisagreementError(
                f"ranks {missing} did not start an engine with this optimizer within {limit:g} s (the time-out of the "
                f"process group), while the other ranks of [{shown}] wait for them. Either optimizer.type is not "
                f"Muon there, or they failed or hang before this point: compare the configurations, and see their logs"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LAST_LOOK)


@contextlib.contextmanager
def phase(purpose: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Run collectives of ``group`` with at most the time-out of the default process group.

    It costs a few microseconds, and communicates only if a collective fails. Its error becomes a RankMissingError with
    the purpose, which says what the ranks are doing, and the missing ranks.
    """
    # A phase inside another one has the right time-out already.
    is_outer = group not in _in_phase
    changed = _shorten_timeouts(group) if is_outer else []
    _in_phase.add(group)
    try:
        yield
    except MuonError:
        raise
    except RuntimeError as error:
        if not _SILENCE.search(str(error)):
            raise
        raise RankMissingError(_silence_message(purpose, group, error)) from error
    finally:
        if is_outer:
            _in_phase.discard(group)
        for backend, timeout in changed:
            backend._set_default_timeout(timeout)


def group_timeout(group: dist.ProcessGroup | None = None) -> timedelta | None:
    """Return the shortest time-out of a group's backends, ``None`` if they do not say."""
    return min((timeout for _, timeout in _backends(group).values()), default=None)


def _backends(group: dist.ProcessGroup | None) -> dict[str, tuple[Any, timedelta]]:
    """Return device type to backend and its time-out, for backends whose time-out can be changed."""
    group = dist.group.WORLD if group is None else group
    backends: dict[str, tuple[Any, timedelta]] = {}
    if group is None:
        return backends
    for device in group._device_types:
        backend = group._get_backend(device)
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if timeout is not None and hasattr(backend, "_set_default_timeout"):
            backends[device.type] = (backend, timeout)
    return backends


def _shorten_timeouts(group: dist.ProcessGroup | None) -> list[tuple[Any, timedelta]]:
    """Give a group's backends the shorter time-outs of the default group; return what to restore."""
    if group is None or group is dist.group.WORLD or not dist.is_initialized():
        return []
    default = _backends(None)
    changed = []
    for device, (backend, timeout) in _backends(group).items():
        if device in default and default[device][1] < timeout:
            backend._set_default_timeout(default[device][1])
            changed.append((backend, timeout))
    return changed


def _silence_message(purpose: str, group: dist.ProcessGroup | None, error: Exception) -> str:
    """Return which ranks of a group are silent, in words, after reporting that this one is not."""
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    silent = [rank for rank in ranks if rank != dist.get_rank()]
    key = "deepspeed_muon/gave_up/{}".format
    # A RuntimeError: the process with the store is gone. Ranks that have not reported yet remain listed.
    with contextlib.suppress(RuntimeError):
        store = c10d._get_default_store()
        store.set(key(dist.get_rank()), purpose)
        deadline = time.monotonic() + _GRACE
        while silent and time.monotonic() < deadline:
            silent = [rank for rank in silent if not store.check([key(rank)])]
            time.sleep(0.05)
    who = (
        f"no sign of ranks {silent}"
        if silent
        else "all ranks report a failure, so look at the network and at the first error of each"
    )
    timeout = group_timeout()
    limit = "" if timeout is None else f" The process group's time-out is {timeout.total_seconds():g} s."
    return (
        f"rank {dist.get_rank()} failed or timed out in the {purpose} with ranks {ranks}: {who}.{limit} A rank that "
        f"exits, hangs or runs other code than the others blocks them: look at its log. Weights may be partly updated; "
        f"resume from a checkpoint. The collective's error: {error}"
    )


def wait_for_gloo() -> None:
    """Wait until no thread of gloo in this process has work left; called when the interpreter exits.

    A thread of gloo that has finished a collective still has to release its tensors, and for that it asks for Python's
    lock. Before Python 3.14, a thread that asks after the interpreter has begun to shut down is ended in the middle of
    a destructor, and that kills the process: "terminate called without an active exception", status -6
    (https://github.com/pytorch/pytorch/issues/190489). This happens whatever the optimizer, also after a barrier and
    after ``destroy_process_group``, whose threads live on while anything refers to a group.

    A thread that waits for a dead rank is asleep, and is ignored.
    """
    end = time.monotonic() + _LONGEST_EXIT
    while any(_gloo_threads_running()) and time.monotonic() < end:
        time.sleep(0.01)


def _gloo_threads_running() -> Iterator[bool]:
    """Yield for each thread of torch's gloo whether it runs, or would if it had a processor; Linux only."""
    for thread in Path("/proc/self/task").glob("*"):
        # Threads end while they are listed.
        with contextlib.suppress(OSError):
            # Python's lock is free while the kernel answers: a thread that asks for the lock counts as running.
            name, fields = (thread / "stat").read_text().rsplit(")", 1)
            if "(pt_gloo" in name:
                yield fields.split()[0] == "R"
