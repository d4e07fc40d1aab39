"""A training script for Lightning's Fabric that knows nothing of deepspeed_muon: ``lightning_fabric.py ds.json``."""

from __future__ import annotations

import sys

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy

torch.manual_seed(0)
fabric = Fabric(accelerator="auto", devices=2, strategy=DeepSpeedStrategy(config=sys.argv[1]))
fabric.launch()
with fabric.init_module():
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
# Without an optimizer of the program, DeepSpeed makes the one that its configuration names.
model = fabric.setup(model)
inputs = torch.randn(4, 32)
for step in range(8):
    loss = (model(inputs) - inputs.flip(-1)).square().mean()
    fabric.backward(loss)
    fabric.strategy.model.step()
    if fabric.global_rank == 0:
        print(f"step {step} loss: {loss.item():.4f}", flush=True)
fabric.barrier()  # no rank leaves while another one still uses the process group
torch.distributed.destroy_process_group()
