"""A training script for Lightning's Trainer that knows nothing of deepspeed_muon; call it with ds.json and a folder."""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))

    def training_step(self, batch: Any, number: int) -> Any:
        loss = (self.net(batch[0]) - batch[0].flip(-1)).square().mean()
        if self.global_rank == 0:
            print(f"step {number} loss: {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> None:
        """The configuration of DeepSpeed names the optimizer."""


config, folder = sys.argv[1:]
torch.manual_seed(0)
# One batch again and again, so that its loss falls.
data = torch.utils.data.TensorDataset(torch.randn(4, 32).repeat(16, 1))
trainer = lightning.Trainer(
    accelerator="auto",
    devices=2,
    strategy=DeepSpeedStrategy(config=config),
    max_steps=8,
    default_root_dir=folder,
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=4))
trainer.strategy.barrier()  # no rank leaves while another one still uses the process group
torch.distributed.destroy_process_group()
