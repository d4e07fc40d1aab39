"""AutoEP: every expert is updated as in a single process, once, by the ranks that share it, at ZeRO 1 to 3."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

import deepspeed_muon
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.routing.parameters import model_parameters_by_name
from deepspeed_muon.routing.rules import route_parameters
from tests.support import training
from tests.support.autoep_models import (
    AUTOEP_MATRICES,
    EXPERTS,
    GATES,
    STACKS,
    autoep_config,
    build_plain,
    build_source,
    compute_exactly,
    source_state,
)
from tests.support.comparisons import relative, within
from tests.support.contract import compare_norms, train_reference
from tests.support.counting import count_second_step
from tests.support.models import with_plain_linears
from tests.support.moe_hugging_face import EXPERTS as HF_EXPERTS
from tests.support.moe_hugging_face import HIDDEN as HF_HIDDEN
from tests.support.moe_hugging_face import INNER as HF_INNER
from tests.support.moe_hugging_face import VOCAB as HF_VOCAB
from tests.support.moe_hugging_face import build as build_hugging_face
from tests.support.moe_hugging_face import muon_names
from tests.support.oracle import Oracle, matrices_of
from tests.support.rounding import FP32_GATE, FP32_MODEL, HALF_MODEL, Arithmetic, limits
from tests.support.tensor_parallel import autotp
from tests.support.thinning import each_value, full, usual
from tests.support.training import FP32_SUMS, OFFLOAD

STEPS = 4


def make_engine(
    ep_size: int,
    stage: int,
    *,
    last: str = "busy",
    zero_init: bool = False,
    extra: Any = None,
    client: str = "",
    tensor_size: int = 1,
    frozen: str | None = None,
    **settings: Any,
) -> Any:
    """Return an engine whose experts AutoEP has divided over ``ep_size`` ranks; ``frozen`` is a part of names."""
    sections = {"expert_parallel": autoep_config(ep_size), **(extra or {})}
    if tensor_size > 1:
        sections["tensor_parallel"] = autotp(tensor_size)
    config = training.ds_config(stage, extra=sections, **settings)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=zero_init):
        model = build_source(last, loaded=not zero_init)
        model = model if tensor_size == 1 else with_plain_linears(model, ("up", "down"))
    if zero_init:
        source = source_state(last)
        for name, param in model.named_parameters():
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                param.data.copy_(source[name])
    for name, param in model.named_parameters():
        param.requires_grad_(frozen is None or frozen not in name)
    optimizer: Any = None
    if client:
        del config["optimizer"]
        optimizer = Muon(model, **training.MUON_PARAMS)
        optimizer = optimizer if client == "made" else lambda _: Muon(model, **training.MUON_PARAMS)
    engine = training.initialize(model, config, optimizer=optimizer)
    compute_exactly(engine.module)
    return engine


def joined(masters: dict[str, torch.Tensor], tensor_size: int) -> dict[str, torch.Tensor]:
    """Return the weights with the shards of AutoTP put together; neighbours share a model."""
    for name, dim in (("up.weight", 0), ("down.weight", 1)):
        for shard_name in [key for key in masters if key.endswith(name)] if tensor_size > 1 else []:
            shards = [torch.empty_like(masters[shard_name]) for _ in range(dist.get_world_size())]
            dist.all_gather(shards, masters[shard_name].contiguous())
            first = dist.get_rank() // tensor_size * tensor_size
            masters[shard_name] = torch.cat(shards[first : first + tensor_size], dim)
    return masters


def train(
    rank: int,
    world_size: int,
    *,
    ep_size: int,
    stage: int,
    accumulation: int = 1,
    tensor_size: int = 1,
    **settings: Any,
) -> Any:
    """Train; return this rank's experts and everything else, the norms, and the tokens of every expert."""
    engine = make_engine(ep_size, stage, accumulation=accumulation, tensor_size=tensor_size, **settings)
    optimizer = deepspeed_muon.muon_optimizer(engine)
    norms, tokens = [], []
    layers = [layer.mlp for layer in engine.module.model.layers]
    for step in range(STEPS):
        optimizer.stats.reset()
        before = torch.stack([layer.tokens_per_expert for layer in layers])
        training.run_step(engine, step, rank // tensor_size, world_size // tensor_size, accumulation)
        norms.append(float(engine.get_global_grad_norm()))
        tokens.append((torch.stack([layer.tokens_per_expert for layer in layers]) - before).tolist())
    return {
        "params": joined(training.full_masters(engine), tensor_size),
        "first": layers[0].ep_rank * layers[0].num_local_experts,
        "norms": norms,
        "tokens": tokens,
        "orthogonalized": optimizer.stats.matrices_orthogonalized,
        "routes": {route.name: route.algorithm for route in optimizer.routes},
    }


@functools.lru_cache(maxsize=8)
def reference(
    micro_batches: int, clipping: float, variant: str = "muon", last: str = "busy"
) -> tuple[Any, Any, list[float]]:
    """Train the plain model in float64 in this process."""
    oracle = Oracle(matrices_of(AUTOEP_MATRICES, experts=STACKS), clipping=clipping, variant=variant)
    return train_reference(build_plain(last), oracle, micro_batches, STEPS)


def compare(
    results: list[Any], micro_batches: int, clipping: float, arithmetic: Arithmetic = FP32_GATE, **kwargs: Any
) -> None:
    """Compare norms and parameters with the reference, every expert by itself, and check the routes.

    AutoEP computes the softmax of its gate in fp32 whatever the rest does. Where more is rounded, only the matrices are
    compared: tiny gradients of AdamW's may be anything.
    """
    start, end, norms = reference(micro_batches, clipping, **kwargs)
    allowed = limits(reference, micro_batches, clipping, arithmetic=arithmetic, **kwargs)
    seen: dict[str, set[int]] = {name: set() for name in STACKS}
    for result in results:
        assert result["params"].keys() == end.keys()
        compare_norms(result["norms"], norms, allowed.norms)
        assert all(result["routes"][gate] == "adamw" for gate in GATES)
        assert all(result["routes"][stack] == "muon" for stack in STACKS)
        for name in end if arithmetic == FP32_GATE else AUTOEP_MATRICES:
            value = result["params"][name]
            if name not in STACKS:
                within(relative(value, end[name], start[name]), allowed.paths[name], f"path of {name}")
                continue
            for number, expert in enumerate(value, start=result["first"]):
                error = relative(expert, end[name][number], start[name][number])
                within(error, allowed.rows[name][number], f"path of expert {number} of {name}")
                seen[name].add(number)
    assert all(numbers == set(range(EXPERTS)) for numbers in seen.values()), "all ranks hold every expert"


CASES = [
    (stage, world, ep_size, accumulation, clipping)
    for stage in (1, 2, 3)
    for world, ep_size in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
    for accumulation, clipping in ((1, 0.5), (2, 0.0), (2, 0.5))
]


@pytest.mark.parametrize(("stage", "world", "ep_size", "accumulation", "clipping"), each_value(CASES))
def test_matches_the_reference(
    ranks: Any, stage: int, world: int, ep_size: int, accumulation: int, clipping: float
) -> None:
    results = ranks(world).run(
        train, stage=stage, ep_size=ep_size, accumulation=accumulation, clipping=clipping
    )
    compare(results, world * accumulation, clipping)
    # Newton-Schulz runs once for every matrix and every stack of experts, over all ranks that share it.
    matrices = len(AUTOEP_MATRICES - STACKS)
    assert sum(result["orthogonalized"] for result in results) == matrices + ep_size * len(STACKS)


# On 4 ranks, two experts each, two ranks for every expert. The stacks have 216 elements an expert.
VARIANTS: dict[str, dict[str, Any]] = {
    "stage1-offload": {"stage": 1, "zero": OFFLOAD},
    "stage2-offload": {"stage": 2, "zero": OFFLOAD},
    "stage3-offload": {"stage": 3, "zero": OFFLOAD},
    "stage3-offload-both": {"stage": 3, "zero": {**OFFLOAD, "offload_param": {"device": "cpu"}}},
    "stage3-zero-init": {"stage": 3, "zero_init": True},
    "stage3-sub-groups": {"stage": 3, "zero": {"sub_group_size": 300}},
    "stage0": {"stage": 0},
    "stage2-callable": {"stage": 2, "client": "callable"},
    "stage3-callable": {"stage": 3, "client": "callable"},
    "stage2-data-before-experts": {"stage": 2, "extra": {"use_data_before_expert_parallelism": True}},
    "stage1-normuon": {"stage": 1, "params": {"variant": "normuon"}},
    "stage3-normuon": {"stage": 3, "params": {"variant": "normuon"}},
}
USUAL = {"stage2-offload", "stage3-offload", "stage3-zero-init"}


@pytest.mark.parametrize("name", usual(VARIANTS, USUAL))
def test_variants(ranks: Any, name: str) -> None:
    variant = VARIANTS[name]
    results = ranks(4).run(train, ep_size=2, accumulation=2, clipping=0.5, **variant)
    kind = variant.get("params", {}).get("variant", "muon")
    compare(results, 8, 0.5, variant=kind)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("stage", "ep_size", "last"),
    each_value([(stage, ep, last) for stage in (3, 2, 1) for ep in (4, 2, 1) for last in ("idle", "rare")]),
)
def test_experts_without_tokens(ranks: Any, stage: int, ep_size: int, last: str) -> None:
    """The result does not depend on the ranks among which the experts of a layer are divided.

    The last expert gets no token on some ranks, or on all. With 4 it is a rank's whole stack.
    """
    results = ranks(4).run(train, stage=stage, ep_size=ep_size, clipping=0.5, last=last)
    tokens = torch.tensor([result["tokens"] for result in results])[..., -1]
    assert (tokens == 0).any() and bool(tokens.any()) == (last == "rare")
    compare(results, 4, 0.5, last=last)


