"""Bytes and peak memory of a rank by optimizer, beside what ``plan`` predicts.

``python benchmarks/state_memory.py --out benchmarks/results/state_memory`` starts gloo ranks, trains the 5M decoder of
``step_ranks.py`` with every optimizer at stages 1, 2 and 3, and adds up the tensors that a rank keeps for the step, by
what they are for. Peaks are resident memory above what the process had before the model. Rows in the JSON of ``--out``
are kept and overwritten one by one.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import sys
from collections.abc import Iterable, Iterator
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
from deepspeed_muon.engine.offload import master_dtype
from deepspeed_muon.tools.plan import PlanSettings, forecast

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
    before = support.memory_of("cpu")[0]
    engine = step_ranks.make_engine(optimizer, step_ranks.decoder(model), stage, 2, "cpu")
    inner, wrapper = engine.basic_optimizer, engine.optimizer
    masters = wrapper.fp32_partitioned_groups_flat if stage == 3 else wrapper.single_partition_of_fp32_groups
    batches = step_ranks.batches_of(model, 2, 32)
    step_ranks.one_step(engine, batches)
    gc.collect()
    support.reset_peak("cpu")

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
    found["peak"] = support.memory_of("cpu")[1] - before
    if isinstance(inner, deepspeed_muon.Muon):
        found["exchange_buffers"] = inner.exchange_buffers.reserved_bytes
        settings = PlanSettings(
            world_size,
            stage,
            config=inner.config,
            device=torch.device("cpu"),
            master_dtype=master_dtype(engine),
            half_states=engine.bf16_optimizer_states(),
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
    shares = model_shares(rows[0]["model"])
    names = ("masters", "gradients", "their copy", "momentum", "moments")
    lines = [
        {
            **{key: row[key] for key in ("ranks", "stage", "optimizer")},
            **{name: row[role] / shares["all"] for name, role in zip(names, ROLES, strict=False)},
            "state over AdamW's": (row["momentum"] + row["moments"]) / shares["all"] / 8,
            "exchange buffers": row["exchange_buffers"] / shares["all"],
            "peak of a rank, MiB": row["peak"] / MIB,
            "`plan` says of it, MiB": row["plan"] / MIB if "plan" in row else "-",
        }
        for row in rows
    ]
    momenta = {row["optimizer"]: row["momentum"] / shares["muon"] for row in rows if row["momentum"]}
    listed = "; ".join(f"{name}: {value:.4f}" for name, value in momenta.items())
    return [*support.table_of(lines), "", f"Momentum, bytes for each of Muon's elements: {listed}."]


def model_shares(model: str) -> dict[str, int]:
    """Return the elements of a model of ``step_ranks.py``, all of them and those of Muon."""
    with torch.device("meta"):
        decoder = step_ranks.Decoder(step_ranks.MODELS[model])
    routes = deepspeed_muon.Muon(decoder).routes
    found = {"all": sum(route.numel for route in routes)}
    return {**found, "muon": sum(route.numel for route in routes if route.algorithm == "muon")}


def main() -> None:
    """Run from the command line."""
    parser = support.options(__doc__)
    parser.add_argument("--model", choices=sorted(step_ranks.MODELS), default="5M")
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    arguments = parser.parse_args()
    order = list(OPTIMIZERS)
    rows: list[Row] = support.read(arguments.out).get("rows", [])

    def place(row: Row) -> tuple[Any, ...]:
        return (row["model"], row["ranks"], row["stage"], order.index(row["optimizer"]))

    for row in measure(arguments):
        rows = support.merged(rows, [row], place)
        print(row, flush=True)
        # After every row, so that a long table can be made in pieces.
        support.write(arguments.out, {"rows": rows}, [])
    shares = model_shares(arguments.model)
    page = support.heading(
        "State and peak memory",
        "",
        f"gloo ranks, bf16, steps of two micro-batches of 32 tokens. Model {arguments.model}: {shares['all']:,} "
        f"parameters, of which AdamW updates {1 - shares['muon'] / shares['all']:.1%} (embedding, head, norms). "
        "Bytes of all ranks together for each parameter of the model. *Their copy* is the gradient in the masters' "
        "dtype that ZeRO makes for the step, one param group at a time. Gradients are counted after each backward "
        "pass, state and buffers after the step. Peaks are of the process: activations, ZeRO's buckets and gathered "
        "parameters, at stage 3 all of them, are no part of what `plan` says. For a partition that its blocks do not "
        "divide AdamW8bit keeps fp32: with its default of 256 for those of 2 and 4 ranks.",
    )
    page += measured_table(rows)
    print("\n".join(page))
    support.write(arguments.out, {"rows": rows}, page)


if __name__ == "__main__":
    main()
