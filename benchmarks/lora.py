"""Which half of a LoRA adapter Muon should update: losses of a small GPT after equal steps.

A base is pretrained with AdamW on the sources of Python's standard library, then frozen. Adapters on its projections
learn C++, the headers that torch installs: A and B by Muon, B alone (A by AdamW), or both by AdamW, at each
rank and rate. A seed decides about the adapters and the batches. ``match_rms_adamw`` gives Muon's updates the size of
AdamW's, so one rate serves both. ``--scale original`` takes the other rule; then ``--rates`` are Muon's, and AdamW has
the rate of ``--adam-rate``. ``--init a`` starts with A = 0 and a random B instead.

``python benchmarks/lora.py --out benchmarks/results/lora`` keeps the losses in a JSON and a table; runs that are in
the JSON already are not repeated. Losses do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("", "examples")]

from gpt import GPT, GPTConfig  # noqa: E402  # a script of the examples, not a package
from text_data import Batches, TokenText, load_tokens, standard_library, text_files  # noqa: E402

from benchmarks import support  # noqa: E402
from deepspeed_muon import Muon  # noqa: E402

RECIPES = {"both Muon": "ab", "B Muon": "b", "both AdamW": ""}
SIZES = GPTConfig(vocab_size=256, dim=96, layers=2, heads=4)
BATCH, LENGTH, VALIDATION = 8, 64, 32
ALPHA = 2.0
"""The adapter's output is multiplied by this number: peft's ``lora_alpha`` of twice the rank."""


class Adapter(nn.Module):
    """A frozen linear layer and the product of two narrow ones beside it."""

    def __init__(self, base: nn.Linear, rank: int, zero: str) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        with torch.no_grad():
            getattr(self, f"lora_{zero}").weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in]`` to ``[..., out]``."""
        return self.base(x) + ALPHA * self.lora_b(self.lora_a(x))


def headers() -> Iterator[str]:
    """Yield the C++ headers of the installed torch."""
    yield from text_files(str(Path(torch.__file__).parent / "include" / "ATen"))


