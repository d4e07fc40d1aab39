"""Does a tuned rate transfer, and what do clipping policies and a momentum warm-up change? Small GPTs on one core.

    python benchmarks/transfer.py           # trains what is missing; start it twice for two cores
    python benchmarks/transfer.py --plan    # what is missing, in this order, and what it costs
    python benchmarks/transfer.py --table   # adds the runs of --out to results/transfer.jsonl, writes transfer.md
    python benchmarks/transfer.py --device cuda --text FILE    # start it a dozen times for one GPU

Model, text, schedule and losses are those of ``variants.py``, whose runs count: fp32, one thread, a process a run. Any
number of these programs may work on one ``--out``, and all may be killed: what has not ended is trained again. On a GPU
a process trains one run after the other; on another machine, ``--text`` is the text of this one's standard library.
``--repeat-base`` trains the runs of "original" at ``BASE`` again, into ``results/transfer_repeated.jsonl``: what
another machine changes.

**Transfer.** Cuts through ``BASE`` along width, depth, steps and batch. In each cell a rule has seven rates with seed
0, from a fourth to four times the centre; the best one, the printed one and the tuned one have two more seeds. The
tuned rate is the best of the seven at ``BASE`` over three seeds; the printed rate is what ``rates`` makes of it.
AdamW's rate for the rest and the share of a weight that decays in a step are the same everywhere.

**Clipping and momentum.** ``ARMS`` with equal seeds, at the rates that ``variants.py`` found best for the steps.

An EPYC takes about 15 core hours for everything, most of it for the widest models, the largest batches and the policies
at 5M, which one GPU trains in minutes. The stages come in the order in which they are worth having.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import sys
import traceback
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import variants  # the path is set above
from benchmarks.variants import OPTIMIZERS, Row, Run, loss, read_rows, rounded
from deepspeed_muon.tools.rates import factor

RAW = variants.RAW.with_name("transfer.jsonl")
REPEATED = variants.RAW.with_name("transfer_repeated.jsonl")
"""Runs of the base that another machine trained again."""
DECAY = 0.002
"""Share of a weight that a step takes away at the highest rate of the schedule."""
CENTRES = {"muon": 0.02, "match_rms_adamw": 0.008, "normuon": 0.02}
"""Rule to the middle of its seven rates at ``BASE``. "muon" has the rule "original"."""
FACTORS = [2.0**octaves for octaves in (-2, -1, -0.5, 0, 0.5, 1, 2)]
MILLISECONDS = {128: (16, 4), 256: (40, 20), 512: (140, 100)}
"""Width to the time of a step, for each layer: forward and backward pass of 512 tokens, optimizer."""

Rows = dict[Run, Row]


@dataclass(frozen=True)
class Cell:
    """A model and how long it trains."""

    dim: int = 128
    layers: int = 2
    steps: int = 300
    tokens: int = 512
    rest: float = 0.016

    def run(self, rule: str, rate: float, seed: int = 0) -> Run:
        """Return the training of this cell with a rule at a rate."""
        return Run(
            rule, self.dim, self.layers, self.steps, rounded(rate), DECAY, self.rest, seed, self.tokens
        )


BASE = Cell()
CUTS = {
    "width": [BASE, Cell(dim=256), Cell(dim=512)],
    "depth": [BASE, Cell(layers=4), Cell(layers=8), Cell(layers=12)],
    "steps": [Cell(steps=150), BASE, Cell(steps=600), Cell(steps=1200), Cell(steps=2400)],
    "batch": [BASE, Cell(tokens=2048), Cell(tokens=8192)],
}
ARMS = {
    "all": ("all", 0.0),
    "adamw": ("adamw", 0.0),
    "separate": ("separate", 0.0),
    "none": ("none", 0.0),
    "all, momentum over 10 %": ("all", 0.1),
    "all, momentum over a third": ("all", 1 / 3),
    "none, momentum over 10 %": ("none", 0.1),
}
"""Name to the clipping policy and the share of the steps over which the momentum rises from 0.85 to 0.95."""
POLICY_CELLS = [
    ("1M", 300, 512),
    ("1M", 1200, 512),
    ("5M", 300, 512),
    ("5M", 1200, 512),
    ("1M", 300, 2048),
    ("5M", 300, 2048),
    ("1M", 1200, 2048),
]
"""Size, steps and tokens a step."""
BEST_RATE = {300: 0.02, 1200: 0.01}
"""Steps to the best rate of "original" in ``variants.md``, at both sizes, with its rate for the rest, 0.064."""


def policy_cell(size: str, steps: int, tokens: int) -> Cell:
    """Return a cell of the study of clipping policies."""
    return Cell(**variants.SIZES[size], steps=steps, tokens=tokens, rest=0.064)


def printed_factor(rule: str, cell: Cell) -> float:
    """Return what ``python -m deepspeed_muon rates`` multiplies a rate of ``BASE`` by."""
    before, after = (
        {"width": run.dim, "tokens": run.steps * run.tokens, "batch": run.tokens} for run in (BASE, cell)
    )
    ratios = {size: after[size] / before[size] for size in before}
    return factor(ratios, OPTIMIZERS[rule].get("adjust_lr_fn", "original"))


def seven_rates(rule: str, cell: Cell) -> list[float]:
    """Return the rates that are tried with seed 0; their middle moves with the width where the best one does."""
    middle = CENTRES[rule] * (cell.dim / BASE.dim) ** (-0.65 if rule == "match_rms_adamw" else 0.0)
    return [rounded(middle * factor) for factor in FACTORS]


def tuned_rate(rows: Rows, rule: str) -> float | None:
    """Return the best of the seven rates at ``BASE``; ``None`` while runs are missing."""
    runs = {rate: [BASE.run(rule, rate, seed) for seed in range(3)] for rate in seven_rates(rule, BASE)}
    if any(run not in rows for of_rate in runs.values() for run in of_rate):
        return None
    return min(runs, key=lambda rate: fmean(loss(rows[run]) for run in runs[rate]))


def compared_rates(rows: Rows, rule: str, cell: Cell) -> dict[str, float]:
    """Return the rates with three seeds: "printed", "tuned" and "best", as far as they are known."""
    rates = {}
    if tuned := tuned_rate(rows, rule):
        rates = {"printed": rounded(tuned * printed_factor(rule, cell)), "tuned": tuned}
    first = [cell.run(rule, rate) for rate in seven_rates(rule, cell)]
    if all(run in rows for run in first):
        rates["best"] = min(first, key=lambda run: loss(rows[run])).rate
    return rates


def transfer_runs(rows: Rows, rule: str, cell: Cell) -> list[Run]:
    """Return the runs of one rule in one cell as far as the finished ones allow."""
    seven = seven_rates(rule, cell)
    if cell == BASE:
        return [BASE.run(rule, rate, seed) for seed in range(3) for rate in seven]
    compared = compared_rates(rows, rule, cell).values()
    seeds = [cell.run(rule, rate, seed) for seed in range(3) for rate in compared]
    return list(dict.fromkeys([cell.run(rule, rate) for rate in seven] + seeds))


def policy_runs(cell: Cell, arms: Iterable[str] = ARMS, seeds: int = 3) -> list[Run]:
    """Return the runs of a cell of the study of clipping policies."""
    return [
        replace(
            cell.run("muon", BEST_RATE[cell.steps], seed),
            clip=ARMS[arm][0],
            momentum_warmup=round(ARMS[arm][1] * cell.steps),
        )
        for seed in range(seeds)
        for arm in arms
    ]


def stages(rows: Rows) -> Iterator[tuple[str, list[Run]]]:
    """Yield the name of each stage and its runs, in the order in which they are trained."""

    def transfer(*rules: str, cells: Iterable[Cell]) -> list[Run]:
        return [run for cell in cells for rule in rules for run in transfer_runs(rows, rule, cell)]

    yield "base", transfer("muon", "match_rms_adamw", cells=[BASE])
    cheap = [Cell(layers=4), Cell(steps=150), Cell(steps=600), Cell(tokens=2048), Cell(layers=8)]
    yield "original, cheap cells", transfer("muon", cells=cheap)
    yield "width 256", transfer("muon", "match_rms_adamw", cells=[Cell(dim=256)])
    yield "policies, 1M, 300 steps", policy_runs(policy_cell("1M", 300, 512))
    yield "original, 1200 steps, 12 layers", transfer("muon", cells=[Cell(steps=1200), Cell(layers=12)])
    yield "policies, 1M, 1200 steps", policy_runs(policy_cell("1M", 1200, 512))
    yield "original, 2400 steps", transfer("muon", cells=[Cell(steps=2400)])
    yield "original, 8192 tokens", transfer("muon", cells=[Cell(tokens=8192)])
    yield "width 512", transfer("muon", "match_rms_adamw", cells=[Cell(dim=512)])
    yield "normuon, base", transfer("normuon", cells=[BASE])
    yield "normuon, width 256", transfer("normuon", cells=[Cell(dim=256)])
    yield "normuon, width 512", transfer("normuon", cells=[Cell(dim=512)])
    short = [Cell(tokens=2048), Cell(steps=1200), Cell(layers=12)]
    yield "match_rms_adamw at width 128", transfer("match_rms_adamw", cells=short)
    yield "normuon, width 128", transfer("normuon", cells=short)
    for size, steps, tokens in POLICY_CELLS:
        yield f"policies, {size}, {steps} steps of {tokens}", policy_runs(policy_cell(size, steps, tokens))
    # Five seeds near the best rate where the printed one costs most.
    rule, cell = "match_rms_adamw", Cell(layers=12)
    near = dict.fromkeys([*seven_rates(rule, cell)[2:], *compared_rates(rows, rule, cell).values()])
    yield "match_rms_adamw, 12 layers", [cell.run(rule, rate, seed) for seed in range(5) for rate in near]


def seconds(run: Run) -> float:
    """Return the expected processor time of a run."""
    passes, optimizer = MILLISECONDS[run.dim]
    return 1e-3 * run.steps * run.layers * (passes * run.tokens / 512 + optimizer)


def missing(rows: Rows) -> dict[str, list[Run]]:
    """Return the stages with the runs that are not finished, each run in the first stage that needs it."""
    named: set[Run] = set()
    left = {}
    for name, runs in stages(rows):
        left[name] = [run for run in dict.fromkeys(runs) if run not in rows and run not in named]
        named.update(left[name])
    return left


def plan(rows: Rows) -> list[str]:
    """Return a line for each stage with its missing runs and hours, then their sums."""
    lines, count, hours = [], 0, 0.0
    for name, runs in missing(rows).items():
        cost = sum(map(seconds, runs)) / 3600
        count, hours = count + len(runs), hours + cost
        lines.append(f"{name:<34}{len(runs):>4}{cost:>7.2f}")
    return [*lines, f"{'all':<34}{count:>4}{hours:>7.2f}"]


def known_rows(out: Path) -> Rows:
    """Return the runs of ``variants.py``, those of earlier sessions, and those of ``out``."""
    return read_rows(variants.RAW) | read_rows(RAW) | read_rows(out)


def claim(folder: Path, run: Run) -> TextIOWrapper | None:
    """Return the locked file of a run, ``None`` if another program trains it. A program's end opens its locks."""
    file = (folder / f"{zlib.crc32(repr(run).encode()):08x}").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def work(out: Path, device: str, text: Path | None) -> None:
    """Train the first run that is missing and that no other program trains, until there is none."""
    from benchmarks.variants_training import train

    def append_row(run: Run) -> None:
        row = train(run, curve=False, device=device, text=text)
        with out.open("a") as file:  # one write, so that lines of two programs never mix
            file.write(json.dumps(row) + "\n")
        print(f"{row['loss']} after {row['seconds']} s, {run}", flush=True)

    folder = out.with_suffix(".locks")
    folder.mkdir(parents=True, exist_ok=True)
    failed: set[Run] = set()
    while True:
        todo = [run for runs in missing(known_rows(out)).values() for run in runs]
        claims = ((run, lock) for run in todo if run not in failed and (lock := claim(folder, run)))
        run, lock = next(claims, (None, None))
        if run is None or lock is None:
            return
        with lock:
            if run in known_rows(out):  # finished between the reading and the claim
                continue
            if device != "cpu":  # making a CUDA context takes as long as a short run
                try:
                    append_row(run)
                except Exception:  # the other runs of this process are of use
                    traceback.print_exc()
                    failed.add(run)
                continue
            # The child has torch imported and shares the lock: if this program is killed, the run still ends.
            process = multiprocessing.get_context("fork").Process(target=append_row, args=(run,))
            process.start()
            process.join()
        if process.exitcode:
            raise SystemExit(f"{run} ended with {process.exitcode}")


def main() -> None:
    """Train, or print the plan, or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RAW, help="where finished runs are appended")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--text", type=Path, help="a text in place of this Python's standard library")
    parser.add_argument("--repeat-base", action="store_true")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.plan:
        print("\n".join(plan(known_rows(args.out))))
    elif args.table:
        from benchmarks.transfer_report import write

        write(args.out)
    elif args.repeat_base:
        from benchmarks.variants_training import train

        out = REPEATED if args.out == RAW else args.out
        for run in transfer_runs({}, "muon", BASE):
            with out.open("a") as file:
                file.write(json.dumps(train(run, curve=False, device=args.device, text=args.text)) + "\n")
    else:
        work(args.out, args.device, args.text)


if __name__ == "__main__":
    main()
