"""How the best rate moves with the width of a model, and what it costs to leave a rate where it was.

    python benchmarks/rates.py          # writes results/rates.md from the raw runs of benchmarks/variants.py

Widths. Each rule has runs at three widths: several rates with one seed, the best of them and its two neighbours with
three. For each seed, the best rate is the vertex of the parabola through the lowest loss and its neighbours, over log2
of the rate. The exponent of a seed is the slope of log2(best rate) over log2(width), by least squares. The mean over
the seeds of ``match_rms_adamw``, rounded to 0.05, is ``WIDTH_EXPONENT`` in deepspeed_muon/math/updates.py. ``spectral``
is the same rule times 5 and checks the number, which was not fitted to its runs.

Costs. The curve of a cell has for each rate the mean difference from the best rate that was tried, over the seeds that
both have. The cost of a rate is the height of the parabola through the three nearest points, above the vertex.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import support  # the path is set above
from benchmarks.variants import LENGTH, RAW, RULES, SEQUENCES, WIDTHS, Results, loss
from deepspeed_muon.math.updates import WIDTH_EXPONENT

PAGE = RAW.parent / "rates.md"
SHAPE = {"layers": 2, "steps": 150, "rest": 0.016}
"""The cells of the widths."""
CELLS = [(128, 4, 300), (128, 4, 1200), (256, 6, 300)]
"""Width, layers, steps of the cells of other depths and lengths; the first one is where the rate is taken from."""

Losses = dict[float, dict[int, float]]
"""By log2 of the rate, then by seed."""
Curve = list[tuple[float, float]]
"""log2 of the rates, and the loss above that of the best rate that was tried."""


def losses(results: Results, optimizer: str, **cell: float) -> Losses:
    """Return the losses of the runs of a cell; diverged ones are infinite."""
    table: defaultdict[float, dict[int, float]] = defaultdict(dict)
    for run, row in results.rows.items():
        if run.optimizer == optimizer and all(getattr(run, key) == value for key, value in cell.items()):
            table[math.log2(run.rate)][run.seed] = loss(row)
    return dict(table)


def curve(table: Losses) -> Curve:
    """Return the mean differences from the best rate, each over the seeds that it shares with that rate."""
    most_seeds = max(map(len, table.values()))
    complete = [octave for octave, by_seed in table.items() if len(by_seed) == most_seeds]
    best = min(complete, key=lambda octave: statistics.fmean(table[octave].values()))
    return [
        (octave, statistics.fmean(by_seed[seed] - table[best][seed] for seed in by_seed))
        for octave, by_seed in sorted(table.items())
    ]


def parabola(points: Curve) -> tuple[float, float, float]:
    """Return ``(vertex, least, curvature)`` of the parabola ``least + curvature * (x - vertex)^2`` through 3 points."""
    (x0, y0), (x1, y1), (x2, y2) = points
    slope = (y1 - y0) / (x1 - x0)
    curvature = ((y2 - y1) / (x2 - x1) - slope) / (x2 - x0)
    vertex = (x0 + x1) / 2 - slope / (2 * curvature)
    return vertex, y0 - curvature * (x0 - vertex) ** 2, curvature


def optimum(line: Curve) -> tuple[float, float]:
    """Return log2 of the best rate and the loss there: the vertex, or the lowest point if it is at an end."""
    lowest = min(range(len(line)), key=lambda index: line[index][1])
    if lowest in (0, len(line) - 1):
        return line[lowest]
    return parabola(line[lowest - 1 : lowest + 2])[:2]


def cost(line: Curve, octave: float) -> float:
    """Return the loss at a rate above that at the best one."""
    middle = min(range(1, len(line) - 1), key=lambda index: abs(line[index][0] - octave))
    vertex, least, curvature = parabola(line[middle - 1 : middle + 2])
    return least + curvature * (octave - vertex) ** 2 - optimum(line)[1]


def width_curves(results: Results, rule: str) -> dict[int, Curve]:
    """Return the curve of a rule at each width."""
    return {width: curve(losses(results, rule, dim=width, **SHAPE)) for width in WIDTHS}


def exponent(results: Results, rule: str) -> tuple[float, float]:
    """Return the mean over the seeds of the exponent of the width, and its standard error."""
    tables = {width: losses(results, rule, dim=width, **SHAPE) for width in WIDTHS}
    seeds = set.intersection(
        *({seed for by_seed in table.values() for seed in by_seed} for table in tables.values())
    )
    slopes = []
    for seed in sorted(seeds):
        octaves = [
            optimum(sorted((octave, by_seed[seed]) for octave, by_seed in table.items() if seed in by_seed))[
                0
            ]
            for table in tables.values()
        ]
        slopes.append(statistics.linear_regression([math.log2(width) for width in tables], octaves).slope)
    return statistics.fmean(slopes), statistics.stdev(slopes) / len(slopes) ** 0.5


def width_costs(results: Results, rule: str, power: float) -> list[float]:
    """Return, for all widths but the first, the cost of the first one's best rate times ``(width / first)^power``."""
    curves = width_curves(results, rule)
    first, *wider = WIDTHS
    start = optimum(curves[first])[0]
    return [cost(curves[width], start + power * math.log2(width / first)) for width in wider]


