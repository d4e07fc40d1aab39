"""Tables and curves of ``variants.py``: ``python benchmarks/variants_report.py``.

Writes ``variants.md`` and ``variants.png`` beside the raw file, of all optimizers whose runs are complete. Standard
errors are of the mean over seeds. A difference from Muon is of runs with the same seed, which have the same first
weights and batches; within two of its standard errors it counts as none.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import statistics
import sys
from pathlib import Path

import matplotlib

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import support, variants  # the path is set above
from benchmarks.variants import ADAMW, MOMENTUM_SEEDS, RAW, RULES, VARIANTS, WIDTHS, Found, Results, loss

matplotlib.use("Agg")
from matplotlib import pyplot  # the backend is chosen above

MARGIN = 0.03
"""Nats above the best trial that count as its plateau."""
UPDATE_RMS, SPECTRAL_NORM = 2, 4
"""Places in a point of a curve, behind the step and the validation loss."""

Point = tuple[float, float]


def losses(found: Found) -> list[float]:
    """Return the losses of the best point, by seed."""
    return [loss(row) for row in found.best]


def curve(found: Found, place: int) -> list[Point]:
    """Return steps and means over the seeds of one measured number."""
    lists = zip(*(row["curve"] for row in found.best), strict=False)
    return [(points[0][0], statistics.fmean(point[place] for point in points)) for points in lists]


def rates_tried(found: Found) -> list[Point]:
    """Return rates and losses of the trials that differ from the start in nothing else."""
    start = found.start
    other = (start.decay, start.rest, 0)
    rows = [row for row in found.rows if (row["decay"], row["rest"], row["seed"]) == other]
    return sorted((row["rate"], loss(row)) for row in rows)


def plateau(line: list[Point]) -> str:
    """Return the octaves of the rate whose loss is within ``MARGIN`` of the best of them."""
    bound = min(value for _, value in line) + MARGIN
    inside = [index for index, (_, value) in enumerate(line) if value <= bound]

    def end(index: int, outside: int) -> float:
        if not 0 <= outside < len(line) or math.isinf(line[outside][1]):
            return math.log2(line[index][0])
        (rate, value), (other, worse) = line[index], line[outside]
        return math.log2(rate) + (bound - value) / (worse - value) * math.log2(other / rate)

    octaves = end(inside[-1], inside[-1] + 1) - end(inside[0], inside[0] - 1)
    open_end = inside[0] == 0 or inside[-1] == len(line) - 1
    return f"{'at least ' if open_end else ''}{octaves:.1f}"


def mean_and_error(values: list[float]) -> str:
    """Return mean and standard error, and the number of seeds."""
    if len(values) < 2:
        return f"{values[0]:.4f} (one seed) (1)"
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):.4f} ± {error:.4f} ({len(values)})"


def difference(found: Found, base: Found) -> tuple[str, str]:
    """Return the mean difference of equal seeds with its standard error, and the verdict."""
    pairs = [own - other for own, other in zip(losses(found), losses(base), strict=False)]
    if found.best == base.best:
        return "", ""
    if len(pairs) < 3:
        return "", "too few seeds"
    mean, error = statistics.fmean(pairs), statistics.stdev(pairs) / len(pairs) ** 0.5
    verdict = "no difference" if abs(mean) <= 2 * error else "better" if mean < 0 else "worse"
    return f"{mean:+.4f} ± {error:.4f}", verdict


def tokens_to(found: Found, target: float) -> str:
    """Return the tokens after which the mean curve is at ``target``, over those of the whole run."""
    for (step, value), (later, lower) in itertools.pairwise(curve(found, 1)):
        if lower <= target:
            share = (value - target) / (value - lower)
            return f"{(step + share * (later - step)) / found.start.steps:.2f}"
    return "-"


def study_table(searches: dict[str, Found]) -> list[str]:
    """Return one row for each optimizer of a study."""
    heads = ["optimizer", "trials", "best: rate, weight decay, rest", "loss ± standard error (seeds)"]
    heads += ["minus Muon", "", "tokens to AdamW's loss", f"octaves within {MARGIN}", "optimizer, ms"]
    adamw, rows = searches.get(ADAMW), []
    for name, found in searches.items():
        point, trials = found.point, [row for row in found.rows if row["seed"] == 0]
        rows.append(
            [
                name,
                len(trials),
                f"{point.rate:.3g}, {point.decay / point.rate:.2g}, {point.rest:.3g}",
                mean_and_error(losses(found)),
                *difference(found, searches["muon"]),
                tokens_to(found, curve(adamw, 1)[-1][1]) if adamw else "",
                plateau(rates_tried(found)) if len(trials) > 2 else "",
                f"{statistics.median(row['optimizer_ms'] for row in trials):.1f}",
            ]
        )
    return support.table(heads, rows)


def best_octave(found: Found) -> float:
    """Return the rate of the least mean loss in octaves.

    It is the vertex of the parabola through the best and its neighbours.
    """
    by_rate: dict[float, list[float]] = {}
    for row in found.rows:
        by_rate.setdefault(math.log2(row["rate"]), []).append(loss(row))
    line = sorted((octave, statistics.fmean(values)) for octave, values in by_rate.items())
    at = min(range(len(line)), key=lambda index: line[index][1])
    around = [value for _, value in line[at - 1 : at + 2]] if at else []
    if len(around) < 3 or math.isinf(max(around)):
        return line[at][0]
    left, middle, right = around
    return line[at][0] + (left - right) / (2 * (left - 2 * middle + right))


def widths_table(results: Results) -> list[str]:
    """Return the best rate of each rule at each width."""
    rows = []
    for rule in RULES:
        octaves = [best_octave(found) for found in variants.widths(results, rule)]
        rates = [f"{2**octave:.3g}" for octave in octaves]
        rows.append(["original" if rule == "muon" else rule, *rates, f"{octaves[-1] - octaves[0]:+.1f}"])
    return support.table(["rule", *(f"width {width}" for width in WIDTHS), "moves, octaves"], rows)


def momentum_table(results: Results, found: dict[str, Found]) -> list[str]:
    """Return the loss of each momentum dtype beside fp32's, at the end and over the curve of the means."""
    heads = ["optimizer", "loss ± standard error (seeds)", "minus fp32", ""]
    rows = []
    for variant in MOMENTUM_SEEDS:
        by_name = variants.momenta(results, found[variant].point)
        for name, each in by_name.items():
            base, apart = by_name[f"{variant}, {each.start.steps} steps"], ""
            if each is not base:
                curves = zip(curve(each, 1), curve(base, 1), strict=False)
                step, most = max(
                    ((at, value - fp32) for (at, value), (_, fp32) in curves), key=lambda point: abs(point[1])
                )
                apart = f"{most:+.4f} at step {step}"
            rows.append([name, mean_and_error(losses(each)), *difference(each, base), apart])
    return support.table([*heads, "most apart on the curve of the means"], rows)


