"""How weights divide into matrices: sizes, heads, stored transposes, and every way in which it can be asked wrongly."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_muon.errors import RoutingError
from deepspeed_muon.math.coefficients import resolve_schedule
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.reference import newton_schulz
from deepspeed_muon.routing.route import Route
from deepspeed_muon.routing.shapes import split_output
from tests.support.comparisons import close
from tests.support.models import build


def routes(model: nn.Module, **settings: Any) -> dict[str, Route]:
    return {route.name: route for route in Muon(model, **settings).routes}


class Named(nn.ModuleDict):
    """Linear layers with names, under a configuration, in no order: none is the last."""

    def __init__(self, config: Any = None, **layers: tuple[int, int]) -> None:
        super().__init__()
        if config is not None:
            self.config = SimpleNamespace(**config)
        for name, (rows, cols) in layers.items():
            setattr(self, name, nn.Linear(cols, rows, bias=False))


LLAMA = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
LATENT = {
    "num_attention_heads": 4,
    "hidden_size": 32,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
}


@pytest.mark.parametrize(
    ("config", "leaf", "rows", "blocks"),
    [
        (LLAMA, "q_proj", 32, (8,) * 4),
        (LLAMA, "k_proj", 16, (8,) * 2),
        (LLAMA, "v_proj", 16, (8,) * 2),
        (LLAMA, "o_proj", 32, ()),
        (LLAMA, "up_proj", 32, ()),
        ({**LLAMA, "head_dim": 16}, "q_proj", 64, (16,) * 4),
        ({"n_head": 2, "n_embd": 8}, "query", 8, (4, 4)),
        ({"num_heads": 2, "d_model": 32, "d_kv": 6}, "q", 12, (6, 6)),
        (LATENT, "q_b_proj", 32, (8,) * 4),
        (LATENT, "kv_b_proj", 44, (11,) * 4),
        (LATENT, "kv_a_proj_with_mqa", 32, ()),
        ({"num_attention_heads": 4, "text_config": None, "hidden_size": 33}, "q_proj", 33, ()),
    ],
)
def test_heads_are_those_of_the_config(
    config: dict[str, Any], leaf: str, rows: int, blocks: tuple[int, ...]
) -> None:
    model = Named(config, **{leaf: (rows, 7)})
    if not blocks:
        model.extra = Named(LLAMA, q_proj=(32, 7))  # so that some heads are found
    assert routes(model, matrices={"*": {"heads": "config"}})[f"{leaf}.weight"].row_blocks == blocks
    assert routes(model)[f"{leaf}.weight"].row_blocks == ()


def test_a_size_that_does_not_fit_is_said_so() -> None:
    model = Named(LLAMA, q_proj=(32, 7), k_proj=(24, 7))
    routed = routes(model, matrices={"*": {"heads": "config"}})
    assert routed["k_proj.weight"].row_blocks == ()
    assert "2 heads of 8 are not its 24 outputs" in routed["k_proj.weight"].reason


def test_the_nearest_config_counts() -> None:
    """The vision tower has another head count than the language model around it."""
    model = Named(LLAMA, q_proj=(32, 7))
    model.vision = Named({"num_attention_heads": 8, "hidden_size": 32}, q_proj=(32, 7))
    routed = routes(model, matrices={"*": {"heads": "config"}})
    assert routed["q_proj.weight"].row_blocks == (8,) * 4
    assert routed["vision.q_proj.weight"].row_blocks == (4,) * 8
    inner = Named()
    inner.config = SimpleNamespace(text_config=SimpleNamespace(**LLAMA))
    inner.q_proj = nn.Linear(7, 32, bias=False)
    assert routes(inner, matrices={"*": {"heads": "config"}})["q_proj.weight"].row_blocks == (8,) * 4


def test_the_explicit_key_comes_first() -> None:
    model = Named(LLAMA, q_proj=(32, 7), odd=(30, 7))
    routed = routes(
        model, matrices={"q_proj.*": {"heads": 8}, "odd.*": {"heads": 3}, "*": {"heads": "config"}}
    )
    assert routed["q_proj.weight"].row_blocks == (4,) * 8
    assert routed["odd.weight"].row_blocks == (10,) * 3
    assert routes(model, matrices={"odd.*": {"heads": 3}})["q_proj.weight"].row_blocks == ()


def test_splits() -> None:
    model = Named(LLAMA, qkv_proj=(64, 7), gate_up_proj=(10, 7), other=(9, 7))

    def of(name: str, matrices: dict[str, Any], **settings: Any) -> Route:
        return routes(model, matrices=matrices, **settings)[f"{name}.weight"]

    patterns = {"gate_up_proj.*": {"split": [1, 9]}, "qkv_proj.*": {"split": "qkv"}}
    assert of("gate_up_proj", patterns).row_blocks == (1, 9)
    assert of("qkv_proj", patterns).row_blocks == (32, 16, 16)
    first = {"qkv_proj.*": {"split": "qkv"}, "*.weight": {"split": "gate_up"}, **patterns}
    matched = of("gate_up_proj", first, exclude=["other.weight"])
    assert matched.row_blocks == (5, 5), "the first pattern that matches"
    heads = of("qkv_proj", {"*": {"heads": "config"}, "qkv_proj.*": {"split": [32, 16, 16]}})
    assert heads.row_blocks == (8,) * 8, "sizes that are those of the config have its heads too"
    joined = of("qkv_proj", {"qkv_proj.*": {"split": "qkv", "heads": [4, 2, 1]}})
    assert joined.row_blocks == (8, 8, 8, 8, 8, 8, 16) and not joined.col_blocks
    assert joined.reason.endswith("split into 32 + 16 + 16, 4 + 2 + 1 heads separately")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"qkv_proj.*": {"split": [32, 16]}}, r"64 outputs, which split \[32, 16\] does not divide"),
        ({"odd.*": {"split": "gate_up"}}, "9 outputs, which split 'gate_up' does not divide"),
        ({"none.*": {"split": "qkv"}}, "matrices: pattern 'none.*' matches no parameter that goes to Muon"),
        ({"query_key_value.*": {"split": "qkv"}}, "often stored head by head"),
        ({"odd.*": {"split": "qkv"}}, "does not divide"),
        ({"odd.*": {"heads": 2}}, "matrices: odd.weight has 9 outputs, not divisible by 2 heads"),
        ({"odd.*": {"heads": [3, 3]}}, "odd.weight has 1 parts and"),
        ({"re:(": {"heads": 3}}, "matrices: 're:\\(' is not a regular expression"),
        ({"nothing": {"transposed": True}}, "matrices: pattern 'nothing' matches no parameter"),
    ],
)
def test_indivisible_sizes(settings: dict[str, Any], said: str) -> None:
    model = Named(LLAMA, qkv_proj=(64, 7), query_key_value=(64, 7), odd=(9, 7))
    with pytest.raises(RoutingError, match=said):
        Muon(model, matrices=settings)


def test_words_that_need_a_config() -> None:
    with pytest.raises(RoutingError, match="write the sizes of query, key and value instead"):
        Muon(Named(qkv_proj=(64, 7)), matrices={"qkv_proj.*": {"split": "qkv"}})
    model = Named(LLAMA, up_proj=(64, 7), o_proj=(64, 7))
    with pytest.raises(RoutingError, match="no attention projection was recognised"):
        Muon(model, matrices={"o_proj.*": {"heads": 2}, "up_proj.*": {"heads": "config"}})
    with pytest.raises(RoutingError, match="leave it whole"):
        split_output("gate_up", name="w", output=4, attention=None, interleaved=True)


def test_stored_transposes() -> None:
    """Which weights count as input x output, and what their blocks and scales are."""
    routed = routes(build("fused"))
    turned = {"self_attn.c_attn.weight", "turned.gate_up_proj", "turned.down_proj"}
    assert {name for name, route in routed.items() if route.transposed} == turned
    assert routed["experts.gate_up_proj"].row_blocks == (12,) * 3
    assert routed["turned.gate_up_proj"].row_blocks == (16,) * 3
    assert routed["experts.gate_up_proj_bias"].algorithm == "adamw"
    asked = routes(Named(a=(4, 8), b=(4, 8)), matrices={"a.*": {"split": [6, 2], "transposed": True}})
    assert asked["a.weight"].transposed and asked["a.weight"].col_blocks == (6, 2)
    assert not asked["b.weight"].transposed
    denied = routes(build("fused"), matrices={"self_attn.c_attn.weight": {"transposed": False}})
    assert not denied["self_attn.c_attn.weight"].transposed


@pytest.mark.parametrize("transposed", [False, True])
def test_the_scale_is_that_of_the_layer(transposed: bool) -> None:
    """A layer and the same layer stored as its transpose take the same step."""
    torch.manual_seed(0)
    gradient = torch.randn(12, 3)
    stored = gradient.T.contiguous() if transposed else gradient
    model = Named(a=tuple(stored.shape))
    start = model.a.weight.detach().clone()
    settings = {"momentum": 0.0, "nesterov": False, "ns_dtype": "fp32"}
    optimizer = Muon(model, muon_lr=0.1, matrices={"a.*": {"transposed": transposed}}, **settings)
    model.a.weight.grad = stored.clone()
    optimizer.step()
    moved = (model.a.weight.detach() - start).T if transposed else model.a.weight.detach() - start
    # sqrt(12 / 3) = 2; fp32 rounding of the weight (6e-8) against a step of 0.2.
    close(moved.double(), -0.2 * newton_schulz(gradient, resolve_schedule("quintic")), rtol=0, atol=2e-6)


def test_hugging_face_models() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    common = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, **sizes, **tokens}
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=50, bos_token_id=1, eos_token_id=2)
    )
    routed = routes(gpt2, matrices={"*.c_attn.weight": {"split": "qkv", "heads": "config"}})
    attention = routed["transformer.h.0.attn.c_attn.weight"]
    assert attention.transposed and attention.col_blocks == (8,) * 12 and attention.row_blocks == ()
    assert routed["transformer.h.0.mlp.c_fc.weight"].transposed
    phi = transformers.Phi3ForCausalLM(transformers.Phi3Config(**common))
    routed = routes(
        phi, matrices={"*.qkv_proj.weight": {"split": "qkv"}, "*.gate_up_proj.weight": {"split": "gate_up"}}
    )
    assert routed["model.layers.0.self_attn.qkv_proj.weight"].row_blocks == (32, 16, 16)
    oss = transformers.GptOssForCausalLM(transformers.GptOssConfig(num_local_experts=4, **common))
    experts = routes(oss, matrices={"*": {"heads": "config"}})["model.layers.0.mlp.experts.gate_up_proj"]
    assert experts.transposed and experts.row_blocks == (32,) * 4
    with pytest.raises(RoutingError, match="parts are interleaved"):
        Muon(oss, matrices={"*.gate_up_proj": {"split": "gate_up"}})
    mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=4, **common))
    experts = routes(mixtral, matrices={"*.gate_up_proj": {"split": "gate_up"}})[
        "model.layers.0.mlp.experts.gate_up_proj"
    ]
    assert experts.row_blocks == (48,) * 8 and not experts.transposed


def test_heads_of_linear_attention() -> None:
    """The layer says its heads: the values have others than the keys, and none are those of the configuration."""
    layer = nn.ModuleDict()
    layer.num_k_heads, layer.head_k_dim, layer.num_v_heads, layer.head_v_dim = 2, 4, 6, 3
    layer.q_proj, layer.k_proj, layer.v_proj = (nn.Linear(16, size, bias=False) for size in (8, 8, 18))
    layer.in_proj_qkv, layer.o_proj = nn.Linear(16, 34, bias=False), nn.Linear(18, 16, bias=False)
    model = nn.ModuleDict()
    model.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=4, head_dim=2)
    model.linear_attn, model.q_proj = layer, nn.Linear(16, 8, bias=False)
    matrices = {"*": {"heads": "config"}, "*.in_proj_qkv.weight": {"split": "qkv"}}
    routed = {name: route.row_blocks for name, route in routes(model, matrices=matrices).items()}
    assert routed["linear_attn.q_proj.weight"] == routed["linear_attn.k_proj.weight"] == (4, 4)
    assert routed["linear_attn.v_proj.weight"] == (3,) * 6
    assert routed["linear_attn.in_proj_qkv.weight"] == (4,) * 4 + (3,) * 6
    assert routed["linear_attn.o_proj.weight"] in ((), (16,)) and routed["q_proj.weight"] == (2,) * 4
    layer.in_proj_qkvz = nn.Linear(16, 52, bias=False)
    with pytest.raises(RoutingError, match="head by head"):
        Muon(model, matrices={"*.in_proj_qkvz.weight": {"split": "qkv"}})


@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid"])
def test_heads_of_linear_attention_in_transformers(family: str) -> None:
    """Qwen3.5's fused projection and OLMo-Hybrid's separate ones, whose heads the classes name alike."""
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    (cls,) = (
        attribute
        for name, attribute in vars(module).items()
        if name.endswith("GatedDeltaNet") and "RMS" not in name
    )
    source = inspect.getsource(cls.__init__)
    for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"):
        assert f"self.{name} = " in source