@pytest.mark.parametrize(
    ("stage", "precision", "extra"),
    [
        full(1, "bf16", FP32_SUMS),
        *(full(stage, "bf16", {}) for stage in (1, 2)),
        (3, "bf16", {}),
        *(full(stage, "fp16", {}) for stage in (2, 3)),
    ],
)
def test_half_precision(ranks: Any, stage: int, precision: str, extra: dict[str, Any]) -> None:
    """Every wrapper."""
    results = ranks(4).run(train, stage=stage, ep_size=2, precision=precision, clipping=0.5, extra=extra)
    compare(results, 4, 0.5, HALF_MODEL[precision])


@pytest.mark.parametrize(("ep_size", "clipping"), [(2, 0.5), full(4, 0.0)])
def test_with_autotp(ranks: Any, ep_size: int, clipping: float) -> None:
    """Experts divided over tensor-parallel ranks too (4), at ZeRO 3; the other matrices are cut."""
    results = ranks(4).run(train, stage=3, clipping=clipping, ep_size=ep_size, tensor_size=2)
    compare(results, 2, clipping, FP32_MODEL)


def resumed(rank: int, world_size: int, *, stage: int, folder: str, phase: str, **settings: Any) -> Any:
    engine = make_engine(2, stage, clipping=0.5, **settings)
    return training.train_all_or_rest(engine, rank, world_size, folder=folder, phase=phase)


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        full(1, {}),
        full(2, {}),
        (2, {"frozen": "down_proj"}),
        (3, {}),
        full(1, {"precision": "bf16", "extra": FP32_SUMS}),
        full(2, {"precision": "bf16", "zero": OFFLOAD}),
        full(3, {"precision": "bf16"}),
        full(3, {"zero_init": True}),
    ],
)
def test_resume_is_bit_identical(ranks: Any, stage: int, settings: dict[str, Any], tmp_path: Path) -> None:
    uninterrupted = ranks(4).run(resumed, stage=stage, folder=str(tmp_path), phase="whole", **settings)
    rest = ranks(4).run(resumed, stage=stage, folder=str(tmp_path), phase="rest", **settings)
    for first, second in zip(uninterrupted, rest, strict=True):
        training.assert_same_bits(second, first)


