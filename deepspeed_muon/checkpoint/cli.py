"""The command line: ``python -m deepspeed_muon checkpoint consolidate | inspect | verify | convert | universal``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed_muon.checkpoint.deepspeed_files import DeepSpeedFiles
from deepspeed_muon.checkpoint.index import INDEX_NAME, CheckpointIndex, ParameterRecord, load_index
from deepspeed_muon.checkpoint.offline import consolidate_files, export_to_torch, verify_folder
from deepspeed_muon.checkpoint.shards import DEFAULT_SHARD_BYTES
from deepspeed_muon.checkpoint.universal import convert_to_universal
from deepspeed_muon.errors import CheckpointError, printable
from deepspeed_muon.logs import counted


def add_subcommands(subparsers: Any) -> None:
    """Add ``checkpoint`` with its own subcommands.

    Every parser sets ``run``: a function of the parsed arguments that returns the exit code.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = subparsers.add_parser("checkpoint", help="consolidate, inspect, verify and convert checkpoints")
    commands = parser.add_subparsers(dest="checkpoint_command", required=True)

    reading = argparse.ArgumentParser(add_help=False)
    reading.add_argument(
        "--trust-pickles",
        action="store_true",
        help="unpickle anything in DeepSpeed's files: can run any code",
    )
    reading.add_argument("--include", action="append", default=[], help="from AdamW: names that go to Muon")
    reading.add_argument("--exclude", action="append", default=[], help="from AdamW: names that stay AdamW's")
    writing = argparse.ArgumentParser(add_help=False, parents=[reading])
    writing.add_argument("--shard-bytes", type=int, default=DEFAULT_SHARD_BYTES, help="size of a file")

    command = commands.add_parser(
        "consolidate", parents=[writing], help="DeepSpeed's saved files -> one safetensors set"
    )
    command.add_argument("dir", help="a tag's folder of save_checkpoint, or the folder with 'latest'")
    command.add_argument("out", help="folder to write")
    command.set_defaults(run=_convert, to="consolidated")

    command = commands.add_parser(
        "convert",
        parents=[writing],
        help="from DeepSpeed's own Muon or AdamW, or to torch.optim.Muon's state_dict",
    )
    command.add_argument("dir", help="DeepSpeed's files; for --to torch a consolidated set")
    command.add_argument("out", help="folder to write")
    command.add_argument("--to", choices=("consolidated", "torch"), default="consolidated")
    command.set_defaults(run=_convert)

    command = commands.add_parser(
        "universal", parents=[reading], help="DeepSpeed's saved files -> universal checkpoint"
    )
    # The names of the arguments are those of DeepSpeed's ds_to_universal.
    command.add_argument("--input_folder", required=True, help="a tag's folder of save_checkpoint")
    command.add_argument("--output_folder", required=True, help="folder to write; must not exist yet")
    command.set_defaults(run=_universal)

    command = commands.add_parser("inspect", parents=[reading], help="print what a directory holds")
    command.add_argument("dir")
    command.add_argument("--json", action="store_true", help="the index itself")
    command.set_defaults(run=_inspect)

    command = commands.add_parser(
        "verify", help="check completeness, checksums and numbers of a consolidated set"
    )
    command.add_argument("dir")
    command.add_argument(
        "--allow-nonfinite", action="store_true", help="accept tensors that hold infinities or NaN"
    )
    command.set_defaults(run=_verify)


def _reading(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"trust": arguments.trust_pickles, "include": arguments.include, "exclude": arguments.exclude}


def _convert(arguments: argparse.Namespace) -> int:
    if arguments.to == "torch":
        lossy = export_to_torch(arguments.dir, arguments.out)
        print(f"{printable(arguments.out)}: muon.pt, adamw.pt, weights.pt")
    else:
        index = consolidate_files(
            arguments.dir, arguments.out, shard_bytes=arguments.shard_bytes, **_reading(arguments)
        )
        lossy = index.lossy
        print(
            f"{printable(arguments.out)}: {counted(index.parameters, 'parameter')} in {counted(index.files, 'file')}"
        )
    return _print_lossy(lossy)


def _universal(arguments: argparse.Namespace) -> int:
    lossy = convert_to_universal(arguments.input_folder, arguments.output_folder, **_reading(arguments))
    print(
        f"{printable(arguments.output_folder)}: universal checkpoint; to load it, write "
        f'"checkpoint": {{"load_universal": true}} into the DeepSpeed configuration'
    )
    return _print_lossy(lossy)


def _inspect(arguments: argparse.Namespace) -> int:
    if (Path(arguments.dir) / INDEX_NAME).is_file():
        index = load_index(arguments.dir)
        print(json.dumps(index.model_dump(mode="json"), indent=1) if arguments.json else _described(index))
        return 0 if arguments.json else _print_lossy(index.lossy)
    saved = DeepSpeedFiles(arguments.dir, verify=False, **_reading(arguments))
    rows = {name: _row(record) for name, record in saved.records.items()}
    if arguments.json:
        print(json.dumps({"optimizer": saved.kind, "zero_stage": saved.stage, "parameters": rows}, indent=1))
        return 0
    print(f"DeepSpeed checkpoint {printable(str(saved.folder))}")
    print(f"optimizer {saved.kind}, ZeRO stage {saved.stage}, {counted(range(saved.world_size), 'rank')}")
    print(f"global_steps {saved.progress.global_steps}")
    print("\n".join(_table(rows)))
    return _print_lossy(saved.lossy)


def _described(index: CheckpointIndex) -> str:
    source = ", ".join(f"{key} {value}" for key, value in index.source.items())
    versions = ", ".join(f"{key} {value}" for key, value in index.versions.items())
    size = sum(record.bytes for record in index.files.values())
    rows = {name: _row(record) for name, record in index.parameters.items()}
    lines = [
        f"consolidated checkpoint, format {index.version}",
        f"from {printable(source)}",
        f"written by {printable(versions)}",
        f"{counted(index.parameters, 'parameter')}, {counted(index.files, 'file')}, {size} bytes",
        f"global_steps {index.progress.global_steps}",
        *_table(rows),
    ]
    return "\n".join(lines)


def _row(record: ParameterRecord) -> dict[str, Any]:
    return {
        "shape": list(record.shape),
        "algorithm": record.algorithm,
        "step": record.step,
        "tensors": list(record.tensor_keys),
    }


def _table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    names = list(map(printable, rows))
    width = max(map(len, names), default=0)
    return [
        f"{name:{width}}  {row['algorithm']:5}  step {row['step']}  {row['shape']}  {' '.join(row['tensors'])}"
        for name, row in zip(names, rows.values(), strict=True)
    ]


def _verify(arguments: argparse.Namespace) -> int:
    try:
        index = verify_folder(arguments.dir, allow_nonfinite=arguments.allow_nonfinite)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{printable(arguments.dir)}: complete; the checksums of {counted(index.files, 'file')} agree")
    return 0


def _print_lossy(lossy: Sequence[str]) -> int:
    for line in lossy:
        print(f"lossy: {printable(line)}")
    return 0
