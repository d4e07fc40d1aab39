"""Memory of the exchange, which all step sets of an optimizer use in every step."""

from __future__ import annotations

import torch
from torch import Tensor

_ALIGNMENT = 32


class ExchangeBuffers:
    """Named buffers on one device. Step sets share them, because their steps run one after the other.

    Every step set reserves at start what it needs. The first use of a name allocates the largest size that was reserved
    for it; so does the first use after :meth:`release`.

    Attributes:
        device: Where they lie.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._needed: dict[str, int] = {}
        self._memory: dict[str, Tensor] = {}

    def reserve(self, name: str, nbytes: int) -> None:
        """Make sure that the buffer ``name`` will hold at least ``nbytes`` bytes."""
        self._needed[name] = max(nbytes, self._needed.get(name, 0))

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the first ``numel`` elements of the buffer ``name``; they keep what they held before."""
        memory = self._memory.get(name)
        if memory is None:
            memory = torch.empty(self._needed[name], dtype=torch.uint8, device=self.device)
            self._memory[name] = memory
        return memory.narrow(0, 0, numel * dtype.itemsize).view(dtype)

    def release(self) -> None:
        """Free the memory; no exchange may be in flight."""
        self._memory.clear()

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the buffers hold now."""
        return sum(memory.numel() for memory in self._memory.values())

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all buffers together, once each of them was used."""
        return sum(self._needed.values())


def aligned(numel: int) -> int:
    """Return the next multiple of 32 elements, at which a tensor in a shared piece of memory may start."""
    return -(-numel // _ALIGNMENT) * _ALIGNMENT
