"""Experts of ``deepspeed.moe`` and AutoEP: each is updated as in one process, once, by the ranks that share it."""

from __future__ import annotations

import functools
from collections.abc import Set
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

import deepspeed_muon
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.routing.parameters import model_parameters_by_name
from deepspeed_muon.routing.rules import route_parameters
from deepspeed_muon.variants import VARIANTS
from tests.support import autoep_models, moe_models, training
from tests.support.autoep_models import AUTOEP_MATRICES, STACKS, autoep_config, build_source, compute_exactly
from tests.support.comparisons import relative, within
from tests.support.contract import backward, compare_norms, train_reference
from tests.support.counting import count_second_step
from tests.support.models import with_plain_linears
from tests.support.moe_hugging_face import EXPERTS as HF_EXPERTS
from tests.support.moe_hugging_face import HIDDEN as HF_HIDDEN
from tests.support.moe_hugging_face import INNER as HF_INNER
from tests.support.moe_hugging_face import VOCAB as HF_VOCAB
from tests.support.moe_hugging_face import build as build_hugging_face
from tests.support.moe_hugging_face import muon_names
from tests.support.moe_models import GATE, MOE_MATRICES, build_deepspeed, global_name
from tests.support.oracle import Cuts, Oracle, cuts_in, matrices_of, stored_in_8_bits
from tests.support.rounding import FP32_GATE, FP32_MODEL, HALF_MODEL, Arithmetic, limits
from tests.support.tensor_parallel import Mpu, autotp
from tests.support.thinning import each_value, full, usual
from tests.support.training import FP32_SUMS, OFFLOAD


class Kind(NamedTuple):
    """What is compared of a model: its matrices, those of them that are stacks of experts, the gates, and the steps."""

    matrices: Set[str]
    stacks: Set[str]
    gates: Set[str]
    steps: int


KINDS = {
    "moe": Kind(MOE_MATRICES, frozenset(), {GATE}, 3),
    "autoep": Kind(AUTOEP_MATRICES, STACKS, autoep_models.GATES, 4),
}
EXPERTS = 4


def make_moe_engine(
    ep_size: int, rank: int, stage: int, *, groups: str = "list", tensor_size: int = 1, **settings: Any
) -> Any:
    """Return an engine of ``deepspeed.moe``; ``groups`` says how the parameters are passed."""
    model = build_deepspeed(ep_size, rank % ep_size)
    config = training.ds_config(stage, **settings)
    params: Any = list(model.parameters())
    optimizer = None
    if groups == "caller":
        params = split_params_into_different_moe_groups_for_optimizer({"params": params, "name": "all"})
    elif groups == "unnamed":
        params = [
            {"params": [p for p in params if p.ndim > 1]},
            {"params": [p for p in params if p.ndim < 2], "algorithm": "adamw"},
        ]
    elif groups == "client":
        optimizer = Muon(model, **training.MUON_PARAMS)
        del config["optimizer"]
    mpu = Mpu(tensor_size) if tensor_size > 1 else None
    return training.initialize(model, config, model_parameters=params, optimizer=optimizer, mpu=mpu)


def make_autoep_engine(
    ep_size: int,
    rank: int,
    stage: int,
    *,
    last: str = "busy",
    zero_init: bool = False,
    extra: Any = None,
    section: Any = None,
    client: str = "",
    tensor_size: int = 1,
    frozen: str | None = None,
    **settings: Any,
) -> Any:
    """Return an engine whose experts AutoEP has divided over ``ep_size`` ranks; names with ``frozen`` do not train."""
    sections = {"expert_parallel": {**autoep_config(ep_size), **(section or {})}, **(extra or {})}
    if tensor_size > 1:
        sections["tensor_parallel"] = autotp(tensor_size)
    config = training.ds_config(stage, extra=sections, **settings)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=zero_init):
        model = build_source(last, loaded=not zero_init)
        model = model if tensor_size == 1 else with_plain_linears(model, ("up", "down"))
    if zero_init:
        source = autoep_models.source_state(last)
        for name, param in model.named_parameters():
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                param.data.copy_(source[name])
    for name, param in model.named_parameters():
        param.requires_grad_(frozen is None or frozen not in name)
    optimizer: Any = None
    if client:
        del config["optimizer"]
        make = lambda _: Muon(model, **training.MUON_PARAMS)  # noqa: E731
        optimizer = make(None) if client == "made" else make
    engine = training.initialize(model, config, optimizer=optimizer)
    compute_exactly(engine.module)
    return engine


