"""Which half of a LoRA adapter Muon should update: losses of a small GPT after equal steps.

A base is pretrained with AdamW on the sources of Python's standard library, then frozen. Adapters on its projections
learn C++, the headers that torch installs: A and B by Muon, B alone (A by AdamW), or both by AdamW, at each
rank and rate. B starts at zero. A seed decides about the adapters and the batches. ``match_rms_adamw`` gives Muon's
updates the size of AdamW's, so one rate serves both.

``python benchmarks/lora.py --out benchmarks/results/lora`` keeps the losses in a JSON and a table; runs that are in
the JSON already are not repeated. Losses do not depend on what else the machine does.
"""

from __future__ import annotations

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
from benchmarks.support import Row  # noqa: E402
from deepspeed_muon import Muon  # noqa: E402

RECIPES = {"both Muon": "ab", "B Muon": "b", "both AdamW": ""}
SIZES = GPTConfig(vocab_size=256, dim=96, layers=2, heads=4)
BATCH, LENGTH, VALIDATION = 8, 64, 32
BASE_STEPS, STEPS = 800, 120
ALPHA = 2.0
"""The adapter's output is multiplied by this number: peft's ``lora_alpha`` of twice the rank."""


class Adapter(nn.Module):
    """A frozen linear layer and the product of two narrow ones beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in]`` to ``[..., out]``."""
        return self.base(x) + ALPHA * self.lora_b(self.lora_a(x))


def headers() -> Iterator[str]:
    """Yield the C++ headers of the installed torch."""
    yield from text_files(str(Path(torch.__file__).parent / "include" / "ATen"))


def pretrained() -> dict[str, Tensor]:
    """Return the weights of a base that AdamW has trained."""
    torch.manual_seed(0)
    model = GPT(SIZES)
    text = load_tokens(standard_library(), max_bytes=8 << 20)
    batches = Batches(text.train, 2 * BATCH, LENGTH, 0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    train(model, optimizer, batches, seed=0, steps=BASE_STEPS)
    return model.state_dict()


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


def adapted(weights: dict[str, Tensor], rank: int, seed: int) -> GPT:
    """Return the frozen base with adapters on every projection of its layers."""
    model = GPT(SIZES)
    model.load_state_dict(weights)
    return with_adapters(model, rank, seed)


def with_adapters(model: GPT, rank: int, seed: int) -> GPT:
    """Freeze a model and put adapters on every projection of its layers, in place; return it."""
    model.requires_grad_(False)
    torch.manual_seed(seed)
    for block in model.layers:
        for layer in (block.attn, block.mlp):
            for name, child in list(layer.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(layer, name, Adapter(child, rank))
    return model


def loss_of(
    weights: dict[str, Tensor], text: TokenText, *, recipe: str, rank: int, rate: float, seed: int
) -> float:
    """Train one adapter; return its validation loss in nats a byte."""
    model = adapted(weights, rank, seed)
    groups = []
    for half in "ab":
        algorithm = "muon" if half in RECIPES[recipe] else "adamw"
        params = [param for name, param in model.named_parameters() if f"lora_{half}." in name]
        groups.append({"params": params, "algorithm": algorithm})
    settings = {"adjust_lr_fn": "match_rms_adamw", "ns_backend": "torch", "ns_dtype": "fp32", "eps": 1e-8}
    optimizer = Muon(groups, lr=rate, **settings)
    train(model, optimizer, Batches(text.train, BATCH, LENGTH, 0, 1), seed=seed, steps=STEPS)
    return validation_loss(model, text)


def validation_loss(model: nn.Module, text: TokenText) -> float:
    """Return the mean loss of ``VALIDATION`` batches that no training batch contains."""
    batches = Batches(text.validation, BATCH, LENGTH, 0, 1)
    with torch.no_grad():
        return statistics.fmean(model(*batches.spread(i, VALIDATION)).item() for i in range(VALIDATION))


def page(rows: list[Row], base: float) -> list[str]:
    """Return the losses as Markdown: at each recipe's best rate, and at every rate."""
    runs: dict[tuple[int, float, str], list[float]] = {}
    for row in rows:
        runs.setdefault((row["rank"], row["rate"], row["recipe"]), []).append(row["loss"])
    best_rows, all_rows = [], []
    for rank in sorted({rank for rank, _, _ in runs}):
        rates = sorted({rate for other, rate, _ in runs if other == rank})
        # Among the rates with the most seeds.
        seeds = max(len(losses) for (other, _, _), losses in runs.items() if other == rank)
        cells = []
        for recipe in RECIPES:
            tried = {rate: runs[rank, rate, recipe] for rate in rates}
            means = {rate: statistics.fmean(each) for rate, each in tried.items() if len(each) == seeds}
            rate = min(means, key=lambda each: means[each])
            spread = f" ({statistics.stdev(tried[rate]):.4f})" if seeds > 1 else ""
            cells.append(f"{means[rate]:.4f}{spread} @ {rate:g}")
        best_rows.append([rank, seeds, *cells])
        for rate in rates:
            each = [runs[rank, rate, recipe] for recipe in RECIPES]
            all_rows.append([rank, f"{rate:g}", *(f"{statistics.fmean(m):.4f} ({len(m)})" for m in each)])
    return [
        "# Adapters by Muon and AdamW",
        "",
        "`python benchmarks/lora.py`: validation loss in nats a byte, mean over the seeds. Without an adapter the base "
        f"has {base:.4f}.",
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
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = support.read(args.out).get("rows", [])
    weights = pretrained()
    text = load_tokens(headers(), max_bytes=8 << 20)
    base = validation_loss(adapted(weights, 1, 0), text)
    done = [{key: row[key] for key in row if key != "loss"} for row in rows]
    for seed, rank, rate in itertools.product(range(args.seeds), args.ranks, args.rates):
        for recipe in RECIPES:
            run = {"recipe": recipe, "rank": rank, "rate": rate, "seed": seed}
            if run not in done:
                rows.append({**run, "loss": loss_of(weights, text, **run)})
                print(rows[-1], flush=True)
        support.write(args.out, {"base": base, "rows": rows}, page(rows, base))


if __name__ == "__main__":
    main()
