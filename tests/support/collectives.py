"""Writes down every collective of this process. It imports nothing of ``deepspeed_muon``."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def groups_in(values: Any) -> list[dist.ProcessGroup]:
    return [
        dist.ProcessGroup.unbox(v)
        for v in values
        if isinstance(v, torch.ScriptObject) and "ProcessGroup" in str(v._type())
    ]


@dataclass(frozen=True)
class Collective:
    """One call at a process group: what it was, over which ranks, and a digest of each tensor that went in."""

    name: str
    ranks: tuple[int, ...]
    tensors: tuple[str, ...]


_OUT_FIRST = {
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_into_tensor_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "barrier",
    "gather_",
    "recv_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
}


class _ProcessGroupCalls(TorchDispatchMode):
    """Notes every c10d operator: whatever Python function a collective comes from, it arrives here."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            values = [*args, *(kwargs or {}).values()]
            groups = groups_in(values)
            ranks = tuple(rank for group in groups for rank in dist.get_process_group_ranks(group))
            # What comes out is not written yet, and a barrier's tensor never is.
            name = func.name().removeprefix("c10d::")
            receives = name == "broadcast_" and dist.get_rank(groups[0]) != args[2]
            written = values[:1] if receives or name in _OUT_FIRST else []
            tensors = tuple(
                _description(tensor, with_content=all(tensor is not out for out in tensors_in(written)))
                for tensor in tensors_in(values)
            )
            self.calls.append(Collective(str(func), ranks, tensors))
        return func(*args, **(kwargs or {}))


def _description(tensor: torch.Tensor, *, with_content: bool) -> str:
    if not with_content:
        return f"{tensor.dtype} {list(tensor.shape)}"
    content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256(content).hexdigest()[:16]
    return f"{tensor.dtype} {list(tensor.shape)} {digest}"


@contextlib.contextmanager
def process_group_calls() -> Iterator[list[Collective]]:
    """Collect every collective that this process takes part in, and every process group that is made."""
    module = dist.distributed_c10d
    original = module._new_process_group_helper
    with _ProcessGroupCalls() as mode:

        def made(size: int, rank: int, ranks: Any, *args: Any, **kwargs: Any) -> Any:
            mode.calls.append(Collective("new process group", tuple(ranks), ()))
            return original(size, rank, ranks, *args, **kwargs)

        module._new_process_group_helper = made
        try:
            yield mode.calls
        finally:
            module._new_process_group_helper = original
