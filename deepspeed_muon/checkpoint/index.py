"""The JSON index of a consolidated checkpoint: what it must say; anything else is refused.

A consolidated checkpoint is a folder with ``muon_index.json`` and the safetensors files that the index names. A save
writes the index last, so a folder without one holds no checkpoint. The index is untrusted: a name of a file cannot
lead out of the folder, and sizes are compared with the files before memory is allocated.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationError,
    model_validator,
)
from typing_extensions import TypedDict

from deepspeed_muon.checkpoint.sealed import VERSION, parse_sealed, read_regular, refusing, sealed_json
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.variants import ROW_STATE

FORMAT: Literal["deepspeed_muon.consolidated"] = "deepspeed_muon.consolidated"
INDEX_NAME = "muon_index.json"
UNIVERSAL_FORMAT: Literal["deepspeed_muon.universal"] = "deepspeed_muon.universal"
OURS = "deepspeed_muon"
"""The optimizer of a checkpoint that was not converted from another one."""
SHARD_PATTERN = re.compile(r"muon-[0-9a-f]{12}-[0-9]{5,}\.safetensors")
STATE_KEYS: dict[str, tuple[str, ...]] = {"muon": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}
"""What the optimizer keeps for each element of a parameter of an algorithm, next to the fp32 master."""
ROW_KEYS: dict[str, tuple[str, ...]] = {"muon": tuple(ROW_STATE), "adamw": ()}
"""What the variants of the algorithm keep besides, one number for each row of each block; a run has one variant's."""

ITEM_BYTES = 4
"""All tensors of a set are fp32."""

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""What an engine counts."""

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


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Pause the garbage collector, which would take half of the time to look at a growing index again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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


class ParameterRecord(_Record):
    """One parameter: its whole tensor, how it is updated, and the tensors of a set that hold its state.

    Attributes:
        shape: The layer's true shape.
        algorithm: Whose state it is.
        heads: Blocks (attention heads, experts, parts) that were orthogonalised separately.
        grid: Their rows and columns where they are not ``heads`` equal blocks of rows.
        transposed: Whether the weight is stored as input x output.
        group: Number of its param group.
        rows: Numbers in each entry of its state that has one a row; 0 where there is no such entry.
        row_keys: These entries.
        step: Optimizer steps taken; 0 when there is no optimizer state.
        tensors: Each of :attr:`tensor_keys` to its file, or to its checksum where each has a file of its own.
            Empty as long as nothing is written.
    """

    shape: Annotated[tuple[Dimension, ...], _at_most(64)]
    algorithm: Literal["muon", "adamw"]
    heads: Dimension = 1
    grid: tuple[Blocks, Blocks] | None = None
    transposed: Annotated[bool, Field(strict=True)] = False
    group: Count
    rows: Annotated[int, Field(ge=0, le=_MAX_NUMEL, strict=True)] = 0
    row_keys: Annotated[tuple[str, ...], _at_most(len(ROW_STATE))] = ()
    step: Steps = 0
    tensors: dict[str, str] = {}

    @classmethod
    def of(cls, route: Any, **more: Any) -> ParameterRecord:
        """Return the record of a parameter with a route, or with another record; ``more`` are further fields."""
        fields = ("shape", "algorithm", "heads", "grid", "transposed")
        return cls(**{**{name: getattr(route, name) for name in fields}, **more})

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def tensor_keys(self) -> tuple[str, ...]:
        """``fp32``, and the entries of the state once a step was taken."""
        if not self.step:
            return ("fp32",)
        return ("fp32", *STATE_KEYS[self.algorithm], *self.row_keys)

    def shape_of(self, key: str) -> tuple[int, ...]:
        """Return the shape of the whole master (``fp32``) or of an entry of the state."""
        return (self.rows,) if key in ROW_KEYS[self.algorithm] else self.shape

    @model_validator(mode="after")
    def _possible(self) -> ParameterRecord:
        numel = self.numel
        if numel > _MAX_NUMEL:
            raise ValueError(f"shape {list(self.shape)} is absurd")
        if self.heads > numel:
            raise ValueError(f"{self.heads} heads do not fit shape {list(self.shape)}")
        if self.rows > numel or (self.rows and not ROW_KEYS[self.algorithm]):
            raise ValueError(
                f"{self.rows} rows of moments do not fit {self.algorithm} and shape {list(self.shape)}"
            )
        if not set(self.row_keys) <= set(ROW_KEYS[self.algorithm]) or len(set(self.row_keys)) < len(
            self.row_keys
        ):
            raise ValueError(f"row_keys {list(self.row_keys)} are not among {list(ROW_KEYS[self.algorithm])}")
        return self


class LossScale(TypedDict, total=False):
    """What a dynamic loss scale carries from step to step, under the names of DeepSpeed's attributes."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    cur_scale: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
    cur_iter: Steps
    last_overflow_iter: Annotated[int, Field(ge=-1, le=1 << 40, strict=True)]
    cur_hysteresis: Steps