def pretrained(folder: Path, steps: int) -> dict[str, Tensor]:
    """Return the base's weights, trained once with AdamW and kept in ``folder``."""
    path = folder / f"base-{steps}.pt"
    if not path.exists():
        torch.manual_seed(0)
        model = GPT(SIZES)
        text = load_tokens(standard_library(), max_bytes=8 << 20)
        batches = Batches(text.train, 2 * BATCH, LENGTH, 0, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        train(model, optimizer, batches, seed=0, steps=steps)
        torch.save(model.state_dict(), path)
    return torch.load(path)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, *, seed: int, steps: int
) -> None:
    """Train with a warm-up of a twentieth of the steps and a cosine to zero, gradients clipped to 1."""
    params = [param for param in model.parameters() if param.requires_grad]

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / (steps / 20)) * 0.5 * (1 + math.cos(math.pi * step / steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step in range(steps):
        loss = model(*batches.draw(seed, step, 0, 1))
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def adapted(weights: dict[str, Tensor], rank: int, seed: int, zero: str) -> GPT:
    """Return the frozen base with adapters on every projection of its layers."""
    model = GPT(SIZES)
    model.load_state_dict(weights)
    model.requires_grad_(False)
    torch.manual_seed(seed)
    for block in model.layers:
        for part in (block.attn, block.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, Adapter(child, rank, zero))
    return model


def loss_of(
    weights: dict[str, Tensor],
    text: TokenText,
    args: argparse.Namespace,
    recipe: str,
    rank: int,
    rate: float,
    seed: int,
) -> float:
    """Train one adapter; return its validation loss in nats a byte."""
    model = adapted(weights, rank, seed, args.init)
    groups = []
    for half in "ab":
        muon = half in RECIPES[recipe]
        params = [param for name, param in model.named_parameters() if f"lora_{half}." in name]
        algorithm = "muon" if muon else "adamw"
        lr = rate if muon or args.scale == "match_rms_adamw" else args.adam_rate
        groups.append({"params": params, "algorithm": algorithm, "lr": lr})
    optimizer = Muon(groups, lr=rate, adjust_lr_fn=args.scale, ns_backend="torch", ns_dtype="fp32", eps=1e-8)
    train(model, optimizer, Batches(text.train, BATCH, LENGTH, 0, 1), seed=seed, steps=args.steps)
    return validation_loss(model, text)


def validation_loss(model: nn.Module, text: TokenText) -> float:
    """Return the mean loss of ``VALIDATION`` batches that no training batch contains."""
    batches = Batches(text.validation, BATCH, LENGTH, 0, 1)
    with torch.no_grad():
        return statistics.fmean(model(*batches.spread(i, VALIDATION)).item() for i in range(VALIDATION))


def losses_of(found: dict[str, float], recipe: str, rank: int, rate: float) -> dict[str, float]:
    """Return the losses that are there, by seed."""
    start = f"{recipe}/{rank}/{rate}/"
    return {key.removeprefix(start): loss for key, loss in found.items() if key.startswith(start)}


def best(
    found: dict[str, float], recipe: str, rank: int, rates: list[float]
) -> tuple[float, dict[str, float]]:
    """Return the rate with the least mean loss, among those with the most seeds, and its losses by seed."""
    runs = {rate: losses_of(found, recipe, rank, rate) for rate in rates}
    most = max(len(losses) for losses in runs.values())
    rate = min(
        (rate for rate, losses in runs.items() if len(losses) == most),
        key=lambda each: statistics.fmean(runs[each].values()),
    )
    return rate, runs[rate]


def page(found: dict[str, float], args: argparse.Namespace) -> list[str]:
    """Return the losses as Markdown: at each recipe's best rate, and at every rate."""
    runs = {tuple(key.split("/")[1:3]) for key in found if key != "base"}
    best_rows, all_rows = [], []
    for rank in sorted({int(rank) for rank, _ in runs}):
        cells = []
        for recipe in RECIPES:
            rates = sorted(float(rate) for other, rate in runs if int(other) == rank)
            rate, losses = best(found, recipe, rank, rates)
            spread = f" ({statistics.stdev(losses.values()):.4f})" if len(losses) > 1 else ""
            cells.append(f"{statistics.fmean(losses.values()):.4f}{spread} @ {rate:g}")
        best_rows.append([rank, len(losses), *cells])
    for rank, rate in sorted((int(rank), float(rate)) for rank, rate in runs):
        each = [losses_of(found, recipe, rank, rate) for recipe in RECIPES]
        cells = [f"{statistics.fmean(m.values()):.4f} ({len(m)})" if m else "-" for m in each]
        all_rows.append([rank, f"{rate:g}", *cells])
    return [
        "# Adapters by Muon and AdamW",
        "",
        f"`python benchmarks/lora.py --scale {args.scale} --init {args.init} --steps {args.steps}`: validation loss",
        f"in nats a byte, mean over the seeds. Without an adapter the base has {found['base']:.4f}.",
        "",
        "At the best rate of each (after @); in brackets the standard deviation over the seeds:",
        "",
        *support.table(["rank", "seeds", *RECIPES], best_rows),
        "",
        "At every rate, with the number of seeds:",
        "",
        *support.table(["rank", "rate", *RECIPES], all_rows),
    ]


def main() -> None:
    """Train and write."""
    parser = support.options(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-2, 2e-2, 3e-2])
    parser.add_argument("--adam-rate", type=float, default=3e-3)
    parser.add_argument("--scale", choices=("match_rms_adamw", "original"), default="match_rms_adamw")
    parser.add_argument("--init", choices=("a", "b"), default="b", help="the half that starts at zero")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--base-steps", type=int, default=800)
    parser.add_argument("--base", type=Path, required=True, help="folder for the weights of the base")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.base.mkdir(parents=True, exist_ok=True)
    known = support.read(args.out)
    asked = {name: getattr(args, name) for name in ("scale", "init", "steps", "base_steps", "adam_rate")}
    found: dict[str, float] = known["losses"] if known.get("asked") == asked else {}
    weights = pretrained(args.base, args.base_steps)
    text = load_tokens(headers(), max_bytes=8 << 20)
    if "base" not in found:
        found["base"] = validation_loss(adapted(weights, 1, 0, "b"), text)
    for seed in range(args.seeds):
        for rank in args.ranks:
            for rate, recipe in itertools.product(args.rates, RECIPES):
                key = f"{recipe}/{rank}/{rate}/{seed}"
                if key not in found:
                    found[key] = loss_of(weights, text, args, recipe, rank, rate, seed)
                    support.write(args.out, {"asked": asked, "losses": found}, [])
            print(f"seed {seed}, rank {rank}", flush=True)
    support.write(args.out, {"asked": asked, "losses": found}, page(found, args))


if __name__ == "__main__":
    main()
