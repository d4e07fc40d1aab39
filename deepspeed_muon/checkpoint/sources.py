"""What a restore reads from: consolidated sets, and universal checkpoints that DeepSpeed wrote."""

from __future__ import annotations

import contextlib
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from deepspeed_muon.checkpoint import files
from deepspeed_muon.checkpoint.index import INDEX_NAME, CheckpointIndex, checked, load_index, parse_json
from deepspeed_muon.checkpoint.parameters import (
    ITEM_BYTES,
    STATE_KEYS,
    ParameterRecord,
    Shapes,
    shard_header,
    tensor_name,
    views,
)
from deepspeed_muon.checkpoint.tag_folder import CONSOLIDATED_FOLDER, glance, model_files
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import listed, warn
from deepspeed_muon.plan.placement import Fragment, TensorSlice

WINDOW = 1 << 20
"""Elements of a tensor that are read at once."""


class StateSource(ABC):
    """Full parameters and optimizer state by name, of which a range of elements can be read.

    Attributes:
        where: What error messages call it.
        index: Its index, or what stands for it.
    """

    def __init__(self, folder: Path, index: CheckpointIndex) -> None:
        """Take the folder with the files, and the index that names them."""
        self._folder = folder
        self.where = str(folder)
        self.index = index
        # The tensors of each file: parameter and key by their name in it.
        self._inside: dict[str, dict[str, tuple[str, str]]] = {name: {} for name in index.files}
        for parameter, record in self.parameters.items():
            for key, file in record.tensors.items():
                self._inside.setdefault(file, {})[tensor_name(key, parameter)] = parameter, key

    @property
    def parameters(self) -> Mapping[str, ParameterRecord]:
        """What there is."""
        return self.index.parameters

    def verify(self, share: int, shares: int) -> list[str]:
        """Check one of ``shares`` equal parts of the files against the records.

        Returns:
            The tensors of that part that hold an infinity or NaN.

        Raises:
            CheckpointError: Naming the file and the parameter.
        """
        nonfinite = []
        for name in sorted(self._inside, key=self._numel, reverse=True)[share::shares]:
            tensors = self._inside[name].values()
            try:
                with files.refusing(str(self._folder / name)):
                    self._check(name)
            except CheckpointError as error:
                affected = listed([f"{parameter} ({key})" for parameter, key in tensors], 3)
                raise CheckpointError(f"{error}; it holds {affected}") from error
            nonfinite += [f"{each} ({key})" for each, key in tensors if not self._is_finite(each, key)]
        return nonfinite

    def _numel(self, file: str) -> int:
        return sum(
            math.prod(self.parameters[name].shape_of(key)) for name, key in self._inside[file].values()
        )

    @abstractmethod
    def _check(self, file: str) -> None:
        """Raise unless a file is whole and has the tensors of the records."""

    @abstractmethod
    def read(self, parameter: str, key: str, start: int, numel: int) -> Tensor:
        """Return elements ``[start, start + numel)`` of a tensor in row-major order, fp32, one-dimensional."""

    def _is_finite(self, parameter: str, key: str) -> bool:
        numel = math.prod(self.parameters[parameter].shape_of(key))
        pieces = (self.read(parameter, key, at, min(WINDOW, numel - at)) for at in range(0, numel, WINDOW))
        return all(piece.isfinite().all() for piece in pieces)

    def fill(self, part: TensorSlice, key: str, own: Fragment, target: Tensor) -> None:
        """Read a rank's fragment of a part of a tensor, some megabytes at a time.

        Args:
            part: The part, with the name of the whole tensor.
            key: ``fp32`` or a state key.
            own: The fragment.
            target: The rank's flat partition. Mutated.
        """
        kept = target.narrow(0, own.partition_offset, own.numel)
        runs = list(part.runs(own.matrix_offset, own.matrix_offset + own.numel))
        first = min(each.whole for each in runs)
        last = max(each.whole + (each.count - 1) * each.step + each.numel for each in runs)
        for start in range(first, last, WINDOW):
            stop = min(start + WINDOW, last)
            begin, end = max(part.before(start), own.matrix_offset), part.before(stop)
            if begin < end:
                window = self.read(part.name, key, start, stop - start)
                for mine, whole in views(part, begin, end, kept, own.matrix_offset, window, start):
                    mine.copy_(whole)

    def close(self) -> None:  # noqa: B027 - most sources keep nothing open
        """Release the files."""


