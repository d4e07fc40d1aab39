"""What the health report costs: the time inside the check of every result and inside a sample, over a step's.

``python benchmarks/health_overhead.py`` trains a stack of transformer-like matrices on a few ranks; steps with the
check alone and with a sample of the default size take turns. Only ``engine.step()`` is timed.
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
    """Seconds spent in a function."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, function: Any) -> Any:
        """Return the function, timed."""

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
        # What the check does with results on a CPU besides passing them on.
        runner.check._settle_now = clock.watch(runner.check._settle_now)
    for number, modes in enumerate(support.turns(MODES, rounds + 1)):
        for mode in modes:
            tokens = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(100 * number + rank))
            engine.backward(engine(tokens).float().square().mean())
            recorder.every = int(mode == "sample")
            dist.barrier()
            clock.seconds = 0.0
            start = time.perf_counter()
            engine.step()
            # The first round measures kernels and makes the state.
            if number:
                seconds[mode].append(time.perf_counter() - start)
                inside[mode].append(clock.seconds)
    count = sum(len(runner.plan.matrices) for runner in optimizer._runners)
    kernels = sorted({entry["ran"] for entry in optimizer.kernel_report()})
    engine.destroy()
    return {
        "seconds": seconds,
        "inside": inside,
        "every": every,
        "matrices": matrices,
        "count": count,
        "kernels": kernels,
    }


def percent(parts: list[float], wholes: list[float]) -> tuple[float, float, float]:
    """Return median and quartiles of paired ratios, in percent."""
    ratios = [100 * part / whole for part, whole in zip(parts, wholes, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, low, high


def main() -> None:
    parser = support.options(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ns-dtype", default="auto")
    arguments = parser.parse_args()
    from tests.support.harness import run_ranks

    settings = {key: getattr(arguments, key) for key in ("stage", "width", "layers", "rounds", "ns_dtype")}
    reports = run_ranks("benchmarks.health_overhead:measure", arguments.ranks, settings, timeout=600)
    # A step is as slow as its slowest rank, and the rank that spends most counts.
    step, spent = (
        {mode: [max(each) for each in zip(*(r[what][mode] for r in reports), strict=True)] for mode in MODES}
        for what in ("seconds", "inside")
    )
    in_check = percent(spent["check"], step["check"])
    # The sampling step's own check is taken off.
    alone = [b - a for a, b in zip(spent["check"], spent["sample"], strict=True)]
    in_sample = percent(alone, step["sample"])
    first, used = reports[0], support.machine()
    every, count = first["every"], first["matrices"]
    rows = [
        ("inside the check of every result, % of a step", in_check),
        (f"inside a sample of {count} matrices, % of its step", in_sample),
    ]
    cells = [(what, f"{middle:.2f}", f"{low:.2f} to {high:.2f}") for what, (middle, low, high) in rows]
    together = f"{in_check[0] + in_sample[0] / every:.2f}"
    page = [
        "# What the health report costs",
        "",
        f"`python {' '.join(sys.argv)}`: {used['name']}, {used['cores']} cores; {first['count']} matrices of width",
        f"{arguments.width}, stage {arguments.stage}, {arguments.ranks} ranks, bf16 model;",
        f"kernels {', '.join(first['kernels'])};",
        f"a step takes {statistics.median(step['check']) * 1000:.0f} ms, {arguments.rounds} rounds in turn.",
        "",
        *support.table(["", "median", "quartiles"], cells),
        f"| **check, and a sample every {every} steps (1 allowed)** | {together} | |",
    ]
    print("\n".join(page))
    support.write(arguments.out, {"machine": used, **settings, "seconds": step, "inside": spent}, page)


if __name__ == "__main__":
    main()
