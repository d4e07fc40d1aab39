"""What variants keep in every kind of checkpoint: exact at the same topology, and after moving to another."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from deepspeed_muon.checkpoint import consolidate, load_index, restore
from deepspeed_muon.tools.convert import consolidate_files, convert_to_universal
from deepspeed_muon.variants import VARIANTS
from tests.support import training
from tests.support.contract import STEPS, compare
from tests.support.models import MATRICES
from tests.support.thinning import each_value
from tests.support.training import full_rows

MICROS = 4
KEEPING = [name for name, variant in VARIANTS.items() if variant.state]
NORMUON = {"variant": "normuon"}


def make(stage: int, world_size: int, *, seed: int = 0, params: Any = None, **settings: Any) -> Any:
    config = training.ds_config(
        stage,
        accumulation=MICROS // world_size,
        clipping=0.5,
        params=NORMUON if params is None else params,
        **settings,
    )
    return training.make_engine(config, "mixed", seed=seed)


def outcome(engine: Any) -> dict[str, Any]:
    return {**training.outcome(engine), "rows": full_rows(engine), "cuts": training.cuts_of(engine)}


def train(
    rank: int,
    world_size: int,
    *,
    stage: int,
    steps: tuple[int, int],
    load: str = "",
    save: str = "",
    how: str = "deepspeed",
    more: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """Load, run steps, save, run ``more`` steps; report the state after loading, when it was saved and at the end."""
    if how == "universal":
        settings["extra"] = {"checkpoint": {"load_universal": bool(load)}}
    records = training.heard()
    engine = make(stage, world_size, seed=7 if load else 0, **settings)
    if load and how == "consolidated":
        restore(engine, load)
    elif load:
        path, _ = engine.load_checkpoint(load)
        assert path is not None
    loaded = outcome(engine) if load else {}
    norms: list[float] = []

    def run(*numbers: int) -> None:
        for step in range(*numbers):
            training.run_step(engine, step, rank, world_size, MICROS // world_size)
            norms.append(float(engine.get_global_grad_norm()))

    run(*steps)
    if save and how == "consolidated":
        consolidate(engine, save, shard_bytes=4000)
    elif save:
        engine.save_checkpoint(save, tag="tag")
    saved = outcome(engine)
    run(steps[1], steps[1] + more)
    report = {**(outcome(engine) if more else saved), "loaded": loaded, "norms": norms, "log": records}
    report["saved"] = saved if more else {}
    return report


def assert_equal(found: dict[str, Any], expected: dict[str, Any], *, momentum: str = "fp32") -> None:
    if momentum == "int8":
        training.assert_same_int8_momentum(found, expected, "momentum")
        found = {**found, "momentum": expected["momentum"]}
    training.assert_same_bits(found, expected, "params", "momentum", "rows")


SETTINGS: list[dict[str, Any]] = [
    {"stage": 2, "zero": training.OFFLOAD},
    {"stage": 3, "zero": {"sub_group_size": 200}},
    {"stage": 0},
    {"stage": 1, "precision": "bf16"},
]


@pytest.mark.parametrize(("variant", "settings"), each_value(product(KEEPING, SETTINGS)))
def test_resume_is_bit_identical(ranks: Any, tmp_path: Path, variant: str, settings: dict[str, Any]) -> None:
    pool, arguments = ranks(2), {"params": {"variant": variant}, **settings}
    whole = pool.run(train, steps=(0, 2), save=str(tmp_path), more=2, **arguments)
    rest = pool.run(train, steps=(2, 4), load=str(tmp_path), **arguments)
    for mine, all_of_it in zip(rest, whole, strict=True):
        assert_equal(mine["loaded"], all_of_it["saved"])
        assert_equal(mine, all_of_it)


# Stage and number of ranks before and after.
MOVES = [(3, 4, 1, 2), (0, 2, 3, 4), (2, 2, 0, 1)]


@pytest.mark.parametrize(("variant", "move"), each_value(product(KEEPING, MOVES)))
def test_consolidated_sets_move_to_another_topology(
    ranks: Any, tmp_path: Path, variant: str, move: tuple[int, int, int, int]
) -> None:
    from_stage, from_world, to_stage, to_world = move
    arguments = {"how": "consolidated", "params": {"variant": variant}}
    saved = ranks(from_world).run(train, stage=from_stage, steps=(0, 2), save=str(tmp_path), **arguments)
    record = load_index(tmp_path).parameters["experts.up_proj"]
    assert record.rows == 30 and record.row_keys == (VARIANTS[variant].state.key,)
    results = ranks(to_world).run(train, stage=to_stage, steps=(2, STEPS), load=str(tmp_path), **arguments)
    assert_equal(results[0]["loaded"], saved[0])
    for result, before in zip(results, [saved[0]] * to_world, strict=True):
        result["norms"] = before["norms"] + result["norms"]
    compare(results, "mixed", MICROS, 0.5, variant=variant)


@pytest.mark.parametrize(
    ("variant", "momentum"), [*((name, "fp32") for name in KEEPING), ("normuon", "int8")]
)
def test_deepspeeds_files_without_an_engine(ranks: Any, tmp_path: Path, variant: str, momentum: str) -> None:
    """Offline consolidation and universal checkpoints."""
    params = {"variant": variant, "momentum_dtype": momentum}
    saved = ranks(4).run(train, stage=3, steps=(0, 2), save=str(tmp_path / "saved"), params=params)[0]
    consolidate_files(tmp_path / "saved", tmp_path / "set")
    arguments = {"stage": 2, "steps": (2, 2), "params": params}
    loaded = ranks(2).run(train, load=str(tmp_path / "set"), how="consolidated", **arguments)[0]["loaded"]
    assert_equal(loaded, saved, momentum=momentum)
    convert_to_universal(tmp_path / "saved" / "tag", tmp_path / "universal" / "step2")
    loaded = ranks(2).run(train, load=str(tmp_path / "universal"), how="universal", **arguments)[0]["loaded"]
    assert_equal(loaded, saved, momentum=momentum)


def test_sets_of_the_other_variant(ranks: Any, tmp_path: Path) -> None:
    """Without row moments NorMuon starts them from zero, and says so; with them Muon drops them, and says so."""
    muon = {"variant": "muon"}
    ranks(2).run(train, stage=1, steps=(0, 2), save=str(tmp_path / "m"), how="consolidated", params=muon)
    result = ranks(2).run(train, stage=3, steps=(2, 2), load=str(tmp_path / "m"), how="consolidated")[0]
    assert result["loaded"]["rows"].keys() == MATRICES["mixed"]
    assert not any(rows.any() for rows in result["loaded"]["rows"].values())
    assert any("start anew" in line for line in result["log"])
    ranks(2).run(train, stage=1, steps=(0, 2), save=str(tmp_path / "n"), how="consolidated")
    result = ranks(2).run(
        train, stage=3, steps=(2, 3), load=str(tmp_path / "n"), how="consolidated", params=muon
    )[0]
    assert not result["rows"] and any("are dropped" in line for line in result["log"])
