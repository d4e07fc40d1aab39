"""Small mixture-of-experts models of Hugging Face, with stacked experts and with a module for each expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

VOCAB = 61
EXPERTS = 8
LAYERS = 2
HIDDEN, INNER = 32, 24

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
    # Weights as large as those of a trained model: routers that choose clearly.
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
_LATENT_ATTENTION = [
    f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
]
_DENSE = ["gate_proj", "up_proj", "down_proj"]

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "model": "MixtralForCausalLM",
        "config": {"num_local_experts": EXPERTS},
        "block": "mlp",
        "router": ["gate.weight"],
        "dense": _ATTENTION,
    },
    "qwen3_moe": {
        "model": "Qwen3MoeForCausalLM",
        "config": {
            "num_experts": EXPERTS,
            "moe_intermediate_size": INNER,
            "head_dim": 8,
            "norm_topk_prob": True,
        },
        "block": "mlp",
        "router": ["gate.weight"],
        "dense": _ATTENTION,
    },
    "gpt_oss": {
        "model": "GptOssForCausalLM",
        "config": {"num_local_experts": EXPERTS, "head_dim": 8, "sliding_window": 8},
        "block": "mlp",
        "router": ["router.weight", "router.bias"],
        "dense": _ATTENTION,
    },
    "deepseek_v3": {
        "model": "DeepseekV3ForCausalLM",
        "config": {
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": INNER,
            "num_key_value_heads": 4,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 12,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 10,
            "first_k_dense_replace": 0,
        },
        "block": "mlp",
        "router": ["gate.weight"],
        "dense": [*_LATENT_ATTENTION, *(f"mlp.shared_experts.{name}" for name in _DENSE)],
    },
    "llama4": {
        "model": "Llama4ForCausalLM",
        "config": {
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 1,
            "head_dim": 8,
            "intermediate_size_mlp": 40,
            "attention_chunk_size": 16,
        },
        "block": "feed_forward",
        "router": ["router.weight"],
        "dense": [*_ATTENTION, *(f"feed_forward.shared_expert.{name}" for name in _DENSE)],
    },
}


class Expert(nn.Module):
    """One expert of any of the families."""

    def __init__(self, stacked: Any, number: int) -> None:
        super().__init__()
        turned = (
            bool(getattr(stacked, "is_transposed", False)) or type(stacked).__name__ == "Llama4TextExperts"
        )
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(stacked, name).detach()[number]
            bias = getattr(stacked, f"{name}_bias", None)
            layer = nn.Linear(1, 1, bias=bias is not None)
            layer.weight = nn.Parameter(
                (weight.T if turned else weight).clone(memory_format=torch.contiguous_format)
            )
            if bias is not None:
                layer.bias = nn.Parameter(bias.detach()[number].clone())
            setattr(self, name, layer)
        self.gate = _gpt_oss_gate if hasattr(stacked, "alpha") else _silu_gate

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(self.gate(self.gate_up_proj(x)))
        return result


class ListedExperts(nn.ModuleList):
    """The experts of a block as modules of their own, of which a forward pass runs those that got a token."""

    def __init__(self, stacked: Any) -> None:
        super().__init__(Expert(stacked, number) for number in range(stacked.num_experts))

    def forward(self, x: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        if chosen is None or weights is None:
            return self._of_sorted(x)
        total = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            token, choice = torch.where(chosen == number)
            total = total.index_add(0, token, self[number](x[token]) * weights[token, choice, None])
        return total

    def _of_sorted(self, x: Tensor) -> Tensor:
        """Llama 4 hands each expert all tokens, those of other experts as zeros."""
        tokens_of_expert = x.view(len(self), -1, x.shape[-1])
        outputs = [
            self[n](tokens) if tokens.any() else torch.zeros_like(tokens)
            for n, tokens in enumerate(tokens_of_expert)
        ]
        return torch.cat(outputs)


def _silu_gate(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def _gpt_oss_gate(both: Tensor) -> Tensor:
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def build(family: str, *, listed: bool, seed: int = 0) -> Any:
    """Make a causal language model of a few thousand parameters; with ``listed`` a module for each expert."""
    import transformers

    facts = FAMILIES[family]
    model_class = getattr(transformers, facts["model"])
    transformers.set_seed(seed)
    model = model_class(model_class.config_class(**{**_COMMON, **facts["config"]}))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "experts." in name or ".router." in name or name.endswith("sinks"):
                param.normal_(std=0.2)
    if listed:
        for block in blocks_of(model, family):
            if not isinstance(block.experts, nn.ModuleList):
                block.experts = ListedExperts(block.experts)
    return model


def has_stacks() -> bool:
    """Return whether transformers stacks experts; before 5.0 each was a module."""
    import transformers

    return Version(transformers.__version__) >= Version("5.0")


def skip_without(family: str, *, listed: bool) -> None:
    """Skip the test unless transformers has such experts; of the older releases only Qwen's run in float64 too."""
    if not has_stacks() and not (family == "qwen3_moe" and listed):
        pytest.skip("needs the stacked experts of transformers 5")


def blocks_of(model: Any, family: str) -> list[nn.Module]:
    """Return the modules that hold a router and its experts."""
    return [layer.get_submodule(FAMILIES[family]["block"]) for layer in model.model.layers]


def muon_names(family: str, *, listed: bool) -> dict[str, bool]:
    """Return the parameters that Muon updates, each with whether it is a stack of experts."""
    facts = FAMILIES[family]
    is_stack = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        is_stack.update({f"{prefix}{name}.weight": False for name in facts["dense"]})
        for name in ("gate_up_proj", "down_proj") if has_stacks() else _DENSE:
            if listed:
                names = [f"{facts['block']}.experts.{n}.{name}.weight" for n in range(EXPERTS)]
            else:
                names = [f"{facts['block']}.experts.{name}"]
            is_stack.update({prefix + stem: not listed for stem in names})
    return is_stack


def stack_cuts(family: str, stacks: set[str]) -> dict[str, tuple[list[int], list[int], bool]]:
    """Return how the reference cuts stacks that are stored as (experts, input, output); see ``matrices_of``."""
    if family not in ("gpt_oss", "llama4"):
        return {}
    sizes = {name: (INNER, HIDDEN) if "down" in name else (HIDDEN, 2 * INNER) for name in stacks}
    return {name: ([rows] * EXPERTS, [cols], True) for name, (rows, cols) in sizes.items()}


def router_names(family: str) -> set[str]:
    facts = FAMILIES[family]
    return {
        f"model.layers.{layer}.{facts['block']}.{name}" for layer in range(LAYERS) for name in facts["router"]
    }


def tokens_of(step: int, rank: int) -> Tensor:
    """Return a rank's tokens of a step: few different ones, so that ranks use different experts."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    words = torch.randint(VOCAB, (2,), generator=generator)
    return words[torch.randint(2, (1, 6), generator=generator)]
