"""What is in a consolidated set: the schema and checksum of its JSON index, and its tensors, by name and range.

A consolidated set is a folder with ``muon_index.json`` and the safetensors files that the index names. They hold full
tensors by name; the index has a :class:`ParameterRecord` for each parameter. A save writes the index last, so a folder
without one holds no set.

The records determine the files completely: which tensors each file has, in which order, and, by :class:`FileLayout`,
at which bytes. A save writes exactly that, and a reader compares the header of each file with that of its layout.

The index is untrusted. Its size is bounded, it must fit :class:`CheckpointIndex` exactly, file names cannot lead out of
the folder, and the sizes of tensors are compared with those of the files. Its last entry is the checksum of the text
before it, which detects damage but does not prove who wrote the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeAlias, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor
from typing_extensions import TypedDict

from deepspeed_muon.checkpoint.files import (
    MAX_BYTES,
    file_digest,
    open_regular,
    read_regular,
    refusing,
    require_folder,
)
from deepspeed_muon.config.values import plain
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import listed
from deepspeed_muon.variants import ROW_STATE
from deepspeed_muon.version import __version__

FORMAT: Literal["deepspeed_muon.consolidated"] = "deepspeed_muon.consolidated"
INDEX_NAME = "muon_index.json"
CONSOLIDATED_FOLDER = "muon_consolidated"
"""Where ``consolidate_on_save`` writes the set, inside the folder of DeepSpeed's tag."""
OURS = "deepspeed_muon"
"""``source.optimizer`` of a set that was not converted from another optimizer's state."""
SHARD_PATTERN = re.compile(r"muon-[0-9a-f]{12}-[0-9]{5,}\.safetensors")

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""The counters of an engine that a set holds, by the names of the engine's attributes."""

VERSION: Literal[3] = 3
"""Version of the format."""
_CHECKSUM = "sha256"
_BEFORE_CHECKSUM = b',\n "sha256": "'

STATE_KEYS: dict[str, tuple[str, ...]] = {"muon": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}
"""Optimizer state with the shape of the parameter, by algorithm; the fp32 master comes on top."""
ROW_KEYS: dict[str, tuple[str, ...]] = {"muon": tuple(ROW_STATE), "adamw": ()}
"""Optimizer state with one number per row of each block, by algorithm. A run has only that of its variant."""

ITEM_BYTES = 4
"""All tensors of a consolidated set are fp32."""
WINDOW_NUMEL = 1 << 20
"""Elements that are read at once."""
# Files of a set that stay open between two reads.
_MAX_OPEN_FILES = 8

# More than any model has, and few enough that sizes in bytes fit into 64 bits.
_MAX_NUMEL = 1 << 50

Dimension = Annotated[int, Field(ge=1, le=_MAX_NUMEL, strict=True)]
Count = Annotated[int, Field(ge=0, le=1 << 53, strict=True)]
Steps = Annotated[int, Field(ge=0, le=1 << 40, strict=True)]

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Shapes by name of tensor, in the order in which a file stores the tensors."""

_Model = TypeVar("_Model", bound=BaseModel)


class ParameterRecord(BaseModel):
    """One parameter of a checkpoint: its full tensor, its algorithm, and the files that hold its state.

    Attributes:
        shape: The shape of the full tensor.
        algorithm: Which optimizer updates it.
        transposed: Whether the weight is stored as input x output.
        group: Index of its param group.
        rows: Length of its per-row state; 0 without such state.
        row_keys: Keys of its per-row state.
        step: Optimizer steps taken; 0 without optimizer state.
        tensors: Key (``fp32`` or a key of the state) to the file that holds the tensor. Empty until a set is written.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: Annotated[tuple[Dimension, ...], Field(max_length=64)]
    algorithm: Literal["muon", "adamw"]
    transposed: Annotated[bool, Field(strict=True)] = False
    group: Count
    rows: Annotated[int, Field(ge=0, le=_MAX_NUMEL, strict=True)] = 0
    row_keys: Annotated[tuple[str, ...], Field(max_length=len(ROW_STATE))] = ()
    step: Steps = 0
    tensors: dict[str, str] = {}

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def tensor_keys(self) -> tuple[str, ...]:
        """Keys of the tensors that a set holds: ``fp32`` and, once a step was taken, those of the state."""
        if not self.step:
            return ("fp32",)
        return ("fp32", *STATE_KEYS[self.algorithm], *self.row_keys)

    def shape_of(self, key: str) -> tuple[int, ...]:
        """Return the shape of the full tensor with a key."""
        return (self.rows,) if key in ROW_KEYS[self.algorithm] else self.shape

    @model_validator(mode="after")
    def _validate(self) -> ParameterRecord:
        numel, row_keys = self.numel, ROW_KEYS[self.algorithm]
        if numel > _MAX_NUMEL:
            raise ValueError(f"shape {list(self.shape)} is absurd")
        if self.rows > numel or (self.rows and not row_keys):
            raise ValueError(
                f"{self.rows} rows of moments do not fit {self.algorithm} and shape {list(self.shape)}"
            )
        if not set(self.row_keys) <= set(row_keys) or len(set(self.row_keys)) < len(self.row_keys):
            raise ValueError(f"row_keys {list(self.row_keys)} are not distinct keys of {list(row_keys)}")
        return self


