"""The table of names that identify embeddings, heads, routers and adapters, and functions that read dotted names.

Types, shapes and accessors decide first (:mod:`deepspeed_muon.routing.evidence`). A name decides if they do not, or if
the caller passes names without a model.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from deepspeed_muon.errors import RoutingError

Meaning = Literal[
    "embedding",
    "input",  # the first layer behind an input that is not tokens
    "head",  # an output head wherever it is in the model
    "top-level head",  # an output head outside blocks only
    "layer",  # the same, of one layer
    "block",  # a component inside which only a "head" is a head
    "router",
    "router beside experts",
    "relative positions",  # a table of relative positions, in any kind of module
    "no product",  # a bare parameter that is no operand of a matrix product
    "bias",
    "LoRA A",
    "LoRA B",
    "adapter",  # other than LoRA
    "wrapper",  # a component that a wrapper adds to the name
]


@dataclass(frozen=True, slots=True)
class NameEntry:
    """A name with a meaning.

    Attributes:
        meaning: What the name identifies.
        pattern: A regular expression for a full component of a dotted name in lower case, or for several with dots.
        source: The projects that use the name with this meaning.
        certain: Whether the name has no other meaning in the projects that use it.
    """

    meaning: Meaning
    pattern: str
    source: str
    certain: bool = True


TABLE: tuple[NameEntry, ...] = (
    NameEntry("embedding", r"wte|wpe", "GPT-2"),
    NameEntry(
        "embedding", r".*embed_?tokens.*|.*embed_in|.*word_embeddings?|tok_embeddings?", "transformers"
    ),
    NameEntry("embedding", r".*emb", "nanoGPT and torchtune: tok_emb, pos_emb", certain=False),
    NameEntry("embedding", r"(?!.*(proj|mapping|unembed|embed_out)).*embed.*", "many", certain=False),
    NameEntry("input", r"(to_)?patch_?embed(s|ding|dings|der)?", "timm, transformers, vit-pytorch"),
    NameEntry("input", r"(all_)?x_embedder|img_in|embeds", "DiT, diffusers, timm's NaFlexViT", certain=False),
    NameEntry("input", r"vision_embed_tokens", "Fuyu: patches of images"),
    NameEntry("head", r"lm_heads?|shared_head", "transformers: one for each codebook, or further token"),
    NameEntry("head", r"embed_out|unembed|to_logits", "GPT-NeoX, TransformerLens, x-transformers"),
    NameEntry("head", r"(all_)?final_layer(\.[\d-]+)?\.linear", "facebookresearch/DiT and its successors"),
    NameEntry("top-level head", r"logits|logits_dense|logits_proj|.*_logits", "Dia, XLNet, torchvision"),
    NameEntry("top-level head", r"score|qa_outputs|predictions|seq_relationship", "transformers"),
    NameEntry("top-level head", r"(?!pre).*classifiers?|classification_heads?", "transformers"),
    NameEntry("top-level head", r"output_projection|output_layer", "fairseq, ChatGLM, Megatron"),
    NameEntry("layer", r"generator|decoder|last_linear", "PyTorch's tutorials", certain=False),
    NameEntry("top-level head", r".*(bbox|class)_embed", "Deformable DETR and its successors"),
    NameEntry("layer", r"output|fc|ff_out", "Llama, torchvision, OLMo", certain=False),
    NameEntry("layer", r"proj_out|conv_out", "diffusers", certain=False),
    NameEntry(
        "top-level head",
        r"heads?|predict_\w+|(feat|prob)_out|decoder_dict|(?!pre|.*multi_?head).*_(heads?|predictors?|outputs|score|pred)",
        "timm, DecisionTransformer, SpeechT5, LXMERT, transformers, torchvision",
        certain=False,
    ),
    NameEntry("block", r".*attn.*|.*attention.*|.*multi_?head.*|.*mlp|.*feed_?forward.*|.*block.*", "all"),
    NameEntry("block", r".*ffn?|input_ff_layer|transformer_in", "diffusers, TimesFM"),
    NameEntry("router", r".*router.*", "transformers, Megatron"),
    NameEntry("router", r"wg|shared_expert_gate", "DeepSpeed, Qwen2-MoE"),
    NameEntry(
        "router beside experts",
        r"gate|gating|w_gate|w_noise|switch|coefficient",
        "Mixtral, noisy top-k, DeepSpeed's residual experts",
    ),
    NameEntry(
        "relative positions", r"(rel_pos|relative_position|relative_attention_bias).*", "Swin, BEiT, T5"
    ),
    NameEntry("no product", r"a_log|a_logs|d|time_(decay|faaaa|first)", "Mamba, RWKV"),
    NameEntry(
        "bias", r".*_bias|.*_biases|bias|.*bias_[kuv]", "all; Transformer-XL, torch's MultiheadAttention"
    ),
    NameEntry("LoRA A", r"lora_a|lora_weight_1|lora_down", "peft, DeepSpeed's OptimizedLinear, kohya"),
    NameEntry("LoRA A", r".*lora.*\.(down|linear_in)", "diffusers before peft, NeMo"),
    NameEntry("LoRA B", r"lora_b|lora_weight_2|lora_up", "peft, DeepSpeed's OptimizedLinear, kohya"),
    NameEntry("LoRA B", r".*lora.*\.(up|linear_out)", "diffusers before peft, NeMo"),
    NameEntry("adapter", r"(hada|lokr|oft|boft|vera|lora_mid|lora_embedding)_?.*", "LyCORIS, peft"),
    NameEntry("wrapper", r"_orig_mod", "torch.compile"),
    NameEntry("wrapper", r"_checkpoint_wrapped_module|_fsdp_wrapped_module", "torch"),
    NameEntry("wrapper", r"base_layer|original_module", "peft"),
)

_COMPILED = {entry: re.compile(entry.pattern) for entry in TABLE}
# In peft the name of an adapter follows each of these; the parameters below belong to the module that is adapted.
_WITH_ADAPTER_NAME = re.compile(r"modules_to_save|lora_[ab]|lora_weight_[12]|lora_down|lora_up")
# The parameters from which torch.nn.utils.weight_norm, spectral_norm and prune compute the weight; the weight in flax.
_RENAMED = {"weight_g": "weight", "weight_v": "weight", "weight_orig": "weight", "kernel": "weight"}


@functools.lru_cache(maxsize=65536)
def match_name(text: str, *meanings: Meaning) -> NameEntry | None:
    """Return the first table entry with one of the meanings that matches ``text``: one or more components of a name."""
    text = text.lower()
    return next(
        (entry for entry in TABLE if entry.meaning in meanings and _COMPILED[entry].fullmatch(text)), None
    )


def parameter_name(name: str) -> str:
    """Return the name that a parameter has without weight norm, spectral norm, pruning or the names of flax."""
    return _RENAMED.get(name, name)


@functools.lru_cache(maxsize=65536)
def plain_name(name: str) -> str:
    """Return a dotted name without the components that wrappers, adapters and parametrizations add.

    ``module.lm_head.lora_B.default.weight`` and ``lm_head.parametrizations.weight.original1`` give ``lm_head.weight``.
    """
    components = name.split(".")
    while len(components) > 2 and components[0] == "module":  # DataParallel, DeepSpeed's engine
        del components[0]
    plain: list[str] = []
    remaining: Iterator[str] = iter(components)
    for component in remaining:
        lower = component.lower()
        if lower == "parametrizations":
            plain.append(next(remaining, ""))
            break
        if _WITH_ADAPTER_NAME.fullmatch(lower):
            adapter = next(remaining, "")
            # Libraries other than peft have no adapter names: the parameter follows directly.
            plain += [adapter] * (adapter in ("weight", "bias"))
        elif match_name(component, "wrapper") is None:
            plain.append(parameter_name(component))
    return ".".join(plain)


def holder_path(name: str) -> str:
    """Return the path of the module that has a ``weight`` or ``bias``, or the plain name of any other parameter."""
    name = plain_name(name)
    path, _, last = name.rpartition(".")
    return path if path and last in ("weight", "bias") else name


def bare_name(name: str) -> str:
    """Return the last component of a name that is not a number: that of a parameter or of a ``ParameterList``."""
    components = plain_name(name).split(".")
    return next((component for component in reversed(components) if not component.isdigit()), name)


def named_below(components: Sequence[str], position: int) -> int:
    """Return how many components of a path after a position are names, not numbers."""
    return sum(not below.isdigit() for below in components[position + 1 :])


def in_block(components: Sequence[str]) -> bool:
    """Return whether a path leads through a numbered layer, an attention or a feed-forward module."""
    return any(component.isdigit() or match_name(component, "block") for component in components)


def matches(pattern: str, names: Iterable[str], key: str) -> bool:
    """Return whether a shell glob, or a regular expression after ``re:``, matches at least one dotted name.

    Args:
        pattern: The user's pattern.
        names: The dotted names.
        key: The key of ``optimizer.params`` with the pattern, for the error.

    Raises:
        RoutingError: If the text after ``re:`` is not a regular expression.
    """
    if not pattern.startswith("re:"):
        return any(fnmatch.fnmatchcase(name, pattern) for name in names)
    try:
        return any(re.search(pattern[3:], name) for name in names)
    except re.error as error:
        raise RoutingError(
            f"optimizer.params.{key}: {pattern!r} is not a regular expression: {error}"
        ) from error
