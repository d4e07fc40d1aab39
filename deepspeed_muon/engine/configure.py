"""Replacements of the methods with which an engine makes its optimizer: compare the ranks, make ours, bind it.

Before DeepSpeed communicates, the ranks compare their models and settings. Once its wrapper exists, they compare their
plans. If one rank fails or differs, all of them raise, so that none waits for another.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import configure_moe_param_groups
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.utils import get_z3_leaf_modules
from torch import Tensor

from deepspeed_muon.checkpoint.layout_record import add_record_to_state_dict
from deepspeed_muon.checkpoint.parameters import (
    BoundEngine,
    collect,
    require_checkpointable,
    require_fp32,
    set_bound_engine,
)
from deepspeed_muon.config.settings import MUON_TYPES, MuonConfig
from deepspeed_muon.config.values import unknown_key_message
from deepspeed_muon.engine import muon_of, workarounds
from deepspeed_muon.engine.offload import adopt, offload_device
from deepspeed_muon.engine.patching import Original
from deepspeed_muon.engine.supported import expert_parallel, refuse_unsupported
from deepspeed_muon.engine.topology import (
    model_facts,
    ranks_of,
    read_step_sets,
    tensor_shards,
    tensor_slices,
)
from deepspeed_muon.engine.views import Zero12View, view_of
from deepspeed_muon.errors import CheckpointError, ConfigError, RoutingError
from deepspeed_muon.logs import announce, listed, logger, warn
from deepspeed_muon.ops.builder import loaded
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.routing.param_groups import DIVIDED_GROUP, divide_again, order_for_partitions, route_again
from deepspeed_muon.routing.parameters import is_divided
from deepspeed_muon.routing.route import format_routes, summarize_routes
from deepspeed_muon.routing.rules import check_routes, warn_of_large_guesses, warn_without_muon
from deepspeed_muon.transport.agreement import RankFacts, Scope, agree, raise_on_all_ranks
from deepspeed_muon.transport.ranks import Ranks, all_ranks
from deepspeed_muon.version import __version__

# Sections of the DeepSpeed configuration that must be equal on all ranks: the step, and AutoEP's process groups and
# layers, depend on them.
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
    "expert_parallel",
    "tensor_parallel",
    "use_data_before_expert_parallelism",
)

_OPTIMIZER_KEYS = {"type", "params", "legacy_fusion"}

# Attributes that DeepSpeed, or a program for its Muon, gives to parameters. If the optimizer's class is called Muon,
# they make ZeRO run DeepSpeed's own Muon on top.
_TAGS = ("use_muon", "muon_num_heads", "muon_head_dim")


def broadcast_model(original: Original, engine: DeepSpeedEngine, *args: object, **kwargs: object) -> object:
    """Compare the ranks' models before one of them is broadcast."""
    if not _wants_muon(engine, engine.client_optimizer):
        return original(engine, *args, **kwargs)
    _agree(ranks_of(engine), model_facts(engine))
    with _flat_and_contiguous(engine):
        return original(engine, *args, **kwargs)


@contextlib.contextmanager
def _flat_and_contiguous(engine: DeepSpeedEngine) -> Iterator[None]:
    """Flatten scalars and weights of other strides (``channels_last``), and restore their layout at the end.

    DeepSpeed views what it broadcasts as bytes, and the backends send contiguous tensors only. At stage 3, which
    broadcasts the weights again and makes all of them contiguous, they stay contiguous.
    """
    params = [param for param in engine.module.parameters() if not (param.dim() and param.is_contiguous())]
    tensors = [(param, param.data) for param in params]
    for param, tensor in tensors:
        param.data = tensor.reshape(-1)  # a view of a scalar, a copy of a weight of other strides
    try:
        yield
    finally:
        for param, tensor in tensors:
            if engine.zero_optimization_stage() == 3:
                param.data = param.data.view(tensor.shape)
                continue
            if param.data_ptr() != tensor.data_ptr():
                tensor.copy_(param.data.view(tensor.shape))
            param.data = tensor


