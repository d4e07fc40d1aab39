"""At ZeRO 0 with ``torch_autocast`` in fp16 an overflow of one rank lowered the loss scale of that rank alone.

All ranks skipped the step, but a rank without the expert that overflowed kept its ``GradScaler``'s scale. From then on
gradients that were multiplied by different scales were averaged, and each rank divided the mean by its own.
"""

from typing import Any

import deepspeed_muon
from tests.distributed.test_moe import make_engine
from tests.distributed.test_precision import autocast
from tests.support import training


def overflowing(rank: int, world_size: int) -> list[float]:
    """Take three steps, where an expert of rank 0 overflows in the second; return the scale after each of them."""
    engine = make_engine(2, rank, stage=0, extra=autocast("float16"))
    scales = []
    for step in range(3):
        if rank == 0 and step == 1:
            expert = next(
                p for name, p in engine.module.named_parameters() if "experts" in name and p.ndim > 1
            )
            hook = expert.register_hook(lambda grad: grad * float("inf"))
        training.run_step(engine, step, rank, world_size, 1)
        if rank == 0 and step == 1:
            hook.remove()
        scales.append(engine.torch_autocast_z0_gradscaler.get_scale())
    assert deepspeed_muon.muon_optimizer(engine).skipped_steps == engine.skipped_steps == 1
    return scales


def test_all_ranks_lower_the_scale(ranks: Any) -> None:
    for scales in ranks(2).run(overflowing):
        assert scales == [2.0**16, 2.0**15, 2.0**15]
