"""What a restore reads from: the files of a consolidated set, and which set a folder means."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from deepspeed_muon.checkpoint.deepspeed_files import identify_tag
from deepspeed_muon.checkpoint.files import (
    file_digest,
    is_name,
    latest_tag,
    open_regular,
    refusing,
    regular_size,
    require_folder,
)
from deepspeed_muon.checkpoint.index import (
    CONSOLIDATED_FOLDER,
    INDEX_NAME,
    ITEM_BYTES,
    FileLayout,
    Shapes,
    load_index,
    tensor_name,
    tensors_by_file,
)
from deepspeed_muon.checkpoint.parameters import matching_views
from deepspeed_muon.checkpoint.slices import TensorSlice
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.logs import listed, warn
from deepspeed_muon.plan.placement import Fragment

WINDOW_NUMEL = 1 << 20
"""Elements that are read at once."""

_MAX_OPEN_FILES = 8
"""Files of a set that remain open between two reads."""


class ConsolidatedSource:
    """Full tensors of a consolidated set by name, of which ranges can be read. Nothing is unpickled.

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
        # A file without tensors is one that nobody reads, but all files are verified.
        self._shapes_in: dict[str, Shapes] = {
            **{file: {} for file in self.index.files},
            **tensors_by_file(self.parameters),
        }
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
        # The largest first and the ranks in turn, so that each reads about as many bytes.
        files = sorted(self._shapes_in, key=lambda file: self.index.files[file].bytes, reverse=True)
        for file in files[rank::world_size]:
            path = self._folder / file
            tensors = {
                name: f"{name.partition('/')[2]} ({name.partition('/')[0]})" for name in self._shapes_in[file]
            }
            try:
                # Size and header come first: nothing else is read of a file that is too large.
                self._open(file)
                with refusing(str(path)):
                    if file_digest(path) != self.index.files[file].sha256:
                        raise CheckpointError(f"{path}: its checksum is not that of the index")
            except CheckpointError as error:
                raise CheckpointError(f"{error}; it holds {listed(list(tensors.values()), 3)}") from error
            nonfinite += [shown for name, shown in tensors.items() if not self._is_finite(name)]
        return nonfinite

    def _is_finite(self, tensor: str) -> bool:
        key, _, parameter = tensor.partition("/")
        numel = math.prod(self.parameters[parameter].shape_of(key))
        return all(
            self.read(parameter, key, start, min(WINDOW_NUMEL, numel - start)).isfinite().all()
            for start in range(0, numel, WINDOW_NUMEL)
        )

    def read_fragment(self, tensor_slice: TensorSlice, key: str, fragment: Fragment, flat: Tensor) -> None:
        """Read a rank's fragment of a slice into its flat partition, some megabytes at a time.

        Args:
            tensor_slice: Which slice of the full tensor the data-parallel group holds.
            key: ``fp32`` or a key of the state.
            fragment: Which elements of the slice the rank holds.
            flat: The rank's flat partition. Mutated.
        """
        target = flat.narrow(0, fragment.partition_offset, fragment.numel)
        fragment_stop = fragment.matrix_offset + fragment.numel
        # 1. The range of the full tensor around the fragment; with a slice of columns it includes other slices.
        ranges = list(tensor_slice.strided_ranges(fragment.matrix_offset, fragment_stop))
        full_start = min(strided.full_offset for strided in ranges)
        full_stop = max(
            strided.full_offset + (strided.count - 1) * strided.full_stride + strided.numel
            for strided in ranges
        )
        # 2. Read it in windows, and copy the fragment's elements out of each.
        for window_start in range(full_start, full_stop, WINDOW_NUMEL):
            window_stop = min(window_start + WINDOW_NUMEL, full_stop)
            # The elements of the fragment inside this window of the full tensor.
            start = max(tensor_slice.local_elements_before(window_start), fragment.matrix_offset)
            stop = tensor_slice.local_elements_before(window_stop)
            if start < stop:
                # (window_stop - window_start,) fp32
                window = self.read(tensor_slice.name, key, window_start, window_stop - window_start)
                for elements, values in matching_views(
                    tensor_slice, start, stop, target, fragment.matrix_offset, window, window_start
                ):
                    elements.copy_(values)

    def read(self, parameter: str, key: str, start: int, numel: int) -> Tensor:
        """Return elements ``[start, start + numel)`` of a full tensor in row-major order, ``(numel,)`` fp32."""
        name = self.parameters[parameter].tensors[key]
        with refusing(f"{self._folder / name}: {parameter} ({key})"):
            file, layout = self._open(name)
            values = torch.empty(numel, dtype=torch.float32, device="cpu")
            file.seek(layout.offset_of(tensor_name(key, parameter)) + start * ITEM_BYTES)
            # Not memory-mapped: pages of a mapping count towards the memory of the process.
            if file.readinto(memoryview(values.numpy().data).cast("B")) < numel * ITEM_BYTES:  # type: ignore[attr-defined]
                raise CheckpointError("the file ends early")
            return values

    def _open(self, name: str) -> tuple[BinaryIO, FileLayout]:
        """Return an open file of the set, and the layout that it has by the index.

        Raises:
            CheckpointError: If its header is another one, or it was replaced since it was first opened.
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
                layout = FileLayout.of(self._shapes_in[name])
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


def universal_set(folder: Path) -> Path:
    """Return the folder of the set in a universal checkpoint; raise a CheckpointError for one that has none."""
    if (folder / "zero").is_dir() and not _exists(folder / "zero" / INDEX_NAME):
        raise CheckpointError(
            f"{folder}: a universal checkpoint of DeepSpeed's converter, which this Muon does not read: convert the "
            f"checkpoint that it was made from with 'python -m deepspeed_muon checkpoint universal'"
        )
    return folder / "zero"


def find_consolidated(folder: Path) -> Path:
    """Return the folder with the index: ``folder`` itself, or one inside a DeepSpeed checkpoint.

    If the tag that ``latest`` names has no set, it is the newest complete set of all tags.
    """
    with refusing(f"{str(folder)!r}"):
        require_folder(folder)
        # 1. The folder itself, its set, and the set of the latest tag.
        tag = latest_tag(folder)
        tag_folder = folder / tag if tag is not None and is_name(tag) else folder
        sets_inside = dict.fromkeys(parent / CONSOLIDATED_FOLDER for parent in (folder, tag_folder))
        for candidate in (folder, *sets_inside):
            if _exists(candidate / INDEX_NAME):
                return candidate
        # 2. The newest complete set of any tag.
        complete = []
        for path in folder.glob(f"*/{CONSOLIDATED_FOLDER}/{INDEX_NAME}"):
            with contextlib.suppress(CheckpointError, OSError):
                index = load_index(path.parent)
                if all(regular_size(path.parent / name) == file.bytes for name, file in index.files.items()):
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
    # 3. None: say what the folder is instead.
    saved = identify_tag(tag_folder)
    if saved is not None:
        saved.refuse_universal()
        raise CheckpointError(f"{saved}, and not consolidated: {saved.remedy()}")
    raise CheckpointError(
        f"{folder}: no {INDEX_NAME} there, nor in {', '.join(map(str, sets_inside))}: not a consolidated checkpoint, "
        f"or its save did not finish"
    )


def _exists(path: Path) -> bool:
    """Return whether a path exists, also as a broken link; raise if that cannot be determined."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