def count_a_step(rank: int, world_size: int, *, ep_size: int, stage: int) -> dict[str, Any]:
    """Train two steps; return what the second one computed and sent, beside what the plan says of the whole model."""
    engine = make_engine(ep_size, stage, params={"ns_backend": "torch", "ns_method": "standard"})
    parameters = route_parameters(list(model_parameters_by_name(build_plain()).values()))
    counts = count_second_step(engine, rank, world_size, stage, parameters, expert_parallel=ep_size)
    return {key: counts[key] for key in ("flops", "exchange")}


@pytest.mark.parametrize(("stage", "ep_size"), [(3, 2), (1, 4), full(2, 2)])
def test_the_plan_is_what_runs(ranks: Any, stage: int, ep_size: int) -> None:
    for result in ranks(4).run(count_a_step, stage=stage, ep_size=ep_size):
        for key, (really, predicted) in result.items():
            assert really == predicted, (key, result)


def sampled(rank: int, world_size: int, *, stage: int) -> Any:
    """Train with samples of health in every step; return the report and the plan."""
    engine = make_engine(2, stage, params={"health": 1})
    deepspeed_muon.muon_optimizer(engine).recorder.matrices = 100
    training.train_steps(engine, 2, rank, world_size)
    return deepspeed_muon.health(engine), deepspeed_muon.plan_report(engine)


