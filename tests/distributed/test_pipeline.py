"""DeepSpeed's pipeline engine: a rank holds one stage of the model, and data-parallel ranks share its matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn

import deepspeed_muon
from deepspeed_muon.checkpoint import consolidate, restore
from tests.support import training
from tests.support.contract import compare
from tests.support.models import MATRICES, VOCAB
from tests.support.pipelines import MICRO_BATCHES, Embed, loss, make_pipeline, run_step, train
from tests.support.thinning import full


def merged(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the stages' shares of the model together, and check that copies of a parameter are the same bits."""
    total: dict[str, Any] = {"params": {}, "momentum": {}, "routes": {}}
    for result in results:
        for key, values in total.items():
            for name, value in result[key].items():
                if name in values and isinstance(value, Tensor):
                    assert torch.equal(values[name], value), name
                values[name] = value
    return [{**result, **total} for result in results]


@pytest.mark.parametrize(
    ("kind", "stages", "world", "zero"),
    [
        *(("toy", 2, 4, 0), ("tied", 2, 4, 1), ("toy", 3, 3, 1)),
        *(full("toy", 2, world, 1) for world in (2, 4)),
        *(full("toy", 3, *case) for case in ((3, 0), (6, 1))),
        full("tied", 2, 2, 0),
    ],
)
def test_pipeline_matches_the_reference(ranks: Any, kind: str, stages: int, world: int, zero: int) -> None:
    """One or two data-parallel ranks; the layers' names are numbers, so routing looks at the layers."""
    results = merged(ranks(world).run(train, kind=kind, stages=stages, zero=zero))
    assert results[0]["momentum"].keys() == MATRICES[kind]
    replicas = world // stages
    assert [result["sharers"] for result in results] == [replicas] * world
    compare(results, kind, MICRO_BATCHES * replicas, 0.5)


@pytest.mark.parametrize("zero", [full(0), 1])
def test_with_tensor_parallelism(ranks: Any, zero: int) -> None:
    """Two stages of two tensor-parallel ranks; the clipping norm counts shards on each and copies once."""
    results = merged(ranks(4).run(train, kind="toy", stages=2, tensor=2, zero=zero))
    compare(results, "toy", MICRO_BATCHES, 0.5)


def test_norm_without_clipping(ranks: Any) -> None:
    """At stage 0 the reported norm is that of all stages, and a tied layer counts once."""
    results = merged(ranks(2).run(train, kind="tied", stages=2, zero=0, clipping=0.0))
    compare(results, "tied", MICRO_BATCHES, 0.0)


@pytest.mark.parametrize("precision", ["bf16", full("fp16")])
def test_pipeline_in_half_precision(ranks: Any, precision: str) -> None:
    """bf16 under ZeRO 1 is ``BF16_Optimizer``; tied copies stay the same bits on both stages."""
    results = merged(
        ranks(4).run(train, kind="tied", stages=2, zero=1, precision=precision, params={"wire_dtype": "auto"})
    )
    assert all(torch.isfinite(value).all() for value in results[0]["params"].values())
    assert results[0]["momentum"].keys() == MATRICES["tied"]


def test_half_precision_needs_stage_1(ranks: Any) -> None:
    for result in ranks(2).run(train, kind="toy", stages=2, zero=0, precision="bf16"):
        assert "set zero_optimization.stage to 1" in result["error"]


def refused(rank: int, world_size: int) -> str:
    """Return the error of a kind of pipeline that is not supported."""
    layers = [Embed(), *(nn.Linear(16, 16).double() for _ in range(4)), nn.Linear(16, VOCAB).double()]
    pipeline = deepspeed.DualPipeVModule(layers, num_stages=2, loss_fn=loss)
    start = lambda: training.initialize(pipeline, training.ds_config(1, accumulation=4))  # noqa: E731
    return training.refusal(start, deepspeed_muon.ConfigError)


def test_unsupported_pipelines_are_refused(ranks: Any) -> None:
    for text in ranks(2).run(refused):
        assert "use deepspeed.pipe.PipelineModule" in text, text


def test_patterns_see_all_stages(ranks: Any) -> None:
    """A pattern may match on another stage only; one that matches on none is an error on every rank."""
    arguments = {"kind": "toy", "stages": 2, "zero": 1}
    for result in merged(ranks(2).run(train, params={"exclude": ["1.up.weight"]}, **arguments)):
        assert result["routes"]["blocks.0.up.weight"] == "exclude pattern '1.up.weight'"
    for result in ranks(2).run(train, params={"exclude": ["9.up.weight"]}, **arguments):
        assert result["error"].startswith("RoutingError"), result


def resumed(rank: int, world_size: int, *, folder: str, how: str, rest: bool) -> dict[str, Any]:
    """Train three steps and save after two, or load that and train the third."""
    pipeline, _ = make_pipeline("tied", 2)
    config = training.ds_config(1, accumulation=MICRO_BATCHES, clipping=0.5)
    engine = training.initialize(pipeline, config)
    if rest and how == "deepspeed":
        assert engine.load_checkpoint(folder)[0] is not None
    elif rest:
        restore(engine, folder)
    for step in range(2 if rest else 0, 3):
        run_step(engine, step, world_size // 2)
        if step == 1:
            engine.save_checkpoint(folder) if how == "deepspeed" else consolidate(engine, folder)
    return training.outcome(engine)


@pytest.mark.parametrize("how", ["deepspeed", "consolidated"])
def test_pipeline_resumes_bit_by_bit(ranks: Any, how: str, tmp_path: Path) -> None:
    uninterrupted = ranks(4).run(resumed, folder=str(tmp_path / how), how=how, rest=False)
    rest = ranks(4).run(resumed, folder=str(tmp_path / how), how=how, rest=True)
    for before, after in zip(uninterrupted, rest, strict=True):
        training.assert_same_bits(after, before)


def test_stages_with_unequal_groups_are_refused(ranks: Any) -> None:
    """The last of four stages has no matrix: under ZeRO DeepSpeed's norm would wait on the others for ever."""
    for result in ranks(4).run(train, kind="tied", stages=4, zero=1):
        assert result["error"].startswith("ConfigError: the stages of the pipeline"), result


def with_an_infinity(rank: int, world_size: int, *, mode: str) -> dict[str, Any]:
    """Give one matrix of the first stage an infinite gradient; return what moved, the skipped steps and the error."""
    pipeline, _ = make_pipeline("toy", 2)
    config = training.ds_config(0, accumulation=MICRO_BATCHES, params={"nonfinite_grad": mode})
    engine = training.initialize(pipeline, config)
    start = training.full_masters(engine)
    if engine.grid.get_pipe_parallel_rank() == 0:
        matrix = next(param for name, param in pipeline.named_parameters() if name.endswith("up.weight"))
        matrix.register_hook(lambda grad: grad * float("inf"))
    error = training.refusal(lambda: run_step(engine, 0, world_size // 2))
    end = training.full_masters(engine)
    return {
        "moved": [name for name, value in end.items() if not torch.equal(value, start[name])],
        "skipped": engine.skipped_steps,
        "error": error,
    }


@pytest.mark.parametrize("mode", ["skip", full("error")])
def test_an_infinity_of_one_stage_stops_all(ranks: Any, mode: str) -> None:
    """At ZeRO 0 the other stages took the step; with ``error`` they waited for the one that had raised."""
    for result in ranks(2).run(with_an_infinity, mode=mode, timeout=60):
        assert result["moved"] == []
        assert result["skipped"] == (mode == "skip")
        assert result["error"].startswith("NumericalError" if mode == "error" else "")
        assert bool(result["error"]) == (mode == "error")
