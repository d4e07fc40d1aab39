"""Losses after equal tokens: AdamW, DeepSpeed's Muon with and without clipping, and this one; with equal budgets.

    python benchmarks/study.py --jobs 2

Every run is the demo's own training (``examples/demo.py``): same model, text and number of tokens. Each optimizer
has the same number of trials for its rates, all with seed 0; its best rates then train with five seeds. Writes
``benchmarks/results/study.json`` and ``.md`` after every run; a run that is there already, of the same setting, is not
repeated: delete the files to start over.
"""

from __future__ import annotations

import concurrent.futures
import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("", "examples")]

import demo  # noqa: E402  # the demo is a script beside train_gpt.py, not a package

from benchmarks import support  # noqa: E402
from benchmarks.support import REPOSITORY, Row  # noqa: E402

SEEDS = (0, 1, 2, 3, 4)
LOSSES = ("validation_loss", "train_loss")
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


def setting() -> dict[str, Any]:
    """What two rows must have in common to be compared."""
    config, machine = json.loads(demo.CONFIG.read_text()), support.machine()
    return {
        "hardware": f"{machine['name']}, {machine['cores']} cores",
        "python": platform.python_version(),  # its library is the text
        "torch": machine["torch"],
        "deepspeed": machine["deepspeed"],
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


def rates_of(row: Row) -> str:
    """The rates of a run, as the tables show them."""
    return ", ".join(f"{key} {rate:g}" for key, rate in row["rates"].items())


def table(rows: list[Row]) -> list[str]:
    """The outcome as Markdown: the best rates of every optimizer, with mean and standard deviation."""
    outcomes = [
        [name, len(tried), rates_of(tried[0]), mean_and_deviation(rows, name), len(losses(rows, name))]
        for name in GRIDS
        if (tried := trials(rows, name))
    ]
    heads = ["optimizer", "trials", "best rates", "validation loss, mean ± standard deviation", "seeds"]
    return support.table(heads, outcomes)


def write(out: Path, about: dict[str, Any], rows: list[Row]) -> None:
    """Writes the JSON and, beside it, the tables."""
    rows.sort(key=lambda row: (row["optimizer"], row["seed"] != SEEDS[0], row["validation_loss"]))
    told = ", ".join(f"{key} {value}" for key, value in about.items())
    heads = ["optimizer", "rates", "seed", "validation loss", "last training loss"]
    cells = [
        [row["optimizer"], rates_of(row), row["seed"], *(f"{row[what]:.4f}" for what in LOSSES)]
        for row in rows
    ]
    page = [
        "# Losses after equal tokens",
        "",
        f"Command: `python benchmarks/study.py`. Setting: {told}.",
        f"The rates are chosen with seed {SEEDS[0]}; mean and standard deviation are those of the seeds "
        f"{SEEDS[0]} to {SEEDS[-1]} at the best rates.",
        "",
        *table(rows),
        "",
        "## All runs",
        "",
        *support.table(heads, cells),
    ]
    support.write(out, {"setting": about, "rows": rows}, page)


def main() -> None:
    """Runs what the results file does not have yet: first the trials, then the seeds."""
    parser = support.options(__doc__)
    parser.set_defaults(out=REPOSITORY / "benchmarks" / "results" / "study")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "runs" / "study", help="folder for metrics")
    args = parser.parse_args()
    about, known = setting(), support.read(args.out)
    rows: list[Row] = known["rows"] if known.get("setting") == about else []

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
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
