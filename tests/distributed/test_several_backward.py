"""Several backward passes before one step: their gradients are added up, at every stage, as in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed_muon
from tests.support import training
from tests.support.comparisons import relative, within
from tests.support.engines import ENGINES
from tests.support.models import Toy, batch
from tests.support.thinning import full, usual
from tests.support.training import FP32_SUMS

SETTINGS = [
    *("0", "0-bf16", "1", "1-bf16-fp32-sums", "1-overlap-round-robin", "2", "2-all-reduce"),
    *("2-not-contiguous", "2-offload", "2-bf16", "2-bf16-fp32-sums", "3", "3-offload"),
]
MANNERS = ["forward of each", "both forwards first", "one forward", "loss.backward"]
FORGET = "zero_grad between"
CORE = {(setting, "forward of each") for setting in SETTINGS if setting != "0-bf16"} | {
    ("1", "one forward"),
    ("1-bf16-fp32-sums", "one forward"),
    ("2", "both forwards first"),
    ("2-bf16-fp32-sums", "one forward"),
    ("2", "loss.backward"),
    ("2", FORGET),
    ("3", FORGET),
}


class TwoLosses(Toy):
    """Returns the loss for the tokens as they are, and for the targets in reverse."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        return super().forward(tokens, targets), super().forward(tokens, targets.flip(0))


def losses_of(model: nn.Module, manner: str, step: int, rank: int) -> list[Tensor]:
    """Return two losses of one step, of one forward pass or of two."""
    if manner == "one forward":
        return list(model(*batch(step, rank)))
    return [model(*batch(step, 2 * number + rank))[number] for number in range(2)]


def train(rank: int, world_size: int, *, setting: str, manner: str) -> dict[str, Any]:
    torch.manual_seed(0)
    norms = []
    exact = "bf16" not in setting
    engine = training.initialize(TwoLosses(exact=exact), training.ds_config(clipping=0.5, **ENGINES[setting]))
    for step in range(2):
        if manner == "loss.backward":
            for number in range(2):
                engine(*batch(step, 2 * number + rank))[number].backward()
        elif manner in ("both forwards first", "one forward"):
            losses = losses_of(engine, manner, step, rank)
            engine.backward(losses[0], retain_graph=True)
            engine.backward(losses[1])
        else:
            for number in range(2):
                engine.backward(engine(*batch(step, 2 * number + rank))[number])
                if manner == FORGET and number == 0:
                    engine.optimizer.zero_grad()
        engine.step()
        norms.append(training.norm_of(engine))
    return {"norms": norms, "params": training.full_masters(engine)}


