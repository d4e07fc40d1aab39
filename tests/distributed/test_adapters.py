"""peft's adapters at ZeRO 2 and 3: a small Llama with random weights, its base frozen, without a download."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn

import deepspeed_muon
from tests.support import training
from tests.support.accelerate_ranks import needs
from tests.support.contract import compare_paths
from tests.support.models import SMALL_DECODER
from tests.support.oracle import Oracle, matrices_of
from tests.support.rounding import FP32_MODEL, Limits, measured_limits
from tests.support.thinning import usual

pytestmark = needs("transformers", "peft")

VOCAB = 61
STEPS = 3
EXPERTS = 3


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "down_proj", "lm_head"]},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "nf4": {"target_modules": ["q_proj", "down_proj"]},
    "experts": {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "head": {"target_modules": "all-linear", "exclude_modules": ["lm_head"], "modules_to_save": ["lm_head"]},
}


class Adapted(nn.Module):
    """A causal language model of transformers in peft's wrapper, called with tokens and targets."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import peft
        import transformers

        transformers.set_seed(0)
        sizes = {**SMALL_DECODER, "vocab_size": VOCAB}
        if kind == "experts":
            sizes.update(num_local_experts=EXPERTS, experts_implementation="eager", initializer_range=0.2)
            base = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
        else:
            base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        if kind == "nf4":
            quantize(base.model.layers)
        # B is zero at the start by default; then the first gradient of A is zero too, and the test would see less.
        settings = peft.LoraConfig(r=4, init_lora_weights=False, **ADAPTERS[kind])
        self.model = peft.get_peft_model(base, settings)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).double(), targets.flatten())


def quantize(layers: nn.ModuleList) -> None:
    """Replace the projections by bitsandbytes' of 4 bits, which multiply in fp32."""
    import bitsandbytes

    for layer in layers:
        for block in (layer.self_attn, layer.mlp):
            for name, linear in list(block.named_children()):
                if isinstance(linear, nn.Linear):
                    sizes, kind = (linear.in_features, linear.out_features), {"quant_type": "nf4"}
                    narrow = bitsandbytes.nn.Linear4bit(
                        *sizes, bias=False, compute_dtype=torch.float32, **kind
                    )
                    narrow.weight = bitsandbytes.nn.Params4bit(
                        linear.weight.data, requires_grad=False, module=narrow, **kind
                    )
                    setattr(block, name, narrow.to("cpu"))


def batch(step: int, micro: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (4, 11), generator=torch.Generator().manual_seed(100 * step + micro))
    return tokens[:, :-1], tokens[:, 1:]


def train(rank: int, world_size: int, *, stage: int, kind: str) -> dict[str, Any]:
    """Train with DeepSpeed and report what changed, and where every trained parameter went."""
    config = training.ds_config(stage, clipping=0.5, params={"eps": 1e-6})
    engine = deepspeed.initialize(model=Adapted(kind), config=config)[0]
    for step in range(STEPS):
        engine.backward(engine(*batch(step, rank)))
        engine.step()
    routes = deepspeed_muon.routes(engine)
    return {
        "params": training.full_masters(engine),
        "routes": {route.name: [route.algorithm, route.rule] for route in routes},
    }


def reference(rank: int, world_size: int, *, kind: str, muon: list[str], micros: int) -> list[dict[str, Any]]:
    """Return the trained parameters before and after the reference run, and the limits of their paths."""
    run = functools.partial(train_reference, kind, muon, micros)
    exact = run()
    # peft computes the adapters in the dtype of their weights.
    return [*exact[:2], measured_limits(run, exact, FP32_MODEL, seeds=2).paths]


def train_reference(kind: str, muon: list[str], micros: int) -> tuple[Any, Any, list[float]]:
    """Train the same model in one process, in float64 if it can; return parameters before and after, and norms."""
    model = Adapted(kind)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    start = {name: param.detach().clone() for name, param in trained.items()}
    model = model if kind == "nf4" else model.double()
    oracle = Oracle(matrices_of(muon), clipping=0.5, eps=1e-6)
    norms = []
    for step in range(STEPS):
        model.zero_grad()
        for micro in range(micros):
            (model(*batch(step, micro)) / micros).backward()
        norms.append(oracle.update(model))
    end = {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}
    return start, end, norms


@pytest.mark.parametrize(("stage", "kind"), usual(product((2, 3), ADAPTERS), {(2, "dora"), (3, "experts")}))
def test_adapters_match_the_reference(ranks: Any, stage: int, kind: str) -> None:
    """Muon updates B, AdamW A, magnitudes, those of stacked experts and the head's; what is frozen has no state."""
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    if kind == "experts":
        pytest.importorskip("peft", "0.17", "peft 0.17 has target_parameters")
        pytest.importorskip("transformers", "5.0", "transformers 5 has stacked experts")
    result = ranks(2).run(train, stage=stage, kind=kind)[0]
    routes = {name: route for name, route in result["routes"].items() if route[0] != "frozen"}
    muon = [name for name, (algorithm, _) in routes.items() if algorithm == "muon"]
    hidden = [name for name in routes if "lm_head" not in name]
    assert muon == [name for name in hidden if "lora_B" in name and "experts" not in name] and muon
    adapters = [name for name in hidden if "lora_A" in name or "lora_B" in name]
    assert {routes[name][1] for name in adapters if name not in muon} <= {"adapter"}
    assert all(
        route[1] == ("adapter" if "lora_A" in name else "head")
        for name, route in routes.items()
        if "lm_head" in name
    )
    assert ("lora_magnitude_vector" in " ".join(routes)) == (kind == "dora")

    start, end, paths = ranks(1).run(reference, kind=kind, muon=muon, micros=2)[0]
    assert end.keys() == result["params"].keys() == routes.keys()
    compare_paths(result["params"], start, end, Limits(paths=paths))
