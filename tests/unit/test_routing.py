"""Which parameter goes where, and why."""

from __future__ import annotations

import cProfile

import pytest
import torch
from torch import nn

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.errors import RoutingError
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.routing.evidence import NamedParameter
from deepspeed_muon.routing.parameters import model_parameters_by_name
from deepspeed_muon.routing.route import Route
from deepspeed_muon.routing.rules import route_parameters


def route(name: str, *shape: int, siblings: tuple[str, ...] = ()) -> Route:
    names = (name, *siblings)
    members = [NamedParameter((n,), nn.Parameter(torch.zeros(shape))) for n in names]
    return route_parameters(members)[0]


@pytest.mark.parametrize(
    ("name", "shape", "algorithm"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (8, 8), "muon"),
        ("model.layers.0.mlp.gate_proj.weight", (16, 8), "muon"),
        ("transformer.h.0.attn.c_attn.weight", (8, 24), "muon"),
        ("bert.encoder.layer.0.attention.output.dense.weight", (8, 8), "muon"),
        ("layers.0.attention.output.weight", (8, 8), "muon"),
        ("blocks.2.head.weight", (8, 8), "muon"),
        ("layers.1.mlp.gate.weight", (8, 8), "muon"),
        ("mix.weight", (2, 9), "muon"),
        ("mix.weight", (1, 9), "adamw"),
        ("mix.weight", (9, 1), "adamw"),
        ("layers.0.mlp.experts.down_proj", (4, 8, 1), "adamw"),
        ("layers.0.mlp.experts.down_proj", (1, 8, 6), "muon"),
        ("model.embed_tokens.weight", (32, 8), "adamw"),
        ("transformer.wte.weight", (32, 8), "adamw"),
        ("transformer.wpe.weight", (32, 8), "adamw"),
        ("tok_emb.weight", (32, 8), "adamw"),
        ("lm_head.weight", (32, 8), "adamw"),
        ("module.lm_head.weight", (32, 8), "adamw"),
        ("output.weight", (32, 8), "adamw"),
        ("decoder.output_projection.weight", (32, 8), "adamw"),  # fairseq, FSMT
        ("logits_dense.weight", (32, 8), "adamw"),  # Dia
        ("score.weight", (2, 8), "adamw"),
        ("embed_out.weight", (32, 8), "adamw"),
        ("classifier.1.weight", (10, 8), "adamw"),
        ("qa_outputs.weight", (2, 8), "adamw"),
        ("bbox_predictor.layers.2.weight", (4, 8), "adamw"),
        ("fc.weight", (10, 8), "adamw"),
        ("layers.0.fc.weight", (10, 8), "muon"),
        ("pre_classifier.weight", (8, 8), "muon"),
        ("lm_head.dense.weight", (8, 8), "muon"),  # as wide as its input: not what makes the outputs
        ("vision_model.head.mlp.fc2.weight", (8, 16), "muon"),  # a block of a pooling head
        ("electra.embeddings_project.weight", (16, 8), "muon"),
        ("embed_tokens_extend.image_embed.encoder.layers.0.fc1.weight", (16, 8), "muon"),
        ("embeddings.patch_embeddings.projection.weight", (8, 12), "adamw"),
        ("altup.modality_router.weight", (4, 8), "adamw"),
        ("layers.0.router.weight", (4, 8), "adamw"),
        ("decoder.block.1.layer.2.mlp.router.classifier.weight", (4, 8), "adamw"),
        ("transformer.blocks.0.ffn.router.layer.weight", (4, 8), "adamw"),
        ("model.layers.0.mlp.gate.router_mlp.fc1.weight", (8, 8), "adamw"),  # Zaya
        ("model.layers.0.input_layernorm.weight", (8,), "adamw"),
        ("scale", (), "adamw"),
        ("conv.weight", (4, 3, 3, 3), "adamw"),
        ("layers.0.mlp.experts.gate_up_proj", (4, 6, 8), "muon"),
        ("layers.0.mlp.stacked.gate_up_proj", (4, 6, 8), "adamw"),
        ("empty.weight", (0, 8), "adamw"),
        # peft
        ("base_model.model.lm_head.modules_to_save.default.weight", (100, 8), "adamw"),
        ("base_model.model.score.modules_to_save.default.weight", (3, 8), "adamw"),
        ("base_model.model.lm_head.lora_B.default.weight", (100, 4), "adamw"),
        ("base_model.model.classifier.out_proj.base_layer.weight", (3, 8), "adamw"),
        ("base_model.model.model.layers.0.k_proj.ia3_l.default", (8, 1), "adamw"),
        ("base_model.model.model.layers.0.q_proj.lora_A.default.weight", (4, 8), "adamw"),
        ("base_model.model.model.layers.0.q_proj.lora_B.default.weight", (8, 4), "muon"),
        ("layers.0.lora_a.weight", (4, 8), "adamw"),  # of another library
        ("layers.0.lora_b.weight", (8, 4), "muon"),
        ("layers.0.q_proj.lora_weight_1.weight", (4, 8), "adamw"),  # DeepSpeed's OptimizedLinear
        ("layers.0.q_proj.lora_weight_2.weight", (8, 4), "muon"),
        # not the weight of a product
        ("layers.0.mixer.A_log", (16, 8), "adamw"),
        ("layers.0.attn.relative_position_bias_table", (49, 8), "adamw"),
        ("encoder.rel_pos_x_bias.weight", (12, 8), "adamw"),
        ("qformer.query_tokens", (32, 8), "adamw"),
        ("projector.query", (32, 8), "adamw"),
        ("layers.0.attention.self.query.weight", (8, 8), "muon"),
        ("layers.0.mamba.D", (2, 8), "adamw"),
        ("layers.0.attn.pos_bias_u", (4, 8), "adamw"),
        ("layers.0.attn.bias_v", (4, 8), "adamw"),  # Parakeet, Canary
        ("resampler.latent_query", (32, 8), "adamw"),  # Kosmos-2
        ("spatial_perceiver.latents_2d", (32, 8), "adamw"),  # EdgeTAM
        ("layers.0.attn.q_l2_clip.scale", (4, 8), "adamw"),
    ],
)
def test_rules_by_name_and_shape(name: str, shape: tuple[int, ...], algorithm: str) -> None:
    routed = route(name, *shape)
    assert routed.algorithm == algorithm, routed
    assert routed.reason


