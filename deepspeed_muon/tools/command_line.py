"""The arguments of ``python -m deepspeed_muon`` and ``deepspeed-muon``, and the output of a command.

Imports the standard library alone: the package parses its command line with it before it imports torch and DeepSpeed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from deepspeed_muon.version import __version__

MODEL_FORMS = (
    "a preset (llama-7b, llama-70b, qwen3-30b-a3b, kimi-k2), a Hugging Face config.json, a folder with one, a class or "
    "model_type of transformers, a model in Hugging Face's cache, or MODULE:FUNCTION, which returns a module"
)
"""The forms of MODEL, for help and errors."""

SIZES = {
    "width": "hidden size",
    "tokens": "tokens of the whole run",
    "batch": "tokens in a step",
}
"""What a rate may depend on."""


class Output(NamedTuple):
    """What a command prints and returns.

    Attributes:
        data: The result as data that can be serialised to JSON, for ``--json``.
        text: The result as text; empty if an error was printed.
        status: The exit status.
    """

    data: Any
    text: str
    status: int = 0


def begin() -> None:
    """Parse the arguments of this process, which ends here after ``--help``, ``--version`` or an error of usage.

    With ``--json`` nothing but JSON may reach standard output: DeepSpeed's logger, which is made by its import, writes
    to standard error. An interrupt ends the imports that follow without a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in a background job
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    if getattr(parse(), "json", False):
        sys.stdout = sys.stderr


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed arguments; ``command`` names the command."""
    name = os.path.basename(sys.argv[0])
    parser = argparse.ArgumentParser(
        prog=name if name == "deepspeed-muon" else "python -m deepspeed_muon",
        description="Muon for DeepSpeed ZeRO.",
    )
    parser.add_argument("--version", action="version", version=f"deepspeed_muon {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    json_option = argparse.ArgumentParser(add_help=False)
    json_option.add_argument("--json", action="store_true", help="print JSON")

    command = commands.add_parser("report", parents=[json_option], help="what this machine can build and run")
    text = "run each op against its reference (may build them)"
    command.add_argument("--selftest", action="store_true", help=text)
    _add_checkpoint(commands, json_option)
    text = "routes, owners, bytes, memory and predicted times of a model, without GPUs or weights"
    _add_plan_options(commands.add_parser("plan", parents=[json_option], help=text))
    text = "Muon or AdamW for each parameter of a model, and why"
    _add_routes_options(commands.add_parser("routes", parents=[json_option], help=text))
    _add_rates_options(
        commands.add_parser("rates", help="settings for Muon from those of AdamW, at another size")
    )
    return parser.parse_args(arguments)


def _add_checkpoint(commands: Any, json_option: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "checkpoint", help="consolidate, export, inspect, verify and convert checkpoints"
    )
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    reading = argparse.ArgumentParser(add_help=False)
    text = "unpickle anything in DeepSpeed's files: can run any code"
    reading.add_argument("--trust-pickles", action="store_true", help=text)
    tag, set_help, out_help = "a tag's folder of save_checkpoint", "a consolidated set", "folder to write"

    text = "DeepSpeed's saved files, also of its own Muon or AdamW -> one safetensors set"
    command = subcommands.add_parser("consolidate", parents=[reading], help=text)
    command.add_argument("dir", help=f"{tag}, or the folder with 'latest'")
    command.add_argument("out", help=out_help)
    command.add_argument("--shard-bytes", type=int, help="size of a file (2 GiB)")

    command = subcommands.add_parser("export", help="a consolidated set -> weights for other programs")
    command.add_argument("set", help=set_help)
    command.add_argument("out", help=f"{out_help}; must be new or empty")
    command.add_argument("--everything", action="store_true", help="the optimizer's state too")

    text = "DeepSpeed's saved files -> universal checkpoint"
    command = subcommands.add_parser("universal", parents=[reading], help=text)
    # The names of the arguments are those of DeepSpeed's ds_to_universal.
    command.add_argument("--input_folder", required=True, help=tag)
    command.add_argument("--output_folder", required=True, help=f"{out_help}; must be new or empty")

    text = "print the contents of a checkpoint"
    command = subcommands.add_parser("inspect", parents=[reading, json_option], help=text)
    command.add_argument("dir", help=f"{set_help} or DeepSpeed's files")

    text = "check completeness, checksums and numbers of a consolidated set"
    command = subcommands.add_parser("verify", parents=[json_option], help=text)
    command.add_argument("dir", help=set_help)
    text = "accept tensors that hold infinities or NaN"
    command.add_argument("--allow-nonfinite", action="store_true", help=text)


def _add_plan_options(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    option("model", metavar="MODEL", help=MODEL_FORMS)
    option("--world-size", type=int, default=8, help="GPUs, tensor-parallel ones counted (8)")
    option("--stage", type=int, choices=(0, 1, 2, 3), default=3, help="ZeRO stage (3)")
    option("--tensor-parallel", type=int, default=1, help="GPUs that share every matrix (1)")
    option("--expert-parallel", type=int, default=1, help="GPUs that share the experts of a layer (1)")
    option("--gpus-per-node", type=int, default=8, help="GPUs that NVLink connects (8)")
    option("--gpu", default="h100", help="a100, b200, h100, h200, or another with its three figures (h100)")
    option("--flops", type=float, metavar="TFLOPS", help="its dense bf16 TFLOP/s")
    option("--memory", type=float, metavar="GB", help="its memory")
    option("--bandwidth", type=float, metavar="GB/S", help="of its memory")
    option("--params", default="{}", help="optimizer.params as JSON, or a DeepSpeed config file")
    option("--efficiency", type=float, default=0.5, help="fraction of peak TFLOP/s reached (0.5)")
    text = "the rate of all links of a node together (default: one port for each GPU, as in the GPU's server)"
    option("--network-gbit", type=float, metavar="RATE", help=text)
    option("--separate-experts", action="store_true", help="every expert is a parameter of its own")
    option("--owners", action="store_true", help="the owner of every matrix (with --json)")


def _add_routes_options(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    option("model", metavar="MODEL", help=f"{MODEL_FORMS}; or a consolidated set, which has its routes")
    option("--params", default="{}", help="optimizer.params as JSON, or a DeepSpeed config file")
    text = "a further pattern of names for {} (may be given several times)"
    option("--include", action="append", default=[], metavar="PATTERN", help=text.format("Muon"))
    option("--exclude", action="append", default=[], metavar="PATTERN", help=text.format("AdamW"))
    option("--all", action="store_true", help="one row for each parameter, not for equal ones of all layers")
    option("--guesses", action="store_true", help="only the routes that rest on a guess")
    option("--device", choices=("meta", "cpu"), default="meta", help="where MODULE:FUNCTION builds (meta)")


def _add_rates_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", help="a DeepSpeed configuration with AdamW or Muon")
    sizes = ", ".join(f"{size} ({meaning})" for size, meaning in SIZES.items())
    for option, name, text in (
        ("--from", "before", f"the run on which the rate was tuned, as in width=512 tokens=10e9: {sizes}"),
        ("--to", "after", "the run to train"),
    ):
        command.add_argument(option, dest=name, metavar="NAME=NUMBER", nargs="+", default=[], help=text)
