"""Whole training steps: milliseconds, losses and peak memory of this project, AdamW and DeepSpeed's Muon.

    python benchmarks/whole_steps.py --device cuda --model 350M --out OUT --profile    # one GPU; torchrun for several
    python benchmarks/whole_steps.py --model tiny --steps 6 --length 64                # a rehearsal on a CPU

A step is forward, backward and optimizer step of all micro-batches, with one synchronisation at its end. All engines of
a run live in one process group and take turns, so that the machine's drift hits all alike; a ratio is the median over
the turns, a time the slowest rank's. ``--optimizers`` selects those that fit on a device together.
AdamW is measured twice, because DeepSpeed's default for bf16, ``check_grad_overflow``, adds 13 operations a gradient.
Peak memory, on a GPU alone, is the growth over what was allocated before the engine, in a step that has all its state.
``--profile`` writes the sums of torch's profiler beside OUT. The text is Python's standard library as bytes.
"""

from __future__ import annotations

import gc
import re
import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("", "examples")]

from text_data import Batches, load_tokens, standard_library  # noqa: E402  # a module beside the example's script
from torch.profiler import profile  # noqa: E402

from benchmarks import step_ranks, support  # noqa: E402
from benchmarks.support import Row  # noqa: E402
from deepspeed_muon import muon_optimizer  # noqa: E402

MUON_RATES = {"muon_lr": 0.02, "adam_lr": 3e-4}
OPTIMIZERS = {
    "ours": MUON_RATES,
    step_ranks.ADAMW: {"lr": 3e-4},
    step_ranks.UNCHECKED: {"lr": 3e-4},
    "DeepSpeed Muon, gram": MUON_RATES,  # its default
    "DeepSpeed Muon, standard": MUON_RATES,
}
FIRST = 3
"""Steps before the turns: they build state, compile and capture; memory is that of the last one."""


def step_of(engine: Any, row: Row, micro_batches: list[Tensor], device: str) -> None:
    """Run one step; append the loss of its last micro-batch and the slowest rank's milliseconds to ``row``."""
    dist.barrier()
    step_ranks.wait(device)
    start = time.perf_counter()
    for batch in micro_batches:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
    step_ranks.wait(device)
    slowest = torch.tensor(1e3 * (time.perf_counter() - start), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    row["ms"].append(slowest.item())
    row["losses"].append(loss.item())


def measure(accumulation: int, steps: list[list[Tensor]], arguments: Namespace) -> list[Row]:
    """Train a new model with each optimizer on all micro-batches; return their rows."""
    device, engines, rows = arguments.device, [], []
    # 1. the first steps, one optimizer after the other
    for name in arguments.optimizers:
        row: Row = {"accumulation": accumulation, "optimizer": name, "losses": [], "ms": []}
        before = support.memory_of(device)[0]
        with torch.device(device):
            model = step_ranks.decoder(arguments.model)
        settings = {"clipping": arguments.clipping, "weight_decay": 0.0, **OPTIMIZERS[name]}
        engine = step_ranks.make_engine(name, model, arguments.stage, accumulation, device, **settings)
        for micro_batches in steps[:FIRST]:
            support.reset_peak(device)
            step_of(engine, row, micro_batches, device)
        if device != "cpu":
            row["peak_bytes"] = support.memory_of(device)[1] - before
        engines.append(engine)
        rows.append(row)
    # 2. in turns
    positions = support.turns(range(len(engines)), len(steps) - FIRST)
    for micro_batches, turn in zip(steps[FIRST:], positions, strict=True):
        gc.collect()
        for position in turn:
            step_of(engines[position], rows[position], micro_batches, device)
    # 3. what needs all of them
    for row, engine in zip(rows, engines, strict=True):
        if row["optimizer"] == "ours":
            row["kernels"] = muon_optimizer(engine).kernel_report()
            for peer in rows:
                peer["ours / it"] = support.median_ratio(row["ms"][FIRST:], peer["ms"][FIRST:])
        if arguments.profile:
            write_profile(engine, row, steps[-1], arguments)
    for engine in engines:
        engine.destroy()
    return rows


def write_profile(engine: Any, row: Row, micro_batches: list[Tensor], arguments: Namespace) -> None:
    """Write the sums of one more step by kernel, or on a CPU by operator, as text beside the results."""
    with profile() as profiler:
        step_of(engine, {"losses": [], "ms": []}, micro_batches, arguments.device)
    key = f"self_{'cpu' if arguments.device == 'cpu' else 'device'}_time_total"
    text = profiler.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=60)
    name = re.sub("[^a-z0-9]+", "-", f"{row['optimizer']}-{row['accumulation']}".lower())
    text = f"{row['optimizer']}, accumulation {row['accumulation']}, {support.revision()}\n{text}\n"
    if dist.get_rank() == 0:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.with_name(f"{arguments.out.name}-{name}.txt").write_text(text)


def line_of(row: Row) -> Row:
    """Return a line of the page; the JSON has every step."""
    losses = {f"loss {n + 1}": row["losses"][n] for n in (0, len(row["losses"]) // 2, len(row["losses"]) - 1)}
    return {
        **{key: row[key] for key in ("accumulation", "optimizer")},
        "first step, ms": row["ms"][0],
        "later step, ms": statistics.median(row["ms"][FIRST:]),
        **({"ours / it": row["ours / it"]} if "ours / it" in row else {}),
        **({"peak, GiB": row["peak_bytes"] / 2**30} if "peak_bytes" in row else {}),
        **losses,
    }


def main() -> None:
    parser = support.options(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=sorted(step_ranks.MODELS), default="350M")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--clipping", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=30, help="with accumulation fewer, but 6")
    parser.add_argument("--sequences", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--profile", action="store_true", help="needs --out")
    arguments = parser.parse_args()
    step_ranks.join(arguments.device)
    text, vocabulary = (
        load_tokens(standard_library(), max_bytes=8 << 20),
        step_ranks.MODELS[arguments.model].vocabulary,
    )
    ranks = dist.get_rank(), dist.get_world_size()
    drawn = Batches(text.train, arguments.sequences, arguments.length, *ranks)
    rows: list[Row] = []
    for accumulation in arguments.accumulation:
        steps = [
            [
                drawn.draw(0, step, n, accumulation)[0].to(arguments.device) % vocabulary
                for n in range(accumulation)
            ]
            for step in range(max(2 * FIRST, arguments.steps // accumulation))
        ]
        rows += measure(accumulation, steps, arguments)
        table = [line_of(row) for row in rows]
        told = f"ZeRO {arguments.stage}, clipping {arguments.clipping:g}, "
        told += f"{arguments.sequences} x {arguments.length} tokens a micro-batch."
        page = [
            *support.heading(f"Whole steps of the {arguments.model} model", told),
            *support.table_of(table),
        ]
        if ranks[0] == 0:
            support.write(arguments.out, {"table": table, "rows": rows}, page)
    print("\n".join(page))
    step_ranks.leave()


if __name__ == "__main__":
    main()
