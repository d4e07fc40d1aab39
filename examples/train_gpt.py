"""Trains a small GPT on real text with DeepSpeed and Muon.

Three ways to start it on two processes:

    deepspeed --num_accelerators 2 examples/train_gpt.py --deepspeed_config ds_configs/zero3.json
    torchrun --nproc_per_node 2 examples/train_gpt.py --deepspeed_config ds_configs/zero3.json
    mpirun -n 2 python examples/train_gpt.py --deepspeed_config ds_configs/zero3.json

Without a GPU, set ``DS_ACCELERATOR=cpu`` and ``OMP_NUM_THREADS=1`` first. Without ``--data`` or ``--dataset``
it trains on the source text of Python's own standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import hjson
import torch
from deepspeed.accelerator import get_accelerator
from gpt import GPT, GPTConfig
from text_data import Batches, DataError, TokenText, hugging_face, load_tokens, standard_library, text_files
from tqdm import tqdm

import deepspeed_muon  # noqa: F401  # the one line that makes the config's "Muon" this project's optimizer

# torch >= 2.12 warns at every collective about the names that DeepSpeed still uses.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


class UsageError(ValueError):
    """The options, the config and the checkpoint do not go together."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line. No option may be a prefix of one of torchrun's: torchrun would claim it."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain, allow_abbrev=False)
    parser.add_argument("--deepspeed_config", required=True, help="JSON file, such as ds_configs/zero3.json")
    parser.add_argument("--local_rank", type=int, help="passed by the deepspeed launcher; not used")

    data = parser.add_argument_group("data")
    source = data.add_mutually_exclusive_group()
    source.add_argument("--data", metavar="PATH", help="a text file, or a folder of text files")
    source.add_argument("--dataset", metavar="NAME", help="on Hugging Face: NAME or NAME:CONFIGURATION")
    data.add_argument("--dataset_column", default="text", help="the dataset's text column (default: text)")
    data.add_argument("--max_bytes", type=int, default=16_000_000, help="text to keep (default: 16 MB)")
    data.add_argument("--seq_len", type=int, default=256)
    data.add_argument("--batch_size", type=int, help="sequences per rank and micro-step (default: config's)")

    model = parser.add_argument_group("model")
    model.add_argument("--dim", type=int, default=256)
    model.add_argument("--layers", type=int, default=6)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--zero_init", action="store_true", help="build the model partitioned (stage 3)")

    optim = parser.add_argument_group("optimizer", "rates override those of the config's optimizer section")
    optim.add_argument("--optimizer", choices=["Muon", "AdamW"], help="AdamW replaces the config's section")
    optim.add_argument("--lr", type=float, help="the shared rate; with --optimizer AdamW, its rate")
    optim.add_argument("--muon_lr", type=float)
    optim.add_argument("--adam_lr", type=float)
    optim.add_argument("--weight_decay", type=float)
    optim.add_argument("--schedule", choices=["cosine", "wsd"], default="cosine")
    optim.add_argument("--warmup", type=float, default=0.05, help="share of the steps that raise the rate")
    optim.add_argument("--decay", type=float, default=0.2, help="wsd: share of the steps that lower the rate")
    optim.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help="default: config's")

    run = parser.add_argument_group("run")
    run.add_argument("--steps", type=int, default=1000)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--log_every", type=int, default=10)
    run.add_argument("--eval_every", type=int, default=100)
    run.add_argument("--eval_batches", type=int, default=8, help="validation batches per rank")
    run.add_argument("--metrics_dir", default="runs", help="CSV and TensorBoard go to METRICS_DIR/RUN_NAME")
    run.add_argument("--run_name", default=time.strftime("%Y%m%d-%H%M%S"))
    run.add_argument("--save_dir", help="folder for checkpoints (default: none are saved)")
    run.add_argument("--save_every", type=int, default=0, help="steps between checkpoints (default: the end)")
    run.add_argument("--resume", action="store_true", help="continue the latest checkpoint in --save_dir")
    args = parser.parse_args(argv)

    if args.resume and not args.save_dir:
        parser.error("--resume needs --save_dir, the folder with the checkpoints")
    if args.optimizer == "AdamW" and (args.muon_lr is not None or args.adam_lr is not None):
        parser.error("--optimizer AdamW has one rate: give --lr")
    return args


def read_config(path: str) -> dict[str, Any]:
    """The file as DeepSpeed reads it: JSON, which may have comments.

    Raises:
        UsageError: it is no such file, or it leaves values to the Hugging Face Trainer.
    """
    try:
        config = hjson.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=dict)
    except (OSError, ValueError) as error:
        raise UsageError(f"--deepspeed_config {path}: {error}") from error
    left_open = [key for key, value in config.items() if key != "optimizer" and '"auto"' in json.dumps(value)]
    if left_open:
        raise UsageError(
            f"--deepspeed_config {path}: 'auto' in {', '.join(left_open)} is filled in by the Hugging Face Trainer; "
            f"start examples/hf_trainer.py --deepspeed {path}, or write numbers"
        )
    return config


