"""A parameter without a gradient is left alone, however it came to have none, and the others get exactly theirs."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

from deepspeed_muon.tools.convert import consolidate_files
from tests.support import training
from tests.support.checkpoints import tensors_of
from tests.support.engines import BF16_MASTERS, ENGINES
from tests.support.idle import MANNERS, compare, lead
from tests.support.models import batch, build
from tests.support.thinning import full, usual
from tests.support.training import OFFLOAD

# For each step the branches that each of its micro-batches uses; "!" marks a step with an infinite gradient.
SCHEDULES: dict[str, list[list[str]]] = {
    # Goes idle, sleeps, wakes, alternates, goes idle for good.
    "life": [["a"], [""], ["b"], ["a"], ["b"], ["ab"], [""]],
    # Used in the first micro-batch only, in the last only, in none; each after a step in which it was used elsewhere.
    "micro": [["a", "b"], ["", ""], ["b", "a"], ["", "b"], ["ab", "ab"], ["a", ""], ["", "a"]],
    "micro3": [["", "a", "b"], ["b", "", ""], ["", "", ""], ["a", "b", "a"], ["b", "", "a"]],
    # What overflowed is idle in the next step, and wakes later.
    "overflow": [["b", "a"], ["a!", ""], ["", "b"], ["!", "b"], ["", "a"]],
}

# The same on two ranks that use different branches, as a mixture of experts does.
APART = [["a|b", "|a"], ["|", "|"], ["b|", "a|b"], ["ab|a", "|"], ["|b", "b|"]]


def precision_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of :func:`compare` that follow from the settings of an engine."""
    masters = torch.bfloat16 if settings.get("extra") is BF16_MASTERS else torch.float32
    return {"precision": settings.get("precision", "fp32"), "masters": masters}


CASES = [(setting, schedule) for setting in ENGINES for schedule in SCHEDULES]
# Each place where DeepSpeed keeps gradients, with the schedule that is hardest for it.
CORE = {
    ("0", "micro"),
    ("1-overlap-round-robin", "micro"),
    ("1-offload", "micro"),
    ("1-bf16-fp32-sums", "life"),
    ("2", "micro3"),
    ("2-offload", "micro"),
    ("2-bf16-fp32-sums-offload", "overflow"),
    ("3", "micro"),
    ("3-sub-groups", "life"),
    ("3-offload-both-pinned", "micro3"),
    ("3-fp16-offload", "overflow"),
}
OLD_DEEPSPEED_TOO: set[tuple[str, ...]] = CORE - {
    ("1-bf16-fp32-sums", "life"),
    ("2-bf16-fp32-sums-offload", "overflow"),
}


@pytest.mark.parametrize(("setting", "schedule"), usual(CASES, CORE, compat=OLD_DEEPSPEED_TOO))
def test_idle_parameters(ranks: Any, setting: str, schedule: str) -> None:
    settings = ENGINES[setting]
    results = ranks(2).run(lead, schedule=SCHEDULES[schedule], **settings)
    compare(results, SCHEDULES[schedule], **precision_of(settings))


@pytest.mark.parametrize(
    ("setting", "manner"),
    usual(
        product(("1-offload", "2", "2-offload", "3", "3-offload"), MANNERS),
        {("3", "checkpointed"), ("3-offload", "unmanaged"), ("2-offload", "by hand")},
        compat=OLD_DEEPSPEED_TOO,
    ),
)
def test_whatever_the_loop(ranks: Any, setting: str, manner: str) -> None:
    results = ranks(2).run(lead, schedule=SCHEDULES["micro"], manner=manner, **ENGINES[setting])
    compare(results, SCHEDULES["micro"])


def stepped(rank: int, world_size: int, *, by_engine: bool, stage: int, zero: dict[str, Any]) -> Any:
    """Train for three steps, each taken by the engine, or by the program, which calls the wrapper."""
    engine = training.initialize(build("toy"), training.ds_config(stage, clipping=0.5, zero=zero))
    for step in range(3):
        engine.backward(engine(*batch(step, rank)))
        (engine if by_engine else engine.optimizer).step()
    return training.full_masters(engine)


@pytest.mark.parametrize("setting", ["2-offload", *map(full, ("1-offload", "3-sub-groups", "3-offload"))])
def test_a_program_that_steps_the_wrapper(ranks: Any, setting: str) -> None:
    """Its gradients were added to those of the steps before."""
    by_engine, by_program = (
        ranks(2).run(stepped, by_engine=by_engine, **ENGINES[setting])[0] for by_engine in (True, False)
    )
    for name, master in by_engine.items():
        assert torch.equal(master, by_program[name]), name


