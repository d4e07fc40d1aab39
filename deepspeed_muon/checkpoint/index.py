"""The JSON index of a consolidated checkpoint: what it must say; anything else is refused.

A consolidated checkpoint is a folder with ``muon_index.json`` and the safetensors files that the index names. A save
writes the index last, so a folder without one holds no checkpoint. The index is untrusted: a name of a file cannot
lead out of the folder, and sizes are compared with the files before memory is allocated.
"""

from __future__ import annotations

import math
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from deepspeed_muon.checkpoint.sealed import VERSION, read_sealed, sealed_json
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.plan.rows import ROW_STATE_KEY, RowPlaces
from deepspeed_muon.plan.slices import TensorSlice, whole_slice
from deepspeed_muon.plan.spread import Places, Spread

__all__ = [
    "COUNTERS",
    "FORMAT",
    "INDEX_NAME",
    "OURS",
    "SCALE_KEYS",
    "SHARD_PATTERN",
    "STATE_KEYS",
    "VERSION",
    "CheckpointIndex",
    "Count",
    "Dimension",
    "FileRecord",
    "InPartitions",
    "ParameterKind",
    "ParameterRecord",
    "Progress",
    "Steps",
    "checked",
    "described",
    "load_index",
    "tensor_name",
]

FORMAT: Literal["deepspeed_muon.consolidated"] = "deepspeed_muon.consolidated"
INDEX_NAME = "muon_index.json"
OURS = "deepspeed_muon"
"""The optimizer of a checkpoint that was not converted from another one."""
SHARD_PATTERN = re.compile(r"muon-[0-9a-f]{12}-[0-9]{5,}\.safetensors")
STATE_KEYS: dict[str, tuple[str, ...]] = {"muon": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}
"""What the optimizer keeps for a parameter of each algorithm, next to the fp32 master. NorMuon keeps rows besides."""

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""What an engine counts."""
SCALE_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What a dynamic loss scale carries from step to step."""

# More than any model has, and small enough that sizes in bytes fit into 64 bits.
_MAX_NUMEL = 1 << 50

_Model = TypeVar("_Model", bound=BaseModel)

Dimension = Annotated[int, Field(ge=1, le=_MAX_NUMEL, strict=True)]
Count = Annotated[int, Field(ge=0, le=1 << 53, strict=True)]
Steps = Annotated[int, Field(ge=0, le=1 << 40, strict=True)]


