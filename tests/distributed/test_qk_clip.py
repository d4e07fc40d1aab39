"""QK-clip: logits above the threshold scale the right rows, at every stage and layout, and nothing else changes."""

from __future__ import annotations

import copy
import functools
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor

import deepspeed_muon
from tests.support import pipelines, tensor_parallel, training
from tests.support.attention_models import HEADS, KEY_HEADS, NOPE, ROPE, SCALE, THRESHOLD, WIDTH
from tests.support.comparisons import close, relative, within
from tests.support.contract import backward, compare_norms
from tests.support.engines import ENGINES
from tests.support.models import MATRICES, batch, build
from tests.support.oracle import Oracle, matrices_of
from tests.support.reference_math import reference_clip, reference_clip_latent, reference_max_logits
from tests.support.rounding import limits
from tests.support.thinning import full

CLIP = {"threshold": THRESHOLD, "alpha": 0.25}
STEPS = 3


def clip_reference(kind: str, model: Any, largest: list[float]) -> None:
    """Scale the rows of a float64 model by the oracle."""
    params = dict(model.named_parameters())
    if kind == "latent":
        pairs = [(params["attn.q_b_proj.weight"], params["attn.kv_b_proj.weight"])]
        clip = functools.partial(reference_clip_latent, nope=NOPE, rope=ROPE, **CLIP)
    else:
        if kind == "grouped":
            pairs = [(params["attn.q_proj.weight"], params["attn.k_proj.weight"])]
        else:
            sizes = (HEADS * WIDTH, KEY_HEADS * WIDTH, KEY_HEADS * WIDTH)
            fused = (_rows(params[f"attn.qkv.{kind}"].detach()) for kind in ("weight", "bias"))
            pairs = [rows.split(sizes)[:2] for rows in fused]
        clip = functools.partial(reference_clip, key_heads=KEY_HEADS, **CLIP)
    with torch.no_grad():
        for query, key in pairs:
            for rows, clipped_rows in zip((query, key), clip(query, key, largest), strict=True):
                rows.copy_(clipped_rows)


@functools.lru_cache(maxsize=32)
def reference(kind: str, micro_batches: int, excluded: bool = False) -> tuple[Any, Any, list[float]]:
    """Train in float64 in one process; return start, end and the largest logits of all steps."""
    model = build(kind)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    model = model.double()
    oracle = Oracle(matrices_of(MATRICES[kind] - ({"attn.qkv.weight"} if excluded else set())))
    model.attn.keep = True
    history = []
    for step in range(STEPS):
        model.attn.seen.clear()
        backward(model, step, micro_batches)
        logits = [reference_max_logits(q, k, scale=SCALE) for q, k in model.attn.seen]
        history.append([max(values) for values in zip(*logits, strict=True)])
        oracle.update(model)
        clip_reference(kind, model, history[-1])
    logits = [logit for step in history for logit in step]
    return start, {name: param.detach() for name, param in model.named_parameters()}, logits


