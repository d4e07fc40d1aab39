"""The clients: what each one installs, and the command that a user types."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["CLIENTS", "FOLDER", "Client", "Run"]

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]


@dataclass(frozen=True)
class Run:
    """One run of a client.

    Attributes:
        folder: Empty; what the run writes.
        material: What :mod:`tests.clients.material` wrote.
        stage: The ZeRO stage.
        port: A free port.
    """

    folder: Path
    material: Path
    stage: int
    port: int

    @property
    def model(self) -> str:
        return str(self.material / "model")

    @property
    def data(self) -> Path:
        return self.material / "data"

    def write(self, name: str, content: Any) -> str:
        """Write a file as JSON, which is YAML too; return its path."""
        path = self.folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content, indent=2))
        return str(path)

    def deepspeed(self, *, optimizer: bool = True) -> str:
        """Write the DeepSpeed configuration that Hugging Face completes, with an optimizer or without."""
        filled_in = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        config: dict[str, Any] = dict.fromkeys((*filled_in, "gradient_clipping"), "auto")
        config["zero_optimization"] = {"stage": self.stage}
        if optimizer:
            params = {"lr": "auto", "weight_decay": "auto", "adjust_lr_fn": "match_rms_adamw"}
            config["optimizer"] = {"type": "Muon", "params": params}
        if self.stage == 3:
            config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        return self.write("ds.json", config)

    def accelerate(self, config: str) -> str:
        """Write the configuration of ``accelerate launch`` that names a DeepSpeed configuration."""
        deepspeed = {"deepspeed_config_file": config, "deepspeed_multinode_launcher": "standard"}
        content = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {**deepspeed, "zero3_init_flag": self.stage == 3},
            "num_machines": 1,
            "num_processes": 2,
            "machine_rank": 0,
            "main_process_port": self.port,
            "main_training_function": "main",
            "use_cpu": False,
        }
        return self.write("accelerate.yaml", content)


@dataclass(frozen=True)
class Client:
    """A program.

    Attributes:
        environment: The environment that it shares with others of the same name.
        packages: What pip installs for it.
        without: Requirements of its packages that are left out because they need CUDA, or ask for another DeepSpeed.
        command: Returns its command line.
        variables: More environment variables.
        removed: Folders of packages to take out where torch is a CPU build: what was compiled for CUDA cannot load.
    """

    environment: str
    packages: tuple[str, ...]
    command: Callable[[Run], list[str]]
    variables: Callable[[Run], dict[str, str]] = field(default=lambda run: {})
    removed: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


def _plain_config(run: Run) -> str:
    """Write a configuration without anything that Hugging Face fills in."""
    params = {"lr": 2e-3, "weight_decay": 0.01, "adjust_lr_fn": "match_rms_adamw"}
    content = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": run.stage},
        "optimizer": {"type": "Muon", "params": params},
    }
    return run.write("ds.json", content)


def _training(run: Run) -> list[str]:
    """Options that all programs on top of the Trainer have."""
    options = ["--output_dir", str(run.folder / "run"), "--max_steps", "8", "--logging_steps", "2"]
    options += ["--learning_rate", "2e-3", "--per_device_train_batch_size", "4", "--save_steps", "8"]
    return [*options, "--lr_scheduler_type", "cosine", "--warmup_steps", "2", "--bf16", "False"]


def _trl(run: Run) -> list[str]:
    options = ["--model_name_or_path", run.model, "--dataset_name", str(run.data / "text")]
    options += ["--max_length", "64", "--report_to", "none", "--gradient_checkpointing", "False"]
    return ["trl", "sft", "--accelerate_config", run.accelerate(run.deepspeed()), *options, *_training(run)]


def _peft(run: Run) -> list[str]:
    return [*_trl(run), "--use_peft", "--lora_r", "8", "--lora_target_modules", "all-linear"]


def _llamafactory(run: Run) -> list[str]:
    settings = {
        "model_name_or_path": run.model,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "deepspeed": run.deepspeed(),
        "dataset": "sentences",
        "dataset_dir": str(run.data),
        "template": "default",
        "cutoff_len": 64,
        "output_dir": str(run.folder / "run"),
        "logging_steps": 2,
        "save_steps": 8,
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 2.0e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "report_to": "none",
        "preprocessing_num_workers": 1,
        "disable_gradient_checkpointing": True,
    }
    return ["llamafactory-cli", "train", run.write("train.yaml", settings)]


def _separate_torchrun(run: Run) -> dict[str, str]:
    """LLaMA-Factory and ms-swift start torchrun by themselves; the first one counts GPUs unless it is told to."""
    return {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "MASTER_PORT": str(run.port)}


def _swift(run: Run) -> list[str]:
    options = ["--model", run.model, "--dataset", str(run.data / "messages.jsonl"), "--tuner_type", "full"]
    options += ["--model_type", "qwen2", "--template", "dummy", "--max_length", "64", "--attn_impl", "eager"]
    options += ["--torch_dtype", "float32", "--fp16", "false", "--gradient_checkpointing", "false"]
    options += ["--dataset_num_proc", "1", "--dataloader_num_workers", "0", "--split_dataset_ratio", "0"]
    options += ["--report_to", "tensorboard"]
    # Its Trainer fails on any optimizer of DeepSpeed's configuration.
    options += ["--external_plugins", str(ROOT / "examples" / "ms_swift.py"), "--optimizer", "deepspeed_muon"]
    return ["swift", "sft", *options, "--deepspeed", run.deepspeed(optimizer=False), *_training(run)]


def _openrlhf(run: Run) -> list[str]:
    """It writes DeepSpeed's configuration by itself, with the type Muon if it is asked for it."""
    options = ["--optim", "muon", "--muon.lr", "0.02", "--adam.lr", "2e-3", "--max_norm", "1.0"]
    options += ["--model.model_name_or_path", run.model, "--ds.attn_implementation", "eager"]
    options += ["--ds.zero_stage", str(run.stage), "--data.dataset", str(run.data / "alpaca.json")]
    options += ["--data.input_key", "instruction", "--data.output_key", "output", "--data.max_len", "64"]
    options += ["--train.batch_size", "8", "--train.micro_batch_size", "4", "--train.max_epochs", "1"]
    options += ["--data.max_samples", "64", "--ckpt.output_dir", str(run.folder / "run")]
    start = ["deepspeed", "--num_accelerators", "2", "--master_port", str(run.port)]
    return [*start, "--module", "openrlhf.cli.train_sft", *options]


