"""Real multi-rank tests on one machine: W processes under gloo, with a time limit and nothing left behind.

A rank function is a module-level function ``fn(rank, world_size, **args)``; its arguments and its result are
tensors, numbers, strings, lists and dicts. Three ways to use it:

* ``ranks(2).run(fn, stage=3)`` in a test, through the ``ranks`` fixture: a pool of ranks that stays alive for the
  session, so that torch and DeepSpeed are imported once. The way for almost every test.
* ``run_ranks(fn, 2, {"stage": 3})``: fresh ranks, for what must not share a process. With ``env`` each is a new
  interpreter; otherwise a fork of one that has imported torch, DeepSpeed and this project.
* ``run_command([...])``: any other program, such as a launcher.

When a rank raises, hangs or dies, ``RanksFailed`` is raised with all ranks' output and, for those that hang, the
stack of every thread; all processes are killed, and the pool starts afresh at its next call.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from tests.support.hygiene import (
    TAG_VARIABLE,
    allreduce_buffer_prefix,
    kill_tagged,
    new_tag,
    remove_shm,
    remove_stale_locks,
    shm_files,
)
from tests.support.native_ops import REPOSITORY, extensions_dir, warm
from tests.support.rank_server import ForkedRank, RankServer
from tests.support.rank_worker import GROUP_TIMEOUT_VARIABLE

RankFunction = Callable[..., Any] | str

ADDRESS = "127.0.0.1"
START_TIMEOUT = 120.0
"""Seconds for ranks to import DeepSpeed and find each other; a few when the machine is idle."""
CALL_TIMEOUT = 120.0
RESTORE_TIMEOUT = 30.0
STOP_TIMEOUT = 20.0
GRACE = 3.0
"""Seconds that the other ranks get to fail by themselves, or to finish, after the first one failed."""
MAX_OUTPUT = 200_000
"""Characters of a rank's output that an error shows; beyond it, the middle is left out."""

_FOREIGN_VARIABLES = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_")
_servers = (RankServer(), RankServer())

