"""Counts what one process really sends in DeepSpeed's collectives, and what it multiplies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

# Collectives of at most so many bytes are flags, norms and loss scales, not parameters or gradients.
SMALL = 64


@dataclass
class Counts:
    """Bytes sent by this rank, as a ring algorithm sends them, by collective; and floating-point operations."""

    sent: dict[str, float] = field(default_factory=dict)
    flops: int = 0

    @property
    def zero(self) -> float:
        """Bytes of all of DeepSpeed's collectives; the optimizer's own exchange does not go through its backend."""
        return sum(self.sent.values())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


# Which argument a ring divides among the ranks, and how often it goes round.
_COLLECTIVES = {
    "all_reduce": (0, 2),
    "reduce": (0, 1),
    "broadcast": (0, 1),
    "all_gather": (0, 1),
    "all_gather_into_tensor": (0, 1),
    "reduce_scatter_tensor": (1, 1),
    "reduce_scatter": (1, 1),
}


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count inside of the block. The collectives run as always."""
    counts = Counts()
    # The backend keeps some of torch's functions as attributes, so that wrapping torch.distributed would miss them.
    backend = deepspeed.comm.comm.cdb
    originals = {name: getattr(backend, name) for name in _COLLECTIVES}

    def wrap(name: str, original: Any, argument: int, rounds: int) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            values = [*args, *kwargs.values()]
            size = sum(t.numel() * t.element_size() for t in _tensors(values[argument]))
            ranks = dist.get_world_size(kwargs.get("group"))
            if size > SMALL:
                counts.sent[name] = counts.sent.get(name, 0.0) + rounds * size * (ranks - 1) / ranks
            return original(*args, **kwargs)

        return collective

    for name, (argument, rounds) in _COLLECTIVES.items():
        setattr(backend, name, wrap(name, originals[name], argument, rounds))
    try:
        with FlopCounterMode(display=False) as flops:
            yield counts
    finally:
        for name in originals:
            delattr(backend, name)
    counts.flops = flops.get_total_flops()
