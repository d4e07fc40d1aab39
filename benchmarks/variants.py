"""Losses of all variants of Muon and of AdamW after equal tokens and equally many trials; best rates over widths.

    python benchmarks/variants.py                  # trains what results/variants.jsonl does not have
    python benchmarks/variants_report.py           # tables and curves of what is there

The task is the demo's: its GPT, its text, sequences of 128 bytes; here one process without DeepSpeed, fp32, 512 tokens
a step, cosine schedule. Every optimizer updates the hidden matrices only; all the rest has AdamW at a rate of its own
(``rest``), so an optimizer is three numbers: rate, decay (rate times ``weight_decay``: the share of a weight that a
step takes away) and rest. A search tries one after the other in powers of two or four with one seed, goes on while the
best is at an edge, and gives the best point all seeds. A variant without weight decay tries rates in between instead.

Every run becomes one line of ``--out``, appended when it has ended. Seconds are processor time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "examples")]

from deepspeed_muon.variants import VARIANTS  # noqa: E402  # the path is set above

RAW = REPOSITORY / "benchmarks" / "results" / "variants.jsonl"
SEQUENCES, LENGTH = 4, 128
HEADS = 4
SIZES = {"1M": {"dim": 128, "layers": 4}, "5M": {"dim": 256, "layers": 6}}
WIDTHS = (128, 256, 512)
ADAMW = "AdamW"
RULES = ("muon", "match_rms_adamw", "spectral")
"""What is tried at all widths; "muon" has the rule "original"."""
ITERATIONS: dict[str, dict[str, Any]] = {
    "muon": {},  # quintic in 5 steps
    "quintic, 4 steps": {"ns_steps": 4},
    "polar_express, 5 steps": {"ns_schedule": "polar_express", "ns_steps": 5},
    "polar_express, 4 steps": {"ns_schedule": "polar_express", "ns_steps": 4},
    "polar_express_5": {"ns_schedule": "polar_express_5"},
    "cans": {"ns_schedule": "cans"},
    "quintic, 5 steps in torch": {"ns_backend": "torch"},
    "quintic, 4 steps after row sums": {"ns_steps": 4, "ns_backend": "torch"},
    "polar_express, 4 steps after row sums": {
        "ns_schedule": "polar_express",
        "ns_steps": 4,
        "ns_backend": "torch",
    },
}
"""Iterations of Newton-Schulz. "After row sums": preconditioned as in Turbo-Muon."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    ADAMW: {},
    **{rule: {"adjust_lr_fn": rule} for rule in ("match_rms_adamw", "spectral")},
    **ITERATIONS,
    **{name: {"variant": name} for name in VARIANTS},
    **{
        f"{name}, {dtype} momentum": {"variant": name, "momentum_dtype": dtype}
        for name in VARIANTS
        for dtype in ("bf16", "int8")
    },
}
"""Name to the settings of ``deepspeed_muon.Muon``."""
FIRST_RATE = {ADAMW: 0.004, "match_rms_adamw": 0.016, "spectral": 0.004}
"""Where the search begins; 0.04 for all others."""
MOMENTUM_SEEDS = {"muon": {300: 5, 1200: 5, 5000: 1}, "muon_eq": {300: 5, 1200: 5}}
"""Steps to seeds of the runs with other momentum dtypes, at the best point of 300 steps."""

Row = dict[str, Any]
"""A finished run: the fields of :class:`Run`, then what ``variants_training.train`` returns."""


@dataclass(frozen=True)
class Run:
    """One training."""

    optimizer: str
    dim: int
    layers: int
    steps: int
    rate: float
    decay: float
    rest: float
    seed: int = 0
    tokens: int = SEQUENCES * LENGTH
    """Tokens a step."""
    clip: str = "all"
    """A key of ``variants_training.CLIPPED``."""
    momentum_warmup: int = 0
    """Steps over which the momentum rises from 0.85 to 0.95; with 0 it is 0.95 from the first step."""

    def muon_settings(self) -> dict[str, Any]:
        """The arguments of ``deepspeed_muon.Muon``."""
        rates = {"muon_lr": self.rate, "adam_lr": self.rest}
        decay = {"muon_weight_decay": self.decay / self.rate} if self.decay else {}
        warmup = {"momentum_warmup": {"from": 0.85, "steps": self.momentum_warmup}}
        warmup = warmup if self.momentum_warmup else {}
        return {**rates, **decay, **warmup, **OPTIMIZERS[self.optimizer], "health": False}


