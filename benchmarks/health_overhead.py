"""What the health report costs: one optimizer step without it, with the check, and with a sample, in turn.

``python benchmarks/health_overhead.py`` trains a stack of transformer-like matrices on a few ranks and takes steps in
rounds of three: nothing on, the check of every result on, check and a sample of the default size on. It prints what
both make at the default sampling, twice: from the time spent inside the functions of check and sample, and from the
paired differences between whole steps, which also hold what those cannot see, and the noise of everything else.
``--out`` keeps them with a table. Only ``engine.step()`` is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

MODES = ("off", "check", "sample")


def build(width: int, layers: int) -> Any:
    """Square and 4:1 matrices as in a transformer's layers: 12 width^2 elements a layer."""
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.square = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
            self.up = nn.Linear(width, 4 * width, bias=False)
            self.down = nn.Linear(4 * width, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for linear in self.square:
                x = x + torch.tanh(linear(x)) / 8
            return x + self.down(torch.tanh(self.up(x))) / 8

    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, width), *(Layer() for _ in range(layers)))


class Inside:
    """Seconds spent in the check of every result and in the sample."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, check: Any) -> None:
        """Time what a ``ResultCheck`` does with results on a CPU besides passing them on."""
        check._settle_now = self._timed(check._settle_now)

    def _timed(self, function: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def measure(
    rank: int, world_size: int, *, stage: int, width: int, layers: int, rounds: int, ns_dtype: str
) -> dict[str, Any]:
    import deepspeed
    import torch
    import torch.distributed as dist

    import deepspeed_muon

    model = build(width, layers)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Muon", "params": {"ns_dtype": ns_dtype}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    optimizer = deepspeed_muon.muon_optimizer(engine)
    recorder = optimizer.recorder
    every, matrices = recorder.every, recorder.matrices
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    inside: dict[str, list[float]] = {mode: [] for mode in MODES}
    clock = Inside()
    for runner in optimizer._runners:
        clock.watch(runner.check)
    for number in range(rounds + 1):
        for turn in range(len(MODES)):
            mode = MODES[(number + turn) % len(MODES)]
            tokens = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(100 * number + rank))
            engine.backward(engine(tokens).float().square().mean())
            recorder.check = mode != "off"
            recorder.every = int(mode == "sample")
            dist.barrier()
            clock.seconds = 0.0
            start = time.perf_counter()
            engine.step()
            # The first round measures kernels and makes the state.
            if number:
                seconds[mode].append(time.perf_counter() - start)
                inside[mode].append(clock.seconds)
    report = deepspeed_muon.health(engine)
    count = sum(len(runner.plan.matrices) for runner in optimizer._runners)
    kernels = sorted({entry["ran"] for entry in optimizer.kernel_report()})
    engine.destroy()
    return {
        "seconds": seconds,
        "inside": inside,
        "every": every,
        "matrices": matrices,
        "count": count,
        "health": report,
        "kernels": kernels,
    }


def percent(parts: list[float], wholes: list[float]) -> dict[str, float]:
    """Median and quartiles of paired ratios, in percent."""
    ratios = [100 * part / whole for part, whole in zip(parts, wholes, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": middle, "quartile_1": low, "quartile_3": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ns-dtype", default="auto")
    parser.add_argument("--out", help="path without ending for .json and .md")
    arguments = parser.parse_args()
    from benchmarks.optimizer_step import machine
    from tests.support.harness import run_ranks

    settings = {
        "stage": arguments.stage,
        "width": arguments.width,
        "layers": arguments.layers,
        "rounds": arguments.rounds,
        "ns_dtype": arguments.ns_dtype,
    }
    reports = run_ranks("benchmarks.health_overhead:measure", arguments.ranks, settings, timeout=600)
    # A step is as slow as its slowest rank.
    slowest = {
        mode: [max(times) for times in zip(*(r["seconds"][mode] for r in reports), strict=True)]
        for mode in MODES
    }
    off, check, sample = (slowest[mode] for mode in MODES)
    # The rank that spends most; the sampling step's own check is taken off.
    spent = {
        mode: [max(times) for times in zip(*(r["inside"][mode] for r in reports), strict=True)]
        for mode in MODES
    }
    in_check = percent(spent["check"], check)
    in_sample = percent([b - a for a, b in zip(spent["check"], spent["sample"], strict=True)], sample)
    first = reports[0]
    checking = percent([b - a for a, b in zip(off, check, strict=True)], off)
    sampling = percent([c - b for b, c in zip(check, sample, strict=True)], off)
    result = {
        "command": " ".join(["python", "benchmarks/health_overhead.py", *sys.argv[1:]]),
        "machine": {
            "cpu": machine()["name"],
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
        },
        "settings": {**settings, "ranks": arguments.ranks},
        "matrices": first["count"],
        "kernels": first["kernels"],
        "health": {"every": first["every"], "matrices": first["matrices"]},
        "step_seconds": statistics.median(off),
        "check_percent": checking,
        "sample_percent_of_its_step": sampling,
        "inside_check_percent": in_check,
        "inside_sample_percent_of_its_step": in_sample,
        "inside_default_percent": in_check["median"] + in_sample["median"] / first["every"],
        "default_percent": checking["median"] + sampling["median"] / first["every"],
        "seconds": slowest,
        "seconds_inside": spent,
        "last_report": first["health"],
    }
    print(json.dumps({key: value for key, value in result.items() if "seconds" not in key}, indent=1))
    if arguments.out:
        Path(arguments.out + ".json").write_text(json.dumps(result, indent=1) + "\n")
        Path(arguments.out + ".md").write_text(_table(result))


def _table(result: dict[str, Any]) -> str:
    machine, settings, health = result["machine"], result["settings"], result["health"]

    def row(what: str, numbers: dict[str, float]) -> str:
        return f"| {what} | {numbers['median']:.2f} | {numbers['quartile_1']:.2f} to {numbers['quartile_3']:.2f} |"

    count = health["matrices"]
    rows = [
        row("inside the check of every result, % of a step", result["inside_check_percent"]),
        row(
            f"inside a sample of {count} matrices, % of its step", result["inside_sample_percent_of_its_step"]
        ),
        row("whole steps with the check minus without, % of a step", result["check_percent"]),
        row(
            "whole steps with a sample minus with the check, % of a step",
            result["sample_percent_of_its_step"],
        ),
    ]
    table = "\n".join(rows)
    every = f"check, and a sample every {health['every']} steps (1 allowed)"
    return f"""# What the health report costs

`{result["command"]}`

{machine["cpu"]}, {machine["cores"]} cores, Linux {machine["kernel"]}; {result["matrices"]} matrices of width
{settings["width"]}, stage {settings["stage"]}, {settings["ranks"]} ranks, bf16 model;
kernels {", ".join(result["kernels"])};
a step takes {result["step_seconds"] * 1000:.0f} ms, {settings["rounds"]} rounds in turn.

| | median | quartiles |
|---|---|---|
{table}
| **inside: {every}** | {result["inside_default_percent"]:.2f} | |
| **differences of whole steps: {every}** | {result["default_percent"]:.2f} | |
"""


if __name__ == "__main__":
    main()
