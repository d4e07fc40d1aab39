"""The only file that hooks DeepSpeed's engine: config type -> optimizer, and binding once the ZeRO wrapper exists.

An engine with another optimizer takes DeepSpeed's own way through every hook: the same calls with the same arguments,
and not one collective more. Such an engine need not exist on all ranks.

Six methods of ``DeepSpeedEngine`` are wrapped. ``_broadcast_model`` compares the ranks' models before it;
``_configure_basic_optimizer`` makes our optimizer for the type ``Muon``; ``_configure_optimizer`` compares the ranks'
settings before it and binds after it;
``_configure_lr_scheduler`` keeps the ratio between the rates of the two halves under DeepSpeed's schedulers that
write one number into every group, and restores what ``restore_from`` names; ``_take_model_step`` writes the health
of sampled steps to DeepSpeed's monitor; and ``save_checkpoint`` consolidates where ``consolidate_on_save`` is set.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed_muon.config import MuonConfig
from deepspeed_muon.engine.binding import read_step_sets
from deepspeed_muon.engine.idle import forget_last_gradients
from deepspeed_muon.engine.loss_scale import grow_after_step, report_skipped_steps, use_deepspeed_scaler
from deepspeed_muon.engine.moving import allow_offload_states
from deepspeed_muon.engine.offload import Admission
from deepspeed_muon.engine.ranks import data_parallel_scope, members_of, model_facts
from deepspeed_muon.engine.schedulers import keep_rate_ratios
from deepspeed_muon.engine.supported import (
    expert_parallel,
    refuse_checkpoints_of_experts,
    refuse_checkpoints_of_some_ranks,
    refuse_unsupported,
    refuse_with_qk_clip,
)
from deepspeed_muon.errors import (
    BindingError,
    NonFiniteGradientError,
    PlanMismatchError,
    RegistrationError,
)
from deepspeed_muon.logs import logger
from deepspeed_muon.monitoring.summary import monitor_events
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.routing.param_groups import build_groups
from deepspeed_muon.routing.pipeline_module import is_divided
from deepspeed_muon.routing.rules import (
    Route,
    check_routes,
    format_routes,
    summarize_routes,
    warn_without_muon,
)
from deepspeed_muon.transport.agreement import RankFacts, agree
from deepspeed_muon.transport.waiting import phase

__all__ = ["health", "is_registered", "muon_optimizer", "register", "routes", "unregister"]

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
        "_broadcast_model": _broadcast_model,
        "_configure_basic_optimizer": _configure_basic_optimizer,
        "_configure_optimizer": _configure_optimizer,
        "_configure_lr_scheduler": _configure_lr_scheduler,
        "_take_model_step": _take_model_step,
        "save_checkpoint": _save_checkpoint,
    }
    if hasattr(DeepSpeedEngine, "_configure_expert_parallel"):  # not in old versions
        hooks["_configure_expert_parallel"] = _configure_expert_parallel
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
    _UNHOOK.append(_hook_tagging())
    if Muon not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(Muon)


def _hook_tagging() -> Callable[[], None]:
    """Let ``per_head_muon`` through where DeepSpeed finds no heads to tag: ours are found by other rules, and checked.

    Returns:
        What undoes it.
    """
    import deepspeed

    original = getattr(deepspeed, "set_optimizer_flags", None)
    if original is None:
        return lambda: None

    def set_optimizer_flags(config: Any, model: nn.Module) -> None:
        try:
            original(config, model)
        except ValueError:
            per_head = (getattr(config, "optimizer_params", None) or {}).get("per_head_muon")
            if not per_head or (config.optimizer_name or "").lower() != OPTIMIZER_TYPE:
                raise

    deepspeed.set_optimizer_flags = set_optimizer_flags

    def undo() -> None:
        if deepspeed.set_optimizer_flags is set_optimizer_flags:
            deepspeed.set_optimizer_flags = original

    return undo


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


def health(engine: Any) -> dict[str, Any]:
    """Return what the last sampled step measured; ``docs/health.md`` says what each number means.

    Equal on all ranks. Steps are sampled every ``health.every`` optimizer steps, with or without a monitor.

    Args:
        engine: A ``DeepSpeedEngine`` made with this optimizer.

    Returns:
        ``step``, ``update_rms``, ``orthogonality_error``, ``sigma_max``, ``stable_rank``, ``alignment``,
        ``time_gather``, ``time_newton_schulz``, ``time_scatter``, ``seconds``, ``redone``, ``failed``, and
        ``matrices`` with the numbers of each sampled matrix. Before the first sample only ``redone`` and ``failed``,
        of this rank.
    """
    return muon_optimizer(engine).health()


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


def _configure_expert_parallel(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave the model alone where our optimizer will refuse AutoEP, which would fail or communicate before that."""
    config = engine._config.expert_parallel_config
    if not (expert_parallel(engine) and _wants_muon(engine, engine.client_optimizer)):
        return original(*args, **kwargs)
    config.enabled = False
    try:
        return original(*args, **kwargs)
    finally:
        config.enabled = True


