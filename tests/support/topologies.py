"""Models under every kind of parallelism, saved at one topology and loaded at another, and the whole tensors of each.

The whole tensors are put together here from what the engines hold, by what the tests know of the models. Nothing of
this project's checkpoints takes part in it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed_muon
from deepspeed_muon.checkpoint import consolidate, restore
from tests.support import autoep_models, pipelines, tensor_parallel, training
from tests.support.checkpoints import STATES
from tests.support.models import batch, build
from tests.support.moe_models import EXPERTS, build_deepspeed, global_name

KEYS = ("fp32", *STATES)


def _split_engine(world_size: int, rank: int, topology: dict[str, Any], config: dict[str, Any]) -> Any:
    """Return an engine whose weights are not those that were saved, but for constants."""
    kind, size = topology["kind"], topology["size"]
    mpu: Any = None
    if kind == "experts":
        model: Any = build_deepspeed(size, rank % size)
    elif kind == "autoep":
        config["expert_parallel"] = autoep_models.autoep_config(size)
        model = autoep_models.build_source()
    elif kind == "pipeline":
        model, _ = pipelines.make_pipeline(topology.get("model", "tied"), size)
    elif kind == "autotp":
        config["tensor_parallel"] = tensor_parallel.autotp(size)
        model = tensor_parallel.plain_linears()
    elif kind == "megatron":
        mpu = tensor_parallel.Mpu(size)
        mark = topology.get("mark", "all")
        model = tensor_parallel.megatron_model(mpu.tensor, mark="all" if mark == "fused" else mark)
        if mark == "fused":
            _fuse(model, mpu.tensor)
    else:
        model = build("even")
    if topology.get("disturb"):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.5)
    engine = training.initialize(model, config, mpu=mpu)
    if kind == "autoep":
        autoep_models.compute_exactly(engine.module)
    return engine


def _config(topology: dict[str, Any]) -> dict[str, Any]:
    pipeline = topology["kind"] == "pipeline"
    accumulation = pipelines.MICRO_BATCHES if pipeline else 1
    settings = {key: topology[key] for key in ("params", "zero", "extra") if key in topology}
    return training.ds_config(topology["stage"], accumulation=accumulation, clipping=0.5, **settings)


def _step(engine: Any, step: int, rank: int, world_size: int, topology: dict[str, Any]) -> None:
    size = topology["size"]
    if topology["kind"] == "pipeline":
        pipelines.run_step(engine, step, world_size // size)
    elif topology["kind"] in ("autotp", "megatron"):
        engine.backward(engine(*batch(step, rank // size)))
        engine.step()
    else:
        training.run_step(engine, step, rank, world_size, 1)


def _fuse(model: Any, group: Any) -> None:
    """Let each matrix that is cut consist of two halves, and give each rank its share of both."""
    full = dict(build("even").named_parameters())
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for name, param in model.named_parameters():
        if getattr(param, "tensor_model_parallel", False):
            dim = param.partition_dim
            halves = full[name].detach().chunk(2, dim)
            param.data.copy_(torch.cat([half.chunk(size, dim)[rank] for half in halves], dim))
            if dim == 0:
                param.partition_sizes = (halves[0].shape[0], halves[1].shape[0])
            else:
                param.partition_stride = 2


def _full(engine: Any, rank: int, topology: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return full masters and states by name: all that this rank can tell."""
    kind, size = topology["kind"], topology["size"]
    tensors = {
        "fp32": training.full_masters(engine),
        **{key: training.full_states(engine, key) for key in STATES},
    }
    if kind == "experts":
        first = (rank % size) * (EXPERTS // size)
        return {k: {global_name(n, first): v for n, v in values.items()} for k, values in tensors.items()}
    if kind == "autoep":
        layer = engine.module.model.layers[0].mlp
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (layer.ep_rank, tensors))
        shares = [share for _, share in sorted(dict(gathered).items())]
        for key, values in tensors.items():
            for name in values.keys() & autoep_models.STACKS:
                values[name] = torch.cat([share[key][name] for share in shares])
    if kind in ("autotp", "megatron") and size > 1:
        group = deepspeed_muon.muon_optimizer(engine).runners[0].step_set.tensor_group
        gathered = [None] * size
        dist.all_gather_object(gathered, tensors, group=group)
        is_fused = topology.get("mark") == "fused"
        for key, values in tensors.items():
            for name in values:
                values[name] = _joined(name, [share[key][name] for share in gathered], is_fused)
    return tensors


