"""What types, shapes and positions of modules decide, and which routes are guesses."""

from __future__ import annotations

import copy
import itertools
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from deepspeed_muon.optimizer import Muon
from deepspeed_muon.routing.parameters import model_parameters_by_name
from deepspeed_muon.routing.route import Route, format_routes, rows_of, summarize_routes
from deepspeed_muon.routing.rules import route_parameters
from tests.support.structures import Tree

Linear = nn.Linear


class RMSNorm(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def routes(model: nn.Module, **settings: Any) -> dict[str, Route]:
    return {route.name: route for route in Muon(model, **settings).routes}


def algorithms(model: nn.Module) -> dict[str, str]:
    members = list(model_parameters_by_name(model).values())
    return {route.name: route.algorithm for route in route_parameters(members) if len(route.shape) > 1}


def blocks() -> nn.ModuleList:
    return nn.ModuleList(Tree(fc1=Linear(64, 256), fc2=Linear(256, 64)) for _ in range(2))


def test_gains_of_norms_by_type() -> None:
    model = Tree(ln=nn.LayerNorm((4, 16)), rms=nn.RMSNorm((4, 16)), q_norm=RMSNorm(4, 16), fc=Linear(64, 64))
    result = routes(model)
    for name in ("ln.weight", "rms.weight", "q_norm.weight"):
        assert (result[name].algorithm, result[name].rule, result[name].certain) == ("adamw", "norm", True)
    assert result["fc.weight"].algorithm == "muon"


def test_a_bare_parameter_is_a_weight_by_its_bias() -> None:
    bare = Tree(w1=parameter(6, 4), b1=parameter(4), fused_weight=parameter(6, 4), table=parameter(6, 4))
    result = routes(Tree(bare=bare, fc=Linear(64, 64)))
    expected = {
        "w1": ("muon", True, True),
        "fused_weight": ("adamw", False, False),
        "table": ("adamw", False, False),  # a tied vocabulary, a codebook, a position: a pattern says if not
    }
    for name, (algorithm, transposed, certain) in expected.items():
        route = result[f"bare.{name}"]
        assert (route.algorithm, route.transposed, route.certain) == (algorithm, transposed, certain), route
    assert "'include'" in result["bare.table"].reason
    assert routes(Tree(bare=bare), include=["bare.table"])["bare.table"].algorithm == "muon"


def test_a_last_layer_of_bare_parameters_is_a_head() -> None:
    model = Tree(fc=Linear(32, 64), mlp=Tree(w_out=parameter(64, 7), b_out=parameter(7)))
    route = routes(model)["mlp.w_out"]
    assert (route.algorithm, route.reason) == ("adamw", "output head: the last layer")


@pytest.mark.parametrize(
    "name", ["scale_shift_table", "r_k", "A_imag", "memory_tokens", "spatial_pos", "ctx", "cls"]
)
def test_bare_parameters_are_tables_unless_something_says_more(name: str) -> None:
    model = Tree(blocks=nn.ModuleList([Tree(**{name: parameter(6, 64)})]), fc=Linear(64, 64))
    route = routes(model)[f"blocks.0.{name}"]
    assert (route.algorithm, route.certain) == ("adamw", False) and "a bare parameter" in route.reason


def test_weights_of_torchs_modules() -> None:
    model = Tree(attention=nn.MultiheadAttention(16, 2), recurrent=nn.LSTM(16, 8), fc=Linear(64, 64))
    result = routes(model)
    for name in ("attention.in_proj_weight", "recurrent.weight_ih_l0", "recurrent.weight_hh_l0"):
        assert (result[name].algorithm, result[name].certain) == ("muon", True)


@pytest.mark.parametrize("wrap", [lambda model: model, torch.compile, nn.DataParallel, lambda m: Tree(net=m)])
def test_wrappers_hide_nothing(wrap: Any) -> None:
    model = nn.Sequential(nn.Embedding(256, 64), Linear(64, 64), nn.GELU(), Linear(64, 4))
    assert list(algorithms(wrap(model)).values()) == ["adamw", "muon", "adamw"]


def test_parametrized_modules_are_routed_as_before() -> None:
    model = Tree(
        embed=parametrizations.weight_norm(nn.Embedding(1000, 64)),
        hidden=parametrizations.spectral_norm(Linear(64, 64)),
        conv=parametrizations.weight_norm(nn.Conv1d(64, 64, 3)),
        older=torch.nn.utils.weight_norm(nn.Conv1d(64, 64, 3)),
        lm_head=parametrizations.weight_norm(Linear(64, 1000)),
    )
    routed = algorithms(model)
    assert routed["embed.parametrizations.weight.original1"] == "adamw"
    assert routed["lm_head.parametrizations.weight.original1"] == "adamw"
    assert routed["hidden.parametrizations.weight.original"] == "muon"
    assert routed["conv.parametrizations.weight.original1"] == routed["older.weight_v"] == "muon"
    assert routed["conv.parametrizations.weight.original0"] == routed["older.weight_g"] == "adamw"


def test_routers_have_an_output_for_every_expert() -> None:
    def experts() -> nn.ModuleList:
        return nn.ModuleList(Linear(64, 64) for _ in range(4))

    mixtures = {
        "gate.layer": Tree(gate=Tree(layer=Linear(64, 4)), experts=experts()),
        "choose": Tree(choose=Linear(64, 4), shared_expert=Linear(64, 64), experts=experts()),
        "gate": Tree(gate=Linear(64, 4), w1=parameter(4, 64, 64)),
    }
    for name, mixture in mixtures.items():
        routed = algorithms(Tree(layers=nn.ModuleList([Tree(moe=mixture)])))
        assert routed[f"layers.0.moe.{name}.weight"] == "adamw", name
    assert algorithms(Tree(moe=mixtures["choose"]))["moe.shared_expert.weight"] == "muon"
    noisy = Tree(w_gate=parameter(64, 4), w_noise=parameter(64, 4), experts=experts())
    assert set(algorithms(noisy).values()) == {"adamw", "muon"}
    assert algorithms(noisy)["w_gate"] == algorithms(noisy)["w_noise"] == "adamw"


class StackedMlp(nn.Module):
    """Three experts whose matrices stand one below the other, as in megablocks and DBRX."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 3
        self.w1 = parameter(3 * 12, 8)
        self.w2 = parameter(3 * 12, 8)


def test_experts_stacked_in_two_dimensions() -> None:
    torch.manual_seed(0)
    model = Tree(experts=Tree(mlp=StackedMlp()), fc=Linear(8, 8))
    optimizer = Muon(model, muon_lr=1.0, ns_dtype="fp32", momentum=0.0, nesterov=False, weight_decay=0.0)
    up, down = (next(r for r in optimizer.routes if r.name == f"experts.mlp.{name}") for name in ("w1", "w2"))
    assert up.row_blocks == down.row_blocks == (12, 12, 12)
    assert (up.transposed, down.transposed) == (False, True)
    weight = model.experts.mlp.w1
    before = weight.detach().clone()
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    # Each expert's update has the scale sqrt(12 / 8); Newton-Schulz leaves singular values in 0.68 to 1.14 of it.
    for update in (before - weight.detach()).split(12):
        singular = torch.linalg.svdvals(update.double()) / (12 / 8) ** 0.5
        assert float(singular.min()) > 0.6 and float(singular.max()) < 1.2


def test_a_stack_of_unknown_experts_is_no_matrix() -> None:
    route = routes(Tree(experts=Tree(mlp=Tree(w1=parameter(36, 8))), fc=Linear(8, 8)))["experts.mlp.w1"]
    assert (route.algorithm, route.certain) == ("adamw", False) and "several experts" in route.reason


def test_lora_of_further_trainers() -> None:
    model = Tree(
        to_q=Tree(lora_down=Linear(64, 4), lora_up=Linear(4, 64)),
        to_k_lora=Tree(down=Linear(64, 4), up=Linear(4, 64)),
        loha=Tree(hada_w1_a=parameter(64, 4)),
        lokr=Tree(lokr_w1=parameter(8, 8)),
        ada=Tree(  # as peft's AdaLoRA stores it
            lora_A=nn.ParameterDict({"default": parameter(4, 64)}),
            lora_E=nn.ParameterDict({"default": parameter(4, 1)}),
            lora_B=nn.ParameterDict({"default": parameter(64, 4)}),
        ),
    )
    assert algorithms(model) == {
        "to_q.lora_down.weight": "adamw",
        "to_q.lora_up.weight": "muon",
        "to_k_lora.down.weight": "adamw",
        "to_k_lora.up.weight": "muon",
        "loha.hada_w1_a": "adamw",
        "lokr.lokr_w1": "adamw",
        "ada.lora_A.default": "adamw",
        "ada.lora_E.default": "adamw",
        "ada.lora_B.default": "muon",
    }


def test_a_convolution_of_attention_weights_reads_no_data() -> None:
    """Tacotron 2: two channels, the weights of the last step and their sum."""
    attention = Tree(location_conv=nn.Conv1d(2, 32, 31, bias=False), location_dense=Linear(32, 128))
    route = routes(Tree(prenet=Linear(80, 128), attention=attention, out=Linear(128, 80)))[
        "attention.location_conv.weight"
    ]
    assert (route.algorithm, route.certain) == ("muon", True)


def test_stacks_by_further_names(caplog: pytest.LogCaptureFixture) -> None:
    model = Tree(qkv_w=parameter(3, 192, 192), position=parameter(1, 192, 192), fc=Linear(64, 64))
    with caplog.at_level(logging.WARNING, "deepspeed_muon"):
        route = routes(model)["qkv_w"]
    assert (route.algorithm, route.certain) == ("adamw", False)
    (warning,) = (record.getMessage() for record in caplog.records if "is a guess" in record.getMessage())
    assert "qkv_w [3, 192, 192] to AdamW" in warning and "position" not in warning
    for settings in ({"include": ["qkv_w"]}, {"matrices": {"qkv_w": {"transposed": False}}}):
        route = routes(model, **settings)["qkv_w"]
        assert (route.algorithm, route.row_blocks, route.matrix_shape) == ("muon", (192,) * 3, (576, 192))
        assert route.certain and "3 matrices separately" in route.reason
    turned = routes(model, include=["qkv_w"], matrices={"qkv_w": {"transposed": True, "heads": 2}})["qkv_w"]
    assert (turned.row_blocks, turned.col_blocks) == ((192,) * 3, (96, 96))


@pytest.mark.parametrize(
    ("attributes", "bias"),
    [
        (("in_features", "out_features"), None),  # pygcn
        (("in_channels", "out_channels"), None),  # torch_geometric
        (("_in_feats", "_out_feats"), None),  # dgl
        (("d_in", "d_out"), None),  # lectures
        (("input_dim", "output_dim"), None),
        ((), (16,)),
        ((), (1, 16)),
    ],
)
@pytest.mark.parametrize("name", ["weight", "kernel", "W"])
def test_attributes_or_the_bias_say_which_dimension_is_the_output(
    attributes: tuple[str, ...], bias: tuple[int, ...] | None, name: str
) -> None:
    layer = Tree(**{name: parameter(1433, 16)}, **dict(zip(attributes, (1433, 16), strict=False)))
    if bias is not None:
        layer.register_parameter("b" if name == "W" else "bias", parameter(*bias))
    for wrapped in (layer, parametrizations.weight_norm(copy.deepcopy(layer), name)):
        result = routes(Tree(first=Linear(3, 1433), conv1=wrapped, conv2=Linear(16, 7)))
        route = next(route for route in result.values() if route.shape == (1433, 16))
        assert (route.algorithm, route.transposed, route.certain) == ("muon", True, True), route
        assert result["conv2.weight"].rule == "head"


@pytest.mark.parametrize(
    ("name", "bias"),
    [("weight", "b"), ("W", "bias"), ("weights", "biases"), ("up_proj", "up_proj_bias"), ("w_in", "b_in")],
)
def test_names_of_a_weight_and_its_bias(name: str, bias: str) -> None:
    layer = Tree(**{name: parameter(64, 256), bias: parameter(256)})
    route = routes(Tree(tokens=nn.Embedding(9, 64), layer=layer, out=Linear(256, 9)))[f"layer.{name}"]
    assert (route.algorithm, route.transposed, route.certain) == ("muon", True, True), route


@pytest.mark.parametrize("bias", [(8, 96), (8, 1, 96)])
def test_the_biases_of_stacked_experts_say_which_dimension_is_the_output(bias: tuple[int, ...]) -> None:
    for shape, transposed in (((8, 64, 96), True), ((8, 96, 64), False)):
        moe = Tree(experts=Tree(w1=parameter(*shape), b1=parameter(*bias)))
        route = routes(Tree(tokens=nn.Embedding(9, 64), moe=moe, out=Linear(64, 9)))["moe.experts.w1"]
        assert (route.algorithm, route.transposed, route.certain) == ("muon", transposed, True), route


def test_a_hidden_layer_before_a_head_of_unknown_orientation() -> None:
    head = Tree(weight=parameter(64, 10))  # a cosine classifier, stored as input x output without a mark
    result = routes(Tree(first=Linear(30, 128), second=Linear(128, 64), head=head))
    assert (result["second.weight"].algorithm, result["head.weight"].algorithm) == ("muon", "adamw")


def test_heads_in_parallel_may_be_wide_or_square() -> None:
    square = nn.ModuleList(Linear(64, 64, bias=False) for _ in range(3))  # one for each codebook
    wide = {"text": Linear(64, 300, bias=False), "action": Linear(64, 12, bias=False)}
    for heads in (Tree(linears=square), Tree(**wide)):
        result = routes(Tree(tokens=nn.Embedding(500, 64), layers=blocks(), **dict(heads.named_children())))
        for name in heads.state_dict():
            assert result[name].algorithm == "adamw" or not result[name].certain, result[name]


def mlp(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(Linear(*pair) for pair in itertools.pairwise(sizes)))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Linear(64, 10), ""),  # the only layer
        (Tree(body=mlp(64, 128, 128), out=Linear(128, 128)), "out."),
        (Tree(body=mlp(13, 64, 64), policy=Linear(64, 180), value=Linear(64, 3)), "policy."),
        (Tree(actor=mlp(37, 64, 17), critic=mlp(37, 128, 3)), "actor.1."),
    ],
)
def test_a_layer_that_may_be_a_head_is_a_guess_for_muon_and_warned_of(
    model: nn.Module, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "deepspeed_muon"):
        route = routes(model)[f"{name}weight"]
    assert (route.algorithm, route.certain) == ("muon", False) and "perhaps an output head" in route.reason
    (warning,) = (record.getMessage() for record in caplog.records if "is a guess" in record.getMessage())
    assert f"{name}weight" in warning and "to Muon" in warning


def test_a_layer_without_inputs_is_no_end() -> None:
    """Whether outputs are a multiple of the inputs was asked of layers without any: a ZeroDivisionError."""
    with pytest.warns(UserWarning, match="zero-element"):
        assert algorithms(Linear(0, 8)) == {"weight": "adamw"}


def test_the_largest_guess_is_named_first(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "deepspeed_muon"):
        routes(Tree(small=parameter(256, 256), large=parameter(512, 256), fc=Linear(64, 64)))
    assert caplog.text.index("large [512, 256] to AdamW") < caplog.text.index("small [256, 256] to AdamW")


def test_guesses_are_counted_and_marked() -> None:
    optimizer = Muon(Tree(prompt=parameter(6, 64), mix=Linear(64, 64)))
    assert summarize_routes(optimizer.routes).endswith("; 1 of these routes rests on a guess")
    assert format_routes(optimizer.routes).splitlines()[0].endswith("(guess)")
    assert [row["certain"] for row in rows_of(optimizer.routes)] == [False, True, True]
    assert "guess" not in summarize_routes(Muon(Linear(4, 4)).routes)


def test_without_the_model_names_are_guesses() -> None:
    model = Tree(wte=nn.Embedding(30, 8), mix=Linear(8, 8, bias=False), lm_head=Linear(8, 30, bias=False))
    routed = {route.name: route.certain for route in Muon(model.named_parameters()).routes}
    assert routed == {"wte.weight": True, "mix.weight": False, "lm_head.weight": True}
