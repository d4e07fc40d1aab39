"""Chooses the demo's learning rates: a small grid for each of its optimizers, at the demo's full length.

    python benchmarks/demo_sweep.py                    # the whole grid
    python benchmarks/demo_sweep.py --optimizer AdamW  # one part of it

Every run is the demo's own training (``examples/demo.py``): same model, text and number of tokens. The best
row of each optimizer is what the demo uses. Writes ``benchmarks/results/demo_sweep.json`` and ``.md`` after
every run; rows that are there already, of the same setting, are not run again: delete the file to start over.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

import demo  # noqa: E402  # the demo is a script beside train_gpt.py, not a package

# Each grid reaches past its best point on both sides, in every direction.
ADAMW_GRID = [{"lr": lr} for lr in (0.001, 0.002, 0.003, 0.004, 0.006, 0.008)]
MUON_GRID = [
    {"muon_lr": muon_lr, "adam_lr": adam_lr}
    for muon_lr, adam_lrs in {
        0.01: (0.002, 0.004),
        0.02: (0.002, 0.004),
        0.04: (0.002, 0.004, 0.008, 0.016),
        0.08: (0.004, 0.008),
    }.items()
    for adam_lr in adam_lrs
]
# DeepSpeed clips the update of its Muon, not the gradient: at the same clipping it needs much larger rates. Decay is
# multiplied by the rate, so it is divided by it here: a step decays the weights as much as one of ours at its best.
DEEPSPEEDS_GRID = [
    {"muon_lr": muon_lr, "adam_lr": adam_lr, "weight_decay": round(0.004 / muon_lr, 6)}
    for muon_lr, adam_lr in ((3.0, 0.008), (1.0, 0.008), (10.0, 0.008), (3.0, 0.004), (3.0, 0.016))
]
GRIDS = {"AdamW": ADAMW_GRID, "DeepSpeed's Muon": DEEPSPEEDS_GRID, "Muon": MUON_GRID}


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


def setting(steps: int) -> dict[str, Any]:
    """What two rows must have in common to be compared."""
    return {
        "hardware": hardware(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "ranks": demo.RANKS,
        "steps": steps,
        "config": demo.CONFIG.name,
        **demo.MODEL,
    }


def write(path: Path, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Writes the JSON and, beside it, a Markdown table with the best row of each optimizer in bold."""
    rows.sort(key=lambda row: (row["optimizer"], row["validation_loss"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"setting": about, "rows": rows}, indent=2) + "\n")
    told = ", ".join(f"{key} {value}" for key, value in about.items())
    lines = [
        "# Learning rates of the demo",
        "",
        f"Command: `python benchmarks/demo_sweep.py`. Setting: {told}.",
        "Seconds are those of a whole run, start-up included, on a shared machine: compare losses only.",
        "",
        "| optimizer | rates | validation loss | last training loss | seconds |",
        "|---|---|---|---|---|",
    ]
    seen = set()
    for row in rows:
        mark = "" if row["optimizer"] in seen else "**"
        seen.add(row["optimizer"])
        rates = ", ".join(f"{key} {rate:g}" for key, rate in row["rates"].items())
        lines.append(
            f"| {row['optimizer']} | {rates} | {mark}{row['validation_loss']:.4f}{mark} "
            f"| {row['train_loss']:.4f} | {row['seconds']:.0f} |"
        )
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Runs what the results file does not have yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizer", choices=list(GRIDS), help="only this one's grid")
    parser.add_argument("--steps", type=int, default=demo.STEPS)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "demo_sweep.json")
    parser.add_argument(
        "--work", type=Path, default=HERE.parent / "runs" / "demo_sweep", help="folder for metrics"
    )
    args = parser.parse_args()

    about = setting(args.steps)
    known = json.loads(args.out.read_text()) if args.out.exists() else {"setting": about, "rows": []}
    rows = known["rows"] if known["setting"] == about else []
    for optimizer, grid in GRIDS.items():
        for rates in grid if args.optimizer in (None, optimizer) else ():
            if any((row["optimizer"], row["rates"]) == (optimizer, rates) for row in rows):
                continue
            folder = args.work / "-".join(
                [demo.folder_name(optimizer), *(f"{key}{rate:g}" for key, rate in rates.items())]
            )
            seconds = demo.train(optimizer, rates, args.steps, folder, args.work / "torch_extensions")
            row = {
                "optimizer": optimizer,
                "rates": rates,
                "validation_loss": demo.read_curve(folder / "val_loss.csv")[-1][1],
                "train_loss": demo.read_curve(folder / "train_loss.csv")[-1][1],
                "seconds": round(seconds, 1),
            }
            rows.append(row)
            write(args.out, about, rows)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo_sweep: terminated"))  # ends the training too
    main()
