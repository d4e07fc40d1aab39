"""What a power cut may leave of a folder: a model of a disk that loses everything that was not synced.

The model is weaker than any file system: after a power cut each name in a folder is, by itself, what it was when the
folder was last synced or what any later operation made of it, in any combination; a file has its content only if it
was synced after its last write. A set verifies for all combinations if it verifies for the worst one, since a file that
is there does no harm to a set: so the worst folder is laid out for each index that may be left, and verified.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Inode = int
Node = Inode | str | None
"""A file, ``"folder"``, or nothing."""


class Disk:
    """Names and contents, as they are and as they may be after a power cut."""

    def __init__(self, before: Path | None, folder: Path, above: Path) -> None:
        """Start from a folder that is on the disk, or from none.

        Args:
            before: Where what the folder held before lies now; ``None`` if it did not exist.
            folder: The folder that is written to.
            above: A folder above it that was there already.
        """
        self._folder, self._above = os.path.realpath(folder), os.path.realpath(above)
        self._contents: list[bytearray] = []
        self._synced: list[bytes | None] = []
        # Path to what it may be: first what is on the disk, last what the processes see.
        self._names: dict[str, list[Node]] = {}
        if before is not None:
            self._names = {path: ["folder"] for path in self._folders()}
            for path in before.iterdir():
                node = self._new(path.read_bytes(), synced=True)
                self._names[os.path.join(self._folder, path.name)] = [node]

    def _folders(self) -> Iterator[str]:
        """Yield the folder and those above it that may have been made."""
        path = self._folder
        while path != self._above:
            yield path
            path = os.path.dirname(path)

    def apply(self, entry: dict[str, Any]) -> None:
        """Take over one operation that a process carried out."""
        kind, path = entry["kind"], entry["path"]
        if kind == "open":
            self._change(path, self._new(b"", synced=False))
        elif kind == "write":
            node = self._now(path)
            assert isinstance(node, int)
            self._contents[node] += bytes.fromhex(entry["data"])
            self._synced[node] = None
        elif kind == "rename":
            self._change(entry["to"], self._now(path))
            self._change(path, None)
        elif kind == "unlink":
            self._change(path, None)
        elif kind == "mkdir":
            self._change(path, "folder")
        elif kind == "fsync" and not entry.get("failed"):
            node = self._now(path)
            if isinstance(node, int):
                self._synced[node] = bytes(self._contents[node])
        elif kind == "fsync folder" and not entry.get("failed"):
            for name in self._names:
                if os.path.dirname(name) == path:
                    self._names[name] = self._names[name][-1:]

    def left(self, index: str) -> Iterator[dict[str, bytes] | None]:
        """Yield the worst content of the folder for each index that a power cut may leave; ``None`` without one.

        Args:
            index: Name of the index in the folder.
        """
        worst = {
            os.path.basename(name): min((self._bytes(node) for node in nodes), key=_badness)
            for name, nodes in self._names.items()
            if os.path.dirname(name) == self._folder
        }
        contents = {self._bytes(node) for node in self._names.get(os.path.join(self._folder, index), [None])}
        if any(self._names.get(path) != ["folder"] for path in self._folders()):
            contents.add(None)
        for content in contents:
            if content is None:
                yield None
            else:
                rest = {name: data for name, data in worst.items() if data is not None and name != index}
                yield {**rest, index: content}

    def _bytes(self, node: Node) -> bytes | None:
        if not isinstance(node, int):
            return None
        content = self._synced[node]
        # Torn: not even its length is certain.
        return bytes(self._contents[node][: len(self._contents[node]) // 2]) if content is None else content

    def _new(self, content: bytes, *, synced: bool) -> Inode:
        self._contents.append(bytearray(content))
        self._synced.append(bytes(content) if synced else None)
        return len(self._contents) - 1

    def _now(self, path: str) -> Node:
        return self._names.get(path, [None])[-1]

    def _change(self, path: str, node: Node) -> None:
        self._names.setdefault(path, [None]).append(node)


def _badness(content: bytes | None) -> int:
    """Order what may be left of a name: nothing is worst, then the shortest."""
    return -1 if content is None else len(content)


def worst_folders(
    entries: Sequence[dict[str, Any]], disk: Disk, index: str
) -> Iterator[tuple[int, dict[str, bytes] | None]]:
    """Carry out operations and yield, after each, the worst folders that a power cut may leave.

    Those that are as they were one operation before are left out, but for the last.

    Args:
        entries: The operations; ``disk`` is changed.
        disk: What was there before.
        index: Name of the index in the folder.
    """
    before: list[Any] = []
    for done in range(len(entries) + 1):
        now = list(disk.left(index))
        for content in now:
            if content not in before or done == len(entries):
                yield done, content
        before = now
        if done < len(entries):
            disk.apply(entries[done])