_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why one rank failed.

    Attributes:
        type: Name of the exception's class, or ``"Hang"`` or ``"Died"``.
        message: The exception's message.
        traceback: Its traceback as text, empty for a rank that hung or died.
    """

    type: str
    message: str
    traceback: str = ""


class RanksFailed(Exception):
    """At least one rank raised, hung or died; the message holds all ranks' output.

    Attributes:
        failures: The failure of each rank that failed, by rank.
        outputs: What each rank wrote to stdout and stderr during the call.
    """

    def __init__(self, title: str, failures: dict[int, RankFailure], outputs: list[str]) -> None:
        self.failures = failures
        self.outputs = outputs
        sections = [title]
        for rank, failure in sorted(failures.items()):
            sections.append(f"rank {rank}: {failure.type}: {failure.message}")
            if failure.traceback:
                sections.append(failure.traceback.rstrip())
        for rank, output in enumerate(outputs):
            sections += [f"----- output of rank {rank} -----", _shorten(output).rstrip() or "(none)"]
        super().__init__("\n".join(sections))


class CommandFailed(Exception):
    """A command ended with a code other than 0, or not in time; the message holds its output."""


@dataclass(slots=True)
class _Rank:
    """One live rank process."""

    process: subprocess.Popen[bytes] | ForkedRank
    channel: Connection
    log: Path


@dataclass(frozen=True, slots=True)
class RankHost:
    """Where one rank runs when it is not to run beside this process, as on a host of ``benchmarks/network.py``.

    Attributes:
        prefix: What to put before the rank's command. It must become the rank: same process, same open files.
        env: The rank's own variables, ``MASTER_ADDR`` and ``MASTER_PORT`` among them: rank 0 holds the store.
    """

    prefix: Sequence[str]
    env: Mapping[str, str]


class RankPool:
    """W rank processes that stay alive and run one call after the other.

    The processes start at the first call. After a failure they are killed, and the next call starts new ones, so
    that a failed test cannot harm a later one. Idle ranks block on a socket and use no CPU.

    Args:
        world_size: Number of ranks.
        env: Environment variables for the ranks, on top of this process's own.
        shm_all_reduce: Leave DeepSpeed's shared-memory all-reduce op on.
        hosts: Where each rank runs; by default all beside this process.
    """

    def __init__(
        self,
        world_size: int,
        *,
        env: Mapping[str, str] | None = None,
        shm_all_reduce: bool = False,
        hosts: Sequence[RankHost] = (),
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        if hosts and len(hosts) != world_size:
            raise ValueError(f"{world_size} ranks have {len(hosts)} hosts")
        self._hosts = tuple(hosts)
        self.world_size = world_size
        self._env = dict(env or {})
        self._shm_all_reduce = shm_all_reduce
        self._ranks: list[_Rank] = []
        self._shm_prefixes: list[str] = []
        self._store: torch.distributed.TCPStore | None = None
        self._folder: Path | None = None
        self._tag = ""
        self._calls = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the live ranks, in rank order; empty before the first call."""
        return [rank.process.pid for rank in self._ranks]

    def run(self, fn: RankFunction, /, *, timeout: float = CALL_TIMEOUT, **args: Any) -> list[Any]:
        """Call ``fn(rank, world_size, **args)`` on every rank.

        Args:
            fn: A module-level function, or its name as ``"module:function"``.
            timeout: Seconds that the call may take; starting the ranks is not counted.
            **args: The same for every rank.

        Returns:
            What each rank returned, in rank order. Tuples arrive as lists, tensors on the CPU.

        Raises:
            RanksFailed: If any rank raised, hung or died.
        """
        name = function_name(fn)
        try:
            if not self._ranks:
                self._start()
            assert self._folder is not None
            self._calls += 1
            call = self._folder / f"call{self._calls}"
            call.mkdir()
            torch.save(args, call / "args.pt")
            for index, rank in enumerate(self._ranks):
                os.truncate(rank.log, 0)  # the ranks write with O_APPEND
                self._send(
                    rank,
                    {
                        "order": "call",
                        "function": name,
                        "args": str(call / "args.pt"),
                        "result": str(call / f"{index}.pt"),
                    },
                )
            self._await_replies(f"{name} on {self.world_size} ranks", timeout)
            for rank in self._ranks:
                self._send(rank, {"order": "restore"})
            self._await_replies(
                f"clean-up after {name} on {self.world_size} ranks", min(timeout, RESTORE_TIMEOUT)
            )
            results = [
                torch.load(call / f"{index}.pt", weights_only=True) for index in range(self.world_size)
            ]
            shutil.rmtree(call)
            return results
        except BaseException as error:
            if self._ranks and not isinstance(error, RanksFailed):
                # The time limit of the whole test, or Ctrl-C: say what the ranks were at before they go.
                self._dump_stacks(range(self.world_size))
                for index, output in enumerate(self._outputs()):
                    print(f"----- output of rank {index} -----\n{_shorten(output)}", file=sys.stderr)
            self._kill()
            raise

    def close(self) -> None:
        """Stop the ranks and remove all that they made. May be called twice; a later ``run`` starts new ranks."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                self._send(rank, {"order": "stop"})
        deadline = time.monotonic() + STOP_TIMEOUT
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()

    @property
    def _forks(self) -> bool:
        """Whether ranks may start with what another process has imported."""
        return not self._hosts and self._env.keys() <= {GROUP_TIMEOUT_VARIABLE}

    def _start(self) -> None:
        extensions = warm()
        self._folder = Path(tempfile.mkdtemp(prefix="deepspeed_muon_ranks_"))
        self._tag = new_tag()
        if not self._hosts:
            # This process holds the rendezvous store, as torchrun's agent does: the kernel picks the port, and nobody
            # can take it between the choice and the use.
            self._store = torch.distributed.TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
            self._shm_prefixes.append(allreduce_buffer_prefix(ADDRESS, self._store.port))
        if self._forks:
            for server in _servers:
                server.start(base_environment(extensions))
        for index in range(self.world_size):
            self._ranks.append(self._spawn(index, extensions))
        self._shm_prefixes += [f"torch_{pid}_" for pid in self.pids]
        self._await_replies(f"start of {self.world_size} ranks", START_TIMEOUT)

    def _spawn(self, index: int, extensions: Path) -> _Rank:
        assert self._folder is not None
        host = self._hosts[index] if self._hosts else None
        environment = {
            **base_environment(extensions),
            TAG_VARIABLE: self._tag,
            "RANK": str(index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_SIZE": str(self.world_size),
            **(self._rendezvous() if host is None else host.env),
            **self._env,
        }
        log = self._folder / f"rank{index}.log"
        ours, theirs = socket.socketpair()
        with ours, theirs, open(log, "ab") as output:
            if self._forks:
                server = _servers[index % len(_servers)]
                forked = server.fork(
                    environment, theirs.fileno(), output.fileno(), shm_all_reduce=self._shm_all_reduce
                )
                return _Rank(forked, Connection(ours.detach()), log)
            process = subprocess.Popen(
                [
                    *(() if host is None else host.prefix),
                    sys.executable,
                    "-m",
                    "tests.support.rank_worker",
                    str(theirs.fileno()),
                    str(os.getpid()),
                    str(int(self._shm_all_reduce)),
                ],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            return _Rank(process, Connection(ours.detach()), log)

    def _rendezvous(self) -> dict[str, str]:
        assert self._store is not None
        return {
            "MASTER_ADDR": ADDRESS,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    @staticmethod
    def _send(rank: _Rank, message: dict[str, str]) -> None:
        # A rank that has died is noticed where its reply is awaited.
        with contextlib.suppress(BrokenPipeError):
            rank.channel.send_bytes(json.dumps(message).encode())

    def _await_replies(self, title: str, timeout: float) -> None:
        """Wait until every rank has replied; raise RanksFailed if one fails or time runs out."""
        started = time.monotonic()
        deadline = started + timeout
        waiting = {rank.channel: index for index, rank in enumerate(self._ranks)}
        failures: dict[int, RankFailure] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for channel in ready:
                assert isinstance(channel, Connection)
                index = waiting.pop(channel)
                if failure := self._read_reply(channel, index):
                    if not failures:
                        deadline = min(deadline, time.monotonic() + GRACE)
                    failures[index] = failure
        if not failures and not waiting:
            return
        hung = sorted(waiting.values())
        self._dump_stacks(hung)
        seconds = time.monotonic() - started
        for index in hung:
            failures[index] = RankFailure(
                "Hang", f"no reply after {seconds:.1f} s; its stacks are in its output"
            )
        raise RanksFailed(f"{title}: {len(failures)} failed after {seconds:.1f} s", failures, self._outputs())

    def _read_reply(self, channel: Connection, index: int) -> RankFailure | None:
        try:
            reply = json.loads(channel.recv_bytes())
        except (EOFError, ConnectionError):
            code = self._ranks[index].process.wait(STOP_TIMEOUT)
            return RankFailure("Died", f"the process ended with code {code}")
        if reply["ok"]:
            return None
        return RankFailure(reply["type"], reply["message"], reply["traceback"])

    def _dump_stacks(self, indices: Sequence[int]) -> None:
        """Have ranks that hang write the stacks of their threads into their output."""
        for index in indices:
            with contextlib.suppress(ProcessLookupError):
                self._ranks[index].process.send_signal(signal.SIGUSR1)
        if indices:
            time.sleep(0.5)

    def _outputs(self) -> list[str]:
        return [rank.log.read_text(errors="replace") for rank in self._ranks]

    def _kill(self) -> None:
        """Kill what still lives of the ranks and their children, then remove their files."""
        if self._folder is None:
            return
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, signal.SIGKILL)
        for rank in self._ranks:
            rank.process.wait()
            rank.channel.close()
        kill_tagged(self._tag)
        remove_shm(name for name in shm_files() if name.startswith(tuple(self._shm_prefixes)))
        remove_stale_locks(extensions_dir())
        shutil.rmtree(self._folder, ignore_errors=True)
        self._ranks, self._shm_prefixes, self._store, self._folder, self._calls = [], [], None, None, 0


def run_ranks(
    fn: RankFunction,
    world_size: int,
    args: Mapping[str, Any] | None = None,
    *,
    timeout: float = CALL_TIMEOUT,
    env: Mapping[str, str] | None = None,
    shm_all_reduce: bool = False,
) -> list[Any]:
    """Run a rank function once in fresh processes; see ``RankPool`` and ``RankPool.run``."""
    with RankPool(world_size, env=env, shm_all_reduce=shm_all_reduce) as pool:
        return pool.run(fn, timeout=timeout, **(args or {}))


def run_command(
    command: Sequence[str | os.PathLike[str]],
    *,
    timeout: float = CALL_TIMEOUT,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] = REPOSITORY,
) -> subprocess.CompletedProcess[str]:
    """Run a program, such as a launcher, in the environment of the ranks, and clean up after it.

    Args:
        command: The program and its arguments; scripts of this interpreter's environment are found by name.
        timeout: Seconds that it may take.
        env: Environment variables on top of ``base_environment()``.
        cwd: Its working folder.

    Returns:
        The result; ``stdout`` holds stdout and stderr together.

    Raises:
        CommandFailed: With all output, if it took too long or failed.
    """
    tag = new_tag()
    before = shm_files()
    environment = {**base_environment(warm()), **(env or {}), TAG_VARIABLE: tag}
    arguments = [os.fspath(word) for word in command]
    program = shutil.which(arguments[0], path=environment["PATH"]) or arguments[0]
    # A file, not a pipe: a child that outlives the program would keep a pipe open, and the wait for it too.
    with tempfile.TemporaryFile() as output:
        code: int | None = None
        try:
            process = subprocess.Popen(
                [program, *arguments[1:]],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout)
        finally:
            kill_tagged(tag)
            remove_shm(shm_files() - before)
            remove_stale_locks(extensions_dir())
        process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    if code is None or code:
        ending = f"did not end within {timeout:g} s" if code is None else f"ended with code {code}"
        raise CommandFailed(f"{' '.join(arguments)} {ending}\n----- output -----\n{_shorten(text)}")
    return subprocess.CompletedProcess(arguments, code, stdout=text)


def base_environment(extensions: Path | None = None) -> dict[str, str]:
    """Return the environment for a rank or launcher on the CPU, without any other launcher's variables."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_VARIABLES and not name.startswith(_FOREIGN_VARIABLES)
    }
    path = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **inherited,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "TORCH_EXTENSIONS_DIR": str(extensions or extensions_dir()),
    }


