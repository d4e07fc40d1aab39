"""One run of ``variants.py``: trains once in this process and returns its losses, update sizes and spectral norms."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import torch
from gpt import GPT, GPTConfig
from text_data import Batches, load_tokens, standard_library, text_files
from torch import Tensor

import deepspeed_muon
from benchmarks.support import hardware_name
from benchmarks.training_runs import capture, moved
from benchmarks.variants import ADAMW, HEADS, LENGTH, SEQUENCES, Row, Run
from deepspeed_muon.math import newton_schulz
from deepspeed_muon.math.coefficients import SMALLEST_NORM

POINTS = 12
"""How often a run measures itself."""
CURVE_BATCHES, LAST_BATCHES = 8, 64
FINITE_EVERY = 20
"""Steps after which a run looks whether its loss is still finite: the host waits for the device there."""
MAX_NORM = 1.0
CLIPPED: dict[str, tuple[str, ...]] = {
    "all": ("all",),
    "adamw": ("adamw",),
    "separate": ("muon", "adamw"),
    "none": (),
}
"""Clipping policy to the sets of gradients that it clips, each by the norm of that set."""


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """The demo's cosine schedule with warm-up."""
    warmup = max(1, round(0.05 * steps))

    def factor(step: int) -> float:
        progress = (step - warmup) / max(1, steps - warmup)
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))
        return (step + 1) / warmup if step < warmup else cosine

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def row_sums(x: Tensor, settings: newton_schulz.NsSettings) -> Tensor:
    """Divide row ``i`` of each ``X`` by the root of ``sum_j |X X^T|_ij``, which bounds the spectral norm by 1.

    The preconditioning of Turbo-Muon (arXiv 2512.04632), in place of the division by the Frobenius norm.
    """
    sums = (x @ x.mT).abs().sum(dim=-1, keepdim=True)
    return (x / sums.sqrt().clamp_(min=SMALLEST_NORM)).to(settings.dtype)


def optimizer_of(run: Run, model: GPT) -> torch.optim.Optimizer:
    """The optimizer of a run; AdamW's divides the parameters as Muon does."""
    muon = deepspeed_muon.Muon(model, **run.muon_settings())
    if run.optimizer != ADAMW:
        return muon
    groups = [{key: group[key] for key in ("params", "lr", "weight_decay")} for group in muon.param_groups]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)


@torch.no_grad()
def loss_of(model: GPT, batches: Batches, count: int) -> float:
    """The validation loss over fixed batches."""
    device = model.lm_head.weight.device
    model.eval()
    losses = [model(*moved(batches.spread(index, count), device)) for index in range(count)]
    model.train()
    return fmean(torch.stack(losses).tolist())


def sizes(before: list[Tensor], after: list[Tensor]) -> dict[str, float]:
    """Over the hidden matrices: RMS of a step, its norm relative to the weights', mean and largest spectral norm."""
    steps = [new - old for old, new in zip(before, after, strict=True)]
    squares, elements = sum(float(step.square().sum()) for step in steps), sum(step.numel() for step in steps)
    relative = [float(step.norm() / old.norm()) for step, old in zip(steps, before, strict=True)]
    spectral = [float(torch.linalg.matrix_norm(weight, ord=2)) for weight in after]
    found = {
        "update_rms": math.sqrt(squares / elements),
        "relative_update": sum(relative) / len(relative),
        "spectral_norm": sum(spectral) / len(spectral),
        "largest_spectral_norm": max(spectral),
    }
    return {key: float(f"{value:.4g}") for key, value in found.items()}


def clip(model: GPT, optimizer: torch.optim.Optimizer, policy: str) -> list[Tensor]:
    """Clip the gradients in place; return the norm of each set of ``CLIPPED[policy]`` before."""
    sets: dict[str, list[torch.nn.Parameter]] = {"all": [*model.parameters()], "muon": [], "adamw": []}
    for group in optimizer.param_groups:
        sets["muon" if group.get("use_muon") else "adamw"] += group["params"]
    return [torch.nn.utils.clip_grad_norm_(sets[name], MAX_NORM) for name in CLIPPED[policy]]


def train(run: Run, *, curve: bool = True, device: str = "cpu", text: Path | None = None) -> Row:
    """Trains once. ``loss`` is ``None`` if the run diverged; without ``curve`` only its end is measured.

    ``text`` is a file to train on in place of this Python's standard library.
    """
    points = POINTS if curve else 0
    if run.optimizer.endswith("after row sums"):
        with mock.patch.object(newton_schulz, "_normalized", row_sums):
            return trained(run, points, device, text)
    return trained(run, points, device, text)


def trained(run: Run, points: int, device: str, path: Path | None) -> Row:
    """Trains once with the preconditioning that is in place, and measures ``points`` times on the way."""
    torch.set_num_threads(1)
    text = load_tokens(text_files(str(path)) if path else standard_library(), max_bytes=16_000_000)
    torch.manual_seed(run.seed)
    model = GPT(GPTConfig(dim=run.dim, layers=run.layers, heads=HEADS)).to(device)
    optimizer = optimizer_of(run, model)
    hidden = [weight for weight in model.layers.parameters() if weight.dim() == 2]
    rates = schedule(optimizer, run.steps)
    batches = Batches(text.train, run.tokens // LENGTH, LENGTH, 0, 1)
    validation = Batches(text.validation, SEQUENCES, LENGTH, 0, 1)
    capture(model, moved(batches.draw(run.seed, 0, 0, 1), device))
    curve: list[list[Any]] = []
    losses: list[Tensor] = []
    norms: list[list[Tensor]] = []
    in_optimizer = 0.0
    started = time.process_time()
    for step in range(run.steps):
        loss = model(*moved(batches.draw(run.seed, step, 0, 1), device))
        model.zero_grad()
        loss.backward()
        norms.append(clip(model, optimizer, run.clip))
        losses.append(loss.detach().clone())
        measured = points > 0 and (step + 1) % max(1, run.steps // points) == 0
        if (measured or step % FINITE_EVERY == 0) and not losses[-1].isfinite():
            break
        before = [weight.detach().clone() for weight in hidden] if measured else []
        clock = time.process_time()
        optimizer.step()
        in_optimizer += time.process_time() - clock
        rates.step()
        if measured:
            sized = sizes(before, [weight.detach() for weight in hidden])
            curve.append([step + 1, round(loss_of(model, validation, CURVE_BATCHES), 5), *sized.values()])
    seconds = time.process_time() - started
    last = loss_of(model, validation, LAST_BATCHES)
    norms_of_steps = [torch.stack(of_step).tolist() for of_step in norms if of_step]
    return {
        **asdict(run),
        "loss": round(last, 5) if math.isfinite(last) and losses[-1].isfinite() else None,
        "train_loss": round(fmean(torch.stack(losses[-20:]).tolist()), 5),
        "curve": curve,
        "clipped": [
            round(fmean(norm > MAX_NORM for norm in of_set), 4)
            for of_set in zip(*norms_of_steps, strict=True)
        ],
        "largest_norm": [float(f"{max(of_set):.4g}") for of_set in zip(*norms_of_steps, strict=True)],
        "seconds": round(seconds, 1),
        "optimizer_ms": round(1e3 * in_optimizer / len(losses), 2),
        "hardware": hardware_name(),
        "torch": torch.__version__,
        "text": text.fingerprint,
        "deepspeed_muon": deepspeed_muon.__version__,
    }
