"""The only file that hooks DeepSpeed's engine: config type -> optimizer, and binding once the ZeRO wrapper exists.

Four methods of ``DeepSpeedEngine`` are wrapped. ``_configure_basic_optimizer`` makes our optimizer for the type
``Muon``; ``_configure_optimizer`` compares the ranks' settings before it and binds after it;
``_configure_lr_scheduler`` keeps the ratio between the rates of the two halves under DeepSpeed's schedulers that
write one number into every group, and restores what ``restore_from`` names; and ``save_checkpoint`` consolidates
where ``consolidate_on_save`` is set.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepspeed_muon.config import MuonConfig
from deepspeed_muon.errors import (
    BindingError,
    NonFiniteGradientError,
    PlanMismatchError,
    RegistrationError,
    UnsupportedConfigError,
)
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.param_groups import build_groups
from deepspeed_muon.routing import Route, format_routes, summarize_routes
from deepspeed_muon.schedulers import keep_rate_ratios
from deepspeed_muon.transport.agreement import Claim, agree
from deepspeed_muon.zero.binding import read_step_sets

__all__ = ["is_registered", "muon_optimizer", "register", "routes", "unregister"]

logger = logging.getLogger("deepspeed_muon")

OPTIMIZER_TYPE = "muon"

# Sections of the DeepSpeed configuration that must be equal on all ranks for the step to be defined.
_COMPARED_SECTIONS = (
    "optimizer",
    "scheduler",
    "zero_optimization",
    "gradient_clipping",
    "gradient_accumulation_steps",
    "fp16",
    "bf16",
    "torch_autocast",
    "data_types",
)

# What set_optimizer_flags hangs on parameters. With them, and a class called Muon, ZeRO runs DeepSpeed's own path too.
_TAGS = ("use_muon", "muon_num_heads", "muon_head_dim")

_ORIGINALS: dict[str, Callable[..., Any]] = {}
_UNHOOK: list[Callable[[], None]] = []


def is_registered() -> bool:
    """Return whether the config type ``Muon`` resolves to this project."""
    return bool(_ORIGINALS)


def register() -> None:
    """Make ``"optimizer": {"type": "Muon"}`` resolve to this project in every engine made from now on.

    ``import deepspeed_muon`` calls it. Calling it again does nothing; engines that exist already keep the optimizer
    that they have.

    Raises:
        RegistrationError: If this DeepSpeed's engine lacks the methods to hook.
    """
    if _ORIGINALS:
        return
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    hooks: dict[str, Callable[..., Any]] = {
        "_configure_basic_optimizer": _configure_basic_optimizer,
        "_configure_optimizer": _configure_optimizer,
        "_configure_lr_scheduler": _configure_lr_scheduler,
        "save_checkpoint": _save_checkpoint,
    }
    missing = [name for name in hooks if not hasattr(DeepSpeedEngine, name)]
    if missing:
        import deepspeed

        raise RegistrationError(
            f"DeepSpeed {deepspeed.__version__} has no DeepSpeedEngine.{missing[0]}; tested are 0.16.9 and 0.19.8"
        )
    for name, hook in hooks.items():
        original = getattr(DeepSpeedEngine, name)
        _ORIGINALS[name] = original
        setattr(DeepSpeedEngine, name, _hooked(original, hook))
    from deepspeed_muon.checkpoint.universal import hook_converter

    _UNHOOK.append(hook_converter())
    if Muon not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(Muon)


def unregister() -> None:
    """Give the config type ``Muon`` back to DeepSpeed. Engines that exist already keep their optimizer.

    Raises:
        RegistrationError: If another library hooked the same methods after this one.
    """
    if not _ORIGINALS:
        return
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    for name, original in _ORIGINALS.items():
        if getattr(getattr(DeepSpeedEngine, name), "_deepspeed_muon_original", None) is not original:
            raise RegistrationError(
                f"DeepSpeedEngine.{name} was hooked again after deepspeed_muon.register(); undo that one first"
            )
    for name, original in _ORIGINALS.items():
        setattr(DeepSpeedEngine, name, original)
    _ORIGINALS.clear()
    while _UNHOOK:
        _UNHOOK.pop()()
    if Muon in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.remove(Muon)


def muon_optimizer(engine: Any) -> Muon:
    """Return this project's optimizer inside an engine, whatever wrapper is around it.

    Args:
        engine: A ``DeepSpeedEngine``.

    Raises:
        BindingError: If the engine runs another optimizer.
    """
    optimizer = getattr(engine, "basic_optimizer", None)
    if not isinstance(optimizer, Muon):
        raise BindingError(f"this engine's optimizer is {type(optimizer).__name__}, not deepspeed_muon.Muon")
    return optimizer


def routes(engine: Any) -> list[Route]:
    """Return the routing table of an engine: where every parameter goes and why.

    Args:
        engine: A ``DeepSpeedEngine`` made with this optimizer.
    """
    return muon_optimizer(engine).routes


def _hooked(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(engine: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(functools.partial(original, engine), engine, *args, **kwargs)

    wrapper._deepspeed_muon_original = original  # type: ignore[attr-defined]
    return wrapper


def _wants_muon(engine: Any, client_optimizer: Any) -> bool:
    """Return whether this engine will run our optimizer, as far as can be told before a callable is called."""
    if client_optimizer is not None:
        return isinstance(client_optimizer, Muon)
    return (engine.optimizer_name() or "").lower() == OPTIMIZER_TYPE


def _configure_optimizer(
    original: Callable[..., Any], engine: Any, client_optimizer: Any, model_parameters: Any
) -> Any:
    """Compare settings, let DeepSpeed make the optimizer and its ZeRO wrapper, then bind."""
    error: Exception | None = None
    facts = {"optimizer": _described(engine, client_optimizer)}
    try:
        if _wants_muon(engine, client_optimizer):
            facts.update(_preflight(engine, client_optimizer, model_parameters))
    except Exception as caught:
        error = caught
    failure = None if error is None else f"{type(error).__name__}: {error}"
    agree(Claim(facts, scope=_data_parallel_scope(engine), failure=failure), error=error)

    if isinstance(client_optimizer, Muon):
        client_optimizer.managed = True
    elif client_optimizer is not None and not isinstance(client_optimizer, torch.optim.Optimizer):
        client_optimizer = _managed_by_deepspeed(client_optimizer, engine)
    result = original(client_optimizer, model_parameters)
    if isinstance(engine.basic_optimizer, Muon):
        _bind(engine, engine.basic_optimizer)
    return result


def _managed_by_deepspeed(make: Callable[[Any], Any], engine: Any) -> Callable[[Any], Any]:
    """Mark what a client's callable returns before DeepSpeed's wrappers call its ``step()``."""

    def made(model_parameters: Any) -> Any:
        optimizer = make(model_parameters)
        if isinstance(optimizer, Muon):
            _refuse_unsupported(engine)
            optimizer.check_names(engine.module)
            optimizer.managed = True
            _remove_tags(engine.module)
        return optimizer

    return made


def _described(engine: Any, client_optimizer: Any) -> str:
    if client_optimizer is None:
        return str(engine.optimizer_name())
    return f"client {getattr(type(client_optimizer), '__name__', client_optimizer)}"


def _preflight(engine: Any, client_optimizer: Muon | None, model_parameters: Any) -> dict[str, str]:
    """Check everything that can be checked before DeepSpeed communicates; return what all ranks must share."""
    _refuse_unsupported(engine)
    if client_optimizer is not None:
        client_optimizer.check_names(engine.module)
        config, table = client_optimizer.config, client_optimizer.routes
        _remove_tags(engine.module)
    else:
        config = MuonConfig.from_params(engine.optimizer_params())
        table = build_groups(model_parameters, config, model=engine.module).routes
    facts = {f"optimizer.params.{key}": value for key, value in _flat_facts(config).items()}
    facts["routes"] = format_routes(table)
    # Machine-independent settings can resolve to different arithmetic on different machines.
    facts["ns_dtype on this machine"] = str(config.ns_settings(_compute_device()).dtype)
    raw = getattr(engine._config, "_param_dict", {})
    for section in _COMPARED_SECTIONS:
        if section in raw:
            facts[section] = json.dumps(raw[section], sort_keys=True, default=str)
    return facts


def _flat_facts(config: MuonConfig) -> dict[str, str]:
    return {key: json.dumps(value) for key, value in config.model_dump(mode="json").items()}


def _data_parallel_scope(engine: Any) -> str:
    """Return a text that is shared by the ranks that train the same parameters."""
    group = getattr(engine, "seq_data_parallel_group", None)
    return "world" if group is None else ",".join(map(str, dist.get_process_group_ranks(group)))


def _refuse_unsupported(engine: Any) -> None:
    """Raise for features whose result would be wrong, before anything is built.

    Raises:
        UnsupportedConfigError: Naming the config key and what to do.
    """
    zero = engine._config.zero_config
    offload = getattr(zero, "offload_optimizer", None)

    def refuse(key: str, why: str) -> None:
        raise UnsupportedConfigError(f"{key} is not supported by deepspeed_muon: {why}")

    if offload is not None and getattr(offload, "ratio", 1.0) < 1.0:
        refuse(
            "zero_optimization.offload_optimizer.ratio < 1",
            "twin-flow needs DeepSpeedCPUAdam; set ratio to 1.0",
        )
    if offload is not None and getattr(offload, "super_offload", False):
        refuse("zero_optimization.offload_optimizer.super_offload", "it needs DeepSpeedCPUAdam; remove it")
    if getattr(zero, "zenflow", None) is not None:
        refuse("zero_optimization.zenflow", "it replaces the inner step; remove it")
    if offload is not None and str(getattr(offload, "device", "none")).endswith("nvme"):
        refuse("zero_optimization.offload_optimizer.device nvme", "not tested yet; use cpu")
    for section in ("bfloat16_config", "float16_config"):
        precision = getattr(engine._config, section, None)
        for key in ("bf16_master_weights_and_grads", "fp16_master_weights_and_grads"):
            if getattr(precision, key, False):
                refuse(key, "the momentum and the master weights are kept in fp32; remove it")
    if getattr(engine, "has_moe_layers", False):
        refuse("deepspeed.moe", "expert groups are not exchanged yet")
    model_parallel = engine.mpu.get_model_parallel_world_size() if _has_model_parallel(engine.mpu) else 1
    if model_parallel > 1 or int(getattr(engine, "autotp_size", lambda: 0)() or 0) > 1:
        refuse(
            "tensor parallelism", "a shard would be orthogonalised as if it were the matrix; use ZeRO alone"
        )


def _has_model_parallel(mpu: Any) -> bool:
    return mpu is not None and hasattr(mpu, "get_model_parallel_world_size")


def _configure_basic_optimizer(original: Callable[..., Any], engine: Any, model_parameters: Any) -> Any:
    """Make our optimizer for the type ``Muon``; leave every other type to DeepSpeed."""
    if (engine.optimizer_name() or "").lower() != OPTIMIZER_TYPE:
        return original(model_parameters)
    config = MuonConfig.from_params(engine.optimizer_params())
    optimizer = Muon.from_config(model_parameters, config, model=engine.module)
    optimizer.managed = True
    _remove_tags(engine.module)
    return optimizer


def _remove_tags(model: nn.Module) -> None:
    for param in model.parameters():
        for tag in _TAGS:
            if hasattr(param, tag):
                delattr(param, tag)


def _bind(engine: Any, optimizer: Muon) -> None:
    """Read the wrapper's layout and compare the plans; every rank raises if one of them fails."""
    error: Exception | None = None
    try:
        optimizer.bind(read_step_sets(engine, optimizer, optimizer.route_table()), device=_compute_device())
        claim = optimizer.plan_claim()
    except Exception as caught:
        error, claim = caught, Claim({}, failure=f"{type(caught).__name__}: {caught}")
    agree(claim, error=error, kind=PlanMismatchError)
    _prepare_checkpoints(engine)
    if optimizer.config.nonfinite_grad == "error" and not engine.fp16_enabled():
        _raise_on_overflow(engine.optimizer)
    from deepspeed.utils import log_dist

    log_dist(f"deepspeed_muon: {summarize_routes(optimizer.routes)}", ranks=[0])
    logger.debug("deepspeed_muon routes:\n%s", format_routes(optimizer.routes))


