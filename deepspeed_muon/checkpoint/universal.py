"""DeepSpeed's universal checkpoints: written from our files, and loaded through our own layouts.

DeepSpeed's converter and its loader of stage 3 know Adam's keys only, and its stages 1 and 2 read parameters from
wrong places under round-robin gradients. So this module converts our checkpoints, into the same folders and files, and
reads any universal checkpoint, so that a restore can fill the layouts that the steps use.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import shutil
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_muon.checkpoint.deepspeed_files import DeepSpeedFiles
from deepspeed_muon.checkpoint.files import (
    check_tensor,
    drop_pages,
    file_digest,
    folder_of,
    is_name,
    load_pickle,
    new_folder,
    refusing,
    replace_file,
    write_synced,
)
from deepspeed_muon.checkpoint.index import (
    OURS,
    UNIVERSAL_FORMAT,
    VERSION,
    CheckpointIndex,
    checked,
    load_index,
)
from deepspeed_muon.checkpoint.layout_record import RECORD_KEY
from deepspeed_muon.checkpoint.parameters import ITEM_BYTES, STATE_KEYS, ParameterRecord
from deepspeed_muon.checkpoint.sources import WINDOW, StateSource
from deepspeed_muon.checkpoint.tag_folder import MODEL_FILES, model_file_in
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import logger, warn

RECORD_NAME = "muon_universal.json"


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


class UniversalSource(StateSource):
    """A universal checkpoint, from our converter or from DeepSpeed's. Pickles are read with ``weights_only``."""

    def __init__(self, folder: str | os.PathLike[str], live: Mapping[str, Any]) -> None:
        """Read what there is; our converter's record is used where there is one.

        Args:
            folder: The folder with ``zero``.
            live: The model's parameters by name, with shape and algorithm, for checkpoints that do not say whose state
                they hold.

        Raises:
            CheckpointError: Naming the file.
        """
        self._folder = Path(folder)
        self.where = str(folder)
        self._from_adam: set[str] = set()
        self._last: tuple[Path, Tensor] | None = None  # the file that was mapped last
        with refusing(self.where):
            if not (self._folder / "zero").is_dir():
                raise CheckpointError(f"{self._folder}: no folder 'zero': not a universal checkpoint")
            if os.path.lexists(self._folder / RECORD_NAME):
                self.index = load_index(self._folder, RECORD_NAME, UNIVERSAL_FORMAT)
            else:
                self.index = self._described_by_files(live)
            for name in self.index.parameters:
                if not is_name(name):
                    raise CheckpointError(
                        f"{self._folder / RECORD_NAME}: refused: parameter {name!r} cannot name a folder"
                    )

    def _described_by_files(self, live: Mapping[str, Any]) -> CheckpointIndex:
        """Describe a checkpoint of DeepSpeed's own converter. It holds buffers and frozen parameters as well."""
        parameters: dict[str, ParameterRecord] = {}
        for name in sorted(live):
            place, algorithm = self._folder / "zero" / name, live[name].algorithm
            found = {path.stem for path in place.glob("*.pt")}
            if not found:
                continue
            stateful = set(STATE_KEYS[algorithm]) <= found
            if algorithm == "muon" and not stateful and "exp_avg" in found:
                self._from_adam.add(name)
                stateful = True
            step = 0
            if stateful:
                step = int(load_pickle(place / "step.pt") if "step" in found else self._global_step())
            shape = tuple(self._tensor(name, "fp32").shape)
            if torch.Size(shape).numel() == torch.Size(live[name].shape).numel():
                shape = live[name].shape  # from stage 3 DeepSpeed writes flat tensors
            entry = {"shape": shape, "algorithm": algorithm, "step": step, "group": 0}
            record = checked(ParameterRecord, entry, f"{place}: refused: parameter {name}: ")
            parameters[name] = record.model_copy(update={"tensors": dict.fromkeys(record.tensor_keys, "")})
        if self._from_adam:
            warn(
                "deepspeed_muon: %s was saved by AdamW: its exp_avg becomes the momentum of %d matrices, their "
                "exp_avg_sq is dropped",
                self._folder,
                len(self._from_adam),
            )
        return CheckpointIndex(
            format=UNIVERSAL_FORMAT,
            version=VERSION,
            versions={},
            source={"optimizer": OURS},
            groups=[{}],
            parameters=parameters,
        )

    def _global_step(self) -> int:
        file = model_file_in(self._folder)
        if file is None:
            raise CheckpointError(f"{self._folder}: says nowhere how many steps were taken")
        state = load_pickle(file)
        return int(state["global_steps"]) - int(state["skipped_steps"])

    def verify(self, share: int, shares: int) -> list[str]:
        """Check this share of the files; see :class:`StateSource`."""
        nonfinite = []
        for name in sorted(self.parameters)[share::shares]:
            for key, checksum in self.parameters[name].tensors.items():
                path, shape = self._path(name, key), self.parameters[name].shape_of(key)
                with refusing(f"{path}; parameter {name}"):
                    if checksum and file_digest(path) != checksum:
                        raise CheckpointError(
                            f"{path}: its checksum is not that of the record; parameter {name}"
                        )
                    tensor = self._tensor(name, key)
                    if tensor.numel() != torch.Size(shape).numel():
                        raise CheckpointError(
                            f"{path}: shape {list(tensor.shape)}, expected {list(shape)}; parameter {name}"
                        )
                    if not self.is_finite(name, key):
                        nonfinite.append(f"{name} ({key})")
        return nonfinite

    def read(self, parameter: str, key: str, start: int, numel: int) -> Tensor:
        """Return a range of a tensor; see :class:`StateSource`."""
        held = self._tensor(parameter, key).reshape(-1).narrow(0, start, numel)
        found = held.to(torch.float32, copy=True)
        drop_pages([held])
        return found

    def file_of(self, parameter: str, key: str) -> str:
        """Return the name of the file that holds a tensor."""
        return f"zero/{parameter}/{key}.pt"

    def _path(self, name: str, key: str) -> Path:
        file = "exp_avg" if key == "momentum_buffer" and name in self._from_adam else key
        return self._folder / "zero" / name / f"{file}.pt"

    def _tensor(self, name: str, key: str) -> Tensor:
        path = self._path(name, key)
        if self._last is not None and self._last[0] == path:
            return self._last[1]
        content = load_pickle(path)
        tensor = content.get("param") if isinstance(content, dict) else content
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path}: holds no tensor; parameter {name}")
        check_tensor(tensor, f"{path}: parameter {name}")
        self._last = path, tensor
        return tensor


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
