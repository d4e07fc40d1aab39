"""Tables and curves of ``variants.py``, of the runs that are there: ``python benchmarks/variants_report.py``.

Writes ``variants.md`` and ``variants.png`` beside the raw file. Standard errors are of the mean over seeds. A
difference from Muon is of runs with the same seed, which have the same first weights and batches; within two of its
standard errors it counts as none.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import variants  # the path is set above
from benchmarks.variants import ADAMW, RAW, RULES, WIDTHS, Results, Row, Search

matplotlib.use("Agg")
from matplotlib import pyplot  # the backend is chosen above

MARGIN = 0.03
"""Nats above the best trial that count as its plateau."""
UPDATE_RMS, SPECTRAL_NORM = 2, 4
"""Places in a point of a curve, behind the step and the validation loss."""


@dataclass(frozen=True)
class Found:
    """What is known of one search."""

    search: Search
    rows: list[Row]
    """Finished runs."""
    best: list[Row]
    """Finished runs of the best point so far, by seed."""
    complete: bool
    """Whether nothing is missing."""

    @property
    def trials(self) -> list[Row]:
        """Finished runs of the first seed."""
        return [row for row in self.rows if row["seed"] == 0]

    @property
    def losses(self) -> dict[int, float]:
        """Seed to loss at the best point."""
        return {row["seed"]: loss(row) for row in self.best}

    def point(self) -> str:
        """Rate, weight decay and the rest's rate of the best point."""
        row = self.best[0]
        return f"{row['rate']:.3g}, {row['decay'] / row['rate']:.2g}, {row['rest']:.3g}"

    def plateau(self) -> str:
        """Octaves of the rate, all else as at the start, whose loss is within ``MARGIN`` of the best of them."""
        start = self.search.start
        line = sorted(
            (math.log2(row["rate"]), loss(row))
            for row in self.trials
            if (row["decay"], row["rest"]) == (start.decay, start.rest)
        )
        bound = min(value for _, value in line) + MARGIN
        inside = [index for index, (_, value) in enumerate(line) if value <= bound]
        first, last = inside[0], inside[-1]
        open_end = first == 0 or last == len(line) - 1
        low = line[first][0] if first == 0 else crossing(line[first], line[first - 1], bound)
        high = line[last][0] if last == len(line) - 1 else crossing(line[last], line[last + 1], bound)
        return f"{'at least ' if open_end else ''}{high - low:.1f}"

    def curve(self, place: int) -> list[tuple[int, float]]:
        """Step to the mean over the seeds of one measured number."""
        lists = [row["curve"] for row in self.best]
        return [
            (points[0][0], statistics.fmean(point[place] for point in points))
            for points in zip(*lists, strict=False)
        ]


def loss(row: Row) -> float:
    """The last validation loss; infinite if the run diverged."""
    return math.inf if row["loss"] is None else row["loss"]


def crossing(inside: tuple[float, float], outside: tuple[float, float], bound: float) -> float:
    """Where the line between two points meets ``bound``."""
    if math.isinf(outside[1]):
        return inside[0]
    return inside[0] + (bound - inside[1]) / (outside[1] - inside[1]) * (outside[0] - inside[0])


def find(search: Search, results: Results) -> Found | None:
    """What is known of a search; ``None`` without a finished run."""
    wanted = search.runs(results)
    rows = [row for run in wanted if (row := results.row(run))]
    point = search.best(results)
    if not rows or (point and point.key not in results.rows):
        return None
    best = results.rows[point.key] if point else min((row for row in rows if row["seed"] == 0), key=loss)
    same = ("rate", "decay", "rest")
    seeds = [row for row in rows if all(row[key] == best[key] for key in same)]
    return Found(search, rows, sorted(seeds, key=lambda row: row["seed"]), len(rows) == len(wanted))


def mean_and_error(values: list[float]) -> str:
    """Mean and standard error."""
    if len(values) < 2:
        return f"{values[0]:.4f} (one seed)"
    return f"{statistics.fmean(values):.4f} ± {statistics.stdev(values) / len(values) ** 0.5:.4f}"


def difference(found: Found, base: Found) -> tuple[str, str]:
    """The mean difference of equal seeds with its standard error, and the verdict."""
    pairs = [value - base.losses[seed] for seed, value in found.losses.items() if seed in base.losses]
    if len(pairs) < 3:
        return "", "too few seeds"
    mean, error = statistics.fmean(pairs), statistics.stdev(pairs) / len(pairs) ** 0.5
    verdict = "no difference" if abs(mean) <= 2 * error else "better" if mean < 0 else "worse"
    return f"{mean:+.4f} ± {error:.4f}", verdict


def tokens_to(found: Found, target: float) -> str:
    """The tokens after which the mean curve is at ``target``, over those of the whole run."""
    curve = [(value, step) for step, value in found.curve(1)]
    for before, after in itertools.pairwise(curve):
        if after[0] <= target:
            share = (before[0] - target) / (before[0] - after[0])
            return f"{(before[1] + share * (after[1] - before[1])) / found.search.start.steps:.2f}"
    return "-"