def free_port() -> int:
    """Return a port for a launcher that must be told one.

    It lies below the range that the kernel hands out by itself, and is drawn at random, so that two runs side by
    side hardly ever get the same. ``RankPool`` needs none.
    """
    for _ in range(200):
        port = random.SystemRandom().randrange(21_000, 29_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((ADDRESS, port))
            return port
    raise RuntimeError("found no free port between 21000 and 29000")


def function_name(fn: RankFunction) -> str:
    """Return ``module:function`` for a function that another process can import.

    Raises:
        ValueError: If it is a lambda, or was defined inside another function.
    """
    if isinstance(fn, str):
        if ":" not in fn:
            raise ValueError(f"a rank function is named as 'module:function', got {fn!r}")
        return fn
    if "<" in fn.__qualname__ or fn.__module__ == "__main__":
        raise ValueError(
            f"{fn.__module__}.{fn.__qualname__} cannot be imported by a rank: define it in a module"
        )
    return f"{fn.__module__}:{fn.__qualname__}"


def _shorten(text: str) -> str:
    if len(text) <= MAX_OUTPUT:
        return text
    half = MAX_OUTPUT // 2
    return f"{text[:half]}\n[... {len(text) - MAX_OUTPUT} characters left out ...]\n{text[-half:]}"
