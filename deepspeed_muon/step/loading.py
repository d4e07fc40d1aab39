"""Checks and converts the state dict given to ``load_state_dict``, before anything of the optimizer changes.

The state dict may have been saved by this optimizer or by one with the same state: the momentum of
``torch.optim.Muon`` and of Keller Jordan's Muon is a running mean of the gradients, as it is here, and AdamW's moments
have one definition. Missing entries are replaced as follows:

- A parameter without an entry, or with an empty one, starts without state, as before its first step.
- Momentum without ``step`` gets ``step`` 0, so that a ``momentum_warmup`` begins. AdamW's moments need ``step``.
- A setting that the saved group does not have remains that of this optimizer.

Anything else that is missing or unknown is an error.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from deepspeed_muon.config.settings import (
    GROUP_SETTINGS,
    GroupSettings,
    MuonConfig,
    checked_group_settings,
    refuse_misspelt_keys,
)
from deepspeed_muon.config.values import TORCH_OPTIONS, StatePolicy, shown
from deepspeed_muon.errors import CheckpointError, ConfigError, RoutingError
from deepspeed_muon.logs import warn
from deepspeed_muon.routing.param_groups import CALLER_GROUP
from deepspeed_muon.step.int8 import SCALE_KEY
from deepspeed_muon.step.state import STATE_TENSORS
from deepspeed_muon.variants import ROW_STATE

_FIXED = frozenset(("params", "param_names", "algorithm", "use_muon", CALLER_GROUP, "moe"))
"""Keys that identify a group: they are compared or ignored, and never loaded."""

_SCHEDULER_KEYS = frozenset(("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"))
"""Keys that torch's schedulers add to the groups; without this list some would be reported as misspelt settings."""

_KERNEL_OPTIONS = frozenset(("foreach", "fused", "capturable", "differentiable"))
"""Options of torch's optimizers that do not change what is computed."""

