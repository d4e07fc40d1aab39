"""The pieces of QK-clip on their own: logits in blocks, factors, rows in partitions, recorders, configuration."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed_muon import ConfigError, Muon, MuonConfig, NumericalError, QkRecorder
from deepspeed_muon.plan.placement import flat_placement
from deepspeed_muon.qk_clip import recorder as qk_clip
from deepspeed_muon.qk_clip.clip import clip_factor, head_fragments
from deepspeed_muon.qk_clip.recorder import AttentionHeads, HeadRows, logit_bounds, max_logits
from tests.support.attention_models import THRESHOLD, AttendingToy
from tests.support.comparisons import close
from tests.support.models import batch, build
from tests.support.reference_math import reference_clip, reference_max_logits


@pytest.mark.parametrize("block", [1, 64, 1 << 24])
@pytest.mark.parametrize("causal", [True, False])
def test_logits_in_blocks(monkeypatch: Any, block: int, causal: bool) -> None:
    monkeypatch.setattr(qk_clip, "_BLOCK_NUMEL", block)
    torch.manual_seed(0)
    query, key = torch.randn(2, 6, 7, 5), torch.randn(2, 3, 7, 5)
    logits = max_logits(query, key, scale=0.3, causal=causal)
    expected = reference_max_logits(query, key, scale=0.3, causal=causal)
    close(logits, torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("additive", [False, True])
def test_masks_hide_logits(monkeypatch: Any, additive: bool, per_head: bool) -> None:
    monkeypatch.setattr(qk_clip, "_BLOCK_NUMEL", 50)
    torch.manual_seed(1)
    query, key = torch.randn(2, 4, 5, 3), torch.randn(2, 2, 6, 3)
    mask = torch.rand(2, 4 if per_head else 1, 5, 6) > 0.5
    logits = torch.einsum("bhqd,bhkd->bhqk", query, key.repeat_interleave(2, 1))
    expected = logits.masked_fill(~mask, -math.inf).amax((0, 2, 3))
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    logits = max_logits(query, key, scale=1.0, causal=False, mask=mask)
    close(logits, expected, rtol=1e-6, atol=1e-6)


def test_half_precision_does_not_overflow() -> None:
    query = torch.full((1, 1, 2, 64), 40.0, dtype=torch.float16)
    assert float(max_logits(query, query, scale=0.125)) == pytest.approx(64 * 1600 * 0.125)


def test_factors() -> None:
    settings = {"threshold": 10.0, "alpha": 0.25}
    assert clip_factor(9.0, role="query", **settings) == 1.0
    for quiet in (-math.inf, math.inf, math.nan, -50.0):
        assert clip_factor(quiet, role="key", **settings) == 1.0
    assert clip_factor(40.0, role="query", **settings) == pytest.approx(0.25**0.25)
    assert clip_factor(40.0, role="key", **settings) == pytest.approx(0.25**0.75)
    assert clip_factor(40.0, role="rotated_query", **settings) == pytest.approx(0.25)


def test_rows_of_heads_in_partitions() -> None:
    """Two heads of 2 rows of 3 elements, from row 1 on, every 3 rows, over ranks that hold 8 elements each."""
    layer = AttentionHeads("a", 4, (HeadRows("w", "key", 2, 2, 3, 1, 3),))
    placement = flat_placement(2, 24, 8)
    marked = torch.zeros(24, dtype=torch.int)
    for rank in range(4):
        fragment = placement.fragment_on(rank)
        for run in head_fragments([layer], {"w": (7, fragment)}, ["none"]):
            assert run.partition == 7 and fragment is not None
            begin = fragment.matrix_offset + run.offset - fragment.partition_offset
            marked[begin : begin + run.numel] = run.stop // 2
    expected = torch.tensor([0, 1, 1, 0, 2, 2, 0, 0]).repeat_interleave(3)
    assert torch.equal(marked, expected.int())


def test_recorders_keep_the_largest() -> None:
    recorder = QkRecorder.separate(heads=2, head_dim=3)
    recorder.record_maxima(torch.tensor([1.0, 5.0]))
    recorder.record_logits(torch.tensor([[[[2.0, 0.0]], [[1.0, 4.0]]]]))
    assert recorder.largest is not None and recorder.largest.tolist() == [2.0, 5.0]
    recorder.clear()
    assert recorder.largest is None
    with pytest.raises(ConfigError, match="2 heads got queries"):
        recorder.record(torch.zeros(1, 3, 4, 5), torch.zeros(1, 3, 4, 5), scale=1.0)
    with pytest.raises(ConfigError, match="do not fit 6 query heads"):
        QkRecorder.separate(heads=6, key_heads=4, head_dim=2)


def test_without_deepspeed() -> None:
    """A single step with rates of zero scales the rows as the reference does."""
    torch.manual_seed(0)
    model = AttendingToy()
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = Muon(model, muon_lr=0.0, adam_lr=0.0, qk_clip={"threshold": THRESHOLD})
    model(*batch(0, 0)).backward()
    optimizer.step()
    report = optimizer.after_step.report  # type: ignore[union-attr]
    assert report.clipped > 0
    q, k = reference_clip(
        start["attn.q_proj.weight"],
        start["attn.k_proj.weight"],
        report.largest["attn"],
        key_heads=2,
        threshold=THRESHOLD,
        alpha=0.5,
    )
    close(model.attn.q_proj.weight.double(), q, rtol=1e-6, atol=0)
    close(model.attn.k_proj.weight.double(), k, rtol=1e-6, atol=0)
    model.eval()
    with torch.no_grad():
        model(*batch(0, 0))
    assert model.attn.recorder.largest is None, "nothing is recorded outside of training"


def test_a_step_that_raises_leaves_no_logits() -> None:
    """The next step clipped by the logits of the one that a program had caught, and never by its own."""
    torch.manual_seed(0)
    model = AttendingToy()
    optimizer = Muon(model, nonfinite_grad="error", qk_clip={"threshold": THRESHOLD})
    model(*batch(0, 0)).backward()
    model.attn.q_proj.weight.grad.fill_(float("inf"))
    with pytest.raises(NumericalError):
        optimizer.step()
    assert model.attn.recorder.largest is None
    optimizer.zero_grad()
    with torch.no_grad():
        model.attn.q_proj.weight.zero_()  # all logits of the next step are 0
    model(*batch(1, 0)).backward()
    optimizer.step()
    assert set(optimizer.after_step.report.largest["attn"]) == {0.0}  # type: ignore[union-attr]


def test_a_subclass_in_another_file_computes_eager_attention() -> None:
    """Transformers' eager function was looked for in the file of the subclass: a KeyError in the first forward."""
    pytest.importorskip("transformers", "4.53", "AttentionMaskInterface came with transformers 4.53")
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaAttention

    class CustomAttention(LlamaAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=29, attn_implementation="eager", **sizes))
    model.model.layers[0].self_attn = CustomAttention(model.config, 0)
    optimizer = Muon(model, qk_clip={})
    optimizer._attach_step_hook(model)
    tokens = torch.arange(12).view(2, 6)
    model.train()(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert len(optimizer.after_step.report.largest) == 1  # type: ignore[union-attr]


def test_configuration() -> None:
    assert MuonConfig.from_params({"qk_clip": {}}).qk_clip.threshold == 100.0  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"optimizer\.params\.qk_clip"):
        MuonConfig.from_params({"qk_clip": {"alpha": 2}})
    model = nn.Linear(4, 4)
    optimizer = Muon(list(model.named_parameters()), qk_clip={})
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ConfigError, match="pass model="):
        optimizer.step()


