"""What the diagnosis of a run measures in runs that go well, and in runs that were made to go wrong.

    python benchmarks/diagnosis.py --out benchmarks/results/diagnosis

Trains every run of ``tests/support/diagnosed_runs.py`` for 200 steps on two ranks. The ranges in
``deepspeed_muon/monitoring/diagnosis.py`` are those of the good runs. Nothing but ``time_optimizer`` depends on what
else the machine does. Finished runs in the JSON of ``--out`` are kept, so a series can be run in pieces.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks import support
from deepspeed_muon.monitoring.diagnosis import QUANTITIES, diagnose
from tests.support.diagnosed_runs import BAD, GOOD, RANKS, train
from tests.support.harness import run_ranks

_SHOWN = ("loss", *(name for name, quantity in QUANTITIES.items() if quantity.label))


def row_of(results: list[dict[str, Any]]) -> support.Row:
    """Return the last sample of a run, and its first and last loss."""
    report, losses = results[0]["report"], results[0]["losses"]
    sample = {key: float(f"{value:.4g}") for key, value in report.items() if isinstance(value, (int, float))}
    ratios = [measured["update_over_weight"] for measured in report["matrices"].values()]
    extremes = [float(f"{bound(ratios):.4g}") for bound in (min, max)] if ratios else []
    return {
        "loss": [round(losses[0], 3), round(sum(losses[-10:]) / 10, 3)],
        **sample,
        "update_over_weight_of_matrices": extremes,
    }


def page(rows: list[support.Row], steps: int) -> list[str]:
    """Return the runs as Markdown."""

    def cell(value: object) -> object:
        return f"{value:.3g}" if isinstance(value, float) else "" if value is None else value

    conditions = (
        f"A GPT of width 64, two layers, on Python's standard library; {RANKS} ranks, {steps} steps of 512 tokens.",
        "`loss`: first, and mean of the last ten. Findings about time are those of a tiny model on a busy machine.",
    )
    heads = ["run", *_SHOWN, "findings"]
    cells = [
        [
            row["run"],
            *(cell(row.get(key)) for key in _SHOWN),
            ", ".join(finding.key for finding in diagnose(row)),
        ]
        for row in rows
    ]
    return [*support.heading("The diagnosis of good and bad runs", *conditions), *support.table(heads, cells)]


def main() -> None:
    """Run from the command line."""
    parser = support.options(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    rows = {row["run"]: row for row in support.read(arguments.out).get("rows", [])}
    runs = {**GOOD, **BAD}
    for name in runs:
        if name not in rows:
            results = run_ranks(train, RANKS, {"name": name, "steps": arguments.steps}, timeout=600)
            rows[name] = {"run": name, "good": name in GOOD, **row_of(results)}
        ordered = [rows[name] for name in runs if name in rows]
        lines = page(ordered, arguments.steps)
        support.write(arguments.out, {"steps": arguments.steps, "rows": ordered}, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
