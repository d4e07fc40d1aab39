"""What must not change anything, and what must fail on every rank with a clear error instead of hanging."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed_muon
from tests.support import tensor_parallel, training
from tests.support.models import MATRICES, batch, build
from tests.support.snapshots import changed, tensors_of
from tests.support.thinning import each_value, usual
from tests.support.training import ds_config, try_to_start


def poisoned_step(
    rank: int, world_size: int, *, stage: int, precision: str, factor: float, matrix: str = "", **options: Any
) -> Any:
    """Two good steps, one with the loss or a ``matrix``'s gradient times ``factor`` on the last rank, one good step."""
    engine = training.make_engine(training.ds_config(stage, precision=precision, **options))
    training.train_steps(engine, 2, rank, world_size)
    before = tensors_of(engine)
    loss, scale = engine(*batch(2, rank)), factor if rank == world_size - 1 else 1.0
    if matrix:
        handle = engine.module.get_parameter(matrix).register_hook(lambda grad: grad * scale)
    engine.backward(loss if matrix else loss * scale)
    if matrix:
        handle.remove()
    error = training.refusal(engine.step, deepspeed_muon.NumericalError)
    unchanged = not changed(before, tensors_of(engine))
    engine.zero_grad()
    if not error:
        training.run_step(engine, 3, rank, world_size, 1)
    after = tensors_of(engine)
    return {
        "unchanged": unchanged,
        "moved": bool(changed(before, after)),
        "finite": all(bool(torch.isfinite(tensor.float()).all()) for tensor in after.values()),
        "error": error,
        "skipped": engine.skipped_steps,
    }


STAGES = list(product((0, 1, 2, 3), ("fp32", "bf16")))


NAN = {"factor": float("nan")}
# Stage 3 of DeepSpeed 0.19.2 looks for a NaN in fp16 only: with sub-groups others were updated, and all later steps
# were skipped.
ONE_SUB_GROUP = {"zero": {"sub_group_size": 200}, "matrix": "blocks.1.up.weight", **NAN}


@pytest.mark.parametrize(
    ("stage", "precision", "settings"),
    [
        *(pytest.param(stage, "fp16", {"factor": 1e9}, marks=pytest.mark.compat) for stage in range(4)),
        *each_value((*case, {"clipping": 1.0, **NAN}) for case in STAGES),
        pytest.param(3, "bf16", ONE_SUB_GROUP, marks=pytest.mark.compat),
    ],
)
def test_a_gradient_that_is_not_finite_skips_the_step(
    ranks: Any, stage: int, precision: str, settings: dict[str, Any]
) -> None:
    for report in ranks(2).run(poisoned_step, stage=stage, precision=precision, **settings):
        assert report == {"unchanged": True, "moved": True, "finite": True, "error": "", "skipped": 1}


@pytest.mark.parametrize(("stage", "precision"), [*each_value(reversed(STAGES)), (0, "fp16"), (2, "fp16")])
def test_nonfinite_gradient_is_an_error_if_asked(ranks: Any, stage: int, precision: str) -> None:
    """Also with a static loss scale."""
    settings = {"stage": stage, "precision": precision, "params": {"nonfinite_grad": "error"}}
    if precision == "fp16":
        settings["extra"] = {"fp16": {"loss_scale": 128}}
    for report in ranks(2).run(poisoned_step, factor=float("inf"), **settings):
        assert "nonfinite_grad is 'error'" in report["error"]
        assert report["unchanged"] and report["finite"]


DIFFERENCES: list[tuple[dict[str, Any], str]] = [
    ({"params": {"momentum": 0.9}}, "momentum"),
    ({"params": {"exclude": ["blocks.0.*"]}}, "routes"),
    ({"gradient_clipping": 0.7}, "gradient_clipping"),
    ({"params": {"health": 7}}, "optimizer.params.health"),
]


@pytest.mark.parametrize(
    ("difference", "said", "stage"), each_value((*row, stage) for stage in (0, 2, 3) for row in DIFFERENCES)
)
def test_ranks_that_disagree_fail_on_every_rank(
    ranks: Any, difference: dict[str, Any], said: str, stage: int
) -> None:
    for text in ranks(3).run(try_to_start, stage=stage, on_last_rank=difference):
        assert text.startswith("RankDisagreementError: ") and said in text and "[2]" in text, text


def test_error_on_one_rank_stops_all(ranks: Any) -> None:
    wrong = "ConfigError: optimizer.params: unknown key 'momentun'; did you mean 'momentum'?"
    texts = ranks(3).run(try_to_start, stage=3, on_last_rank={"params": {"momentun": 0.9}})
    assert all(text.startswith("RankDisagreementError: ") for text in texts[:2]), texts
    assert f"rank 2: {wrong}" in texts[0] and texts[2].startswith(wrong)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"params": {"lr": -0.1}}, "ConfigError", "optimizer.params.lr"),
        ({"params": {"ns_schedule": "cans", "ns_steps": 7}}, "ConfigError", "set ns_steps to 5"),
        ({"params": {"exclude": ["bloks.*"]}}, "RoutingError", "matches no parameter"),
        ({"optimizer": {"type": "Muon", "parms": {}}}, "ConfigError", "'parms'; did you mean 'params'?"),
    ],
)  # fmt: skip
def test_bad_input_is_a_typed_error(ranks: Any, change: dict[str, Any], kind: str, said: str) -> None:
    for text in ranks(2).run(try_to_start, stage=1, common=change):
        assert text.startswith(f"{kind}: ") and said in text, text


