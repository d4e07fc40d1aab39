"""Tensor-parallel versions of the toy model, and rank functions that train them and assemble the full parameters."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import deepspeed_muon
from deepspeed_muon import QkRecorder
from tests.support import training
from tests.support.attention_models import HEADS, KEY_HEADS, LAYOUTS, WIDTH
from tests.support.contract import STEPS
from tests.support.models import Even, batch, build, with_plain_linears
from tests.support.training import ds_config, shapes_chosen

# What is divided into blocks: every part (the query in heads, key and value whole), also of a layer stored as input x
# output and of one whose inputs are cut.
BLOCKS: dict[str, Any] = {
    "matrices": {
        "*.qkv_proj.weight": {"split": [16, 8, 8], "heads": [4, 1, 1]},
        "*.c_attn.weight": {"split": [16, 16, 16], "heads": [4, 4, 4], "transposed": True},
        "*.o_proj.weight": {"split": [12, 4]},
        "*.gate_up_proj": {"split": "gate_up"},
    }
}


class SomeRanks:
    """The ``mpu`` of an engine that spans some of the ranks; all ranks of the program make it.

    Args:
        *engines: The data-parallel ranks of each engine; a rank in none of them runs no engine.
        models: The ranks that share a model; each rank alone unless given.
        timeout: Of the groups, in seconds; ``None`` for the program's own.
    """

    def __init__(
        self,
        *engines: Sequence[int],
        models: Sequence[Sequence[int]] | None = None,
        timeout: float | None = 60.0,
    ) -> None:
        self.data = self._group_of_this_rank(engines, timeout)
        self.tensor = self._group_of_this_rank(
            models or [[rank] for rank in range(dist.get_world_size())], timeout
        )

    @staticmethod
    def _group_of_this_rank(engines: Sequence[Sequence[int]], timeout: float | None) -> Any:
        limit = None if timeout is None else timedelta(seconds=timeout)
        groups = [dist.new_group(list(members), timeout=limit) for members in engines]
        joined = [group for group, members in zip(groups, engines, strict=True) if dist.get_rank() in members]
        return joined[0] if joined else None

    def get_model_parallel_group(self) -> Any:
        return self.tensor

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.tensor)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.tensor)

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.data)


class Mpu(SomeRanks):
    """The object by which Megatron-style programs tell DeepSpeed their groups: neighbours share a model."""

    def __init__(self, size: int) -> None:
        world = dist.get_world_size()
        models = [range(start, start + size) for start in range(0, world, size)]
        super().__init__(*(range(start, world, size) for start in range(size)), models=models, timeout=None)

    get_tensor_model_parallel_group = SomeRanks.get_model_parallel_group
    get_tensor_model_parallel_rank = SomeRanks.get_model_parallel_rank
    get_tensor_model_parallel_world_size = SomeRanks.get_model_parallel_world_size


class _Enter(torch.autograd.Function):
    """Identity whose gradient is summed over the group: what enters a column-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    """Sum over the group whose gradient passes: what leaves a row-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class ParallelLinear(nn.Module):
    """A Megatron-style linear layer in float64, cut along dimension 0 (column-parallel) or 1 (row-parallel)."""

    def __init__(
        self, weight: Tensor, dim: int, group: Any, *, mark: str = "all", dead: bool = False
    ) -> None:
        super().__init__()
        self.dim, self.group = dim, group
        self.dead = dead and dist.get_rank(group) == 1
        length, size = weight.shape[dim], dist.get_world_size(group)
        sizes = [length // size] * size
        if mark == "uneven" and length == 16:
            sizes = [11, 5]
        shard = weight.detach().split(sizes, dim)[dist.get_rank(group)]
        self.weight = nn.Parameter(shard.clone().contiguous())
        if mark != "none":
            self.weight.tensor_model_parallel = True
        if mark in ("all", "uneven"):
            self.weight.partition_dim = dim

    def forward(self, x: Tensor) -> Tensor:
        if self.dead:
            x = x * 0.0
        if self.dim == 0:
            return F.linear(_Enter.apply(x.double(), self.group), self.weight.double())
        return _Leave.apply(F.linear(x.double(), self.weight.double()), self.group)


def megatron_model(group: Any, *, mark: str = "all", dead: bool = False) -> Even:
    """Cut the blocks of the model over the group; the rest is on every rank."""
    model = build("even")
    for number, block in enumerate(model.blocks):
        block.up = ParallelLinear(block.up.weight, 0, group, mark=mark)
        block.down = ParallelLinear(block.down.weight, 1, group, mark=mark, dead=dead and number == 0)
    return model  # type: ignore[return-value]


class _Collect(torch.autograd.Function):
    """Puts the ranks' outputs together, each at its columns; the gradient of a rank is that of its columns."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Any, positions: list[Tensor]) -> Tensor:
        ctx.positions = positions[dist.get_rank(group)]
        outputs = [torch.empty_like(local) for _ in positions]
        dist.all_gather(outputs, local.contiguous(), group=group)
        full = local.new_empty(*local.shape[:-1], sum(map(len, positions)))
        for columns, output in zip(positions, outputs, strict=True):
            full[..., columns] = output
        return full

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[..., ctx.positions].contiguous(), None, None