class FileRecord(BaseModel):
    """One safetensors file.

    Attributes:
        bytes: Its size.
        sha256: Of all its bytes, hexadecimal.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class LossScale(TypedDict, total=False):
    """The state of a dynamic loss scale, under the names of DeepSpeed's attributes."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    cur_scale: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
    cur_iter: Steps
    last_overflow_iter: Annotated[int, Field(ge=-1, le=1 << 40, strict=True)]
    cur_hysteresis: Steps


SCALE_KEYS = tuple(LossScale.__annotations__)


class Progress(BaseModel):
    """How far the run has advanced.

    Attributes:
        global_steps: Steps of the engine, skipped ones included.
        global_samples: Samples trained on.
        skipped_steps: Steps that were skipped because of an overflow.
        lr_scheduler: The scheduler's ``state_dict()``, if JSON can hold it.
        lr_scheduler_class: Name of its class, if known.
        loss_scale: The dynamic loss scale.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    global_steps: Steps = 0
    global_samples: Count = 0
    skipped_steps: Steps = 0
    lr_scheduler: dict[str, Any] | None = None
    lr_scheduler_class: str | None = None
    loss_scale: LossScale | None = None


class CheckpointIndex(BaseModel):
    """The index of a consolidated set.

    Attributes:
        format: :data:`FORMAT`.
        version: The version of the format.
        sha256: The checksum of the text that it was read from; equal on all ranks that read the same set.
        versions: The versions of the software that wrote it.
        source: The origin of the state; its ``optimizer`` is :data:`OURS`, or the optimizer that it was converted from.
        lossy: Sentences about what a conversion from another optimizer lost or made up.
        optimizer: The settings of the optimizer.
        groups: The settings of the param groups.
        progress: How far the run had advanced.
        files: The safetensors files by name.
        parameters: The parameters by name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["deepspeed_muon.consolidated"]
    version: Literal[3] = VERSION
    sha256: str = ""
    versions: dict[str, str]
    source: dict[str, Any] = {}
    lossy: list[str] = []
    optimizer: dict[str, Any] = {}
    groups: list[dict[str, Any]]
    progress: Progress = Progress()
    files: dict[str, FileRecord] = {}
    parameters: dict[str, ParameterRecord]

    def to_bytes(self) -> bytes:
        """Return the content of the file, with the checksum and without entries that have their default."""
        return sealed_json(self.model_dump(exclude_defaults=True))

    @model_validator(mode="after")
    def _validate(self) -> CheckpointIndex:
        # A name that is a path would lead out of the folder.
        for name in self.files:
            if not SHARD_PATTERN.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a shard of this folder")
        used = dict.fromkeys(self.files, 0)  # bytes of the tensors in every file
        for name, record in self.parameters.items():
            if record.group >= len(self.groups):
                raise ValueError(f"parameter {name}: param group {record.group} does not exist")
            has_rows = bool(record.rows)
            if (
                record.tensors.keys() != set(record.tensor_keys)
                or has_rows != bool(record.row_keys)
                or (has_rows and not record.step)
            ):
                raise ValueError(
                    f"parameter {name}: holds {sorted(record.tensors)}, expected {sorted(record.tensor_keys)}"
                )
            for key, file in record.tensors.items():
                if file not in self.files:
                    raise ValueError(f"parameter {name}: {key} is in {file!r}, which is not among the files")
                used[file] += ITEM_BYTES * math.prod(record.shape_of(key))
        for file, size in used.items():
            if size > self.files[file].bytes:
                raise ValueError(f"{file} has {self.files[file].bytes} bytes, its tensors need {size}")
        return self


