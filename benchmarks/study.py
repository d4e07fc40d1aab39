"""Losses after equal tokens: AdamW, DeepSpeed's Muon with and without clipping, and this one; with equal budgets.

    python benchmarks/study.py --jobs 2

Every run is the demo's own training (``examples/demo.py``): same model, text and number of tokens. Each optimizer
has the same number of trials for its rates, all with seed 0; its best rates then train with five seeds. Writes
``benchmarks/results/study.json`` and ``.md`` after every run; a run that is there already, of the same setting, is not
repeated: delete the files to start over.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

import demo  # noqa: E402  # the demo is a script beside train_gpt.py, not a package

SEEDS = (0, 1, 2, 3, 4)
UNCLIPPED = "DeepSpeed's Muon, gradient_clipping 0"
# Seven trials each: AdamW's rate first, then half and twice of Muon's.
RATES = [(0.04, adam_lr) for adam_lr in (0.008, 0.016, 0.032, 0.064, 0.128)] + [(0.02, 0.032), (0.08, 0.032)]
# With gradient_clipping DeepSpeed clips the update of its Muon: it needs much larger rates.
CLIPPED_RATES = [(3.0, adam_lr) for adam_lr in (0.004, 0.008, 0.016, 0.032, 0.064)] + [
    (1.5, 0.008),
    (6.0, 0.008),
]
GRIDS: dict[str, list[dict[str, float]]] = {
    "AdamW": [{"lr": lr} for lr in (0.001, 0.002, 0.002828, 0.004, 0.005657, 0.008, 0.016)],
    # Decay is multiplied by the rate: a step decays the weights as much as at a rate of 0.04.
    "DeepSpeed's Muon": [
        {"muon_lr": muon_lr, "adam_lr": adam_lr, "weight_decay": round(0.004 / muon_lr, 6)}
        for muon_lr, adam_lr in CLIPPED_RATES
    ],
    UNCLIPPED: [{"muon_lr": muon_lr, "adam_lr": adam_lr} for muon_lr, adam_lr in RATES],
    "Muon": [{"muon_lr": muon_lr, "adam_lr": adam_lr} for muon_lr, adam_lr in RATES],
}

Row = dict[str, Any]
"""One run: optimizer, rates, seed and its last losses."""


def hardware() -> str:
    """The processor's name and how many of its cores this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields = (line.partition(":") for line in info.read_text().splitlines())
        name = next((value.strip() for key, _, value in fields if key.strip() == "model name"), name)
    if torch.cuda.device_count() >= demo.RANKS:
        name = torch.cuda.get_device_name()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def setting() -> dict[str, Any]:
    """What two rows must have in common to be compared."""
    config = json.loads(demo.CONFIG.read_text())
    return {
        "hardware": hardware(),
        "python": platform.python_version(),  # its library is the text
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "ranks": demo.RANKS,
        "config": demo.CONFIG.name,
        "steps": demo.STEPS,
        "tokens": demo.STEPS * demo.TOKENS_PER_STEP,
        "gradient_accumulation_steps": config["gradient_accumulation_steps"],
        **demo.MODEL,
    }


def run(optimizer: str, rates: dict[str, float], seed: int, work: Path) -> Row:
    """Trains once."""
    words = [demo.folder_name(optimizer), *(f"{rate:g}" for rate in rates.values()), f"seed{seed}"]
    folder = work / "-".join(words)
    config = demo.CONFIG
    if optimizer == UNCLIPPED:
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "config.json"
        config.write_text(json.dumps({**json.loads(demo.CONFIG.read_text()), "gradient_clipping": 0.0}))
    options = {**rates, "seed": seed}
    demo.train(optimizer, options, demo.STEPS, folder, work / "torch_extensions", config=config)
    return {
        "optimizer": optimizer,
        "rates": rates,
        "seed": seed,
        "validation_loss": round(demo.read_curve(folder / "val_loss.csv")[-1][1], 6),
        "train_loss": round(demo.read_curve(folder / "train_loss.csv")[-1][1], 6),
    }


