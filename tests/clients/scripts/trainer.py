"""A training script for transformers.Trainer that knows nothing of deepspeed_muon."""

from __future__ import annotations

from dataclasses import dataclass

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class Options:
    model: str
    data: str


options, arguments = HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses()
tokenizer = AutoTokenizer.from_pretrained(options.model)
texts = load_dataset("json", data_files=options.data, split="train")
rows = texts.map(lambda row: tokenizer(row["text"]), remove_columns=["text"])
trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained(options.model),
    args=arguments,
    train_dataset=rows,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
trainer.save_model()
# No rank leaves while another one still uses the process group.
trainer.accelerator.wait_for_everyone()
trainer.accelerator.end_training()
