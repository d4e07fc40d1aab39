"""A training script for plain DeepSpeed that knows nothing of deepspeed_muon."""

from __future__ import annotations

import argparse
import os

import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
deepspeed.add_config_arguments(parser)
options = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
engine, *_ = deepspeed.initialize(args=options, model=model, model_parameters=model.parameters())
inputs = torch.randn(4, 32)
for step in range(8):
    loss = (engine(inputs) - inputs.flip(-1)).square().mean()
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print(f"step {step} loss: {loss.item():.4f}", flush=True)
torch.distributed.barrier()  # no rank leaves while another one still uses the process group
torch.distributed.destroy_process_group()
