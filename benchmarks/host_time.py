"""What a step costs the host: CPU time of the main thread, for many small matrices at ZeRO 3.

``python benchmarks/host_time.py`` trains layers of 16 x 16, for which the arithmetic costs next to nothing, with this
project, DeepSpeed's AdamW and DeepSpeed's Muon in turn, all in one process a rank. The main thread's own CPU time does
not contain what gloo's threads do or how long they wait. Rank 0 prints medians and smallest times, and medians of the
ratios to AdamW's in the same round, and of how much longer the step takes.

    inner: all calls of the inner optimizer's ``step()`` of one step; without what DeepSpeed does around them
    step: ``engine.step()``

With ``--fragments`` rank 1 owns all matrices, so that rank 0 only has a fragment of each. The exchange of the gradient
flags, which comes before the inner step, counts for ``inner`` then. The last line has what one more matrix costs.
``--variant`` takes another variant of this project. ``--int8`` compares momentum in 8 bits with fp32 instead; with
``--width`` the arithmetic counts too. ``--passes`` times the pass over the momentum alone, in this process: kept in
fp32, bf16 and 8 bits, by length and dtypes of the gradient and of what is sent.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import support
from tests.support.harness import run_ranks

OPTIMIZERS = ("AdamW", "ours", "DeepSpeed's Muon")
MOMENTA = ("ours", "ours, int8 momentum")


class Layers(nn.Module):
    """Square layers one after the other, so that each has a gradient."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) / len(self.layers)  # finite, however many there are
        return x.square().mean()


def make_engine(name: str, count: int, width: int, variant: str) -> Any:
    """Return an engine at stage 3; rates of zero keep weights and gradients equal."""
    import deepspeed

    import deepspeed_muon

    torch.manual_seed(0)
    zero: dict[str, Any] = {"stage": 3}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW" if name == "AdamW" else "Muon", "params": {"lr": 0.0}},
    }
    if name in MOMENTA:
        dtype = "int8" if name == MOMENTA[1] else "fp32"
        config["optimizer"]["params"] |= {"variant": variant, "momentum_dtype": dtype}
    if name == OPTIMIZERS[2]:
        zero.update(reduce_scatter=False, save_muon_momentum_buffer_in_memory=True)
        deepspeed_muon.unregister()
    try:
        model = Layers(count, width)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )
    finally:
        deepspeed_muon.register()
    return engine


def owned_by_last(*args: Any, **kwargs: Any) -> Any:
    """Assign all matrices to the last rank."""
    from deepspeed_muon.plan.owners import assign

    found, ranks = assign(*args, **kwargs), len(kwargs.get("load", args[-1]))
    return replace(found, owners=(ranks - 1,) * len(found.owners))