class ConsolidatedSource(StateSource):
    """A folder written by :func:`deepspeed_muon.checkpoint.consolidate`. Nothing is unpickled."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Read and check the index; raises a CheckpointError if there is none, or it is not valid."""
        super().__init__(Path(folder), load_index(folder))
        self._stack = contextlib.ExitStack()
        self._open: dict[str, tuple[BinaryIO, dict[str, int]]] = {}

    def _check(self, file: str) -> None:
        """Compare size, checksum and header."""
        path, record = self._folder / file, self.index.files[file]
        size = files.regular_size(path)
        if size != record.bytes:
            raise CheckpointError(f"{path}: {size} bytes, expected {record.bytes}")
        if files.file_digest(path) != record.sha256:
            raise CheckpointError(f"{path}: its checksum is not that of the index")
        self._opened(file)

    def read(self, parameter: str, key: str, start: int, numel: int) -> Tensor:
        """Return a range of a tensor; see :class:`StateSource`."""
        name = self.parameters[parameter].tensors[key]
        with files.refusing(f"{self._folder / name}: {parameter} ({key})"):
            file, places = self._opened(name)
            found = torch.empty(numel, dtype=torch.float32)
            file.seek(places[tensor_name(key, parameter)] + start * ITEM_BYTES)
            # Nothing is mapped: pages of a mapping count as the process's.
            if file.readinto(memoryview(found.numpy().data).cast("B")) < numel * ITEM_BYTES:  # type: ignore[attr-defined]
                raise CheckpointError("the file ends early")
            return found

    def _opened(self, name: str) -> tuple[BinaryIO, dict[str, int]]:
        """Return an open file of the set, and where each of its tensors starts."""
        if name not in self._open:
            path = self._folder / name
            shapes = {
                entry: self.parameters[parameter].shape_of(key)
                for entry, (parameter, key) in self._inside[name].items()
            }
            with files.refusing(str(path)):
                file = self._stack.enter_context(files.open_regular(path))
                self._open[name] = file, _places(path, file, shapes)
        return self._open[name]

    def close(self) -> None:
        """Close the files."""
        self._stack.close()


class UniversalSource(StateSource):
    """A universal checkpoint from DeepSpeed's converter. Pickles are read with ``weights_only``."""

    def __init__(self, folder: Path, live: Mapping[str, Any]) -> None:
        """Describe the parameters of the model by their files; there are buffers and frozen parameters as well.

        Args:
            folder: The folder with ``zero``.
            live: The model's parameters by name, with shape and algorithm: the files do not say whose state they hold.

        Raises:
            CheckpointError: Naming the file.
        """
        self._folder = folder  # files are read before there is an index
        self._last: tuple[Path, Tensor] | None = None  # the file that was mapped last
        from_adam = 0
        parameters: dict[str, ParameterRecord] = {}
        for name in sorted(live):
            place, algorithm = folder / "zero" / name, live[name].algorithm
            file_of = {key: key for key in ("fp32", *STATE_KEYS[algorithm])}
            found = {path.stem for path in place.glob("*.pt")}
            if not found:
                continue
            if algorithm == "muon" and "momentum_buffer" not in found and "exp_avg" in found:
                file_of["momentum_buffer"] = "exp_avg"
                from_adam += 1
            step = 0
            if set(file_of.values()) <= found:
                step = int(files.load_pickle(place / "step.pt") if "step" in found else self._global_step())
            shape = tuple(self._tensor(f"zero/{name}/fp32.pt").shape)
            if math.prod(shape) == math.prod(live[name].shape):
                shape = live[name].shape  # from stage 3 DeepSpeed writes flat tensors
            tensors = {
                key: f"zero/{name}/{file}.pt" for key, file in file_of.items() if step or key == "fp32"
            }
            entry = {"shape": shape, "algorithm": algorithm, "step": step, "group": 0, "tensors": tensors}
            parameters[name] = checked(ParameterRecord, entry, f"{place}: refused: parameter {name}: ")
        if from_adam:
            warn(
                "deepspeed_muon: %s was saved by AdamW: its exp_avg becomes the momentum of %d matrices, their "
                "exp_avg_sq is dropped",
                folder,
                from_adam,
            )
        super().__init__(folder, CheckpointIndex.model_construct(parameters=parameters))

    def _global_step(self) -> int:
        if (file := model_files(self._folder).get("mp_rank_00")) is None:
            raise CheckpointError(f"{self._folder}: says nowhere how many steps were taken")
        state = files.load_pickle(file)
        return int(state["global_steps"]) - int(state["skipped_steps"])

    def _check(self, file: str) -> None:
        """Compare the number of elements: from stage 3 DeepSpeed writes flat tensors."""
        tensor, numel = self._tensor(file), self._numel(file)
        if tensor.numel() != numel:
            raise CheckpointError(
                f"{self._folder / file}: shape {list(tensor.shape)}, expected {numel} elements"
            )

    def read(self, parameter: str, key: str, start: int, numel: int) -> Tensor:
        """Return a range of a tensor; see :class:`StateSource`."""
        held = self._tensor(self.parameters[parameter].tensors[key]).reshape(-1).narrow(0, start, numel)
        found = held.to(torch.float32, copy=True)
        files.drop_pages([held])
        return found

    def _tensor(self, file: str) -> Tensor:
        path = self._folder / file
        if self._last is not None and self._last[0] == path:
            return self._last[1]
        content = files.load_pickle(path)
        tensor: Tensor = content["param"] if isinstance(content, dict) else content  # DeepSpeed writes both
        files.check_tensor(tensor, str(path))
        self._last = path, tensor
        return self._last[1]


