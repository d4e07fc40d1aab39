"""Counts the file operations and collectives of this process, writes them down, and lets one of them fail.

Only calls below one folder count. They are replaced by attribute (``os.replace`` and so on), so that what runs between
them is the program itself.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import functools
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

COLLECTIVES = ("all_gather_object", "all_reduce", "all_to_all_single")


@dataclass(frozen=True)
class Fault:
    """What fails.

    Attributes:
        rank: In which rank's process.
        number: Which call of that process, from 0; collectives are counted apart, since a thread writes meanwhile.
        collective: Whether a collective is meant.
        action: ``EIO`` or ``ENOSPC`` instead of the call; ``done, EIO``: the call happens and then reports an error;
            ``kill``: SIGKILL instead of the call (``write`` has written a half by then); ``lost``: a collective raises
            as when another rank is gone; ``done, lost``: it happens first; ``shard gone``, ``folder gone``: somebody
            removes a new shard, or the folder, before the call; ``not shared``: the rank has a folder of its own.
        after: With ``kill``: seconds from the start of the save, instead of a call.
    """

    rank: int
    number: int
    collective: bool
    action: str
    after: float = 0.0


class Injector:
    """Installed once in a process that ends soon."""

    def __init__(self, root: Path, rank: int, log: Path, fault: Fault | None) -> None:
        self._root = os.path.realpath(root) + os.sep
        self._rank = rank
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._fault = fault if fault is not None and fault.rank == rank else None
        self._counts = {False: 0, True: 0}
        self._write = os.write
        self._unlink, self._listdir = os.unlink, os.listdir
        self._open = builtins.open

    def install(self) -> None:
        """Replace the functions. Collectives too, where a process group exists."""
        if self._fault is not None and self._fault.after:
            # Without a handler the signal ends the process at once, in the middle of whatever it does.
            signal.setitimer(signal.ITIMER_REAL, self._fault.after)
        builtins.open = self._builtin_open  # type: ignore[assignment]
        os.open = self._wrap_path("open folder", os.open)  # type: ignore[assignment]
        os.unlink = self._wrap_path("unlink", os.unlink)  # type: ignore[assignment]
        os.mkdir = self._wrap_path("mkdir", os.mkdir)  # type: ignore[assignment]
        os.listdir = self._wrap_path("listdir", os.listdir)  # type: ignore[assignment]
        os.replace = self._wrap_path("rename", os.replace)  # type: ignore[assignment]
        os.fsync = self._wrap_descriptor("fsync", os.fsync)  # type: ignore[assignment]
        fcntl.flock = self._wrap_descriptor("flock", fcntl.flock)  # type: ignore[assignment]
        if dist.is_initialized():
            for name in COLLECTIVES:
                setattr(dist, name, self._wrap_collective(name, getattr(dist, name)))

    def call(self, kind: str, path: str, do: Callable[[], Any], **more: Any) -> Any:
        """Write a call down and do it, or fail."""
        collective = kind in COLLECTIVES
        number = self._counts[collective]
        self._counts[collective] += 1
        entry = {"rank": self._rank, "number": number, "kind": kind, "path": path, **more}
        fault = self._fault
        if fault is None or (fault.number, fault.collective) != (number, collective):
            result = do()
            self._note(entry)
            return result
        if fault.action.endswith("gone"):
            self._lose(fault.action, os.path.dirname(path))
            result = do()
            self._note(entry)
            return result
        if fault.action == "kill":
            if kind == "write":
                do_half = more.pop("half")
                do_half()
                self._note({**entry, "data": entry["data"][: len(entry["data"]) // 4 * 2]})
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        if fault.action.startswith("done"):
            do()
            self._note({**entry, "failed": True})
        if "lost" in fault.action:
            raise RuntimeError("injected: connection closed by peer")
        code = errno.ENOSPC if fault.action == "ENOSPC" else errno.EIO
        raise OSError(code, os.strerror(code), path)

    def _lose(self, action: str, folder: str) -> None:
        """Remove the last of the new shards, or the folder."""
        if action == "folder gone":
            os.rename(folder, f"{folder}-gone")
            return
        shards = [
            os.path.join(folder, name) for name in self._listdir(folder) if name.endswith(".safetensors")
        ]
        newest = max(shards, key=lambda path: os.stat(path).st_mtime_ns)
        self._unlink(newest)
        self._note({"rank": self._rank, "number": -1, "kind": "unlink", "path": newest})

    def _note(self, entry: dict[str, Any]) -> None:
        entry.pop("half", None)
        self._write(self._log, json.dumps(entry).encode() + b"\n")

    def _inside(self, path: Any) -> str | None:
        if not isinstance(path, str | os.PathLike):
            return None
        name = os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.basename(path))
        return name if (name + os.sep).startswith(self._root) else None

    def _builtin_open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        path = self._inside(file) if "w" in mode else None
        if path is None:
            return self._open(file, mode, *args, **kwargs)
        opened = self.call("open", path, lambda: self._open(file, mode, *args, **kwargs))
        return _File(self, path, opened)

    def _wrap_path(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(path: Any, *args: Any, **kwargs: Any) -> Any:
            where = self._inside(path)
            if where is None:
                return original(path, *args, **kwargs)
            more = {"to": self._inside(args[0])} if kind == "rename" else {}
            name = "open lock" if kind == "open folder" and args[0] & os.O_CREAT else kind
            return self.call(name, where, lambda: original(path, *args, **kwargs), **more)

        return wrapper

    def _wrap_descriptor(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(descriptor: int, *args: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if self._inside(path) is None:
                return original(descriptor, *args)
            name = f"{kind} folder" if os.path.isdir(path) else kind
            return self.call(name, path, lambda: original(descriptor, *args))

        return wrapper

    def _wrap_collective(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return self.call(name, "", lambda: original(*args, **kwargs))

        return wrapper


class _File:
    """A file opened for writing, whose calls count."""

    def __init__(self, injector: Injector, path: str, opened: Any) -> None:
        self._injector, self._path, self._opened = injector, path, opened

    def write(self, data: Any) -> Any:
        content = data.encode() if isinstance(data, str) else bytes(data)

        def half() -> None:
            self._opened.write(data[: len(data) // 2])
            self._opened.flush()

        return self._injector.call(
            "write", self._path, lambda: self._opened.write(data), data=content.hex(), half=half
        )

    def close(self) -> None:
        if not self._opened.closed:
            # Linux has released the descriptor when close() reports an error.
            try:
                self._injector.call("close", self._path, lambda: None)
            finally:
                self._opened.close()

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)


def describe(entry: dict[str, Any]) -> str:
    """Name a call for the table: what it does, to what."""
    kind, path = entry["kind"], entry["path"]
    if not path:
        return f"collective {kind}"
    name = os.path.basename(path)
    if kind in ("fsync folder", "open folder", "mkdir", "listdir"):
        return kind
    if "lock" in name:
        return f"{kind.removesuffix(' lock')} lock"
    if name == "latest" or name.endswith(".py"):
        return f"{kind} {'latest' if name == 'latest' else 'script'}"
    target = "index" if "index" in name else "shard"
    if name.startswith("."):
        target += " aside"
    return f"{kind} {target}"