def plot(searches: dict[str, Found], path: Path) -> None:
    """Draw losses over the rate, and over the steps loss, update RMS and spectral norm, of one study."""
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7))
    for name, found in searches.items():
        axes[0][0].plot(*zip(*rates_tried(found), strict=True), "o-", label=name, markersize=3)
        for axis, place in zip(axes.flat[1:], (1, UPDATE_RMS, SPECTRAL_NORM), strict=True):
            axis.plot(*zip(*curve(found, place)[place == 1 :], strict=True))
    axes[0][0].set(xscale="log", xlabel="rate", title="validation loss of the trials, seed 0")
    axes[0][0].legend(fontsize=8)
    titles = (
        "validation loss at the best",
        "update RMS of hidden matrices",
        "mean spectral norm of hidden matrices",
    )
    for axis, title in zip(axes.flat[1:], titles, strict=True):
        axis.set(xlabel="step", title=title)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=60)
    pyplot.close(figure)


def page(results: Results, found: dict[str, dict[str, Found]]) -> list[str]:
    """Return all tables as Markdown; ``found`` has by study and optimizer what was found."""
    hardware = sorted({f"{row['hardware']}, torch {row['torch']}" for row in results.rows.values()})
    path = results.path
    first = found["1M-300"]
    tables = {
        "1M-300": study_table(first),
        "widths": widths_table(results),
        "iteration": study_table(variants.iterations(results, first["muon"].point)),
        "momentum": momentum_table(results, first),
        **{name: study_table(searches) for name, searches in found.items() if name != "1M-300"},
    }
    lines = [
        "# Variants of Muon beside AdamW",
        "",
        f"Commands: `python benchmarks/variants.py` and `python benchmarks/variants_report.py`. {'; '.join(hardware)}, "
        f"one core; {len(results.rows)} runs in [{path.name}]({path.name}).",
        "",
        f"![Losses, updates and spectral norms]({path.stem}.png)",
    ]
    for name, table in tables.items():
        lines += ["", f"## {name}", "", *table]
    return lines


def complete_studies(results: Results) -> dict[str, dict[str, Found]]:
    """Return what was found by study and optimizer, without the optimizers of which runs are missing."""
    found: dict[str, dict[str, Found]] = {}
    for optimizer in (ADAMW, *VARIANTS):
        with contextlib.suppress(KeyError):
            for study, each in variants.study(results, optimizer).items():
                found.setdefault(study, {})[optimizer] = each
    return found


def main() -> None:
    """Write the page and the curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--raw", type=Path, default=RAW)
    results = Results(parser.parse_args().raw)
    found = complete_studies(results)
    results.path.with_suffix(".md").write_text("\n".join(page(results, found)) + "\n")
    plot(found["1M-300"], results.path.with_suffix(".png"))


if __name__ == "__main__":
    main()