SCALE_KEYS = tuple(LossScale.__annotations__)


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
    loss_scale: LossScale | None = None


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
    """The whole index of a consolidated set, or the record of a universal checkpoint.

    Attributes:
        format: :data:`FORMAT`, or :data:`UNIVERSAL_FORMAT`: there each tensor has a file of its own.
        version: Of the format.
        versions: Of the software that wrote it.
        source: Where the state came from, in words and numbers; ``optimizer`` is :data:`OURS`, or what it was converted
            from.
        lossy: What was lost or invented when it was converted from another optimizer.
        optimizer: The settings of the optimizer.
        groups: Hyperparameters of the param groups.
        progress: Where the run stood.
        files: The safetensors files; none in a universal checkpoint.
        parameters: Name of every parameter to its record.
    """

    format: Literal["deepspeed_muon.consolidated", "deepspeed_muon.universal"]
    version: Literal[1]
    versions: dict[str, str]
    source: dict[str, Any] = {}
    lossy: Annotated[list[str], Field(max_length=1024)] = []
    optimizer: dict[str, Any] = {}
    groups: Annotated[list[dict[str, Any]], Field(max_length=1024)]
    progress: Progress = Progress()
    files: Annotated[dict[str, SkipValidation[FileRecord]], _each(FileRecord)] = {}
    parameters: Annotated[dict[str, SkipValidation[ParameterRecord]], _each(ParameterRecord)]

    @classmethod
    def made_now(cls, form: str = FORMAT, **content: Any) -> CheckpointIndex:
        """Return an index of this release's format with the versions of the software that runs."""
        return cls(format=form, version=VERSION, versions=_versions(), **content)  # type: ignore[arg-type]

    @_without_collections()
    def to_bytes(self) -> bytes:
        """Return the file's content, with the checksum. It leaves out what has its default."""
        return sealed_json(self.model_dump(mode="json", exclude_defaults=True))

    @model_validator(mode="after")
    def _consistent(self) -> CheckpointIndex:
        for name in self.files:
            if not SHARD_PATTERN.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a shard of this folder")
        used = dict.fromkeys(self.files, 0)
        for name, record in self.parameters.items():
            if record.group >= len(self.groups):
                raise ValueError(f"parameter {name}: param group {record.group} does not exist")
            stateless = not record.step and record.rows
            if (
                record.tensors.keys() != set(record.tensor_keys)
                or stateless
                or bool(record.rows) != bool(record.row_keys)
            ):
                raise ValueError(
                    f"parameter {name}: holds {sorted(record.tensors)}, expected {sorted(record.tensor_keys)}"
                )
            for key, file in record.tensors.items() if self.format == FORMAT else ():
                if file not in self.files:
                    raise ValueError(f"parameter {name}: {key} is in {file!r}, which is not among the files")
                used[file] += ITEM_BYTES * math.prod(record.shape_of(key))
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


@_without_collections()
def load_index(folder: str | os.PathLike[str], name: str = INDEX_NAME, form: str = FORMAT) -> CheckpointIndex:
    """Read and check the index of a checkpoint; the files that it names are not opened.

    Args:
        folder: The folder.
        name: Of the index in it.
        form: The format that it must have.

    Raises:
        CheckpointError: Naming the file and, where one is to blame, the parameter.
    """
    path = Path(folder) / name
    with refusing(str(path)):
        try:
            text = read_regular(path)
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder}: no {name}: not a consolidated checkpoint, or its save did not finish"
            ) from None
        content = parse_sealed(text, str(path), form)
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
