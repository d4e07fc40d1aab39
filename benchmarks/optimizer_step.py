"""One optimizer step of this project beside its peers, in one run: time, bytes, memory.

``python benchmarks/optimizer_step.py --model 5M --out benchmarks/results/optimizer_step-NAME`` runs every stage on 1, 2
and 4 ranks, with 1 and 4 accumulation steps. Ready-made rows in the JSON of ``--out`` are kept and overwritten one by
one, so a long matrix can be run in pieces (``--stages 3 --ranks 4``).

All engines of a cell live in the same processes, get the same weights and batches, and take turns; a time is the
slowest rank's, a ratio the median over the turns of the paired ratio. Rates are zero, so that the gradients stay equal.
Memory is measured afterwards, one optimizer at a time, in processes that give freed memory back at once. The JSON rows
of this project keep rank 0's ``kernel_report()``.

On GPUs: ``torchrun --nproc_per_node N benchmarks/optimizer_step.py --device cuda --model 350M --stages 0 1 2 3``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import support
from benchmarks.step_ranks import MODELS, ON_REQUEST, ONLY_STAGE, OPTIMIZERS
from benchmarks.support import Row

# So small that every tensor that matters is mapped by itself and given back when it is freed.
RETURN_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
_TIME_LIMIT = 1200.0


def parse_arguments() -> argparse.Namespace:
    parser = support.options(__doc__)
    parser.add_argument("--model", nargs="+", choices=sorted(MODELS), default=["5M"])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4], help="ignored on GPUs")
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 4])
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=list(OPTIMIZERS),
        default=[name for name in OPTIMIZERS if name not in ON_REQUEST],
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a micro-batch of one sequence")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--no-times", action="store_true", help="only measure memory")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--updates", action="store_true", help="compare each optimizer's first update with float64"
    )
    parser.add_argument(
        "--profile", action="store_true", help="keep a trace of one step of each cell, beside --out"
    )
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        arguments.ranks = [int(os.environ.get("WORLD_SIZE", "1"))]
    return arguments


def measure(arguments: argparse.Namespace) -> Iterator[list[Row]]:
    """Measure every cell; yield its rows when its times are known, and again with the memory."""
    runner = _OnGpu() if arguments.device == "cuda" else _OnCpu()
    cells = [(m, s, a) for m in arguments.model for s in arguments.stages for a in arguments.accumulation]
    for ranks in arguments.ranks:
        for model, stage, accumulation in cells:
            cell = {"model": model, "stage": stage, "accumulation": accumulation}
            common = {**cell, "tokens": arguments.tokens, "device": arguments.device}
            names = [name for name in arguments.optimizers if ONLY_STAGE.get(name, stage) == stage]
            found: dict[str, Row] = {name: {**cell, "ranks": ranks, "optimizer": name} for name in names}
            if not arguments.no_times:
                started, profile = time.strftime("%Y-%m-%d %H:%M:%S"), ""
                if arguments.profile and arguments.out:
                    profile = f"{arguments.out.resolve()}-{model}-stage{stage}-ranks{ranks}-acc{accumulation}"
                timing = {"optimizers": names, "repeats": arguments.repeats, "profile": profile, **common}
                reports = runner.run("measure_times", ranks, **timing)
                for name in names:
                    parts = [report[name] for report in reports]
                    found[name] |= {
                        "total_s": parts[0]["total_s"],
                        "step_s": parts[0]["step_s"],
                        "timed": started,
                        "sent_bytes": max(part["bytes"] for part in parts),
                    }
                    if "kernels" in parts[0]:
                        found[name]["kernels"] = parts[0]["kernels"]
                yield list(found.values())
            if arguments.updates:
                where = {key: common[key] for key in ("model", "stage", "tokens", "device")}
                distances = runner.run("measure_updates", ranks, optimizers=names, **where)[0]
                for name, distance in distances.items():
                    found[name]["distance"] = distance
                yield list(found.values())
            if not arguments.no_memory:
                for name in names:
                    reports = runner.run("measure_memory", ranks, memory=True, optimizer=name, **common)
                    found[name]["peak_bytes"] = max(reports)
                yield list(found.values())
        runner.close()


class _OnCpu:
    """Pools of gloo ranks, one for times and one for memory, as the tests start them."""

    def __init__(self) -> None:
        self._pools: dict[bool, Any] = {}

    def run(self, function: str, ranks: int, *, memory: bool = False, **settings: Any) -> list[Any]:
        from tests.support.harness import RankPool

        if memory not in self._pools:
            self._pools[memory] = RankPool(ranks, env=RETURN_MEMORY if memory else None)
            if memory:  # the first call pays for imports and compilation, which are not the optimizer's
                self.run(function, ranks, memory=True, **settings)
        pool = self._pools[memory]
        return list(pool.run(f"benchmarks.step_ranks:{function}", timeout=_TIME_LIMIT, **settings))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


class _OnGpu:
    """This process is a rank: of torchrun, or the only one."""

    def run(self, function: str, ranks: int, *, memory: bool = False, **settings: Any) -> list[Any]:
        import torch
        import torch.distributed as dist

        from benchmarks import step_ranks

        step_ranks.join("cuda")
        report = getattr(step_ranks, function)(dist.get_rank(), ranks, **settings)
        torch.cuda.empty_cache()
        reports: list[Any] = [None] * ranks
        dist.all_gather_object(reports, report)
        return reports

    def close(self) -> None:
        pass


def place(row: Row) -> tuple[Any, ...]:
    """Return what tells a row from others, in the order of the table."""
    where = (row[key] for key in ("model", "stage", "ranks", "accumulation"))
    return (*where, list(OPTIMIZERS).index(row["optimizer"]))


def main() -> None:
    arguments = parse_arguments()
    from benchmarks.step_report import page

    first = int(os.environ.get("RANK", "0")) == 0
    rows: list[Row] = support.read(arguments.out).get("rows", [])
    for found in measure(arguments):
        rows = support.merged(rows, found, place)
        report = {
            "machine": support.machine(),
            "command": support.command(),
            "tokens": arguments.tokens,
            "rows": rows,
        }
        if first:  # after every cell, so that a long matrix can be stopped
            print("\n".join(page({**report, "rows": found})[-len(found) :]), flush=True)
            support.write(arguments.out, report, page(report))


if __name__ == "__main__":
    main()
