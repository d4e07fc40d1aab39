"""The table of hooks into DeepSpeed: ``register`` and ``unregister`` do and undo every row of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from deepspeed.utils import groups

import deepspeed_muon
from deepspeed_muon.engine.hooks import _INSTALLED, HOOKS
from deepspeed_muon.engine.patching import Hook


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    yield
    deepspeed_muon.register()


def installed() -> dict[Hook, Any]:
    return {hook: getattr(hook.owner, hook.attribute) for hook in HOOKS}


def test_every_row_is_undone() -> None:
    ours = installed()
    assert deepspeed_muon.Muon in ZERO_SUPPORTED_OPTIMIZERS
    deepspeed_muon.unregister()
    assert installed() == {hook: function.__wrapped__ for hook, function in ours.items()}
    assert deepspeed_muon.Muon not in ZERO_SUPPORTED_OPTIMIZERS and not _INSTALLED


@pytest.mark.parametrize("hook", HOOKS, ids=str)
def test_a_row_that_another_library_replaced_stops_unregister(
    monkeypatch: pytest.MonkeyPatch, hook: Hook
) -> None:
    """One that copied our function's attributes was cut off without a word."""
    ours = installed()
    replacement = functools.wraps(ours[hook])(lambda *args, **kwargs: None)
    with monkeypatch.context() as patch:
        patch.setattr(hook.owner, hook.attribute, replacement)
        with pytest.raises(deepspeed_muon.InstallationError, match=f"{hook} was hooked again"):
            deepspeed_muon.unregister()
        assert installed() == {**ours, hook: replacement}


def test_releases_that_train_wrong_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed_muon.unregister()
    monkeypatch.setattr("deepspeed.__version__", "0.18.9")
    with pytest.raises(
        deepspeed_muon.InstallationError, match=r"0\.18\.9 is not supported.*deepspeed>=0\.19\.2"
    ):
        deepspeed_muon.register()


def test_a_deepspeed_without_a_function_is_refused_before_anything_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One error names what is replaced and what is called."""
    deepspeed_muon.unregister()
    monkeypatch.delattr(DeepSpeedEngine, "_configure_expert_parallel")
    monkeypatch.delattr(groups, "_get_expert_parallel_group")
    before = vars(DeepSpeedEngine)["_configure_optimizer"]
    with pytest.raises(deepspeed_muon.InstallationError) as raised:
        deepspeed_muon.register()
    message = str(raised.value)
    missing = "DeepSpeedEngine._configure_expert_parallel, deepspeed.utils.groups._get_expert_parallel_group"
    assert f"has no {missing}. Tested are" in message and "install one of them" in message
    assert vars(DeepSpeedEngine)["_configure_optimizer"] is before and not _INSTALLED
    monkeypatch.undo()
