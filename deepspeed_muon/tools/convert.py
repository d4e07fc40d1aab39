"""Checkpoints without an engine: ``python -m deepspeed_muon checkpoint`` and the functions behind its commands.

In one process they convert DeepSpeed's saved files to a consolidated set or a universal checkpoint, inspect both kinds
of checkpoints, and verify a set.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed_muon.checkpoint.consolidate import (
    DEFAULT_SHARD_BYTES,
    FolderWriter,
    Piece,
    SavePlan,
    checked_folder,
    write_set,
)
from deepspeed_muon.checkpoint.deepspeed_files import find_tag_folder, model_files
from deepspeed_muon.checkpoint.files import folder_of, make_folder, new_folder, refusing, replace_file
from deepspeed_muon.checkpoint.index import INDEX_NAME, CheckpointIndex, load_index
from deepspeed_muon.checkpoint.restore import checked_settings, nonfinite_text
from deepspeed_muon.checkpoint.sources import ConsolidatedSource
from deepspeed_muon.errors import CheckpointError, printable
from deepspeed_muon.logs import counted
from deepspeed_muon.tools.deepspeed_reader import DeepSpeedFiles
from deepspeed_muon.transport.ranks import Ranks


def consolidate_files(
    folder: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    **reading: Any,
) -> CheckpointIndex:
    """Convert a checkpoint that DeepSpeed saved to one safetensors set, with some megabytes in memory at a time.

    Args:
        folder: A tag's folder, or the folder with ``latest``: ours, DeepSpeed's own Muon's, or AdamW's.
        out_dir: The folder to write; made if needed.
        shard_bytes: Size of a file, in bytes.
        **reading: ``trust``, ``include``, ``exclude`` of :class:`DeepSpeedFiles`.

    Returns:
        The index that was written.

    Raises:
        CheckpointError: Naming the file and the parameter. A set that ``out_dir`` held before is untouched then, unless
            the message says that the new one is in place.
    """
    out = checked_folder(out_dir, shard_bytes)
    saved = DeepSpeedFiles(folder, **reading)
    make_folder(out)

    def fill(pieces: Sequence[Piece | None], content: Tensor) -> None:
        # One process writes, so the only piece of a round is its own.
        with refusing(str(saved.folder)):
            for piece in filter(None, pieces):
                saved.copy(plan.transfers(piece), content)

    with contextlib.closing(FolderWriter(out)) as writer:
        plan = SavePlan(saved.slices, shard_bytes, writer.save_id)
        index = write_set(out, plan, fill, saved.index_fields, writer, Ranks())
    assert index is not None
    return index


def verify_folder(folder: str | os.PathLike[str], *, allow_nonfinite: bool = False) -> CheckpointIndex:
    """Check completeness, headers, checksums, settings and numbers of a consolidated set, and return its index.

    Args:
        folder: The set.
        allow_nonfinite: Accept tensors that hold infinities or NaN.

    Raises:
        CheckpointError: Naming the file and the parameter.
    """
    with refusing(repr(folder)), contextlib.closing(ConsolidatedSource(folder)) as source:
        nonfinite = source.verify(0, 1)
        checked_settings(source.index.groups, source.where)
    if nonfinite and not allow_nonfinite:
        raise CheckpointError(
            f"{source.where}: complete, but {nonfinite_text(nonfinite)}. restore refuses it unless allow_nonfinite is "
            f"set"
        )
    return source.index


def convert_to_universal(
    input_folder: str | os.PathLike[str], output_folder: str | os.PathLike[str], **reading: Any
) -> list[str]:
    """Convert the folder of a tag that DeepSpeed saved to a universal checkpoint.

    It has a consolidated set in the folder ``zero``, and the model states under the names that each stage looks for.

    Args:
        input_folder: The tag's folder: ours, DeepSpeed's own Muon's, or AdamW's, of stages 0 to 3.
        output_folder: The folder to write; must be new or empty. ``latest_universal`` beside it will name it.
        **reading: ``trust``, ``include``, ``exclude`` of :class:`DeepSpeedFiles`.

    Returns:
        Sentences about what was lost or made up.

    Raises:
        CheckpointError: Naming the file and the parameter.
    """
    out = Path(os.path.abspath(folder_of("output_folder", output_folder)))
    with new_folder(out) as partial:
        index = consolidate_files(input_folder, partial / "zero", **reading)
        for model_rank, path in model_files(find_tag_folder(Path(input_folder))).items():
            # A copy, because DeepSpeed overwrites the file when it saves the tag again.
            copy = partial / f"{model_rank}_model_states.pt"
            shutil.copyfile(path, copy)
            stage_3_name = partial / f"zero_pp_rank_0_{copy.name}"  # stage 3 looks for this name
            try:
                # Both names have one content, so a hard link is enough where the file system has them.
                os.link(copy, stage_3_name)
            except OSError:
                shutil.copyfile(copy, stage_3_name)
    # Last, so that the name is written only once the folder is complete.
    replace_file(out.parent / "latest_universal", out.name.encode())
    return index.lossy


def add_subcommands(subparsers: Any) -> None:
    """Add the command ``checkpoint`` with its subcommands.

    Every parser sets ``run``: a function of the parsed arguments that returns the exit code.

    Args:
        subparsers: From ``ArgumentParser.add_subparsers``.
    """
    parser = subparsers.add_parser("checkpoint", help="consolidate, inspect, verify and convert checkpoints")
    commands = parser.add_subparsers(dest="checkpoint_command", required=True, metavar="COMMAND")

    reading = argparse.ArgumentParser(add_help=False)
    reading.add_argument(
        "--trust-pickles",
        action="store_true",
        help="unpickle anything in DeepSpeed's files: can run any code",
    )
    reading.add_argument("--include", action="append", default=[], help="from AdamW: names that go to Muon")
    reading.add_argument("--exclude", action="append", default=[], help="from AdamW: names that go to AdamW")

    def add(name: str, run: Any, text: str, *parents: Any, **folder_help: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, parents=parents, help=text)
        command.set_defaults(run=run)
        for folder, help_text in folder_help.items():
            command.add_argument(folder, help=help_text)
        return command

    tag = "a tag's folder of save_checkpoint"
    text = "DeepSpeed's saved files, also of its own Muon or AdamW -> one safetensors set"
    folders = {"dir": f"{tag}, or the folder with 'latest'", "out": "folder to write"}
    command = add("consolidate", _consolidate, text, reading, **folders)
    command.add_argument("--shard-bytes", type=int, default=DEFAULT_SHARD_BYTES, help="size of a file")

    command = add("universal", _universal, "DeepSpeed's saved files -> universal checkpoint", reading)
    # The names of the arguments are those of DeepSpeed's ds_to_universal.
    command.add_argument("--input_folder", required=True, help=tag)
    command.add_argument("--output_folder", required=True, help="folder to write; must be new or empty")

    text = "print the contents of a checkpoint"
    command = add("inspect", _inspect, text, reading, dir="a consolidated set or DeepSpeed's files")
    command.add_argument("--json", action="store_true", help="the index itself")

    text = "check completeness, checksums and numbers of a consolidated set"
    command = add("verify", _verify, text, dir="a consolidated set")
    text = "accept tensors that hold infinities or NaN"
    command.add_argument("--allow-nonfinite", action="store_true", help=text)


def _reading(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"trust": arguments.trust_pickles, "include": arguments.include, "exclude": arguments.exclude}


def _consolidate(arguments: argparse.Namespace) -> int:
    index = consolidate_files(
        arguments.dir, arguments.out, shard_bytes=arguments.shard_bytes, **_reading(arguments)
    )
    contents = f"{counted(index.parameters, 'parameter')} in {counted(index.files, 'file')}"
    return _print(f"{printable(arguments.out)}: {contents}", index.lossy)


def _universal(arguments: argparse.Namespace) -> int:
    lossy = convert_to_universal(arguments.input_folder, arguments.output_folder, **_reading(arguments))
    load = '"checkpoint": {"load_universal": true}'
    hint = f"universal checkpoint; to load it, write {load} into the DeepSpeed configuration"
    return _print(f"{printable(arguments.output_folder)}: {hint}", lossy)


def _inspect(arguments: argparse.Namespace) -> int:
    if (Path(arguments.dir) / INDEX_NAME).is_file():
        index = load_index(arguments.dir)
        head = [
            f"consolidated checkpoint, format {index.version}",
            f"written by {_listed(index.versions)}",
            f"{counted(index.files, 'file')}, {sum(file.bytes for file in index.files.values())} bytes",
        ]
    else:
        saved = DeepSpeedFiles(arguments.dir, verify=False, **_reading(arguments))
        index = CheckpointIndex.model_construct(**saved.index_fields, parameters=saved.parameters)
        head = [f"DeepSpeed checkpoint {printable(str(saved.folder))}"]
    if arguments.json:
        print(json.dumps(index.model_dump(mode="json"), indent=1))
        return 0
    head.append(f"from {_listed(index.source)}")
    head.append(f"{counted(index.parameters, 'parameter')}, global_steps {index.progress.global_steps}")
    width = max((len(printable(name)) for name in index.parameters), default=0)
    table = [
        f"{printable(name):{width}}  {record.algorithm:5}  step {record.step}  {list(record.shape)}  "
        f"{' '.join(record.tensor_keys)}"
        for name, record in index.parameters.items()
    ]
    return _print("\n".join([*head, *table]), index.lossy)


def _listed(values: Mapping[str, Any]) -> str:
    return printable(", ".join(f"{key} {value}" for key, value in values.items()))


def _verify(arguments: argparse.Namespace) -> int:
    try:
        index = verify_folder(arguments.dir, allow_nonfinite=arguments.allow_nonfinite)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    return _print(
        f"{printable(arguments.dir)}: complete; the checksums of {counted(index.files, 'file')} agree"
    )


def _print(text: str, lossy: Sequence[str] = ()) -> int:
    print("\n".join([text, *(f"lossy: {printable(line)}" for line in lossy)]))
    return 0