def read_rows(path: Path) -> dict[Run, Row]:
    """Return the finished runs of a file of JSON lines, an empty dictionary if there is no file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    names = [field.name for field in fields(Run)]
    return {Run(**{name: row[name] for name in names if name in row}): row for row in rows}


class Results:
    """The finished runs of a file of JSON lines; a run that is not there is trained, or ends a search."""

    def __init__(self, path: Path, *, train: bool = False) -> None:
        self.path, self.train = path, train
        self.rows = read_rows(path)

    def row(self, run: Run) -> Row:
        """Return the finished run."""
        if run not in self.rows and self.train:
            from benchmarks.variants_training import train

            self.rows[run] = row = train(run)
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{row['loss']} after {row['seconds']} s, {run}", flush=True)
        return self.rows[run]


def loss(row: Row) -> float:
    """Return the last validation loss; infinite if the run diverged."""
    return math.inf if row["loss"] is None else row["loss"]


@dataclass(frozen=True)
class Axis:
    """The values of one number that a search tries: the best so far times ``ratio ** k`` for ``k`` in ``powers``."""

    field: str
    ratio: float
    powers: tuple[int, ...]
    extensions: int = 2
    """How often it goes on beyond an edge that is the best."""


@dataclass(frozen=True)
class Found:
    """What a search found."""

    start: Run
    point: Run
    """The best one, with the first seed."""
    rows: list[Row]
    """All runs."""
    best: list[Row]
    """The runs of the best point, by seed."""


def search(results: Results, start: Run, axes: Sequence[Axis] = (), *, seeds: int, around: int = 0) -> Found:
    """Find the best point, one axis after the other, and give it and ``around`` rates on each side all seeds.

    Raises:
        KeyError: A run is missing and ``results`` does not train.
    """
    tried: dict[Run, Row] = {}

    def loss_at(run: Run) -> float:
        tried[run] = results.row(run)
        return loss(tried[run])

    point = start
    for axis in axes:
        centre, powers = getattr(point, axis.field), list(axis.powers)
        for extension in range(axis.extensions + 1):
            line = [replace(point, **{axis.field: rounded(centre * axis.ratio**k)}) for k in powers]
            best = min(line, key=loss_at)
            if extension == axis.extensions or best not in (line[0], line[-1]):
                break
            powers = [powers[0] - 1, *powers] if best == line[0] else [*powers, powers[-1] + 1]
        point = best
    rates = [rounded(point.rate * 2.0**k) for k in range(-around, around + 1)]
    for seed, rate in itertools.product(range(seeds), rates):
        loss_at(replace(point, rate=rate, seed=seed))
    return Found(
        start, point, list(tried.values()), [tried[replace(point, seed=seed)] for seed in range(seeds)]
    )


def rounded(value: float) -> float:
    """Return six digits, so that a value is the same however it was computed."""
    return float(f"{value:.6g}")


def first_point(optimizer: str, dim: int, layers: int, steps: int) -> Run:
    """Return where the search begins."""
    return Run(optimizer, dim, layers, steps, FIRST_RATE.get(optimizer, 0.04), 0.002, 0.016)


def first_search(results: Results, start: Run) -> Found:
    """Up to twelve trials, more where the best is at an edge, and five seeds."""
    # The rates again at last, since the best one depends on the others.
    rates, rest = Axis("rate", 2, (-3, -2, -1, 0, 1, 2)), Axis("rest", 4, (-1, 0, 1))
    return search(
        results, start, (rates, Axis("decay", 4, (-1, 0, 1)), rest, Axis("rate", 2, (-1, 0, 1))), seeds=5
    )


def study(results: Results, optimizer: str) -> dict[str, Found]:
    """Search for an optimizer at both sizes and both numbers of steps; return what was found by size and steps."""
    near = (Axis("rate", 2, (-1, 0, 1)),)
    first = first_search(results, first_point(optimizer, **SIZES["1M"], steps=300))
    longer = search(results, replace(first.point, steps=1200), near, seeds=3)
    larger = search(results, replace(first.point, **SIZES["5M"]), near, seeds=3)
    # The best rate moves with the steps as it does at 1M: a trial here takes too long.
    rate = rounded(larger.point.rate * (longer.point.rate / first.point.rate))
    last = search(results, replace(larger.point, steps=1200, rate=rate), seeds=3)
    return {"1M-300": first, "1M-1200": longer, "5M-300": larger, "5M-1200": last}


def widths(results: Results, rule: str) -> list[Found]:
    """Search for the best rate at each width, with two layers and 150 steps."""
    axes = (Axis("rate", 2, (-2, -1, 0, 1, 2)),)
    starts = [first_point(rule, width, 2, 150) for width in WIDTHS]
    return [search(results, start, axes, seeds=3, around=1) for start in starts]


def iterations(results: Results, best: Run) -> dict[str, Found]:
    """Give every iteration five seeds at the best point of plain Muon."""
    return {name: search(results, replace(best, optimizer=name), seeds=5) for name in ITERATIONS}


def momenta(results: Results, best: Run) -> dict[str, Found]:
    """Run every momentum dtype at the best point of a variant; by name and steps, fp32 first."""
    variant, found = best.optimizer, {}
    for steps, seeds in MOMENTUM_SEEDS[variant].items():
        for name in (variant, *(f"{variant}, {dtype} momentum" for dtype in ("bf16", "int8"))):
            start = replace(best, optimizer=name, steps=steps)
            found[f"{name}, {steps} steps"] = search(results, start, seeds=seeds)
    return found


def main() -> None:
    """Train what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RAW)
    results = Results(parser.parse_args().out, train=True)
    found = {optimizer: study(results, optimizer) for optimizer in (ADAMW, *VARIANTS)}
    for rule in RULES:
        widths(results, rule)
    iterations(results, found["muon"]["1M-300"].point)
    for variant in MOMENTUM_SEEDS:
        momenta(results, found[variant]["1M-300"].point)


if __name__ == "__main__":
    main()