# A rank whose model has another size or dtype: DeepSpeed's broadcast aborted or hung before anything was compared.


def left_out(rank: int, world_size: int, *, stage: int) -> Any:
    """Three steps; the first leaves out the update of a matrix of the second param group, on an fp16 wire."""
    params = {"wire_dtype": "fp16", "nonfinite_grad": "error"}
    config = ds_config(stage, params=params, zero={"sub_group_size": 500} if stage == 3 else {})
    model = build("toy", exact=False)
    matrix = model.get_parameter("blocks.1.up.weight")
    remaining = [param for param in model.parameters() if param is not matrix]
    groups = [{"params": remaining}, {"params": [matrix], "muon_lr": 0.01}]
    engine = training.initialize(model, config, model_parameters=groups)
    handle = matrix.register_hook(lambda grad: grad * 1e9)
    training.run_step(engine, 0, rank, world_size, 1)
    handle.remove()
    before = tensors_of(engine)
    error = training.refusal(lambda: training.run_step(engine, 1, rank, world_size, 1))
    middle = tensors_of(engine)
    training.run_step(engine, 2, rank, world_size, 1)
    return {"error": error, "early": changed(before, middle), "late": changed(middle, tensors_of(engine))}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_failed_update_is_an_error_before_anything_changes(ranks: Any, stage: int) -> None:
    """ZeRO had updated the param groups before that of the matrix, and the step after this one failed."""
    for report in ranks(2).run(left_out, stage=stage):
        assert report["error"].startswith("NumericalError: the updates of blocks.1.up.weight were wrong")
        assert not report["early"] and report["late"]


def try_model(rank: int, world_size: int, *, stage: int, how: str, client: str) -> str:
    """Start an engine whose model differs on the last rank."""
    odd = rank == world_size - 1
    model = build("toy", exact=False)
    if how == "shape" and odd:
        model.lm_head.weight = torch.nn.Parameter(torch.randn(29, 17))
    if how == "dtype" and odd:
        model.lm_head.to(torch.float64)
    if how == "missing" and odd:
        del model.lm_head
    if how == "all" and odd:
        model = build("toy", width=20)
    config = training.ds_config(stage)
    optimizer = None
    if client == "instance":
        optimizer = deepspeed_muon.Muon(model, **config.pop("optimizer")["params"])
    start = lambda: training.initialize(model, config, optimizer=optimizer)  # noqa: E731
    return training.refusal(start, deepspeed_muon.RankDisagreementError)


@pytest.mark.parametrize(
    ("stage", "how", "client", "said"),
    [
        (0, "shape", "config", ["parameter lm_head.weight", "float32 [29, 16]", "float32 [29, 17]"]),
        (2, "dtype", "instance", ["parameter lm_head.weight", "float32 [29, 16]", "float64 [29, 16]"]),
        (3, "missing", "config", ["parameter lm_head.weight", "<absent>"]),
        (1, "all", "config", ["parameter embed.weight", "float32 [29, 20]"]),
    ],
)
def test_every_rank_names_the_parameter(
    ranks: Any, stage: int, how: str, client: str, said: list[str]
) -> None:
    for message in ranks(2).run(try_model, stage=stage, how=how, client=client, timeout=60):
        assert all(words in message for words in [*said, "ranks [0]", "ranks [1]"]), message
        assert message.count("\n") <= 21


# Ranks of a tensor-parallel group whose AdamW parameters differed exchanged flags by position: wrong ones, or none.
#
# A parameter then took part in a step, or was skipped, by the flag of another one; with lists of unequal length the
# ranks waited for each other.


def start(rank: int, world_size: int, *, stage: int, how: str) -> str:
    """Start an engine whose AdamW parameters are others, or others in order, on the last rank of the group."""
    mpu = tensor_parallel.Mpu(2)
    model = tensor_parallel.megatron_model(mpu.tensor)
    last = rank % 2 == 1
    extra = {"first": nn.Parameter(torch.ones(3)), "second": nn.Parameter(torch.ones(5))}
    if how == "more" and last:
        extra["third"] = nn.Parameter(torch.ones(2))
    for name in sorted(extra, reverse=how == "order" and last):
        model.register_parameter(
            "renamed" if how == "name" and last and name == "first" else name, extra[name]
        )
    return training.refusal(lambda: training.initialize(model, ds_config(stage), mpu=mpu))