def _axolotl(run: Run) -> list[str]:
    text = {"path": str(run.data / "text" / "train.json"), "ds_type": "json", "type": "completion"}
    settings = {
        "base_model": run.model,
        "datasets": [text],
        "dataset_prepared_path": str(run.folder / "prepared"),
        "dataset_num_proc": 1,
        "sequence_len": 64,
        "output_dir": str(run.folder / "run"),
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": 8,
        "logging_steps": 2,
        "optimizer": "adamw_torch",
        "learning_rate": 2.0e-3,
        "lr_scheduler": "cosine",
        "warmup_steps": 2,
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "attn_implementation": "eager",
        "deepspeed": run.deepspeed(),
    }
    start = ["axolotl", "train", run.write("train.yaml", settings), "--launcher", "torchrun", "--"]
    return [*start, "--nproc_per_node=2", f"--master_port={run.port}"]


def _lightning(run: Run) -> list[str]:
    return ["python", str(FOLDER / "scripts" / "lightning_trainer.py"), _plain_config(run), str(run.folder)]


def _fabric(run: Run) -> list[str]:
    return ["python", str(FOLDER / "scripts" / "lightning_fabric.py"), _plain_config(run)]


_HUGGING_FACE = ("transformers", "accelerate", "datasets")

# PyPI has them for CUDA only. LLaMA-Factory imports torchaudio, which does without its compiled library; transformers
# does without torchvision, unless it finds its metadata.
_FOR_CUDA = ("torchvision*", "torchaudio/lib")

CLIENTS = {
    "trl": Client("hf", (*_HUGGING_FACE, "trl"), _trl),
    "peft": Client("hf", (*_HUGGING_FACE, "trl", "peft"), _peft),
    "lightning": Client("hf", ("lightning",), _lightning),
    "fabric": Client("hf", ("lightning",), _fabric),
    "llamafactory": Client("llamafactory", ("llamafactory",), _llamafactory, _separate_torchrun, _FOR_CUDA),
    "openrlhf": Client("openrlhf", ("openrlhf",), _openrlhf, without=("deepspeed", "flash-attn", "ray")),
    "axolotl": Client(
        "axolotl",
        ("axolotl",),
        _axolotl,
        lambda run: {"AXOLOTL_DO_NOT_TRACK": "1"},
        without=("xformers", "torchao", "fla-core", "flash-linear-attention", "liger-kernel"),
    ),
    "swift": Client("swift", ("ms-swift",), _swift, _separate_torchrun, _FOR_CUDA),
}