def software_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide the results."""
    return {
        "python": platform.python_version(),
        "deepspeed_muon": __version__,
        "deepspeed": metadata.version("deepspeed"),
        "torch": torch.__version__,
    }


def load_index(folder: str | os.PathLike[str]) -> CheckpointIndex:
    """Read and check the index of a consolidated set; the files that it names are not opened.

    Raises:
        CheckpointError: Naming the index and, if one is to blame, the parameter.
    """
    path = Path(folder) / INDEX_NAME
    with refusing(str(path)):
        try:
            text = read_regular(path)
        except FileNotFoundError:
            require_folder(path.parent)
            raise CheckpointError(
                f"{folder}: no {INDEX_NAME}: not a consolidated checkpoint, or its save did not finish"
            ) from None
        content = parse_sealed(text, str(path))
        models: dict[str, type[BaseModel]] = {"files": FileRecord, "parameters": ParameterRecord}
        for key, model in models.items():
            # One by one, so that the first bad entry raises: pydantic's report of all of them can take gigabytes.
            entries: Any = content.get(key)
            for name in entries if isinstance(entries, dict) else ():
                entries[name] = checked(model, entries[name], f"{path}: refused:\n{key}: {name}: ")
        return checked(CheckpointIndex, content, f"{path}: refused:\n")


def checked(model: type[_Model], content: object, refusal: str) -> _Model:
    """Return untrusted content as an object of a pydantic model.

    Args:
        model: The model.
        content: What was read.
        refusal: Beginning of the error; a line for each of the first faults follows.

    Raises:
        CheckpointError: If the content does not fit the model.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        lines = []
        # Without the inputs, which may be as large as the file.
        for item in error.errors(include_url=False, include_context=False, include_input=False)[:10]:
            location = ".".join(map(str, item["loc"]))
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{location}: {message}" if location else message)
        raise CheckpointError(refusal + "\n".join(lines)) from error


# ---- tensors in files --------------------------------------------------------------------------------------


def tensor_name(key: str, parameter: str) -> str:
    """Return the name of a tensor inside the safetensors files."""
    return f"{key}/{parameter}"


def refuse_float64(dtype: torch.dtype, source: str) -> None:
    """Raise a CheckpointError if a tensor would lose precision in a file of fp32 tensors."""
    if dtype == torch.float64:
        raise CheckpointError(
            f"{source} is float64, and consolidated sets and universal checkpoints hold fp32, to which it would be "
            f"rounded: use engine.save_checkpoint and load_checkpoint, which keep float64"
        )


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The bytes of a safetensors file with fp32 tensors.

    Attributes:
        header: All that comes before the first tensor.
        starts: Name of every tensor to its first element, counted over all tensors of the file, in ascending order.
        numel: Elements of all tensors together.
    """

    header: bytes
    starts: Mapping[str, int]
    numel: int

    @classmethod
    def of(cls, shapes: Shapes) -> FileLayout:
        """Return the layout of the file with some tensors."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts, stop = {}, 0
        for name, shape in shapes.items():
            starts[name], stop = stop, stop + math.prod(shape)
            offsets = [starts[name] * ITEM_BYTES, stop * ITEM_BYTES]  # in bytes, from the end of the header
            entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": offsets}
        text = json.dumps(entries, separators=(",", ":")).encode()
        # safetensors: the length of the header in 8 bytes, the JSON padded to a multiple of 8, then the tensors.
        text += b" " * (-len(text) % 8)
        return cls(len(text).to_bytes(8, "little") + text, starts, stop)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + self.numel * ITEM_BYTES


# ---- reading the tensors -----------------------------------------------------------------------------------


