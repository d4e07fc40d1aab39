"""Rank functions that train a small model with DeepSpeed, and what they report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed_muon
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.variants import VARIANTS
from tests.support.contract import STEPS
from tests.support.kernels import forced_dtype
from tests.support.layouts import sent_elements
from tests.support.models import batch, build

MUON_PARAMS = {
    "muon_lr": 0.02,
    "adam_lr": 3e-3,
    "weight_decay": 0.1,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "ns_dtype": forced_dtype(),
    "wire_dtype": "fp32",
}

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
"""In bf16, ZeRO 1 is BF16_Optimizer then."""


def ds_config(
    stage: int,
    *,
    accumulation: int = 1,
    clipping: float = 0.0,
    precision: str = "fp32",
    params: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a DeepSpeed configuration with the optimizer type Muon."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "Muon", "params": {**MUON_PARAMS, **(params or {})}},
    }
    if stage:
        config["zero_optimization"] = {"stage": stage, **(zero or {})}
        if stage == 3:
            config["zero_optimization"].setdefault("stage3_param_persistence_threshold", 0)
    if precision != "fp32":
        config[precision] = {"enabled": True}
        if precision == "fp16":
            config["fp16"].update(initial_scale_power=8, loss_scale_window=1000)
    for key, value in (extra or {}).items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return config


def make_engine(config: dict[str, Any], kind: str = "toy", *, zero_init: bool = False, **kwargs: Any) -> Any:
    """Return an engine around a freshly built model."""
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=zero_init):
        model = build(kind, **kwargs)
    if zero_init:
        load_unpartitioned(model, kind, kwargs)
    return initialize(model, config)


def initialize(model: nn.Module, config: dict[str, Any], **kwargs: Any) -> Any:
    """Return an engine that trains all parameters of a model, unless ``model_parameters`` says which."""
    kwargs.setdefault("model_parameters", list(model.parameters()))
    return deepspeed.initialize(model=model, config=config, **kwargs)[0]


def load_unpartitioned(model: nn.Module, kind: str, kwargs: dict[str, Any]) -> None:
    """Give a model made under zero.Init the weights that the same seed gives outside of it."""
    source = dict(build(kind, **kwargs).named_parameters())
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
            if dist.get_rank() == 0:
                param.data.copy_(source[name].data)


def run_step(engine: Any, step: int, rank: int, world_size: int, accumulation: int) -> float:
    """Run the micro-batches of one optimizer step and the step itself; return the mean loss of this rank."""
    total = 0.0
    for micro in range(accumulation):
        tokens, targets = (tensor.to(engine.device) for tensor in batch(step, micro * world_size + rank))
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        total += float(loss.detach()) / accumulation
    return total


def train_steps(engine: Any, steps: int, rank: int, world_size: int, accumulation: int = 1) -> list[float]:
    """Run the first steps; return the norm of the gradients in each."""
    norms = []
    for step in range(steps):
        run_step(engine, step, rank, world_size, accumulation)
        norms.append(norm_of(engine))
    return norms


def planned_bytes(optimizer: deepspeed_muon.Muon) -> int:
    """Return the bytes of directions, updates and row state that this rank sends if every matrix has a gradient."""
    total = 0
    for runner in optimizer.runners:
        total += sent_elements(runner.plan) * runner.context.wire_dtype.itemsize
        total += 0 if runner._row_storage is None else runner._row_storage.sent_bytes
    return total


def norm_of(engine: Any) -> Any:
    """Return the norm of the last step's gradients, or ``None`` where DeepSpeed computes none."""
    norm = engine.get_global_grad_norm()
    return None if norm is None else float(norm)


def refusal(
    call: Callable[[], object],
    kinds: type[BaseException] | tuple[type[BaseException], ...] = deepspeed_muon.MuonError,
) -> str:
    """Return class and text of the error that a call raises, or an empty text."""
    try:
        call()
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shapes_chosen(optimizer: Muon, *, ran: bool) -> list[str]:
    """Return the shapes of which this rank knows what runs them, or those that ran."""
    return sorted(entry["problem"] for entry in optimizer.kernel_report() if entry["calls"] or not ran)


def full_masters(engine: Any) -> dict[str, Tensor]:
    """Assemble every parameter's fp32 master from the partitions of all ranks, by this project's own layouts."""
    return assemble(engine, lambda optimizer, tensor: tensor.detach())


def full_states(engine: Any, key: str) -> dict[str, Tensor]:
    """Assemble one entry of the optimizer state, by parameter name."""
    return assemble(engine, lambda optimizer, tensor: optimizer.state.get(tensor, {}).get(key))