def _broadcast_model(original: Callable[..., Any], engine: Any) -> Any:
    """Compare the ranks' models first: between different ones the broadcast ends in an abort or in a hang."""
    if _wants_muon(engine, engine.client_optimizer):
        members = members_of(engine)
        members.call_roll()
        agree(model_facts(engine), members=members)
    return original()


def _configure_optimizer(
    original: Callable[..., Any], engine: Any, client_optimizer: Any, model_parameters: Any
) -> Any:
    """Compare settings, let DeepSpeed make the optimizer and its ZeRO wrapper, then bind."""
    given, ours = client_optimizer is not None, _wants_muon(engine, client_optimizer)
    if not ours and (not given or isinstance(client_optimizer, torch.optim.Optimizer)):
        return original(client_optimizer, model_parameters)
    admission = Admission(engine)
    if not ours:
        client_optimizer = _managed_by_deepspeed(client_optimizer, engine, admission)
    else:
        _compare_settings(engine, client_optimizer, model_parameters)
        if given:
            admission.adopt(client_optimizer)
            _order_parameters(engine, client_optimizer)
        elif getattr(engine, "has_moe_layers", False):
            model_parameters = _named_groups(model_parameters)
    engine._deepspeed_muon_admission = admission
    try:
        result = original(client_optimizer, model_parameters)
    finally:
        admission.close()
        del engine._deepspeed_muon_admission
    if isinstance(engine.basic_optimizer, Muon):
        admission.settle(engine.optimizer, engine.basic_optimizer)
        _bind(engine, engine.basic_optimizer)
    return result


def _compare_settings(engine: Any, client_optimizer: Muon | None, model_parameters: Any) -> None:
    """Refuse what is not supported, and settings that differ between the ranks, before DeepSpeed communicates."""
    error: Exception | None = None
    facts = {"optimizer": _described(engine, client_optimizer)}
    try:
        facts.update(_preflight(engine, client_optimizer, model_parameters))
    except Exception as caught:
        error = caught
    failure = None if error is None else f"{type(error).__name__}: {error}"
    members = members_of(engine)
    members.call_roll()
    agree(RankFacts(facts, scope=data_parallel_scope(engine), failure=failure), error=error, members=members)


def _named_groups(model_parameters: Any) -> Any:
    """Give param groups the names without which DeepSpeed cannot divide them into experts and others."""
    items = list(model_parameters)
    if not all(isinstance(item, dict) for item in items):
        return items
    return [{"name": f"dense-params-{number}", **item} for number, item in enumerate(items)]


def _managed_by_deepspeed(
    make: Callable[[Any], Any], engine: Any, admission: Admission
) -> Callable[[Any], Any]:
    """Look at what a client's callable returns: ours is compared and marked before DeepSpeed wraps it."""

    @functools.wraps(make, updated=())
    def made(model_parameters: Any) -> Any:
        optimizer = make(model_parameters)
        if isinstance(optimizer, Muon):
            _compare_settings(engine, optimizer, model_parameters)
            admission.adopt(optimizer)
            _order_parameters(engine, optimizer)
        return optimizer

    return made


def _described(engine: Any, client_optimizer: Any) -> str:
    if client_optimizer is None:
        return str(engine.optimizer_name())
    return f"client {getattr(type(client_optimizer), '__name__', client_optimizer)}"


def _preflight(engine: Any, client_optimizer: Muon | None, model_parameters: Any) -> dict[str, str]:
    """Check everything that can be checked before DeepSpeed communicates; return what all ranks must share."""
    refuse_unsupported(engine)
    if client_optimizer is not None:
        client_optimizer.check_names(engine.module)
        config, table = client_optimizer.config, client_optimizer.routes
        _remove_tags(engine.module)
    else:
        config = MuonConfig.from_params(engine.optimizer_params())
        table = build_groups(model_parameters, config, model=engine.module).routes
    refuse_checkpoints_of_experts(engine, config)
    refuse_checkpoints_of_some_ranks(engine, config)
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


def _configure_basic_optimizer(original: Callable[..., Any], engine: Any, model_parameters: Any) -> Any:
    """Make our optimizer for the type ``Muon``; leave every other type to DeepSpeed."""
    if (engine.optimizer_name() or "").lower() != OPTIMIZER_TYPE:
        return original(model_parameters)
    config = MuonConfig.from_params(engine.optimizer_params())
    optimizer = Muon.from_config(model_parameters, config, model=engine.module)
    engine._deepspeed_muon_admission.adopt(optimizer)
    _order_parameters(engine, optimizer)
    _remove_tags(engine.module)
    return optimizer


def _order_parameters(engine: Any, optimizer: Muon) -> None:
    from deepspeed_muon.engine.ordering import order_parameters

    order_parameters(engine, optimizer, device=_compute_device())


def _remove_tags(model: nn.Module) -> None:
    for param in model.parameters():
        for tag in _TAGS:
            if hasattr(param, tag):
                delattr(param, tag)