class ConsolidatedSource:
    """The full tensors of a consolidated set, read by name and range. Nothing is unpickled.

    Attributes:
        where: The folder, for errors.
        index: The index of the set.
        parameters: Its records by name.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Read the index; raises a CheckpointError if there is none or it is not valid."""
        self._folder = Path(folder)
        self.where = str(folder)
        self.index = load_index(folder)
        self.parameters = self.index.parameters
        # Parameter and key of the tensors of every file, in the file's order. A file without any is verified, too.
        self._tensors_in: dict[str, list[tuple[str, str]]] = {file: [] for file in self.index.files}
        for name, record in self.parameters.items():
            for key in record.tensor_keys:
                self._tensors_in[record.tensors[key]].append((name, key))
        self._open_files: dict[str, BinaryIO] = {}  # by name; the one that was used last is last
        self._layouts: dict[str, FileLayout] = {}
        # Inode, size and time of each file when it was first opened, since it may be closed and opened again.
        self._identities: dict[str, tuple[int, ...]] = {}

    def verify(self, rank: int, world_size: int) -> list[str]:
        """Check this rank's share of the files against the records; every file is checked by one rank.

        Args:
            rank: The position of this rank among those that share the files.
            world_size: The number of these ranks.

        Returns:
            The tensors of these files that hold an infinity or NaN.

        Raises:
            CheckpointError: Naming the file and the parameters in it.
        """
        nonfinite = []
        # Dealt out to the ranks from the largest on, so that all read about as many bytes.
        files = sorted(self._tensors_in, key=lambda file: self.index.files[file].bytes, reverse=True)
        for file in files[rank::world_size]:
            path = self._folder / file
            tensors = {f"{name} ({key})": (name, key) for name, key in self._tensors_in[file]}
            try:
                # Size and header come first: nothing else is read of a file that is too large.
                self._open(file)
                with refusing(str(path)):
                    if file_digest(path) != self.index.files[file].sha256:
                        raise CheckpointError(f"{path}: its checksum is not that of the index")
            except CheckpointError as error:
                raise CheckpointError(f"{error}; it holds {listed(list(tensors), 3)}") from error
            nonfinite += [shown for shown, tensor in tensors.items() if not self._is_finite(*tensor)]
        return nonfinite

    def _is_finite(self, parameter: str, key: str) -> bool:
        numel = math.prod(self.parameters[parameter].shape_of(key))
        return all(
            self.read(parameter, key, start, min(WINDOW_NUMEL, numel - start)).isfinite().all()
            for start in range(0, numel, WINDOW_NUMEL)
        )

    def read(self, parameter: str, key: str, start: int, numel: int) -> Tensor:
        """Return elements ``[start, start + numel)`` of a full tensor in row-major order, ``(numel,)`` fp32."""
        name = self.parameters[parameter].tensors[key]
        with refusing(f"{self._folder / name}: {parameter} ({key})"):
            file, layout = self._open(name)
            values = torch.empty(numel, dtype=torch.float32, device="cpu")
            first = layout.starts[tensor_name(key, parameter)] + start  # counted over all tensors of the file
            file.seek(len(layout.header) + first * ITEM_BYTES)
            # Not memory-mapped: pages of a mapping count towards the memory of the process.
            if file.readinto(memoryview(values.numpy().data).cast("B")) < numel * ITEM_BYTES:  # type: ignore[attr-defined]
                raise CheckpointError("the file ends early")
            return values

    def _open(self, name: str) -> tuple[BinaryIO, FileLayout]:
        """Return an open file of the set, and the layout that the index gives it.

        Raises:
            CheckpointError: If its size or header is another one, or it was replaced since it was first opened.
        """
        path = self._folder / name
        with refusing(str(path)):
            file = self._open_files.pop(name, None) or open_regular(path)
            self._open_files[name] = file
            status = os.fstat(file.fileno())
            identity = (status.st_ino, status.st_size, status.st_mtime_ns)
            if self._identities.setdefault(name, identity) != identity:
                raise CheckpointError("the file was replaced while the checkpoint was read")
            # A set may have more files than a process may open.
            if len(self._open_files) > _MAX_OPEN_FILES:
                self._open_files.pop(next(iter(self._open_files))).close()
            if name not in self._layouts:
                records, tensors = self.parameters, self._tensors_in[name]
                layout = FileLayout.of({tensor_name(key, p): records[p].shape_of(key) for p, key in tensors})
                if status.st_size != layout.nbytes:
                    raise CheckpointError(
                        f"{path}: {status.st_size} bytes, expected {layout.nbytes}, which its tensors have by the index"
                    )
                if file.read(len(layout.header)) != layout.header:
                    raise CheckpointError(f"{path}: its header is not that of its tensors by the index")
                self._layouts[name] = layout
        return file, self._layouts[name]

    def close(self) -> None:
        """Close the files."""
        for file in self._open_files.values():
            file.close()
        self._open_files.clear()


# ---- what JSON can hold ------------------------------------------------------------------------------------


def is_json(value: object) -> bool:
    """Return whether JSON can hold ``value`` without loss, except that tuples are read back as lists."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return _has_text_keys(value)


def _has_text_keys(value: object) -> bool:
    """Return whether all keys are text: JSON turns numbers into text, and torch's MultiStepLR looks up numbers."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(entry) for key, entry in value.items())
    return not isinstance(value, (list, tuple)) or all(map(_has_text_keys, value))