def make_engine(kind: str, ep_size: int, rank: int, stage: int, **settings: Any) -> Any:
    make = make_moe_engine if kind == "moe" else make_autoep_engine
    return make(ep_size, rank, stage, **settings)


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
    kind: str,
    ep_size: int,
    stage: int,
    accumulation: int = 1,
    tensor_size: int = 1,
    **settings: Any,
) -> Any:
    """Train; return this rank's experts and everything else, the norms, and the tokens of AutoEP's experts."""
    settings |= {"tensor_size": tensor_size, "accumulation": accumulation}
    engine = make_engine(kind, ep_size, rank, stage, **settings)
    optimizer = deepspeed_muon.muon_optimizer(engine)
    norms, tokens = [], []
    first = (rank % ep_size) * (EXPERTS // ep_size)
    layers = [layer.mlp for layer in engine.module.model.layers] if kind == "autoep" else []
    count = lambda: torch.tensor([layer.tokens_per_expert.tolist() for layer in layers])  # noqa: E731
    for step in range(KINDS[kind].steps):
        optimizer.stats.reset()
        before = count()
        training.run_step(engine, step, rank // tensor_size, world_size // tensor_size, accumulation)
        norms.append(float(engine.get_global_grad_norm()))
        tokens.append((count() - before).tolist())
    masters = joined(training.full_masters(engine), tensor_size)
    cuts = training.cuts_of(engine)
    return {
        # deepspeed.moe numbers a rank's experts from 0.
        "params": {global_name(name, first): value for name, value in masters.items()},
        "cuts": {global_name(name, first): value for name, value in cuts.items()},
        "first": layers[0].ep_rank * layers[0].num_local_experts if layers else first,
        "norms": norms,
        "tokens": tokens,
        "orthogonalized": optimizer.stats.matrices_orthogonalized,
        "routes": {route.name: route.algorithm for route in optimizer.routes},
        "groups": [[g["algorithm"], bool(g.get("moe"))] for g in optimizer.param_groups],
        "caller_groups": [g["caller_group"] for g in optimizer.param_groups],
    }


@functools.lru_cache(maxsize=16)
def reference(
    kind: str,
    micro_batches: int,
    clipping: float,
    variant: str = "muon",
    last: str = "busy",
    int8_cuts: Cuts | None = None,
) -> tuple[Any, Any, list[float]]:
    """Train the plain model in float64 in this process, with int8 momentum if its cuts are given."""
    matrices, stacks, _, steps = KINDS[kind]
    model = moe_models.build_plain() if kind == "moe" else autoep_models.build_plain(last)
    oracle = Oracle(matrices_of(matrices, experts=stacks), clipping=clipping, variant=variant)
    if int8_cuts is not None:
        oracle.store_momentum = stored_in_8_bits(int8_cuts)

    def gradients(step: int) -> None:
        backward(model, step, micro_batches)
        assert kind != "moe" or all(param.grad.any() for param in model.parameters()), (
            "every expert gets a token"
        )

    return train_reference(model, oracle, micro_batches, steps, gradients=gradients)


def compare(
    results: list[Any],
    kind: str,
    micro_batches: int,
    clipping: float,
    arithmetic: Arithmetic = FP32_GATE,
    **kwargs: Any,
) -> None:
    """Compare norms and parameters with the reference, every expert by itself, and check the routes.

    Gates compute in fp32 whatever the rest does. Where more is rounded, only the matrices are compared: tiny gradients
    of AdamW's may be anything.
    """
    matrices, stacks, gates, _ = KINDS[kind]
    start, end, norms = reference(kind, micro_batches, clipping, **kwargs)
    allowed = limits(reference, kind, micro_batches, clipping, arithmetic=arithmetic, **kwargs)
    compared = end.keys() if arithmetic == FP32_GATE else matrices
    seen: set[Any] = set()
    for result in results:
        compare_norms(result["norms"], norms, allowed.norms)
        assert all(result["routes"][gate] == "adamw" for gate in gates)
        assert all(result["routes"][stack] == "muon" for stack in stacks)
        for name, value in result["params"].items():
            if name not in compared:
                continue
            if name not in stacks:
                within(relative(value, end[name], start[name]), allowed.paths[name], f"path of {name}")
                seen.add(name)
                continue
            for number, expert in enumerate(value, start=result["first"]):
                error = relative(expert, end[name][number], start[name][number])
                within(error, allowed.rows[name][number], f"path of expert {number} of {name}")
                seen.add((name, number))
    assert seen == (compared - stacks) | set(product(stacks, range(EXPERTS))), "all ranks hold every expert"


CASES = [
    ("moe", 0, 2, 1, 1, 0.5),
    ("moe", 0, 4, 2, 1, 0.5),
    ("moe", 0, 2, 2, 2, 0.0),
    ("moe", 1, 3, 1, 1, 0.0),
    ("moe", 1, 4, 2, 1, 0.5),
    ("moe", 2, 2, 1, 2, 0.5),
    ("moe", 2, 4, 2, 1, 0.5),
    ("moe", 2, 2, 2, 2, 0.0),
]
CORE = {CASES[1], CASES[3], CASES[7]}
AUTOEP_CASES = [
    ("autoep", stage, world, ep_size, accumulation, clipping)
    for stage in (1, 2, 3)
    for world, ep_size in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
    for accumulation, clipping in ((1, 0.5), (2, 0.0), (2, 0.5))
]
# Every stage, and experts that no, two and all ranks share; one reference for all, which takes seconds.
AUTOEP_CORE = {("autoep", stage, 4, ep_size, 2, 0.5) for stage, ep_size in ((1, 2), (2, 1), (3, 4))}


@pytest.mark.parametrize(
    ("kind", "stage", "world", "ep_size", "accumulation", "clipping"),
    [*usual(CASES, CORE, compat=CORE), *usual(AUTOEP_CASES, AUTOEP_CORE)],
)
def test_matches_the_reference(
    ranks: Any, kind: str, stage: int, world: int, ep_size: int, accumulation: int, clipping: float
) -> None:
    settings = {"ep_size": ep_size, "accumulation": accumulation, "clipping": clipping}
    results = ranks(world).run(train, kind=kind, stage=stage, **settings)
    compare(results, kind, world * accumulation, clipping)
    # Newton-Schulz runs once for every matrix and every stack of experts, over all ranks that share it.
    matrices, stacks, *_ = KINDS[kind]
    orthogonalized = sum(result["orthogonalized"] for result in results)
    assert orthogonalized == len(matrices - stacks) + ep_size * len(stacks)


@pytest.mark.parametrize(
    ("groups", "stage"), [("caller", 1), ("unnamed", 2), ("client", 0), full("client", 2)]
)
def test_forms_of_passing_the_parameters(ranks: Any, groups: str, stage: int) -> None:
    """The caller's expert groups, groups without a name, and a client optimizer that knows nothing of experts."""
    results = ranks(2).run(train, kind="moe", stage=stage, ep_size=2, groups=groups)
    compare(results, "moe", 2, 0.0)
    kinds = {tuple(group) for group in results[0]["groups"]}
    assert kinds == {("muon", False), ("adamw", False), ("muon", True), ("adamw", True)}
    # Of groups with an algorithm it was the number among DeepSpeed's divided groups.
    assert groups != "unnamed" or set(results[0]["caller_groups"]) == {0, 1}


# AutoEP on 4 ranks, two experts each, two ranks for every expert. The stacks have 216 elements an expert.
SETTINGS: dict[str, dict[str, Any]] = {
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
}


@pytest.mark.parametrize("name", usual(SETTINGS, {"stage2-offload"}))
def test_settings(ranks: Any, name: str) -> None:
    results = ranks(4).run(train, kind="autoep", ep_size=2, accumulation=2, clipping=0.5, **SETTINGS[name])
    compare(results, "autoep", 8, 0.5)


@pytest.mark.parametrize(
    ("stage", "ep_size", "last"),
    usual(product((3, 2, 1), (4, 2, 1), ("idle", "rare")), {(3, 4, "idle"), (1, 2, "rare")}),
)
def test_experts_without_tokens(ranks: Any, stage: int, ep_size: int, last: str) -> None:
    """The result does not depend on the ranks among which the experts of a layer are divided.

    The last expert gets no token on some ranks, or on all. With 4 it is a rank's whole stack.
    """
    settings = {"ep_size": ep_size, "clipping": 0.5, "last": last}
    results = ranks(4).run(train, kind="autoep", stage=stage, **settings)
    tokens = torch.tensor([result["tokens"] for result in results])[..., -1]
    assert (tokens == 0).any() and bool(tokens.any()) == (last == "rare")
    compare(results, "autoep", 4, 0.5, last=last)


@pytest.mark.parametrize(
    ("kind", "stage", "precision", "extra"),
    [
        full("moe", 1, "bf16", FP32_SUMS),
        full("moe", 2, "bf16", {}),
        ("moe", 0, "fp16", {}),
        full("autoep", 1, "bf16", FP32_SUMS),
        *(full("autoep", stage, "bf16", {}) for stage in (1, 2)),
        ("autoep", 3, "bf16", {}),
        *(full("autoep", stage, "fp16", {}) for stage in (2, 3)),
    ],
)
def test_half_precision(ranks: Any, kind: str, stage: int, precision: str, extra: dict[str, Any]) -> None:
    """BF16_Optimizer, the ZeRO wrappers and FP16_UnfusedOptimizer."""
    settings = {"precision": precision, "clipping": 0.5, "extra": extra}
    world = 2 if kind == "moe" else 4
    results = ranks(world).run(train, kind=kind, stage=stage, ep_size=2, **settings)
    compare(results, kind, world, 0.5, HALF_MODEL[precision])


@pytest.mark.parametrize(("ep_size", "clipping"), [(2, 0.5), full(4, 0.0)])
def test_with_autotp(ranks: Any, ep_size: int, clipping: float) -> None:
    """Experts divided over tensor-parallel ranks too (4), at ZeRO 3; the other matrices are cut."""
    settings = {"clipping": clipping, "ep_size": ep_size, "tensor_size": 2}
    results = ranks(4).run(train, kind="autoep", stage=3, **settings)
    compare(results, "autoep", 2, clipping, FP32_MODEL)


def overflowing(rank: int, world_size: int) -> list[float]:
    """Take three steps, where an expert of rank 0 overflows in the second; return the loss scale after each of them."""
    autocast = {
        "enabled": True,
        "dtype": "float16",
        "lower_precision_safe_modules": ["tests.support.models.Linear"],
    }
    engine = make_engine("moe", 2, rank, 0, extra={"torch_autocast": autocast})
    scales = []
    for step in range(3):
        if rank == 0 and step == 1:
            hook = first_expert(engine).register_hook(lambda grad: grad * float("inf"))
        training.run_step(engine, step, rank, world_size, 1)
        if rank == 0 and step == 1:
            hook.remove()
        scales.append(engine.torch_autocast_z0_gradscaler.get_scale())
    assert deepspeed_muon.muon_optimizer(engine).skipped_steps == engine.skipped_steps == 1
    return scales


def first_expert(engine: Any) -> torch.nn.Parameter:
    return next(p for name, p in engine.module.named_parameters() if "experts" in name and p.ndim > 1)


def test_all_ranks_lower_the_loss_scale(ranks: Any) -> None:
    """Each rank had a ``GradScaler`` of its own, and gradients of different scales were averaged after an overflow.

    All ranks skipped the step, but those without the expert that overflowed kept their scale.
    """
    for scales in ranks(2).run(overflowing):
        assert scales == [2.0**16, 2.0**15, 2.0**15]


def poisoned(rank: int, world_size: int, *, kind: str, stage: int, mode: str) -> Any:
    """Put an infinity into the gradient of an expert that only rank 0 has."""
    engine = make_engine(kind, 2, rank, stage, params={"nonfinite_grad": mode})
    training.run_step(engine, 0, rank, world_size, 1)
    before = training.full_masters(engine)

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        return grad.index_fill(0, torch.tensor([1]), float("inf"))

    def listen(module: Any, _: Any) -> None:
        module.w2.register_hook(spoil)  # at ZeRO 3 it is whole inside the forward pass only

    if rank == 0 and kind == "moe":
        first_expert(engine).register_hook(spoil)
    elif rank == 0:
        engine.module.model.layers[0].mlp.experts.register_forward_pre_hook(listen)
    said = training.refusal(
        lambda: training.run_step(engine, 1, rank, world_size, 1), deepspeed_muon.NumericalError
    )
    after = training.full_masters(engine)
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    return {"said": said, "moved": moved, "skipped": engine.skipped_steps}


@pytest.mark.parametrize(
    ("kind", "stage", "mode"),
    [
        ("moe", 0, "skip"),
        ("moe", 0, "error"),
        *each_value(
            ("autoep", *case) for case in [(3, "skip"), (2, "error"), (0, "skip"), (1, "skip"), (3, "error")]
        ),
    ],
)
def test_an_infinity_in_one_expert_stops_all_ranks(ranks: Any, kind: str, stage: int, mode: str) -> None:
    for result in ranks(2).run(poisoned, kind=kind, stage=stage, mode=mode, timeout=60):
        assert not result["moved"]
        assert ("not finite" in result["said"] or "non-finite" in result["said"]) == (mode == "error")
        assert mode == "error" or result["skipped"] == 1


def resumed(
    rank: int, world_size: int, *, kind: str, stage: int, folder: str, phase: str, **settings: Any
) -> Any:
    engine = make_engine(kind, 2, rank, stage, clipping=0.5, **settings)
    return training.train_all_or_rest(engine, rank, world_size, folder=folder, phase=phase)


@pytest.mark.parametrize(
    ("kind", "stage", "settings"),
    [
        full("moe", 1, {}),
        ("moe", 2, {}),
        full("autoep", 1, {}),
        full("autoep", 2, {}),
        ("autoep", 2, {"frozen": "down_proj"}),
        ("autoep", 3, {}),
        full("autoep", 1, {"precision": "bf16", "extra": FP32_SUMS}),
        full("autoep", 2, {"precision": "bf16", "zero": OFFLOAD}),
        full("autoep", 3, {"precision": "bf16"}),
        full("autoep", 3, {"zero_init": True}),
    ],
)
def test_resume_is_bit_identical(
    ranks: Any, tmp_path: Path, kind: str, stage: int, settings: dict[str, Any]
) -> None:
    arguments = {"kind": kind, "stage": stage, "folder": str(tmp_path), **settings}
    uninterrupted, rest = (ranks(4).run(resumed, phase=phase, **arguments) for phase in ("whole", "rest"))
    for first, second in zip(uninterrupted, rest, strict=True):
        training.assert_same_bits(second, first)


@pytest.mark.parametrize(("stage", "ep_size"), [(0, 2), full(1, 2), full(2, 1)])
def test_int8_momentum(ranks: Any, stage: int, ep_size: int) -> None:
    params = {"momentum_dtype": "int8"}
    results = ranks(4).run(train, kind="moe", ep_size=ep_size, stage=stage, params=params)
    start, end, _ = reference("moe", 4, 0.0, int8_cuts=cuts_in(*results))
    for result in results:
        errors = sorted(relative(value, end[name], start[name]) for name, value in result["params"].items())
        # See test_precision: some scales and some codes are rounded to the other side.
        within(errors[len(errors) // 2], 1e-4, "median of paths")
        within(errors[-1], 3e-2, "path")


@pytest.mark.parametrize(
    ("kind", "stage", "variant"),
    [
        *each_value(product(["moe"], (1, 0), (name for name in VARIANTS if VARIANTS[name].state))),
        *(full("autoep", stage, "normuon") for stage in (1, 3)),
    ],
)
def test_variants_of_experts(ranks: Any, kind: str, stage: int, variant: str) -> None:
    """What a variant keeps of an expert lies and travels among the ranks that share it."""
    results = ranks(4).run(train, kind=kind, ep_size=2, stage=stage, params={"variant": variant})
    compare(results, kind, 4, 0.0, variant=variant)


def count_a_step(rank: int, world_size: int, *, ep_size: int, stage: int) -> dict[str, Any]:
    """Train two steps; return what the second one computed and sent, beside what the plan says of the whole model."""
    engine = make_engine(
        "autoep", ep_size, rank, stage, params={"ns_backend": "torch", "ns_method": "standard"}
    )
    parameters = route_parameters(list(model_parameters_by_name(autoep_models.build_plain()).values()))
    counts = count_second_step(engine, rank, world_size, stage, parameters, expert_parallel=ep_size)
    return {key: counts[key] for key in ("flops", "exchange")}


@pytest.mark.parametrize(("stage", "ep_size"), [(3, 2), (1, 4), full(2, 2)])
def test_the_plan_is_carried_out(ranks: Any, stage: int, ep_size: int) -> None:
    for result in ranks(4).run(count_a_step, stage=stage, ep_size=ep_size):
        for key, (really, predicted) in result.items():
            assert really == predicted, (key, result)


def sampled(rank: int, world_size: int, *, stage: int) -> Any:
    """Train with samples of health in every step; return the report."""
    engine = make_engine("autoep", 2, rank, stage, params={"health": 1})
    deepspeed_muon.muon_optimizer(engine).recorder.matrices = 100
    training.train_steps(engine, 2, rank, world_size)
    return deepspeed_muon.health(engine)


def test_health_of_all_experts(ranks: Any) -> None:
    for health in ranks(2).run(sampled, stage=2):
        assert health["failed"] == 0
        measured = set(health["matrices"])
        assert measured >= AUTOEP_MATRICES | {f"{stack} (rank 1)" for stack in STACKS}


def refused(
    rank: int,
    world_size: int,
    *,
    kind: str,
    stage: int = 2,
    ep_size: int = 2,
    on_last: Any = None,
    **settings: Any,
) -> str:
    """Return the error of starting an engine, whose ``expert_parallel`` section is another on the last rank."""
    if on_last is not None and rank == world_size - 1:
        settings["section"] = on_last
    return training.refusal(lambda: make_engine(kind, ep_size, rank, stage, **settings), Exception)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("moe", {"tensor_size": 2}, ["ConfigError", "tensor parallelism with deepspeed.moe"]),
        ("autoep", {"on_last": {"autoep_size": 1}}, ["RankDisagreementError", '"autoep_size": 1']),
        ("autoep", {"on_last": {"top_k": 99}}, ["RankDisagreementError", "expert_parallel"]),
        ("autoep", {"client": "made"}, ["ConfigError", "pass a callable"]),
        ("autoep", {"ep_size": 3}, ["ValueError", "autoep_size"]),
        ("autoep", {"tensor_size": 2}, ["ConfigError", "AutoEP", "the wrong norm; use stage 3"]),
        ("autoep", {"zero": {"reduce_scatter": False}}, ["AssertionError", "Reduce Scatter"]),
    ],
)
def test_refusals(ranks: Any, kind: str, settings: dict[str, Any], said: list[str]) -> None:
    """On every rank, at once; what DeepSpeed refuses has DeepSpeed's own words."""
    settings = {"ep_size": 1 if kind == "moe" else 2, **settings}
    for text in ranks(2).run(refused, kind=kind, timeout=60, **settings):
        for words in said:
            assert words in text, text


HF_EPS, HF_STEPS = 1e-6, 4


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
    for step in range(HF_STEPS):
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

    return train_reference(model, oracle, world, HF_STEPS, gradients=gradients)


@pytest.mark.parametrize(
    ("family", "stage", "world", "ep_size"),
    usual(
        (
            (family, stage, world, ep_size)
            for family in ("mixtral", "qwen3_moe")
            for stage in (3, 2, 1)
            for world, ep_size in ((2, 2), (4, 2), (4, 4))
        ),
        {},
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
