"""Reading untrusted files: regular files only, pickles that hold tensors only, JSON with a checksum of its content.

The checksum is computed from a canonical form, so white space and the order of keys do not matter. It reveals damage;
it does not prove who wrote the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import math
import mmap
import os
import pickle
import pkgutil
import stat
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor

from deepspeed_muon.errors import CheckpointError, MuonError

VERSION: Literal[1] = 1
"""Of the documents."""

# DeepSpeed's own classes that its files may hold.
_ALLOWED_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler:LossScaler",
    "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler",
    "deepspeed.runtime.zero.config:ZeroStageEnum",
    "deepspeed.utils.tensor_fragment:fragment_address",
)
_CHECKSUM = "sha256"
# What an index of some 80,000 parameters needs. More is refused before it is parsed, which takes many times its size.
_MAX_BYTES = 40 << 20
_MAX_OBJECTS = 160_000
_MAX_VALUES = 2_000_000
# Only maps of names to objects (parameters, files, tensors) are longer: each fault in a document takes a kilobyte.
_MAX_KEYS = 1024
# Neither follow a link that took the file's place, nor wait for whoever writes into a pipe.
_OPEN_FLAGS = (
    os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
)


@contextlib.contextmanager
def refusing(where: str) -> Iterator[None]:
    """Turn every exception but this package's own into a CheckpointError that begins with ``where``.

    It surrounds whatever reads content of unknown origin, which can make libraries raise anything.
    """
    try:
        yield
    except MuonError:
        raise
    except OSError as error:
        raise CheckpointError(f"{where}: {error.strerror or error}") from error
    except Exception as error:
        raise CheckpointError(f"{where}: cannot be read: {type(error).__name__}: {error}") from error


def folder_of(argument: str, value: Any) -> Path:
    """Return the folder that an argument of a call names.

    Raises:
        CheckpointError: If it names none. An empty text would be the working directory.
    """
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise CheckpointError(f"{argument} must be the path of a folder, got {value!r}")
    if not os.fspath(value):
        raise CheckpointError(f"{argument} is empty: name a folder, '.' for the working directory")
    if "\0" in os.fspath(value):
        raise CheckpointError(f"{argument} has a null character: {os.fspath(value)!r}")
    return Path(value)


def is_name(text: str) -> bool:
    """Return whether a text names something right inside of a folder."""
    return text not in ("", ".", "..") and os.path.basename(text) == text and "\0" not in text


def regular_size(path: Path) -> int:
    """Return the size of a file.

    Raises:
        CheckpointError: If it is no regular file itself, but a link, a pipe or a device.
        OSError: If there is none.
    """
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    return found.st_size


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading.

    Raises:
        CheckpointError: If it is no regular file itself, but a link, a pipe or a device.
        OSError: If it cannot be opened.
    """
    regular_size(path)
    descriptor = os.open(path, _OPEN_FLAGS)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        yield file


def read_regular(path: Path, limit: int = _MAX_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        CheckpointError: If it is no regular file, or larger than ``limit`` bytes.
        OSError: If it cannot be opened.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise CheckpointError(f"{path}: larger than such a file can be")
        return file.read()


def latest_tag(folder: Path) -> str | None:
    """Return what ``latest`` in a folder names, which need not be a name; ``None`` if there is no such file."""
    try:
        return read_regular(folder / "latest", 4096).decode().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def load_pickle(path: Path, *, trust: bool = False) -> Any:
    """Read a file of ``torch.save`` on the CPU, memory-mapped, without running code from it.

    Args:
        path: The file.
        trust: Unpickle whatever the file asks for. It can run any code.

    Raises:
        CheckpointError: Naming the file and, where one is to blame, the class that is not allowed.
    """
    allowed = [pkgutil.resolve_name(name) for name in _ALLOWED_CLASSES]
    with refusing(str(path)):
        # DeepSpeed's files may be links. Reading a pipe would wait for whoever writes into it.
        if not path.is_file() and path.exists():
            raise CheckpointError(f"{path}: not a regular file")
        try:
            with torch.serialization.safe_globals(allowed):
                return torch.load(path, map_location="cpu", mmap=True, weights_only=not trust)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path}: holds more than tensors and numbers, or is damaged: {str(error).splitlines()[0]}. If you "
                f"trust whoever wrote it, pass --trust-pickles"
            ) from error


def drop_pages(tensors: Sequence[Tensor]) -> None:
    """Give back the memory of contiguous parts of mapped files after they were read; the disk has them still.

    Pages of a mapping count as the process's until then. Nothing happens to other tensors.
    """
    try:
        with open("/proc/self/maps") as maps:
            fields = [line.split(maxsplit=5) for line in maps]
    except OSError:
        return
    spans = [span.split("-") for span, *_, inode in (each[:5] for each in fields) if inode != "0"]
    mapped = [(int(first, 16), int(last, 16)) for first, last in spans]
    madvise = ctypes.CDLL(None).madvise
    for tensor in tensors:
        start = tensor.data_ptr()
        stop = start + tensor.numel() * tensor.element_size()
        first, last = mapped[bisect_right(mapped, (start, math.inf)) - 1]
        if first <= start < stop <= last:
            start -= start % mmap.PAGESIZE
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


def check_tensor(tensor: Any, where: str) -> None:
    """Raise unless what was unpickled is a dense tensor that holds all real numbers of its shape.

    Strides of zero could make a few numbers look like a large tensor.
    """
    dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not dense or not tensor.is_floating_point():
        raise CheckpointError(f"{where} is no dense tensor of real numbers")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise CheckpointError(f"{where} says that it has {tensor.numel()} elements; the file holds fewer")


def is_json(value: Any) -> bool:
    """Return whether JSON can hold ``value`` without loss; a tuple may come back as a list."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return _has_text_keys(value)


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


def parse_sealed(text: bytes, path: str, form: str) -> dict[str, Any]:
    """Check form, version and checksum of a document.

    Args:
        text: The file's content.
        path: The file, for messages.
        form: What its ``format`` must be.

    Returns:
        The document, without its checksum.

    Raises:
        CheckpointError: Naming the file.
    """
    content = parse_json(text, path)
    if content.get("format") != form:
        raise CheckpointError(f"{path}: not of the format {form}")
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"{path}: format version {version!r}; this release reads version {VERSION}: write it anew from DeepSpeed's "
            f"files, or with the release that wrote it"
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
