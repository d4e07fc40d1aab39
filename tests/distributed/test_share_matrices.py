"""Ranks that share a matrix come to the result that one owner comes to, at every stage."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import deepspeed_muon
from deepspeed_muon.config import MuonConfig
from deepspeed_muon.engine import found_settings
from deepspeed_muon.ops.gate import Verdict
from deepspeed_muon.step import placements
from deepspeed_muon.transport.members import everyone
from tests.support import training
from tests.support.contract import compare
from tests.support.counting import count_a_step
from tests.support.models import MATRICES
from tests.support.thinning import each_value
from tests.support.training import try_to_start

CASES = [
    # stage, ranks, model, most ranks that share, how many matrices they share
    (0, 4, "wide", 2, 2),
    (1, 2, "single", 2, 1),
    (1, 4, "wide", 2, 2),
    (2, 3, "single", 3, 1),
    (2, 4, "wide", 4, 2),
    (3, 2, "single", 2, 1),
    (3, 4, "wide", 2, 2),
    (3, 4, "single", 4, 1),
]


def shared_names(optimizer: deepspeed_muon.Muon) -> list[str]:
    """Return the names of the shared matrices."""
    return sorted({m.name for runner in optimizer.runners for m in runner.plan.matrices if m.sharers})


def train_shared(rank: int, world_size: int, *, names: bool = False, **settings: Any) -> Any:
    """Train as the other tests do, or say which matrices would be shared."""
    if not names:
        return training.train(rank, world_size, **settings)
    config = training.ds_config(settings["stage"], params=settings["params"])
    engine = training.make_engine(config, settings["kind"])
    found = shared_names(deepspeed_muon.muon_optimizer(engine))
    engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "world", "kind", "most", "count"), each_value(CASES))
def test_matches_the_reference(ranks: Any, stage: int, world: int, kind: str, most: int, count: int) -> None:
    """Square, tall and wide matrices (the short side of a wide one is cut anew), with chunks of one matrix."""
    params = {"share_matrices": most, "exchange_chunk_numel": 1000}
    settings = {"stage": stage, "kind": kind, "params": params}
    found = ranks(world).run(train_shared, names=True, **settings)
    assert all(names == found[0] for names in found) and len(found[0]) == count
    results = ranks(world).run(train_shared, accumulation=2, clipping=0.5, **settings)
    compare(results, kind, 2 * world, 0.5)
    assert sum(result["orthogonalized"] for result in results) == len(MATRICES[kind])
    for result in results:
        assert result["bytes_sent"] == result["planned_bytes"]


def test_half_precision_and_offload(ranks: Any) -> None:
    """What the shared iteration rounds differently from one rank's is of the size of the format's rounding."""
    settings = {
        "stage": 3,
        "kind": "wide",
        "precision": "bf16",
        "zero": {"offload_optimizer": {"device": "cpu"}, "sub_group_size": 3000},
        "exact": False,
    }
    one, several = (
        ranks(4).run(training.train, params={"share_matrices": most, "ns_dtype": "bf16"}, **settings)[0]
        for most in (False, 4)
    )
    for name in MATRICES["wide"]:
        a, b = one["params"][name], several["params"][name]
        # Five steps of 0.02; the polynomial of a singular value differs by up to 0.3 in bf16.
        assert float((a - b).norm() / (5 * 0.02 * min(a.shape) ** 0.5)) <= 0.3, name


@pytest.mark.parametrize(
    ("stage", "method"),
    [
        (0, "gram"),
        (1, "standard"),
        (3, "gram"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in [(2, "gram"), (3, "standard")]),
    ],
)
def test_predictions_are_what_runs(ranks: Any, stage: int, method: str) -> None:
    params = {"share_matrices": 2, "health": False}
    shape = {"width": 24, "hidden": (72,), "thin": False}
    for result in ranks(4).run(count_a_step, stage=stage, method=method, params=params, shape=shape):
        assert tuple(result["shared"]) == (2, 2)
        for key in ("flops", "exchange"):
            really, predicted = result[key]
            assert really == predicted, (key, result)


def broken(rank: int, world_size: int, *, failures: int) -> dict[str, Any]:
    """Train one step in which so many shared iterations on rank 1 return NaN."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deepspeed_muon").addHandler(handler)
    left = [failures]
    original = placements.orthogonalize_sharded

    def garbage(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = original(*args, **kwargs)
        left[0] -= 1
        return result * float("nan") if rank == 1 and left[0] >= 0 else result

    placements.orthogonalize_sharded = garbage
    engine = training.make_engine(
        training.ds_config(3, params={"share_matrices": 2, "weight_decay": 0.0}), "single"
    )
    before = training.full_masters(engine)
    try:
        training.run_step(engine, 0, rank, world_size, 1)
    finally:
        placements.orthogonalize_sharded = original
        logging.getLogger("deepspeed_muon").removeHandler(handler)
    after = training.full_masters(engine)
    report = deepspeed_muon.health(engine)
    engine.destroy()
    return {
        "messages": [message for message in messages if "mix.weight (6 x 6)" in message],
        "counts": (report["redone"], report["failed"]),
        "changed": not torch.equal(before["mix.weight"], after["mix.weight"]),
    }


@pytest.mark.parametrize(("failures", "counts", "changed"), [(1, (1, 0), True), (2, (0, 1), False)])
def test_a_wrong_slab_is_redone_by_all(
    ranks: Any, failures: int, counts: tuple[int, int], changed: bool
) -> None:
    """One rank's rows are wrong: all that share the matrix redo it, one of them counts it and says so."""
    results = ranks(2).run(broken, failures=failures)
    # Counts are summed over ranks where a sample is taken; here each rank reports its own.
    assert tuple(map(sum, zip(*(result["counts"] for result in results), strict=True))) == counts
    assert [len(result["messages"]) for result in results] == [1, 0]
    assert all(result["changed"] == changed for result in results)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"share_matrices": 2, "variant": "normuon"}, ["share_matrices", "normuon"]),
        ({"share_matrices": 1}, ["share_matrices"]),
        ({"share_matrices": "yes"}, ["share_matrices"]),
    ],
)
def test_refused(ranks: Any, params: dict[str, Any], said: list[str]) -> None:
    for report in ranks(2).run(try_to_start, stage=1, on_last_rank={}, common={"params": params}):
        assert report["type"] in ("ConfigError", "UnsupportedConfigError"), report
        for words in said:
            assert words in report["message"]


def found_with(rank: int, world_size: int, *, wrong: list[int]) -> tuple[dict[str, Any], int]:
    """Let the ranks find their settings for a GPU, where the self-test failed on some; say what was logged."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deepspeed_muon").addHandler(handler)
    original = found_settings.trusted
    found_settings.trusted = lambda _: Verdict(rank not in wrong, "it hangs" * (rank in wrong))
    try:
        config = MuonConfig.from_params({"ns_backend": "torch"})
        found = found_settings.found_settings(config, device=torch.device("cuda"), members=everyone())
    finally:
        found_settings.trusted = original
        logging.getLogger("deepspeed_muon").removeHandler(handler)
    return found, sum("share no matrices" in message for message in messages)


def test_nobody_shares_where_the_self_test_failed_on_one_rank(ranks: Any) -> None:
    found = ranks(2).run(found_with, wrong=[1])
    assert [settings.get("share_matrices") for settings, _ in found] == [False, False]
    assert [said for _, said in found] == [1, 0]
    found = ranks(2).run(found_with, wrong=[])
    assert not any("share_matrices" in settings or said for settings, said in found)