def configure_expert_parallel(
    original: Original, engine: DeepSpeedEngine, *args: object, **kwargs: object
) -> object:
    """Compare AutoEP's settings before it makes process groups of all ranks; let all ranks fail if one does."""
    if not (expert_parallel(engine) and _wants_muon(engine, engine.client_optimizer)):
        return original(engine, *args, **kwargs)
    _agree(all_ranks(), RankFacts({None: _sections(engine)}))
    with raise_on_all_ranks():
        return original(engine, *args, **kwargs)


def configure_optimizer(
    original: Original,
    engine: DeepSpeedEngine,
    client_optimizer: Any,
    model_parameters: Any,
    *args: object,
    **kwargs: object,
) -> object:
    """Compare settings, let DeepSpeed make the optimizer and its ZeRO wrapper, then bind."""
    is_ours = _wants_muon(engine, client_optimizer)
    # A callable of the client's may return our optimizer.
    if not is_ours and isinstance(client_optimizer, (torch.optim.Optimizer, type(None))):
        return original(engine, client_optimizer, model_parameters, *args, **kwargs)
    with contextlib.ExitStack() as wrapping:
        if is_ours:
            client_optimizer = _prepared(engine, client_optimizer, model_parameters, wrapping)
        else:
            client_optimizer = _prepared_once_made(client_optimizer, engine, wrapping)
        # The configured optimizer is handed to DeepSpeed as if it were the client's.
        result = original(engine, client_optimizer, model_parameters, *args, **kwargs)
    optimizer = muon_of(engine)
    if optimizer is not None:
        _bind(engine, optimizer)
    return result


def _wants_muon(engine: DeepSpeedEngine, client_optimizer: object) -> bool:
    """Return whether this engine will run our optimizer; not known yet if the client gave a callable."""
    if client_optimizer is not None:
        return isinstance(client_optimizer, Muon)
    return (engine.optimizer_name() or "").lower() in MUON_TYPES


def _agree(ranks: Ranks, facts: RankFacts, *, error: Exception | None = None) -> None:
    """Wait for all ranks, then compare their facts; all of them raise if one failed or differs."""
    ranks.barrier()
    agree(facts, error=error, ranks=ranks)


def _prepared(
    engine: DeepSpeedEngine,
    client_optimizer: Muon | None,
    model_parameters: Any,
    wrapping: contextlib.ExitStack,
) -> Muon:
    """Return the client's optimizer, or the configured one, ready for the wrapper that DeepSpeed is about to make.

    Unsupported settings, and settings that differ between the ranks, are refused before DeepSpeed communicates.
    """
    # 1. make the optimizer, or take the client's, and find what has to be equal on all ranks; nothing is sent
    error: Exception | None = None
    client = None if client_optimizer is None else f"client {type(client_optimizer).__name__}"
    facts = {"optimizer": client or str(engine.optimizer_name())}
    try:
        optimizer = client_optimizer or _configured(engine, model_parameters)
        if client_optimizer is not None:
            refuse_unsupported(engine, optimizer.config)
            _refuse_state(engine, optimizer)
            optimizer.routed = route_again(
                optimizer.routed,
                optimizer.param_groups,
                optimizer.config,
                engine.module,
                shards=tensor_shards(engine),
            )
        _refuse_foreign(engine, optimizer)
        _regroup(engine, optimizer)
        for workaround in workarounds.NEEDED:
            workaround.before_wrapping(engine)
        facts.update(_facts(engine, optimizer))
    except Exception as caught:
        error = caught
    # 2. compare it
    _agree(ranks_of(engine), RankFacts({Scope.of(engine.seq_data_parallel_group): facts}), error=error)
    # 3. prepare what DeepSpeed is about to wrap; wrapping undoes the replacements once it has
    adopt(engine, optimizer, wrapping)
    for param in engine.module.parameters():
        for tag in _TAGS:
            vars(param).pop(tag, None)
    if engine.zero_optimization_stage() == 3:
        original = Init._zero_init_param

        def divide(init: Any, param: Any) -> None:
            # It broadcasts the parameter, which fails for scalars. They were broadcast with the model already.
            if param.dim():
                original(init, param)
            else:
                init._convert_to_deepspeed_param(param)
                param.partition()

        wrapping.enter_context(mock.patch.object(Init, "_zero_init_param", divide))
    # Other stages do not cut a flat buffer, and round_robin_gradients is an order of its own.
    if engine.zero_optimization_stage() in (1, 2) and not engine.zero_round_robin_gradients():
        ranks = dist.get_world_size(engine.seq_data_parallel_group)
        settings = optimizer.config.ns_settings(_compute_device())
        order_for_partitions(optimizer.param_groups, optimizer.routed.by_id, ranks, settings)
    return optimizer