def _at_most(length: int) -> BeforeValidator:
    """Return what refuses a longer list before pydantic collects the faults of all its entries."""

    def check(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and len(value) > length:
            raise ValueError(f"has {len(value)} entries, at most {length} are possible")
        return value

    return BeforeValidator(check)


Blocks = Annotated[tuple[Dimension, ...], _at_most(1 << 16)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(_Record):
    """One safetensors file.

    Attributes:
        bytes: Its size.
        sha256: Checksum of the whole file, hexadecimal.
    """

    bytes: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ParameterKind(_Record):
    """What every record of a parameter says.

    Attributes:
        shape: The layer's true shape.
        algorithm: Whose state it is.
        heads: Blocks (attention heads, experts, parts) that were orthogonalised separately.
        grid: Their rows and columns where they are not ``heads`` equal blocks of rows.
        transposed: Whether the weight is stored as input x output.
        group: Number of its param group.
    """

    shape: Annotated[tuple[Dimension, ...], _at_most(64)]
    algorithm: Literal["muon", "adamw"]
    heads: Dimension = 1
    grid: tuple[Blocks, Blocks] | None = None
    transposed: Annotated[bool, Field(strict=True)] = False
    group: Count

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @field_validator("shape")
    @classmethod
    def _bounded(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        if math.prod(shape) > _MAX_NUMEL:
            raise ValueError(f"shape {list(shape)} is absurd")
        return shape


def described(kind: Any) -> dict[str, Any]:
    """Return the fields of :class:`ParameterKind` but ``group``, of a route or a saved parameter, as JSON has them."""
    return {
        "shape": list(kind.shape),
        "algorithm": kind.algorithm,
        "heads": kind.heads,
        "grid": None if kind.grid is None else [list(sizes) for sizes in kind.grid],
        "transposed": kind.transposed,
    }


class InPartitions:
    """What the ranks of a data-parallel group hold of a parameter: its elements lie in their flat partitions.

    Attributes:
        shape: True shape of what they hold.
        part: Which part of the whole tensor that is.
        spread: Where the master and the entries of the state lie, except for the row moments.
        row_places: Where NorMuon's row moments lie; ``None`` where there are none.
    """

    if TYPE_CHECKING:  # no fields where a pydantic model inherits this
        shape: tuple[int, ...]
        part: TensorSlice
        spread: Spread
        row_places: RowPlaces | None

    @property
    def row_count(self) -> int:
        """How many row moments there are."""
        return 0 if self.row_places is None else self.row_places.numel

    def places_of(self, key: str) -> Places:
        """Return where the master (``fp32``) or an entry of the state lies."""
        return self.row_places if key == ROW_STATE_KEY and self.row_places is not None else self.spread

    def part_of(self, key: str) -> TensorSlice:
        """Return which part of the whole master or entry of the state the ranks hold.

        Raises:
            ValueError: If the row moments do not divide as the parameter does.
        """
        if key != ROW_STATE_KEY or self.row_places is None:
            return self.part
        # A moment belongs to an output of the layer. Ranks that cut the inputs keep the moments of all outputs each.
        cuts_outputs = len(self.shape) > 2 or (self.part.dim == 1) == self.row_places.matrix.transposed
        if self.part.is_whole or not cuts_outputs:
            return whole_slice(self.part.name, (self.row_count,))
        return self.part.scaled(self.row_count)


class ParameterRecord(ParameterKind):
    """One parameter of a consolidated set.

    The file leaves out ``grid``, ``transposed`` and ``rows`` where they are unset.

    Attributes:
        rows: Length of NorMuon's ``row_second_moment``; 0 where there is none.
        step: Optimizer steps taken; 0 when there is no optimizer state.
        tensors: ``fp32`` and the state keys of the algorithm, each with the file that holds it.
    """

    rows: Annotated[int, Field(ge=0, le=_MAX_NUMEL, strict=True)] = 0
    step: Steps
    tensors: dict[str, str]

    def shape_of(self, key: str) -> tuple[int, ...]:
        """Return the shape of one of the parameter's tensors."""
        return (self.rows,) if key == ROW_STATE_KEY else self.shape

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Releases that do not know these keys refuse an index that has them.
        written = dict(serialize(self))
        for key in ("grid", "transposed", "rows"):
            if not written[key]:
                del written[key]
        return written

    @model_validator(mode="after")
    def _complete(self) -> ParameterRecord:
        expected = {"fp32", *(STATE_KEYS[self.algorithm] if self.step else ())}
        if self.rows:
            if self.algorithm != "muon" or not self.step or self.rows > self.numel:
                raise ValueError(
                    f"{self.rows} rows of moments do not fit {self.algorithm} and shape {list(self.shape)}"
                )
            expected.add(ROW_STATE_KEY)
        if self.heads > self.numel:
            raise ValueError(f"{self.heads} heads do not fit shape {list(self.shape)}")
        if set(self.tensors) != expected:
            raise ValueError(f"holds {sorted(self.tensors)}, expected {sorted(expected)}")
        return self


class Progress(_Record):
    """Where the run stood.

    Attributes:
        global_steps: Steps of the engine, skipped ones included.
        global_samples: Samples seen.
        skipped_steps: Steps that overflowed.
        lr_scheduler: The scheduler's ``state_dict()`` where JSON can hold it.
        lr_scheduler_class: Name of its class, where it is known.
        loss_scale: The dynamic loss scale.
    """

    global_steps: Steps = 0
    global_samples: Count = 0
    skipped_steps: Steps = 0
    lr_scheduler: dict[str, Any] | None = None
    lr_scheduler_class: str | None = None
    loss_scale: dict[str, float | int] | None = None


def _each(model: type[_Model]) -> BeforeValidator:
    """Return what validates a map of names to records, and raises for the first bad one: all could take gigabytes."""

    def validate(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        records = {}
        for name, entry in value.items():
            try:
                records[name] = model.model_validate(entry)
            except ValidationError as error:
                raise ValueError(f"{name}: {_readable(error)}") from error
        return records

    return BeforeValidator(validate)


class CheckpointIndex(_Record):
    """The whole index.

    Attributes:
        format: Always :data:`FORMAT`.
        version: Of the format.
        versions: Of the software that wrote it.
        source: Where the state came from, in words and numbers; ``optimizer`` is :data:`OURS`, or what it was converted
            from.
        lossy: What was lost or invented when it was converted from another optimizer.
        optimizer: The settings of the optimizer.
        groups: Hyperparameters of the param groups.
        progress: Where the run stood.
        files: The safetensors files.
        parameters: Name of every parameter to its record.
    """

    format: Literal["deepspeed_muon.consolidated"]
    version: Literal[1]
    versions: dict[str, str]
    source: dict[str, Any] = {}
    lossy: Annotated[list[str], Field(max_length=1024)] = []
    optimizer: dict[str, Any] = {}
    groups: Annotated[list[dict[str, Any]], Field(max_length=1024)]
    progress: Progress = Progress()
    files: Annotated[dict[str, FileRecord], _each(FileRecord)]
    parameters: Annotated[dict[str, ParameterRecord], _each(ParameterRecord)]

    @classmethod
    def made_now(cls, **content: Any) -> CheckpointIndex:
        """Return an index of this release's format with the versions of the software that runs."""
        return cls(format=FORMAT, version=VERSION, versions=_versions(), **content)

    def to_bytes(self) -> bytes:
        """Return the file's content, with the checksum."""
        return sealed_json(self.model_dump(mode="json"))

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, FileRecord]) -> dict[str, FileRecord]:
        for name in files:
            if not SHARD_PATTERN.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a shard of this folder")
        return files

    @model_validator(mode="after")
    def _consistent(self) -> CheckpointIndex:
        used = dict.fromkeys(self.files, 0)
        for name, record in self.parameters.items():
            if record.group >= len(self.groups):
                raise ValueError(f"parameter {name}: param group {record.group} does not exist")
            for key, file in record.tensors.items():
                if file not in self.files:
                    raise ValueError(f"parameter {name}: {key} is in {file!r}, which is not among the files")
                used[file] += 4 * math.prod(record.shape_of(key))
        for file, size in used.items():
            if size > self.files[file].bytes:
                raise ValueError(f"{file} has {self.files[file].bytes} bytes, its tensors need {size}")
        return self


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("deepspeed_muon", "deepspeed", "torch"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # run from a source tree that is not installed
            found[package] = "unknown"
    return found


def tensor_name(key: str, parameter: str) -> str:
    """Return the name of a tensor inside the safetensors files."""
    return f"{key}/{parameter}"


def load_index(folder: str | os.PathLike[str]) -> CheckpointIndex:
    """Read and check the index of a consolidated checkpoint; the files that it names are not opened.

    Args:
        folder: The folder.

    Raises:
        CheckpointError: Naming the file and, where one is to blame, the parameter.
    """
    path = Path(folder) / INDEX_NAME
    try:
        content = read_sealed(path, FORMAT)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: no {INDEX_NAME}: not a consolidated checkpoint, or its save did not finish"
        ) from None
    return checked(CheckpointIndex, content, f"{path}: refused:\n")


def checked(model: type[_Model], content: Any, refusal: str) -> _Model:
    """Return content as an object of a pydantic model.

    Args:
        model: The model.
        content: What was read.
        refusal: What the error says before one line for each of the first faults.

    Raises:
        CheckpointError: If the content does not fit.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise CheckpointError(refusal + _readable(error)) from error


def _readable(error: ValidationError) -> str:
    lines = []
    for item in error.errors(include_url=False, include_context=False, include_input=False)[:10]:
        where = ".".join(map(str, item["loc"]))
        lines.append(f"{where + ': ' if where else ''}{item['msg'].removeprefix('Value error, ')}")
    return "\n".join(lines)