def open_universal(folder: Path, live: Mapping[str, Any]) -> StateSource:
    """Return the source for a universal checkpoint: its consolidated set, or what DeepSpeed's converter wrote.

    Args:
        folder: The folder with ``zero``.
        live: See :class:`UniversalSource`.

    Raises:
        CheckpointError: Naming the file.
    """
    if not (folder / "zero").is_dir():
        raise CheckpointError(f"{folder}: no folder 'zero': not a universal checkpoint")
    if _exists(folder / "zero" / INDEX_NAME):
        return ConsolidatedSource(folder / "zero")
    return UniversalSource(folder, live)


def find_consolidated(folder: Path) -> Path:
    """Return the folder with the index: ``folder`` itself, or one inside of a DeepSpeed checkpoint.

    Where ``latest`` names no tag with a set, it is the newest complete set of all tags.
    """
    with files.refusing(f"{str(folder)!r}"):
        if _exists(folder) and not folder.is_dir():
            raise CheckpointError(f"{folder}: is no folder; name the folder that holds {INDEX_NAME}")
        tag = files.latest_tag(folder)
        tag_folder = folder / tag if tag is not None and files.is_name(tag) else folder
        candidates = [folder, *dict.fromkeys(each / CONSOLIDATED_FOLDER for each in (folder, tag_folder))]
        for candidate in candidates:
            if _exists(candidate / INDEX_NAME):
                return candidate
        complete = []
        for path in folder.glob(f"*/{CONSOLIDATED_FOLDER}/{INDEX_NAME}"):
            with contextlib.suppress(CheckpointError, OSError):
                index = load_index(path.parent)
                if all(
                    files.regular_size(path.parent / name) == file.bytes for name, file in index.files.items()
                ):
                    complete.append((index.progress.global_steps, path.stat().st_mtime, path.parent))
        if complete:
            steps, _, newest = max(complete)
            latest = "no file 'latest'" if tag is None else f"'latest' names {tag!r}, which has no set"
            warn(
                "deepspeed_muon: %s: %s; %s, of step %d, is the newest complete one",
                folder,
                latest,
                newest,
                steps,
            )
            return newest
    if (saved := glance(tag_folder)) is not None:
        saved.refuse_universal()
        raise CheckpointError(f"{saved}, and not consolidated: {saved.way()}")
    raise CheckpointError(
        f"{folder}: no {INDEX_NAME} there, nor in {', '.join(map(str, candidates[1:]))}: not a consolidated "
        f"checkpoint, or its save did not finish"
    )


def _exists(path: Path) -> bool:
    """Return whether there is something of that name; raise if that cannot be seen."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _places(path: Path, file: BinaryIO, shapes: Shapes) -> dict[str, int]:
    """Return where each tensor of a safetensors file starts.

    The header must describe just the tensors that the index expects, one after the other, to the end of the file. So
    nothing is read that is longer than such a header.

    Args:
        path: The file, for messages.
        file: The same, open at its start.
        shapes: The expected tensors.

    Raises:
        CheckpointError: If the header has anything else.
    """
    longest = 1024 + sum(len(json.dumps(name)) + 128 + 24 * len(shape) for name, shape in shapes.items())
    length = int.from_bytes(file.read(8), "little")
    if length > longest:
        raise CheckpointError(
            f"{path}: its header has {length} bytes, that of the {len(shapes)} tensors in the index at most {longest}"
        )
    header = parse_json(file.read(length), f"{path}: its header")
    header.pop("__metadata__", None)
    expected, end = shard_header({name: shapes[name] for name in header if name in shapes})
    for name in sorted(header.keys() | shapes.keys()):
        if name not in expected or header[name] != expected[name]:
            raise CheckpointError(
                f"{path}: tensor {name} of parameter {name.partition('/')[2]} is {header.get(name)} by the file's "
                f"header, {expected.get(name)} by the index"
            )
    if 8 + length + end != os.fstat(file.fileno()).st_size:
        raise CheckpointError(f"{path}: its tensors do not end where the file ends")
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in expected.items()}