def test_wrong_rows_are_errors() -> None:
    model = nn.Module()
    model.inner = nn.Module()
    model.inner.q_proj, model.inner.k_proj = nn.Linear(4, 6), nn.Linear(4, 8)
    model.inner.recorder = QkRecorder.separate(heads=2, head_dim=4)
    optimizer = Muon(model, qk_clip={})
    with pytest.raises(ConfigError, match=r"inner\.q_proj\.weight has 6 rows, not the 8 of 2 heads"):
        optimizer.step()
    model.inner.recorder = QkRecorder.separate(heads=2, head_dim=3, key="keys")
    with pytest.raises(ConfigError, match=r"has no keys\.weight"):
        Muon(model, qk_clip={}).step()


def test_bounds_hold() -> None:
    torch.manual_seed(5)
    query, key = torch.randn(3, 6, 7, 5), torch.randn(3, 2, 7, 5)
    bounds = logit_bounds(query, key, scale=0.4)
    largest = max_logits(query, key, scale=0.4, causal=False)
    assert bounds.shape == (6,) and bool((bounds >= largest).all())
    # A query and a key along one axis meet the bound.
    assert float(logit_bounds(query[:1, :1, :1], query[:1, :1, :1] * 2, scale=0.5)) == pytest.approx(
        float(query[0, 0, 0].square().sum())
    )


