"""Read without an engine what DeepSpeed saved of our optimizer, its own Muon or AdamW, at stages 0 to 3.

The files are pickles. torch's restricted unpickler (``weights_only``) reads them, with a short list of DeepSpeed's own
classes allowed. They are mapped into memory, so that the disk reads only what is copied.
"""

from __future__ import annotations

import functools
import io
import math
import os
import pickle
import re
import shutil
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.checkpoint.files import (
    check_tensor,
    drop_pages,
    file_digest,
    folder_of,
    is_name,
    new_folder,
    refusing,
    replace_file,
    write_synced,
)
from deepspeed_muon.checkpoint.foreign import foreign_state
from deepspeed_muon.checkpoint.index import OURS, UNIVERSAL_FORMAT, CheckpointIndex, json_settings
from deepspeed_muon.checkpoint.layout_record import RECORD_KEY, read_records
from deepspeed_muon.checkpoint.parameters import (
    ITEM_BYTES,
    HeldParameter,
    ParameterRecord,
    Transfer,
    put_together,
    transfers_of,
)
from deepspeed_muon.checkpoint.sources import RECORD_NAME, WINDOW
from deepspeed_muon.checkpoint.tag_folder import MODEL_FILES, TagFolder, optimizer_kind
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import logger
from deepspeed_muon.step.quantized import SCALE_KEY, first_scales, read_codes