@pytest.mark.parametrize(
    ("stage", "how", "said"),
    [
        (0, "more", ["'second', 'embed.weight'", "'second', 'third', 'embed.weight'"]),
        (1, "order", ["'first', 'second', 'embed.weight'", "'second', 'first', 'embed.weight'"]),
        (1, "name", ["'first', 'second', 'embed.weight'", "'renamed', 'second', 'embed.weight'"]),
    ],
)
def test_refused_on_every_rank(ranks: Any, stage: int, how: str, said: list[str]) -> None:
    for message in ranks(2).run(start, stage=stage, how=how):
        assert message.startswith("RankDisagreementError: the ranks do not agree:\nparameters of step set"), (
            message
        )
        shown = [text.partition(";")[0] for text in message.split("ranks [")[1:]]
        for rank, (words, text) in enumerate(zip(said, shown, strict=True)):
            assert text.startswith(f"{rank}]: [") and words in text, message


# A step that was skipped for its gradients: DeepSpeed's counter and scheduler went on as if it had been taken.
#
# ``engine.skipped_steps`` stayed 0 and the rate moved on wherever this optimizer skips by itself: at stage 0 in fp32,
# and in bf16 where ZeRO looks at no gradients.

SCHEDULE = {
    "type": "WarmupLR",
    "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10, "warmup_type": "linear"},
}


def poisoned(
    rank: int, world_size: int, *, stage: int, name: str, tensor_size: int = 1, **settings: Any
) -> dict[str, Any]:
    """Step 2 of 4 has a NaN in the gradient of one parameter on the last rank."""
    settings["extra"] = {"scheduler": SCHEDULE, **settings["extra"]}
    config = training.ds_config(stage, accumulation=2, **settings)
    if tensor_size > 1:
        engine = tensor_parallel.make_engine("megatron", tensor_size, config)
    else:
        engine = training.make_engine(config, exact=False)
    param = engine.module.get_parameter(name)
    counts, applied, rates = [], [], []
    unchanged = True
    for step in range(4):
        handle = None
        if step == 1 and rank == world_size - 1:
            handle = param.register_hook(lambda grad: torch.full_like(grad, float("nan")))
        before = tensors_of(engine)
        training.run_step(engine, step, rank // tensor_size, world_size // tensor_size, 2)
        if step == 1:
            unchanged = not changed(before, tensors_of(engine))
        if handle is not None:
            handle.remove()
        counts.append(engine.skipped_steps)
        applied.append(engine.was_step_applied() if hasattr(engine, "was_step_applied") else step != 1)
        rates.append(engine.get_lr()[0])
    return {"counts": counts, "applied": applied, "rates": rates, "unchanged": unchanged}


def assert_skipped_once(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["unchanged"], "nothing moves, whichever parameter's gradient it is"
        assert report["counts"] == [0, 1, 1, 1]
        assert report["applied"] == [True, False, True, True]
        first, second, third, fourth = report["rates"]
        assert first == second < third < fourth, "the scheduler rests in a skipped step, as DeepSpeed has it"


FP16 = {"fp16": {"hysteresis": 1, "initial_scale_power": 8}}
CASES = [
    # Stage, precision, clipping, further configuration, and the parameter: Muon's matrix or AdamW's.
    (*case, name)
    for case in (
        *product(range(4), ("fp32", "bf16"), (0.0,), ({},)),
        *((0, "fp32", 0.5, {}), (2, "bf16", 0.5, {})),
        (1, "bf16", 0.0, {"data_types": {"grad_accum_dtype": "bf16"}}),
        (2, "bf16", 0.0, {"bf16": {"check_grad_overflow": False}}),
        (1, "fp32", 0.0, {"zero_optimization": {"compute_grad_norm": False}}),
        *((stage, "fp16", 0.0, FP16) for stage in (0, 2, 3)),
    )
    for name in ("embed.weight", "blocks.1.up.weight")
]
# Each way of skipping once at least.
SHORT = [
    *((0, "fp32", 0.0, {}, name) for name in ("embed.weight", "blocks.1.up.weight")),
    (2, "bf16", 0.0, {"bf16": {"check_grad_overflow": False}}, "blocks.1.up.weight"),
    (1, "fp32", 0.0, {"zero_optimization": {"compute_grad_norm": False}}, "embed.weight"),
]


@pytest.mark.parametrize(("stage", "precision", "clipping", "extra", "name"), usual(CASES, SHORT))
def test_once_a_step_of_the_engine(
    ranks: Any, stage: int, precision: str, clipping: float, extra: dict[str, Any], name: str
) -> None:
    assert "blocks.1.up.weight" in MATRICES["toy"] and "embed.weight" not in MATRICES["toy"]
    arguments = {"stage": stage, "precision": precision, "clipping": clipping, "name": name, "extra": extra}
    assert_skipped_once(ranks(2).run(poisoned, **arguments))


def test_a_skipped_step_counts_that_only_the_optimizer_skipped(ranks: Any) -> None:
    """BF16_Optimizer's norm has the first tensor-parallel rank's copy of a gradient; the statuses are of all copies."""
    arguments = {"stage": 1, "precision": "bf16", "name": "mix.weight", "extra": training.FP32_SUMS}
    assert_skipped_once(ranks(2).run(poisoned, tensor_size=2, **arguments))