@pytest.mark.parametrize(
    ("name", "shape", "sibling", "rule"),
    [
        ("layers.0.moe.gate.weight", (4, 8), "layers.0.moe.experts.0.w1.weight", "router"),
        ("layers.0.mlp.gate.lora_B.default.weight", (4, 2), "layers.0.mlp.experts.0.up.weight", "router"),
        # of residual experts
        ("moe.coefficient.weight", (2, 8), "moe.deepspeed_moe.experts.deepspeed_experts.0.weight", "router"),
        ("moe.coefficient.weight", (2, 8), "moe.other.weight", "hidden"),
    ],
)
def test_neighbours_of_experts_decide(name: str, shape: tuple[int, ...], sibling: str, rule: str) -> None:
    routed = route(name, *shape, siblings=(sibling,))
    assert routed.rule == rule and (routed.algorithm == "adamw") == (rule == "router"), routed


def test_the_adapters_of_stacked_experts_go_to_adamw() -> None:
    """As peft keeps them: several matrices in one tensor, whose columns alternate in B."""
    model = nn.Module()
    wrapped = model.experts = nn.Module()
    wrapped.adapter_layer_names, wrapped.num_experts = ("lora_A", "lora_B"), 3
    wrapped.lora_A = nn.ModuleDict({"default": nn.Linear(8, 6, bias=False)})
    wrapped.lora_B = nn.ModuleDict({"default": nn.Linear(6, 8, bias=False)})
    model.up = nn.Linear(8, 8, bias=False)
    routed = {route.name: route for route in Muon(model).routes}
    for half in "AB":
        route = routed[f"experts.lora_{half}.default.weight"]
        assert (route.algorithm, route.rule) == ("adamw", "adapter") and "stacked experts" in route.reason
    with pytest.raises(RoutingError, match="Muon orthogonalises matrices"):
        Muon(model, include=["*lora_B*"])


def test_all_of_a_list_of_heads_make_outputs() -> None:
    """One for each codebook (MusicGen, Bark): all of them went to Muon."""
    further_heads = ("lm_heads.1.weight", "lm_heads.2.weight")
    assert route("lm_heads.0.weight", 100, 8, siblings=further_heads).rule == "head"


def test_of_a_head_with_several_matrices_the_last_one_makes_the_outputs() -> None:
    names = ("classifier.0.weight", "classifier.3.weight", "classifier.6.weight")
    members = [
        NamedParameter((name,), nn.Parameter(torch.zeros(shape)))
        for name, shape in zip(names, ((16, 8), (12, 16), (10, 12)), strict=True)
    ]
    assert [routed.algorithm for routed in route_parameters(members)] == ["muon", "muon", "adamw"]