def decoded(runner: Any, optimizer: Any, index: int, tensor: Tensor | None) -> Tensor | None:
    """Return the entry of the state of a partition; of momentum in 8 bits the values that it stands for."""
    if tensor is None or tensor.dtype != torch.int8:
        return tensor
    (bound,) = (partition for partition in runner.step_set.partitions if partition.index == index)
    state = optimizer.state[bound.tensor]
    values: Tensor = runner.int8_blocks[index].decode_all(tensor.view(-1), state["momentum_scale"])
    return values


def assemble(engine: Any, read: Any) -> dict[str, Tensor]:
    optimizer = deepspeed_muon.muon_optimizer(engine)
    shapes = {route.name: route.shape for route in optimizer.routes}
    full: dict[str, Tensor] = {}
    for runner in optimizer.runners:
        tensors = {p.index: read(optimizer, p.tensor) for p in runner.step_set.partitions}
        tensors |= {index: decoded(runner, optimizer, index, codes) for index, codes in tensors.items()}
        for layout in (*runner.step_set.matrices, *runner.step_set.adamw_parameters):
            tensor = tensors[layout.partition]
            if tensor is None:
                continue
            flat = torch.zeros(layout.numel, dtype=torch.float64)
            fragment = layout.placement.fragment_on(runner.step_set.rank)
            if fragment is not None:
                source = tensor.reshape(-1).narrow(0, fragment.partition_offset, fragment.numel)
                flat.narrow(0, fragment.matrix_offset, fragment.numel).copy_(source)
            if runner.step_set.world_size > 1:
                dist.all_reduce(flat, group=runner.step_set.group)
            if layout.placement.replicated:
                flat /= runner.step_set.world_size
            full[layout.name] = flat.view(shapes[layout.name])
    return full


