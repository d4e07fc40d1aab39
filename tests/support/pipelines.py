"""The toy model under DeepSpeed's pipeline engine."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn
from torch.nn import functional as F

import deepspeed_muon
from tests.support import training
from tests.support.contract import STEPS
from tests.support.models import VOCAB, Block, batch, build
from tests.support.tensor_parallel import SlicedLinear, assembled

MICRO_BATCHES = 2


class Embed(nn.Embedding):
    """The toy model's embedding, whose output is float64 as its layers want it."""

    def __init__(self) -> None:
        super().__init__(VOCAB, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).double()


def as_head(embedding: Embed, x: Tensor) -> Tensor:
    return F.linear(x, embedding.weight.double())


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten())


def make_pipeline(kind: str, stages: int, tensor: int = 1) -> tuple[Any, dict[str, str]]:
    """Lay the toy model out as a pipeline; return it with the toy model's name of each parameter name.

    With ``tensor`` above 1, the blocks whose sizes allow it are cut over so many ranks of each stage.
    """
    toy = build(kind)
    blocks = [*toy.blocks, *([toy.thin] if toy.thin is not None else [])]
    if kind == "tied":
        layers = [
            TiedLayerSpec("shared", Embed),
            *blocks,
            TiedLayerSpec("shared", Embed, forward_fn=as_head),
        ]
    else:
        layers = [Embed(), *blocks, toy.lm_head]
        layers[0].weight = toy.embed.weight
    topology = None
    if tensor > 1:
        data = dist.get_world_size() // (stages * tensor)
        topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=data)
    pipeline = PipelineModule(
        layers,
        num_stages=None if topology else stages,
        topology=topology,
        loss_fn=loss,
        partition_method="uniform",
    )
    for layer in pipeline.forward_funcs if tensor > 1 else ():
        if isinstance(layer, Block) and len(layer.up.weight) % tensor == 0:
            group = pipeline._grid.get_slice_parallel_group()
            layer.up, layer.down = SlicedLinear(layer.up, 0, group), SlicedLinear(layer.down, 1, group)
    if kind == "tied" and "shared" in pipeline.tied_modules:
        pipeline.tied_modules["shared"].weight.data.copy_(toy.embed.weight.data)
    names = {"0.weight": "embed.weight", "tied_modules.shared.weight": "embed.weight"}
    names[f"{len(blocks) + 1}.weight"] = "lm_head.weight"
    for number, block in enumerate(blocks, 1):
        block_name = "thin" if block is toy.thin else f"blocks.{number - 1}"
        names.update({f"{number}.{name}": f"{block_name}.{name}" for name, _ in block.named_parameters()})
    return pipeline, names


def run_step(engine: Any, step: int, replicas: int) -> None:
    """Run the micro-batches of one step through the pipeline."""
    replica = engine.grid.get_data_parallel_id()
    micros = [batch(step, micro * replicas + replica) for micro in range(MICRO_BATCHES)]
    engine.train_batch(iter(micros))


def train(
    rank: int,
    world_size: int,
    *,
    kind: str,
    stages: int,
    zero: int,
    precision: str = "fp32",
    params: dict[str, Any] | None = None,
    clipping: float = 0.5,
    tensor: int = 1,
) -> dict[str, Any]:
    """Train with ``engine.train_batch``; report what this rank's stage holds under the toy model's names."""
    pipeline, names = make_pipeline(kind, stages, tensor)
    config = training.ds_config(
        zero, accumulation=MICRO_BATCHES, clipping=clipping, precision=precision, params=params
    )
    trainable = [param for param in pipeline.parameters() if param.requires_grad]
    try:
        engine, *_ = deepspeed.initialize(model=pipeline, model_parameters=trainable, config=config)
    except deepspeed_muon.MuonError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    norms = []
    for step in range(STEPS):
        run_step(engine, step, world_size // (stages * tensor))
        norms.append(float(engine.get_global_grad_norm()))
    if tensor > 1:
        group = engine.grid.get_slice_parallel_group()
        masters, momentum = (assembled(engine, key, group) for key in (None, "momentum_buffer"))
    else:
        masters = training.full_masters(engine)
        momentum = training.full_states(engine, "momentum_buffer")
    return {
        "params": {names[name]: value for name, value in masters.items()},
        "momentum": {names[name]: value for name, value in momentum.items()},
        "routes": {names[route.name]: route.reason for route in deepspeed_muon.routes(engine)},
        "norms": norms,
        "sharers": deepspeed_muon.muon_optimizer(engine).runners[0].step_set.world_size,
    }
