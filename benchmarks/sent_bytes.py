"""Counts what a rank sends and how often, at the one place that all callers pass: the process group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

# torch's names of its collectives, by kind.
_KINDS = {
    name: kind
    for kind, names in {
        "all-reduce": ("allreduce", "allreduce_coalesced"),
        "broadcast": ("broadcast",),
        "reduce": ("reduce",),
        "all-gather": (
            "allgather",
            "allgather_coalesced",
            "_allgather_base",
            "all_gather_single",
            "all_gather_single_coalesced",
            "allgather_into_tensor_coalesced",
        ),
        "reduce-scatter": (
            "reduce_scatter",
            "_reduce_scatter_base",
            "reduce_scatter_single",
            "reduce_scatter_single_coalesced",
            "reduce_scatter_tensor_coalesced",
        ),
        "all-to-all": ("alltoall", "alltoall_base", "all_to_all_single"),
        "send": ("send",),
        "barrier": ("barrier",),
    }.items()
    for name in names
}


class SentBytes:
    """Counts what the collectives of this process send, at the one place that all callers pass: the process group.

    Every collective counts as the bytes that one rank sends in a bandwidth-optimal algorithm, whatever the backend
    really runs (gloo has no reduce-scatter of its own): all-reduce ``2 n (W-1)/W``, reduce-scatter, reduce and
    broadcast ``n (W-1)/W``, all-gather ``n_own (W-1)``, all-to-all its splits, a message ``n``, a barrier nothing.

    Attributes:
        total: Bytes since the last reset.
        bytes: The same by kind of collective.
        calls: Collectives by kind.
    """

    def __init__(self) -> None:
        self.total = 0
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._originals: dict[str, Any] = {}

    def reset(self) -> None:
        self.total = 0
        self.bytes.clear()
        self.calls.clear()

    def install(self) -> None:
        group_class = dist.ProcessGroup
        for name, size in self._sizes().items():
            # From the dictionary: looked up on the class, it would not bind to a group once it is put back.
            original = group_class.__dict__.get(name)
            if original is None:
                continue
            self._originals[name] = original
            original = getattr(group_class, name)

            def counted(
                group: Any,
                *args: Any,
                _original: Any = original,
                _size: Any = size,
                _kind: str = _KINDS[name],
                **kw: Any,
            ) -> Any:
                size = int(_size(group, args))
                self.total += size
                self.bytes[_kind] += size
                self.calls[_kind] += 1
                return _original(group, *args, **kw)

            setattr(group_class, name, counted)

    def remove(self) -> None:
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, original)
        self._originals.clear()

    @staticmethod
    def _sizes() -> dict[str, Callable[[Any, tuple[Any, ...]], float]]:
        def rest(group: Any) -> float:
            return (group.size() - 1) / group.size()

        def gather(group: Any, args: tuple[Any, ...]) -> float:
            return _bytes(args[1]) * (group.size() - 1)

        def scatter(group: Any, args: tuple[Any, ...]) -> float:
            return _bytes(args[1]) * rest(group)

        def once(group: Any, args: tuple[Any, ...]) -> float:
            return _bytes(args[0]) * rest(group)

        def twice(group: Any, args: tuple[Any, ...]) -> float:
            return 2 * once(group, args)

        def to_all(group: Any, args: tuple[Any, ...]) -> float:
            send, splits = args[1], args[3]
            if not splits:
                return _bytes(send) * rest(group)
            row = send.numel() // max(1, send.shape[0]) * send.element_size()
            return row * (sum(splits) - splits[group.rank()])

        def lists_to_all(group: Any, args: tuple[Any, ...]) -> float:
            return sum(_bytes(t) for peer, t in enumerate(args[1]) if peer != group.rank())

        sizes = {
            "all-reduce": twice,
            "broadcast": once,
            "reduce": once,
            "all-gather": gather,
            "reduce-scatter": scatter,
            "all-to-all": to_all,
            "send": lambda group, args: _bytes(args[0]),
            "barrier": lambda group, args: 0.0,
        }
        names: dict[str, Callable[[Any, tuple[Any, ...]], float]]
        names = {name: sizes[kind] for name, kind in _KINDS.items()}
        names["alltoall"] = lists_to_all
        return names


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(each) for each in value)
