"""The JSON index of a consolidated checkpoint: what it must say, under a checksum; anything else is refused.

A consolidated checkpoint is a folder with ``muon_index.json`` and the safetensors files that the index names. A save
writes the index last, so a folder without one holds no checkpoint. The index is untrusted: a name of a file cannot
lead out of the folder, and sizes are compared with the files before memory is allocated.

The checksum is computed from a canonical form, so white space and the order of keys do not matter. It reveals damage;
it does not prove who wrote the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor
from typing_extensions import TypedDict

from deepspeed_muon.checkpoint.files import read_regular, refusing
from deepspeed_muon.checkpoint.parameters import ITEM_BYTES, Count, ParameterRecord, Steps
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.ops.machine import installed_version

FORMAT: Literal["deepspeed_muon.consolidated"] = "deepspeed_muon.consolidated"
INDEX_NAME = "muon_index.json"
OURS = "deepspeed_muon"
"""The optimizer of a checkpoint that was not converted from another one."""
SHARD_PATTERN = re.compile(r"muon-[0-9a-f]{12}-[0-9]{5,}\.safetensors")

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""What an engine counts."""

_Model = TypeVar("_Model", bound=BaseModel)

VERSION: Literal[1] = 1
"""Of the documents."""
_CHECKSUM = "sha256"
# Such a document is refused before it is parsed, which takes many times its size.
_MAX_OBJECTS = 160_000
_MAX_VALUES = 2_000_000
# Only maps of names to objects (parameters, files, tensors) are longer: each fault in a document takes a kilobyte.
_MAX_KEYS = 1024


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


class CheckpointIndex(_Record):
    """The whole index of a consolidated set.

    Attributes:
        format: :data:`FORMAT`.
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
    version: Literal[1] = VERSION
    versions: dict[str, str]
    source: dict[str, Any] = {}
    lossy: Annotated[list[str], Field(max_length=1024)] = []
    optimizer: dict[str, Any] = {}
    groups: Annotated[list[dict[str, Any]], Field(max_length=1024)]
    progress: Progress = Progress()
    files: dict[str, FileRecord] = {}
    parameters: dict[str, ParameterRecord]

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
            for key, file in record.tensors.items():
                if file not in self.files:
                    raise ValueError(f"parameter {name}: {key} is in {file!r}, which is not among the files")
                used[file] += ITEM_BYTES * math.prod(record.shape_of(key))
        for file, size in used.items():
            if size > self.files[file].bytes:
                raise ValueError(f"{file} has {self.files[file].bytes} bytes, its tensors need {size}")
        return self


def software_versions() -> dict[str, str]:
    """Return the versions of the software that runs."""
    packages = ("deepspeed_muon", "deepspeed", "torch")
    found = {package: installed_version(package) or "unknown" for package in packages}
    return {"python": platform.python_version(), **found}


def load_index(folder: str | os.PathLike[str]) -> CheckpointIndex:
    """Read and check the index of a checkpoint in a folder; the files that it names are not opened.

    Raises:
        CheckpointError: Naming the file and, where one is to blame, the parameter.
    """
    path = Path(folder) / INDEX_NAME
    with refusing(str(path)):
        try:
            text = read_regular(path)
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder}: no {INDEX_NAME}: not a consolidated checkpoint, or its save did not finish"
            ) from None
        content = parse_sealed(text, str(path))
        models: dict[str, type[BaseModel]] = {"files": FileRecord, "parameters": ParameterRecord}
        for key, model in models.items():
            # Here the first bad record raises: to tell of all could take gigabytes.
            entries: Any = content.get(key)
            for name in entries if isinstance(entries, dict) else ():
                entries[name] = checked(model, entries[name], f"{path}: refused:\n{key}: {name}: ")
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


def is_json(value: Any) -> bool:
    """Return whether JSON can hold ``value`` without loss; a tuple may come back as a list."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return _has_text_keys(value)


def saved_schedule(state: Any) -> dict[str, Any] | None:
    """Return a scheduler's state as an index holds it; ``None`` if JSON cannot hold it.

    The milestones of MultiStepLR, which have numbers for keys, are a list; infinities (ReduceLROnPlateau) are ``None``.
    """
    if not isinstance(state, Mapping):
        return None
    found = dict(state)
    for key, value in state.items():
        if isinstance(value, Counter):
            found[key] = sorted(value.elements())
        elif isinstance(value, float) and math.isinf(value):
            found[key] = None
    return found if is_json(found) else None


def json_settings(group: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the settings of a param group that JSON can hold; a tensor of one element becomes its number."""
    plain = {
        str(key): value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in group.items()
        if key != "params"
    }
    return {key: value for key, value in plain.items() if is_json(value)}


def _has_text_keys(value: Any) -> bool:
    """Return whether all keys are text: JSON would turn a number into text, and torch's MultiStepLR not find it."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(entry) for key, entry in value.items())
    return not isinstance(value, (list, tuple)) or all(map(_has_text_keys, value))


def sealed_json(content: Mapping[str, Any]) -> bytes:
    """Return a document as text, with its version and checksum; every entry of its maps has a line of its own.

    Args:
        content: The document; ``version`` and the checksum in it are replaced.

    Raises:
        CheckpointError: If it holds what no reader would take.
    """
    try:
        text = json.dumps({**content, "version": VERSION}, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"JSON cannot hold what is to be written: {error}") from error
    # As a reader will see it: lists for tuples, text for every key.
    document = parse_json(text.encode(), "what is to be written")
    document[_CHECKSUM] = _checksum(document)
    lines = []
    for key, value in document.items():
        entries = value.items() if isinstance(value, dict) else ()
        rows = ",\n".join("  " + json.dumps({name: entry})[1:-1] for name, entry in entries)
        lines.append(f" {json.dumps(key)}: {{\n{rows}\n }}" if rows else " " + json.dumps({key: value})[1:-1])
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def parse_sealed(text: bytes, path: str) -> dict[str, Any]:
    """Check form, version and checksum of a document.

    Args:
        text: The file's content.
        path: The file, for messages.

    Returns:
        The document, without its checksum.

    Raises:
        CheckpointError: Naming the file.
    """
    content = parse_json(text, path)
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not of the format {FORMAT}")
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"{path}: format version {version!r}; this release reads version {VERSION}: consolidate DeepSpeed's "
            f"checkpoint again, or use the release that wrote it"
        )
    found = content.pop(_CHECKSUM, None)
    if found != _checksum(content):
        what = "its checksum is missing" if found is None else "its checksum is not that of its content"
        raise CheckpointError(f"{path}: {what}: the file was changed or is damaged")
    return content


def parse_json(text: bytes, path: str) -> dict[str, Any]:
    """Return a JSON object as this project writes it: ASCII, every key once, no more values than a checkpoint needs.

    Raises:
        CheckpointError: Naming ``path``.
    """
    if text.count(b"{") > _MAX_OBJECTS or sum(map(text.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise CheckpointError(f"{path}: more values than that of a checkpoint can have")
    try:
        content = json.loads(
            text.decode("ascii"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_finite,
            parse_float=_finite,
        )
        if b"\\u" in text:  # half of a surrogate pair is in no text
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error or 'no memory'}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: no JSON object")
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != _CHECKSUM}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > _MAX_KEYS and not all(isinstance(value, dict) for _, value in pairs):
        raise ValueError(f"an object has {len(pairs)} keys")
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _finite(text: str) -> float:
    """Return a number; raise for ``NaN`` and ``Infinity``, which JSON does not have, and for 1e999."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value