def _refuse_state(engine: DeepSpeedEngine, optimizer: Muon) -> None:
    """Raise for an optimizer with state of whole parameters, which DeepSpeed's wrapper would not divide."""
    is_wrapped = engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled()
    if is_wrapped and any(optimizer.state.values()):
        raise ConfigError(
            "the optimizer that deepspeed.initialize got has state: it has stepped, or loaded a state dict. State "
            "continues in an engine at zero_optimization.stage 0 in fp32 only: make one, call "
            "deepspeed_muon.consolidate(engine, folder), and start this engine with a new optimizer and that folder in "
            "optimizer.params.restore_from"
        )


def _refuse_foreign(engine: DeepSpeedEngine, optimizer: Muon) -> None:
    """Raise for trained parameters that the engine's model does not have; without ZeRO only if it has none of them.

    ZeRO would end in a KeyError on the ranks that get their elements, and the other ranks would wait for these.
    """
    of_model = {id(param) for param in engine.module.parameters()}
    # A frozen parameter of another module does no harm: it has no gradient to reduce.
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    foreign = [p for p in trained if id(p) not in of_model]
    if foreign and (engine.zero_optimization_stage() or len(foreign) == len(trained)):
        names = [optimizer.routed.by_id[id(param)].name for param in foreign]
        raise ConfigError(
            f"the optimizer has parameters that are not in the model of deepspeed.initialize: {listed(names, 5)}. "
            f"DeepSpeed reduces the gradients of the model's parameters alone: make the optimizer from this model, and "
            f"such parameters attributes of it"
        )