# Keys of a parameter's state, by algorithm.
_REQUIRED = {"muon": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq", "step")}
_ALLOWED = {
    "muon": frozenset(("momentum_buffer", "step", SCALE_KEY, *ROW_STATE)),
    "adamw": frozenset(_REQUIRED["adamw"]),
}

_REMEDY = "remove its entry from 'state', and it starts without state"


@dataclass(slots=True)
class LoadedState:
    """The contents of a state dict, checked and converted to this optimizer's dtypes.

    Attributes:
        settings: The new settings of each param group.
        state: The new state of each parameter that has one.
    """

    settings: list[GroupSettings]
    state: dict[Tensor, StateDict]


def read_state_dict(
    state_dict: StateDict,
    param_groups: Sequence[GroupSettings],
    config: MuonConfig,
    policy: StatePolicy,
    *,
    names: Mapping[int, str] | None,
) -> LoadedState:
    """Check a state dict, and return its contents as this optimizer loads them; no argument is mutated.

    Args:
        state_dict: From ``state_dict()`` of this or of another optimizer.
        param_groups: The optimizer's groups.
        config: The optimizer's settings.
        policy: The dtypes of the state.
        names: ``id(parameter)`` to its name; ``None`` if the tensors in the groups are ZeRO's partitions.

    Raises:
        CheckpointError: If the state is malformed, or that of a different kind of optimizer.
        ConfigError: If a setting of a group is unknown, out of range, or contradicts the optimizer's.
        RoutingError: If the number, sizes or algorithms of the groups are not those of this optimizer.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise CheckpointError(
            f"a state dict of an optimizer has 'state' and 'param_groups', got {shown(state_dict)}"
        )
    # 1. the form: nothing of an untrusted state dict is used before
    saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
    _check_form(saved_groups, saved_state)
    _check_sizes(saved_groups, param_groups)
    _check_keys(saved_groups, saved_state)
    # 2. group by group: its algorithm and convention, its settings, and the state of its parameters
    settings: list[GroupSettings] = []
    state: dict[Tensor, StateDict] = {}
    conversions: set[str] = set()
    for number, (saved, group) in enumerate(zip(saved_groups, param_groups, strict=True)):
        where = f"param group {number} of the state dict"
        entries = [
            (param, saved_state.get(key, {}))
            for key, param in zip(saved["params"], group["params"], strict=True)
        ]
        _check_kind(where, saved, group["algorithm"], [entry for _, entry in entries])
        _check_convention(where, saved, config, [entry for _, entry in entries])
        settings.append(settings_to_load(where, saved, group, config))
        for position, (param, entry) in enumerate(entries):
            if entry:
                name = None if names is None else names[id(param)]
                label = f"{where}, {f'parameter {name}' if name else f'partition {position}'}"
                _check_entry(label, entry, group["algorithm"], shape=param.shape if name else None)
                state[param] = _converted(entry, param, policy, conversions)
    for conversion in sorted(conversions):
        warn("deepspeed_muon: the loaded momentum is converted from %s, as momentum_dtype says", conversion)
    return LoadedState(settings, state)


def _check_form(saved_groups: object, saved_state: object) -> None:
    """Raise unless the groups are dicts with ``params``, and the state is a dict."""
    if not isinstance(saved_groups, (list, tuple)) or not isinstance(saved_state, Mapping):
        raise CheckpointError(
            f"a state dict of an optimizer has a list 'param_groups' and a dict 'state', got {shown(saved_groups)} and "
            f"{shown(saved_state)}"
        )
    for number, saved in enumerate(saved_groups):
        if not isinstance(saved, Mapping) or not isinstance(saved.get("params"), (list, tuple)):
            raise CheckpointError(
                f"param group {number} of the state dict has no list 'params': {shown(saved)}"
            )


def _check_keys(saved_groups: Sequence[GroupSettings], saved_state: Mapping[int | str, object]) -> None:
    """Raise unless every entry of the state is a dict and belongs to one parameter of the groups."""
    keys = [key for saved in saved_groups for key in saved["params"]]
    parameter_keys = set(keys)
    if len(parameter_keys) < len(keys):
        raise CheckpointError("the state dict lists a parameter in its param groups twice")
    for key, entry in saved_state.items():
        if key not in parameter_keys:
            raise CheckpointError(
                f"the state dict has state of {shown(key)}, which is in none of its param groups: it is damaged, or "
                f"was combined from several state dicts"
            )
        if not isinstance(entry, Mapping):
            raise CheckpointError(
                f"the state of {shown(key)} in the state dict is {shown(entry)}, not a dict"
            )


def _check_sizes(saved_groups: Sequence[GroupSettings], groups: Sequence[GroupSettings]) -> None:
    """Raise unless the numbers of groups, and of parameters in them, are equal."""
    halves = "Muon and AdamW divide each group of the caller between them"
    saved_sizes = [len(saved["params"]) for saved in saved_groups]
    sizes = [len(group["params"]) for group in groups]
    if len(saved_sizes) != len(sizes):
        raise RoutingError(
            f"loaded state dict has a different number of parameter groups: {len(saved_sizes)}, and this optimizer has "
            f"{len(sizes)} ({', '.join(group['algorithm'] for group in groups)}; {halves}). Make the optimizer with "
            f"the groups of the saved one"
        )
    if saved_sizes != sizes:
        raise RoutingError(
            f"loaded state dict contains a parameter group that doesn't match the size of optimizer's group: saved "
            f"{saved_sizes}, this optimizer's {sizes} ({halves}). Make the optimizer with the groups of the saved one, "
            f"and the same include and exclude"
        )


def _check_kind(where: str, saved: GroupSettings, algorithm: str, entries: Iterable[StateDict]) -> None:
    """Raise if a saved group has a different algorithm, by its keys for that, else its state, else its settings."""
    # What a group says of itself counts most; of a foreign group state is better evidence than settings.
    kinds = [saved["algorithm"]] if "algorithm" in saved else []
    if saved.get("use_muon") is not None:
        kinds.append("muon" if saved["use_muon"] else "adamw")
    if len(set(kinds)) > 1:
        raise RoutingError(
            f"{where} contradicts itself: algorithm is {kinds[0]!r}, use_muon {saved['use_muon']!r}"
        )
    evidence = ""
    if not kinds:
        state_keys = {key for entry in entries for key in entry}
        moments, momentum = sorted(state_keys & {"exp_avg", "exp_avg_sq"}), state_keys & {"momentum_buffer"}
        if moments or momentum:
            kinds, evidence = (
                ["adamw" if moments else "muon"],
                f" (its state has {(moments or [*momentum])[0]})",
            )
        elif ("betas" in saved) != ("momentum" in saved):
            kinds, evidence = (
                (["adamw"], " (it has betas)") if "betas" in saved else (["muon"], " (it has momentum)")
            )
    if kinds and kinds[0] != algorithm:
        raise RoutingError(
            f"{where} is of {kinds[0]}{evidence} and this optimizer's of {algorithm}: it was saved with other routes, "
            f"or by another optimizer. Make the optimizer with the same include, exclude and param groups"
        )


def _check_convention(
    where: str, saved: GroupSettings, config: MuonConfig, entries: Iterable[StateDict]
) -> None:
    """Raise if the group's momentum or iteration, saved by an optimizer of another library, differs from this one's."""
    if "dampening" in saved:
        raise CheckpointError(
            f"{where} was saved by torch.optim.SGD (it has dampening): its momentum_buffer is a sum of gradients, and "
            f"Muon's their mean. Begin without it, or take momentum_buffer * (1 - momentum) / (1 - dampening) "
            f"and remove 'dampening' and SGD's other keys from the group"
        )
    # Of torch.optim.Muon, whose momentum is a mean too: only the iteration may differ.
    if "ns_coefficients" in saved:
        coefficients, steps = saved["ns_coefficients"], saved.get("ns_steps")
        # torch runs one polynomial ns_steps times
        if [tuple(coefficients)] * (steps or 0) != [*config.coefficients()]:
            raise ConfigError(
                f"{where} was saved by torch.optim.Muon with ns_coefficients {shown(coefficients)} and ns_steps "
                f"{shown(steps)}, and this optimizer iterates otherwise: make it with ns_schedule="
                f"[{shown(list(coefficients))}] * {shown(steps)}"
            )
        return
    # Keller Jordan's Muon of today saves none of these keys, and a mean. Earlier versions and their copies save them,
    # and some of these a sum.
    if "algorithm" in saved or not (
        keys_of_muons := sorted(saved.keys() & {"nesterov", "ns_steps", "backend_steps"})
    ):
        return
    if any("momentum_buffer" in entry and "step" not in entry for entry in entries):
        raise CheckpointError(
            f"{where} was saved by an unknown Muon (it has {', '.join(keys_of_muons)}, and momentum without "
            f"step): in some, momentum is a sum of gradients, and here it is their mean. If its momentum is a mean "
            f"(buf.lerp_(grad, 1 - momentum)), set 'algorithm' to 'muon' in the group; if it is a sum, multiply "
            f"momentum_buffer by 1 - momentum before"
        )


def settings_to_load(
    where: str, saved: Mapping[str, object], group: GroupSettings, config: MuonConfig
) -> GroupSettings:
    """Return the settings of ``group``, updated by those of ``saved`` after the checks of the constructor."""
    is_torch_muon = "ns_coefficients" in saved
    ignored = _FIXED | _KERNEL_OPTIONS | {"decoupled_weight_decay"}
    if group.get("moe"):  # DeepSpeed finds the experts by their group's name
        ignored |= {"name"}
    if is_torch_muon:  # its eps bounds a norm, that of this optimizer is AdamW's
        ignored |= {"ns_coefficients", "ns_steps", "eps"}
    decoupled = saved.get("decoupled_weight_decay", config.adam_w_mode)
    if decoupled != config.adam_w_mode and saved.get("weight_decay"):
        raise ConfigError(
            f"{where}: decoupled_weight_decay is {decoupled!r}, and this optimizer's adam_w_mode "
            f"{config.adam_w_mode!r}: make it with adam_w_mode={bool(decoupled)!r}"
        )
    # A key that is neither known nor ignored would silently lose its effect.
    values = {key: value for key, value in saved.items() if key not in ignored}
    refuse_misspelt_keys(values, where, GROUP_SETTINGS | _SCHEDULER_KEYS | group.keys())
    loaded = {key: copy.deepcopy(value) for key, value in values.items() if key not in TORCH_OPTIONS}
    if is_torch_muon and loaded.get("adjust_lr_fn", "") is None:
        loaded["adjust_lr_fn"] = "original"
    checked = checked_group_settings(loaded, where, config)
    # A learning rate in a tensor remains that tensor, so that changes of its value take effect.
    rates = {key for key in ("lr", "weight_decay", "initial_lr") if isinstance(loaded.get(key), Tensor)}
    return {**group, **loaded, **{key: value for key, value in checked.items() if key not in rates}}


def _check_entry(label: str, entry: StateDict, algorithm: str, *, shape: torch.Size | None) -> None:
    """Raise unless the state of one parameter is that of its algorithm.

    Args:
        label: The parameter and its group, for error messages.
        entry: The saved state of the parameter.
        algorithm: The algorithm of its param group.
        shape: Its shape; ``None`` for a partition, whose size depends on the number of ranks.
    """
    if missing := [key for key in _REQUIRED[algorithm] if key not in entry]:
        raise CheckpointError(
            f"{label}: its state has no {missing[0]!r} (it has {', '.join(map(str, entry))}), which {algorithm} needs; "
            f"add it, or {_REMEDY}"
        )
    if unknown := [key for key in entry if key not in _ALLOWED[algorithm]]:
        raise CheckpointError(
            f"{label}: its state has {unknown[0]!r}, which is none of {algorithm}'s: it was saved by another "
            f"optimizer. Remove the key, or {_REMEDY}"
        )
    for key, value in entry.items():
        if key == "step":
            if not _is_count(value):
                raise CheckpointError(
                    f"{label}: 'step' is {shown(value)}, expected a count of steps; {_REMEDY}"
                )
            continue
        # Only momentum may be int8, and then it is useless without its scales.
        is_int8 = key == "momentum_buffer" and isinstance(value, Tensor) and value.dtype == torch.int8
        if not isinstance(value, Tensor) or not (value.is_floating_point() or is_int8):
            dtype = value.dtype if isinstance(value, Tensor) else shown(value)
            raise CheckpointError(f"{label}: {key!r} is {dtype}, expected a tensor of floats; {_REMEDY}")
        if is_int8 != (SCALE_KEY in entry) and key == "momentum_buffer":
            raise CheckpointError(
                f"{label}: 'momentum_buffer' is {value.dtype} {'without' if is_int8 else 'with'} {SCALE_KEY!r}: both "
                f"belong together; {_REMEDY}"
            )
        if shape is not None and key in STATE_TENSORS and value.shape != shape:
            raise CheckpointError(
                f"{label}: {key!r} has the shape {list(value.shape)}, and the parameter {list(shape)}: it is of "
                f"another parameter. Pass the parameters in the order of the saved optimizer, or {_REMEDY}"
            )


def _is_count(value: object) -> bool:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            return False
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    return 0 <= float(value) < 1 << 53 and float(value).is_integer()  # larger floats do not count every step


def _converted(entry: StateDict, param: Tensor, policy: StatePolicy, conversions: set[str]) -> StateDict:
    """Return the state of a parameter on its device and in the dtypes of ``policy``.

    The next step converts to and from int8 (:func:`.int8.convert_momentum`), which needs the layout.

    Args:
        entry: The saved state.
        param: The parameter.
        policy: The dtypes.
        conversions: Descriptions of conversions to or from int8, for the log; mutated.
    """
    state: StateDict = {}
    for key, value in entry.items():
        if key == "step":
            state[key] = int(value)
        else:
            # The dtypes of row state and scales do not depend on the policy.
            dtype = policy.dtype(key, param.dtype) if key in STATE_TENSORS else value.dtype
            if torch.int8 in (dtype, value.dtype) and dtype != value.dtype:
                conversions.add(f"{value.dtype} to {dtype}".replace("torch.", ""))
                dtype = value.dtype
            state[key] = value.to(device=param.device, dtype=dtype)
    state.setdefault("step", 0)
    return state
