"""The program of one rank: ``python -m tests.support.rank_worker FD PARENT SHM``, or a fork of rank_server.py.

It imports torch and DeepSpeed once, joins the gloo process group, and then serves calls from the harness over a
socket until it is told to stop or the socket closes. After every call it puts the process back as it was, so that
the next call cannot tell that another came before.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import importlib
import json
import logging
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from tests.support.kernels import take_kernels

PR_SET_PDEATHSIG = 1  # linux/prctl.h

_STATEFUL_MODULES = (
    "deepspeed.utils.groups",
    "deepspeed.runtime.zero.partition_parameters",
    "deepspeed.runtime.zero.parameter_offload",
)
"""DeepSpeed modules that keep groups, buffers and stacks of an engine in module globals."""

GROUP_TIMEOUT_VARIABLE = "TESTS_GROUP_TIMEOUT"
"""Seconds of the process group's time-out, for tests of ranks that do not answer."""

_PLAIN = (type(None), bool, int, float, str, dict, list)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the harness dies, even by SIGKILL."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request was made
        os._exit(1)


def portable(value: Any, where: str = "result") -> Any:
    """Copy a rank's result into plain containers and CPU tensors.

    Tensors are cloned: ``torch.save`` writes the whole storage of a view, here often a whole flat buffer.

    Raises:
        TypeError: If the result holds something else; names the place in it.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: portable(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, type(None) | bool | int | float | str | bytes | torch.dtype):
        return value
    if hasattr(value, "item") and not getattr(value, "shape", ()):  # a NumPy scalar
        return value.item()
    raise TypeError(
        f"{where} is a {type(value).__name__}: ranks return tensors, numbers, strings, lists and dicts"
    )


class ProcessState:
    """What a call may change in this process, as it was before the first call.

    Args:
        caches: Of functions in DeepSpeed's runtime: all that there are.
    """

    def __init__(self, caches: Sequence[functools._lru_cache_wrapper[Any]]) -> None:
        import torch

        self._environment = dict(os.environ)
        self._handlers = list(logging.getLogger("deepspeed_muon").handlers)
        self._folder = os.getcwd()
        self._path = list(sys.path)
        self._dtype = torch.get_default_dtype()
        self._globals = [
            (module, _plain_globals(module)) for module in map(_import_if_there, _STATEFUL_MODULES) if module
        ]
        self._groups = set(torch.distributed.distributed_c10d._world.pg_map)
        self._caches = caches
        # What exists now stays for good. Taking it out of every later collection, of which DeepSpeed runs a dozen
        # per engine, makes some tests ten times as fast, and a look at all objects as cheap.
        gc.collect()
        gc.freeze()

    def prepare(self) -> None:
        """Seed the generators, so that a test's numbers do not depend on the tests before it."""
        import numpy
        import torch

        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)

    def restore(self) -> None:
        """Undo what a call left behind and wait for the other ranks.

        Raises:
            RuntimeError: If the call left a ``zero.Init`` context open.
        """
        import torch

        _release_engines()
        for cache in self._caches:
            # Stage 3 caches a method by its self, which keeps 5 open files and 3 threads per engine, for ever.
            cache.cache_clear()
        gc.enable()
        gc.collect()
        zero = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
        if zero is not None and zero.zero_init_context:
            raise RuntimeError("the call returned inside a zero.Init context")
        for module, values in self._globals:
            _restore_globals(module, values)
        for group in set(torch.distributed.distributed_c10d._world.pg_map) - self._groups:
            torch.distributed.destroy_process_group(group)
        os.environ.clear()
        os.environ.update(self._environment)
        logging.getLogger("deepspeed_muon").handlers[:] = self._handlers
        os.chdir(self._folder)
        sys.path[:] = self._path
        torch.set_default_dtype(self._dtype)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)
        # A group is named by a counter of each process, and ranks that count differently would wait for ever in the
        # next group: here all continue from the largest. A rank that issued one collective more than another hangs
        # here, and not in the next test.
        world = torch.distributed.distributed_c10d._world
        groups_made = torch.tensor(world.group_count)
        torch.distributed.all_reduce(groups_made, op=torch.distributed.ReduceOp.MAX)
        world.group_count = int(groups_made)