def _regroup(engine: DeepSpeedEngine, optimizer: Muon) -> None:
    """Divide the groups of an optimizer once more, right before ZeRO wraps it.

    The client's groups may no longer fit: parameters were frozen or unfrozen since, the engine's model leads to other
    routes than the names that the client passed, or AutoTP and AutoEP replaced parameters. ZeRO 1 and 2 flatten each
    group into one buffer, which fails for an empty group and converts all parameters to the widest dtype in it.

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
    if engine.zero_optimization_stage() == 3:
        _check_dtypes(engine, optimizer, [param for _, params in divided for param in params])
    has_scheduler = engine.client_lr_scheduler is not None and not callable(engine.client_lr_scheduler)
    # Schedulers of torch leave this key in every group, whether the engine gets them or not.
    has_scheduler = has_scheduler or any("initial_lr" in group for group in groups)
    if has_scheduler and [id(group) for group, _ in divided] != list(map(id, groups)):
        raise RoutingError(
            f"the learning-rate scheduler was made for {len(groups)} param groups. With the model of "
            f"deepspeed.initialize and the parameters that are frozen now there are {len(divided)}, or they have other "
            f"positions: pass model=... to deepspeed_muon.Muon and freeze parameters before the optimizer is made, or "
            f"pass the scheduler to deepspeed.initialize as a function: lr_scheduler=lambda optimizer: ..."
        )
    # Not before all checks, since a program may try again after an error.
    for group, params in divided:
        group["params"] = params
    groups[:] = [group for group, _ in divided]


def _check_dtypes(engine: DeepSpeedEngine, optimizer: Muon, params: Sequence[Tensor]) -> None:
    """Raise where ZeRO 3 would assert without a message that all parameters have one dtype, or warn where it casts."""
    first = {param.dtype: optimizer.routed.by_id[id(param)].name for param in reversed(params)}
    if len(first) > 1:
        shown = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in first.items())
        remedy = "Enable bf16 or fp16 in the configuration, which casts them, convert the model with model.to(dtype)"
        if offload_device(engine, "offload_param") == "none":
            raise ConfigError(
                f"ZeRO 3 needs trained parameters of one dtype: {shown}. {remedy}, or train at ZeRO 1 or 2"
            )
        warn(
            "deepspeed_muon: under offload_param layers of several dtypes compute in one, mostly fp32: %s. %s",
            shown,
            remedy,
        )


def _configured(engine: DeepSpeedEngine, model_parameters: Any) -> Muon:
    """Return the optimizer of the configuration."""
    section = engine._config._param_dict["optimizer"]
    for key in section.keys() - _OPTIMIZER_KEYS:  # DeepSpeed ignores it
        raise ConfigError(
            unknown_key_message(key, _OPTIMIZER_KEYS, "optimizer") + "; settings go to optimizer.params"
        )
    config = MuonConfig.from_params(engine.optimizer_params())
    refuse_unsupported(engine, config)
    params = list(model_parameters)
    if engine.has_moe_layers:
        # DeepSpeed divides groups into experts and others, and needs names for that.
        if all(isinstance(param, dict) for param in params):
            params = [
                {"name": f"dense-params-{number}", DIVIDED_GROUP: number, **group}
                for number, group in enumerate(params)
            ]
        params = configure_moe_param_groups(params)  # adds a group for each set of ranks that share experts
    return Muon.from_config(params, config, model=engine.module, shards=tensor_shards(engine))


def _prepared_once_made(
    make: Callable[[Any], Any], engine: DeepSpeedEngine, wrapping: contextlib.ExitStack
) -> Callable[[Any], Any]:
    """Wrap a client's callable: if it returns our optimizer, the settings are compared before DeepSpeed wraps it."""

    @functools.wraps(make, updated=())
    def made(model_parameters: Any) -> Any:
        optimizer = make(model_parameters)
        return _prepared(engine, optimizer, None, wrapping) if isinstance(optimizer, Muon) else optimizer

    return made


def _facts(engine: DeepSpeedEngine, optimizer: Muon) -> dict[str, str]:
    """Return what must be equal on all ranks before DeepSpeed communicates."""
    config = optimizer.config
    settings = config.model_dump(mode="json")
    facts = {f"optimizer.params.{key}": json.dumps(value) for key, value in settings.items()}
    facts["routes"] = format_routes(optimizer.routes)
    leaves = get_z3_leaf_modules(engine.module)
    names = (name for name, module in engine.module.named_modules() if module in leaves)
    facts["leaf modules (set_z3_leaf_modules)"] = ", ".join(names)
    # Equal settings can mean different arithmetic on different machines.
    facts["ns_dtype on this machine"] = str(config.ns_settings(_compute_device()).dtype)
    facts.update(_sections(engine))
    return facts


def _sections(engine: DeepSpeedEngine) -> dict[str, str]:
    """Return the compared sections of the DeepSpeed configuration as text, those that are there."""
    raw = engine._config._param_dict
    present = (name for name in _COMPARED_SECTIONS if name in raw)
    return {name: json.dumps(raw[name], sort_keys=True, default=str) for name in present}


