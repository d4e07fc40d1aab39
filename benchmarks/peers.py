"""Dion's distributed Muon under torch's FSDP2, as an engine of ``benchmarks/optimizer_step.py``.

Needs a checkout of https://github.com/microsoft/dion on ``PYTHONPATH``. It compiles parts of its step with
``torch.compile``, which on a CPU takes a C++ compiler. torchtitan's DistMuon accepts CUDA devices only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


class FullyShardedDion:
    """A model under FSDP2 with Dion's Muon, with the calls of a DeepSpeed engine.

    Weights are bf16 copies of fp32 shards and gradients are reduced in bf16, as DeepSpeed does at stage 3.
    """

    basic_optimizer = None

    def __init__(self, model: nn.Module, accumulation: int, device: str) -> None:
        """Shard the model in place.

        Args:
            model: The same weights on every rank, in fp32. Its ``layers``, which are gathered one by one, hold the
                matrices for Muon.
            accumulation: Micro-batches in a step.
            device: ``"cpu"`` or ``"cuda"``.
        """
        layers = list(model.layers)
        # Importing FSDP2 takes seconds, which only a run of Dion is to pay.
        import dion
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.model = model.to(device)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for layer in (*layers, model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        matrices = [p for layer in layers for p in layer.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw"}]
        self.optimizer = dion.Muon(groups, distributed_mesh=mesh, lr=0.0, weight_decay=0.0, nesterov=True)
        self._accumulation = accumulation
        self._micro_batches = 0

    def __call__(self, batch: Tensor) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.model(batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Add to the sharded gradients."""
        (loss / self._accumulation).backward()

    def step(self) -> None:
        """Update the weights with the last micro-batch of a step."""
        self._micro_batches += 1
        if self._micro_batches % self._accumulation == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def destroy(self) -> None:
        """Release the model."""
        self.optimizer.state.clear()
        del self.model, self.optimizer