def study_table(searches: dict[str, Search], results: Results) -> list[str]:
    """One row for each optimizer of a study."""
    known = {name: found for name, search in searches.items() if (found := find(search, results))}
    lines = [
        "| optimizer | trials | best: rate, weight decay, rest | loss ± standard error (seeds) | minus Muon | | "
        f"tokens to AdamW's loss | octaves within {MARGIN} | optimizer, ms |",
        "|" + "---|" * 9,
    ]
    adamw = known.get(ADAMW)
    for name, found in known.items():
        minus, verdict = (
            ("", "") if name == "muon" or "muon" not in known else difference(found, known["muon"])
        )
        tokens = tokens_to(found, adamw.curve(1)[-1][1]) if adamw else ""
        lines.append(
            f"| {name} | {len(found.trials)}{'' if found.complete else ', not complete'} | {found.point()} | "
            f"{mean_and_error(list(found.losses.values()))} ({len(found.losses)}) | {minus} | {verdict} | {tokens} | "
            f"{found.plateau() if len(found.trials) > 2 else ''} | "
            f"{statistics.median(row['optimizer_ms'] for row in found.trials):.1f} |"
        )
    return lines


def best_octave(found: Found) -> float:
    """The rate of the least mean loss in octaves: the vertex of the parabola through the best and its neighbours."""
    by_rate: dict[float, list[float]] = {}
    for row in found.rows:
        by_rate.setdefault(row["rate"], []).append(loss(row))
    line = sorted((math.log2(rate), statistics.fmean(values)) for rate, values in by_rate.items())
    at = min(range(len(line)), key=lambda index: line[index][1])
    if not 0 < at < len(line) - 1 or any(math.isinf(value) for _, value in line[at - 1 : at + 2]):
        return line[at][0]
    left, middle, right = (value for _, value in line[at - 1 : at + 2])
    return line[at][0] + (left - right) / (2 * (left - 2 * middle + right))


def widths_table(searches: dict[str, Search], results: Results) -> list[str]:
    """The best rate of each rule at each width."""
    heads = " | ".join(f"width {width}" for width in WIDTHS)
    lines = [f"| rule | {heads} | moves, octaves |", "|---|" + "---|" * (len(WIDTHS) + 1)]
    for rule in RULES:
        found = [find(searches[f"{rule}, width {width}"], results) for width in WIDTHS]
        octaves = [best_octave(each) if each and each.complete else None for each in found]
        cells = ["" if octave is None else f"{2**octave:.3g}" for octave in octaves]
        moved = "" if None in (octaves[0], octaves[-1]) else f"{octaves[-1] - octaves[0]:+.1f}"
        lines.append(f"| {'original' if rule == 'muon' else rule} | {' | '.join(cells)} | {moved} |")
    return lines


def momentum_table(searches: dict[str, Search], results: Results) -> list[str]:
    """The loss of each momentum dtype beside fp32's, by seed at the end and over the curve of the first seed."""
    known = {name: found for name, search in searches.items() if (found := find(search, results))}
    lines = [
        "| optimizer | loss ± standard error (seeds) | minus fp32 | | most apart on the curve of the means |",
        "|" + "---|" * 5,
    ]
    for name, found in known.items():
        variant, *_, steps = name.split(", ")
        base = known.get(f"{variant}, {steps}")
        minus, verdict, apart = "", "", ""
        if base and base is not found:
            minus, verdict = difference(found, base)
            curves = zip(found.curve(1), base.curve(1), strict=False)
            step, most = max(
                ((at, value - fp32) for (at, value), (_, fp32) in curves), key=lambda point: abs(point[1])
            )
            apart = f"{most:+.4f} at step {step}"
        losses = list(found.losses.values())
        lines.append(f"| {name} | {mean_and_error(losses)} ({len(losses)}) | {minus} | {verdict} | {apart} |")
    return lines


def plot(searches: dict[str, Search], results: Results, path: Path) -> None:
    """Losses over the rate, and over the steps loss, update RMS and spectral norm, of one study."""
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7))
    for number, (name, search) in enumerate(searches.items()):
        found = find(search, results)
        if not found:
            continue
        colour = f"C{number}"
        start = search.start
        line = sorted(
            (row["rate"], loss(row))
            for row in found.trials
            if (row["decay"], row["rest"]) == (start.decay, start.rest)
        )
        axes[0][0].plot(*zip(*line, strict=True), "o-", color=colour, label=name, markersize=3)
        for axis, place in zip(axes.flat[1:], (1, UPDATE_RMS, SPECTRAL_NORM), strict=True):
            axis.plot(*zip(*found.curve(place)[place == 1 :], strict=True), color=colour)
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


def main() -> None:
    """Writes the page and the curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--raw", type=Path, default=RAW)
    path = parser.parse_args().raw
    results = Results(path)
    studies = variants.studies(results)
    hardware = sorted({f"{row['hardware']}, torch {row['torch']}" for row in results.rows.values()})
    missing = variants.missing(results, None)
    by_study = {name: sum(study == name for study, _ in missing) for name in studies}
    hours = sum(variants.estimated_seconds(run, results) for _, run in missing) / 3600
    told = [f"{name} {count or 'follows'}" for name, count in by_study.items() if count or not studies[name]]
    lines = [
        "# Variants of Muon beside AdamW",
        "",
        f"Commands: `python benchmarks/variants.py` and `python benchmarks/variants_report.py`. {'; '.join(hardware)}, "
        f"one core; {len(results.rows)} runs in [{path.name}]({path.name}).",
        "",
        f"Runs missing: {', '.join(told) or 'none'}. Those known by now take {hours:.1f} hours of one core.",
        "",
        f"![Losses, updates and spectral norms]({path.stem}.png)",
    ]
    for name, searches in studies.items():
        if not any(find(search, results) for search in searches.values()):
            continue
        table = {"widths": widths_table, "momentum": momentum_table}.get(name, study_table)
        lines += ["", f"## {name}", "", *table(searches, results)]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")
    plot(studies["1M-300"], results, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
