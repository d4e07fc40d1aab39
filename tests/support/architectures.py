"""Architectures of transformers with their own sizes but few layers, and the table of their routes.

They are built on the meta device from their configurations; nothing is downloaded. After a change of the rules,
``python -m tests.support.architectures`` writes the table anew; read what changed before you commit it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed_muon.routing.parameters import model_parameters_by_name
from deepspeed_muon.routing.rules import route_parameters

__all__ = ["ARCHITECTURES", "TABLE", "build", "routes_of"]

TABLE = Path(__file__).resolve().parents[1] / "unit" / "routes_of_architectures.txt"

_TWO: dict[str, Any] = {"num_hidden_layers": 2}
_PAIR: dict[str, Any] = {"encoder_layers": 2, "decoder_layers": 2}
_STAGES: dict[str, Any] = {"depths": [2, 2, 2, 2]}

# Family, then the class of transformers and what its configuration gets.
ARCHITECTURES: dict[str, dict[str, dict[str, Any]]] = {
    "text decoders": {
        "GPT2LMHeadModel": {"n_layer": 2},
        "LlamaForCausalLM": _TWO,
        "Qwen3ForCausalLM": _TWO | {"tie_word_embeddings": True},
        "Gemma2ForCausalLM": _TWO,
        "Gemma3nForCausalLM": _TWO | {"num_kv_shared_layers": 0},
        "Gemma4ForCausalLM": _TWO,
        "Phi3ForCausalLM": _TWO,
        "GPTNeoXForCausalLM": _TWO,
        "FalconForCausalLM": _TWO,
        "BloomForCausalLM": {"n_layer": 2},
        "OPTForCausalLM": _TWO | {"word_embed_proj_dim": 512},
        "MptForCausalLM": {"n_layers": 2},
        "LlamaForSequenceClassification": _TWO,
    },
    "mixtures of experts": {
        "MixtralForCausalLM": _TWO,
        "Qwen2MoeForCausalLM": _TWO,
        "Qwen3MoeForCausalLM": _TWO,
        "GptOssForCausalLM": _TWO,
        "DeepseekV3ForCausalLM": _TWO | {"first_k_dense_replace": 1},
        "Llama4ForCausalLM": _TWO,
        "GraniteMoeForCausalLM": _TWO,
        "JetMoeForCausalLM": _TWO,
        "SwitchTransformersForConditionalGeneration": {"num_layers": 2, "num_decoder_layers": 2},
    },
    "state-space and recurrent": {
        "MambaForCausalLM": _TWO,
        "Mamba2ForCausalLM": _TWO,
        "JambaForCausalLM": _TWO | {"attn_layer_offset": 1, "attn_layer_period": 2},
        "Zamba2ForCausalLM": _TWO | {"layer_types": ["mamba", "hybrid"]},
        "Qwen3NextForCausalLM": {"num_hidden_layers": 4},
        "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3},
        "RwkvForCausalLM": _TWO,
        "xLSTMForCausalLM": _TWO,
    },
    "encoders and task heads": {
        "BertForMaskedLM": _TWO,
        "BertForPreTraining": _TWO,
        "BertForQuestionAnswering": _TWO,
        "BertForSequenceClassification": _TWO,
        "RobertaForMaskedLM": _TWO,
        "RobertaForSequenceClassification": _TWO,
        "DistilBertForSequenceClassification": {"n_layers": 2},
        "DebertaV2ForTokenClassification": _TWO | {"relative_attention": True},
        "ElectraForPreTraining": _TWO,
        "XLNetForSequenceClassification": {"n_layer": 2},
        "ModernBertForSequenceClassification": _TWO,
        "LayoutLMv3ForTokenClassification": _TWO,
    },
    "encoder-decoders": {
        "T5ForConditionalGeneration": {"num_layers": 2, "num_decoder_layers": 2},
        "BartForConditionalGeneration": _PAIR,
        "BartForSequenceClassification": _PAIR,
    },
    "vision": {
        "ViTForImageClassification": _TWO,
        "Dinov2ForImageClassification": _TWO,
        "SwinForImageClassification": _STAGES,
        "BeitForImageClassification": _TWO | {"use_relative_position_bias": True},
        "ResNetForImageClassification": _STAGES,
        "ConvNextForImageClassification": _STAGES,
        "EfficientNetForImageClassification": {"depth_coefficient": 0.4},
        "DetrForObjectDetection": _PAIR
        | {
            "use_timm_backbone": False,
            "backbone": None,
            "backbone_config": {"model_type": "resnet", **_STAGES},
        },
        "SegformerForSemanticSegmentation": {"depths": [1, 1, 1, 1]},
        "SamModel": {"vision_config": _TWO},
    },
    "speech": {
        "WhisperForConditionalGeneration": _PAIR,
        "Wav2Vec2ForCTC": _TWO,
        "Wav2Vec2ForSequenceClassification": _TWO,
        "Wav2Vec2ConformerForCTC": _TWO | {"position_embeddings_type": "relative", "vocab_size": 32},
    },
    "multimodal": {
        "CLIPModel": {"text_config": _TWO, "vision_config": _TWO},
        "SiglipModel": {"text_config": _TWO, "vision_config": _TWO},
        "LlavaForConditionalGeneration": {"text_config": _TWO, "vision_config": _TWO},
        "Qwen2VLForConditionalGeneration": {"text_config": _TWO, "vision_config": {"depth": 2}},
        "Blip2ForConditionalGeneration": {
            "text_config": _TWO | {"model_type": "opt"},
            "vision_config": _TWO,
            "qformer_config": _TWO,
        },
        "Idefics3ForConditionalGeneration": {"text_config": _TWO, "vision_config": _TWO},
    },
}


def build(name: str, settings: dict[str, Any]) -> nn.Module:
    """Return a model of the class ``name`` on the meta device, with the given settings of its configuration."""
    import transformers

    kind = getattr(transformers, name)
    with torch.device("meta"):
        return kind(kind.config_class(**settings))


def routes_of(name: str, settings: dict[str, Any]) -> list[str]:
    """Return the routes of an architecture as lines of text: algorithm, reason, names.

    Numbers in names are stars, equal siblings stand in braces, and vectors are only counted.
    """
    routes = route_parameters(list(model_parameters_by_name(build(name, settings)).values()))
    vectors = set()
    found: dict[tuple[str, str], dict[tuple[str, str], dict[str, None]]] = {}
    for route in routes:
        parts = ["*" if part.isdigit() else part for part in route.name.split(".")]
        if len(route.shape) == 1 and route.algorithm != "frozen":
            assert route.reason == "a vector", route
            vectors.add(".".join(parts))
            continue
        last = 1 if parts[-1] not in ("weight", "bias") or len(parts) == 1 else 2
        around = ".".join(parts[:-last]), ".".join(parts[len(parts) - last + 1 :])
        siblings = found.setdefault((route.algorithm, route.reason), {}).setdefault(around, {})
        siblings.setdefault(parts[-last])
    lines = [name]
    for (algorithm, reason), groups in sorted(found.items(), key=lambda item: item[0]):
        lines.append(f"  {algorithm}, {reason}:")
        for (before, after), names in groups.items():
            middle = next(iter(names)) if len(names) == 1 else "{" + ",".join(names) + "}"
            lines.append("    " + ".".join(part for part in (before, middle, after) if part))
    return [*lines, f"  adamw, a vector: {len(vectors)} names"]


def _write() -> None:
    text = []
    for family, models in ARCHITECTURES.items():
        text += [f"== {family} ==", ""]
        for name, settings in models.items():
            text += [*routes_of(name, settings), ""]
    TABLE.write_text("\n".join(text))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _write()