def test_quiet_layers_are_only_watched(caplog: Any) -> None:
    """Logits are computed where a bound comes near the threshold; a jump beyond it is said and clipped a step later."""
    torch.manual_seed(0)
    model = AttendingToy()
    optimizer = Muon(model, muon_lr=0.0, adam_lr=0.0, qk_clip={"threshold": 1e4})

    def step() -> Any:
        model(*batch(0, 0)).backward()
        optimizer.step()
        return optimizer.after_step.report  # type: ignore[union-attr]

    first = step()
    assert max(first.largest["attn"]) > 0 and not first.bounds
    second = step()
    assert max(second.largest["attn"]) == -math.inf
    assert all(b >= s for b, s in zip(second.bounds["attn"], first.largest["attn"], strict=True))
    with torch.no_grad():
        model.attn.q_proj.weight.mul_(1e6)
    before = model.attn.q_proj.weight.detach().clone()
    third = step()
    assert max(third.bounds["attn"]) > 1e4 and third.clipped == 0
    assert torch.equal(model.attn.q_proj.weight, before)
    assert "may have jumped" in caplog.text
    fourth = step()
    assert fourth.clipped > 0 and not fourth.bounds
    assert not torch.equal(model.attn.q_proj.weight, before)


SIZES: dict[str, Any] = {
    "vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LARGER: dict[str, Any] = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 2}
REFUSED = {
    "unregistered": ("Llama", LARGER, "no function for attn_implementation 'fast' of LlamaAttention; register it"),
    "capped": ("Gemma2", {**LARGER, "head_dim": 4}, "has attn_logit_softcapping, which bounds the logits already"),
    "fused": ("Phi3", LARGER, "produces queries and keys in qkv_proj; say where their rows are"),
    "gpt2": ("GPT2", SIZES, "produces queries and keys in c_attn; say where their rows are"),
    "qwen3": ("Qwen3", {**LARGER, "head_dim": 4}, "normalises queries or keys"),
    "hunyuan": ("HunYuanDenseV1", {**LARGER, "head_dim": 4}, "normalises queries or keys"),  # query_layernorm
    "phi": ("Phi", {**LARGER, "qk_layernorm": True}, "normalises queries or keys"),
    "llama4": ("Llama4", {**LARGER, "head_dim": 4, "num_local_experts": 2}, "normalises queries or keys"),  # qk_norm
    "parametrized": ("Llama", LARGER, "q_proj computes its weight, as adapters"),
    "latent": ("AXK2", LARGER, "has no q_proj.weight"),
    "frozen": ("Llama", LARGER, "is not trained by this optimizer"),
}  # fmt: skip


@pytest.mark.parametrize("fault", list(REFUSED))
def test_hugging_face_models_that_cannot_be_clipped_are_refused(fault: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind, sizes, text = REFUSED[fault]
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = getattr(transformers, "Llama4TextConfig" if kind == "Llama4" else f"{kind}Config")(**sizes)
    model = getattr(transformers, name)(config)
    if fault == "unregistered":
        model.config._attn_implementation = "fast"
    if fault == "parametrized":
        nn.utils.parametrizations.weight_norm(model.model.layers[0].self_attn.q_proj)
    if fault == "frozen":
        model.model.layers[0].self_attn.q_proj.requires_grad_(False)
    optimizer = Muon(model, qk_clip={})
    with pytest.raises(ConfigError, match=text):
        optimizer._attach_step_hook(model)


PADDED = {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])}
PACKED = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1]])}


