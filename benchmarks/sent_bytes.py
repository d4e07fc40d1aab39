"""Counts what a rank sends and how often, at the one place that all callers pass: the process group."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor


@dataclass(slots=True)
class SentBytes:
    """What the collectives of this process sent.

    Every collective counts as the bytes that one rank sends in a bandwidth-optimal algorithm, whatever the backend
    really runs (gloo has no reduce-scatter of its own): all-reduce ``2 n (W-1)/W``, reduce-scatter, reduce and
    broadcast ``n (W-1)/W``, all-gather ``n_own (W-1)``, all-to-all its splits, a message ``n``, a barrier nothing.

    Attributes:
        bytes: By kind of collective.
        calls: Collectives by kind.
    """

    bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """The bytes of all kinds."""
        return self.bytes.total()

    def _counted(self, original: Any, kind: str, size_of: Callable[..., float]) -> Any:
        def counted(group: Any, *args: Any, **kw: Any) -> Any:
            self.bytes[kind] += int(size_of(group, args))
            self.calls[kind] += 1
            return original(group, *args, **kw)

        return counted


@contextlib.contextmanager
def counting() -> Iterator[SentBytes]:
    """Count what the collectives in the block send."""
    sent, group = SentBytes(), dist.ProcessGroup
    with contextlib.ExitStack() as counted:
        for kind, (names, size_of) in _KINDS.items():
            for name in set(names.split()) & vars(group).keys():
                own = sent._counted(getattr(group, name), kind, size_of)
                counted.enter_context(mock.patch.object(group, name, own))
        yield sent


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(each) for each in value)


def _part(value: Any, group: Any) -> float:
    """Return the bytes that leave a rank if each rank keeps its own part."""
    return _bytes(value) * (group.size() - 1) / group.size()


def _to_all(group: Any, args: tuple[Any, ...]) -> float:
    send = args[1]
    if not isinstance(send, Tensor):
        return sum(_bytes(tensor) for peer, tensor in enumerate(send) if peer != group.rank())
    if not (splits := args[3]):
        return _part(send, group)
    row = send.numel() // max(1, send.shape[0]) * send.element_size()
    return row * (sum(splits) - splits[group.rank()])


# By kind: torch's names of it, and the bytes that a rank sends.
_KINDS: dict[str, tuple[str, Callable[[Any, tuple[Any, ...]], float]]] = {
    "all-reduce": ("allreduce allreduce_coalesced", lambda group, args: 2 * _part(args[0], group)),
    "broadcast": ("broadcast", lambda group, args: _part(args[0], group)),
    "reduce": ("reduce", lambda group, args: _part(args[0], group)),
    "all-gather": (
        "allgather allgather_coalesced allgather_into_tensor_coalesced _allgather_base "
        "all_gather_single all_gather_single_coalesced",
        lambda group, args: _bytes(args[1]) * (group.size() - 1),
    ),
    "reduce-scatter": (
        "reduce_scatter reduce_scatter_tensor_coalesced _reduce_scatter_base "
        "reduce_scatter_single reduce_scatter_single_coalesced",
        lambda group, args: _part(args[1], group),
    ),
    "all-to-all": ("alltoall alltoall_base all_to_all_single", _to_all),
    "send": ("send", lambda group, args: _bytes(args[0])),
    "barrier": ("barrier", lambda group, args: 0.0),
}