class SlicedLinear(nn.Module):
    """A layer of which a rank has slices along a dimension, in any order; its output is complete on every rank.

    So it can replace any layer. Each section, of which there is one by default, is cut over all ranks of the group.
    """

    def __init__(self, layer: nn.Module, dim: int, group: Any, section_sizes: Sequence[int] = ()) -> None:
        super().__init__()
        self.group, self.dim = group, dim
        self.transposed = hasattr(layer, "nf")
        if self.transposed:
            self.nf = layer.nf
        size, length = dist.get_world_size(group), layer.weight.shape[dim]
        sections = torch.arange(length).split(list(section_sizes) or [length])
        self.positions = [
            torch.cat([section.chunk(size)[rank] for section in sections]) for rank in range(size)
        ]
        self.local_positions = self.positions[dist.get_rank(group)]
        self.cuts_output = dim == int(self.transposed)
        self.weight = self._shard(layer.weight, dim, section_sizes)
        bias = getattr(layer, "bias", None)
        self.bias = None if bias is None else self._shard(bias, 0, section_sizes)

    def _shard(self, weight: Tensor, dim: int, section_sizes: Sequence[int]) -> nn.Parameter:
        param = nn.Parameter(weight.detach().index_select(dim, self.local_positions).clone())
        param.tensor_model_parallel = True
        param.partition_dim = dim
        if len(set(section_sizes)) > 1:
            param.partition_sizes = tuple(section_sizes)
        else:
            param.partition_stride = len(section_sizes) or 1
        param.positions = self.positions
        return param

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.double()
        weight = weight.mT if self.transposed else weight
        x = _Enter.apply(x.double(), self.group)
        if not self.cuts_output:
            return _Leave.apply(F.linear(x[..., self.local_positions], weight), self.group)
        bias = None if self.bias is None else self.bias.double()
        return _Collect.apply(F.linear(x, weight, bias), self.group, self.positions)


class LocalRecorder(QkRecorder):
    """A recorder of this rank's heads, of a module that computes those of all ranks."""

    rank = 0

    def record(self, query: Tensor, key: Tensor, **settings: Any) -> None:
        share = key.shape[1] * self.heads // query.shape[1]
        query, key = query.split(self.heads, 1)[self.rank], key.split(share, 1)[self.rank]
        super().record(query, key, **settings)


SLICED: dict[str, dict[str, tuple[int, tuple[int, ...]]]] = {
    "fused": {
        "self_attn.qkv_proj": (0, (16, 8, 8)),
        "self_attn.c_attn": (1, (16, 16, 16)),
        "self_attn.o_proj": (1, ()),
        "blocks.0.up": (0, ()),
        "blocks.0.down": (1, ()),
    },
    "heads": {f"self_attn.{letter}_proj": (int(letter == "o"), ()) for letter in "qko"},
    "grouped": {f"attn.{letter}_proj": (int(letter == "o"), ()) for letter in "qkvo"},
    "fused_attention": {"attn.qkv": (0, (16, 8, 8)), "attn.o_proj": (1, ())},
}
"""The layers that are cut: the dimension, and the sizes of the sections that are cut one by one."""


