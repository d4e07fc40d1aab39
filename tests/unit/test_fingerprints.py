"""Functions of DeepSpeed that are those of no tested release: the table, and the warning at an engine's start."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import deepspeed
import pytest

from deepspeed_muon.engine import hooks, patching
from deepspeed_muon.engine.hooks import ENGINE_HOOKS, HOOKS
from tests.support import training
from tests.support.harness import run_ranks
from tests.support.native_ops import REPOSITORY


@pytest.mark.compat
def test_the_table_has_every_function_of_the_installed_release() -> None:
    watched = hooks.watched_functions()
    assert patching.unknown(watched) == []
    table = patching.fingerprints()
    release = table["releases"].index(deepspeed.__version__.partition("+")[0])
    for owner, name in watched:
        row = table["functions"][patching.name_of(owner, name)]
        digests = [digest for first, digest in row.items() if table["releases"].index(first) <= release]
        assert patching.digest_of(owner, name) in digests, name
    names = {patching.name_of(*function) for function in watched}
    for hook in (*HOOKS, *ENGINE_HOOKS):
        owners = [hook.owner] if hook in HOOKS else hook.classes()
        assert {f"{owner.__name__}.{hook.attribute}" for owner in owners} <= names


def test_the_releases_of_the_table_were_tested() -> None:
    results = json.loads((REPOSITORY / "benchmarks" / "results" / "versions.json").read_text())
    trained = {
        key.split("DeepSpeed ")[1].split(",")[0]
        for key, result in results.items()
        if result["as expected"] and result["outcome"] != "refused"
    }
    assert set(patching.fingerprints()["releases"]) <= trained


def test_all_that_is_called_is_followed() -> None:
    """A name in the lists that no tested release has would be watched by nobody."""
    rows = patching.fingerprints()["functions"]
    for owner, names in hooks._RELIED_ON:
        for name in names:
            assert patching.name_of(owner, name) in rows


def start_two_engines(rank: int, world_size: int) -> list[str]:
    """Return what is logged about DeepSpeed's release."""
    messages = training.heard()
    for _ in range(2):
        training.make_engine(training.ds_config(1)).destroy()
    return [message for message in messages if "no tested release" in message]


def test_changed_functions_are_named_once(tmp_path: Path) -> None:
    """A release that kept names and parameters of the functions and changed what they do was taken without a word."""
    installed, copy = Path(deepspeed.__file__).parent, tmp_path / "deepspeed"
    shutil.copytree(installed, copy, copy_function=os.symlink)
    path = copy / "runtime" / "zero" / "stage_1_and_2.py"
    text = path.read_text()
    path.unlink()
    text = text.replace(
        "def zero_grad(self, set_to_none=True):", "def zero_grad(self, set_to_none=False):", 1
    )
    path.write_text(
        text.replace("    def reset_cpu_buffers(self):", "    def reset_cpu_buffers(self):\n        pass")
    )
    paths = os.pathsep.join((str(tmp_path), str(REPOSITORY)))
    ((message,),) = run_ranks(start_two_engines, 1, env={"PYTHONPATH": paths})
    names = message.split("): ")[1].split(". Training")[0]
    assert set(names.split(", ")) == {
        "DeepSpeedZeroOptimizer.zero_grad",
        "DeepSpeedZeroOptimizer.reset_cpu_buffers",
    }
    assert f"DeepSpeed {deepspeed.__version__} was not tested" in message
    assert all(release in message for release in json.loads(patching.FINGERPRINTS.read_text())["releases"])