class DeepSpeedFiles(TagFolder):
    """The parameters that one tag of ``engine.save_checkpoint`` holds, by name.

    Attributes:
        parts: Name of every whole tensor to the parts of it that groups of ranks hold.
        parameters: Name of every parameter to its record.
        about: What the index of a conversion says besides files and parameters.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        trust: bool = False,
        verify: bool = True,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        """Find the files, map them into memory and work out where every parameter lies.

        Args:
            folder: The tag's folder, or the folder with ``latest``.
            trust: See :func:`~deepspeed_muon.checkpoint.files.load_pickle`.
            verify: Compare every file with the CRC-32 in it, before anything of it is used.
            include: For AdamW checkpoints: patterns of names that go to Muon.
            exclude: For AdamW checkpoints: patterns of names that stay with AdamW.

        Raises:
            CheckpointError: Naming the file and, where one is to blame, the parameter.
        """
        super().__init__(folder, trust=trust, verify=verify)
        with refusing(f"{self.folder}: not as DeepSpeed writes it"):
            self._kind = optimizer_kind(self.inner[0])
            optimizer: Mapping[str, Any] = {}
            lossy: list[str] = []
            if self._kind == OURS:
                held, optimizer = self._from_record()
            else:
                held, lossy = foreign_state(self, self._kind, include, exclude)
            self.parts = put_together(held, self.files)
            self.parameters = {name: first.record for name, (first, *_) in self.parts.items()}
            self.about = {
                "source": {
                    "writer": "offline",
                    "optimizer": self._kind,
                    "zero_stage": self.stage,
                    "world_size": self.world_size,
                },
                "lossy": lossy,
                "optimizer": optimizer,
                "groups": [json_settings(group) for group in self.inner[0]["param_groups"]],
                "progress": self.progress,
            }

    def _from_record(self) -> tuple[list[HeldParameter], Mapping[str, Any]]:
        """Return what our layout record says of the parameters, and the settings of the optimizer."""
        contents = [inner.get(RECORD_KEY) for inner in self.inner]
        optimizer, found = read_records(contents, str(self.files[0]))
        if self.stage and any(held.placement.replicated for held in found):
            raise CheckpointError(f"{self.files[0]}: its layout record is not one of ZeRO stage {self.stage}")
        return [self._with_state(held) for held in found], optimizer

    def _with_state(self, held: HeldParameter) -> HeldParameter:
        """Return a parameter of a record with what the files of its ranks say of it."""
        first = held.holders[0]
        where = f"{self.files[first]}: parameter {held.name}"
        groups = self.inner[first]["param_groups"]
        if held.record.group >= len(self.inner[0]["param_groups"]):
            raise CheckpointError(f"{where}: there is no param group {held.record.group}")
        if self.stage == 0 and not any(held.partition in group["params"] for group in groups):
            raise CheckpointError(f"{where}: there is no parameter number {held.partition}")
        return held.with_state(self.state_of(held.partition, first), self.step_of(held.partition, first))

    def _flat(self, held: HeldParameter, key: str, rank: int) -> Tensor:
        """Return the partition of a rank of a group, flat, as its file has it.

        Raises:
            CheckpointError: If the file has none, or something else.
        """
        number = held.holders[rank]
        try:
            saved = self._saved(held, key, number)
        except (KeyError, IndexError) as error:
            remedy = "" if self.stage else ": consolidate it with the engine, or save at ZeRO stage 1"
            raise CheckpointError(
                f"{self.files[number]}: no {key} of parameter {held.name}{remedy}"
            ) from error
        coded = key == "momentum_buffer" and getattr(saved, "dtype", None) == torch.int8
        check_tensor(saved, f"{self.files[number]}: {key} of parameter {held.name}", coded=coded)
        flat: Tensor = saved.detach().reshape(-1)
        return flat

    def _saved(self, held: HeldParameter, key: str, number: int) -> Any:
        """Return what the file of a number holds under a key."""
        if key != "fp32":
            state = self.inner[number]["state"][held.partition]
            from_adam = self._kind != OURS and key == "momentum_buffer" and key not in state
            return state["exp_avg" if from_adam else key]
        if self.stage:
            return self.masters(number)[held.partition]
        wrapper = self.wrappers[number]
        if "fp32_groups" in wrapper:
            return [tensor for group in wrapper["fp32_groups"] for tensor in group][held.partition]
        return self._weights(number)[held.name]

    @functools.cache  # noqa: B019 - lives as long as the files
    def _weights(self, number: int) -> Mapping[str, Tensor]:
        """Return the weights of stage 0 in fp32 beside an optimizer's file: experts have files of their own."""
        part = re.search(r"mp_rank_(\d+)", self.files[number].name)
        mark = "mp_rank_00" if part is None else part.group()
        found = dict(self.load(self.folder / f"{mark}_model_states.pt").get("module") or {})
        if not found:
            raise CheckpointError(
                f"{self.folder}: a pipeline without ZeRO keeps its weights by layers, which are not read; consolidate "
                f"with the engine, or save at stage 1"
            )
        for path in sorted(self.folder.glob(f"layer_*_expert_*_{mark}_model_states.pt")):
            found.update(self.load(path))
        return found

    def read(self, parameter: str, key: str, start: int, numel: int) -> Tensor:
        """Return elements ``[start, start + numel)`` of a tensor in row-major order, fp32, one-dimensional."""
        found = torch.empty(numel, dtype=torch.float32)
        self.copy(transfers_of(self.parts[parameter], key, start, start + numel, piece_start=start), found)
        return found

    def copy(self, transfers: Iterable[Transfer], piece: Tensor) -> None:
        """Copy what a piece of a tensor consists of to its places in the piece."""
        read = []
        for each in transfers:
            held, key = each.held, each.key
            place, flat = held.offset(key, each.rank, each.start), self._flat(held, key, each.rank)
            if place + each.numel > flat.numel():
                raise CheckpointError(
                    f"{self.files[each.source]}: {key} of parameter {held.name} is cut off: the partition has "
                    f"{flat.numel()} elements"
                )
            read.append(flat.narrow(0, place, each.numel))
            values = read[-1]
            if flat.dtype == torch.int8:
                values = self._decoded(held, each.rank, flat, place, each.numel)
            each.put(values, piece)
        drop_pages(read)

    def _decoded(self, held: HeldParameter, rank: int, codes: Tensor, start: int, numel: int) -> Tensor:
        """Return elements of a momentum in 8 bits, fp32; ``start`` is the first of them in the partition."""
        fragment = held.placement.on(rank)
        assert fragment is not None
        first, total = self._first_scales(held.holders, held.partition, rank)
        number = held.holders[rank]
        scales = self.inner[number]["state"][held.partition].get(SCALE_KEY)
        where = f"{self.files[number]}: {SCALE_KEY} of parameter {held.name}"
        check_tensor(scales, where)
        if scales.shape != (total,):
            raise CheckpointError(f"{where} has the shape {list(scales.shape)}, expected {total}")
        return read_codes(codes, scales.float(), fragment, first[held.name], start, numel)

    @functools.cache  # noqa: B019 - lives as long as the files
    def _first_scales(
        self, holders: tuple[int, ...], partition: int, rank: int
    ) -> tuple[dict[str, int], int]:
        """Return the number of each parameter's first scale in a partition of a rank, and that of all scales."""
        every = (held for parts in self.parts.values() for held in parts)
        sharing = (held for held in every if held.holders == holders and held.partition == partition)
        found = {held.name: held.placement.on(rank) for held in sharing}
        own = {name: fragment for name, fragment in found.items() if fragment is not None}
        starts, total = first_scales([*own.values()])
        return dict(zip(own, starts, strict=True)), total