def _import_if_there(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _plain_globals(module: ModuleType) -> dict[str, Any]:
    values = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    return {
        name: value.copy() if isinstance(value, dict | list) else value
        for name, value in values.items()
        if isinstance(value, _PLAIN)
    }


def _restore_globals(module: ModuleType, values: dict[str, Any]) -> None:
    for name, value in values.items():
        current = getattr(module, name, None)
        if isinstance(value, dict) and isinstance(
            current, dict
        ):  # others may hold the same object: refill it
            current.clear()
            current.update(value)
        elif isinstance(value, list) and isinstance(current, list):
            current[:] = value
        else:
            setattr(module, name, value)


def _release_engines() -> None:
    """Destroy the engines that a call left alive and drop what DeepSpeed would keep them alive by."""
    from deepspeed import DeepSpeedEngine

    for instance in gc.get_objects():
        # type(), not isinstance(): the latter asks proxies for their __class__ and may wake them.
        if issubclass(type(instance), DeepSpeedEngine) and not getattr(
            instance, "_destroyed_by_harness", False
        ):
            instance._destroyed_by_harness = True
            instance.destroy()


def runtime_caches() -> list[functools._lru_cache_wrapper[Any]]:
    """Return the caches of functions and methods in DeepSpeed's runtime."""
    wrappers = (item for item in gc.get_objects() if type(item) is functools._lru_cache_wrapper)
    return [item for item in wrappers if item.__module__.startswith("deepspeed.runtime.")]


def resolve(name: str) -> Callable[..., Any]:
    """Import ``module:qualified.name``."""
    module, _, path = name.partition(":")
    value: Any = importlib.import_module(module)
    for attribute in path.split("."):
        value = getattr(value, attribute)
    return value


def remember_cpu_info() -> Callable[[], object]:
    """Have DeepSpeedCPUAdam ask only once for the CPU's instructions, which takes a subprocess; return its question."""
    import cpuinfo

    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    return cpuinfo.get_cpu_info


def join_group(*, shm_all_reduce: bool) -> None:
    """Initialise DeepSpeed's and torch's process group under gloo."""
    import deepspeed
    import torch

    remember_cpu_info()
    torch.set_num_threads(1)
    if not shm_all_reduce:
        # The op leaves 66 MB a rank in /dev/shm for ever, and spins while it waits.
        backend = importlib.import_module("deepspeed.comm.torch")
        backend.build_shm_op = lambda: None
    # At stage 3 DeepSpeed formats every parameter for a message that it does not print, and asks twice in each of some
    # thousand calls whether it is being compiled: half of an engine's start, a tenth of a step.
    torch.set_printoptions(threshold=20, edgeitems=1)
    importlib.import_module("deepspeed.utils.nvtx").enable_nvtx = False
    # DeepSpeed refuses fp16 on a CPU without instructions for it (AVX512-FP16), for its speed: torch converts there.
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    seconds = float(os.environ.get(GROUP_TIMEOUT_VARIABLE, 1800))
    deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=seconds), verbose=False)
    torch.distributed.barrier()


def call(job: dict[str, str], state: ProcessState) -> None:
    """Run a rank function and save its result."""
    import torch

    state.prepare()
    args = torch.load(job["args"], weights_only=True)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    function = resolve(job["function"])
    # Some functions test what the import of the package changes, and import it themselves.
    if "deepspeed_muon" in sys.modules:
        take_kernels()
    torch.save(portable(function(rank, world_size, **args)), job["result"])


def serve(job: dict[str, str], state: ProcessState) -> dict[str, Any]:
    """Carry out one order and return the reply: ``{"ok": True}`` or a description of the exception.

    A call and its clean-up are two orders: the clean-up has the ranks wait for each other, and they must not when
    one of them failed.
    """
    try:
        if job["order"] == "call":
            call(job, state)
        else:
            state.restore()
    except BaseException as error:
        # SystemExit too: a script under test that exits must not look like a crash of the rank.
        return {
            "ok": False,
            "type": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
        }
    return {"ok": True}


def main(
    file: int,
    parent: int,
    *,
    shm_all_reduce: bool,
    caches: Sequence[functools._lru_cache_wrapper[Any]] | None = None,
) -> None:
    """Serve the calls that arrive at the socket ``file`` until told to stop, or until ``parent`` dies.

    Args:
        file: The socket.
        parent: The process that must live.
        shm_all_reduce: Whether DeepSpeed's shared-memory all-reduce stays on.
        caches: What ``runtime_caches`` returned in the process that this one was forked from.
    """
    channel = Connection(file)
    die_with_parent(parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the harness asks a rank that hangs where it is

    import torch

    join_group(shm_all_reduce=shm_all_reduce)
    state = ProcessState(runtime_caches() if caches is None else caches)
    channel.send_bytes(json.dumps({"ok": True}).encode())
    while True:
        try:
            job = json.loads(channel.recv_bytes())
        except (EOFError, ConnectionError):
            break
        if job["order"] == "stop":
            break
        reply = serve(job, state)
        sys.stdout.flush()
        sys.stderr.flush()
        channel.send_bytes(json.dumps(reply).encode())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), shm_all_reduce=sys.argv[3] == "1")
