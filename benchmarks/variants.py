"""Losses of all variants of Muon and of AdamW after equal tokens and equally many trials; best rates over widths.

    python benchmarks/variants.py --dry-run        # which runs are missing, and how long they take
    python benchmarks/variants.py --budget 60      # goes on with what is missing, for an hour
    python benchmarks/variants_report.py           # tables and curves of what is there

The task is the demo's: its GPT, its text, sequences of 128 bytes; here one process without DeepSpeed, fp32, 512 tokens
a step, cosine schedule. Every optimizer updates the hidden matrices only; all the rest has AdamW at a rate of its own
(``rest``), so an optimizer is three numbers: rate, decay (rate times ``weight_decay``: the share of a weight that a
step takes away) and rest. A search tries one after the other in powers of two or four with one seed, goes on while the
best is at an edge, and gives the best point all seeds. A variant without weight decay tries rates in between instead.

Every run is a process and becomes one line of ``--out``, appended when it has ended. Seconds are processor time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "examples")]

from deepspeed_muon.variants import VARIANTS  # noqa: E402  # the path is set above

RAW = REPOSITORY / "benchmarks" / "results" / "variants.jsonl"
SEQUENCES, LENGTH = 4, 128
TOKENS_PER_STEP = SEQUENCES * LENGTH
HEADS = 4
SIZES = {"1M": (128, 4), "5M": (256, 6)}
"""Width and layers."""
WIDTHS = (128, 256, 512)
ADAMW = "AdamW"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    ADAMW: {},
    **{name: {"variant": name} for name in VARIANTS},
    # Rules of the widths; "original" is plain "muon".
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw"},
    "spectral": {"adjust_lr_fn": "spectral"},
    # Iterations; "muon" is quintic in 5 steps.
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
    **{
        f"{name}, {dtype} momentum": {"variant": name, "momentum_dtype": dtype}
        for name in VARIANTS
        for dtype in ("bf16", "int8")
    },
}
"""Name to the settings of ``deepspeed_muon.Muon``. "After row sums": preconditioned as in Turbo-Muon."""
FIRST_RATE = {ADAMW: 0.004, "match_rms_adamw": 0.016, "spectral": 0.004}
"""Where the search begins; 0.04 for all others."""
RULES = ("muon", "match_rms_adamw", "spectral", "hyperball")
ITERATIONS = tuple(name for name, settings in OPTIMIZERS.items() if any(key[:3] == "ns_" for key in settings))
MOMENTUM_SEEDS = {300: 5, 1200: 5, 5000: 1}
"""Steps to seeds of the runs with other momentum dtypes, at the best point of 300 steps."""

Row = dict[str, Any]
"""A finished run: the fields of :class:`Run`, then what :func:`train` returns."""


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

    @property
    def key(self) -> str:
        """What tells it from other runs."""
        return json.dumps(asdict(self))

    def muon_settings(self) -> dict[str, Any]:
        """The arguments of ``deepspeed_muon.Muon``."""
        rates = {"muon_lr": self.rate, "adam_lr": self.rest}
        decay = {"muon_weight_decay": self.decay / self.rate} if self.decay else {}
        return {**rates, **decay, **OPTIMIZERS[self.optimizer], "health": False}


class Results:
    """The finished runs of a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: dict[str, Row] = {}
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # a line that a power cut tore
            self.rows[Run(**{field: row[field] for field in Run.__dataclass_fields__}).key] = row

    def row(self, run: Run) -> Row | None:
        """The finished run, if it is finished."""
        return self.rows.get(run.key)

    def loss(self, run: Run) -> float:
        """The last validation loss of a finished run; infinite if it diverged."""
        found = self.rows[run.key]["loss"]
        return math.inf if found is None else found

    def add(self, row: Row) -> None:
        """Appends one line with one write."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = (
            "\n" if self.path.exists() and not self.path.read_bytes().endswith(b"\n") else ""
        ) + json.dumps(row)
        with self.path.open("ab", buffering=0) as file:
            file.write(f"{line}\n".encode())
        self.rows[Run(**{field: row[field] for field in Run.__dataclass_fields__}).key] = row


@dataclass(frozen=True)
class Axis:
    """The values of one number that a search tries: the best so far times ``ratio ** k`` for ``k`` in ``powers``."""

    field: str
    ratio: float
    powers: tuple[int, ...]
    extensions: int = 2
    """How often it goes on beyond an edge that is the best."""


@dataclass(frozen=True)
class Search:
    """The best point of an optimizer, one axis after the other, and then its seeds."""

    start: Run
    axes: tuple[Axis, ...]
    seeds: int
    around: int = 0
    """How many neighbours of the best rate on each side get the seeds too."""

    def walk(self, results: Results) -> Iterator[tuple[list[Run], Run | None]]:
        """Yields the runs of each stage, in order, and the best point if the stage before has ended.

        Stops at the first stage with runs that are missing.
        """
        point, tried = self.start, []
        for axis in self.axes:
            centre = getattr(point, axis.field)
            powers = list(axis.powers)
            for extension in range(axis.extensions + 1):
                line = [replace(point, **{axis.field: rounded(centre * axis.ratio**k)}) for k in powers]
                tried += [run for run in line if run not in tried]
                yield list(tried), None
                if any(results.row(run) is None for run in line):
                    return
                best = min(range(len(line)), key=lambda index: results.loss(line[index]))
                if extension == axis.extensions or 0 < best < len(line) - 1:
                    break
                powers = [powers[0] - 1, *powers] if best == 0 else [*powers, powers[-1] + 1]
            point = line[best]
        rates = [rounded(point.rate * 2.0**k) for k in range(-self.around, self.around + 1)]
        seeded = [replace(point, rate=rate, seed=seed) for seed in range(self.seeds) for rate in rates]
        yield tried + [run for run in seeded if run not in tried], point

    def runs(self, results: Results) -> list[Run]:
        """All runs that are known to be wanted by now, the finished ones included."""
        *_, (wanted, _) = self.walk(results)
        return wanted

    def best(self, results: Results) -> Run | None:
        """The best point; ``None`` while a trial is missing."""
        *_, (_, best) = self.walk(results)
        return best


def rounded(value: float) -> float:
    """Six digits, so that a value is the same however it was computed."""
    return float(f"{value:.6g}")


def decays(optimizer: str) -> bool:
    """Whether it has weight decay."""
    variant = VARIANTS[OPTIMIZERS[optimizer].get("variant", "muon")]
    return "weight_decay" not in variant.refuses


def first_search(optimizer: str, size: tuple[int, int], steps: int) -> Search:
    """Up to twelve trials, more where the best is at an edge, and five seeds."""
    start = Run(
        optimizer, *size, steps, FIRST_RATE.get(optimizer, 0.04), 0.002 if decays(optimizer) else 0.0, 0.016
    )
    fine = Axis("decay", 4, (-1, 0, 1)) if decays(optimizer) else Axis("rate", math.sqrt(2), (-1, 0, 1), 0)
    # The rates again at last, since the best one depends on the others.
    rates, rest = Axis("rate", 2, (-3, -2, -1, 0, 1, 2)), Axis("rest", 4, (-1, 0, 1))
    return Search(start, (rates, fine, rest, Axis("rate", 2, (-1, 0, 1))), seeds=5)


def later_search(before: Search, results: Results, powers: tuple[int, ...], **changes: Any) -> Search | None:
    """Rates around the best of another search, for another size or number of steps; three seeds."""
    best = before.best(results)
    if best is None:
        return None
    axes = (Axis("rate", 2, powers),) if powers else ()
    return Search(replace(best, **changes), axes, seeds=3)


def studies(results: Results) -> dict[str, dict[str, Search]]:
    """By name of the study and of the optimizer: what can be searched by now, in the order of running."""
    found: dict[str, dict[str, Search]] = {
        "1M-300": {},
        "widths": {},
        "iteration": {},
        "momentum": {},
        "1M-1200": {},
        "5M-300": {},
    }
    found["5M-1200"] = {}
    for optimizer in (ADAMW, *VARIANTS):
        first = found["1M-300"][optimizer] = first_search(optimizer, SIZES["1M"], 300)
        dim, layers = SIZES["5M"]
        if longer := later_search(first, results, (-1, 0, 1), steps=1200):
            found["1M-1200"][optimizer] = longer
        if larger := later_search(first, results, (-1, 0, 1), dim=dim, layers=layers):
            found["5M-300"][optimizer] = larger
            # The best rate moves with the steps as it does at 1M: a trial here takes too long.
            at_1m, at_5m = longer and longer.best(results), larger.best(results)
            if at_1m and at_5m:
                shift = at_1m.rate / longer.start.rate
                start = replace(at_5m, steps=1200, rate=rounded(at_5m.rate * shift))
                found["5M-1200"][optimizer] = Search(start, (), seeds=3)
    for dim, rule in itertools.product(WIDTHS, RULES):
        start = first_search(rule, (dim, 2), 150).start
        found["widths"][f"{rule}, width {dim}"] = Search(
            start, (Axis("rate", 2, (-2, -1, 0, 1, 2)),), 3, around=1
        )
    if best := found["1M-300"]["muon"].best(results):
        for optimizer in ("muon", *ITERATIONS):
            found["iteration"][optimizer] = Search(replace(best, optimizer=optimizer), (), seeds=5)
    bests = {name: found["1M-300"][name].best(results) for name in VARIANTS}
    known = [best for best in bests.values() if best and results.row(best)]
    if len(known) == len(VARIANTS):
        other = min((best for best in known if best.optimizer != "muon"), key=results.loss)
        for steps, seeds in MOMENTUM_SEEDS.items():
            for best in (bests["muon"], other) if seeds > 1 else (bests["muon"],):
                for name in (
                    best.optimizer,
                    *(f"{best.optimizer}, {dtype} momentum" for dtype in ("bf16", "int8")),
                ):
                    start = replace(best, optimizer=name, steps=steps)
                    found["momentum"][f"{name}, {steps} steps"] = Search(start, (), seeds)
    return found


def missing(results: Results, only: list[str] | None) -> list[tuple[str, Run]]:
    """The runs to do next, with their study: of each study first what all its searches have at the same place."""
    found: dict[Run, str] = {}
    for study, searches in studies(results).items():
        if only and study not in only:
            continue
        lists = [search.runs(results) for search in searches.values()]
        for run in itertools.chain.from_iterable(itertools.zip_longest(*lists)):
            if run is not None and results.row(run) is None:
                found.setdefault(run, study)
    return [(study, run) for run, study in found.items()]


def estimated_seconds(run: Run, results: Results) -> float:
    """Of finished runs of this size and these steps; else by the work of the model on a core of 50 GFLOP/s."""
    same = ("dim", "layers", "steps")
    known = [
        row["seconds"] for row in results.rows.values() if all(row[key] == getattr(run, key) for key in same)
    ]
    parameters = 12 * run.layers * run.dim**2
    return (
        statistics.median(known) if known else 5 + run.steps * 6 * TOKENS_PER_STEP * parameters * 1.5 / 50e9
    )


def main() -> None:
    """Runs what is missing, or lists it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, metavar="MINUTES", help="no run starts after so many minutes")
    parser.add_argument(
        "--only", nargs="+", metavar="STUDY", help="; ".join(studies(Results(Path(os.devnull))))
    )
    parser.add_argument("--dry-run", action="store_true", help="list the missing runs that are known by now")
    parser.add_argument("--out", type=Path, default=RAW)
    parser.add_argument("--train", metavar="JSON", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        from benchmarks.variants_training import train

        print(json.dumps(train(Run(**json.loads(args.train)))))
        return
    results = Results(args.out)
    if unknown := set(args.only or ()) - set(studies(results)):
        parser.error(f"--only: no study {', '.join(sorted(unknown))}")
    if args.dry_run:
        seconds = 0.0
        for study, run in missing(results, args.only):
            seconds += (estimate := estimated_seconds(run, results))
            print(f"{study:10} {estimate:6.0f} s  {run.key}")
        print(f"{seconds / 3600:.1f} hours of one core; more runs follow from the results of these")
        return
    end = math.inf if args.budget is None else time.monotonic() + 60 * args.budget
    while (todo := missing(results, args.only)) and time.monotonic() < end:
        study, run = todo[0]
        command = [sys.executable, str(Path(__file__).resolve()), "--train", run.key]
        row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        results.add(row)
        print(f"{study}: {row['loss']} after {row['seconds']} s, {run.key}", flush=True)


if __name__ == "__main__":
    main()