def test_health_and_the_plan_of_an_engine(ranks: Any) -> None:
    """All ranks' experts are measured, and the plan says which ranks share what."""
    for rank, (health, plan) in enumerate(ranks(2).run(sampled, stage=2)):
        assert health["failed"] == 0
        measured = set(health["matrices"])
        assert measured >= AUTOEP_MATRICES | {f"{stack} (rank 1)" for stack in STACKS}
        for step_set in plan["step_sets"]:
            names = {row["name"] for row in step_set["matrices"]}
            assert step_set["ranks"] == ([rank] if names & STACKS else [0, 1])


def poisoned(rank: int, world_size: int, *, stage: int, mode: str) -> Any:
    """Put an infinity into the gradient of the second expert of rank 0."""
    engine = make_engine(2, stage, params={"nonfinite_grad": mode})
    training.run_step(engine, 0, rank, world_size, 1)
    before = training.full_masters(engine)

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        return grad.index_fill(0, torch.tensor([1]), float("inf"))

    def listen(module: Any, _: Any) -> None:
        module.w2.register_hook(spoil)  # at ZeRO 3 it is whole inside the forward pass only

    if rank == 0:
        engine.module.model.layers[0].mlp.experts.register_forward_pre_hook(listen)
    said = training.refusal(
        lambda: training.run_step(engine, 1, rank, world_size, 1), deepspeed_muon.NumericalError
    )
    after = training.full_masters(engine)
    return {
        "said": said,
        "moved": [name for name in before if not torch.equal(before[name], after[name])],
        "skipped": engine.skipped_steps,
    }


@pytest.mark.parametrize(
    ("stage", "mode"),
    each_value([(3, "skip"), (2, "error"), (0, "skip"), (1, "skip"), (3, "error")]),
)
def test_an_infinity_in_one_expert_is_known_to_all_ranks(ranks: Any, stage: int, mode: str) -> None:
    for result in ranks(2).run(poisoned, stage=stage, mode=mode, timeout=60):
        assert not result["moved"]
        assert ("not finite" in result["said"] or "non-finite" in result["said"]) == (mode == "error")
        assert mode == "error" or result["skipped"] == 1


def refused(
    rank: int, world_size: int, *, stage: int = 2, ep_size: int = 2, on_last: Any = None, **settings: Any
) -> str:
    """Return the error of starting an engine, whose ``expert_parallel`` section is another on the last rank."""
    section = {**autoep_config(ep_size), **(on_last or {} if rank == world_size - 1 else {})}
    start = lambda: make_engine(ep_size, stage, extra={"expert_parallel": section}, **settings)  # noqa: E731
    return training.refusal(start, Exception)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"on_last": {"autoep_size": 1}}, ["RankDisagreementError", "expert_parallel", '"autoep_size": 1']),
        ({"on_last": {"top_k": 99}}, ["RankDisagreementError", "expert_parallel"]),
        ({"client": "made"}, ["ConfigError", "pass a callable"]),
        ({"ep_size": 3}, ["ValueError", "autoep_size"]),
        ({"tensor_size": 2}, ["ConfigError", "AutoEP", "the wrong norm; use stage 3"]),
        ({"zero": {"reduce_scatter": False}}, ["AssertionError", "Reduce Scatter"]),
    ],
)
def test_refusals(ranks: Any, settings: dict[str, Any], said: list[str]) -> None:
    """On every rank, at once; what DeepSpeed refuses has DeepSpeed's own words."""
    for text in ranks(2).run(refused, timeout=60, **settings):
        for words in said:
            assert words in text, text