def _prepare_checkpoints(engine: Any) -> None:
    """Put the layout into saved states, and our loader of universal checkpoints into the wrapper."""
    from deepspeed_muon.checkpoint.layout_record import add_record_to_state_dict
    from deepspeed_muon.checkpoint.universal import use_universal_loader

    add_record_to_state_dict(engine)
    use_universal_loader(engine)


def _raise_on_overflow(wrapper: Any) -> None:
    """Turn the steps that a ZeRO wrapper skips by itself into errors; all ranks agree on ``overflow``."""
    if not hasattr(wrapper, "overflow"):
        return
    original_step = wrapper.step

    def step(*args: Any, **kwargs: Any) -> Any:
        result = original_step(*args, **kwargs)
        if wrapper.overflow:
            raise NonFiniteGradientError(
                "the global gradient norm is not finite and optimizer.params.nonfinite_grad is 'error'; DeepSpeed left "
                "weights and optimizer state unchanged"
            )
        return result

    wrapper.step = step


def _compute_device() -> torch.device:
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def _configure_lr_scheduler(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Let DeepSpeed make the scheduler, then restore the ratio between the groups' rates in it."""
    result = original(*args, **kwargs)
    optimizer = getattr(engine, "basic_optimizer", None)
    if isinstance(optimizer, Muon):
        from_config = engine.client_lr_scheduler is None
        keep_rate_ratios(
            engine.lr_scheduler, optimizer, given=(engine.scheduler_params() or {}) if from_config else {}
        )
        if optimizer.config.restore_from is not None:
            from deepspeed_muon.checkpoint import restore

            restore(engine, optimizer.config.restore_from)
    return result


def _save_checkpoint(
    original: Callable[..., Any], engine: Any, save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Let DeepSpeed save, then write the consolidated set beside its files if the configuration says so."""
    result = original(save_dir, tag, *args, **kwargs)
    optimizer = getattr(engine, "basic_optimizer", None)
    if isinstance(optimizer, Muon) and optimizer.config.consolidate_on_save:
        from deepspeed_muon.checkpoint import CONSOLIDATED_FOLDER, consolidate

        name = f"global_step{engine.global_steps}" if tag is None else str(tag)
        consolidate(engine, os.path.join(save_dir, name, CONSOLIDATED_FOLDER))
    return result
