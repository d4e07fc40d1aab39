"""Runs whose diagnosis is known: ten that go well, and some that were made to go wrong in one way.

``benchmarks/diagnosis.py`` trains all of them for 200 steps, and the tests some of them for fewer.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import deepspeed_muon
from tests.support import training

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from gpt import GPT, GPTConfig, Linear, SwiGLU
from text_data import Batches, load_tokens, standard_library

DIM, LAYERS, LENGTH, SEQUENCES = 64, 2, 64, 4
RANKS = 2
WARMUP = 0.05
"""Of the steps; then a cosine to a tenth of the rates."""


@dataclass(frozen=True)
class Run:
    """Settings of a run.

    Attributes:
        stage: Of ZeRO.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        params: Of the optimizer, beside a weight decay of 0.1.
        clipping: The norm to which gradients are clipped.
        mixture: Whether the MLPs are mixtures of experts.
        extra: Further sections of the configuration.
        finding: The key of the finding that names what is wrong; empty for a good run.
    """

    stage: int = 0
    precision: str = "fp32"
    params: dict[str, Any] = field(default_factory=dict)
    clipping: float = 1.0
    mixture: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    finding: str = ""


_ORIGINAL = {"muon_lr": 0.02, "adam_lr": 3e-3}
_MATCHED = {"lr": 6e-3, "muon_lr": None, "adam_lr": None, "adjust_lr_fn": "match_rms_adamw"}
_HYPERBALL = {"muon_lr": 0.03, "adam_lr": 3e-3, "variant": "hyperball", "muon_weight_decay": 0.0}

GOOD = {
    "original": Run(params=_ORIGINAL),
    "original, stage 1": Run(1, params={"muon_lr": 0.01, "adam_lr": 3e-3}),
    "original, stage 2, bf16": Run(2, "bf16", _ORIGINAL),
    "original, stage 3": Run(3, params={"muon_lr": 0.03, "adam_lr": 1e-3}, clipping=0.0),
    "match_rms_adamw, stage 1, bf16": Run(1, "bf16", _MATCHED),
    "match_rms_adamw, stage 3": Run(3, params={**_MATCHED, "lr": 4e-3}),
    "normuon, stage 2": Run(2, params={**_ORIGINAL, "variant": "normuon"}),
    "hyperball, stage 3": Run(3, params=_HYPERBALL),
    "original, stage 2, fp16": Run(2, "fp16", _ORIGINAL),
    "mixture of experts, always clipped, stage 1": Run(1, params=_ORIGINAL, clipping=0.1, mixture=True),
}

BAD = {
    "rate * 30": Run(1, params={**_ORIGINAL, "muon_lr": 0.6}, finding="update_over_weight"),
    "rate / 30": Run(2, params={**_ORIGINAL, "muon_lr": 0.02 / 30}, finding="update_over_weight"),
    "clipped to 1e-6": Run(3, params=_ORIGINAL, clipping=1e-6, finding="clip_coefficient"),
    "everything excluded": Run(1, params={**_ORIGINAL, "exclude": ["*"]}, finding="adamw_share"),
    "fp16 overflows": Run(2, "fp16", _ORIGINAL, extra={"fp16": {"loss_scale": 2.0**40}}, finding="skipped"),
    "a router given to Muon": Run(
        1, params={**_ORIGINAL, "include": ["*router*"]}, mixture=True, finding="routers"
    ),
    "5 times spectral at AdamW's rate": Run(
        1,
        params={**_MATCHED, "lr": 1e-3, "adjust_lr_fn": "spectral", "update_scale": 5.0},
        finding="update_over_adamw",
    ),
    "matrices at the rate of embeddings": Run(
        0, params={**_ORIGINAL, "adam_lr": 0.3, "exclude": ["*mlp*"]}, finding="adamw_over_weight"
    ),
}


class Mixture(nn.Module):
    """Four feed-forward layers, weighted by a router."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.router = Linear(config.dim, 4)
        self.experts = nn.ModuleList(SwiGLU(config) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(dim=-1)
        return sum(weights[..., n : n + 1] * expert(x) for n, expert in enumerate(self.experts))


def model_of(run: Run) -> GPT:
    """Return the run's model with its first weights."""
    torch.manual_seed(0)
    config = GPTConfig(dim=DIM, layers=LAYERS, heads=2)
    model = GPT(config)
    for layer in model.layers if run.mixture else ():
        layer.mlp = Mixture(config)
    return model


@functools.cache
def batches(rank: int, world_size: int) -> Batches:
    """Return the text of a rank."""
    text = load_tokens(standard_library(), max_bytes=1_000_000)
    return Batches(text.train, SEQUENCES, LENGTH, rank, world_size)


def train(
    rank: int, world_size: int, *, name: str, steps: int, every: int = 100, folder: str | None = None
) -> dict[str, Any]:
    """Train; return the report of health, the losses, and what was logged.

    Args:
        rank: Of this process.
        world_size: The number of ranks.
        name: The name of the run.
        steps: The number of steps; after the last one the log has the line of the diagnosis.
        every: The setting ``health``.
        folder: Where ``csv_monitor`` writes.
    """
    run, messages = {**GOOD, **BAD}[name], training.heard()
    extra = dict(run.extra)
    if folder is not None:
        extra["csv_monitor"] = {"enabled": True, "output_path": folder, "job_name": "run"}
    params = {"health": every, "wire_dtype": "auto", **run.params}
    config = training.ds_config(
        run.stage, precision=run.precision, clipping=run.clipping, params=params, extra=extra
    )
    params = config["optimizer"]["params"]
    config["optimizer"]["params"] = {key: value for key, value in params.items() if value is not None}
    warmup = max(1, round(WARMUP * steps))

    def factor(step: int) -> float:
        progress = (step - warmup) / max(1, steps - warmup)
        return (step + 1) / warmup if step < warmup else 0.55 + 0.45 * math.cos(math.pi * progress)

    engine = training.initialize(
        model_of(run),
        config,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
    )
    deepspeed_muon.muon_optimizer(engine).recorder.report_after = steps
    losses = []
    for step in range(steps):
        loss = engine(*batches(rank, world_size).draw(0, step, 0, 1))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return {"report": deepspeed_muon.health(engine), "losses": losses, "messages": messages}
