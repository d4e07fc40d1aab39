"""What one rank of many costs at the start: time, memory, messages, and its part of a checkpoint's record.

``python benchmarks/scale.py --out benchmarks/results/scale-NAME`` makes one rank of 64, 1,024 and 16,384, of models
with 723 (llama-70b), 5,000 and 44,000 parameters (of kimi-k2 with separate experts), at stages 1 and 3; with
``--parameters 915`` of kimi-k2, whose 46,080 experts are stacked. Each cell runs in a process of its own.

The code is the real one: routing, the order of the matrices, the readers of ZeRO's wrappers, owners, exchange plans,
the comparison of the plans, the record. Not real are ZeRO's wrapper, an object with the attributes that the reader
reads, whose flat buffers are mapped but never touched; and the other ranks, for whom this program answers that they
have the same facts.

Time is processor time. Memory is the growth of the resident set.
Messages are what the rank sends and receives: an all-reduce counts twice its size, a gather the items of all ranks.
"""

from __future__ import annotations

import argparse
import gc
import io
import itertools
import json
import mmap
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import support

PARAMETERS = [723, 5000, 44000, 915]
LIMITS = {"bind_s": 5.0, "memory_mb": 64.0, "record_kb": 64.0, "messages_kb": 64.0}
NORESERVE = 0x4000  # of Linux; Python names it from 3.13 on
Shapes = list[tuple[str, tuple[int, ...]]]


def shapes_of(parameters: int) -> Shapes:
    """Return names and shapes of a model with so many parameters."""
    from deepspeed_muon.tools.model_shapes import load_model, with_separate_experts

    members = load_model("llama-70b" if parameters == 723 else "kimi-k2")
    if parameters > 915:
        members = with_separate_experts(members)[:parameters]
    assert len(members) == parameters
    return [(member.name, tuple(member.param.shape)) for member in members]


