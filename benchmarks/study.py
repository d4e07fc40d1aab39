"""Losses after equal tokens: AdamW, DeepSpeed's Muon with and without clipping, and this one; with equal budgets.

    python benchmarks/study.py

Every run is the demo's own training (``examples/demo.py``): same model, text and number of tokens. Each optimizer
has the same number of trials for its rates, all with seed 0; its best rates then train with five seeds. Writes
``benchmarks/results/study.json`` and ``.md`` after every run; a run that is there already, of the same setting, is not
repeated: delete the files to start over.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("", "examples")]

import demo  # noqa: E402  # the demo is a script beside train_gpt.py, not a package

from benchmarks import support  # noqa: E402
from benchmarks.support import REPOSITORY, Row  # noqa: E402
from tests.support.native_ops import extensions_dir  # noqa: E402

SETTING = {"ranks": demo.RANKS, "config": demo.CONFIG.name, "steps": demo.STEPS, **demo.MODEL}
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


def trained(
    optimizer: str, options: dict[str, Any], steps: int, config: dict[str, Any]
) -> tuple[float, float]:
    """Train the demo once; return the last validation and training losses."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = folder / "config.json"
        path.write_text(json.dumps(config))
        demo.train(optimizer, options, steps, folder, extensions_dir(), config=path)
        curves = [demo.read_curve(folder / f"{name}_loss.csv") for name in ("val", "train")]
    return curves[0][-1][1], curves[1][-1][1]


def run(optimizer: str, rates: dict[str, float], seed: int) -> Row:
    """Train once."""
    config = json.loads(demo.CONFIG.read_text())
    if optimizer == UNCLIPPED:
        config["gradient_clipping"] = 0.0
    found = trained(optimizer, {**rates, "seed": seed}, demo.STEPS, config)
    return {
        "optimizer": optimizer,
        "rates": rates,
        "seed": seed,
        **{name: round(loss, 6) for name, loss in zip(LOSSES, found, strict=True)},
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


def page(rows: list[Row]) -> list[str]:
    """The outcome and all runs as Markdown."""
    heads = ["optimizer", "rates", "seed", "validation loss", "last training loss"]
    cells = [
        [row["optimizer"], rates_of(row), row["seed"], *(f"{row[what]:.4f}" for what in LOSSES)]
        for row in rows
    ]
    return [
        *support.heading(
            "Losses after equal tokens",
            f"The demo: {', '.join(f'{key} {value}' for key, value in SETTING.items())}.",
            f"The rates are chosen with seed {SEEDS[0]}; mean and standard deviation are those of the seeds "
            f"{SEEDS[0]} to {SEEDS[-1]} at the best rates.",
        ),
        *table(rows),
        "",
        "## All runs",
        "",
        *support.table(heads, cells),
    ]


def main() -> None:
    """Run what the results file does not have yet: first the trials, then the seeds."""
    parser = support.options(__doc__)
    parser.set_defaults(out=REPOSITORY / "benchmarks" / "results" / "study")
    args = parser.parse_args()
    rows: list[Row] = support.read(args.out).get("rows", [])

    def complete(optimizer: str, rates: dict[str, float], seed: int) -> None:
        if (optimizer, rates, seed) not in [(row["optimizer"], row["rates"], row["seed"]) for row in rows]:
            rows.append(run(optimizer, rates, seed))
            rows.sort(key=lambda row: (row["optimizer"], row["seed"] != SEEDS[0], row["validation_loss"]))
            support.write(args.out, {"setting": SETTING, "rows": rows}, page(rows))

    for name, grid in GRIDS.items():
        for rates in grid:
            complete(name, rates, SEEDS[0])
        for seed in SEEDS:
            complete(name, trials(rows, name)[0]["rates"], seed)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
