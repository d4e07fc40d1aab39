"""Several ranks train the same matrices through :class:`StepRunner`, compared with the float64 reference.

One GPU is enough: the ranks are processes that share it and communicate over gloo, which copies through the host. That
reaches what a single rank never runs on a device: fragments, blocks cut by a partition, row state on the owner, sums
over the fragments of a block, several chunks in flight. NCCL needs a GPU for each rank.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m tests.gpu.ranks --device cuda
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.gpu.ranks --device cuda --backend nccl
    python -m torch.distributed.run --standalone --nproc-per-node 4 -m tests.gpu.ranks --device cpu
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_muon import MuonConfig
from deepspeed_muon.config.values import StatePolicy
from deepspeed_muon.monitoring.recorder import StepRecorder
from deepspeed_muon.ops.dispatch import Orthogonalizer
from deepspeed_muon.plan.layout import ParameterLayout
from deepspeed_muon.step.gradient_flags import GradientFlags, SetFlags
from deepspeed_muon.step.runner import StepRunner
from deepspeed_muon.step.step_set import Partition, StepContext, StepSet
from deepspeed_muon.transport.all_to_all import ExchangeBuffers, SentCounts
from tests.support.comparisons import all_within, relative
from tests.support.contract import train_reference
from tests.support.layouts import MAKERS
from tests.support.oracle import Oracle, matrices_of
from tests.support.rounding import Arithmetic, limits

STEPS = 3
SHAPES = {
    "tall": (33, 12),
    "stack": (48, 24),
    "uneven": (40, 20),
    "thin": (2, 40),
    "large": (264, 328),
    "square": (69, 69),  # a shard of 1,191 elements, which is padded where it is sent
    "fused": (40, 36),
}
"""Rows and columns. On four ranks, ``flat`` partitions cut the large matrix; ``sharded`` ones cut rows and blocks."""
BLOCKS = {"stack": (16, 16, 16), "uneven": (8, 24, 8)}
SIDE_BY_SIDE = {"fused": (8, 16, 12)}
"""Columns of the blocks."""
BIAS = "bias"  # AdamW's
NUMEL = {**{name: rows * cols for name, (rows, cols) in SHAPES.items()}, BIAS: 37}


SINGLE = Arithmetic(products=torch.float32)
HALF = Arithmetic(products=torch.bfloat16, exchanged=torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        name: For the report.
        placement: A key of :data:`tests.support.layouts.MAKERS`: ``flat`` (ZeRO 1 and 2), ``sharded`` (ZeRO 3) or
            ``replicated`` (ZeRO 0).
        params: ``optimizer.params``.
        arithmetic: What the run rounds.
        overlap: Whether chunks are exchanged while others are orthogonalised.
    """

    name: str
    placement: str
    params: dict[str, Any]
    arithmetic: Arithmetic = SINGLE
    overlap: bool = True

    @property
    def variant(self) -> str:
        """The variant of Muon."""
        return str(self.params.get("variant", "muon"))


CASES = [
    Case("fragments", "flat", {}),
    Case("fragments, without overlap", "flat", {}, overlap=False),
    Case("fragments, row state", "flat", {"variant": "normuon"}),
    Case(
        "fragments, int8 momentum",
        "flat",
        {"momentum_dtype": "int8"},
        Arithmetic(products=torch.float32, momentum=torch.int8),
    ),
    Case("shards", "sharded", {}),
    Case("shards, row state", "sharded", {"variant": "normuon"}),
    Case("shards, row state, bf16", "sharded", {"variant": "normuon", "ns_dtype": "bf16"}, HALF),
    Case("replicas, row state", "replicated", {"variant": "normuon"}),
]


