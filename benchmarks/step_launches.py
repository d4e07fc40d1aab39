"""What a rank of many does in the optimizer's step: launches and bytes, counted, or milliseconds, measured.

    python benchmarks/step_launches.py                                                  # counts; CPU, some minutes
    python benchmarks/step_launches.py --device cuda --world 8 64 512 --model llama-7b  # one rank's share on one GPU

Launches and bytes are those of the rank that owns most matrices, with the kernels of the iteration launched one by one
(``tests/unit/test_step_launches.py`` says how they are counted).

With ``--world`` one rank of many runs its share of a step: its plan, its matrices, its flat passes, with this package's
step. Other ranks are not there: an all-to-all is a copy that fills the buffer that receives, an all-reduce nothing. So
the network is left out, and what ``plan`` expects of it, with eight H100 a node, stands beside. AdamW is torch's fused
one on the same elements.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import support
from benchmarks.step_ranks import wait
from deepspeed_muon import MuonConfig
from deepspeed_muon.config.values import StatePolicy
from deepspeed_muon.monitoring.recorder import StepRecorder
from deepspeed_muon.ops.dispatch import Orthogonalizer
from deepspeed_muon.step import gradient_flags
from deepspeed_muon.step.bound import BoundSteps
from deepspeed_muon.step.step_set import StepContext
from deepspeed_muon.tools.plan import PlanSettings, forecast
from deepspeed_muon.transport.all_to_all import (
    ChunkExchange,
    ExchangeBuffers,
    InFlight,
    SentCounts,
    overlap_fits,
)
from deepspeed_muon.variants import VARIANTS
from tests.unit.test_step_launches import counted, routes_of, step_set_of

COUNTED = (
    *(("350M", 1, 1, "muon"), ("350M", 8, 1, "muon"), ("1.3B", 1, 1, "muon"), ("1.3B", 8, 1, "muon")),
    *(("1.3B", 64, 3, "muon"), *(("llama-7b", 64, 3, variant) for variant in VARIANTS)),
)
"""Model, ranks, ZeRO stage, variant."""


def counts(model: str, ranks: int, stage: int, variant: str) -> support.Row:
    """Count one step."""
    _, launches = counted(model, ranks, variant, stage=stage)
    row: support.Row = {"model": model, "ranks": ranks, "stage": stage, "variant": variant}
    row |= {"launches": launches.counts.total(), "of the iteration": launches.counts["iteration"]}
    row |= {"calls of it": launches.calls, "GB": launches.moved.total() / 1e9}
    return row | {"GB of the iteration": launches.moved["iteration"] / 1e9}


def receive(source: torch.Tensor, exchange: str, flight: InFlight, *_: Any) -> list[Any]:
    """Fill the buffer that receives in an exchange with numbers of the size of directions."""
    out = flight.owner_buffer if exchange == "gather" else flight.fragment_buffer
    out.copy_(source[: out.numel()])
    return []


def share(model: str, world: int, rank: int, arguments: Namespace) -> support.Row:
    """Time one rank's share of a step."""
    config, device, stage = MuonConfig(), torch.device(arguments.device), arguments.stage
    routes = routes_of(model, config)
    # 1. the rank, and its step
    step_set = step_set_of(routes, world, rank, stage, config, device)
    orthogonalizer, recorder = Orthogonalizer(config.ns_backend), StepRecorder(every=100, check=True)
    recorder.reset(device)
    shared = orthogonalizer, SentCounts(), recorder, ExchangeBuffers(device), StatePolicy()
    context = StepContext(
        0, step_set, config, device, *shared, overlap_fits(step_set.matrices, torch.bfloat16)
    )
    bound = BoundSteps([context])
    (runner,) = bound.runners
    for x in runner.inputs():
        orthogonalizer.prepare(x, settings=context.ns_settings, device=device)
    weights = step_set.partitions[0].tensor.normal_(std=0.02)
    grad, state = torch.randn_like(weights), {weights: {}}
    group = {**config.group_defaults("muon"), "lr": 0.02}
    # 2. AdamW on the same elements
    parameter = torch.nn.Parameter(weights.clone())
    parameter.grad = grad.clone()
    adamw = torch.optim.AdamW([parameter], fused=True)

    def step() -> None:
        bound.gradient_flags.exchange({0: [grad]})
        runner.run(bound.gradient_flags[runner].report().active, {0: grad}, {0: group}, state)
        wait(device.type)

    def adamw_step() -> None:
        adamw.step()
        wait(device.type)

    buffers = [
        buffer for chunk in runner.plan.chunks for buffer in (chunk.fragment_buffer, chunk.owner_buffer)
    ]
    source = torch.randn(max(buffer.numel for buffer in buffers), device=device).to(context.wire_dtype)
    with (
        mock.patch.object(ChunkExchange, "_messages", lambda _, *args: receive(source, *args)),
        mock.patch(f"{gradient_flags.__name__}.all_reduce_tensor", lambda tensor, *_, **__: tensor),
        torch.no_grad(),
    ):
        times = support.timed_in_turn({"step, ms": step, "AdamW, ms": adamw_step}, arguments.seconds)
    # 3. what the command ``plan`` expects
    expected = forecast(routes, PlanSettings(world, stage, config=config))["muon"]
    owned, seconds = Counter(runner.plan.owners)[rank], expected["seconds"]
    row: support.Row = {"model": model, "ranks": world, "stage": stage, "rank": rank, "matrices": owned}
    row |= {
        "M elements": weights.numel() / 1e6,
        **{name: statistics.median(ms) for name, ms in times.items()},
    }
    row |= {
        "plan: Newton-Schulz, ms": 1e3 * seconds["newton_schulz"],
        "exchange, MB": expected["sent_bytes"] / 1e6,
    }
    return row | {"exchange, ms": 1e3 * (seconds["gather"] + seconds["scatter"])}


def main() -> None:
    parser = support.options(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--world", nargs="+", type=int, default=[], help="ranks; without it a step is counted"
    )
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--stage", type=int, choices=(1, 3), default=3)
    parser.add_argument("--model", default="llama-7b")
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    rows: list[support.Row] = []
    title = "One rank of many" if arguments.world else "Launches and bytes of a step"
    for case in arguments.world or COUNTED:
        rows.append(
            share(arguments.model, case, arguments.rank, arguments) if arguments.world else counts(*case)
        )
        page = [*support.heading(title), *support.table_of(rows)]
        support.write(arguments.out, {"rows": rows}, page)
    print("\n".join(page))


if __name__ == "__main__":
    main()