def saved_schedule(state: object) -> dict[str, Any] | None:
    """Return a scheduler's state as an index holds it; ``None`` if JSON cannot hold it.

    The milestones of MultiStepLR, a Counter with numbers for keys, become a list; rates in tensors become numbers, and
    infinities (ReduceLROnPlateau) ``None``.
    """
    if not isinstance(state, Mapping):
        return None
    schedule = dict(state)
    for key, value in state.items():
        if isinstance(value, Counter):
            schedule[key] = sorted(value.elements())  # {30: 1, 60: 2} as [30, 60, 60]
        elif isinstance(value, float) and math.isinf(value):
            schedule[key] = None
        elif isinstance(value, list):
            schedule[key] = [*map(plain, value)]
    return schedule if is_json(schedule) else None


def json_settings(group: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the settings of a param group that JSON can hold; a tensor of one element becomes its number."""
    settings = {str(key): plain(value) for key, value in group.items() if key != "params"}
    return {key: value for key, value in settings.items() if is_json(value)}


# ---- documents with a checksum -----------------------------------------------------------------------------


def sealed_json(content: Mapping[str, Any]) -> bytes:
    """Return a document as JSON with version and checksum; every entry of its objects has a line of its own.

    Args:
        content: The document; a ``version`` and a checksum in it are replaced.

    Raises:
        CheckpointError: If JSON cannot hold it, or a reader would refuse it.
    """
    document = {**content, "version": VERSION}
    document.pop(_CHECKSUM, None)

    def line(key: str, value: object) -> str:
        return json.dumps({key: value}, allow_nan=False)[1:-1]  # without the braces: "key": value

    try:
        lines = []
        for key, value in document.items():
            # A line for each parameter and file, so that grep and diff are of use.
            entries = value.items() if isinstance(value, dict) else ()
            rows = ",\n".join(f"  {line(name, entry)}" for name, entry in entries)
            lines.append(f" {json.dumps(key)}: {{\n{rows}\n }}" if rows else f" {line(key, value)}")
        text = ("{\n" + ",\n".join(lines)).encode()
        _refuse_half_characters(text, document)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"JSON cannot hold what is to be written: {error}") from error
    sealed = _sealed(text)
    if len(sealed) > MAX_BYTES:
        raise CheckpointError(
            f"what is to be written has {len(sealed)} bytes, more than the {MAX_BYTES} that are read"
        )
    return sealed


def parse_sealed(text: bytes, path: str) -> dict[str, Any]:
    """Return a document in ASCII with finite numbers, after comparing format, version and checksum.

    Args:
        text: The content of the file.
        path: The file, for errors.

    Raises:
        CheckpointError: Naming the file.
    """
    with refusing(path):
        content = json.loads(
            text.decode("ascii"), parse_constant=_finite, parse_float=_finite, object_pairs_hook=_distinct
        )
        _refuse_half_characters(text, content)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not of the format {FORMAT}")
    version = content.get("version")
    if type(version) is not int or version != VERSION:  # 3.0 is equal to 3
        raise CheckpointError(
            f"{path}: format version {version!r}; this release reads version {VERSION}: consolidate DeepSpeed's "
            f"checkpoint again, or use the release that wrote it"
        )
    if text != _sealed(text.rpartition(_BEFORE_CHECKSUM)[0]):
        is_missing = _CHECKSUM not in content
        problem = "its checksum is missing" if is_missing else "its checksum is not that of its content"
        raise CheckpointError(f"{path}: {problem}: the file was changed or is damaged")
    return content


def _refuse_half_characters(text: bytes, content: object) -> None:
    """Raise UnicodeEncodeError if an escape in the text of a document is no character: half of a surrogate pair."""
    if b"\\u" in text:
        json.dumps(content, ensure_ascii=False).encode()


def _sealed(text: bytes) -> bytes:
    """Return the text of a document with its checksum as the last entry."""
    return text + _BEFORE_CHECKSUM + hashlib.sha256(text).hexdigest().encode() + b'"\n}\n'


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs; raise if a key is there twice, where Python's JSON takes the last value."""
    content = dict(pairs)
    if len(content) < len(pairs):
        ((key, count),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} is there {count} times")
    return content


def _finite(text: str) -> float:
    """Return a number; raise for 1e999, and for ``NaN`` and ``Infinity``, which JSON does not have."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value
