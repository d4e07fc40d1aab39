"""Bytes and peak memory of a rank by optimizer, beside what ``plan`` predicts; and times of the elementwise passes.

``python benchmarks/state_memory.py --out benchmarks/results/state_memory`` starts gloo ranks, trains the 5M decoder of
``step_ranks.py`` with every optimizer at stages 1, 2 and 3, and adds up the tensors that a rank keeps for the step, by
what they are for. Peaks are resident memory above what the process had before the model. Then ``plan``'s prediction of
7B and 70B on 8 and 64 GPUs. Rows in the JSON of ``--out`` are kept and overwritten one by one.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from torch import Tensor

import deepspeed_muon
from benchmarks import step_ranks, support
from benchmarks.optimizer_step import RETURN_MEMORY
from benchmarks.support import Row
from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.engine.offload import CpuAdam, half_states, master_dtype
from deepspeed_muon.forecast.model_shapes import load_model
from deepspeed_muon.forecast.predict import PlanSettings
from deepspeed_muon.forecast.report import forecast
from deepspeed_muon.math.updates import AdamStep, adam_step_
from deepspeed_muon.ops.dispatch import flat_passes
from deepspeed_muon.routing.rules import route_parameters

MIB = 1 << 20
ROLES = ("master_weights", "gradients", "gradient_copy", "momentum", "moments", "exchange_buffers")
OPTIMIZERS = (
    "ours",
    "ours, bf16 momentum",
    "ours, int8 momentum",
    "ours, int8 momentum, bf16 masters",
    "DeepSpeed Muon, standard",
    "DeepSpeed AdamW",
    step_ranks.EIGHT_BIT,
)
# Two codes of one byte, each with an fp32 scale for 256 elements, as AdamW8bit keeps.
EIGHT_BIT_MOMENTS = 2 * (1 + 4 / 256)


class Storages:
    """Adds up tensors by their storages, each of which counts once."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def add(self, tensors: Iterable[Tensor | None]) -> int:
        """Return the bytes of the storages that were not counted yet."""
        total = 0
        for tensor in tensors:
            if hasattr(tensor, "__tensor_flatten__"):  # codes, scales and tables of an 8-bit state
                total += self.add(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            elif tensor is not None and tensor.untyped_storage()._cdata not in self._known:
                self._known.add(tensor.untyped_storage()._cdata)
                total += tensor.untyped_storage().nbytes()
        return total


def count_bytes(rank: int, world_size: int, *, model: str, stage: int, optimizer: str) -> Row:
    """Train two steps of two micro-batches; return a rank's bytes by role and peak, and what ``plan`` predicts."""
    gc.collect()
    before = step_ranks.memory_of("cpu")[0]
    engine = step_ranks.make_engine(optimizer, step_ranks.MODELS[model], stage, 2, "cpu")
    inner, wrapper = engine.basic_optimizer, engine.optimizer
    masters = wrapper.fp32_partitioned_groups_flat if stage == 3 else wrapper.single_partition_of_fp32_groups
    batches = [step_ranks.batch_of(step_ranks.MODELS[model], micro, 32, "cpu") for micro in range(2)]
    step_ranks.one_step(engine, batches, "cpu")
    gc.collect()
    step_ranks.reset_peak("cpu")

    copies = [0]
    hook = inner.register_step_pre_hook(
        lambda *_: copies.append(sum(each.grad.nbytes for each in masters if each.grad is not None))
    )
    seen, gradients = Storages(), []
    partitions = [param.ds_tensor if stage == 3 else param for param in engine.module.parameters()]
    found: Row = {"weights": seen.add(partitions), "master_weights": seen.add(masters)}
    for batch in batches:
        engine.backward(engine(batch))
        gradients.append(Storages().add(_gradients(engine.module.parameters(), wrapper, stage)))
        engine.step()
    hook.remove()
    found["gradients"], found["gradient_copy"] = max(gradients), max(copies)
    entries = [(key, value) for own in inner.state.values() for key, value in own.items()]
    tensors = [(key, value) for key, value in entries if isinstance(value, Tensor) and value.numel() > 1]
    found["momentum"] = seen.add(value for key, value in tensors if "momentum" in key)
    found["moments"] = seen.add(value for key, value in tensors if "momentum" not in key)
    found["resident"], found["peak"] = (each - before for each in step_ranks.memory_of("cpu"))
    if isinstance(inner, deepspeed_muon.Muon):
        found["exchange_buffers"] = inner.exchange_buffers.reserved_bytes
        settings = PlanSettings(
            world_size,
            stage,
            config=inner.config,
            device=torch.device("cpu"),
            master_dtype=master_dtype(engine),
            half_states=half_states(engine),
        )
        found["plan"] = forecast(inner.routes, settings)["muon"]["memory"]
    engine.destroy()
    return found


def _gradients(params: Iterable[Any], wrapper: Any, stage: int) -> Iterator[Tensor | None]:
    """Yield the gradients that wait for the step after the backward pass of a micro-batch."""
    if stage == 3:
        yield wrapper.grad_partitions_flat_buffer
        return
    for param in params:
        yield from (param.grad, getattr(param, "grad_accum", None))
    for kept in (wrapper.averaged_gradients, wrapper.all_grad_tensors):
        for group in kept.values():
            yield from group or ()


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each number of ranks, stage and optimizer: of every role the bytes of all ranks."""
    from tests.support.harness import RankPool

    run = functools.partial(RankPool.run, timeout=600)
    for ranks in arguments.ranks:
        with RankPool(ranks, env=RETURN_MEMORY) as pool:
            for optimizer in arguments.optimizers:
                common = {"model": arguments.model, "optimizer": optimizer}
                # The first call pays for imports and compilation, which are not the optimizer's.
                run(pool, "benchmarks.state_memory:count_bytes", stage=arguments.stages[0], **common)
                for stage in arguments.stages:
                    found = run(pool, "benchmarks.state_memory:count_bytes", stage=stage, **common)
                    row = {**common, "ranks": ranks, "stage": stage}
                    row |= {role: sum(each.get(role, 0) for each in found) for role in ROLES}
                    row["peak"] = max(each["peak"] for each in found)
                    if "plan" in found[0]:
                        row["plan"] = found[0]["plan"]["total"]
                    yield row


def measured_table(rows: list[Row]) -> list[str]:
    """Return the measured bytes per parameter of the model."""
    heads = ["ranks", "stage", "optimizer", "masters", "gradients", "their copy", "momentum", "moments"]
    heads += ["state over AdamW's", "exchange buffers", "peak of a rank, MiB", "`plan` says of it, MiB"]
    shares = model_shares(rows[0]["model"])
    lines = [
        [
            *(row[key] for key in ("ranks", "stage", "optimizer")),
            *(f"{row[role] / shares['all']:.3f}" for role in ROLES[:5]),
            f"{(row['momentum'] + row['moments']) / shares['all'] / 8:.3f}",
            f"{row['exchange_buffers'] / shares['all']:.2f}",
            f"{row['peak'] / MIB:.1f}",
            f"{row['plan'] / MIB:.1f}" if "plan" in row else "-",
        ]
        for row in rows
    ]
    momenta = {row["optimizer"]: row["momentum"] / shares["muon"] for row in rows if row["momentum"]}
    listed = "; ".join(f"{name}: {value:.4f}" for name, value in momenta.items())
    return [*support.table(heads, lines), "", f"Momentum, bytes for each of Muon's elements: {listed}."]


def model_shares(model: str) -> dict[str, int]:
    """Return the elements of a model of ``step_ranks.py``, all of them and those of Muon."""
    with torch.device("meta"):
        decoder = step_ranks.Decoder(step_ranks.MODELS[model])
    routes = deepspeed_muon.Muon(decoder).routes
    found = {"all": sum(route.numel for route in routes)}
    return {**found, "muon": sum(route.numel for route in routes if route.algorithm == "muon")}


def predictions() -> list[str]:
    """Return what ``plan`` says of 7B and 70B: optimizer state, and all that it counts."""
    half = {"master_dtype": torch.bfloat16, "half_states": True}
    ours: dict[str, tuple[str, Row]] = {each: (each, {}) for each in ("fp32", "bf16", "int8")}
    ours["int8, bf16 masters"] = ("int8", half)
    names = (*(f"ours, {name}" for name in ours), "AdamW", "8-bit AdamW")
    rows = []
    for model, gpus, stage in itertools.product(("llama-7b", "llama-70b"), (8, 64), (1, 2, 3)):
        members, found = load_model(model), {}
        for name, (dtype, dtypes) in ours.items():
            config = MuonConfig(momentum_dtype=dtype)
            settings = PlanSettings(gpus, stage, config=config, **dtypes)
            step = forecast(route_parameters(members, config), settings)
            memory = step["muon"]["memory"]
            found[name] = memory["momentum"] + memory["moments"], memory["total"]
            if not dtypes:
                found["AdamW"] = step["adamw"]["memory"]["moments"], step["adamw"]["memory"]["total"]
        state, total = found["AdamW"]
        found["8-bit AdamW"] = state * EIGHT_BIT_MOMENTS / 8, total - state * (1 - EIGHT_BIT_MOMENTS / 8)
        order = (*ours, "AdamW", "8-bit AdamW")
        cells = [f"{found[name][0] / 1e9:.2f} / {fits(found[name][1])}" for name in order]
        ratio = found["int8"][0] / found["AdamW"][0]
        rows.append([model, gpus, stage, *cells, f"{ratio:.3f}"])
    return support.table(["model", "GPUs", "stage", *names, "int8 over AdamW"], rows)


def fits(total: float) -> str:
    """Return the bytes of a GPU in GB, bold where they fit into an H100's 80 GB."""
    return f"**{total / 1e9:.1f}**" if total <= PlanSettings(1).gpu.memory else f"{total / 1e9:.1f}"


def median_ms(function: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call after one that warms up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def passes(numel: int, repeats: int) -> list[str]:
    """Return the table of times of the elementwise passes on a flat partition."""
    runs: dict[str, Callable[[], object]] = {}
    grad, out = torch.randn(numel), torch.empty(numel, dtype=torch.bfloat16)
    kernel = flat_passes("auto")
    table, rates = torch.tensor([(0, 0, 0, 0, numel, 0)]), torch.tensor([(0.95, 1.0)], dtype=torch.float64)
    codes, scales = torch.zeros(numel, dtype=torch.int8), torch.zeros(-(-numel // 256))
    coded = [codes], [scales], [grad], [out], table, rates, torch.tensor([(0, 0, -1, -1)]), torch.empty(0, 2)
    runs[f"momentum int8 ({kernel.name})"] = functools.partial(kernel.momentum_pack_int8, *coded)
    for name, dtype in (("momentum fp32", torch.float32), ("momentum bf16", torch.bfloat16)):
        buf = torch.zeros(numel, dtype=dtype)
        packing = functools.partial(kernel.momentum_pack, [buf], [grad], [out], table, rates)
        runs[f"{name} ({kernel.name})"] = packing
    settings = AdamStep(1e-3, (0.9, 0.95), 1e-8, 0.1, 3)
    native = CpuAdam(decoupled=True, master=torch.float32, moments=torch.float32)
    adams: dict[str, Callable[..., None]] = {"DeepSpeed's cpu_adam": native, "torch fused": adam_step_}
    for name, adam in adams.items():
        tensors = [[torch.randn(numel)], [grad], [torch.zeros(numel)], [torch.zeros(numel)]]
        runs[f"AdamW, {name}"] = functools.partial(adam, *tensors, settings=settings)
    times = [(name, f"{median_ms(run, repeats):.1f}") for name, run in runs.items()]
    return support.table(["pass", "ms"], times)


def main() -> None:
    """Run from the command line."""
    parser = support.options(__doc__)
    parser.add_argument("--model", choices=sorted(step_ranks.MODELS), default="5M")
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--numel", type=int, default=1 << 24, help="elements of the timed passes")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    order = list(OPTIMIZERS)
    rows: list[Row] = support.read(arguments.out).get("rows", [])

    def place(row: Row) -> tuple[Any, ...]:
        return (row["model"], row["ranks"], row["stage"], order.index(row["optimizer"]))

    for row in measure(arguments):
        rows = support.merged(rows, [row], place)
        print(row, flush=True)
        # After every row, so that a long table can be made in pieces.
        support.write(arguments.out, {"machine": support.machine(), "rows": rows}, [])
    shares, used = model_shares(arguments.model), support.machine()
    page = [
        f"`python benchmarks/state_memory.py`: {used['name']}, {used['cores']} cores, torch {used['torch']}, "
        f"DeepSpeed {used['deepspeed']}; gloo ranks, bf16, steps of two micro-batches of 32 tokens.",
        "",
        f"Model {arguments.model}: {shares['all']:,} parameters, of which AdamW updates "
        f"{1 - shares['muon'] / shares['all']:.1%} (embedding, head, norms). Bytes of all ranks together for each "
        f"parameter of the model. *Their copy* is the gradient in the masters' dtype that ZeRO makes for the step, "
        f"one param group at a time. Gradients are counted after each backward pass, state and buffers after the step. "
        f"Peaks are of the process: activations, ZeRO's buckets and, at stage 3, gathered parameters, here all of "
        f"them, are no part of what `plan` says. For a partition that its blocks do not divide AdamW8bit keeps fp32: "
        f"with its default of 256 for those of 2 and 4 ranks.",
        "",
        *measured_table(rows),
        "",
        "Predicted by `plan`, GB of each GPU: optimizer state / everything it counts (no activations, no buckets of "
        "ZeRO, no gathered parameters), bold where an H100 of 80 GB holds it. 8-bit AdamW is computed, not planned: "
        "2.03 bytes a parameter, blocks of 256.",
        "",
        *predictions(),
        "",
        f"Elementwise passes over {arguments.numel:,} elements, {torch.get_num_threads()} threads, beside other "
        f"programs (load {used['load_at_end'][0]}):",
        "",
        *passes(arguments.numel, arguments.repeats),
    ]  # fmt: skip
    print("\n".join(page))
    support.write(arguments.out, {"machine": used, "rows": rows}, page)


if __name__ == "__main__":
    main()
