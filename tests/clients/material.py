"""Makes what the programs train: a tiny random model with a tokenizer, and texts. Nothing is downloaded.

    python material.py FOLDER

Runs under the interpreter of a client's environment, and needs transformers and tokenizers there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
TEXT = "the quick brown fox jumps over a lazy dog while seven small owners iterate matrices in turn"


def sentences(count: int) -> list[str]:
    """Sentences that are all different and have something to learn."""
    words = TEXT.split()
    size = len(words)
    return [
        " ".join(words[(row + 3 * position + row // size) % size] for position in range(12))
        for row in range(count)
    ]


def make(folder: Path) -> None:
    """Write ``model/``, and the texts as each program wants them under ``data/``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, set_seed

    texts = sentences(256)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", model_max_length=128
    )
    fast.chat_template = TEMPLATE
    set_seed(0)
    config = Qwen2Config(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    write(folder / "data", texts)


def write(folder: Path, texts: list[str]) -> None:
    """Write the same texts in the formats that the programs read."""
    (folder / "text").mkdir(parents=True)
    (folder / "text" / "train.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts]
    alpaca = [{"instruction": first, "input": "", "output": second} for first, second in halves]
    (folder / "alpaca.json").write_text(json.dumps(alpaca))
    entry = {"file_name": "alpaca.json"}
    (folder / "dataset_info.json").write_text(json.dumps({"sentences": entry}))
    roles = [
        [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
        for first, second in halves
    ]
    lines = (json.dumps({"messages": messages}) + "\n" for messages in roles)
    (folder / "messages.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
