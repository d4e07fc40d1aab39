"""Memory of the exchanges: allocated once for all step sets of an optimizer, used again in every step."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ExchangeBuffers"]


class ExchangeBuffers:
    """Named buffers that step sets share, because their steps run one after the other.

    Every user says at start how much it will need; the memory is allocated at the first use, and again
    after :meth:`release`. So there is one
    allocation for each name, as large as its most demanding user.
    """

    def __init__(self, device: torch.device) -> None:
        """Keep the device; nothing is allocated.

        Args:
            device: Where the exchange runs.
        """
        self._device = device
        self._needed: dict[str, int] = {}
        self._memory: dict[str, Tensor] = {}

    def reserve(self, name: str, nbytes: int) -> None:
        """Make sure that the buffer ``name`` will hold at least ``nbytes`` bytes."""
        self._needed[name] = max(nbytes, self._needed.get(name, 0))

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the first ``numel`` elements of the buffer ``name``, with whatever they hold.

        Args:
            name: A buffer that was reserved with at least as many bytes.
            numel: Elements.
            dtype: Their dtype.
        """
        memory = self._memory.get(name)
        if memory is None:
            memory = torch.empty(self._needed[name], dtype=torch.uint8, device=self._device)
            self._memory[name] = memory
        return memory.narrow(0, 0, numel * dtype.itemsize).view(dtype)

    def release(self) -> None:
        """Give the memory up; the next use allocates it anew. Not while an exchange is in flight."""
        self._memory.clear()

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the buffers hold now."""
        return sum(memory.numel() for memory in self._memory.values())

    @property
    def reserved_bytes(self) -> int:
        """Bytes that all buffers have together once each of them was used."""
        return sum(self._needed.values())