def test_a_narrow_matrix_can_be_included() -> None:
    (routed,) = Muon([("mix.weight", nn.Parameter(torch.zeros(1, 9)))], include=["mix.*"]).routes
    assert routed.algorithm == "muon" and routed.matrix_shape == (1, 9)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30, 8)
        self.mix = nn.Linear(8, 8, bias=False)
        self.project = nn.Linear(8, 30, bias=False)
        self.project.weight = self.tokens.weight


def test_a_tied_head_is_the_embedding() -> None:
    model = Tied()
    members = list(model_parameters_by_name(model).values())
    assert [m.names for m in members] == [("tokens.weight", "project.weight"), ("mix.weight",)]
    routes = route_parameters(members)
    assert [(r.name, r.algorithm) for r in routes] == [("tokens.weight", "adamw"), ("mix.weight", "muon")]


class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.unusual = nn.Linear(8, 30)

    def get_output_embeddings(self) -> nn.Module:
        return self.unusual

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError


def test_hugging_face_accessors_tell_the_head() -> None:
    routes = route_parameters(list(model_parameters_by_name(WithHead()).values()))
    algorithms = {r.name: r.algorithm for r in routes}
    assert (algorithms["body.weight"], algorithms["unusual.weight"]) == ("muon", "adamw")


def test_matrix_shapes() -> None:
    model = nn.Sequential(
        nn.Linear(7, 7), nn.Conv2d(6, 8, 5), nn.ConvTranspose2d(8, 4, 3), nn.Conv2d(4, 4, 3, groups=2)
    )
    routes = {r.name: r for r in route_parameters(list(model_parameters_by_name(model).values()))}
    plain = routes["1.weight"]
    assert (plain.algorithm, plain.kind, plain.matrix_shape) == ("muon", "convolution", (8, 150))
    assert routes["2.weight"].algorithm == routes["3.weight"].algorithm == "adamw"
    experts = route("experts.w", 4, 6, 8)
    assert experts.matrix_shape == (24, 8) and experts.row_blocks == (6,) * 4


def test_frozen_parameters_stay_in_the_group_where_they_would_be_trained() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    model.packed = nn.Parameter(torch.zeros(4, 1, dtype=torch.uint8), requires_grad=False)
    optimizer = Muon(model)
    assert {r.name: r.algorithm for r in optimizer.routes} == {
        "packed": "frozen",
        "0.weight": "frozen",
        "0.bias": "frozen",
        "1.weight": "muon",
        "1.bias": "adamw",
    }
    muon, adamw = (group["params"] for group in optimizer.param_groups)
    assert [id(p) for p in muon] == [id(model[0].weight), id(model[1].weight)]
    assert [id(p) for p in adamw] == [id(model[0].bias), id(model[1].bias)]
    assert not model[0].weight.requires_grad


def test_a_frozen_parameter_that_could_not_be_trained_is_no_error() -> None:
    """Only one that is not frozen may be refused; the others keep their groups."""
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "abc"})
    model["a"].weight = nn.Parameter(torch.zeros(4, 1).expand(4, 4), requires_grad=False)
    model["a"].freqs = nn.Parameter(torch.zeros(4, dtype=torch.complex64), requires_grad=False)
    model["b"].requires_grad_(False)
    optimizer = Muon(model)
    (group,) = optimizer.param_groups
    assert [id(p) for p in group["params"]] == [id(model["b"].weight), id(model["c"].weight)]


def mostly_frozen(layers: int) -> nn.ModuleList:
    model = nn.ModuleList([nn.Linear(1, 1) for _ in range(layers)]).requires_grad_(False)
    model[0].requires_grad_(True)
    return model


def calls_of_routing(layers: int) -> int:
    """Count the function calls of an optimizer's construction, which no other load of the machine changes."""
    model = mostly_frozen(layers)
    profile = cProfile.Profile()
    profile.runcall(Muon, model)
    return sum(entry.callcount for entry in profile.getstats())