def convert_to_universal(
    input_folder: str | os.PathLike[str], output_folder: str | os.PathLike[str], **reading: Any
) -> list[str]:
    """Convert the folder of a tag that DeepSpeed saved to a universal checkpoint.

    This consists of ``zero/<parameter>/<state>.pt``, the model states under the names that every stage looks for, and a
    record with checksums.

    Args:
        input_folder: The tag's folder: ours, DeepSpeed's own Muon's, or AdamW's, of stages 0 to 3.
        output_folder: The folder to write; must not exist yet. ``latest_universal`` beside it will name it.
        **reading: ``trust``, ``include``, ``exclude`` of :class:`DeepSpeedFiles`.

    Returns:
        What was lost or invented, in words.

    Raises:
        CheckpointError: Naming the file and the parameter.
    """
    out = Path(os.path.abspath(folder_of("output_folder", output_folder)))
    saved = DeepSpeedFiles(input_folder, **reading)
    with new_folder(out) as partial:
        records = _write_parameters(saved, partial / "zero")
        torch.save({"param_groups": saved.about["groups"]}, partial / "zero" / "optimizer_state.pt")
        for model_rank, path in saved.model_files().items():
            for name in MODEL_FILES:
                _link(path, partial / name.replace("mp_rank_00", model_rank))
        index = CheckpointIndex.made_now(UNIVERSAL_FORMAT, **saved.about, parameters=records)
        write_synced(partial / RECORD_NAME, index.to_bytes())
    replace_file(out.parent / "latest_universal", out.name.encode())
    return index.lossy


def _write_parameters(saved: DeepSpeedFiles, folder: Path) -> dict[str, ParameterRecord]:
    """Write the tensors; return the records with the checksums of their files."""
    found = {}
    for name, record in saved.parameters.items():
        if not is_name(name):
            raise CheckpointError(f"parameter {name!r} cannot name a folder")
        place = folder / name
        place.mkdir(parents=True)
        for key in record.tensor_keys:
            _write_tensor(place / f"{key}.pt", record.shape_of(key), _pieces(saved, name, key))
        torch.save(record.step, place / "step.pt")
        digests = {key: file_digest(place / f"{key}.pt") for key in record.tensor_keys}
        found[name] = record.model_copy(update={"tensors": digests})
    return found


def _pieces(saved: DeepSpeedFiles, name: str, key: str) -> Iterator[Tensor]:
    numel = math.prod(saved.parameters[name].shape_of(key))
    return (saved.read(name, key, start, min(WINDOW, numel - start)) for start in range(0, numel, WINDOW))


class _Elements(int):
    """The number of elements in the record ``data/0`` of a file."""


class _Pickler(pickle.Pickler):
    """Writes a tensor on the device ``meta`` as one whose elements are in the record ``data/0`` of the file."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        hooks: OrderedDict[str, Any] = OrderedDict()
        arguments = (_Elements(value.numel()), 0, tuple(value.shape), value.stride(), False, hooks)
        return torch._utils._rebuild_tensor_v2, arguments

    def persistent_id(self, value: Any) -> Any:
        found = "storage", torch.FloatStorage, "0", "cpu"
        return (*found, int(value)) if isinstance(value, _Elements) else None


def _write_tensor(path: Path, shape: Sequence[int], pieces: Iterable[Tensor]) -> None:
    """Write the dict of DeepSpeed's own converter as ``torch.save`` would, with one piece of its tensor in memory.

    That converter writes such a dict at stages 1 and 2; DeepSpeed's loaders read ``param`` from it.
    """
    content = io.BytesIO()
    _Pickler(content, protocol=2).dump({"param": torch.empty(tuple(shape), device="meta"), "cat_dim": 0})
    large = math.prod(shape) * ITEM_BYTES > zipfile.ZIP64_LIMIT // 2
    with zipfile.ZipFile(path, "w") as archive:
        # The first record begins at byte 44, or 64 if it is large: aligned for whoever maps the file.
        with archive.open("archive/data/0", "w", force_zip64=large) as file:
            for piece in pieces:
                file.write(piece.numpy().data.cast("B"))
        archive.writestr("archive/data.pkl", content.getvalue())
        archive.writestr("archive/byteorder", sys.byteorder)
        archive.writestr("archive/version", "3\n")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def is_ours(folder: str | os.PathLike[str]) -> bool:
    """Return whether the files of a tag carry our layout record, as far as it can be told; nothing is unpickled."""
    place = Path(folder)
    if (place / "latest").is_file():
        place /= (place / "latest").read_text(errors="replace").strip()
    # At stage 0 the optimizer's state is in the model's file.
    for path in sorted(place.glob("*_optim_states.pt")) or sorted(place.glob("*_model_states.pt")):
        try:
            with zipfile.ZipFile(path) as archive:
                pickles = [archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")]
        except Exception as error:  # of a damaged file the reader can raise anything; the next one may tell
            logger.debug("deepspeed_muon: %s cannot be read: %s", path, error)
            continue
        return any(RECORD_KEY.encode() in content for content in pickles)
    return False