def _joined(name: str, shards: list[Tensor], is_fused: bool) -> Tensor:
    """Return the full tensor of the model "even", whose layers ``up`` and ``down`` are cut."""
    dim = 0 if ".up." in name else 1 if ".down." in name else None
    if dim is None:
        assert all(torch.equal(shard, shards[0]) for shard in shards), name
        return shards[0]
    halves = zip(*(shard.chunk(2 if is_fused else 1, dim) for shard in shards), strict=True)
    return torch.cat([shard for half in halves for shard in half], dim)


def _report(engine: Any, rank: int, topology: dict[str, Any]) -> dict[str, Any]:
    optimizer = deepspeed_muon.muon_optimizer(engine)
    return {
        **_full(engine, rank, topology),
        "rates": sorted({(g["algorithm"], float(g["lr"])) for g in optimizer.param_groups}),
        "steps": sorted({int(s["step"]) for s in optimizer.state.values() if "step" in s}),
        "global_steps": engine.global_steps,
    }


def save(rank: int, world_size: int, *, folder: str, topology: dict[str, Any]) -> Any:
    """Train, save by the API into ``set`` and by DeepSpeed into ``saved``, and train one step more."""
    engine = _split_engine(world_size, rank, topology, _config(topology))
    for step in range(2):
        _step(engine, step, rank, world_size, topology)
    consolidate(engine, f"{folder}/set", shard_bytes=2000)
    engine.save_checkpoint(f"{folder}/saved", tag="t")
    report = _report(engine, rank, topology)
    _step(engine, 2, rank, world_size, topology)
    report["next"] = _full(engine, rank, topology)["fp32"]
    return report


def load(
    rank: int,
    world_size: int,
    *,
    folders: list[str],
    topology: dict[str, Any],
    universal: bool = False,
    again: str | None = None,
) -> Any:
    """Restore each set into one engine, one after the other, and train one step; report both states.

    ``universal``: they are universal checkpoints. ``again``: the folder to consolidate into what was restored.
    """
    topology = {**topology, "disturb": True}
    if universal:
        topology["extra"] = {"checkpoint": {"load_universal": True}}
    engine = _split_engine(world_size, rank, topology, _config(topology))
    reports = []
    for folder in folders:
        if universal:
            path, _ = engine.load_checkpoint(folder)
            assert path is not None
        else:
            restore(engine, folder)
        report = _report(engine, rank, topology)
        if again is not None:
            consolidate(engine, again, shard_bytes=2000)
        _step(engine, 2, rank, world_size, topology)
        report["next"] = _full(engine, rank, topology)["fp32"]
        reports.append(report)
    return reports


def together(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the reports of all ranks together; copies of a tensor must be equal."""
    joined: dict[str, Any] = {key: {} for key in (*KEYS, "next")}
    for report in reports:
        for key, tensors in joined.items():
            for name, value in report.get(key, {}).items():
                assert torch.equal(tensors.setdefault(name, value), value), (key, name)
    for key in ("steps", "global_steps"):
        assert all(report[key] == reports[0][key] for report in reports), key
        joined[key] = reports[0][key]
    joined["rates"] = sorted({tuple(rate) for report in reports for rate in report["rates"]})
    return joined


def assert_same_state(loaded: dict[str, Any], saved: dict[str, Any]) -> None:
    """Fail unless masters, momentum and moments are the same bits, and counters and rates are equal."""
    training.assert_same_bits(loaded, saved, *KEYS)
    for key in ("steps", "global_steps", "rates"):
        assert saved[key] == loaded[key], key


def failing(rank: int, world_size: int, *, folder: str, topology: dict[str, Any]) -> str:
    """Return what ``consolidate`` raised."""
    engine = _split_engine(world_size, rank, topology, _config(topology))
    _step(engine, 0, rank, world_size, topology)
    return training.refusal(lambda: consolidate(engine, folder))
