"""DeepSpeed's mixture-of-experts layers: which ranks share an expert, and the norm of all experts' gradients.

An expert's parameters carry ``allreduce = False`` and the name of their expert-parallel group. The ranks that hold the
same expert are its expert-data-parallel group; they partition (or replicate) it and exchange it among themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor

from deepspeed_muon.routing.param_groups import expert_group_name

__all__ = ["by_group", "exact_norm", "holders", "needs_exact_norm"]

Item = TypeVar("Item")


def holders(param: Tensor, default: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the ranks that train ``param`` together.

    Args:
        param: A parameter of the model.
        default: The data-parallel group of everything that is no expert.
    """
    name = expert_group_name(param)
    return default if name is None else groups._get_expert_data_parallel_group(name)


def by_group(
    items: Iterable[Item], group_of: Callable[[Item], dist.ProcessGroup]
) -> list[tuple[dist.ProcessGroup, list[Item]]]:
    """Sort items by the process group that holds them, both in the order in which they come."""
    found: dict[int, tuple[dist.ProcessGroup, list[Item]]] = {}
    for item in items:
        group = group_of(item)
        found.setdefault(id(group), (group, []))[1].append(item)
    return list(found.values())


def needs_exact_norm(engine: Any) -> bool:
    """Return whether the engine's own norm is not that of all experts' gradients.

    Without ZeRO DeepSpeed averages the norms of the ranks, each of which has its own experts, or leaves experts out.
    """
    return bool(getattr(engine, "has_moe_layers", False))


def exact_norm(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Return the norm of the gradients of all parameters, every expert counted once, fp32.

    Must be called by all ranks.

    Args:
        pairs: Model parameter and its reduced gradient.
    """
    squares: dict[str | None, list[Tensor]] = {None: []}
    for param, grad in pairs:
        own = squares.setdefault(expert_group_name(param), [])
        if grad is not None:
            own.append(torch.linalg.vector_norm(grad.detach(), dtype=torch.float32).square())
    device = pairs[0][0].device
    total = torch.stack(squares.pop(None) or [torch.zeros((), device=device)]).sum()
    for name in sorted(str(key) for key in squares):
        experts = torch.stack(squares[name] or [torch.zeros((), device=device)]).sum()
        dist.all_reduce(experts, group=groups._get_expert_parallel_group(name))
        total = total + experts
    return total.sqrt()
