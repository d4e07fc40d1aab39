"""DeepSpeed's learning-rate schedulers that write one number into every group, made to keep the groups' ratio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["keep_rate_ratios"]


def keep_rate_ratios(scheduler: Any, optimizer: torch.optim.Optimizer, *, given: Mapping[str, Any]) -> None:
    """Multiply what DeepSpeed's one-number schedulers set by each group's share of the shared rate.

    The number in ``warmup_max_lr``, ``cycle_max_lr`` or ``lr_range_test_min_lr`` stands for ``lr`` (for ``muon_lr``
    where ``lr`` is absent); a group whose own rate is a tenth of that gets a tenth of it. Lists with one value per
    group are the caller's own choice and stay.

    Args:
        scheduler: The scheduler that DeepSpeed made or the client passed. Mutated.
        optimizer: Our optimizer, whose groups (with their ``lr_ratio``) it writes.
        given: The scheduler's section of the configuration, to tell one number from a list of equal ones.
    """
    from deepspeed.runtime import lr_schedules

    kinds: list[tuple[type, dict[str, str]]] = [
        (lr_schedules.LRRangeTest, {"min_lr": "lr_range_test_min_lr"}),
        (lr_schedules.OneCycle, {"min_lrs": "cycle_min_lr", "max_lrs": "cycle_max_lr"}),
        (lr_schedules.WarmupLR, {"min_lrs": "warmup_min_lr", "max_lrs": "warmup_max_lr"}),
    ]
    keys = next((keys for kind, keys in kinds if isinstance(scheduler, kind)), None)
    if isinstance(scheduler, lr_schedules.WarmupCosineLR) and scheduler.last_batch_iteration < 0:
        # Up to 0.17 it sets only the first group's rate before the first step.
        share = float(optimizer.param_groups[0]["lr"]) / (scheduler.org_lrs[0] or 1.0)
        for group, rate in zip(optimizer.param_groups, scheduler.org_lrs, strict=True):
            group["lr"] = rate * share
    if keys is None:
        return
    ratios = [float(group["lr_ratio"]) for group in optimizer.param_groups]
    for attribute, key in keys.items():
        values = getattr(scheduler, attribute)
        # warmup_max_lr: null means "each group's own rate" and is a list of those already.
        if len(set(values)) == 1 and not isinstance(given.get(key, 0.0), (list, tuple, type(None))):
            setattr(scheduler, attribute, [float(v) * ratio for v, ratio in zip(values, ratios, strict=True)])
    if isinstance(scheduler, lr_schedules.WarmupLR):
        scheduler.delta_lrs = [
            high - low for high, low in zip(scheduler.max_lrs, scheduler.min_lrs, strict=True)
        ]
    # What the scheduler wrote when it was made: its lower bounds, or the rates of the iteration it starts from.
    started = scheduler.last_batch_iteration >= 0
    current = scheduler.get_lr() if started else getattr(scheduler, next(iter(keys)))
    for group, rate in zip(optimizer.param_groups, current, strict=True):
        group["lr"] = rate
    scheduler._last_lr = list(current)