def cell_costs(results: Results, optimizer: str) -> dict[tuple[int, int, int], tuple[float, float]]:
    """Return, for each of ``CELLS``, the best rate and the cost of the rate that is best in the first one."""
    lines = {
        cell: curve(
            losses(results, optimizer, **dict(zip(("dim", "layers", "steps"), cell, strict=True)), rest=0.064)
        )
        for cell in CELLS
    }
    start = optimum(lines[CELLS[0]])[0]
    return {cell: (2 ** optimum(line)[0], cost(line, start)) for cell, line in lines.items()}


def conditions() -> str:
    """Return the sizes of the runs of all cells."""
    widths, layers, steps = zip(
        *((width, SHAPE["layers"], SHAPE["steps"]) for width in WIDTHS), *CELLS, strict=True
    )
    return (
        f"widths {min(widths)} to {max(widths)}, {min(layers)} to {max(layers)} layers, {min(steps)} to "
        f"{max(steps):,} steps of {SEQUENCES * LENGTH} tokens"
    )


def page(results: Results) -> list[str]:
    """Return both tables in Markdown."""
    heads = ["rule", *(f"best at {width}" for width in WIDTHS), "exponent ± standard error (3 seeds)"]
    heads += [f"rate of {WIDTHS[0]} kept: cost at {width}" for width in WIDTHS[1:]]
    heads += [f"width^{WIDTH_EXPONENT['match_rms_adamw']}: cost at {width}" for width in WIDTHS[1:]]
    widths = []
    for optimizer in RULES:
        rates = [f"{2 ** optimum(line)[0]:.3g}" for line in width_curves(results, optimizer).values()]
        mean, error = exponent(results, optimizer)
        powers = (0.0, WIDTH_EXPONENT["match_rms_adamw"])
        costs = [f"{value:.4f}" for power in powers for value in width_costs(results, optimizer, power)]
        name = "original" if optimizer == "muon" else optimizer
        widths.append([name, *rates, f"{mean:.2f} ± {error:.2f}", *costs])
    heads_of_cells = ["optimizer", *(f"width {w}, {n} layers, {steps:,} steps" for w, n, steps in CELLS)]
    cells = [
        [
            optimizer,
            *(f"{rate:.3g}, cost {value:.4f}" for rate, value in cell_costs(results, optimizer).values()),
        ]
        for optimizer in ("muon", "normuon")
    ]
    return [
        "# How the best rate moves with the size of the model",
        "",
        f"`python benchmarks/rates.py`, from the runs of `benchmarks/variants.py` in [{RAW.name}]({RAW.name}): "
        f"{conditions()}. Costs are nats of validation loss above the best rate of the same cell; the noise of a "
        f"cell is 0.005 to 0.01.",
        "",
        f"## Widths ({SHAPE['layers']} layers, {SHAPE['steps']} steps)",
        "",
        *support.table(heads, widths),
        "",
        "## Other depths and numbers of steps (rule `original`)",
        "",
        "The best rate, and the cost of the rate that is best in the first cell.",
        "",
        *support.table(heads_of_cells, cells),
    ]


def main() -> None:
    """Write the page."""
    PAGE.write_text("\n".join(page(Results(RAW))) + "\n")


if __name__ == "__main__":
    main()