def _bind(engine: DeepSpeedEngine, optimizer: Muon) -> None:
    """Bind the optimizer to the wrapper, and tell it what it needs to know about the engine."""
    # 1. the step sets, and their plans on all ranks
    ranks = ranks_of(engine)
    with raise_on_all_ranks(ranks=ranks, purpose="comparison of plans") as agreed:
        optimizer._attach_step_hook(engine.module)
        step_sets = read_step_sets(engine, optimizer, optimizer.routed.by_id)
        optimizer._bind(step_sets, device=_compute_device(), ranks=ranks)
        agreed.update(optimizer._plan_facts())
        optimizer.exchange_buffers.allocate()  # here, where all ranks raise if the memory of one does not suffice
    if optimizer.exchange_buffers.device.type != "cpu":  # gloo connects ranks when it makes a group
        optimizer._bound_steps.connect()
    # 2. the routes of all stages of a pipeline
    if is_divided(engine.module):
        by_group = isinstance(view_of(engine.optimizer), Zero12View)
        _check_all_stages(optimizer, engine.seq_data_parallel_group, norm_by_group=by_group)
    # 3. who ends a step: the wrapper, where there is one
    optimizer.step_ends_outside = engine.optimizer is not optimizer
    # 4. what checkpoints need
    set_bound_engine(optimizer, BoundEngine(engine, tensor_slices(engine, optimizer.routed.by_id), view_of))
    with raise_on_all_ranks(ranks=ranks):
        _require_consolidated(engine, optimizer.config)
    add_record_to_state_dict(engine)
    announce(
        "deepspeed_muon %s: %s; kernels: %s; deepspeed_muon.routes(engine) says which and why",
        __version__,
        summarize_routes(optimizer.routes),
        "native" if loaded() else "torch's",
    )
    logger.debug("deepspeed_muon routes:\n%s", format_routes(optimizer.routes))


def _require_consolidated(engine: DeepSpeedEngine, config: MuonConfig) -> None:
    """Raise if the configuration asks for consolidated checkpoints, and this engine can have none."""
    wanted = next((key for key in ("consolidate_on_save", "restore_from") if getattr(config, key)), None)
    if wanted is None:
        return
    try:
        require_checkpointable(engine)
        state = collect(engine)
        if config.consolidate_on_save:
            require_fp32(state)
    except CheckpointError as error:
        raise ConfigError(f"optimizer.params.{wanted} does not work here, unset it: {error}") from error


def _check_all_stages(optimizer: Muon, data_parallel: dist.ProcessGroup, *, norm_by_group: bool) -> None:
    """Check the routes of all stages of a pipeline together; every rank gets the same result."""
    # The ranks of a data-parallel group have the same routes, so one rank of each stage is enough.
    across_stages = Ranks(tuple(group for group in optimizer.ranks.groups if group is not data_parallel))
    algorithms = [group["algorithm"] for group in optimizer.param_groups]
    stages = across_stages.all_gather((optimizer.routes, algorithms), purpose="comparison of routes").values()
    counts = [len(algorithms) for _, algorithms in stages]
    if len(set(counts)) > 1 and norm_by_group:
        raise ConfigError(
            f"the stages of the pipeline have {counts} param groups, and DeepSpeed's norm at ZeRO 1 waits for each of "
            f"them on every stage: a stage has no matrix of Muon's, or no parameter of AdamW's. Divide the layers "
            f"otherwise, or in fp32 set zero_optimization.stage to 0"
        )
    # DeepSpeed adds up the squares of all stages by the number of the group.
    if norm_by_group and any(of_stage != algorithms for _, of_stage in stages):
        optimizer.norms_by_algorithm = None
    route_of = {route.name: route for routes, _ in stages for route in routes}
    frozen = [name for name, route in route_of.items() if route.algorithm == "frozen"]
    check_routes([((name,), route) for name, route in route_of.items()], optimizer.config, frozen=frozen)
    warn_without_muon(list(route_of.values()))
    warn_of_large_guesses(list(route_of.values()))


def _compute_device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())
