"""Checkpoints without an engine: ``python -m deepspeed_muon checkpoint`` and the functions behind its commands.

In one process they convert DeepSpeed's saved files to a consolidated set or a universal checkpoint, inspect both kinds
of checkpoints, and verify or export a set.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from deepspeed_muon.checkpoint.consolidate import (
    DEFAULT_SHARD_BYTES,
    Piece,
    SavePlan,
    ShardFile,
    checked_folder,
    folder_writer,
    pack,
    write_set,
)
from deepspeed_muon.checkpoint.deepspeed_files import find_tag_folder, model_files
from deepspeed_muon.checkpoint.files import (
    folder_of,
    fsync_folder,
    make_folder,
    new_folder,
    refusing,
    replace,
    temporary_path,
    unlink,
)
from deepspeed_muon.checkpoint.index import (
    INDEX_NAME,
    ITEM_BYTES,
    WINDOW_NUMEL,
    CheckpointIndex,
    ConsolidatedSource,
    FileLayout,
    load_index,
    tensor_name,
)
from deepspeed_muon.checkpoint.restore import checked_settings, nonfinite_text
from deepspeed_muon.errors import CheckpointError, printable
from deepspeed_muon.logs import counted
from deepspeed_muon.tools.command_line import Output
from deepspeed_muon.tools.deepspeed_reader import DeepSpeedFiles
from deepspeed_muon.transport.ranks import Ranks

BAR_DELAY = 2.0
"""Seconds after which a command shows its progress."""


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
        **reading: ``trust`` of :class:`DeepSpeedFiles`.

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
                bar.update((piece.stop - piece.start) * ITEM_BYTES)

    with folder_writer(out) as writer:
        plan = SavePlan(saved.slices, shard_bytes, writer.save_id)
        with bytes_bar("convert", ITEM_BYTES * sum(layout.numel for layout in plan.layouts.values())) as bar:
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
    with refusing(repr(folder)), contextlib.closing(_WatchedSource(folder)) as source:
        with bytes_bar("verify", sum(file.bytes for file in source.index.files.values())) as source.bar:
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
        **reading: ``trust`` of :class:`DeepSpeedFiles`.

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
    latest = out.parent / "latest_universal"
    with refusing(str(latest)):
        temporary = temporary_path(latest)
        try:
            temporary.write_text(out.name)
            replace(temporary, latest)
        finally:
            unlink(temporary)  # nothing is left of a file that was renamed
        fsync_folder(out.parent)
    return index.lossy


def export_weights(
    set_folder: str | os.PathLike[str], out_dir: str | os.PathLike[str], *, everything: bool = False
) -> int:
    """Write the weights of a consolidated set for other programs, as Hugging Face's ``from_pretrained`` reads them.

    The files are checked first, and copied with some megabytes in memory at a time. Frozen parameters and buffers are
    in no set.

    Args:
        set_folder: The set.
        out_dir: The folder to write; must be new or empty.
        everything: Whether to write the optimizer's state too, under the set's names (``momentum_buffer/...``).

    Returns:
        The number of tensors.

    Raises:
        CheckpointError: Naming the file and the parameter.
    """
    out = Path(os.path.abspath(folder_of("out_dir", out_dir)))
    verify_folder(set_folder)
    with contextlib.closing(ConsolidatedSource(set_folder)) as source, new_folder(out) as partial:
        # Name in the new files to parameter and key. torch.compile adds a prefix to the model's names.
        tensors: dict[str, tuple[str, str]] = {}
        for name, record in source.parameters.items():
            for key in record.tensor_keys if everything else ("fp32",):
                entry = (name if key == "fp32" else tensor_name(key, name)).replace("_orig_mod.", "")
                if tensors.setdefault(entry, (name, key)) != (name, key):
                    raise CheckpointError(f"{source.where}: two tensors would be called {entry}")
        shapes = {entry: source.parameters[name].shape_of(key) for entry, (name, key) in tensors.items()}
        shards = pack(shapes, DEFAULT_SHARD_BYTES)
        file_of: dict[str, str] = {}  # by tensor
        sizes = [ITEM_BYTES * math.prod(shape) for shape in shapes.values()]
        with bytes_bar("export", sum(sizes)) as bar:
            for number, shard in enumerate(shards, 1):
                file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                file_of |= dict.fromkeys(shard, file)
                with contextlib.closing(ShardFile(partial / file, FileLayout.of(shard))) as written:
                    for entry, shape in shard.items():
                        numel = math.prod(shape)
                        for start in range(0, numel, WINDOW_NUMEL):
                            count = min(WINDOW_NUMEL, numel - start)
                            written.write(source.read(*tensors[entry], start, count))  # (count,) fp32
                            bar.update(count * ITEM_BYTES)
                    written.finish()
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": file_of}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return len(shapes)


def bytes_bar(text: str, total: int) -> Any:
    """Return a progress bar on standard error, if that is a terminal."""
    return tqdm(total=total, desc=text, unit="B", unit_scale=True, delay=BAR_DELAY, disable=None, leave=False)


class _WatchedSource(ConsolidatedSource):
    """A set that shows how many bytes were read."""

    bar: Any = None

    def read(self, parameter: str, key: str, start: int, numel: int) -> Tensor:
        self.bar.update(numel * ITEM_BYTES)
        return super().read(parameter, key, start, numel)


def run(arguments: argparse.Namespace) -> Output:
    """Run a subcommand of ``checkpoint``."""
    commands = {
        "consolidate": _consolidate,
        "export": _export,
        "universal": _universal,
        "inspect": _inspect,
        "verify": _verify,
    }
    return commands[arguments.subcommand](arguments)


def _consolidate(arguments: argparse.Namespace) -> Output:
    shard_bytes = DEFAULT_SHARD_BYTES if arguments.shard_bytes is None else arguments.shard_bytes
    index = consolidate_files(
        arguments.dir, arguments.out, shard_bytes=shard_bytes, trust=arguments.trust_pickles
    )
    contents = f"{counted(index.parameters, 'parameter')} in {counted(index.files, 'file')}"
    return _output(f"{printable(arguments.out)}: {contents}", index.lossy)


def _export(arguments: argparse.Namespace) -> Output:
    count = export_weights(arguments.set, arguments.out, everything=arguments.everything)
    return _output(
        f"{printable(arguments.out)}: {count} tensors; frozen parameters and buffers are in no set"
    )


def _universal(arguments: argparse.Namespace) -> Output:
    lossy = convert_to_universal(
        arguments.input_folder, arguments.output_folder, trust=arguments.trust_pickles
    )
    load = '"checkpoint": {"load_universal": true}'
    hint = f"universal checkpoint; to load it, write {load} into the DeepSpeed configuration"
    return _output(f"{printable(arguments.output_folder)}: {hint}", lossy)


def _inspect(arguments: argparse.Namespace) -> Output:
    if (Path(arguments.dir) / INDEX_NAME).is_file():
        index = load_index(arguments.dir)
        head = [
            f"consolidated checkpoint, format {index.version}",
            f"written by {_listed(index.versions)}",
            f"{counted(index.files, 'file')}, {sum(file.bytes for file in index.files.values())} bytes",
        ]
    else:
        saved = DeepSpeedFiles(arguments.dir, verify=False, trust=arguments.trust_pickles)
        index = CheckpointIndex.model_construct(**saved.index_fields, parameters=saved.parameters)
        head = [f"DeepSpeed checkpoint {printable(str(saved.folder))}"]
    head.append(f"from {_listed(index.source)}")
    head.append(f"{counted(index.parameters, 'parameter')}, global_steps {index.progress.global_steps}")
    width = max((len(printable(name)) for name in index.parameters), default=0)
    table = [
        f"{printable(name):{width}}  {record.algorithm:5}  step {record.step}  {list(record.shape)}  "
        f"{' '.join(record.tensor_keys)}"
        for name, record in index.parameters.items()
    ]
    return _output("\n".join([*head, *table]), index.lossy, index.model_dump(mode="json"))


def _listed(values: Mapping[str, Any]) -> str:
    return printable(", ".join(f"{key} {value}" for key, value in values.items()))


def _verify(arguments: argparse.Namespace) -> Output:
    try:
        index = verify_folder(arguments.dir, allow_nonfinite=arguments.allow_nonfinite)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return Output({"ok": False, "error": str(error)}, "", status=1)
    files = counted(index.files, "file")
    data = {"ok": True, "files": len(index.files), "parameters": len(index.parameters)}
    return _output(f"{printable(arguments.dir)}: complete; the checksums of {files} agree", data=data)


def _output(text: str, lossy: Sequence[str] = (), data: Any = None) -> Output:
    return Output(data, "\n".join([text, *(f"lossy: {printable(line)}" for line in lossy)]))
