"""The one table of names that decide, each with its source, and how a dotted name is read.

Types, shapes and accessors decide first (:mod:`deepspeed_muon.routing.layers`); a name decides where they are silent,
or where a program passes names and no model.
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
    "head",  # an output head wherever it stands
    "top-level head",  # outside of blocks
    "block",  # inside of a component of this name no "top-level head" is a head
    "router",
    "router beside experts",
    "relative positions",  # tables of them, in whatever module
    "no product",  # of a bare parameter: multiplies elementwise or nothing
    "bias",
    "weight",  # of a bare parameter: multiplies activations
    "LoRA A",
    "LoRA B",
    "adapter",  # of another kind
    "wrapper",  # a component that some wrapper adds
]


@dataclass(frozen=True, slots=True)
class KnownName:
    """A name with a meaning.

    Attributes:
        meaning: What it says.
        pattern: A regular expression for one component of a dotted name in lower case, or several with their dots.
        source: Who uses it so.
        certain: Whether those who use the name mean nothing else by it.
    """

    meaning: Meaning
    pattern: str
    source: str
    certain: bool = True


TABLE: tuple[KnownName, ...] = (
    KnownName("embedding", r"wte|wpe", "GPT-2"),
    KnownName(
        "embedding", r".*embed_?tokens.*|.*embed_in|.*word_embeddings?|tok_embeddings?", "transformers"
    ),
    KnownName("embedding", r".*emb", "nanoGPT and torchtune: tok_emb, pos_emb", certain=False),
    KnownName("embedding", r"(?!.*(proj|mapping|unembed|embed_out)).*embed.*", "many", certain=False),
    KnownName("input", r"patch_?embed(s|ding|dings|der)?", "timm, transformers"),
    KnownName("input", r"(all_)?x_embedder|img_in|embeds", "DiT, diffusers, timm's NaFlexViT", certain=False),
    KnownName("input", r"vision_embed_tokens", "Fuyu: patches of images"),
    KnownName("head", r"lm_heads?", "transformers; a list has one for each codebook: MusicGen"),
    KnownName("head", r"embed_out|unembed", "GPT-NeoX, TransformerLens"),
    KnownName("head", r"shared_head", "DeepSeek's layers that predict further tokens"),
    KnownName("head", r"to_logits", "x-transformers"),
    KnownName("head", r"(all_)?final_layer(\.[\d-]+)?\.linear", "facebookresearch/DiT and its successors"),
    KnownName("head", r"aux\d\.fc2|mlm_layer\.conv2", "torchvision's GoogLeNet, diffusers' UViT"),
    KnownName("top-level head", r"logits|logits_dense|logits_proj|.*_logits", "Dia, XLNet, torchvision"),
    KnownName("top-level head", r"score|qa_outputs|predictions", "transformers"),
    KnownName("top-level head", r"(?!pre).*classifiers?|classification_heads?", "transformers"),
    KnownName("top-level head", r"output_projection|output_layer", "fairseq, ChatGLM, Megatron"),
    KnownName(
        "top-level head", r"generator|decoder|last_linear", "programs of PyTorch's tutorials", certain=False
    ),
    KnownName("top-level head", r".*(bbox|class)_embed", "Deformable DETR and its successors"),
    KnownName("top-level head", r"output|heads?|fc|ff_out", "Llama, torchvision, timm, OLMo", certain=False),
    KnownName("top-level head", r"proj_out|conv_out", "diffusers", certain=False),
    KnownName("top-level head", r"predict_\w+|feat_out", "DecisionTransformer, SpeechT5", certain=False),
    KnownName(
        "top-level head",
        r"(?!pre|.*multi_?head).*(_heads?|_predictors?|_outputs|_score|_pred)",
        "transformers, torchvision",
        certain=False,
    ),
    KnownName("block", r".*attn.*|.*attention.*|.*multi_?head.*|.*mlp|.*feed_?forward.*|.*block.*", "all"),
    KnownName("block", r".*ffn?|input_ff_layer|transformer_in", "diffusers, TimesFM"),
    KnownName("router", r".*router.*", "transformers, Megatron"),
    KnownName("router", r"wg|shared_expert_gate", "DeepSpeed, Qwen2-MoE"),
    KnownName("router beside experts", r"gate|gating|w_gate|w_noise|switch", "Mixtral, GShard, noisy top-k"),
    KnownName("router beside experts", r"coefficient", "DeepSpeed's residual experts"),
    KnownName(
        "relative positions", r"(rel_pos|relative_position|relative_attention_bias).*", "Swin, BEiT, T5"
    ),
    KnownName("no product", r"a_log|a_logs|d|time_(decay|faaaa|first)", "Mamba, RWKV"),
    KnownName(
        "bias", r".*_bias|.*_biases|bias|.*bias_[kuv]", "all; Transformer-XL, torch's MultiheadAttention"
    ),
    KnownName("weight", r"(.*_)?(weights?|kernel|proj|projs|projection)(_.*)?", "all", certain=False),
    KnownName("weight", r"w(\d+|_.+)", "TransformerLens, RWKV-7, megablocks", certain=False),
    KnownName("LoRA A", r"lora_a|lora_weight_1|lora_down", "peft, DeepSpeed's OptimizedLinear, kohya"),
    KnownName("LoRA A", r".*lora.*\.(down|linear_in)", "diffusers before peft, NeMo"),
    KnownName("LoRA B", r"lora_b|lora_weight_2|lora_up", "peft, DeepSpeed's OptimizedLinear, kohya"),
    KnownName("LoRA B", r".*lora.*\.(up|linear_out)", "diffusers before peft, NeMo"),
    KnownName("adapter", r"(hada|lokr|oft|boft|vera|lora_mid|lora_embedding)_?.*", "LyCORIS, peft"),
    KnownName("wrapper", r"_orig_mod", "torch.compile"),
    KnownName("wrapper", r"_checkpoint_wrapped_module|_fsdp_wrapped_module", "torch"),
    KnownName("wrapper", r"base_layer|original_module", "peft"),
)

_COMPILED = {entry: re.compile(entry.pattern) for entry in TABLE}
# Each followed by the name of an adapter in peft: what lies in one belongs to the module around it.
_WITH_ADAPTER_NAME = re.compile(r"modules_to_save|lora_[ab]|lora_weight_[12]|lora_down|lora_up")
# What torch.nn.utils.weight_norm, spectral_norm and prune call the tensors that they make the weight from.
_RENAMED = {"weight_g": "weight", "weight_v": "weight", "weight_orig": "weight"}


@functools.lru_cache(maxsize=65536)
def known(text: str, *meanings: Meaning) -> KnownName | None:
    """Return the first entry of the table that gives one of some meanings to a component, or to a run of them."""
    text = text.lower()
    return next(
        (entry for entry in TABLE if entry.meaning in meanings and _COMPILED[entry].fullmatch(text)), None
    )


def parameter_name(name: str) -> str:
    """Return the name that a parameter of a module has without weight norm, spectral norm and pruning."""
    return _RENAMED.get(name, name)


@functools.lru_cache(maxsize=65536)
def plain_name(name: str) -> str:
    """Return a dotted name without what wrappers, adapters and parametrizations add.

    ``module.lm_head.lora_B.default.weight`` and ``lm_head.parametrizations.weight.original1`` give ``lm_head.weight``.
    """
    parts = name.split(".")
    while len(parts) > 2 and parts[0] == "module":  # DataParallel, DeepSpeed's engine
        del parts[0]
    plain: list[str] = []
    remaining: Iterator[str] = iter(parts)
    for part in remaining:
        lower = part.lower()
        if lower == "parametrizations":
            plain.append(next(remaining, ""))
            break
        if _WITH_ADAPTER_NAME.fullmatch(lower):
            adapter = next(remaining, "")
            # Other libraries than peft name no adapter.
            plain += [adapter] * (adapter in ("weight", "bias"))
        elif known(part, "wrapper") is None:
            plain.append(parameter_name(part))
    return ".".join(plain)


def holder_path(name: str) -> str:
    """Return the path of the module that holds a parameter, or the parameter's own if it is no module's ``weight``."""
    name = plain_name(name)
    path, _, last = name.rpartition(".")
    return path if path and last in ("weight", "bias") else name


def bare_name(name: str) -> str:
    """Return the last component of a name that is no number: that of a parameter, or of a list of parameters."""
    return next((part for part in reversed(plain_name(name).split(".")) if not part.isdigit()), name)


def named_below(parts: Sequence[str], position: int) -> int:
    """Return how many modules of a path below a position have a name and no number."""
    return sum(not below.isdigit() for below in parts[position + 1 :])


def in_block(parts: Sequence[str]) -> bool:
    """Return whether a path leads through a numbered layer, an attention or a feed-forward module."""
    return any(part.isdigit() or known(part, "block") for part in parts)


def matches(pattern: str, names: Iterable[str], key: str) -> bool:
    """Return whether a shell glob, or a regular expression after ``re:``, fits one of some dotted names.

    Args:
        pattern: What the user wrote.
        names: The dotted names.
        key: The key of ``optimizer.params`` that holds the pattern, for the error.

    Raises:
        RoutingError: If the text after ``re:`` is no regular expression.
    """
    if not pattern.startswith("re:"):
        return any(fnmatch.fnmatchcase(name, pattern) for name in names)
    try:
        return any(re.search(pattern[3:], name) for name in names)
    except re.error as error:
        raise RoutingError(
            f"optimizer.params.{key}: {pattern!r} is not a regular expression: {error}"
        ) from error
