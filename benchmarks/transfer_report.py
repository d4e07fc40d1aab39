"""The page of ``transfer.py``: excess losses of transferred rates, powers of the best rate, differences of policies.

The loss at a rate is the mean over its seeds, each less what that seed has above seed 0 at the rates that both have.
The best rate is the vertex of the parabola in octaves through the least of these losses and its neighbours, at least
``NEIGHBOUR`` octaves away. The excess
of a rate is what that parabola has above the vertex, or beyond its three rates the line between the two nearest ones.
Standard errors of both are deviations over ``DRAWS`` repetitions with normal noise on the losses. Its deviation is that
of the residuals in the cell, after the effects of rate and seed, the same for all rates: it is less below the best rate
and more above it. Noise moves the vertex below the other rates, so an excess is on average too large. Nothing within
two standard errors is a difference.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import fmean

from benchmarks import support, transfer, variants
from benchmarks.training_runs import estimate
from benchmarks.transfer import ARMS, BASE, CUTS, RAW, Cell, Rows
from benchmarks.variants import Run, loss, read_rows

BOUND = 0.02
"""Nats that a printed rate may cost."""
DRAWS = 400
NEIGHBOUR = 0.25
"""Octaves from the best rate to those that make a parabola with it, at least; closer ones differ by noise."""
VARIANTS_CELLS = [
    Cell(dim=256, steps=150),
    Cell(dim=512, steps=150),
    Cell(layers=4, rest=0.064),
    Cell(layers=4, steps=1200, rest=0.064),
    Cell(dim=256, layers=6, rest=0.064),
]
"""Cells that only ``variants.py`` has, with fewer rates."""
CHOSE_EXPONENT = [Cell(steps=150), Cell(dim=256, steps=150), Cell(dim=512, steps=150)]
"""Cells whose best rates led to ``WIDTH_EXPONENT``."""

Line = dict[float, float]
"""Octave of a rate to the loss there."""


def losses_by_rate(rows: Rows, rule: str, cell: Cell) -> dict[float, dict[int, float]]:
    """Return rate to seed to loss of the finished runs."""
    losses: dict[float, dict[int, float]] = {}
    for run, row in rows.items():
        if run.optimizer == rule and run == cell.run(rule, run.rate, run.seed):
            losses.setdefault(run.rate, {})[run.seed] = loss(row)
    return {rate: losses[rate] for rate in sorted(losses)}


def seed_offsets(losses: dict[float, dict[int, float]]) -> dict[int, float]:
    """Return what each seed has above seed 0, over the rates that both have."""
    above: dict[int, list[float]] = {0: [0.0]}
    for by_seed in losses.values():
        for seed in by_seed.keys() - {0}:
            if 0 in by_seed and math.isfinite(by_seed[seed] - by_seed[0]):
                above.setdefault(seed, []).append(by_seed[seed] - by_seed[0])
    return {seed: fmean(values) for seed, values in above.items()}


def noise(rows: Rows, cell: Cell) -> tuple[float, int]:
    """Return the deviation of a loss without the effects of its rate and its seed, and its degrees of freedom."""
    squares, degrees = 0.0, 0
    for rule in transfer.CENTRES:
        losses = losses_by_rate(rows, rule, cell).values()
        seeds = sorted({seed for by_seed in losses for seed in by_seed})
        complete = [[by_seed[seed] for seed in seeds] for by_seed in losses if by_seed.keys() == {*seeds}]
        complete = [values for values in complete if all(map(math.isfinite, values))]
        if len(complete) < 2 or len(seeds) < 2:
            continue
        of_seed = [fmean(values) for values in zip(*complete, strict=True)]
        for values in complete:
            middle = fmean(values) - fmean(of_seed)
            squares += sum((value - mean - middle) ** 2 for value, mean in zip(values, of_seed, strict=True))
        degrees += (len(complete) - 1) * (len(seeds) - 1)
    return (math.sqrt(squares / degrees) if degrees else math.nan), degrees


def vertex(line: Line) -> tuple[float, Callable[[float], float]]:
    """Return the octave of the least loss and the function that gives the loss at an octave."""
    octaves = sorted(line)
    index = min(range(len(octaves)), key=lambda index: line[octaves[index]])

    def between(octave: float) -> float:
        after = next((i for i in range(1, len(octaves)) if octaves[i] >= octave), len(octaves) - 1)
        left, right = octaves[after - 1], octaves[after]
        return line[left] + (line[right] - line[left]) * (octave - left) / (right - left)

    below = [octave for octave in octaves if octave <= octaves[index] - NEIGHBOUR]
    above = [octave for octave in octaves if octave >= octaves[index] + NEIGHBOUR]
    around = [*below[-1:], octaves[index], *above[:1]]
    if len(around) < 3 or not math.isfinite(sum(line[octave] for octave in around)):
        return octaves[index], between
    (a, b, c), (low, best, high) = around, (line[octave] for octave in around)
    slope = (best - low) / (b - a)
    curvature = ((high - best) / (c - b) - slope) / (c - a)

    def parabola(octave: float) -> float:
        return low + (octave - a) * slope + (octave - a) * (octave - b) * curvature

    best_octave = (a + b) / 2 - slope / (2 * curvature) if curvature > 0 else b
    return best_octave, lambda octave: parabola(octave) if a <= octave <= c else between(octave)


@dataclass(frozen=True)
class Fit:
    """The losses of one rule in one cell."""

    losses: dict[float, dict[int, float]]
    line: Line
    draws: tuple[Line, ...]

    @property
    def best(self) -> float:
        """The octave of the best rate."""
        return vertex(self.line)[0]

    @property
    def at_edge(self) -> bool:
        """Whether the best of the rates has none beside it."""
        return min(self.line, key=self.line.__getitem__) in (min(self.line), max(self.line))

    def best_error(self) -> float:
        """Return the standard error of the best octave."""
        return statistics.stdev(vertex(line)[0] for line in self.draws)

    def excess(self, rate: float) -> tuple[float, float]:
        """Return the excess loss of a rate and its standard error."""

        def of_line(line: Line) -> float:
            best, loss_at = vertex(line)
            return loss_at(math.log2(rate)) - loss_at(best)

        return of_line(self.line), statistics.stdev(map(of_line, self.draws))

    def paired(self, rate: float) -> list[float]:
        """Return the losses at a rate minus those at the best rate of seed 0, if that is another one, by seed."""
        first = {each_rate: by_seed[0] for each_rate, by_seed in self.losses.items() if 0 in by_seed}
        best_rate = min(first, key=first.__getitem__)
        best, at_rate = self.losses[best_rate], self.losses.get(rate, {})
        return [
            at_rate[seed] - best[seed] for seed in sorted(at_rate.keys() & best.keys()) if rate != best_rate
        ]


def fit(rows: Rows, rule: str, cell: Cell, pooled: float) -> Fit | None:
    """Return the losses of one rule in one cell; ``None`` with fewer than three rates with seed 0."""
    losses = losses_by_rate(rows, rule, cell)
    if sum(0 in by_seed for by_seed in losses.values()) < 3:
        return None
    offsets = seed_offsets(losses)
    deviation, degrees = noise(rows, cell)
    deviation = deviation if degrees >= 4 else pooled
    line: Line = {}
    seeds: dict[float, int] = {}
    for rate, by_seed in losses.items():
        values = [value - offsets[seed] for seed, value in by_seed.items() if seed in offsets]
        if values and all(map(math.isfinite, values)):
            line[math.log2(rate)], seeds[math.log2(rate)] = fmean(values), len(values)
    # The rates that have several seeds know the effects of these seeds only from each other: their mean is that of
    # seed 0, with its noise, and only the differences between them have less.
    repeated = sum(count > 1 for count in seeds.values())
    generator = random.Random(0)

    def draw() -> Line:
        common = generator.gauss(0, deviation / repeated**0.5) if repeated else 0.0
        noisy = {}
        for octave, value in line.items():
            if seeds[octave] == 1:
                noisy[octave] = value + generator.gauss(0, deviation)
            else:
                own = deviation * ((1 - 1 / repeated) / seeds[octave]) ** 0.5
                noisy[octave] = value + common + generator.gauss(0, own)
        return noisy

    return Fit(losses, line, tuple(draw() for _ in range(DRAWS)))


def signed(value: float, error: float) -> str:
    """Return a number and its standard error."""
    return f"{value:+.4f} ± {error:.4f}"


def mean_and_error(values: Sequence[float]) -> str:
    """Return mean, standard error and number of paired differences."""
    if len(values) < 2:
        return "".join(f"{value:+.4f} (1)" for value in values)
    return f"{signed(fmean(values), statistics.stdev(values) / len(values) ** 0.5)} ({len(values)})"


def verdict(excess: tuple[float, float]) -> str:
    """Return whether an excess is within the bound, as far as two standard errors tell."""
    low, high = excess[0] - 2 * excess[1], excess[0] + 2 * excess[1]
    return "yes" if high <= BOUND else "no" if low > BOUND else "open"


def name_of(cell: Cell) -> str:
    """Return how the tables name a cell."""
    rest = "" if cell.rest == BASE.rest else f", rest {cell.rest:g}"
    return f"width {cell.dim}, {cell.layers} layers, {cell.steps} x {cell.tokens}{rest}"


def cells() -> list[Cell]:
    """Return all cells of the transfer, the base first."""
    return list(dict.fromkeys([BASE, *itertools.chain(*CUTS.values()), *VARIANTS_CELLS]))


def pooled_noise(rows: Rows) -> float:
    """Return the deviation of a loss over all cells, for those with too few runs."""
    deviations = [(value, degrees) for cell in cells() for value, degrees in [noise(rows, cell)] if degrees]
    degrees = sum(degrees for _, degrees in deviations)
    return math.sqrt(sum(d * value**2 for value, d in deviations) / degrees) if degrees else math.nan


def fits_of(rows: Rows, rule: str) -> dict[Cell, Fit]:
    """Return the cells of a rule that have enough runs."""
    pooled = pooled_noise(rows)
    return {cell: fitted for cell in cells() if (fitted := fit(rows, rule, cell, pooled))}


def printed_rate(tuned: float, rule: str, cell: Cell) -> float:
    """Return what ``python -m deepspeed_muon rates`` makes of the tuned rate."""
    return transfer.rounded(tuned * transfer.printed_factor(rule, cell))


def chose_a_constant(rule: str, cell: Cell) -> bool:
    """Return whether a cell says nothing about the printed rate, because a constant was chosen by it."""
    return cell == BASE or (rule == "match_rms_adamw" and cell in CHOSE_EXPONENT)


@dataclass(frozen=True)
class Worst:
    """What the printed and the tuned rate cost at most, with standard errors, in the cells that chose no constant."""

    cells: int
    printed: tuple[float, float]
    printed_in: Cell
    tuned: tuple[float, float]
    tuned_in: Cell
    verdicts: tuple[str, ...]


def worst(rows: Rows, rule: str) -> Worst:
    """Return the largest costs of a rule, whose base must be complete."""
    tuned = transfer.tuned_rate(rows, rule)
    assert tuned is not None, f"the base of {rule} is not complete"
    fits = {cell: fit for cell, fit in fits_of(rows, rule).items() if not chose_a_constant(rule, cell)}
    printed = {cell: fit.excess(printed_rate(tuned, rule, cell)) for cell, fit in fits.items()}
    kept = {cell: fit.excess(tuned) for cell, fit in fits.items()}
    printed_in, tuned_in = (max(costs, key=costs.__getitem__) for costs in (printed, kept))
    verdicts = tuple(map(verdict, printed.values()))
    return Worst(len(fits), printed[printed_in], printed_in, kept[tuned_in], tuned_in, verdicts)


def transfer_tables(rows: Rows) -> list[str]:
    """Return for each rule the excess of its printed rate in each cell, then the exponents of its best rate."""
    lines: list[str] = []
    for rule in transfer.CENTRES:
        tuned = transfer.tuned_rate(rows, rule)
        lines += ["", f"## {'original' if rule == 'muon' else rule}", ""]
        if tuned is None:
            lines += ["The runs of the base are not complete."]
            continue
        fits = fits_of(rows, rule)
        table, counts = [], {"yes": 0, "open": 0, "no": 0}
        for cell, fitted in fits.items():
            printed = printed_rate(tuned, rule, cell)
            chose = chose_a_constant(rule, cell)
            excess = fitted.excess(printed)
            if not chose:
                counts[verdict(excess)] += 1
            seeds = sum(len(by_seed) for by_seed in fitted.losses.values())
            table.append(
                [
                    name_of(cell) + (" *" if chose else ""),
                    f"{len(fitted.losses)} ({seeds})",
                    f"{2**fitted.best:.3g}{', at the edge' if fitted.at_edge else ''}",
                    f"{math.log2(printed) - fitted.best:+.2f} ± {fitted.best_error():.2f}",
                    f"{printed:.3g}",
                    signed(*excess),
                    mean_and_error(fitted.paired(printed)),
                    verdict(excess),
                    signed(*fitted.excess(tuned)) if printed != tuned else "",
                ]
            )
        heads = ["cell", "rates (runs)", "best rate", "octaves of the printed one above it", "printed"]
        heads += ["excess of the printed", "paired with the best of seed 0 (seeds)", f"within {BOUND}"]
        heads += ["excess of the tuned"]
        lines += [
            f"Tuned at the base: {tuned:.3g}. In the cells that chose no constant (without *) the printed rate is "
            f"within {BOUND} nats of the best in {counts['yes']}, not in {counts['no']}, and open in {counts['open']}: "
            "there the bound is within two standard errors.",
            "",
            *support.table(heads, table),
            "",
            *support.table(["cut", "power of the best rate", "cells"], exponents(fits)),
        ]
    return lines


def exponents(fits: dict[Cell, Fit]) -> list[list[object]]:
    """Return for each cut with three cells the power of the best rate, by weighted least squares, with its error."""
    fields = {"width": "dim", "depth": "layers", "steps": "steps", "batch": "tokens"}
    table: list[list[object]] = []
    for cut, of_cut in CUTS.items():
        points = [
            (math.log2(getattr(cell, fields[cut])), fits[cell].best, max(fits[cell].best_error(), 0.02) ** -2)
            for cell in of_cut
            if cell in fits and len(fits[cell].line) >= 5 and not fits[cell].at_edge
        ]
        if len(points) < 3:
            continue
        total = sum(weight for *_, weight in points)
        middle = sum(weight * x for x, _, weight in points) / total
        spread = sum(weight * (x - middle) ** 2 for x, _, weight in points)
        slope = sum(weight * (x - middle) * y for x, y, weight in points) / spread
        table.append([cut, f"{slope:+.2f} ± {spread**-0.5:.2f}", len(points)])
    return table


def repeated_differences(rows: Rows) -> list[float]:
    """Return the losses of the base on another machine minus those of the same rates and seeds."""
    again = read_rows(transfer.REPEATED)
    return [loss(row) - loss(rows[run]) for run, row in again.items() if run in rows]


def repeated(rows: Rows) -> list[str]:
    """Return what another machine changed in the runs of the base that it repeated."""
    differences = repeated_differences(rows)
    if not differences:
        return []
    machines = "; ".join(sorted({row["hardware"] for row in read_rows(transfer.REPEATED).values()}))
    return [
        f"The base again ({machines}, `--repeat-base`): the loss is {mean_and_error(differences)} above that of the "
        f"same rate and seed; the deviation of the difference is {statistics.stdev(differences):.4f}. Where two "
        "policies are compared that different machines trained, this standard error is added in quadrature.",
        "",
    ]


def machine_error(rows: Rows) -> float:
    """Return the standard error of what another machine changes in the mean loss of a cell."""
    differences = repeated_differences(rows)
    return statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0


def policy_tables(rows: Rows) -> list[str]:
    """Return for each cell the losses of the arms and their differences from "all", of equal seeds."""
    lines = []
    for size, steps, tokens in transfer.POLICY_CELLS:
        cell = transfer.policy_cell(size, steps, tokens)
        arms = {arm: transfer.policy_runs(cell, [arm], seeds=5) for arm in ARMS}
        table = [
            policy_row(rows, arm, runs, arms["all"])
            for arm, runs in arms.items()
            if any(run in rows for run in runs)
        ]
        if len(table) > 1:
            rate = transfer.BEST_RATE[steps]
            lines += ["", f"## {size}, {steps} steps of {tokens} tokens, rate {rate:g}", ""]
            heads = ["clipped, momentum", "loss ± standard error (seeds)", 'minus "all" (pairs)', ""]
            lines += support.table([*heads, "share of steps clipped"], table)
    return lines


def policy_row(rows: Rows, arm: str, runs: Sequence[Run], base: Sequence[Run]) -> list[object]:
    """Return one row of a table of policies."""
    values = [loss(rows[run]) for run in runs if run in rows]
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.4f}" if len(values) > 1 else ""
    pairs = [
        (rows[run], rows[other])
        for run, other in zip(runs, base, strict=True)
        if run in rows and other in rows and run != other
    ]
    mixed = any(row["hardware"] != other["hardware"] for row, other in pairs)
    differences = [loss(row) - loss(other) for row, other in pairs]
    minus_base, says = mean_and_error(differences), ""
    if len(differences) > 2:
        difference = estimate(differences, other_error=machine_error(rows) if mixed else 0.0)
        minus_base = f"{signed(difference.mean, difference.error)} ({difference.seeds})"
        says = difference.verdict()
    shares = [rows[run]["clipped"] for run in runs if run in rows and rows[run].get("clipped")]
    clipped = " / ".join(f"{fmean(of_set):.2f}" for of_set in zip(*shares, strict=True))
    return [arm, f"{fmean(values):.4f}{error} ({len(values)})", minus_base, says, clipped]


def page(rows: Rows, runs: Iterable[Run]) -> list[str]:
    """Return the page of all rows; ``runs`` are those of the raw file beside it."""
    of_file = [rows[run] for run in runs]
    hardware = sorted({f"{row['hardware']}, torch {row['torch']}" for row in of_file})
    left = transfer.missing(rows)
    hours = sum(transfer.seconds(run) for of_stage in left.values() for run in of_stage) / 3600
    return [
        "# Transfer of rates, clipping policies, momentum warm-up",
        "",
        f"Command: `python benchmarks/transfer.py --table`. {'; '.join(hardware)}, one thread; {len(of_file)} runs in "
        f"[{RAW.name}]({RAW.name}), {sum(row['seconds'] for row in of_file) / 3600:.1f} core hours, and those of "
        f"[{variants.RAW.name}]({variants.RAW.name}). Not trained yet: {sum(map(len, left.values()))} runs, about "
        f"{hours:.1f} core hours, and the seeds at best rates that are not known.",
        "",
        "How losses, best rates, excesses and standard errors are made: `benchmarks/transfer_report.py`. A cell with * "
        "chose a constant. The printed rate is what `python -m deepspeed_muon rates` makes of the tuned one.",
        "",
        *repeated(rows),
        *transfer_tables(rows),
        "",
        "# Clipping policies and momentum warm-up",
        "",
        '"adamw" clips the gradients that AdamW takes by their own norm and leaves Muon\'s, "separate" clips each by '
        "its own norm. The momentum rises linearly from 0.85 to 0.95. Shares are of the norms that the policy takes, "
        "Muon's first.",
        *policy_tables(rows),
    ]


def write(out: Path) -> None:
    """Put the runs of ``out`` into ``RAW``, sorted, and write the page beside it."""
    raw = read_rows(RAW) | read_rows(out)
    runs = sorted(raw, key=astuple)
    RAW.write_text("".join(json.dumps(raw[run]) + "\n" for run in runs))
    RAW.with_suffix(".md").write_text("\n".join(page(read_rows(variants.RAW) | raw, runs)) + "\n")