def test_frozen_parameters_are_routed_in_linear_time_and_have_no_state() -> None:
    """A large frozen base costs a look at its names."""
    calls_of_routing(1)  # imports what is imported once
    assert calls_of_routing(1000) < 3 * calls_of_routing(500)
    model = mostly_frozen(500)
    optimizer = Muon(model)
    model[0](torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert len(optimizer.state) == 2
    assert len(optimizer.runners[0].step_set.layouts) == 2


def test_zero_init_placeholders_are_judged_by_their_true_shape() -> None:
    param = nn.Parameter(torch.zeros(0))
    param.ds_shape = torch.Size((8, 8))
    routed = route_parameters([NamedParameter(("layers.0.w.weight",), param)])[0]
    assert routed.algorithm == "muon" and routed.shape == (8, 8)


def test_patterns() -> None:
    model = nn.ModuleDict({"head": nn.Linear(4, 4), "a": nn.Linear(4, 4)})
    members = list(model_parameters_by_name(model).values())

    def algorithms(**patterns: list[str]) -> dict[str, str]:
        return {r.name: r.algorithm for r in route_parameters(members, MuonConfig(**patterns))}

    assert algorithms(include=["head.weight"])["head.weight"] == "muon"
    assert algorithms(include=["head.weight"], exclude=["re:^a\\."])["a.weight"] == "adamw"
    assert algorithms(include=["*.weight"], exclude=["head*"])["head.weight"] == "adamw"
    with pytest.raises(RoutingError, match="matches no parameter"):
        algorithms(exclude=["b.*"])
    with pytest.raises(RoutingError, match="not a regular expression"):
        algorithms(exclude=["re:("])
    with pytest.raises(RoutingError, match=r"a\.bias of shape \[4\]"):
        algorithms(include=["a.bias"])


@pytest.mark.parametrize("setting", ["include", "exclude", "matrices"])
@pytest.mark.parametrize("pattern", ["embed*", "packed"])
@pytest.mark.parametrize("all_parameters", [True, False])
def test_a_pattern_may_match_frozen_weights_alone(setting: str, pattern: str, all_parameters: bool) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "mix": nn.Linear(4, 4)})
    model.packed = nn.Parameter(torch.zeros(4, 1, dtype=torch.uint8), requires_grad=False)
    model["embed"].requires_grad_(False)
    params = [param for param in model.parameters() if all_parameters or param.requires_grad]
    Muon(params, model=model, **{setting: {pattern: {"heads": 2}} if setting == "matrices" else [pattern]})


def test_a_lazy_module_has_to_run_first() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 4))
    for params in (model, model.named_parameters()):
        with pytest.raises(RoutingError, match=r"0\.weight has no shape yet: run the model once"):
            Muon(params)


def test_groups_are_split_and_keep_their_settings() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [
        {"params": list(model[0].named_parameters()), "lr": 0.5, "weight_decay": 0.1, "name": "first"},
        {"params": list(model[1].named_parameters()), "muon_lr": 0.7, "adam_lr": 0.007},
    ]
    optimizer = Muon(groups, lr=0.01, weight_decay=0.3)
    routed = [(g["algorithm"], g["lr"], g["weight_decay"], g.get("name")) for g in optimizer.param_groups]
    assert routed == [
        ("muon", 0.5, 0.1, "first"),
        ("adamw", 0.5, 0.1, "first"),
        ("muon", 0.7, 0.3, None),
        ("adamw", 0.007, 0.3, None),
    ]
    assert [g["lr_ratio"] for g in optimizer.param_groups] == pytest.approx([50, 50, 70, 0.7])
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["caller_group"] = 7
    optimizer.load_state_dict(saved)
    caller_groups = [g["caller_group"] for g in optimizer.param_groups]
    assert caller_groups == [0, 0, 1, 1], "a state dict cannot change it"


def test_none_in_a_group_is_the_setting_of_the_optimizer() -> None:
    groups = [{"params": list(nn.Linear(4, 4).parameters()), "momentum": None, "betas": None}]
    for group in Muon(groups, momentum=0.8, betas=(0.7, 0.8)).param_groups:
        assert group.get("momentum", 0.8) == 0.8 and group.get("betas", (0.7, 0.8)) == (0.7, 0.8)


def test_a_group_of_convolutions_names_the_remedy() -> None:
    """The groups of Keller Jordan's README have no model, which alone tells what a convolution is."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 4))

    def groups() -> list[dict[str, object]]:
        return [
            {"params": [p for p in model.parameters() if p.ndim > 1], "use_muon": True},
            {"params": [p for p in model.parameters() if p.ndim < 2], "use_muon": False},
        ]

    remedy = r"pass the model, as deepspeed_muon.Muon\(groups, model=model\)"
    with pytest.raises(RoutingError, match=rf"\[8, 3, 3, 3\].*{remedy}"):
        Muon(groups())
    routes = Muon(groups(), model=model).routes
    assert [(r.algorithm, r.kind) for r in routes[:2]] == [("muon", "convolution"), ("muon", "matrix")]


def test_explicit_groups_decide() -> None:
    model = nn.Linear(4, 4, bias=False)
    head = nn.Linear(4, 9, bias=False)
    optimizer = Muon(
        [{"params": [model.weight], "use_muon": True}, {"params": [head.weight], "algorithm": "adamw"}],
        lr=0.1,
    )
    assert [r.algorithm for r in optimizer.routes] == ["muon", "adamw"]
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]


def test_duplicates_are_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(RoutingError, match="twice"):
        Muon([model.weight, model.weight])
