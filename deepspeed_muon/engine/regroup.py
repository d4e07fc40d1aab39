"""The param groups as DeepSpeed's wrapper needs them: divided once more right before it is made.

A client makes its optimizer before ``deepspeed.initialize``, so its groups may no longer fit: parameters were frozen or
unfrozen since, the engine's model leads to other routes than the names that the client passed, or AutoTP and AutoEP
replaced parameters. ZeRO 1 and 2 flatten each group into one buffer, which fails for an empty group and converts all
parameters to the widest dtype in it.

Schedulers that the client made have one number for each group, by position. They are reordered with the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from deepspeed_muon.engine.offload import offload_device
from deepspeed_muon.errors import ConfigError, RoutingError
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.routing.param_groups import divide_again

# Attributes with an entry for each param group, of the schedulers of torch and of DeepSpeed.
_ENTRY_PER_GROUP = (
    "_last_lr", "base_lrs", "base_momentums", "delta_lrs", "lr_lambdas", "max_lrs", "max_momentums", "max_moms",
    "min_lr", "min_lrs", "min_moms", "org_lrs",
)  # fmt: skip

LISTS = "_deepspeed_muon_lists"
"""Attribute of DeepSpeed's schedulers: names of the attributes where the client gave each group an entry of its own."""


def regroup(engine: DeepSpeedEngine, optimizer: Muon) -> None:
    """Divide the groups of an optimizer that is about to be wrapped, and let the client's scheduler follow.

    Args:
        engine: The engine.
        optimizer: Its optimizer, whose routes are those of the engine's model. Mutated.

    Raises:
        RoutingError: If a scheduler was made for groups that change, and cannot follow them.
        ConfigError: If ZeRO 3 would fail because of the parameters' dtypes.
    """
    if engine.zero_optimization_stage() == 3 and offload_device(engine, "offload_param") == "none":
        _refuse_several_dtypes(optimizer)
    # At ZeRO 0 in fp32, where nothing is copied, parameters that are unfrozen later can be trained.
    is_plain = engine.zero_optimization_stage() == 0 and engine.get_data_types()[0] == torch.float32
    groups = optimizer.param_groups
    divided = divide_again(
        optimizer.routed,
        groups,
        optimizer.config,
        keep_frozen=is_plain,
        # ZeRO 3 does not flatten groups.
        by_dtype=not is_plain and engine.zero_optimization_stage() != 3,
    )
    origins = [origin for *_, origin in divided]
    if origins != list(range(len(groups))):
        _follow(engine, optimizer, origins)
    # Only now: a program may try again after an error.
    for group, params, _ in divided:
        group["params"] = params
    groups[:] = [group for group, *_ in divided]


def _refuse_several_dtypes(optimizer: Muon) -> None:
    """Raise where ZeRO 3 would assert without a message that all parameters have one dtype."""
    name_of = {id(param): optimizer.routed.by_id[id(param)].name for param in _trained(optimizer)}
    first = {param.dtype: name_of[id(param)] for param in reversed(_trained(optimizer))}
    if len(first) > 1:
        shown = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in first.items())
        raise ConfigError(
            f"ZeRO 3 needs trained parameters of one dtype: {shown}. Enable bf16 or fp16 in the configuration, which "
            f"casts them, convert the model with model.to(dtype), or train at ZeRO 1 or 2"
        )


def _trained(optimizer: Muon) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if optimizer._is_trained(p)]


def _follow(engine: DeepSpeedEngine, optimizer: Muon, origins: Sequence[int | None]) -> None:
    """Reorder a scheduler of the client like its groups; ``origins`` has the number that each group had before."""
    scheduler = engine.client_lr_scheduler
    if callable(scheduler):
        scheduler = None  # made later
    # Schedulers of torch leave this key in every group.
    if scheduler is None and not any("initial_lr" in group for group in optimizer.param_groups):
        return
    count = len(optimizer.param_groups)
    if scheduler is None or None in origins or not _is_supported(scheduler):
        raise RoutingError(
            f"the learning-rate scheduler was made for {count} param groups. With the model of deepspeed.initialize "
            f"and the parameters that are frozen now there are {len(origins)} groups, and some have moved: "
            f"pass model=... to deepspeed_muon.Muon, freeze parameters before the optimizer is made, and "
            f"pass the scheduler to deepspeed.initialize, best as a function: lr_scheduler=lambda optimizer: ..."
        )
    _reorder(scheduler, origins, count)


def _is_supported(scheduler: Any) -> bool:
    """Return whether it is clear what a scheduler keeps for each group: those of torch and of DeepSpeed."""
    nested = getattr(scheduler, "_schedulers", None)
    if nested is not None:
        return all(map(_is_supported, nested))
    return type(scheduler).__module__.startswith(("torch.", "deepspeed."))


def _reorder(scheduler: Any, origins: Sequence[int | None], count: int) -> None:
    """Reorder what a scheduler keeps for each of ``count`` groups."""
    for inner in getattr(scheduler, "_schedulers", None) or ():
        _reorder(inner, origins, count)
    for name in _ENTRY_PER_GROUP:
        entries = getattr(scheduler, name, None)
        if isinstance(entries, (list, tuple)) and len(entries) == count:
            remaining = [entries[origin] for origin in origins if origin is not None]
            setattr(scheduler, name, type(entries)(remaining))
            is_deepspeeds = type(scheduler).__module__.startswith("deepspeed.")
            if is_deepspeeds and any(entry != entries[0] for entry in entries):
                # Otherwise a single remaining entry would be taken for a number that is meant for all groups.
                vars(scheduler).setdefault(LISTS, set()).add(name)