def outcome(engine: Any) -> dict[str, Any]:
    """Return masters and optimizer state, assembled by name."""
    keys = {"momentum": "momentum_buffer", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    states = {name: full_states(engine, key) for name, key in keys.items()}
    return {"params": full_masters(engine), **states}


def train_all_or_rest(engine: Any, rank: int, world_size: int, *, folder: str, phase: str) -> dict[str, Any]:
    """Take four steps and save after two (``whole``), or load that and take the last two (``rest``)."""
    if phase == "rest":
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
    for step in range(0 if phase == "whole" else 2, 4):
        run_step(engine, step, rank, world_size, 1)
        if phase == "whole" and step == 1:
            engine.save_checkpoint(folder)
    return outcome(engine)


def cuts_of(engine: Any) -> dict[str, list[int]]:
    """Return the elements of each matrix at which the fragment of another rank begins."""
    cuts = {}
    for runner in deepspeed_muon.muon_optimizer(engine).runners:
        for matrix in runner.step_set.matrices:
            placement = matrix.placement
            fragments = (
                [] if placement.replicated else [placement.fragment_on(rank) for rank in placement.ranks]
            )
            cuts[matrix.name] = [fragment.matrix_offset for fragment in fragments if fragment is not None][1:]
    return cuts


def assert_same_int8_momentum(
    actual: dict[str, Any], expected: dict[str, Any], key: str = "momentum_buffer"
) -> None:
    """Compare int8 momentum of two topologies: the same bits, but in blocks that either cuts within half a code."""
    assert actual[key].keys() == expected[key].keys() and expected[key]
    cut_blocks = 0
    for name, tensor in expected[key].items():
        cuts = {cut // 256 for cut in actual["cuts"][name] + expected["cuts"][name] if cut % 256}
        pairs = zip(actual[key][name].view(-1).split(256), tensor.view(-1).split(256), strict=True)
        for number, (block, reference) in enumerate(pairs):
            limit = float(reference.abs().max()) / 127 * 0.51 if number in cuts else 0.0
            assert float((block - reference).abs().max()) <= limit, (name, number)
        cut_blocks += len(cuts)
    assert cut_blocks, "no block is cut"


def assert_same_bits(actual: dict[str, Any], expected: dict[str, Any], *keys: str) -> None:
    """Fail unless the entries of two reports hold equal tensors under equal names; an empty one fails too."""
    for key in keys or expected:
        assert actual[key].keys() == expected[key].keys() and expected[key], key
        for name, tensor in expected[key].items():
            assert torch.equal(actual[key][name], tensor), (key, name)


def train(
    rank: int,
    world_size: int,
    *,
    stage: int,
    steps: int = STEPS,
    kind: str = "toy",
    accumulation: int = 1,
    zero_init: bool = False,
    exact: bool = True,
    idle_from: int | None = None,
    folder: str = "",
    **settings: Any,
) -> dict[str, Any]:
    """Train and report masters, momentum, gradient norms, losses and the counters of the last step.

    With ``folder``, a new engine takes the second half of the steps, from a checkpoint there.
    """
    config = ds_config(stage, accumulation=accumulation, **settings)
    engine = make_engine(config, kind, zero_init=zero_init, exact=exact)
    optimizer: Muon = deepspeed_muon.muon_optimizer(engine)
    prepared = shapes_chosen(optimizer, ran=False)
    norms, losses = [], []
    for step in range(steps):
        if folder and step == steps // 2:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = make_engine(config, kind, exact=exact)
            assert engine.load_checkpoint(folder)[0] is not None
            optimizer = deepspeed_muon.muon_optimizer(engine)
        if idle_from is not None:
            engine.module.use_idle = step >= idle_from
        optimizer.stats.reset()
        losses.append(run_step(engine, step, rank, world_size, accumulation))
        norms.append(norm_of(engine))
    report = {
        "params": full_masters(engine),
        "momentum": full_states(engine, "momentum_buffer"),
        "norms": norms,
        "losses": losses,
        "bytes_sent": optimizer.stats.bytes_sent,
        "planned_bytes": planned_bytes(optimizer),
        "orthogonalized": optimizer.stats.matrices_orthogonalized,
        "skipped": engine.skipped_steps,
        "shapes": (prepared, shapes_chosen(optimizer, ran=True), shapes_chosen(optimizer, ran=False)),
        # Elements of each matrix, and how many of them travel in both directions together.
        "layout": [
            [matrix.numel, 2 * (matrix.numel - matrix.placement.numel_on(owner))]
            for runner in optimizer.runners
            for matrix, owner in zip(runner.plan.matrices, runner.plan.owners, strict=True)
        ],
    }
    engine.destroy()
    return report


def try_to_start(
    rank: int,
    world_size: int,
    *,
    stage: int,
    common: dict[str, Any] | None = None,
    on_last_rank: dict[str, Any] | None = None,
) -> str:
    """Start an engine whose configuration is changed, or on the last rank only; return the error."""
    changes = {**(common or {}), **(on_last_rank or {} if rank == world_size - 1 else {})}
    config = ds_config(changes.pop("stage", stage), params=changes.pop("params", None))
    return refusal(lambda: make_engine({**config, **changes}).destroy())


def full_rows(engine: Any) -> dict[str, Tensor]:
    """Assemble what the variant keeps for the rows of every matrix from the ranks; empty where there is nothing."""
    optimizer = deepspeed_muon.muon_optimizer(engine)
    full: dict[str, Tensor] = {}
    row_state = VARIANTS[optimizer.config.variant].state
    for runner in optimizer.runners if row_state is not None else ():
        vectors = {p.index: optimizer.state[p.tensor].get(row_state.key) for p in runner.step_set.partitions}
        for origin, matrix in enumerate(runner.step_set.matrices):
            if (vector := vectors[matrix.partition]) is None:
                continue
            rows = torch.zeros(matrix.output_count, dtype=torch.float64)
            pairs = zip(runner.assignment.origin, runner.row_fragments, strict=True)
            for fragment in (fragment for number, fragment in pairs if number == origin):
                if fragment.rank == runner.step_set.rank:
                    stored = vector.narrow(0, fragment.partition_offset, fragment.numel)
                    rows.narrow(0, fragment.matrix_offset, fragment.numel).copy_(stored)
            if runner.step_set.world_size > 1:
                dist.all_reduce(rows, group=runner.step_set.group)
            full[matrix.name] = rows
    return full


def heard() -> list[str]:
    """Return a list that is filled with what this package logs in this rank, until the pool's call ends."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deepspeed_muon").addHandler(handler)
    return messages


EVENTS = {
    "update_rms", "orthogonality_error", "sigma_max", "stable_rank", "alignment",
    "time_gather", "time_newton_schulz", "time_scatter", "seconds", "redone", "failed", "step",
    "update_over_weight",
}  # fmt: skip


def state_bytes(state: Mapping[Any, Mapping[str, Any]]) -> dict[str, int]:
    """Return how many bytes this rank's state tensors take, by key."""
    totals: dict[str, int] = {}
    for tensors in state.values():
        for key, value in tensors.items():
            if isinstance(value, Tensor):
                totals[key] = totals.get(key, 0) + value.numel() * value.element_size()
    return totals
