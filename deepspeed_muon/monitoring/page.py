"""``python -m deepspeed_muon health``: judges a run by the files of its monitor, as text or as a page with charts.

DeepSpeed's ``csv_monitor`` writes one file per event; the events of this optimizer are the summaries of
:mod:`~deepspeed_muon.monitoring.recorder`. :func:`write_page` writes one self-contained HTML file.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import html
import io
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_muon.errors import ConfigError
from deepspeed_muon.monitoring.diagnosis import Finding, diagnose, line

_OURS = "Train_Muon_"
_STEP = _OURS + "step"
_MOST_POINTS = 2000

Series = list[tuple[int, float]]
"""The values of an event, as (position, value); a position is a step or a number of training samples."""


_CHARTS = {
    "Where the step's time goes": ("time_gather", "time_newton_schulz", "time_scatter"),
    "Seconds of the inner step": ("seconds",),
    "Update RMS": ("update_rms",),
    "Change of the matrices in a step": ("update_over_weight",),
    "Clipping": ("clip_coefficient", "clip_least", "clipped"),
    "Orthogonality": ("orthogonality_error", "alignment"),
    "Largest singular value": ("sigma_max",),
    "Stable rank": ("stable_rank",),
    "Quantisation error of communication": ("wire_error_direction", "wire_error_update"),
    "Matrices computed again": ("redone", "failed"),
}
"""Event names by title of the chart, without "Train/Muon/"; docs/health.md explains them."""


def add_subcommand(subparsers: Any) -> None:
    """Add the command ``health`` to the result of ``ArgumentParser.add_subparsers``.

    Its parser sets ``run``, a function of the parsed arguments that returns the exit status.
    """
    parser = subparsers.add_parser("health", help="judge a run by the files of its csv_monitor")
    where = "where DeepSpeed's csv_monitor wrote: output_path/job_name"
    parser.add_argument("run_folder", type=Path, metavar="RUN", help=where)
    parser.add_argument("--html", action="store_true", help="write RUN/health.html, a page with charts")
    parser.set_defaults(run=_health)


def _health(parsed: argparse.Namespace) -> int:
    """Print the findings; return 1 if one of them is bad."""
    folder: Path = parsed.run_folder
    page = folder / "health.html"
    results = write_page(folder, page) if parsed.html else findings(read_run(folder))
    for level, _, text in results:
        print(f"{level:4}  {text}")
    if parsed.html:
        print(f"Page: {page}")
    return int(any(finding.level == "bad" for finding in results))


def read_run(folder: Path) -> dict[str, Series]:
    """Read every event of a run.

    Args:
        folder: The folder of ``csv_monitor``: its ``output_path`` joined with its ``job_name``.

    Returns:
        The series of each file by its name without suffix. Positions are steps if the run has samples of health, else
        as the program counted them. A resumed run repeats positions: the last value of a position counts.

    Raises:
        ConfigError: If the folder has no CSV file, or one that ``csv_monitor`` did not write.
    """
    files = sorted(folder.glob("*.csv"))
    if not files:
        below = sorted({path.parent.name for path in folder.glob("*/*.csv")})
        hint = f" Its folders {', '.join(below)} have some." if below else ""
        raise ConfigError(
            f"{folder} has no CSV file.{hint} Add "
            '"csv_monitor": {"enabled": true, "output_path": FOLDER, "job_name": RUN} to DeepSpeed\'s config, and give '
            "FOLDER/RUN."
        )
    run: dict[str, Series] = {}
    for path in files:
        values: dict[int, float] = {}
        try:
            with path.open(newline="") as file:
                rows = [row for row in csv.reader(file) if row and row[0] != "step"]
            for row in rows:
                # The last one may have been truncated by a full disk or a crash.
                is_last = row is rows[-1]
                with contextlib.suppress(ValueError, IndexError) if is_last else contextlib.nullcontext():
                    values[int(float(row[0]))] = float(row[1])
        except (ValueError, IndexError, OverflowError, csv.Error) as error:
            raise ConfigError(
                f"{path} is not a file of DeepSpeed's csv_monitor, whose lines are a step and a value: {error}"
            ) from error
        run[path.stem] = sorted(values.items())
    return _by_step(run)


def _by_step(run: dict[str, Series]) -> dict[str, Series]:
    """Return a run whose series all have steps as positions, converted from training samples where necessary.

    The events of DeepSpeed and of health have training samples as positions; the event "step" has the step for each.
    """
    # Example: with 32 samples a step, "step" has (3200, 100), (6400, 200). A loss at 4800 is that of step 150; one at
    # 6432, logged after the last sample of health, is extrapolated to step 201.
    # 1. Steps by training samples, extrapolated linearly to the last position.
    numbers = {position: step for position, step in run.get(_STEP, []) if math.isfinite(step)}
    step_of = sorted({0: 0.0, **numbers}.items())
    if len(step_of) == 1:
        return run
    by_samples = {name for name in run if name.startswith(("Train_Samples_", _OURS))}
    samples = sorted({x for name in by_samples for x, _ in run[name]})
    # np.interp is constant beyond its last point, so one at the last position is added.
    (x0, step0), (x1, step1) = step_of[-2:]
    step_of.append((samples[-1], step1 + (samples[-1] - x1) * (step1 - step0) / (x1 - x0)))
    steps = np.interp(samples, [x for x, _ in step_of], [step for _, step in step_of]).tolist()
    step_by_samples = {sample: round(step) for sample, step in zip(samples, steps, strict=True)}
    # 2. A program may count its own events in samples, too: their positions then exceed the last step.
    by_samples |= {
        name
        for name, series in run.items()
        if series and series[-1][0] > steps[-1] and all(x in step_by_samples for x, _ in series)
    }
    return {
        name: [(step_by_samples[x], value) for x, value in series] if name in by_samples else series
        for name, series in run.items()
    }


def findings(run: Mapping[str, Series]) -> list[Finding]:
    """Judge a run: return what is bad, worth a look or good in it, in this order."""
    ours = {
        name.removeprefix(_OURS): values for name, values in run.items() if name.startswith(_OURS) and values
    }
    # 1. The last sample, which need not have all events that earlier ones have; where its step was skipped, the last
    # one that measured matrices has theirs.
    end = max((position for position, _ in ours.get("step") or itertools.chain(*ours.values())), default=0)
    measured = max((position for position, _ in ours.get("update_rms", []) if position <= end), default=end)
    sample: dict[str, float] = {}
    for name, values in ours.items():
        value_at = dict(values)
        if (position := end if end in value_at else measured) in value_at:
            sample[name] = value_at[position]
    for name in sample.keys() & {"redone", "failed"}:  # a process that resumed the run counted from 0 again
        sample[name] = max(value for _, value in ours[name])
    # 2. What is out of its range, there and earlier.
    results = list(_loss_findings(run))
    if sample:
        last = diagnose(sample)
        results += [*last, *_earlier_findings(ours, {finding.key for finding in last})]
        if sample.get("redone") == sample.get("failed") == 0:
            results.append(Finding("good", "failed", "Every orthogonalised matrix passed its check."))
        if text := line(sample):
            results.append(Finding("good", "line", f"Last sample: {text}."))
    else:
        text = (
            "There are no samples of health: the run had fewer steps than `health`, health was off, or another Muon "
            "ran."
        )
        results.append(Finding("look", "no samples", text))
    return sorted(results, key=lambda finding: ("bad", "look", "good").index(finding.level))


def _earlier_findings(ours: Mapping[str, Series], keys: Collection[str]) -> Iterator[Finding]:
    """Yield where steps were skipped, or clipped to nothing, at their worst, if the last sample does not show it.

    Args:
        ours: The series of this optimizer's events.
        keys: Keys of the findings about the last sample.
    """
    by_position: dict[int, dict[str, float]] = {}
    for name in ("skipped", "clipped", "clip_coefficient", "clip_least", "clip_stalled"):
        for position, value in ours.get(name, []):
            by_position.setdefault(position, {})[name] = value
    earlier: dict[str, dict[int, Finding]] = {}
    for position, values in by_position.items():
        for finding in diagnose(values):
            earlier.setdefault(finding.key, {})[position] = finding
    for pair in itertools.pairwise(sorted(by_position)):
        if not earlier.get("clip_coefficient", {}).keys().isdisjoint(pair):
            for position in pair:  # the beginning or the end of what that finding says
                earlier.get("clip_stalled", {}).pop(position, None)
    for key, finding_of in earlier.items():
        if key in keys or not finding_of:
            continue
        worst = (min if key == "clip_coefficient" else max)((by_position[n][key], n) for n in finding_of)[1]
        level, _, text = finding_of[worst]
        count, total = len(finding_of), len(ours[key])
        yield Finding(
            # A loss scale that is too large at first skips steps in the first samples only.
            level if 2 * count >= total else "look",
            key,
            f"{text} That was at {'step' if 'step' in ours else 'position'} {worst}, the worst of {count} such samples "
            f"of {total}; the last one is better.",
        )


def _loss_series(run: Mapping[str, Series]) -> dict[str, Series]:
    return {name: values for name, values in run.items() if "loss" in name and "scale" not in name and values}


def _loss_findings(run: Mapping[str, Series]) -> Iterator[Finding]:
    for name, values in _loss_series(run).items():
        if not all(math.isfinite(value) for _, value in values):
            first = next(position for position, value in values if not math.isfinite(value))
            yield Finding("bad", "loss", f"{name} is not finite from position {first} on.")
        elif len(values) > 1:
            text = f"{name} went from {values[0][1]:.4f} to {values[-1][1]:.4f}."
            yield Finding("good" if values[-1][1] < values[0][1] else "look", "loss", text)


def write_page(folder: Path, out: Path) -> list[Finding]:
    """Write the page of the run in ``folder`` to ``out`` and return its findings.

    Raises:
        ConfigError: If the run cannot be read (see :func:`read_run`), or matplotlib is not installed.
    """
    run = read_run(folder)
    results = findings(run)
    # 1. The series of each chart.
    charts = {"Loss": _loss_series(run)}
    for title, names in _CHARTS.items():
        charts[title] = {name: run.get(_OURS + name, []) for name in names}
    charts["Learning rates"] = {
        name: values for name, values in run.items() if name.endswith("lr") or "lr_" in name
    }
    # 2. The findings, the charts that have values, and a table of all events.
    axis = "step" if _STEP in run else "step or sample"
    items = (f'<li class="{level}"><b>{level}</b> {html.escape(text)}</li>' for level, _, text in results)
    body = ["<ul>", *items, "</ul>"]
    for title, series in charts.items():
        series = {name: _thinned(values) for name, values in series.items() if values}
        if series:
            body.append(f"<figure><h2>{html.escape(title)}</h2>{_chart(series, axis)}</figure>")
    body.append("<section><h2>All numbers</h2><table>")
    body.append("<tr><th>event</th><th>first</th><th>last</th><th>at</th><th>values</th></tr>")
    for name, values in run.items():
        if values:
            cells = (
                html.escape(name),
                f"{values[0][1]:.6g}",
                f"{values[-1][1]:.6g}",
                values[-1][0],
                len(values),
            )
            body.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    body.append("</table></section>")
    title = html.escape(folder.resolve().name)
    out.write_text(_PAGE.format(title=title, body="\n".join(body)), encoding="utf-8")
    return results


def _chart(series: Mapping[str, Series], axis: str) -> str:
    """Return a chart as an SVG element; fractions of the step's time are stacked."""
    pyplot = pyplot_for("the page")
    figure, axes = pyplot.subplots(figsize=(6.4, 3.2))
    if all(name.startswith("time_") for name in series):
        positions = sorted(set.intersection(*({x for x, _ in values} for values in series.values())))
        fractions = [[dict(values)[x] for x in positions] for values in series.values()]
        axes.stackplot(positions, fractions, labels=list(series), alpha=0.8)
        axes.set_ylim(0, 1)
    else:
        marker = "o" if max(map(len, series.values())) < 40 else ""
        for name, values in series.items():
            axes.plot(*zip(*values, strict=True), label=name, marker=marker, markersize=3)
    axes.set_xlabel(axis)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", bbox_inches="tight")
    pyplot.close(figure)
    svg = drawn.getvalue()
    return svg[svg.index("<svg") :]  # without the XML declaration and document type of a file


def _thinned(values: Sequence[tuple[int, float]]) -> Series:
    """Return at most 2,000 of the finite values, evenly spaced."""
    finite = [(x, y) for x, y in values if math.isfinite(y)]
    return finite[:: math.ceil(len(finite) / _MOST_POINTS)] if finite else []


def pyplot_for(feature: str) -> Any:
    """Return matplotlib's pyplot with a backend that needs no display.

    Raises:
        ConfigError: If matplotlib is not installed; it says that ``feature`` needs it.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"{feature} needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    return pyplot


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body {{ font: 16px/1.45 sans-serif; margin: 1.5rem; color: #222 }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(380px, 1fr)); gap: 1rem }}
ul, section {{ grid-column: 1 / -1 }} figure {{ margin: 0 }} svg {{ width: 100%; height: auto }}
.look {{ color: #a06c00 }} .bad {{ color: #c62828 }} td, th {{ padding: .2rem .7rem; text-align: left }}
</style></head><body><h1>{title}</h1><main>
{body}
</main></body></html>
"""
