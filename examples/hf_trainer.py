"""Trains a small Qwen2, randomly initialised, with ``transformers.Trainer`` and the optimizer type Muon.

    arguments="--deepspeed ds_configs/hf_zero3.json --output_dir runs/hf"
    deepspeed examples/hf_trainer.py $arguments
    torchrun --nproc_per_node 2 examples/hf_trainer.py $arguments
    accelerate launch --use_deepspeed --num_processes 2 examples/hf_trainer.py $arguments

The script takes every option of ``TrainingArguments``: ``--max_steps 200 --learning_rate 3e-3 --warmup_steps 20
--lr_scheduler_type cosine --save_steps 100 --eval_strategy steps``. ``--resume_from_checkpoint runs/hf/checkpoint-100``
continues a run. ``--learning_rate`` is AdamW's, for embeddings, head and vectors; Muon's is ``muon_lr`` in the
configuration file. The schedule scales both. Needs transformers and accelerate (extra ``hf``). Without a GPU, first
``export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1``, and pass ``--num_accelerators 2`` to ``deepspeed``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from accelerate import PartialState
from text_data import load_tokens, standard_library, text_files
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, HfArgumentParser, Qwen2Config, Trainer, TrainingArguments

import deepspeed_muon  # noqa: F401  # the one line that makes the config's "Muon" this project's optimizer


@dataclass
class Options:
    """What the model and its text are."""

    data: str = field(default="", metadata={"help": "a text file or folder (default: Python's own sources)"})
    max_bytes: int = field(default=4_000_000, metadata={"help": "text to keep"})
    seq_len: int = 256
    dim: int = 256
    layers: int = 6
    heads: int = 4


class Windows(Dataset):
    """Consecutive windows of one token stream; the model shifts the labels by itself."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index].long()
        return {"input_ids": row, "labels": row}


def make_model(options: Options) -> torch.nn.Module:
    """Under ZeRO 3 the Trainer's arguments, made before, have every layer divided over the ranks as it is made."""
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=options.dim,
        intermediate_size=3 * options.dim,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads // 2,
        max_position_embeddings=options.seq_len,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config)


def parse() -> tuple[Options, TrainingArguments]:
    """Read the command line; on a machine without a GPU, tell Accelerate that the ranks talk through gloo."""
    parser = HfArgumentParser((Options, TrainingArguments))
    if torch.cuda.is_available():
        return parser.parse_args_into_dataclasses()
    # Accelerate takes ranks without a GPU for runs of their own, unless its state is made before the arguments.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    parser.set_defaults(accelerator_config={"use_configured_state": True}, dataloader_pin_memory=False)
    return parser.parse_args_into_dataclasses()


def main() -> None:
    """Train, evaluate and save."""
    options, arguments = parse()
    text = load_tokens(
        text_files(options.data) if options.data else standard_library(), max_bytes=options.max_bytes
    )
    trainer = Trainer(
        model=make_model(options),
        args=arguments,
        train_dataset=Windows(text.train, options.seq_len),
        eval_dataset=Windows(text.validation, options.seq_len),
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
