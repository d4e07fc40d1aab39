"""The table of hooks into DeepSpeed: ``register`` and ``unregister`` do and undo every row of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from deepspeed.utils import groups
from deepspeed.utils.nvtx import instrument_w_nvtx

import deepspeed_muon
from deepspeed_muon.engine.hooks import HOOKS
from deepspeed_muon.engine.patching import Hook


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    yield
    deepspeed_muon.register()


def in_place() -> dict[Hook, Any]:
    return {hook: getattr(hook.owner, hook.attribute) for hook in HOOKS}


def test_every_row_is_undone() -> None:
    ours = in_place()
    assert deepspeed_muon.Muon in ZERO_SUPPORTED_OPTIMIZERS
    deepspeed_muon.unregister()
    assert in_place() == {hook: function.__wrapped__ for hook, function in ours.items()}
    assert deepspeed_muon.Muon not in ZERO_SUPPORTED_OPTIMIZERS and not deepspeed_muon.is_registered()


@pytest.mark.parametrize("hook", HOOKS, ids=str)
def test_a_row_that_another_library_replaced_stops_unregister(
    monkeypatch: pytest.MonkeyPatch, hook: Hook
) -> None:
    """One that copied our function's attributes was cut off without a word."""
    ours = in_place()
    other = functools.wraps(ours[hook])(lambda *args, **kwargs: None)
    with monkeypatch.context() as patch:
        patch.setattr(hook.owner, hook.attribute, other)
        with pytest.raises(deepspeed_muon.InstallationError, match=f"{hook} was hooked again"):
            deepspeed_muon.unregister()
        assert in_place() == {**ours, hook: other}


def test_releases_that_train_wrong_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed_muon.unregister()
    monkeypatch.setattr("deepspeed.__version__", "0.18.9")
    with pytest.raises(
        deepspeed_muon.InstallationError, match=r"0\.18\.9 is not supported.*deepspeed>=0\.19\.2"
    ):
        deepspeed_muon.register()


def step(self: Any, lr_kwargs: Any, closure: Any, *, later: bool = True) -> None: ...


def partition_grads(self: Any, partitions: Any, params: Any) -> None: ...


def test_a_deepspeed_with_other_functions_is_refused_before_anything_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A renamed one, others with other parameters, one of them behind DeepSpeed's decorator: one error has all."""
    deepspeed_muon.unregister()
    monkeypatch.delattr(DeepSpeedEngine, "_configure_expert_parallel")
    monkeypatch.delattr(groups, "_get_expert_parallel_group")
    monkeypatch.setattr(
        DeepSpeedZeroOptimizer, "copy_grads_in_partition", lambda self, group=None, param=None: None
    )
    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, "partition_grads", instrument_w_nvtx(partition_grads))
    monkeypatch.setattr(DeepSpeedEngine, "clip_fp32_gradients", lambda self, norm_type=2: None)
    # What is only handed on may be new.
    monkeypatch.setattr(DeepSpeedEngine, "_take_model_step", step)
    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, "step", instrument_w_nvtx(step))
    before = vars(DeepSpeedEngine)["_configure_optimizer"]
    with pytest.raises(deepspeed_muon.InstallationError) as raised:
        deepspeed_muon.register()
    *_, found = str(raised.value).split("train wrong: ")
    found, remedy = found.split(". Tested are")
    assert set(found.split("; ")) == {
        "DeepSpeedEngine has no _configure_expert_parallel",
        "deepspeed.utils.groups has no _get_expert_parallel_group",
        "DeepSpeedZeroOptimizer.copy_grads_in_partition takes (group, param), not (param, ...)",
        "DeepSpeedZeroOptimizer_Stage3.partition_grads takes (partitions, params), not (params_to_release, "
        "grad_partitions, ...)",
        "DeepSpeedEngine.clip_fp32_gradients takes (norm_type), not ()",
        "PipelineEngine.clip_fp32_gradients takes (norm_type), not ()",
    }
    assert "install one of them" in remedy
    assert vars(DeepSpeedEngine)["_configure_optimizer"] is before and not deepspeed_muon.is_registered()
    monkeypatch.undo()
