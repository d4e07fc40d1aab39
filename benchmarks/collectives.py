"""What a small message costs on gloo: why the flags of gradients go by all-to-all on a CPU.

``python benchmarks/collectives.py --ranks 4`` times an all-reduce, an all-gather and an all-to-all of as many bytes
as a step's flags have, on ranks that share this machine's cores. ``--out`` keeps the medians as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def measure(rank: int, world_size: int, *, nbytes: int, repeats: int) -> dict[str, float]:
    """Return the median milliseconds of each collective, in turn, on this rank."""
    import torch
    import torch.distributed as dist

    one = torch.zeros(nbytes, dtype=torch.uint8)
    each = one.repeat(world_size)
    room = torch.empty_like(each)
    # torch 2.13 renamed all_gather_into_tensor, which warns at every call since.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(one, op=dist.ReduceOp.MAX),
        "all_gather": lambda: all_gather(room, one),
        "all_to_all": lambda: dist.all_to_all_single(room, each),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--bytes", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--out", help="path of a JSON file")
    arguments = parser.parse_args()
    from benchmarks.optimizer_step import machine
    from tests.support.harness import run_ranks

    settings = {"nbytes": arguments.bytes, "repeats": arguments.repeats}
    found = {}
    for ranks in arguments.ranks:
        reports = run_ranks("benchmarks.collectives:measure", ranks, settings, timeout=120)
        # A collective is as slow as its slowest rank.
        found[ranks] = {name: round(max(r[name] for r in reports), 3) for name in reports[0]}
    report = {"machine": machine(), **settings, "milliseconds by ranks": found}
    print(json.dumps(report, indent=1))
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
