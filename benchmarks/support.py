"""What the benchmarks share: options, the machine, kept results, tables, and ratios of what was measured in turn."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCES = ("deepspeed_muon", "ops", "benchmarks", "examples", "scripts", "tests")

Row = dict[str, Any]


def options(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that has ``--out``, where :func:`write` puts the results."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="path without ending for .json and .md")
    return parser


def machine() -> dict[str, Any]:
    """Return what a measurement depends on: the GPU's or the processor's name, its cores, versions, the load."""
    import deepspeed
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else hardware_name()
    return {
        "name": name,
        "cores": len(os.sched_getaffinity(0)),
        "amx": torch.cpu._is_amx_tile_supported(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "revision": revision(),
        "load_at_end": [round(value, 1) for value in os.getloadavg()],
    }


@functools.cache
def revision(tree: Path = REPOSITORY) -> str:
    """Return the commit of the sources; if they were changed, or it is unknown, with a digest of them."""
    git = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12"]
    run = subprocess.run(git, capture_output=True, text=True, check=False)
    commit = run.stdout.strip() or "unknown"
    if commit != "unknown" and not commit.endswith("-dirty"):
        return commit
    digest = hashlib.sha256()
    for path in sorted(path for name in SOURCES for path in (tree / name).rglob("*")):
        if path.suffix in {".py", ".cpp", ".h", ".cu", ".cuh"}:
            digest.update(path.read_bytes())
    return f"{commit}-{digest.hexdigest()[:12]}"


def hardware_name() -> str:
    """Return the names of the processor, of its instruction set and of the current GPU, if there is one."""
    import torch

    processors = Path("/proc/cpuinfo")
    lines = processors.read_text().splitlines() if processors.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor() or platform.machine()
    amx = ", AMX" if torch.cpu._is_amx_tile_supported() else ""
    gpu = f" + {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{name} ({torch.backends.cpu.get_cpu_capability()}{amx}){gpu}"


def heading(title: str, *told: str) -> list[str]:
    """Return the first lines of a page: its title, the command, the machine, and what else is told."""
    used = machine()
    lines = [
        f"`{command()}`: {used['name']}, {used['cores']} cores, torch {used['torch']}, DeepSpeed {used['deepspeed']}, "
        f"revision {used['revision']}, load at the end {used['load_at_end'][0]}.",
        *told,
    ]
    return [f"# {title}", "", *lines, ""]


def command() -> str:
    """Return the command of this run."""
    return shlex.join(["python", *sys.argv])


def read(out: Path | None) -> Any:
    """Return what an earlier run wrote to ``out``; an empty dict if there is nothing."""
    path = out and out.with_name(out.name + ".json")
    return json.loads(path.read_text()) if path and path.exists() else {}


def write(out: Path | None, results: dict[str, Any], page: Sequence[str]) -> None:
    """Write the results, machine and command as JSON and the page as Markdown; without ``out`` do nothing."""
    if out is None:
        return
    results = {"machine": machine(), "command": command(), **results}
    text = json.dumps({key: value for key, value in results.items() if key != "rows"}, indent=1)
    if "rows" in results:  # a row a line
        rows = ",\n".join(map(json.dumps, results["rows"]))
        text = f'{text[:-2]},\n "rows": [\n{rows}\n]\n}}'
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(out.name + ".json").write_text(text + "\n")
    out.with_name(out.name + ".md").write_text("\n".join(page) + "\n")


def merged(known: list[Row], rows: list[Row], key: Callable[[Row], Any]) -> list[Row]:
    """Return the known rows with ``rows`` put in or over those with the same key, in the order of the keys."""
    found = {key(row): row for row in known}
    for row in rows:
        found[key(row)] = {**found.get(key(row), {}), **row}
    return [found[each] for each in sorted(found)]


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    heads = list(heads)
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *lines]


def table_of(rows: Sequence[Row]) -> list[str]:
    """Return a Markdown table of rows, with a column for each of their keys; numbers have four digits."""
    heads = list(dict.fromkeys(key for row in rows for key in row))

    def cell(value: object) -> object:
        shown = f"{float(f'{value:.4g}'):g}" if isinstance(value, float) else value
        return "" if shown is None else shown

    return table(heads, ([cell(row.get(head, "")) for head in heads] for row in rows))


def turns(names: Sequence[str], repeats: int) -> Iterator[list[str]]:
    """Yield all names once for each repeat, beginning with another one each time."""
    for repeat in range(repeats):
        first = repeat % len(names)
        yield [*names[first:], *names[:first]]


class Stopwatch:
    """Seconds spent in functions."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self._clock = 0.0, clock

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self._clock()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += self._clock() - start

        return timed


def timed_in_turn(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Return the milliseconds of each run in each turn: five turns, and more until ``seconds`` are over."""
    for run in runs.values():
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    started = time.perf_counter()
    for number, names in enumerate(turns(list(runs), 200)):
        if number >= 5 and time.perf_counter() - started > seconds:
            break
        for name in names:
            start = time.perf_counter()
            runs[name]()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def memory_of(device: str) -> tuple[int, int]:
    """Return the bytes of memory of this process that are in use, and the most since :func:`reset_peak`."""
    if device != "cpu":
        import torch

        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    values = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("VmRSS", "VmHWM")):
            values[line[:5]] = int(line.split()[1]) * 1024
    return values["VmRSS"], values["VmHWM"]


def reset_peak(device: str) -> None:
    """Let the peak of :func:`memory_of` begin anew."""
    if device != "cpu":
        import torch

        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def median_ratio(own: Iterable[float], other: Iterable[float]) -> float:
    """Return the median of the ratios own / other of what was measured in turn.

    The machine's speed changes between turns, but hardly within one.
    """
    return statistics.median(a / b for a, b in zip(own, other, strict=True))
