"""Workarounds for defects of DeepSpeed are on in the releases that have the defect, and off in those that do not."""

from __future__ import annotations

import pytest
from packaging.version import Version

from deepspeed_muon.engine import patching
from deepspeed_muon.engine.hooks import ENGINE_HOOKS
from deepspeed_muon.engine.patching import Workaround, fingerprints
from deepspeed_muon.engine.workarounds import LOOKED_AT, WORKAROUNDS
from tests.support.native_ops import REPOSITORY


def test_the_newest_release_was_checked() -> None:
    """A new tested release stops here until somebody knows which defects it still has.

    ``scripts/planted_defects.py --workarounds`` runs each test without its workaround.
    """
    assert fingerprints()["releases"][-1] == LOOKED_AT


@pytest.mark.parametrize("workaround", WORKAROUNDS.values(), ids=WORKAROUNDS)
def test_a_test_shows_the_defect(workaround: Workaround) -> None:
    path, _, function = workaround.test.partition("::")
    assert f"def {function.partition('[')[0]}(" in (REPOSITORY / path).read_text()


def test_all_are_on_until_a_release_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    still_needed, fixed = (Workaround(defect="", test="", fixed_in=release) for release in (None, "0.19.7"))
    for release, expected in {"0.19.6": (True, True), "0.19.7": (True, False)}.items():
        monkeypatch.setattr(patching, "INSTALLED", Version(release))
        assert (still_needed.is_needed, fixed.is_needed) == expected, release


def test_nothing_is_replaced_for_a_defect_that_the_installed_release_does_not_have() -> None:
    for workaround in WORKAROUNDS.values():
        assert all((hook in ENGINE_HOOKS) == workaround.is_needed for hook in workaround.hooks)