def sliced_model(kind: str, group: Any) -> nn.Module:
    """Cut layers of a model over the group; the rest is on every rank."""
    model = build(kind)
    for name, (dim, section_sizes) in SLICED[kind].items():
        parent, _, child = name.rpartition(".")
        layer = SlicedLinear(model.get_submodule(name), dim, group, section_sizes)
        setattr(model.get_submodule(parent), child, layer)
    if kind in LAYOUTS:
        size = dist.get_world_size(group)
        shape = {"heads": HEADS // size, "key_heads": KEY_HEADS // size, "head_dim": WIDTH}
        if kind == "grouped":
            model.attn.recorder = LocalRecorder.separate(**shape)
        else:
            model.attn.recorder = LocalRecorder.fused("qkv", **shape)
        model.attn.recorder.rank = dist.get_rank(group)
    return model


def plain_linears() -> Even:
    """Return the model with layers that AutoTP can replace; it computes in the weights' dtype."""
    model: Even = with_plain_linears(build("even"))
    model.exact = False
    return model


def autotp(size: int, *, halves: bool = False) -> dict[str, Any]:
    """Return the section ``tensor_parallel`` of a configuration.

    With ``halves``, two parts of each up projection are cut one by one, and the inputs of the down projection likewise.
    """
    up: dict[str, Any] = {"patterns": [r".*\.up\.weight$"], "partition_type": "column"}
    down: dict[str, Any] = {"patterns": [r".*\.down\.weight$"], "partition_type": "row"}
    if halves:
        up["shape"], down["shape"] = [2, -1], [-1, 2]
    return {
        "autotp_size": size,
        "partition_config": {"use_default_specs": False, "layer_specs": [up, down]},
    }


def make_engine(
    style: str,
    tensor_size: int,
    config: dict[str, Any],
    *,
    mark: str = "all",
    dead: bool = False,
    kind: str = "even",
    client: str = "",
) -> Any:
    mpu: Mpu | None = None
    if style.startswith("autotp"):
        config["tensor_parallel"] = autotp(tensor_size, halves=style == "autotp-halves")
        model: nn.Module = plain_linears()
        if client == "zero.Init":
            deepspeed.zero.Init(module=model, config_dict_or_path=config)
    else:
        mpu = Mpu(tensor_size)
        if style == "sliced":
            model = sliced_model(kind, mpu.tensor)
        else:
            model = megatron_model(mpu.tensor, mark=mark, dead=dead)
    if client:
        settings = config.pop("optimizer")["params"]
        return training.initialize(model, config, mpu=mpu, optimizer=deepspeed_muon.Muon(model, **settings))
    return training.initialize(model, config, mpu=mpu)


def assembled(engine: Any, key: str | None, group: Any) -> dict[str, Tensor]:
    """Return full masters or states: over the data-parallel ranks by the layouts, then over the shards."""
    local_tensors = training.full_masters(engine) if key is None else training.full_states(engine, key)
    runners = deepspeed_muon.muon_optimizer(engine).runners
    cuts = {matrix.name: matrix.tp_shards for runner in runners for matrix in runner.step_set.matrices}
    full: dict[str, Tensor] = {}
    for name, local in local_tensors.items():
        shards = [local]
        if group is not None:
            shards = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
            dist.all_gather(shards, local, group=group)
        param, cut = engine.module.get_parameter(name), cuts.get(name)
        if hasattr(param, "positions"):
            positions = torch.cat(param.positions)
            full[name] = torch.cat(shards, param.partition_dim).index_select(
                param.partition_dim, positions.argsort()
            )
        elif cut is not None and cut.dim is not None:
            full[name] = torch.cat(shards, dim=cut.dim)
        else:
            assert all(torch.equal(shard, shards[0]) for shard in shards), f"{name}: the copies differ"
            full[name] = shards[0]
    return full


def train(
    rank: int,
    world_size: int,
    *,
    style: str = "megatron",
    tensor_size: int = 2,
    stage: int = 1,
    steps: int = STEPS,
    accumulation: int = 1,
    params: dict[str, Any] | None = None,
    mark: str = "all",
    dead: bool = False,
    checkpoint: str | None = None,
    kind: str = "even",
    client: str = "",
    **settings: Any,
) -> dict[str, Any]:
    """Train and report whole masters and momentum, norms and counters; with a checkpoint, save and load in between.

    With ``client`` the program makes the optimizer before the engine; if it is ``zero.Init`` the model is made there.
    """
    config = ds_config(stage, accumulation=accumulation, params=params, **settings)
    model = {"mark": mark, "dead": dead, "kind": kind}
    engine = make_engine(style, tensor_size, config, client=client, **model)
    prepared = shapes_chosen(deepspeed_muon.muon_optimizer(engine), ran=False)
    norms, count = [], 0
    largest, clipped = [], []
    for step in range(steps):
        if checkpoint is not None and step == steps // 2:
            engine.save_checkpoint(checkpoint, tag="half")
            engine.destroy()
            engine = make_engine(style, tensor_size, config, **model)
            engine.load_checkpoint(checkpoint, tag="half")
        optimizer = deepspeed_muon.muon_optimizer(engine)
        optimizer.stats.reset()
        for micro in range(accumulation):
            number = micro * (world_size // tensor_size) + rank // tensor_size
            engine.backward(engine(*batch(step, number)))
            engine.step()
        count = optimizer.stats.matrices_orthogonalized
        norms.append(float(engine.get_global_grad_norm()))
        if optimizer.after_step is not None:
            largest.append(optimizer.after_step.report.largest["attn"])
            clipped.append(optimizer.after_step.report.clipped)
    optimizer = deepspeed_muon.muon_optimizer(engine)
    group = optimizer.runners[0].step_set.tensor_group
    return {
        "shapes": (prepared, shapes_chosen(optimizer, ran=True), shapes_chosen(optimizer, ran=False)),
        "params": assembled(engine, None, group),
        "momentum": assembled(engine, "momentum_buffer", group),
        "norms": norms,
        "orthogonalized": count,
        "largest": largest,
        "clipped": clipped,
    }


def failing(rank: int, world_size: int, **arguments: Any) -> str:
    """Return what ``train`` raised."""
    return training.refusal(lambda: train(rank, world_size, **arguments))
