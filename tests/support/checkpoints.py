"""Rank functions that save and load checkpoints between topologies, their comparison, and edits of sealed files."""

from __future__ import annotations

import contextlib
import json
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import deepspeed_muon
from deepspeed_muon.checkpoint import consolidate, restore
from deepspeed_muon.checkpoint.consolidate import ShardFile, shard_name
from deepspeed_muon.checkpoint.index import FORMAT, FileLayout, sealed_json
from deepspeed_muon.logs import logger
from tests.support import training
from tests.support.models import MATRICES, batch

BATCHES = 12
"""Batches of a step over all ranks, of which there are up to 4."""


STATES = ("momentum_buffer", "exp_avg", "exp_avg_sq")


CODES = {"momentum_dtype": "int8"}


NORMUON = {"variant": "normuon"}


def converter_options(source: Path, target: Path, *, missing_state: bool = True) -> types.SimpleNamespace:
    """Return what ``ds_to_universal.main`` takes; ``missing_state``: fill in a state that it does not find."""
    return types.SimpleNamespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=missing_state,
    )


@contextlib.contextmanager
def on_every_stage(act: Callable[[str], None]) -> Iterator[None]:
    """Call ``act`` with the stage of the save whenever the log names one."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg.startswith("deepspeed_muon: save to") and isinstance(record.args, tuple):
                act(str(record.args[1]))

    listener, level = Listener(), logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)


def tensors_of(folder: Path) -> dict[str, Any]:
    """Return the tensors of all safetensors files of a folder."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def report(engine: Any) -> dict[str, Any]:
    """Masters and optimizer state by name, and the rates."""
    return {
        "fp32": training.full_masters(engine),
        **{key: training.full_states(engine, key) for key in STATES},
        "rates": [float(group["lr"]) for group in engine.basic_optimizer.param_groups],
        "steps": sorted({int(s["step"]) for s in engine.basic_optimizer.state.values() if "step" in s}),
        "global_steps": engine.global_steps,
        "cuts": training.cuts_of(engine),
        "rows": training.full_rows(engine),
    }


def probe(engine: Any) -> float:
    """Return the loss of a batch that is the same everywhere."""
    engine.eval()
    with torch.no_grad():
        loss = float(engine(*batch(99, 0)))
    engine.train()
    return loss


def engine_for(
    stage: int, *, seed: int, kind: str = "toy", channels_last: bool = False, **settings: Any
) -> Any:
    config = training.ds_config(stage, clipping=0.5, **settings)
    warmup = {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 8, "warmup_type": "linear"},
    }
    config.setdefault("scheduler", warmup)
    engine = training.make_engine(config, kind, seed=seed)
    for param in engine.module.parameters() if channels_last else ():
        if param.ndim == 4:  # now, since DeepSpeed does not broadcast weights of such strides
            param.data = param.data.to(memory_format=torch.channels_last)
            assert not param.is_contiguous()
    return engine


def train_step(engine: Any, step: int, rank: int, world_size: int) -> None:
    """Take one step; the ranks see the same data whatever their number, since each joins its share of the batches."""
    share = BATCHES // world_size
    joined = zip(*(batch(step, micro) for micro in range(rank * share, (rank + 1) * share)), strict=True)
    engine.backward(engine(*map(torch.cat, joined)))
    engine.step()


def trained_for(
    rank: int, world_size: int, stage: int, steps: int = 2, *, seed: int = 0, **settings: Any
) -> Any:
    """Return an engine after its first steps."""
    engine = engine_for(stage, seed=seed, **settings)
    for step in range(steps):
        train_step(engine, step, rank, world_size)
    return engine


def report_and_go_on(engine: Any, step: int, rank: int, world_size: int) -> dict[str, Any]:
    """Report what an engine holds, its loss now and after one more step."""
    result = report(engine)
    result["loss"] = probe(engine)
    train_step(engine, step, rank, world_size)
    result["next_loss"] = probe(engine)
    return result


def save(
    rank: int, world_size: int, *, folder: str, stage: int, steps: int = 2, **settings: Any
) -> dict[str, Any]:
    engine = trained_for(rank, world_size, stage, steps, **settings)
    consolidate(engine, folder, shard_bytes=4000)
    return report_and_go_on(engine, steps, rank, world_size)


def load(
    rank: int, world_size: int, *, folder: str, stage: int, steps: int = 2, trained: int = 0, **settings: Any
) -> dict[str, Any]:
    engine = engine_for(stage, seed=7, **settings)
    for step in range(trained):
        train_step(engine, 50 + step, rank, world_size)
    restore(engine, folder)
    return report_and_go_on(engine, steps, rank, world_size)


# The restored weights are equal, so the loss before the next step is too. In that step gradients are summed over other
# ranks and rows in another order: 2^-24 relative for each of some additions, enlarged by Newton-Schulz where singular
# values are small. The weights then differ in their last bits, which a loss of some hundred terms averages. Measured
# over the trimmed set: at most 1.6e-8, and 1.3e-5 with half-precision gradients and forward passes.
NEXT_LOSS, NEXT_LOSS_HALF, NEXT_LOSS_INT8 = 1e-7, 1e-3, 1e-4