def clipped(
    rank: int,
    world_size: int,
    *,
    kind: str,
    stage: int,
    accumulation: int = 1,
    steps: int = STEPS,
    repeat: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Train with QK-clip; report masters, momentum, the weights of the forward pass and what every step saw."""
    params = {"qk_clip": CLIP, **settings.pop("params", {})}
    config = training.ds_config(stage, accumulation=accumulation, params=params, **settings)
    engine = training.make_engine(config, kind)
    optimizer = deepspeed_muon.muon_optimizer(engine)
    before = training.full_masters(engine)
    history, numbers = [], []
    for step in range(steps):
        training.run_step(engine, 0 if repeat else step, rank, world_size, accumulation)
        history.append(
            optimizer.after_step.report.largest["attn"] if optimizer.after_step.report.largest else []
        )
        numbers.append(optimizer.after_step.report.clipped)
        assert engine.module.attn.recorder.largest is None, "a step ends with the recorders empty"
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        seen = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    return {
        "before": before,
        "params": training.full_masters(engine),
        "forward": seen,
        "largest": history,
        "clipped": numbers,
        "skipped": engine.skipped_steps,
    }


@pytest.mark.parametrize(
    ("stage", "world", "accumulation", "kind"),
    [
        full(0, 1, 1, "grouped"),
        (0, 2, 2, "fused_attention"),
        pytest.param(1, 2, 1, "latent", marks=pytest.mark.compat),
        full(1, 4, 1, "grouped"),
        full(2, 2, 2, "grouped"),
        full(2, 4, 1, "fused_attention"),
        pytest.param(3, 2, 1, "latent", marks=pytest.mark.compat),
        (3, 4, 2, "grouped"),
        full(2, 1, 2, "latent"),
        full(3, 3, 1, "fused_attention"),
        full(0, 4, 1, "latent"),
    ],
)
def test_clip_matches_the_reference(ranks: Any, stage: int, world: int, accumulation: int, kind: str) -> None:
    results = ranks(world).run(clipped, kind=kind, stage=stage, accumulation=accumulation)
    compare(results, kind, world * accumulation)


def compare(results: list[dict[str, Any]], kind: str, micro_batches: int, excluded: bool = False) -> None:
    """Check weights and logits against the reference; every step must have had something to clip."""
    start, end, logits = reference(kind, micro_batches, excluded)
    allowed = limits(reference, kind, micro_batches, excluded)
    for name in end:
        error = relative(results[0]["params"][name], end[name], start[name])
        within(error, allowed.paths[name], f"path of {name}")
    for result in results:
        assert min(result["clipped"][0:1]) > 0, "the model was made so that logits are above the threshold"
        compare_norms([logit for step in result["largest"] for logit in step], logits, allowed.norms)


@pytest.mark.parametrize("setting", ["3-sub-groups", "2-offload", "1-overlap-round-robin"])
def test_clip_under_further_settings(ranks: Any, setting: str) -> None:
    compare(ranks(2).run(clipped, kind="grouped", **ENGINES[setting]), "grouped", 2)


def test_rows_of_parameters_that_are_adams(ranks: Any) -> None:
    params = {"exclude": ["attn.qkv.weight"]}
    results = ranks(2).run(clipped, kind="fused_attention", stage=3, params=params)
    compare(results, "fused_attention", 2, excluded=True)


@pytest.mark.parametrize(("world", "stage", "kind"), [(2, 1, "grouped"), full(4, 3, "fused_attention")])
def test_heads_of_tensor_parallel_ranks(ranks: Any, world: int, stage: int, kind: str) -> None:
    """Each of two tensor-parallel ranks has half of the heads; all report those of both."""
    arguments = {
        "style": "sliced",
        "kind": kind,
        "tensor_size": 2,
        "stage": stage,
        "params": {"qk_clip": CLIP},
    }
    results = ranks(world).run(tensor_parallel.train, steps=STEPS, **arguments)
    compare(results, kind, world // 2)


FROZEN = {"muon_lr": 0.0, "adam_lr": 0.0, "weight_decay": 0.0, "wire_dtype": "auto"}


@pytest.mark.parametrize("setting", ["0-bf16", "1-bf16-fp32-sums", "2-bf16-fp32-sums-offload", "3-bf16"])
def test_clip_reaches_masters_and_low_precision(ranks: Any, setting: str) -> None:
    """With rates of zero the clip alone moves the weights: by exactly its factors, in both copies."""
    arguments = {"kind": "grouped", "steps": 2, "repeat": True, "params": FROZEN, **ENGINES[setting]}
    result = ranks(2).run(clipped, **arguments)[0]
    assert result["clipped"][0] > 0
    largest = result["largest"][0]
    before, after = result["before"], result["params"]
    # Two steps: the second clips what the rounding of the first left above the threshold.
    q, k = before["attn.q_proj.weight"], before["attn.k_proj.weight"]
    for values in result["largest"]:
        q, k = reference_clip(q, k, values, key_heads=KEY_HEADS, **CLIP)
    close(after["attn.q_proj.weight"], q, rtol=1e-6, atol=0)
    close(after["attn.k_proj.weight"], k, rtol=1e-6, atol=0)
    for name, weight in result["forward"].items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight.double(), after[name].bfloat16().double()), name
        if name not in ("attn.q_proj.weight", "attn.k_proj.weight"):
            assert torch.equal(after[name], before[name]), name
    # bf16 weights: each factor of a logit is off by up to 2^-9.
    assert max(result["largest"][1]) <= THRESHOLD * (1 + 2**-7) < max(largest)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_that_overflows_clips_nothing(ranks: Any, stage: int) -> None:
    extra = {"fp16": {"initial_scale_power": 40, "hysteresis": 1}}
    result = ranks(2).run(clipped, kind="grouped", stage=stage, precision="fp16", steps=1, extra=extra)[0]
    assert result["skipped"] == 1
    for name, before in result["before"].items():
        assert torch.equal(result["params"][name], before), name


# ------------------------------------------------------------------------------------------------- Hugging Face


def hugging_face_model(kind: str) -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

    common: dict[str, Any] = {
        "vocab_size": 29,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**common, attention_bias=True))
    else:
        latent = {
            "num_key_value_heads": 4,
            "q_lora_rank": 8,
            "kv_lora_rank": 6,
            "qk_nope_head_dim": NOPE,
            "qk_rope_head_dim": ROPE,
            "v_head_dim": 3,
            "first_k_dense_replace": 2,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
        }
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**common, **latent}))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if any(kind in name for kind in ("q_proj", "k_proj", "q_b_proj", "kv_b_proj", "kv_a_proj")):
                param.normal_(std=1.0)
    return model


def captured_logits(model: Any, batches: list[Tensor]) -> list[list[float]]:
    """Return the largest logit of every head of every layer, from queries and keys that a probe has seen."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    logits: dict[int, list[list[float]]] = {}

    def probe(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        values = reference_max_logits(query.detach(), key.detach(), scale=kwargs["scaling"])
        logits.setdefault(module.layer_idx, []).append(values)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)

    AttentionInterface.register("test_probe", probe)
    AttentionMaskInterface.register("test_probe", eager_mask)
    twin = copy.deepcopy(model).train()
    twin.set_attn_implementation("test_probe")
    for tokens in batches:
        twin(input_ids=tokens)
    return [[max(values) for values in zip(*logits[layer], strict=True)] for layer in range(len(logits))]


def hugging_face(rank: int, world_size: int, *, kind: str, stage: int, attention: str) -> dict[str, Any]:
    model = hugging_face_model(kind)
    model.set_attn_implementation(attention)
    # DeepSpeed's 0 keeps the model's own dtype; dropout is zero, so train mode changes nothing else.
    batches = [batch(0, number)[0] for number in range(world_size)]
    expected = captured_logits(model, batches)
    clip = {"threshold": 1.0}
    config = training.ds_config(stage, params={**FROZEN, "wire_dtype": "fp32", "qk_clip": clip})
    engine = training.initialize(model, config)
    before = training.full_masters(engine)
    loss = engine(input_ids=batches[rank], labels=batches[rank]).loss
    engine.backward(loss)
    engine.step()
    with torch.no_grad():
        engine.eval()
        engine(input_ids=batches[rank])
    return {
        "before": before,
        "after": training.full_masters(engine),
        "expected": expected,
        "largest": list(deepspeed_muon.muon_optimizer(engine).after_step.report.largest.values()),
        "implementation": engine.module.config._attn_implementation,
    }


@pytest.mark.parametrize(
    ("kind", "stage", "attention"),
    [("llama", 3, "sdpa"), full("llama", 1, "eager"), full("deepseek", 2, "sdpa"), ("deepseek", 3, "eager")],
)
def test_hugging_face_models(ranks: Any, kind: str, stage: int, attention: str) -> None:
    """Their attention records, and with rates of zero the clip is all that moves the weights."""
    pytest.importorskip("transformers", "4.53", "AttentionMaskInterface came with transformers 4.53")
    result = ranks(2).run(hugging_face, kind=kind, stage=stage, attention=attention, timeout=120)[0]
    assert result["implementation"] == attention
    # fp32 logits of fp32 weights against float64 products of the same queries and keys.
    close(torch.tensor(result["largest"]), torch.tensor(result["expected"]), rtol=1e-5, atol=1e-5)
    assert max(max(layer) for layer in result["expected"]) > 1.0
    before, after = result["before"], dict(result["after"])
    for layer, largest in enumerate(result["expected"]):
        prefix = f"model.layers.{layer}.self_attn."
        settings = {"threshold": 1.0, "alpha": 0.5}
        if kind == "llama":
            names = [(f"{prefix}q_proj.{kind}", f"{prefix}k_proj.{kind}") for kind in ("weight", "bias")]
            clip = functools.partial(reference_clip, key_heads=2, **settings)
        else:
            names = [(f"{prefix}q_b_proj.weight", f"{prefix}kv_b_proj.weight")]
            clip = functools.partial(reference_clip_latent, nope=NOPE, rope=ROPE, **settings)
        for pair in names:
            expected = clip(*(_rows(before[name]) for name in pair), largest)
            for name, rows in zip(pair, expected, strict=True):
                close(_rows(after.pop(name)), rows, rtol=2e-5, atol=1e-7)
    for name, weight in after.items():
        assert torch.equal(weight, before[name]), name


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1)