LEAF_SETTINGS = [setting for setting in ENGINES if setting[0] != "0"]
APART_CASES = [
    ("0", "", ""),
    ("1", "times 0", ""),
    ("1-overlap-round-robin", "nothing", ""),
    ("2", "nothing", ""),
    ("2-offload", "times 0", ""),
    ("3", "nothing", ""),
    *((setting, "leaf", "") for setting in LEAF_SETTINGS),
    *((setting, "leaf", manner) for setting in ("1", "2", "2-offload", "3") for manner in MANNERS),
]
APART_CORE = {
    ("0", "", ""),
    ("1", "leaf", ""),
    ("2", "nothing", ""),
    ("2-offload", "leaf", "checkpointed"),
    ("2-overlap", "leaf", ""),
    ("3", "leaf", ""),
}
OLD_DEEPSPEED_TOO |= APART_CORE


@pytest.mark.parametrize(
    ("setting", "touch", "manner"), usual(APART_CASES, APART_CORE, compat=OLD_DEEPSPEED_TOO)
)
def test_ranks_that_use_different_branches(ranks: Any, setting: str, touch: str, manner: str) -> None:
    """The remedies of ``docs/configurations.md``; without one the ranks of DeepSpeed's own reduction part."""
    settings = ENGINES[setting]
    results = ranks(2).run(lead, schedule=APART, touch=touch, manner=manner, **settings)
    compare(results, APART, **precision_of(settings))


# A layer that a program stopped using kept moving on its last gradient, at ZeRO 3 and wherever ZeRO offloads.
#
# A layer used in step 0 alone moved by 0.0187 in steps 0, 1 and 2; the norm that clips counted its old gradient too,
# and ``safe_get_full_grad`` returned it.


def gradients_between(rank: int, world_size: int, *, zero: dict[str, Any]) -> dict[str, Any]:
    """Use a layer in step 0; in step 1 read its gradient, in step 2 write one by hand."""
    engine = training.make_engine(training.ds_config(3, zero=zero), "switched")
    weight = engine.module.branches.a.up.weight
    read, moved = [], []
    for step in range(3):
        engine.module.used = "a" if step == 0 else ""
        before = training.full_masters(engine)["branches.a.up.weight"]
        engine.backward(engine(*batch(step, rank)))
        read.append(safe_get_full_grad(weight))
        if step == 2:
            safe_set_full_grad(weight, torch.ones_like(read[-1]))
        engine.step()
        moved.append(not torch.equal(training.full_masters(engine)["branches.a.up.weight"], before))
    return {"read": [bool(grad.any()) for grad in read], "moved": moved}


@pytest.mark.parametrize("zero", [full({}), OFFLOAD], ids=["", "offload"])
def test_the_gradient_that_a_program_reads_is_zero(ranks: Any, zero: dict[str, Any]) -> None:
    """And a gradient that it writes for an idle parameter counts."""
    for result in ranks(2).run(gradients_between, zero=zero):
        assert result == {"read": [True, False, False], "moved": [True, False, True]}


# Under DeepSpeed's BF16_Optimizer, norm and clipping left out a parameter that only another rank used.
#
# Each rank counted the gradients of its own backward pass, though the reduced ones are the same on all: with
# clipping, ranks scaled the partitions of one matrix differently. Where the ranks use different branches of a leaf
# module, two masters were 0.22 and 0.19 from the float64 reference, within what bf16 was allowed, and are 0.05 and
# 0.03 away now.


def test_a_parameter_counts_that_one_rank_used(ranks: Any) -> None:
    """A leaf module's unused parameters have no gradient here, those times 0 have one; the sums are equal."""
    leaf, times_zero = (
        ranks(2).run(lead, schedule=APART, touch=touch, **ENGINES["1-bf16-fp32-sums"])
        for touch in ("leaf", "times 0")
    )
    assert leaf[0]["norms"] == leaf[1]["norms"] == times_zero[0]["norms"]
    masters = ({"masters": results[0]["paths"][-1]} for results in (leaf, times_zero))
    training.assert_same_bits(*masters)


# A sub-group of stage 3 whose parameters never had a gradient: the converter refused its momentum in 8 bits, and its
# first use warned of another variant.


def use_late(rank: int, world_size: int, *, folder: str) -> list[str]:
    """Save while a sub-group is idle, then use it; return what was logged."""
    params = {"variant": "normuon", "momentum_dtype": "int8"}
    config = training.ds_config(3, zero={"sub_group_size": 200}, params=params)
    engine = training.make_engine(config, "switched")
    said = training.heard()
    for step in range(3):
        engine.module.used = "ab" if step == 2 else ""
        engine.backward(engine(*batch(step, rank)))
        engine.step()
        if step == 1:
            engine.save_checkpoint(folder)
    return said


def test_an_idle_sub_group_is_saved_and_used(ranks: Any, tmp_path: Path) -> None:
    for said in ranks(2).run(use_late, folder=str(tmp_path / "files")):
        assert not said
    consolidate_files(tmp_path / "files", tmp_path / "set")
    tensors = tensors_of(tmp_path / "set")
    assert not tensors["momentum_buffer/branches.b.up.weight"].any()
    assert tensors["momentum_buffer/blocks.0.up.weight"].any()
