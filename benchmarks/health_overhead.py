"""What the health report costs: the time inside the check of every result and inside a sample, over a step's.

``python benchmarks/health_overhead.py`` trains a decoder of width 512 at stage 3 on two ranks; steps with the check
alone and with a sample of the default size take turns. Only ``engine.step()`` is timed.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks import support

MODES = ("check", "sample")


def measure(rank: int, world_size: int, *, layers: int, rounds: int, ns_dtype: str) -> dict[str, Any]:
    """Return the seconds of each step of either mode, and those inside the check and the sample."""
    import torch.distributed as dist

    import deepspeed_muon
    from benchmarks.step_ranks import Decoder, Shape, batch_of, make_engine

    model = Decoder(Shape(width=512, hidden=2048, layers=layers, vocabulary=256))
    engine = make_engine("ours", model, 3, 1, "cpu", ns_dtype=ns_dtype)
    optimizer = deepspeed_muon.muon_optimizer(engine)
    recorder = optimizer.recorder
    every, matrices = recorder.every, recorder.matrices
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    inside: dict[str, list[float]] = {mode: [] for mode in MODES}
    watch = support.Stopwatch()
    for runner in optimizer.runners:
        runner.check.settle = watch.around(runner.check.settle)
    for number, modes in enumerate(support.turns(MODES, rounds + 1)):
        for mode in modes:
            engine.backward(engine(batch_of(256, number, 256)))
            recorder.every = int(mode == "sample")
            dist.barrier()
            watch.seconds = 0.0
            start = time.perf_counter()
            engine.step()
            # The first round measures kernels and makes the state.
            if number:
                seconds[mode].append(time.perf_counter() - start)
                inside[mode].append(watch.seconds)
    engine.destroy()
    return {"seconds": seconds, "inside": inside, "every": every, "matrices": matrices}


def percent(parts: list[float], wholes: list[float]) -> tuple[float, str]:
    """Return median and quartiles of paired ratios, in percent."""
    ratios = [100 * part / whole for part, whole in zip(parts, wholes, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, f"{low:.2f} to {high:.2f}"


def main() -> None:
    """Run from the command line."""
    parser = support.options(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--ns-dtype", default="auto")
    arguments = parser.parse_args()
    from tests.support.harness import run_ranks

    settings = {key: getattr(arguments, key) for key in ("layers", "rounds", "ns_dtype")}
    reports = run_ranks("benchmarks.health_overhead:measure", 2, settings, timeout=600)
    # A step is as slow as its slowest rank, and the rank that spends most counts.
    step, spent = (
        {mode: [max(each) for each in zip(*(r[what][mode] for r in reports), strict=True)] for mode in MODES}
        for what in ("seconds", "inside")
    )
    check, in_check = percent(spent["check"], step["check"])
    # The sampling step's own check is taken off.
    alone = [b - a for a, b in zip(spent["check"], spent["sample"], strict=True)]
    sample, in_sample = percent(alone, step["sample"])
    every, count = reports[0]["every"], reports[0]["matrices"]
    rows = [
        ("inside the check of every result, % of a step", f"{check:.2f}", in_check),
        (f"inside a sample of {count} matrices, % of its step", f"{sample:.2f}", in_sample),
        (f"**check, and a sample every {every} steps (1 allowed)**", f"{check + sample / every:.2f}", ""),
    ]
    milliseconds = 1e3 * statistics.median(step["check"])
    told = f"A step takes {milliseconds:.0f} ms, {arguments.rounds} rounds in turn."
    page = support.heading("What the health report costs", told)
    page += support.table(["", "median", "quartiles"], rows)
    print("\n".join(page))
    support.write(arguments.out, {**settings, "seconds": step, "inside": spent}, page)


if __name__ == "__main__":
    main()