def make_ds_config(args: argparse.Namespace) -> dict[str, Any]:
    """DeepSpeed's config: the JSON file with the command line's overrides written into it."""
    config = read_config(args.deepspeed_config)
    if args.batch_size is not None:
        config["train_micro_batch_size_per_gpu"] = args.batch_size
    # This script decides both numbers below, so a total left in the file could only contradict them.
    config.pop("train_batch_size", None)
    config.setdefault("train_micro_batch_size_per_gpu", 8)
    config.setdefault("gradient_accumulation_steps", 1)
    config.setdefault("steps_per_print", 1_000_000)  # the script prints its own lines
    config["optimizer"] = make_optimizer_section(config, args)
    if args.precision:
        config.pop("data_types", None)
        config["bf16"] = {**config.get("bf16", {}), "enabled": args.precision == "bf16"}
        config["fp16"] = {**config.get("fp16", {}), "enabled": args.precision == "fp16"}
    if args.metrics_dir:
        files = {"enabled": True, "output_path": args.metrics_dir, "job_name": args.run_name}
        config.setdefault("csv_monitor", files)
        if importlib.util.find_spec("tensorboard"):
            config.setdefault("tensorboard", files)
    return config


def make_optimizer_section(config: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The config's optimizer section, with the rates of the command line, or AdamW's for the comparison."""
    section = config.get("optimizer", {"type": "Muon", "params": {}})
    params = dict(section.get("params", {}))
    if args.weight_decay is not None:
        params["weight_decay"] = args.weight_decay
    rates = {"lr": args.lr, "muon_lr": args.muon_lr, "adam_lr": args.adam_lr}
    if args.optimizer != "AdamW":
        params.update({key: rate for key, rate in rates.items() if rate is not None})
        return {"type": args.optimizer or section["type"], "params": params}
    kept = {key: params[key] for key in ("betas", "eps", "weight_decay") if key in params}
    kept["lr"] = args.lr if args.lr is not None else params.get("adam_lr", params.get("lr", 3e-4))
    # torch's AdamW needs no compiler; only DeepSpeed's own can step on offloaded parameters.
    kept["torch_adam"] = "offload_optimizer" not in config.get("zero_optimization", {})
    return {"type": "AdamW", "params": kept}


def schedule(args: argparse.Namespace) -> Callable[[int], float]:
    """The factor on every group's rate at a step: one for all keeps the ratio of Muon's and AdamW's rates."""
    warmup = max(1, round(args.warmup * args.steps))
    decay = max(1, round(args.decay * args.steps))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if args.schedule == "wsd":
            return min(1.0, max(0.0, (args.steps - step) / decay))
        progress = min(1.0, (step - warmup) / max(1, args.steps - warmup))
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def load_text(args: argparse.Namespace) -> TokenText:
    """The text that the command line asked for, as tokens."""
    if args.dataset:
        documents = hugging_face(args.dataset, args.dataset_column)
    else:
        documents = text_files(args.data) if args.data else standard_library()
    return load_tokens(documents, max_bytes=args.max_bytes)


def build_engine(args: argparse.Namespace, config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    """The model under DeepSpeed. Every rank must call it."""
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if args.zero_init and stage != 3:
        raise UsageError(f"--zero_init is for ZeRO stage 3; the config says stage {stage}")
    torch.manual_seed(args.seed)
    context = deepspeed.zero.Init(config_dict_or_path=config) if args.zero_init else contextlib.nullcontext()
    with context:
        model = GPT(GPTConfig(dim=args.dim, layers=args.layers, heads=args.heads))
    factor = schedule(args)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
    )
    return engine


def mean_over_ranks(value: torch.Tensor) -> float:
    """The mean of a scalar over all ranks. Every rank must call it."""
    value = value.detach().float().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def train_step(engine: deepspeed.DeepSpeedEngine, batches: Batches, seed: int, step: int) -> torch.Tensor:
    """One optimizer step; returns this rank's mean loss over its micro-steps."""
    micro_steps = engine.gradient_accumulation_steps()
    total = torch.zeros((), device=engine.device)
    for micro_step in range(micro_steps):
        tokens, targets = batches.draw(seed, step, micro_step, micro_steps)
        loss = engine(tokens.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        engine.step()  # DeepSpeed itself knows which micro-step ends the optimizer step
        total += loss.detach()
    return total / micro_steps


@torch.no_grad()
def evaluate(engine: deepspeed.DeepSpeedEngine, batches: Batches, count: int) -> float:
    """The mean validation loss over ``count`` fixed batches on every rank. Every rank must call it."""
    engine.eval()
    total = torch.zeros((), device=engine.device)
    for index in range(count):
        tokens, targets = batches.spread(index, count)
        total += engine(tokens.to(engine.device), targets.to(engine.device))
    engine.train()
    return mean_over_ranks(total / count)


class Reporter:
    """Progress bar and lines on rank 0, metrics to DeepSpeed's monitors, tokens per second."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, first: int, steps: int, step_tokens: int) -> None:
        self.engine, self.step_tokens = engine, step_tokens
        self.quiet = dist.get_rank() != 0
        hidden = self.quiet or not sys.stderr.isatty()
        self.bar = tqdm(total=steps, initial=first, unit="step", disable=hidden)
        self.losses: list[torch.Tensor] = []
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves what came before, such as a validation, out of the tokens per second."""
        self.started, self.timed_steps = time.perf_counter(), 0

    def step(self, loss: torch.Tensor) -> None:
        """Takes note of one finished step."""
        self.losses.append(loss)
        self.timed_steps += 1
        self.bar.update()

    def train(self, step: int) -> None:
        """Reports the steps since the last report. Every rank must call it."""
        # This waits for the GPU, which is what makes the clock right.
        loss = mean_over_ranks(torch.stack(self.losses).mean())
        rate = self.step_tokens * self.timed_steps / (time.perf_counter() - self.started)
        self.losses = []
        self.restart_clock()
        self.write(step, {"train/loss": loss, "train/tokens_per_second": rate})
        self.bar.set_postfix_str(f"loss {loss:.4f}, {rate:,.0f} tokens/s")
        if self.bar.disable:  # not a terminal: lines for the log file instead
            self.say(f"step {step}  train loss {loss:.4f}  {rate:,.0f} tokens/s")

    def validation(self, step: int, loss: float) -> None:
        """Reports a validation loss."""
        self.write(step, {"val/loss": loss})
        self.say(f"step {step}  validation loss {loss:.4f}")

    def write(self, step: int, values: dict[str, float]) -> None:
        """Sends values to whatever monitors the config switches on."""
        if self.engine.monitor.enabled:
            self.engine.monitor.write_events([(name, value, step) for name, value in values.items()])

    def say(self, line: str) -> None:
        """Prints a line on rank 0, above the progress bar."""
        if not self.quiet:
            tqdm.write(line)
            sys.stdout.flush()


def resume(engine: deepspeed.DeepSpeedEngine, args: argparse.Namespace, identity: dict[str, Any]) -> int:
    """Loads the latest checkpoint; returns how many steps it has behind it. Every rank must call it.

    Raises:
        UsageError: there is no checkpoint, or its run saw other batches than this run would.
    """
    path, state = engine.load_checkpoint(args.save_dir)
    if path is None:
        raise UsageError(f"--resume: no checkpoint in {args.save_dir}")
    changed = {key: (state["identity"].get(key), value) for key, value in identity.items()}
    changed = {key: pair for key, pair in changed.items() if pair[0] != pair[1]}
    if changed:
        told = ", ".join(f"{key} was {old!r} and is {new!r}" for key, (old, new) in changed.items())
        raise UsageError(f"--resume: the batches would not go on where the checkpoint stopped: {told}")
    return state["step"]


def main() -> None:
    """Trains, validates, reports and saves, as the command line says."""
    args = parse_args()
    config = make_ds_config(args)
    # Under mpirun DeepSpeed finds ranks and address through mpi4py but takes the port from here.
    deepspeed.init_distributed(distributed_port=int(os.environ.get("MASTER_PORT", "29500")))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))

    text = load_text(args)
    engine = build_engine(args, config)
    batch_size, micro_steps = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    batches = Batches(text.train, batch_size, args.seq_len, rank, world_size)
    validation = Batches(text.validation, batch_size, args.seq_len, rank, world_size)
    sequences = batch_size * micro_steps * world_size
    identity = {"text": text.fingerprint, "seed": args.seed, "seq_len": args.seq_len, "sequences": sequences}
    first = resume(engine, args, identity) if args.resume else 0

    reporter = Reporter(engine, first, args.steps, sequences * args.seq_len)
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    reporter.say(
        f"{config['optimizer']['type']}, ZeRO {engine.zero_optimization_stage()}, {world_size} ranks, "
        f"{parameters:,} parameters, {len(text.train):,} training tokens, {sequences * args.seq_len:,} a step"
    )
    for step in range(first, args.steps):
        reporter.step(train_step(engine, batches, args.seed, step))
        done, last = step + 1, step + 1 == args.steps
        if last or done % args.log_every == 0:
            reporter.train(done)
        if args.eval_batches and (last or done % args.eval_every == 0):
            reporter.validation(done, evaluate(engine, validation, args.eval_batches))
            reporter.restart_clock()
        if args.save_dir and (last or (args.save_every and done % args.save_every == 0)):
            engine.save_checkpoint(args.save_dir, f"step{done}", {"step": done, "identity": identity})
            reporter.restart_clock()
    reporter.bar.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except (DataError, UsageError) as error:
        sys.exit(f"train_gpt.py: {error}")