def _bind(engine: Any, optimizer: Muon) -> None:
    """Read the wrapper's layout and compare the plans; every rank raises if one of them fails."""
    use_deepspeed_scaler(engine)
    grow_after_step(engine.optimizer)
    forget_last_gradients(engine.optimizer)
    report_skipped_steps(engine.optimizer, optimizer)
    error: Exception | None = None
    members = members_of(engine)
    try:
        if optimizer.config.qk_clip is not None:
            refuse_with_qk_clip(engine)
            optimizer.clip_attention_of(engine.module)
        step_sets = read_step_sets(engine, optimizer, optimizer.route_table())
        optimizer.bind(step_sets, device=_compute_device(), members=members)
        claim = optimizer.plan_facts()
    except Exception as caught:
        error, claim = caught, RankFacts({}, failure=f"{type(caught).__name__}: {caught}")
    agree(claim, error=error, kind=PlanMismatchError, members=members)
    optimizer.open_share_groups()
    if is_divided(engine.module):
        _check_all_stages(optimizer)
    allow_offload_states(engine.optimizer)
    _prepare_checkpoints(engine)
    if optimizer.qk_clip is not None and engine.optimizer is not optimizer:
        _end_steps_of_qk_clip(engine.optimizer, optimizer)
    if optimizer.config.nonfinite_grad == "error" and not engine.fp16_enabled():
        _raise_on_overflow(engine.optimizer)
    from deepspeed.utils import log_dist

    log_dist(f"deepspeed_muon: {summarize_routes(optimizer.routes)}", ranks=[0])
    logger.debug("deepspeed_muon routes:\n%s", format_routes(optimizer.routes))


def _check_all_stages(optimizer: Muon) -> None:
    """Check, on all ranks alike, what only the routes of a pipeline's stages together can tell."""
    stages = optimizer.members.gather(optimizer.routes, what="comparison of the stages' routes").values()
    whole = {route.name: route for routes in stages for route in routes}
    check_routes(list(whole.values()), list(whole), optimizer.config)
    warn_without_muon(list(whole.values()))


def _prepare_checkpoints(engine: Any) -> None:
    """Put the layout into saved states, and our loader of universal checkpoints into the wrapper."""
    from deepspeed_muon.checkpoint.layout_record import add_record_to_state_dict
    from deepspeed_muon.checkpoint.universal import use_universal_loader
    from deepspeed_muon.engine.checkpointing import DeepSpeedHost
    from deepspeed_muon.engine.ordering import check_order_on_load

    engine.basic_optimizer.host = DeepSpeedHost(engine)
    add_record_to_state_dict(engine)
    check_order_on_load(engine)
    use_universal_loader(engine)


def _end_steps_of_qk_clip(wrapper: Any, optimizer: Muon) -> None:
    """Forget the attention logits when ZeRO's step is over: it calls ours several times, or never if it overflowed."""
    original_step = wrapper.step

    def step(*args: Any, **kwargs: Any) -> Any:
        try:
            return original_step(*args, **kwargs)
        finally:
            if optimizer.qk_clip is not None:
                optimizer.qk_clip.clear()

    optimizer.step_ends_outside = True
    wrapper.step = step


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

            arguments = optimizer.config.restore_from.model_dump()
            restore(engine, arguments.pop("path"), **arguments)
    return result


def _take_model_step(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the step, recording its health, and write a sampled step to the monitor.

    It is the boundary of a step in the plain engine and in the pipeline engine, reached by all ranks, overflow or not.
    """
    optimizer = getattr(engine, "basic_optimizer", None)
    if not isinstance(optimizer, Muon):
        return original(*args, **kwargs)
    number = engine.global_steps + 1
    with (
        optimizer.health_log.step(number, members=optimizer.members),
        contextlib.ExitStack() as waiting,
    ):
        for group in optimizer.process_groups():
            # DeepSpeed's own collectives of the step are part of it: the norm of the gradients at stages 1 and 2.
            waiting.enter_context(phase(f"step {number}", group))
        result = original(*args, **kwargs)
    optimizer.check_arrived()
    if optimizer.recorder.due(number) and engine.monitor.enabled:
        engine.monitor.write_events(monitor_events(optimizer.health(), engine.global_samples))
    return result


def _save_checkpoint(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Let DeepSpeed save, then write the consolidated set beside its files if the configuration says so."""
    result = original(*args, **kwargs)
    optimizer = getattr(engine, "basic_optimizer", None)
    if isinstance(optimizer, Muon) and optimizer.config.consolidate_on_save:
        from deepspeed_muon.checkpoint import CONSOLIDATED_FOLDER, consolidate

        given = dict(zip(("save_dir", "tag"), args, strict=False)) | kwargs
        tag = given.get("tag")
        name = f"global_step{engine.global_steps}" if tag is None else str(tag)
        consolidate(engine, os.path.join(given["save_dir"], name, CONSOLIDATED_FOLDER))
    return result
