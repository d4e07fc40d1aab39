"""Workarounds for defects of DeepSpeed are on in the releases that have the defect, and off in those that do not."""

from __future__ import annotations

import pytest
from packaging.version import Version

from deepspeed_muon.engine import patching
from deepspeed_muon.engine.fingerprints import table
from deepspeed_muon.engine.hooks import ENGINE_HOOKS, OLDEST
from deepspeed_muon.engine.patching import Workaround
from deepspeed_muon.engine.workarounds import WORKAROUNDS
from tests.support.native_ops import REPOSITORY

RELEASES = table()["releases"]


@pytest.mark.parametrize("workaround", WORKAROUNDS.values(), ids=WORKAROUNDS)
def test_the_newest_release_was_looked_at(workaround: Workaround) -> None:
    """A new tested release stops here until somebody knows which defects it still has.

    ``scripts/planted_defects.py --workarounds`` runs each test without its workaround.
    """
    assert RELEASES.index(workaround.first) <= RELEASES.index(workaround.last)
    assert workaround.fixed != (workaround.last == RELEASES[-1])
    path, _, function = workaround.test.partition("::")
    assert f"def {function.partition('[')[0]}(" in (REPOSITORY / path).read_text()


def test_each_is_on_from_its_first_release_to_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"defect": "", "test": "", "first": "0.19.4", "last": "0.19.6"}
    still_needed, fixed = Workaround(**common), Workaround(**common, fixed=True)
    for release, expected in {
        "0.19.3": (False, False),
        "0.19.6": (True, True),
        "0.19.7": (True, False),
    }.items():
        monkeypatch.setattr(patching, "INSTALLED", Version(release))
        assert (still_needed.is_needed, fixed.is_needed) == expected, release


def test_nothing_is_replaced_for_a_defect_that_the_installed_release_does_not_have() -> None:
    for workaround in WORKAROUNDS.values():
        assert Version(workaround.first) >= Version(OLDEST)
        assert all((hook in ENGINE_HOOKS) == workaround.is_needed for hook in workaround.hooks)