def as_replicas(rank: int, world_size: int) -> str:
    """Take a step without DeepSpeed, as under DDP; return the error."""
    model = build("grouped")
    optimizer = deepspeed_muon.Muon(model, qk_clip=CLIP)
    model(*batch(0, rank)).backward()
    return training.refusal(optimizer.step, deepspeed_muon.ConfigError)


def test_replicas_without_an_engine_are_refused(ranks: Any) -> None:
    """Each scaled its heads by the logits of its own data, so that the replicas became different models."""
    for error in ranks(2).run(as_replicas):
        assert "start the run with deepspeed.initialize, or unset qk_clip" in error


def on_shared_sequences(rank: int, world_size: int) -> str:
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(2)
    config = training.ds_config(1, params={"qk_clip": CLIP})
    start = lambda: training.initialize(build("grouped"), config, mpu=parallel_state_sp)  # noqa: E731
    try:
        return training.refusal(start, deepspeed_muon.ConfigError)
    finally:
        parallel_state_sp._release_sequence_parallel_groups()


def test_incomplete_heads_or_layers_are_refused(ranks: Any) -> None:
    for message in ranks(2).run(on_shared_sequences):
        assert "qk_clip with sequence parallelism is not supported" in message
    pipeline = {"kind": "toy", "stages": 2, "zero": 1, "precision": "fp32", "params": {"qk_clip": CLIP}}
    for result in ranks(2).run(pipelines.train, **pipeline):
        assert "qk_clip with a pipeline is not supported" in result["error"]