HF_EPS = 1e-6


def hugging_face_tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(HF_VOCAB, (2, 16), generator=torch.Generator().manual_seed(1000 * step + rank))


def train_hugging_face(rank: int, world_size: int, *, family: str, stage: int, ep_size: int) -> Any:
    """Train a model of transformers; return this rank's experts under the source's names, and everything else."""
    from deepspeed.module_inject.auto_ep import AutoEP

    experts = autoep_config(ep_size, preset_model=family)
    config = training.ds_config(
        stage, clipping=0.5, params={"eps": HF_EPS}, extra={"expert_parallel": experts}
    )
    with pytest.MonkeyPatch.context() as patch:
        # With transformers 5.23 it raises before there is an optimizer: it cannot tell the decoder from the head.
        patch.setattr(AutoEP, "_retarget_transformers_output_recorders", lambda *_: None)
        model = build_hugging_face(family, listed=False)
        engine = training.initialize(model, config)
    norms = []
    for step in range(STEPS):
        tokens = hugging_face_tokens(step, rank)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    masters = training.full_masters(engine)
    for name in [name for name in masters if name.endswith("experts.w1")]:
        stem = name.removesuffix("w1")
        masters[f"{stem}gate_up_proj"] = torch.cat([masters.pop(name), masters.pop(f"{stem}w3")], dim=1)
        masters[f"{stem}down_proj"] = masters.pop(f"{stem}w2")
    layer = engine.module.model.layers[0].mlp
    return {
        "params": {name.replace("router.gate", "gate"): value for name, value in masters.items()},
        "first": layer.ep_rank * layer.num_local_experts,
        "norms": norms,
    }


@functools.lru_cache
def hugging_face_reference(family: str, world: int) -> tuple[Any, Any, list[float]]:
    """Train in float64 in this process."""
    model = build_hugging_face(family, listed=False)
    names = muon_names(family, listed=False)
    stacks = {name for name, stacked in names.items() if stacked}
    fused = {name for name in stacks if name.endswith("gate_up_proj")}
    grids = {name: ([HF_INNER] * 2 * HF_EXPERTS, [HF_HIDDEN], False) for name in fused}
    oracle = Oracle(matrices_of(names, experts=stacks, grids=grids), clipping=0.5, eps=HF_EPS)

    def gradients(step: int) -> None:
        model.zero_grad()
        for rank in range(world):
            tokens = hugging_face_tokens(step, rank)
            (model(input_ids=tokens, labels=tokens).loss / world).backward()

    return train_reference(model, oracle, world, STEPS, gradients=gradients)


@pytest.mark.parametrize(
    ("family", "stage", "world", "ep_size"),
    each_value(
        (family, stage, world, ep_size)
        for family in ("mixtral", "qwen3_moe")
        for stage in (3, 2, 1)
        for world, ep_size in ((2, 2), (4, 2), (4, 4))
    ),
)
def test_models_of_hugging_face(ranks: Any, family: str, stage: int, world: int, ep_size: int) -> None:
    pytest.importorskip("transformers", "5.0", "DeepSpeed's AutoEP knows the fused experts of transformers 5")
    results = ranks(world).run(train_hugging_face, family=family, stage=stage, ep_size=ep_size)
    start, end, norms = hugging_face_reference(family, world)
    allowed = limits(hugging_face_reference, family, world, arithmetic=FP32_MODEL, seeds=2)
    names = muon_names(family, listed=False)
    errors = {}
    for result in results:
        assert result["params"].keys() == end.keys()
        for name, value in result["params"].items():
            rows = slice(result["first"], result["first"] + len(value)) if names.get(name) else slice(None)
            error = relative(value, end[name][rows], start[name][rows])
            errors[name, result["first"]] = error
            limit = max(allowed.rows[name][rows]) if names.get(name) else allowed.paths[name]
            within(error, limit, f"path of {name}")
        compare_norms(result["norms"], norms, allowed.norms)
    experts = {first for name, first in errors if names.get(name)}
    assert experts == set(range(0, HF_EXPERTS, HF_EXPERTS // ep_size))