def assert_equal(
    saved: dict[str, Any], loaded: dict[str, Any], settings: Mapping[str, Any] | None = None
) -> None:
    """Compare what was saved with what was loaded into an engine with the same ``settings``."""
    is_int8 = (settings or {}).get("params", {}).get("momentum_dtype") == "int8"
    is_half = "precision" in (settings or {})
    if is_int8:
        training.assert_same_int8_momentum(loaded, saved)
        loaded = {**loaded, "momentum_buffer": saved["momentum_buffer"]}
    # Before the first step there is no state, and rows are a variant's.
    keys = (key for key in (*STATES, "rows") if saved[key] or loaded[key])
    training.assert_same_bits(loaded, saved, "fp32", *keys)
    for key in ("rates", "steps", "global_steps"):
        assert saved[key] == loaded[key], key
    assert loaded["loss"] == pytest.approx(saved["loss"], rel=1e-6)
    next_loss = NEXT_LOSS_HALF if is_half else NEXT_LOSS_INT8 if is_int8 else NEXT_LOSS
    assert loaded["next_loss"] == pytest.approx(saved["next_loss"], rel=next_loss)


SMALL = {"sub_group_size": 200}


ROUND = {"round_robin_gradients": True}


PERSISTENT = {"stage3_param_persistence_threshold": 300}


def save_ours(
    rank: int, world_size: int, *, folder: str, stage: int, tag: str | None = None, **settings: Any
) -> Any:
    engine = trained_for(rank, world_size, stage, **settings)
    engine.save_checkpoint(folder, tag=tag)
    return report_and_go_on(engine, 2, rank, world_size)


def save_foreign(
    rank: int,
    world_size: int,
    *,
    folder: str,
    optimizer: str,
    stage: int,
    zero: Any,
    precision: str = "fp32",
    extra: Any = None,
    kind: str = "toy",
) -> Any:
    """Train with DeepSpeed's own Muon or AdamW; return what DeepSpeed itself says of weights and state."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    deepspeed_muon.unregister()
    try:
        zero = dict(zero, **({"reduce_scatter": False} if optimizer == "Muon" and stage == 3 else {}))
        config = training.ds_config(stage, zero=zero, precision=precision, clipping=0.5, extra=extra)
        params: dict[str, Any] = {"lr": 1e-3, "torch_adam": True, "betas": [0.8, 0.95]}
        if optimizer == "Muon":
            params["momentum"] = 0.8
        config["optimizer"] = {"type": optimizer, "params": params}
        engine = training.make_engine(config, kind, exact=precision == "fp32")
        # DeepSpeed compiles its iteration, which takes longer than all else here.
        with torch._dynamo.config.patch(disable=True):
            training.train_steps(engine, 2, rank, world_size)
        engine.save_checkpoint(folder)
        result: dict[str, Any] = {"fp32": {}, "momentum": {}, "exp_avg_sq": {}}
        for name, param in engine.module.named_parameters():
            if stage == 0:
                result["fp32"][name] = param.detach().clone()
                state = engine.optimizer.state[param]
                result["momentum"][name] = state["exp_avg"].clone()
                result["exp_avg_sq"][name] = state["exp_avg_sq"].clone()
                continue
            result["fp32"][name] = safe_get_full_fp32_param(param).clone()
            if optimizer == "Muon" and stage < 3:
                continue  # DeepSpeed cannot say
            muon = optimizer == "Muon" and name in MATRICES[kind]
            key = "momentum_buffer" if muon else "exp_avg"
            result["momentum"][name] = safe_get_full_optimizer_state(param, key).clone()
            if not muon:
                result["exp_avg_sq"][name] = safe_get_full_optimizer_state(param, "exp_avg_sq").clone()
        engine.destroy()
        return result
    finally:
        deepspeed_muon.register()


INDEX = "muon_index.json"
FILE = shard_name("0123456789ab", 0)


def save_as_deepspeed(model: torch.nn.Module, folder: Path) -> None:
    """Write what DeepSpeed saves of a model at stage 0 after one step of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    folder.mkdir()
    content = {"module": model.state_dict(), "optimizer": optimizer.state_dict(), "global_steps": 1}
    torch.save(content, folder / "mp_rank_00_model_states.pt")


def write_set(
    folder: Path,
    names: Sequence[str] = ("w",),
    *,
    momentum: torch.Tensor | None = None,
    groups: Sequence[dict[str, Any]] = ({"lr": 0.1},),
    **progress: Any,
) -> Path:
    """Write a set of matrices of 4 x 3, without an engine; return its shard."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{key}/{name}": (4, 3) for name in names for key in ("fp32", "momentum_buffer")}
    shard = ShardFile(folder / FILE, FileLayout.of(tensors))
    shard.write(torch.arange(12.0 * (2 * len(names) - 1)))
    shard.write(torch.arange(12.0) if momentum is None else momentum)
    record = shard.finish()
    entry = {"shape": [4, 3], "algorithm": "muon", "step": 3, "group": 0}
    document = {
        "format": FORMAT,
        "versions": {},
        "groups": list(groups),
        "files": {FILE: record.model_dump()},
        "progress": progress,
        "parameters": {name: {**entry, "tensors": {"fp32": FILE, "momentum_buffer": FILE}} for name in names},
    }
    (folder / INDEX).write_bytes(sealed_json(document))
    return folder / FILE


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a sealed document as somebody would who knows how it is sealed."""
    content = json.loads(path.read_text())
    change(content)
    path.write_bytes(sealed_json(content))
