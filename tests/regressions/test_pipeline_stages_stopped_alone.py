"""A pipeline stage stopped or skipped a step alone, and the other stages waited for it for ever, or took the step.

- In bf16 at ZeRO 1 with ``nonfinite_grad: error``: the error for a matrix without an update was raised on the ranks of
  its stage.
- With ``deepspeed.moe``: an expert's gradient that is not finite skipped the step on the ranks of its stage.
"""

from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from tests.support import training
from tests.support.models import VOCAB, Linear
from tests.support.pipelines import MICRO_BATCHES, Embed, loss, make_pipeline, run_step


def wrong_update(rank: int, world_size: int) -> str:
    """Give a matrix of the first stage directions that fp16 cannot represent; return the error."""
    pipeline, _ = make_pipeline("toy", 2)
    params = {"nonfinite_grad": "error", "wire_dtype": "fp16"}
    config = training.ds_config(1, accumulation=MICRO_BATCHES, precision="bf16", params=params)
    engine = training.initialize(pipeline, config)
    if engine.grid.get_pipe_parallel_rank() == 0:
        matrix = next(param for name, param in pipeline.named_parameters() if name.endswith("up.weight"))
        matrix.register_hook(lambda grad: grad * 1e10)

    def two_steps() -> None:
        for step in range(2):
            run_step(engine, step, world_size // 2)

    return training.refusal(two_steps)


def test_an_update_that_is_wrong_in_one_stage_is_an_error_in_all(ranks: Any) -> None:
    for error in ranks(2).run(wrong_update, timeout=60):
        assert error.startswith("NumericalError: the updates of "), error


class Experts(nn.Module):
    """A layer of a pipeline: DeepSpeed's mixture of experts, without the loss that balances it."""

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.moe = MoE(16, Linear(16, 16), num_experts=2, ep_size=2, k=1, drop_tokens=False, use_rts=False)

    def forward(self, x: Tensor) -> Tensor:
        routed: Tensor = self.moe(x)[0]
        return x + routed


def infinite_expert(rank: int, world_size: int) -> dict[str, Any]:
    """Give an expert of the first stage, on one of its two ranks, an infinite gradient; return what the step did."""
    torch.manual_seed(0)
    layers = [Embed(), Experts(), Linear(16, 16), Linear(16, VOCAB)]
    pipeline = deepspeed.PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")
    engine = training.initialize(
        pipeline,
        training.ds_config(0, accumulation=MICRO_BATCHES),
        model_parameters=list(pipeline.parameters()),
    )
    start = training.full_masters(engine)
    if rank == 0:
        expert = next(p for name, p in pipeline.named_parameters() if "experts" in name)
        expert.register_hook(lambda grad: grad * float("inf"))
    run_step(engine, 0, world_size // 2)
    end = training.full_masters(engine)
    moved = [name for name, value in end.items() if not torch.equal(value, start[name])]
    return {"moved": moved, "skipped": engine.skipped_steps}


def test_an_expert_that_overflows_skips_the_step_of_all_stages(ranks: Any) -> None:
    for result in ranks(4).run(infinite_expert, timeout=60):
        assert result == {"moved": [], "skipped": 1}
