"""What a step costs the host: CPU time of the main thread, for many small matrices at ZeRO 3.

``python benchmarks/host_time.py`` trains layers of 16 x 16, for which the arithmetic costs next to nothing, with this
project, DeepSpeed's AdamW and DeepSpeed's Muon in turn, all in one process a rank. The main thread's own CPU time does
not contain what gloo's threads do or how long they wait. Rank 0 prints medians and smallest times, and medians of the
ratios to AdamW's in the same round, and of how much longer the step takes.

    inner: all calls of the inner optimizer's ``step()`` of one step; without what DeepSpeed does around them
    step: ``engine.step()``

With ``--fragments`` rank 1 owns all matrices, so that rank 0 only has a fragment of each. The exchange of the gradient
flags, which comes before the inner step, counts for ``inner`` then. The last line says what one more matrix costs.

``--optimizers ours "ours, int8 momentum" --width 512`` compares momentum in 8 bits with fp32 where the
arithmetic counts too.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import support
from benchmarks.step_ranks import OPTIMIZERS, make_engine
from benchmarks.support import Row, Stopwatch
from deepspeed_muon import muon_optimizer
from deepspeed_muon.plan.owners import assign
from tests.support.harness import run_ranks

PEERS = ["DeepSpeed AdamW", "ours", "DeepSpeed Muon, gram"]


class Layer(nn.Module):
    """Square weights that are applied one after the other, so that each has a gradient."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        for number in range(count):
            self.register_parameter(f"weight{number}", nn.Parameter(torch.randn(width, width) / width))

    def forward(self, x: Tensor) -> Tensor:
        weights = list(self.parameters())
        for weight in weights:
            x = x + x @ weight / len(weights)  # finite, however many there are
        return x


class Layers(nn.Module):
    """Layers of some weights each: ZeRO 3 takes a time that is quadratic in the number of modules."""

    def __init__(self, count: int, width: int, together: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Layer(together, width) for _ in range(count // together)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def measure(
    rank: int,
    world_size: int,
    *,
    count: int,
    rounds: int,
    width: int,
    optimizers: list[str],
    fragments: bool,
    together: int,
) -> dict[str, list[list[float]]]:
    """Return the milliseconds of each round: inner, and step."""
    inner = Stopwatch(time.thread_time)
    found: dict[str, list[list[float]]] = {name: [] for name in optimizers}
    with mock.patch("deepspeed_muon.step.runner.assign", owned_by_last) if fragments else nullcontext():
        engines = {
            name: make_engine(name, Layers(count, width, together), 3, 1, "cpu") for name in optimizers
        }
    for engine in engines.values():
        engine.optimizer.optimizer.step = inner.around(engine.optimizer.optimizer.step)
        if fragments:
            flags = muon_optimizer(engine)._bound_steps.gradient_flags
            flags.exchange = inner.around(flags.exchange)  # type: ignore[method-assign]
    for number, names in enumerate(support.turns(optimizers, rounds + 3)):
        for name in names:
            engine = engines[name]
            engine.backward(engine(torch.randn(1, width, dtype=torch.bfloat16)))
            inner.seconds, start = 0.0, time.thread_time()
            engine.step()
            if number >= 3:
                found[name].append([1e3 * inner.seconds, 1e3 * (time.thread_time() - start)])
    for engine in engines.values():
        engine.destroy()
    return found


def owned_by_last(*args: Any, **kwargs: Any) -> Any:
    """Assign all matrices to the last rank."""
    found, ranks = assign(*args, **kwargs), len(kwargs.get("load", args[-1]))
    return replace(found, owners=(ranks - 1,) * len(found.owners))


def rows_of(count: int, found: dict[str, list[list[float]]]) -> Iterator[Row]:
    """Yield the rows of one number of matrices, with ratios to the first optimizer."""
    first = next(iter(found))
    peer = list(zip(*found[first], strict=True))
    for name, rounds in found.items():
        row: Row = {"matrices": count, "optimizer": name}
        own = list(zip(*rounds, strict=True))
        for part, times in zip(("inner", "step"), own, strict=True):
            row |= {f"{part} ms": statistics.median(times), f"{part} ms, smallest": min(times)}
        row["inner, us a matrix"] = 1e3 * row["inner ms"] / count
        for part, times, others in zip(("inner", "step"), own, peer, strict=True):
            row[f"{part} / {first}"] = support.median_ratio(times, others)
        yield row | {
            f"step - {first}, ms": statistics.median(a - b for a, b in zip(own[1], peer[1], strict=True))
        }


def main() -> None:
    """Run from the command line."""
    parser = support.options(__doc__)
    parser.add_argument("--matrices", type=int, nargs="+", default=[224, 448])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--width", type=int, default=16, help="rows and columns of a matrix")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=PEERS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--together", type=int, default=1, help="matrices of a module")
    parser.add_argument("--fragments", action="store_true", help="rank 0 owns no matrix; ours alone")
    arguments = parser.parse_args()
    if arguments.fragments:
        arguments.optimizers = ["ours"]
    given = {
        key: getattr(arguments, key) for key in ("rounds", "width", "optimizers", "fragments", "together")
    }
    rows: list[Row] = []
    for count in arguments.matrices:
        settings = {"count": count, **given}
        found = run_ranks("benchmarks.host_time:measure", arguments.ranks, settings, timeout=600)[0]
        rows += rows_of(count, found)
    page = [*support.heading("Host time of a step"), *support.table_of(rows)]
    if arguments.fragments:
        few, many = rows[0], rows[-1]
        each = 1e3 * (many["inner ms"] - few["inner ms"]) / (many["matrices"] - few["matrices"])
        page += ["", f"One more matrix: {each:.2f} us; 44,000 matrices: {each * 44:.0f} ms."]
    print("\n".join(page))
    support.write(arguments.out, {"rows": rows}, page)


if __name__ == "__main__":
    main()