def measure(
    rank: int,
    world_size: int,
    *,
    count: int,
    rounds: int,
    fragments: bool,
    variant: str,
    width: int,
    int8: bool,
) -> dict[str, list[list[float]]]:
    """Return the milliseconds of each round: inner, and step."""
    if fragments:
        with mock.patch("deepspeed_muon.step.runner.assign", owned_by_last):
            engines = {"ours": make_engine("ours", count, width, variant)}
    else:
        names = MOMENTA if int8 else OPTIMIZERS
        engines = {name: make_engine(name, count, width, variant) for name in names}
    spent = [0.0]

    def timed(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                spent[0] += time.thread_time() - start

        return run

    found: dict[str, list[list[float]]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.optimizer.optimizer.step = timed(engine.optimizer.optimizer.step)
    if fragments:
        from deepspeed_muon import muon_optimizer

        bound = muon_optimizer(engines["ours"])._bound_steps
        bound.exchange_flags = timed(bound.exchange_flags)  # type: ignore[method-assign]
    for number, names in enumerate(support.turns(list(engines), rounds + 3)):
        for name in names:
            engine = engines[name]
            engine.backward(engine(torch.randn(1, width, dtype=torch.bfloat16)))
            spent[0], start = 0.0, time.thread_time()
            engine.step()
            step = time.thread_time() - start
            if number >= 3:
                found[name].append([1e3 * spent[0], 1e3 * step])
    for engine in engines.values():
        engine.destroy()
    return found


def pass_rows(rounds: int) -> Iterator[list[object]]:
    """Yield the rows of ``--passes``: medians of milliseconds, and the median ratio of 8 bits to fp32."""
    from deepspeed_muon.ops.dispatch import flat_passes

    passes, rates = flat_passes("ops"), torch.tensor([(0.95, 1.0)], dtype=torch.float64)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    whole_blocks, cut = torch.tensor([(0, 0, -1, -1)]), torch.empty(0, 2)
    for numel in (1 << 24, 1 << 18, 1 << 14):
        calls = max(1, (1 << 20) // numel)
        table = torch.tensor([(0, 0, 0, 0, numel, 0)])
        for entering, sent in (("fp32", "bf16"), ("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")):
            both = [torch.randn(numel).to(dtypes[entering])], [torch.zeros(numel, dtype=dtypes[sent])]
            runs = {
                kept: functools.partial(
                    passes.momentum_pack, [torch.zeros(numel, dtype=dtypes[kept])], *both, table, rates
                )
                for kept in ("fp32", "bf16")
            }
            codes, scales = [torch.zeros(numel, dtype=torch.int8)], [torch.zeros(numel // 256)]
            runs["int8"] = functools.partial(
                passes.momentum_pack_int8, codes, scales, *both, table, rates, whole_blocks, cut
            )
            found: dict[str, list[float]] = {kept: [] for kept in runs}
            for kept in (name for names in support.turns(list(runs), rounds) for name in names):
                start = time.thread_time()
                for _ in range(calls):
                    runs[kept]()
                found[kept].append(1e3 * (time.thread_time() - start) / calls)
            times = [f"{statistics.median(each):.3f}" for each in found.values()]
            yield [numel, entering, sent, *times, f"{support.median_ratio(found['int8'], found['fp32']):.2f}"]


def fragment_table(found: dict[int, list[list[float]]]) -> list[str]:
    """Return the table of a rank that owns nothing, and what one more matrix costs."""
    inner = {count: statistics.median(each[0] for each in rounds) for count, rounds in found.items()}
    rows = [(count, f"{spent:.2f}", f"{1e3 * spent / count:.2f}") for count, spent in inner.items()]
    lines = support.table(["matrices", "inner and flags ms", "us a matrix"], rows)
    few, many = min(inner), max(inner)
    if few < many:
        each = 1e3 * (inner[many] - inner[few]) / (many - few)
        lines += ["", f"One more matrix: {each:.2f} us; 44,000 matrices: {each * 44:.0f} ms."]
    return lines


def rows_of(count: int, found: dict[str, list[list[float]]]) -> Iterator[list[object]]:
    """Yield the rows of one number of matrices, with ratios to the first optimizer."""
    first = list(zip(*next(iter(found.values())), strict=True))
    for name, rounds in found.items():
        inner, step = parts = list(zip(*rounds, strict=True))
        ratios = [support.median_ratio(own, peer) for own, peer in zip(parts, first, strict=True)]
        more = statistics.median(own - peer for own, peer in zip(step, first[1], strict=True))
        times = [cell(inner), cell([1e3 * each / count for each in inner], digits=1), cell(step)]
        yield [count, name, *times, *(f"{ratio:.2f}" for ratio in ratios), f"{more:.2f}"]


def cell(times: Sequence[float], *, digits: int = 2) -> str:
    """Return the median and, in brackets, the smallest time."""
    return f"{statistics.median(times):.{digits}f} ({min(times):.{digits}f})"


def main() -> None:
    """Run from the command line."""
    parser = support.options(__doc__)
    parser.add_argument("--matrices", type=int, nargs="+", default=[224, 448])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--fragments", action="store_true", help="rank 0 owns no matrix")
    parser.add_argument("--variant", default="muon", help="optimizer.params.variant of this project")
    parser.add_argument("--width", type=int, default=16, help="rows and columns of a matrix")
    parser.add_argument("--int8", action="store_true", help="momentum in 8 bits beside fp32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--passes", action="store_true", help="the pass over the momentum alone")
    arguments = parser.parse_args()
    results = {}
    for count in () if arguments.passes else arguments.matrices:
        settings = {
            key: getattr(arguments, key) for key in ("rounds", "fragments", "variant", "width", "int8")
        }
        settings["count"] = count
        found = run_ranks("benchmarks.host_time:measure", arguments.ranks, settings, timeout=600)
        results[count] = found[0]
    used = support.machine()
    if arguments.passes:
        heads = ["elements", "gradient", "sent", "fp32 ms", "bf16 ms", "int8 ms", "int8 / fp32"]
        lines = support.table(heads, pass_rows(arguments.rounds))
    elif arguments.fragments:
        lines = fragment_table({count: found["ours"] for count, found in results.items()})
    else:
        heads = [
            "matrices",
            "optimizer",
            "inner ms (smallest)",
            "us a matrix (smallest)",
            "step ms (smallest)",
        ]
        rows = [row for count, result in results.items() for row in rows_of(count, result)]
        first = MOMENTA[0] if arguments.int8 else OPTIMIZERS[0]
        lines = support.table([*heads, f"inner / {first}", f"step / {first}", f"step - {first}, ms"], rows)
    described = ", ".join(f"{name}: {value}" for name, value in used.items())
    page = ["# Host time of a step", "", described, "", *lines]
    print("\n".join(page))
    support.write(arguments.out, {"machine": used, "medians": results}, page)


if __name__ == "__main__":
    main()
