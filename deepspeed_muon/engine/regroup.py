"""The param groups as DeepSpeed's wrapper needs them: divided once more right before it is made.

A client makes its optimizer before ``deepspeed.initialize``, so its groups may no longer fit: parameters were frozen or
unfrozen since, the engine's model leads to other routes than the names that the client passed, or AutoTP and AutoEP
replaced parameters. ZeRO 1 and 2 flatten each group into one buffer, which fails for an empty group and converts all
parameters to the widest dtype in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from deepspeed_muon.engine.offload import offload_device
from deepspeed_muon.errors import ConfigError, RoutingError
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.routing.param_groups import divide_again


def regroup(engine: DeepSpeedEngine, optimizer: Muon) -> None:
    """Divide the groups of an optimizer that is about to be wrapped.

    Args:
        engine: The engine.
        optimizer: Its optimizer, whose routes are those of the engine's model. Mutated.

    Raises:
        RoutingError: If a scheduler was made for the groups, and they change: it has a number for each, by position.
        ConfigError: If ZeRO 3 would fail because of the parameters' dtypes.
    """
    groups = optimizer.param_groups
    divided = divide_again(
        optimizer.routed,
        groups,
        optimizer.config,
        # ZeRO 3 does not flatten groups.
        by_dtype=engine.zero_optimization_stage() != 3,
    )
    if engine.zero_optimization_stage() == 3 and offload_device(engine, "offload_param") == "none":
        _refuse_several_dtypes(optimizer, [param for _, params in divided for param in params])
    made = engine.client_lr_scheduler is not None and not callable(engine.client_lr_scheduler)
    # Schedulers of torch leave this key in every group, whether the engine gets them or not.
    made = made or any("initial_lr" in group for group in groups)
    if made and [id(group) for group, _ in divided] != list(map(id, groups)):
        raise RoutingError(
            f"the learning-rate scheduler was made for {len(groups)} param groups. With the model of "
            f"deepspeed.initialize and the parameters that are frozen now there are {len(divided)}, or they have other "
            f"positions: pass model=... to deepspeed_muon.Muon and freeze parameters before the optimizer is made, or "
            f"pass the scheduler to deepspeed.initialize as a function: lr_scheduler=lambda optimizer: ..."
        )
    # Only now: a program may try again after an error.
    for group, params in divided:
        group["params"] = params
    groups[:] = [group for group, _ in divided]


def _refuse_several_dtypes(optimizer: Muon, params: Sequence[Tensor]) -> None:
    """Raise where ZeRO 3 would assert without a message that all parameters have one dtype."""
    first = {param.dtype: optimizer.routed.by_id[id(param)].name for param in reversed(params)}
    if len(first) > 1:
        shown = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in first.items())
        raise ConfigError(
            f"ZeRO 3 needs trained parameters of one dtype: {shown}. Enable bf16 or fp16 in the configuration, which "
            f"casts them, convert the model with model.to(dtype), or train at ZeRO 1 or 2"
        )