def expected(manner: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Train in float64 in one process, with the mean of the ranks' gradients; return norms, weights, first weights."""
    torch.manual_seed(0)
    model = TwoLosses().double()
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = deepspeed_muon.Muon(model, **training.MUON_PARAMS)
    norms = []
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(2):
            losses = losses_of(model, manner, step, rank)
            (sum(losses if manner != FORGET else losses[1:]) / 2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return norms, {name: param.detach() for name, param in model.named_parameters()}, start


@pytest.mark.parametrize(
    ("setting", "manner"),
    usual([(setting, manner) for setting in SETTINGS for manner in (*MANNERS, FORGET)], CORE),
)
def test_gradients_are_added_up(ranks: Any, setting: str, manner: str) -> None:
    """ZeRO 1 and 2 used the gradients of the last backward pass only, and BF16_Optimizer counted the first twice."""
    if setting.startswith("0") and manner == "loss.backward":
        pytest.skip("DeepSpeed takes engine.backward only at stage 0")
    if setting.endswith("fp32-sums") and manner == FORGET:
        pytest.skip("DeepSpeed's buffer of fp32 sums keeps what zero_grad should forget")
    trained = ranks(2).run(train, setting=setting, manner=manner)[0]
    norms, params, start = expected(manner)
    if "bf16" in setting:
        # Rounded to 8 bits all along; without one of the losses the norm is lower by a third.
        assert trained["norms"] == pytest.approx(norms, rel=0.05)
        return
    assert trained["norms"] == pytest.approx(norms, rel=1e-5)
    for name, value in params.items():
        # fp32 gradients and updates against float64's, relative to the update of two steps.
        within(relative(trained["params"][name], value, start[name]), 1e-4, f"path of {name}")


class Tiled(Toy):
    """The output head's gradient is computed in the forward pass, by ALST's loss."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)

        def loss(head: Any, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(head(x).double(), y)

        arguments = (
            loss,
            self.lm_head,
            self.after_blocks(x),
            targets,
            None,
            2,
            [self.lm_head.weight],
            "mean",
        )
        return TiledFusedLogitsLoss.apply(*arguments)


def lost_gradients(rank: int, world_size: int, *, kind: str, immediate: bool) -> list[float]:
    """Take two steps with a loss that the forward pass differentiates, or with that of two forward passes."""
    torch.manual_seed(0)
    model = (Tiled if kind == "tiled" else Reentrant)(exact=False)
    extra = {**FP32_SUMS, "bf16": {"immediate_grad_update": immediate}}
    engine = training.initialize(model, training.ds_config(1, precision="bf16", extra=extra))
    norms = []
    for step in range(2):
        losses = [engine(*batch(step, rank + 2 * number)) for number in range(1 if kind == "tiled" else 2)]
        engine.backward(sum(losses))
        engine.step()
        norms.append(training.norm_of(engine))
    return norms


class Reentrant(Toy):
    def before_blocks(self, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[0], x, use_reentrant=True)


@pytest.mark.parametrize("kind", ["tiled", "two forward passes"])
def test_gradients_that_bf16_optimizer_cleared(ranks: Any, kind: str) -> None:
    """A forward pass cleared the head's gradient of ALST's loss, and a backward pass that of one of two losses."""
    late, expected = (ranks(2).run(lost_gradients, kind=kind, immediate=now)[0] for now in (False, True))
    assert late == pytest.approx(expected, rel=0.02)  # bf16


def norm_of_a_step(rank: int, world_size: int, *, fails: bool) -> float:
    """Take a step, perhaps after a backward pass that fails half-way; return its norm."""
    torch.manual_seed(0)
    model = Toy(exact=False)
    engine = training.initialize(model, training.ds_config(1, precision="bf16", extra=FP32_SUMS))

    def fail(*_: object) -> None:
        raise MemoryError

    hook = model.blocks[0].register_full_backward_hook(fail) if fails else None
    if hook is not None:
        with pytest.raises(MemoryError):
            engine.backward(engine(*batch(1, rank)))
        hook.remove()
    engine.backward(engine(*batch(0, rank)))
    engine.step()
    return training.norm_of(engine)


def test_a_backward_pass_that_fails_counts_for_nothing(ranks: Any) -> None:
    """The head's gradient of the batch that ran out of memory was added to that of the next one."""
    after_failure, alone = (ranks(2).run(norm_of_a_step, fails=fails) for fails in (True, False))
    assert after_failure == alone


def zero_grad_between(rank: int, world_size: int, *, stage: int) -> float:
    """Call ``zero_grad`` between two micro-steps, in two steps; return the norm of a step."""
    engine = training.initialize(TwoLosses(), training.ds_config(stage, accumulation=2, clipping=0.5))
    for micro in range(4):
        engine.backward(engine(*batch(0, rank))[micro % 2])
        engine.step()
        if micro % 2 == 0:
            engine.optimizer.zero_grad()
        if micro == 1:
            norm = training.norm_of(engine)
    return norm


@pytest.mark.parametrize("stage", [full(0), 1, 2, 3])
def test_zero_grad_between_micro_steps(ranks: Any, stage: int) -> None:
    """It discards the first micro-step, but for ZeRO 2."""
    torch.manual_seed(0)
    model = TwoLosses().double()
    for rank in range(2):
        losses = model(*batch(0, rank))
        ((losses[1] if stage != 2 else sum(losses)) / 4).backward()
    norm = float(nn.utils.get_total_norm([param.grad for param in model.parameters()]))
    for measured in ranks(2).run(zero_grad_between, stage=stage):
        assert measured == pytest.approx(norm, rel=1e-5)
