"""``DEEPSPEED_MUON=1 deepspeed script.py``: a script that knows nothing of this project."""

from __future__ import annotations

from pathlib import Path

from tests.support.harness import free_port, run_command

SCRIPT = """
import argparse
import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--rate", type=float)
options = parser.parse_args()

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Muon", "params": {"lr": options.rate}},
    "zero_optimization": {"stage": 2},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
loss = engine(torch.ones(2, 8)).square().mean()
engine.backward(loss)
engine.step()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
kind = type(engine.basic_optimizer)
print(f"RESULT {kind.__module__}.{kind.__name__} {engine.basic_optimizer.param_groups[0]['lr']}", flush=True)
"""


def test_script_that_cannot_be_edited(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = ["deepspeed", "--num_accelerators", "1", "--master_port", str(free_port())]
    done = run_command([*launcher, str(script), "--rate", "0.03"], env={"DEEPSPEED_MUON": "1"})
    assert "RESULT deepspeed_muon.optimizer.Muon 0.03" in done.stdout, done.stdout
