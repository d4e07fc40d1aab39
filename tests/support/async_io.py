"""A stand-in for DeepSpeed's operator ``async_io``, for machines without libaio: its calls read and write at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Handle:
    """What DeepSpeed's swappers call of an ``aio_handle``.

    As with the operator, what was read or written is there after :meth:`wait` only; and a buffer that is reused before
    shows in the result.
    """

    def __init__(self, **_: Any) -> None:
        self._pinned: list[Tensor] = []
        self._pending: list[tuple[bool, Tensor, Path]] = []

    def new_cpu_locked_tensor(self, numel: int, example: Tensor) -> Tensor:
        self._pinned.append(torch.full((numel,), float("nan"), dtype=example.dtype))
        return self._pinned[-1]

    def free_cpu_locked_tensor(self, tensor: Tensor) -> None:
        self._pinned = [pinned for pinned in self._pinned if pinned.data_ptr() != tensor.data_ptr()]

    def is_pinned(self, tensor: Tensor) -> bool:
        start = tensor.data_ptr()
        return any(p.data_ptr() <= start < p.data_ptr() + p.nbytes for p in self._pinned)

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        assert offset == 0
        if not Path(path).is_file() or Path(path).stat().st_size < buffer.nbytes:
            return -1
        self._pending.append((True, buffer, Path(path)))
        return 0

    def async_pwrite(self, buffer: Tensor, path: str, offset: int) -> int:
        assert offset == 0
        self._pending.append((False, buffer, Path(path)))
        return 0

    def wait(self) -> int:
        assert self._pending
        pending, self._pending = self._pending, []
        for reads, buffer, path in pending:
            content = buffer.detach().view(torch.uint8).numpy()
            if reads:
                content[:] = memoryview(path.read_bytes())[: content.nbytes]
            else:
                path.write_bytes(content.tobytes())
        return len(pending)


def stand_in() -> Any:
    """Return what takes the place of the module that ``AsyncIOBuilder().load()`` returns."""
    return SimpleNamespace(aio_handle=Handle)