def trials(rows: list[Row], optimizer: str) -> list[Row]:
    """The runs that choose the rates, the best one first."""
    of_optimizer = (row for row in rows if row["optimizer"] == optimizer and row["seed"] == SEEDS[0])
    return sorted(of_optimizer, key=lambda row: row["validation_loss"])


def losses(rows: list[Row], optimizer: str) -> list[float]:
    """The validation losses of the best rates, by seed."""
    best = trials(rows, optimizer)[0]["rates"]
    chosen = [row for row in rows if (row["optimizer"], row["rates"]) == (optimizer, best)]
    return [row["validation_loss"] for row in sorted(chosen, key=lambda row: row["seed"])]


def mean_and_deviation(rows: list[Row], optimizer: str) -> str:
    """How the documentation quotes an optimizer: "2.118 ± 0.008"."""
    values = losses(rows, optimizer)
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""


def table(rows: list[Row]) -> str:
    """The outcome as Markdown: the best rates of every optimizer, with mean and standard deviation."""
    lines = [
        "| optimizer | trials | best rates | validation loss, mean ± standard deviation | seeds |",
        "|---|---|---|---|---|",
    ]
    for optimizer in GRIDS:
        if tried := trials(rows, optimizer):
            rates = ", ".join(f"{key} {rate:g}" for key, rate in tried[0]["rates"].items())
            outcome, seeds = mean_and_deviation(rows, optimizer), len(losses(rows, optimizer))
            lines.append(f"| {optimizer} | {len(tried)} | {rates} | {outcome} | {seeds} |")
    return "\n".join(lines)


def write(path: Path, about: dict[str, Any], rows: list[Row]) -> None:
    """Writes the JSON and, beside it, the tables."""
    rows.sort(key=lambda row: (row["optimizer"], row["seed"] != SEEDS[0], row["validation_loss"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"setting": about, "rows": rows}, indent=2) + "\n")
    told = ", ".join(f"{key} {value}" for key, value in about.items())
    lines = [
        "# Losses after equal tokens",
        "",
        f"Command: `python benchmarks/study.py`. Setting: {told}.",
        f"The rates are chosen with seed {SEEDS[0]}; mean and standard deviation are those of the seeds "
        f"{SEEDS[0]} to {SEEDS[-1]} at the best rates.",
        "",
        table(rows),
        "",
        "## All runs",
        "",
        "| optimizer | rates | seed | validation loss | last training loss |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        rates = ", ".join(f"{key} {rate:g}" for key, rate in row["rates"].items())
        lines.append(
            f"| {row['optimizer']} | {rates} | {row['seed']} | {row['validation_loss']:.4f} "
            f"| {row['train_loss']:.4f} |"
        )
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Runs what the results file does not have yet: first the trials, then the seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "study.json")
    parser.add_argument(
        "--work", type=Path, default=HERE.parent / "runs" / "study", help="folder for metrics"
    )
    args = parser.parse_args()
    about = setting()
    known = json.loads(args.out.read_text()) if args.out.exists() else {"setting": about, "rows": []}
    rows: list[Row] = known["rows"] if known["setting"] == about else []

    def complete(wanted: list[tuple[str, dict[str, float], int]]) -> None:
        done = [(row["optimizer"], row["rates"], row["seed"]) for row in rows]
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            runs = [pool.submit(run, *entry, args.work) for entry in wanted if entry not in done]
            try:
                for finished in concurrent.futures.as_completed(runs):
                    rows.append(finished.result())
                    write(args.out, about, rows)
            except BaseException:
                pool.shutdown(cancel_futures=True)  # after the runs under way
                raise

    # Point by point of all grids, so that an interrupted study has spent equally on each.
    complete(
        [
            (name, rates, SEEDS[0])
            for point in zip(*GRIDS.values(), strict=True)
            for name, rates in zip(GRIDS, point, strict=True)
        ]
    )
    complete([(name, trials(rows, name)[0]["rates"], seed) for seed in SEEDS for name in GRIDS])
    print(table(rows))


if __name__ == "__main__":
    main()