@pytest.mark.parametrize("inputs", [PADDED, PACKED], ids=["padded", "packed"])
@pytest.mark.parametrize("masks", [None, "flash_attention_2", "flex_attention"])
def test_every_attention_function_records(masks: str | None, inputs: dict[str, Tensor]) -> None:
    """All but sdpa and eager were refused, though logits are computed from queries and keys anyway.

    A function of another name sees the logits of eager attention within a window of 3: with a mask of the kind of flash
    attention (padding alone), of FlexAttention (a BlockMask), or with none, as programs register functions.
    """
    transformers = pytest.importorskip("transformers", "4.53", "transformers 4.53 has AttentionMaskInterface")
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    table = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    # transformers loads packages for names that contain "flash".
    name, called = f"test_{str(masks)[:3]}", []

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        called.append(mask)
        return table["sdpa"](module, query, key, value, None, scaling=kwargs["scaling"])

    transformers.AttentionInterface.register(name, attention)
    if masks is not None:
        transformers.AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[masks])
    tokens = torch.arange(12).view(2, 6)[: 1 if "position_ids" in inputs else 2]
    recorded = {}
    for implementation in ("eager", name):
        torch.manual_seed(3)
        config = transformers.MistralConfig(**LARGER, sliding_window=3, attn_implementation=implementation)
        model = transformers.MistralForCausalLM(config)
        layer = model.model.layers[0].self_attn
        with torch.no_grad():
            for projection in (layer.q_proj, layer.k_proj):
                projection.weight.normal_()
        optimizer = Muon(model, qk_clip={"threshold": 1.0})
        optimizer._attach_step_hook(model)
        # Without a mask of its kind a function is not told of padding.
        accepted = {} if masks is None and "attention_mask" in inputs else inputs
        with torch.compiler.set_stance(
            "force_eager"
        ):  # transformers compiles the function that makes a BlockMask
            model.train()(input_ids=tokens, labels=tokens, use_cache=False, **accepted).loss.backward()
        optimizer.step()
        recorded[implementation] = optimizer.after_step.report.largest  # type: ignore[union-attr]
        assert model.config._attn_implementation == implementation
    assert len(called) == 1
    (expected,), (largest,) = (values.values() for values in recorded.values())
    close(torch.tensor(largest), torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_a_model_without_attention_is_refused() -> None:
    model = build("toy")
    with pytest.raises(ConfigError, match="no attention layer was found"):
        Muon(model, qk_clip={})._attach_step_hook(model)


def test_recorders_go_with_the_last_optimizer() -> None:
    """They stayed in the layers, and computed logits that nobody read."""
    transformers = pytest.importorskip("transformers", "4.53", "transformers 4.53 has AttentionMaskInterface")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LARGER))
    before = model.config._attn_implementation
    layer = model.model.layers[0].self_attn
    before_restore = dict(vars(layer))
    optimizers = [Muon(model, qk_clip={}) for _ in range(2)]
    for optimizer in optimizers:
        optimizer._attach_step_hook(model)
    del optimizer
    while optimizers:
        assert vars(layer) != before_restore
        optimizers.pop()
    assert model.config._attn_implementation == before and vars(layer) == before_restore


def test_projections_stored_as_input_x_output_are_refused() -> None:
    model = build("fused")
    model.self_attn.qk = QkRecorder.fused("c_attn", heads=4, key_heads=4, head_dim=4)
    with pytest.raises(
        ConfigError, match=r"self_attn\.c_attn is a Conv1D, whose weight is stored as input x output"
    ):
        Muon(model, qk_clip={})._attach_step_hook(model)
