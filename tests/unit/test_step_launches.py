"""How many kernels a step launches on a GPU and how often the host waits, counted from the plan of a large model.

The step of one rank of ZeRO 3 or 1 runs with all tensors on the meta device. An operation counts as one launch unless
it only makes a view. Of what needs several launches, the number is that of the kernels: the flat passes take 72
fragments a launch, torch's concatenation 128 tensors, its multi-tensor norm 320 blocks of 65,536 elements. A copy
between host and device is a wait of the host (all that waits is counted on real ranks, in
:mod:`tests.distributed.test_plan_counts`). A captured CUDA graph of the iteration takes three launches: two copies and
the graph. The gradient norm is not counted. An operation moves its operands and results once each, a flat pass what it
reads and writes of an element.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.step_ranks import members_of
from deepspeed_muon import MuonConfig, orthogonalize
from deepspeed_muon.config.values import StatePolicy
from deepspeed_muon.monitoring.recorder import StepRecorder
from deepspeed_muon.ops.dispatch import FlatPasses
from deepspeed_muon.ops.torch_operators import Column
from deepspeed_muon.routing.route import Route
from deepspeed_muon.routing.rules import route_parameters
from deepspeed_muon.step.bound import BoundSteps
from deepspeed_muon.step.check import ResultCheck
from deepspeed_muon.step.runner import StepRunner
from deepspeed_muon.step.step_set import Partition, StepContext, StepSet
from deepspeed_muon.tools.plan import PlanSettings, parameter_bytes, step_sets
from deepspeed_muon.transport.all_to_all import ChunkExchange, ExchangeBuffers, SentCounts
from deepspeed_muon.variants import VARIANTS

META = torch.device("meta")
FRAGMENTS = 72  # MUON_FLAT_ROWS of ops/csrc/include/muon_cuda.h


class Launches(TorchDispatchMode):
    """Counts what a GPU would launch, by the part of the step that is running.

    Attributes:
        counts: Part of the step to its launches.
        moved: Part of the step to the bytes that they read and write.
        waits: How often the host waited for the device.
        calls: Calls of the iteration.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.waits = self.calls = 0
        self.phase = "passes"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [
            tensor for tensor in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)
        ]
        name = func.overloadpacket.__name__
        if name in ("is_pinned", "_pin_memory"):  # without an accelerator torch cannot answer
            return False if name == "is_pinned" else args[0]
        if name == "_to_copy" and {args[0].device, kwargs.get("device")} == {META, torch.device("cpu")}:
            self.waits += not kwargs.get("non_blocking")
        elif not any(tensor.device == META for tensor in tensors):
            return func(*args, **kwargs)
        if name == "_to_copy" and kwargs.get("device") == torch.device("cpu"):
            self.counts[self.phase] += 1
            flags = torch.zeros(args[0].shape, dtype=args[0].dtype)
            flags[: len(flags) // 2] = 1  # all matrices have a finite gradient, none was left out
            return flags
        result = func(*args, **kwargs)
        if not (func.is_view or "empty" in name or name == "detach"):
            self.counts[self.phase] += launches_of(name, tensors)
            operands = tensors[name == "copy_" :]  # a copy does not read its target
            results = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            self.moved[self.phase] += sum(tensor.nbytes for tensor in operands + results)
        return result

    def during(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose launches count for a part of the step."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.phase = self.phase, phase
            try:
                return function(*args, **kwargs)
            finally:
                self.phase = before

        return run


def launches_of(name: str, tensors: list[Tensor]) -> int:
    """Return the kernels of one operation of torch."""
    if name == "_foreach_norm":
        return -(-sum(-(-tensor.numel() // 65536) for tensor in tensors) // 320) + 1
    if name in ("cat", "stack"):
        return -(-len(tensors) // 128)
    return 1


def routes_of(model: str, config: MuonConfig) -> list[Route]:
    """Return the routes of Muon's matrices."""
    return [route for route in route_parameters(members_of(model), config) if route.algorithm == "muon"]


def step_set_of(
    routes: list[Route], ranks: int, rank: int, stage: int, config: MuonConfig, device: torch.device = META
) -> StepSet:
    """Return the matrices of one rank at ZeRO 1 or 3, of a model in bf16."""
    settings = PlanSettings(ranks, stage, config=config, device=device)
    ((_, layouts),) = step_sets(routes, settings)
    partition = Partition(0, torch.empty(parameter_bytes(routes, settings)[1], device=device), True)
    return StepSet((partition,), tuple(layouts), (), None, rank, ranks, torch.bfloat16)


def bound_of(
    model: str, ranks: int, rank: int, launches: Launches, variant: str, stage: int = 3, **params: Any
) -> BoundSteps:
    """Return the step sets of one rank, on the meta device and in bf16; messages and passes only count."""
    config = MuonConfig.from_params({"ns_backend": "torch", "ns_dtype": "bf16", "variant": variant} | params)
    step_set = step_set_of(routes_of(model, config), ranks, rank, stage, config)
    iterate = launches.during("iteration", orthogonalize)

    def count_call(*args: Any, **kwargs: Any) -> Tensor:
        launches.calls += 1
        result: Tensor = iterate(*args, **kwargs)
        return result

    counts, recorder, buffers = SentCounts(), StepRecorder(every=100, check=True), ExchangeBuffers(META)
    context = StepContext(
        0, step_set, config, META, count_call, counts, recorder, buffers, StatePolicy(), True
    )
    bound = BoundSteps([context])

    def count_pass(*args: Any) -> None:
        table = args[-2]
        launches.counts["passes"] += -(-len(table) // FRAGMENTS)
        # Both read and write fp32; pack reads the gradient and writes a direction, apply reads an update, in bf16.
        launches.moved["passes"] += (14 if len(args) == 5 else 10) * int(table[:, Column.NUMEL].sum())

    bound.runners[0]._passes = FlatPasses("counted", count_pass, count_pass, count_pass)
    return bound


def counted(model: str, ranks: int, variant: str = "muon", **params: Any) -> tuple[StepRunner, Launches]:
    """Return the runner of the rank that owns most matrices, and what its third step launches."""
    launches = Launches()
    owners = Counter(bound_of(model, ranks, 0, launches, variant, **params).runners[0].plan.owners)
    bound = bound_of(model, ranks, owners.most_common(1)[0][0], launches, variant, **params)
    group = {**MuonConfig(variant=variant).group_defaults("muon"), "lr": 0.02}
    (runner,) = bound.runners
    partition = runner.step_set.partitions[0].tensor
    state: dict[Tensor, dict[str, Any]] = {partition: {}}
    grad = torch.empty_like(partition)

    def send(*_: Any) -> list[Any]:
        launches.counts["all-to-all"] += 1
        return []

    def reduce(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        launches.counts["all-reduce"] += 1
        return tensor

    settle = launches.during("check", ResultCheck.settle)
    with (
        mock.patch.object(ChunkExchange, "_messages", send),
        mock.patch("deepspeed_muon.step.gradient_flags.all_reduce_tensor", reduce),
        mock.patch.object(ResultCheck, "settle", lambda check, result: settle(check, result)),
        torch.no_grad(),
    ):
        # The first step makes the momentum, the second copies the positions of what was checked.
        for _ in range(3):
            launches.counts.clear()
            launches.moved.clear()
            launches.waits = launches.calls = 0
            with launches:
                exchange = launches.during("flags", bound.gradient_flags.exchange)
                exchange({0: [grad]})
                report = bound.gradient_flags[runner].report()
                runner.run(report.active, {0: grad}, {0: group}, state)
    return runner, launches


@pytest.mark.parametrize("name", VARIANTS)
def test_launches_of_a_step_do_not_grow_with_the_fragments(name: str) -> None:
    """Llama-7b on 64 ranks: a rank holds fragments of all 224 matrices, and owns four of them."""
    runner, launches = counted("llama-7b", 64, name)
    variant = VARIANTS[name]
    further = 32 * (variant.before_iteration is not None) + 56 * (variant.row_factors is not None)
    assert launches.waits == 1, "the host waits for the flags of the gradients alone"
    assert launches.counts.total() <= 167 + further
    if name == "muon":
        assert (len(runner.plan.matrices), max(Counter(runner.plan.owners).values())) == (224, 4)
        assert launches.counts["all-to-all"] == 2 * len(runner.plan.chunks)
        with_graphs = launches.counts.total() - launches.counts["iteration"] + 3 * launches.calls
        # Before there were tables, 448 of the passes alone, and copies.
        assert launches.counts["passes"] <= 12 and with_graphs <= 79


def test_updates_are_rounded_where_they_are_written() -> None:
    """The iteration runs in fp16 on a GPU, and bf16 is sent: no pass only converts."""
    same, other = (counted("350M", 8, stage=1, ns_dtype=dtype)[1].counts for dtype in ("bf16", "fp16"))
    assert other["passes"] == same["passes"]
