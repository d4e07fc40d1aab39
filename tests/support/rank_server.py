"""Forks ranks from a process that has imported torch and DeepSpeed: ``python -m tests.support.rank_server FD PARENT``.

Importing them takes a rank some seconds of a core, and a test session starts dozens of ranks. A fork starts with what
this process has: imported modules, this project's among them; no threads, no process group.

The harness has two servers, and neighbouring ranks come from different ones. Python draws the order of its sets by
process, so that ranks that send in the order of a set still meet in different orders.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed_muon.errors import InstallationError
from deepspeed_muon.ops.builder import load as load_ops
from tests.support.hygiene import TAG_VARIABLE, new_tag
from tests.support.native_ops import REPOSITORY
from tests.support.rank_worker import die_with_parent, main, remember_cpu_info, runtime_caches

_PRELOADED = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.utils.cpp_extension",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer",
    "tests.support.training",
)
"""What every engine imports sooner or later, besides the native ops; under an older DeepSpeed some of it is missing."""


class RankServer:
    """The harness's end of a server."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def fork(
        self, environment: Mapping[str, str], channel: int, log: int, *, shm_all_reduce: bool
    ) -> ForkedRank:
        """Start a rank; the server must have been started.

        Args:
            environment: All environment variables of the rank.
            channel: The open socket that it serves.
            log: The open file for its stdout and stderr.
            shm_all_reduce: Whether DeepSpeed's shared-memory all-reduce stays on.
        """
        assert self._socket is not None
        order = {"environment": dict(environment), "shm_all_reduce": shm_all_reduce}
        socket.send_fds(
            self._socket, [len(payload := json.dumps(order).encode()).to_bytes(8)], [channel, log]
        )
        self._socket.sendall(payload)
        return ForkedRank(self, int(self._reply()["pid"]))

    def wait(self, pid: int, timeout: float | None) -> int:
        """Return the code with which a rank ended, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: If it did not end in time.
        """
        assert self._socket is not None
        payload = json.dumps({"wait": pid, "timeout": timeout}).encode()
        self._socket.sendall(len(payload).to_bytes(8) + payload)
        code = self._reply()["code"]
        if code is None:
            raise subprocess.TimeoutExpired(f"rank {pid}", timeout or 0.0)
        return int(code)

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the process if there is none yet, without waiting for its imports."""
        if self._process is not None:
            return
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.rank_server", str(theirs.fileno()), str(os.getpid())],
                cwd=REPOSITORY,
                env={
                    **environment,
                    TAG_VARIABLE: new_tag(),
                    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # with more, torch 2.6 starts a pool at import
                },
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def _reply(self) -> dict[str, int | None]:
        assert self._socket is not None
        line = b""
        while not line.endswith(b"\n"):
            if not (chunk := self._socket.recv(1 << 16)):
                raise RuntimeError("the server that forks ranks has ended; its output is above")
            line += chunk
        reply: dict[str, int | None] = json.loads(line)
        return reply


class ForkedRank:
    """A rank as ``subprocess.Popen`` shows its processes."""

    def __init__(self, server: RankServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return the code with which it ended; raise ``subprocess.TimeoutExpired`` if it did not in time."""
        if self._code is None:
            self._code = self._server.wait(self.pid, timeout)
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has been waited for."""
        if self._code is None:
            os.kill(self.pid, number)


def serve() -> None:
    """Fork ranks and wait for them until the harness closes its end."""
    requests, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    die_with_parent(parent)
    for name in _PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):  # a rank that needs it says so
            importlib.import_module(name)
    remember_cpu_info()()
    with contextlib.suppress(InstallationError):
        load_ops()
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise RuntimeError("an import started a thread, which a fork would lose")
    caches = runtime_caches()
    gc.collect()
    gc.freeze()  # the collector would write into all objects, and so copy every page
    while True:
        head, files, *_ = socket.recv_fds(requests, 8, 2)
        if not head:
            break
        order = json.loads(_exactly(requests, int.from_bytes(head)))
        if "wait" in order:
            reply = {"code": _wait(order["wait"], order["timeout"])}
        else:
            reply = {"pid": _fork(order, requests, *files, caches)}
        requests.sendall(json.dumps(reply).encode() + b"\n")


def _exactly(source: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        received += source.recv(size - len(received))
    return received


def _wait(pid: int, timeout: float | None) -> int | None:
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if deadline is not None and time.monotonic() > deadline:
            return None
        time.sleep(0.005)


def _fork(
    order: dict[str, object], requests: socket.socket, channel: int, log: int, caches: Sequence[Any]
) -> int:
    server = os.getpid()
    if pid := os.fork():
        os.close(channel)
        os.close(log)
        return pid
    code = 1
    try:
        requests.close()
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(order["environment"])  # type: ignore[call-overload]
        main(channel, server, shm_all_reduce=bool(order["shm_all_reduce"]), caches=caches)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
    os._exit(0)  # Triton's binding lists all its objects as leaked at a usual exit