def random(name: str, seed: int) -> Tensor:
    """Return the weights (seed 0) or the gradients of a step, fp32, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + [*NUMEL].index(name))
    return torch.randn(SHAPES.get(name, (NUMEL[name],)), generator=generator)


@functools.lru_cache
def reference(variant: str) -> tuple[Any, Any, list[float]]:
    """Train in one process in float64; return the parameters before and after, and the gradient norms."""
    model = nn.ParameterDict({name: nn.Parameter(random(name, 0)) for name in NUMEL})
    grids = {name: (list(rows), [SHAPES[name][1]], False) for name, rows in BLOCKS.items()}
    grids |= {name: ([SHAPES[name][0]], list(cols), False) for name, cols in SIDE_BY_SIDE.items()}
    oracle = Oracle(matrices_of(SHAPES, grids=grids), variant=variant)

    def gradients(step: int) -> None:
        for name, param in model.items():
            param.grad = random(name, step + 1).double()

    return train_reference(model, oracle, 1, STEPS, gradients=gradients)


def train(case: Case, rank: int, world_size: int, device: torch.device) -> dict[str, Tensor]:
    """Train as one of ``world_size`` ranks; return this rank's fragment of each parameter, by its first element."""
    params = {"ns_dtype": "fp32", "wire_dtype": "auto", "weight_decay": 0.1, "adam_lr": 3e-3, "muon_lr": 0.02}
    params |= {"exchange_chunk_numel": 500, **case.params}
    if case.arithmetic.exchanged == torch.float32:
        params["wire_dtype"] = "fp32"
    config = MuonConfig.from_params({**params, "eps": 1e-8})
    layouts = [
        replace(layout, name=name, row_blocks=BLOCKS.get(name, ()), col_blocks=SIDE_BY_SIDE.get(name, ()))
        for name, layout in zip(SHAPES, MAKERS[case.placement]([*SHAPES.values()], world_size), strict=True)
    ]
    (bias,) = MAKERS["replicated" if case.placement == "replicated" else "flat"](
        [(1, NUMEL[BIAS])], world_size
    )
    adamw = ParameterLayout(BIAS, 1 + max(layout.partition for layout in layouts), bias.placement)

    # 1. This rank's partitions, of weights and of the gradients of each step.
    def partitions_of(seed: int) -> dict[int, Tensor]:
        fragments: dict[int, list[tuple[Tensor, int]]] = defaultdict(list)
        for layout in (*layouts, adamw):
            fragment = layout.placement.fragment_on(rank)
            if fragment is not None:
                values = random(layout.name, seed).flatten()[fragment.matrix_offset :][: fragment.numel]
                fragments[layout.partition].append((values, fragment.partition_offset))
        flat = {}
        for index in range(adamw.partition + 1):
            numel = max((offset + len(values) for values, offset in fragments[index]), default=0)
            flat[index] = torch.zeros(numel)
            for values, offset in fragments[index]:
                flat[index][offset : offset + len(values)] = values
        return {index: tensor.to(device) for index, tensor in flat.items()}

    weights = partitions_of(0)
    bound = [Partition(index, tensor, index != adamw.partition) for index, tensor in weights.items()]
    group = dist.group.WORLD if world_size > 1 else None
    step_set = StepSet(
        tuple(bound), tuple(layouts), (adamw,), group, rank, world_size, case.arithmetic.exchanged
    )

    # 2. The runner, as the optimizer makes it, and its steps.
    policy = StatePolicy(config.momentum_dtype)
    context = StepContext(
        0,
        step_set,
        config,
        device,
        Orthogonalizer("auto"),
        SentCounts(),
        StepRecorder(every=0, check=True),
        ExchangeBuffers(device),
        policy,
        case.overlap,
    )
    runner = StepRunner(context, load=np.zeros(world_size))
    assert len(runner.plan.chunks) > 1
    runner.connect()
    flags = GradientFlags({runner: SetFlags(runner)})
    groups = {
        partition.index: config.group_defaults("muon" if partition.muon else "adamw") for partition in bound
    }
    state: Any = defaultdict(dict)
    with torch.no_grad():
        for step in range(STEPS):
            grads = partitions_of(step + 1)
            flags.exchange({index: (grad,) for index, grad in grads.items()})
            report = flags[runner].report()
            assert not report.nonfinite and not report.unrecoverable, report
            runner.run(report.active, grads, groups, state)
    flags.exchange({})
    assert not flags[runner].report().unrecoverable

    # 3. This rank's fragments.
    result = {}
    for layout in (*layouts, adamw):
        fragment = layout.placement.fragment_on(rank)
        if fragment is not None:
            values = weights[layout.partition][fragment.partition_offset :][: fragment.numel]
            result[f"{layout.name} {fragment.matrix_offset}"] = values.cpu()
    return result


def check(case: Case, rank: int, world_size: int, device: torch.device) -> str:
    """Train and compare on the first rank; return what was measured, or raise."""
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, train(case, rank, world_size, device))
    if rank:
        return ""
    start, end, _ = reference(case.variant)
    copies = (
        gathered
        if case.placement == "replicated"
        else [{key: values for fragments in gathered for key, values in fragments.items()}]
    )
    allowed = limits(reference, case.variant, arithmetic=case.arithmetic).paths
    errors = {}
    for weights in copies:
        for name in NUMEL:
            offsets = sorted((int(key.split()[1]), key) for key in weights if key.split()[0] == name)
            parameter = torch.cat([weights[key] for _, key in offsets]).view(start[name].shape)
            errors[name] = max(errors.get(name, 0.0), relative(parameter, end[name], start[name]))
    all_within(errors, allowed)
    return f"{max(errors[name] / allowed[name] for name in errors):.2f} of what rounding allows"


def check_all(rank: int, world_size: int, *, device: str = "cpu", cases: Sequence[str] = ()) -> list[str]:
    """Run the cases; return a line for each, which begins with ``ok`` or ``FAILED``; empty but on the first rank.

    Must be called by all ranks.
    """
    lines = []
    for case in CASES:
        if cases and case.name not in cases:
            continue
        try:
            line = f"ok      {case.name}: {check(case, rank, world_size, torch.device(device))}"
        except AssertionError:
            line = f"FAILED  {case.name}:\n{traceback.format_exc(limit=4)}"
            if rank:
                raise
        if not rank:
            print(line, flush=True)
            lines.append(line)
    return lines


def main() -> int:
    """Join the ranks that torchrun started, and run all cases; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], default=[])
    arguments = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = arguments.device
    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    dist.init_process_group(arguments.backend)
    lines = check_all(rank, world_size, device=device, cases=arguments.cases)
    dist.destroy_process_group()
    return 1 if any(line.startswith("FAILED") for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
