"""A parameter without a gradient is left alone, however it came to have none, and the others get exactly theirs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.idle import (
    CPU,
    MANNERS,
    OFFLOAD,
    compare,
    lead,
)

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


FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
SETTINGS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "0-bf16": {"stage": 0, "precision": "bf16"},
    "0-fp16": {"stage": 0, "precision": "fp16"},
    "1": {"stage": 1},
    "1-overlap-round-robin": {"stage": 1, "zero": {"overlap_comm": True, "round_robin_gradients": True}},
    "1-offload": {"stage": 1, "zero": OFFLOAD},
    "1-bf16-optimizer": {"stage": 1, "precision": "bf16", "extra": FP32_SUMS},
    "1-bf16": {"stage": 1, "precision": "bf16", "extra": {"data_types": {"grad_accum_dtype": "bf16"}}},
    "1-fp16": {"stage": 1, "precision": "fp16"},
    "1-fp16-offload": {"stage": 1, "precision": "fp16", "zero": OFFLOAD},
    "2": {"stage": 2},
    "2-overlap": {"stage": 2, "zero": {"overlap_comm": True, "reduce_bucket_size": 300}},
    "2-not-contiguous": {"stage": 2, "zero": {"contiguous_gradients": False}},
    "2-all-reduce": {"stage": 2, "zero": {"reduce_scatter": False}},
    "2-offload": {"stage": 2, "zero": OFFLOAD},
    "2-offload-overlap-pinned": {
        "stage": 2,
        "zero": {"offload_optimizer": {**CPU, "pin_memory": True}, "overlap_comm": True},
    },
    "2-bf16-fp32-sums": {"stage": 2, "precision": "bf16", "extra": FP32_SUMS},
    "2-bf16-fp32-sums-offload": {"stage": 2, "precision": "bf16", "zero": OFFLOAD, "extra": FP32_SUMS},
    "2-bf16-masters-offload": {
        "stage": 2,
        "precision": "bf16",
        "zero": OFFLOAD,
        "extra": {"bf16": {"bf16_master_weights_and_grads": True}},
    },
    "2-fp16": {"stage": 2, "precision": "fp16"},
    "2-fp16-offload": {"stage": 2, "precision": "fp16", "zero": OFFLOAD},
    "3": {"stage": 3},
    "3-sub-groups": {"stage": 3, "zero": {"sub_group_size": 100}},
    "3-overlap": {"stage": 3, "zero": {"overlap_comm": True, "reduce_bucket_size": 300}},
    "3-not-contiguous": {"stage": 3, "zero": {"contiguous_gradients": False}},
    "3-all-reduce": {"stage": 3, "zero": {"reduce_scatter": False}},
    "3-persistent": {"stage": 3, "zero": {"stage3_param_persistence_threshold": 500}},
    "3-zero-init": {"stage": 3, "zero_init": True},
    "3-hpz": {"stage": 3, "zero": {"zero_hpz_partition_size": 2}},
    "3-offload": {"stage": 3, "zero": OFFLOAD},
    "3-offload-param": {"stage": 3, "zero": {"offload_param": CPU}},
    "3-offload-both-pinned": {
        "stage": 3,
        "zero_init": True,
        "zero": {
            "offload_optimizer": {**CPU, "pin_memory": True},
            "offload_param": {**CPU, "pin_memory": True},
            "sub_group_size": 150,
        },
    },
    "3-twin-flow": {"stage": 3, "zero": {"sub_group_size": 150, "offload_optimizer": {**CPU, "ratio": 0.5}}},
    "3-bf16": {"stage": 3, "precision": "bf16"},
    "3-bf16-offload": {"stage": 3, "precision": "bf16", "zero": OFFLOAD},
    "3-fp16": {"stage": 3, "precision": "fp16"},
    "3-fp16-offload": {"stage": 3, "precision": "fp16", "zero": {**OFFLOAD, "sub_group_size": 150}},
}


CASES = [(setting, schedule) for setting in SETTINGS for schedule in SCHEDULES]
# Each place where DeepSpeed keeps gradients, with the schedule that is hardest for it.
CORE = {
    ("0", "micro"),
    ("1", "micro"),
    ("1-overlap-round-robin", "micro"),
    ("1-offload", "micro"),
    ("1-bf16-optimizer", "life"),
    ("2", "micro3"),
    ("2-offload", "micro"),
    ("2-bf16-fp32-sums-offload", "overflow"),
    ("3", "micro"),
    ("3-sub-groups", "life"),
    ("3-fp16", "overflow"),
    ("3-offload-both-pinned", "micro3"),
    ("3-fp16-offload", "overflow"),
}
OLD_DEEPSPEED_TOO: set[tuple[str, ...]] = CORE - {
    ("1-bf16-optimizer", "life"),
    ("2-bf16-fp32-sums-offload", "overflow"),
}


def marked(case: tuple[str, ...], core: set[Any]) -> Any:
    marks = [] if case in core else [pytest.mark.full]
    return pytest.param(*case, marks=[pytest.mark.compat, *marks] if case in OLD_DEEPSPEED_TOO else marks)


@pytest.mark.parametrize(("setting", "schedule"), [marked(case, CORE) for case in CASES])
def test_idle_parameters(ranks: Any, setting: str, schedule: str) -> None:
    settings = SETTINGS[setting]
    results = ranks(2).run(lead, schedule=SCHEDULES[schedule], **settings)
    compare(results, SCHEDULES[schedule], precision=settings.get("precision", "fp32"))


@pytest.mark.parametrize(
    ("setting", "manner"),
    [
        marked(
            (setting, manner),
            {("3", "checkpointed"), ("3-offload", "unmanaged"), ("2-offload", "by hand")},
        )
        for setting in ("1-offload", "2", "2-offload", "3", "3-offload")
        for manner in MANNERS
    ],
)
def test_whatever_the_loop(ranks: Any, setting: str, manner: str) -> None:
    results = ranks(2).run(lead, schedule=SCHEDULES["micro"], manner=manner, **SETTINGS[setting])
    compare(results, SCHEDULES["micro"])


LEAF_SETTINGS = [setting for setting in SETTINGS if setting[0] != "0"]
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


@pytest.mark.parametrize(("setting", "touch", "manner"), [marked(case, APART_CORE) for case in APART_CASES])
def test_ranks_that_use_different_branches(ranks: Any, setting: str, touch: str, manner: str) -> None:
    """The remedies of ``docs/configurations.md``; without one the ranks of DeepSpeed's own reduction part."""
    settings = SETTINGS[setting]
    results = ranks(2).run(lead, schedule=APART, touch=touch, manner=manner, **settings)
    compare(results, APART, precision=settings.get("precision", "fp32"))