def mapped(numel: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor whose memory exists only where it is touched."""
    size = max(numel, 1) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype, count=numel)


def mapped_all(shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    numels = [torch.Size(shape).numel() for _, shape in shapes]
    for (name, shape), part in zip(shapes, mapped(sum(numels), torch.bfloat16).split(numels), strict=True):
        yield name, part.view(shape)


class OtherRanks:
    """Answers for all other ranks and counts what this rank sends and receives."""

    def __init__(self) -> None:
        self.bytes = 0
        dist.all_reduce = self.all_reduce  # type: ignore[assignment]
        dist.all_gather_object = self.all_gather_object  # type: ignore[assignment]

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        self.bytes += 2 * tensor.numel() * tensor.element_size()
        if op == dist.ReduceOp.SUM and tensor.dtype == torch.float64:
            tensor.zero_()  # checksums of equal facts cancel

    def all_gather_object(self, parts: list[Any], item: Any, group: Any = None) -> None:
        self.bytes += len(parts) * len(json.dumps(item, default=repr))
        parts[:] = [item] * len(parts)


def stage1_wrapper(optimizer: Any, world: int, rank: int) -> Any:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    wrapper = object.__new__(DeepSpeedZeroOptimizer)
    groups = [group["params"] for group in optimizer.param_groups]
    flats, masters = [], []
    for params in groups:
        numel = sum(param.numel() for param in params)
        partition = -(-numel // (2 * world)) * 2
        flat, offset = mapped(partition * world, torch.bfloat16), 0
        for param in params:
            param.data = flat.narrow(0, offset, param.numel()).view(param.shape)
            offset += param.numel()
        flats.append(flat)
        masters.append(mapped(partition, torch.float32))
    wrapper.bit16_groups, wrapper.bit16_groups_flat = groups, flats
    wrapper.real_dp_process_group = [dist.group.WORLD] * len(groups)
    wrapper.single_partition_of_fp32_groups = masters
    wrapper.parallel_partitioned_bit16_groups = [{rank: flat} for flat in flats]
    wrapper.cpu_offload = False
    return wrapper


def stage3_wrapper(optimizer: Any, world: int, rank: int) -> Any:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    wrapper = object.__new__(DeepSpeedZeroOptimizer_Stage3)
    groups = [group["params"] for group in optimizer.param_groups]
    masters = []
    for params in groups:
        total = 0
        for param in params:
            shard = -(-param.numel() // world)
            param.ds_shape, param.ds_numel = param.shape, param.numel()
            param.partition_numel = lambda shard=shard: shard
            total += shard
        masters.append(mapped(total, torch.float32))
    wrapper.fp16_groups = groups
    wrapper.dp_process_group = dist.group.WORLD
    wrapper._get_sub_group_process_group = lambda index: dist.group.WORLD
    wrapper.fp32_partitioned_groups_flat = wrapper.fp16_partitioned_groups_flat = masters
    wrapper.offload_optimizer, wrapper.optimizer_swapper = False, None
    return wrapper


def resident_mb() -> float:
    text = Path("/proc/self/statm").read_text().split()
    return int(text[1]) * mmap.PAGESIZE / 1e6


def measure(parameters: int, stage: int, world: int, rank: int) -> dict[str, float]:
    """Make one rank; return its figures."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import deepspeed_muon
    from deepspeed_muon.checkpoint.layout_record import record_of
    from deepspeed_muon.checkpoint.parameters import collect, describe_parameters, set_bound_engine
    from deepspeed_muon.engine.topology import read_step_sets
    from deepspeed_muon.routing.param_groups import order_for_partitions
    from deepspeed_muon.transport.agreement import agree
    from deepspeed_muon.transport.ranks import Ranks

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    others = OtherRanks()
    named = [(name, torch.nn.Parameter(tensor)) for name, tensor in mapped_all(shapes_of(parameters))]
    found: dict[str, float] = {}
    start = time.process_time()
    # Without kernels to be timed, which takes minutes for the largest matrices on a CPU.
    optimizer = deepspeed_muon.Muon(named, muon_lr=0.02, ns_backend="torch")
    found["route_s"] = time.process_time() - start
    start = time.process_time()
    if stage == 1:
        settings = optimizer.config.ns_settings(torch.device("cpu"))
        order_for_partitions(optimizer.param_groups, optimizer.routed.by_id, world, settings)
    found["order_s"] = time.process_time() - start
    wrapper = (stage1_wrapper if stage == 1 else stage3_wrapper)(optimizer, world, rank)
    wrapper.optimizer = optimizer
    engine = SimpleNamespace(
        optimizer=wrapper, basic_optimizer=optimizer, mpu=None, seq_data_parallel_group=dist.group.WORLD
    )
    gc.collect()
    before = resident_mb()
    start = time.process_time()
    step_sets = read_step_sets(engine, optimizer, optimizer.routed.by_id)
    optimizer._bind(step_sets, device=torch.device("cpu"), ranks=Ranks.of([None]))
    agree(optimizer._plan_facts(), ranks=optimizer.ranks)
    found["bind_s"] = time.process_time() - start
    gc.collect()
    found["memory_mb"] = resident_mb() - before
    found["messages_kb"] = others.bytes / 1e3
    groups = range(len(optimizer.param_groups))
    start = time.process_time()
    bound_engine: Any = SimpleNamespace(
        view=SimpleNamespace(group_numbers=lambda: list(groups)),
        counters=lambda: {"global_steps": 0},
        parameters=describe_parameters(optimizer.routes, {}),
        save_id="0" * 12,
        engine=engine,
    )
    set_bound_engine(optimizer, bound_engine)
    content = io.BytesIO()
    torch.save(record_of(collect(engine)), content)
    found["record_kb"], found["record_s"] = len(content.getvalue()) / 1e3, time.process_time() - start
    runners = optimizer.runners
    found["owned"] = sum(len(chunk.owned) for runner in runners for chunk in runner.plan.chunks)
    found["chunks"] = sum(len(runner.plan.chunks) for runner in runners)
    return found


def main() -> None:
    parser = support.options(__doc__)
    parser.add_argument("--parameters", nargs="+", type=int, choices=PARAMETERS, default=PARAMETERS[:3])
    parser.add_argument("--stages", nargs="+", type=int, choices=(1, 3), default=[1, 3])
    parser.add_argument("--ranks", nargs="+", type=int, default=[64, 1024, 16384])
    parser.add_argument("--cell", nargs=3, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        parameters, stage, world = arguments.cell
        print(json.dumps(measure(parameters, stage, world, 5 * world // 8)))
        return
    rows = []
    for cell in itertools.product(arguments.parameters, arguments.stages, arguments.ranks):
        command = [sys.executable, __file__, "--cell", *map(str, cell)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        rows.append({**dict(zip(("parameters", "stage", "ranks"), cell, strict=True)), **found})
        print(rows[-1], flush=True)
    limits = f"Limits: {', '.join(f'{key} {value:g}' for key, value in LIMITS.items())}."
    page = [*support.heading("One rank of many", limits), *support.table_of(rows)]
    support.write(arguments.out, {"limits": LIMITS, "rows": rows}, page)


if __name__ == "__main__":
    main()
