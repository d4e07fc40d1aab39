"""``scripts/upstream.patch``, applied to the installed DeepSpeed: right at every stage, with all hooks switched off."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest

from tests.support import training
from tests.support.contract import compare, compare_matrices, reference
from tests.support.harness import RankPool
from tests.support.native_ops import REPOSITORY
from tests.support.rounding import HALF_MODEL
from tests.support.thinning import full, usual
from tests.support.upstream import deleted_lines, train_on_patched

PATCH = REPOSITORY / "scripts" / "upstream.patch"
CPU = {"offload_optimizer": {"device": "cpu"}}
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the installed DeepSpeed, patched unless it is already."""
    folder = tmp_path_factory.mktemp("patched")
    installed = Path(deepspeed.__file__).parent
    shutil.copytree(installed, folder / "deepspeed", ignore=shutil.ignore_patterns("__pycache__"))
    if not (folder / "deepspeed" / "runtime" / "inner_step.py").exists():
        subprocess.run(["git", "apply", PATCH], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def run(patched: Path) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """A function that trains on some ranks, which import the patched DeepSpeed."""
    path = [str(patched), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    pools: dict[int, RankPool] = {}

    def call(world: int, function: Any = train_on_patched, **settings: Any) -> list[dict[str, Any]]:
        if world not in pools:
            pools[world] = RankPool(world, env={"PYTHONPATH": os.pathsep.join(path)})
        if function is train_on_patched:
            settings["folder"] = str(patched)
        return pools[world].run(function, **settings)

    yield call
    for pool in pools.values():
        pool.close()


EXACT = list(itertools.product((0, 1, 2, 3), (1, 2, 3, 4), (1, 4), (0.0, 0.5)))
# One of each class of ZeRO; without ZeRO the half-precision wrapper below.
CORE = {(1, 2, 4, 0.5), (3, 2, 4, 0.5)}


@pytest.mark.parametrize(("stage", "world", "accumulation", "clipping"), usual(EXACT, CORE))
def test_matches_the_reference_in_fp32(
    run: Any, stage: int, world: int, accumulation: int, clipping: float
) -> None:
    results = run(world, stage=stage, accumulation=accumulation, clipping=clipping)
    if stage == 0:
        # Without ZeRO DeepSpeed does not keep the norm of fp32 gradients; engine/workarounds/norm.py does.
        _, _, norms, _ = reference("toy", accumulation * world, clipping)
        results = [{**result, "norms": norms} for result in results]
    compare(results, "toy", accumulation * world, clipping)


HALF = [
    ("bf16", 0, {}, "FP16_UnfusedOptimizer"),
    ("bf16", 1, {"extra": FP32_GRADIENTS}, "BF16_Optimizer"),
    *[(precision, stage, {}, "") for precision in ("bf16", "fp16") for stage in (1, 2, 3)],
    *[(precision, stage, {"zero": CPU}, "") for precision in ("bf16", "fp16") for stage in (1, 2, 3)],
]


@pytest.mark.parametrize(
    ("precision", "stage", "more", "wrapper", "world", "accumulation"),
    [
        pytest.param(*case, *size, marks=() if case[3] and size == (2, 1) else pytest.mark.full)
        for case in HALF
        for size in itertools.product((1, 2, 3), (1, 4))
    ],
)
def test_matches_the_reference_in_half_precision(
    run: Any, precision: str, stage: int, more: dict[str, Any], wrapper: str, world: int, accumulation: int
) -> None:
    results = run(
        world,
        stage=stage,
        accumulation=accumulation,
        clipping=0.5,
        precision=precision,
        exact=False,
        **more,
    )
    assert not wrapper or results[0]["wrapper"] == wrapper
    compare_matrices(results, "toy", world * accumulation, 0.5, HALF_MODEL[precision])


@pytest.mark.parametrize("stage", [0, *(full(stage) for stage in (1, 2)), 3])
def test_an_optimizer_without_the_interface_trains_as_before(run: Any, stage: int) -> None:
    """Here the package with its hooks, whose optimizer has no inner step."""
    compare(run(2, function=training.train, stage=stage, accumulation=4, clipping=0.5), "toy", 8, 0.5)


def test_the_patch_is_short_and_what_it_would_delete_is_there() -> None:
    assert len(PATCH.read_text().splitlines()) < 150
    assert deleted_lines()
