"""Allows native CUDA kernels, Triton and CUDA graphs in a training process only after a self-test on this machine.

A kernel that is wrong, hangs or crashes on some GPU would spoil or end a training run. So before the first use all of
them run in a separate process with a time limit, ``python -m deepspeed_muon.ops.gate``. The verdict is cached in
:func:`~deepspeed_muon.ops.machine.cache_folder` for this GPU, driver, torch, Triton and source code; machines
that share this folder share it if all of these are equal. Wrong numbers are cached for good. What raised, crashed or
hung may be due to the state of the machine, so it is cached for some minutes. torch's code replaces the components that
failed, and one warning reports it.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepspeed_muon.logs import warn_on_each_machine

from . import library
from .checks import BrokenContextError, Checks, cpu_checks, cuda_checks, failed_check
from .machine import (
    SELF_TEST_SECONDS,
    file_for,
    is_current,
    lock_file,
    locked,
    read_json,
    software_identity,
    transient_until,
    write_json,
)

_IN_SELF_TEST = "DS_MUON_IN_SELF_TEST"

# Seconds to wait for the self-test after it was killed.
_LAST_SECONDS = 5.0

_TESTING = "testing "  # precedes the name of a component in the output of the self-test

COMPONENTS = ("native", "int8", "graphs", "triton")
"""What has a verdict of its own: native operators, their pass over int8 momentum, CUDA graphs, Triton's products."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which components of the CUDA code must not be used on this machine, and why.

    Attributes:
        failed: Component to what was wrong.
        transient: Whether something raised, crashed or hung, which may not happen again.
    """

    failed: dict[str, str] = field(default_factory=dict)
    transient: bool = False

    @property
    def why(self) -> str:
        """What was wrong, in one line."""
        texts = dict.fromkeys(self.failed.values())
        if len(texts) < len(self.failed):
            return "; ".join(texts)
        return "; ".join(f"{component}: {text}" for component, text in self.failed.items())


@functools.cache
def cuda_verdict(device: int) -> Verdict:
    """Return the verdict for a GPU, cached or from the self-test, which this process then runs. It runs no collective.

    Args:
        device: Index of the GPU among those visible to this process.
    """
    # The self-test itself has to run what it tests.
    if os.environ.get(_IN_SELF_TEST):
        return Verdict()
    return decide(_identity(device), _command(device))


def _command(device: int) -> list[str]:
    return [sys.executable, "-m", "deepspeed_muon.ops.gate", str(device)]


def cached_verdict(device: int) -> Verdict | None:
    """Return the verdict of an earlier self-test of a GPU, or ``None`` without one."""
    return _cached(file_for("selftest", _identity(device)))


def _identity(device: int) -> list[str]:
    return [torch.cuda.get_device_name(device), _driver(), *software_identity(), library.key()]


def _driver() -> str:
    """Return the version of the driver, which torch does not have: its release, or the CUDA version that it supports.

    The release is not known everywhere (not under WSL).
    """
    with suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    version = ctypes.c_int()
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return str(version.value)


def decide(
    identity: Sequence[str],
    command: Sequence[str],
    *,
    folder: Path | None = None,
    seconds: float = SELF_TEST_SECONDS,
) -> Verdict:
    """Return the cached verdict for ``identity``; without one run ``command`` and cache its verdict.

    Args:
        identity: What the verdict is valid for: GPU, driver, software and key of the library.
        command: The self-test; components to skip are appended. The last line that it prints is a JSON object:
            component to what is wrong, ``transient``, and ``checks``.
        folder: Where verdicts are cached; ``None`` for :func:`~deepspeed_muon.ops.machine.cache_folder`.
        seconds: Time limit of one run of ``command``.
    """
    file = file_for("selftest", identity, folder)
    # A process that waited for the lock reads the verdict of the one that had it.
    # As long as two runs of the self-test may take; after that, this process runs it without the lock.
    with locked(lock_file(file.parent, "testing"), 2 * seconds + 30):
        verdict = _cached(file)
        if verdict is None:
            verdict, _ = _self_test(command, seconds)
            until = transient_until() if verdict.transient else None
            write_json(file, {"identity": list(identity), "failed": verdict.failed, "until": until})
    if verdict.failed:
        warn_on_each_machine(
            "deepspeed_muon: the self-test of the native CUDA code failed on this machine, so torch's kernels run "
            "instead: %s\n`%s` runs it again; remove %s to have the next process do so.",
            verdict.why,
            " ".join(command),
            file,
        )
    return verdict


def _cached(file: Path) -> Verdict | None:
    content = read_json(file)
    failed, until = content.get("failed"), content.get("until")
    if not isinstance(failed, dict) or not is_current(until):
        return None
    return Verdict(failed, transient=until is not None)


def self_test() -> Checks:
    """Compare each operator with its reference on every device that has kernels; build the library if necessary.

    A GPU is tested in another process, as before its first use: what crashes or hangs there is a failed check.

    Returns:
        One entry for each check: ``op``, ``device``, ``error``, ``bound``, ``ok``.

    Raises:
        InstallationError: If the library can be neither loaded nor built.
    """
    return (
        cpu_checks() + checks_of(torch.cuda.current_device()) if torch.cuda.is_available() else cpu_checks()
    )


def checks_of(device: int) -> Checks:
    """Run the self-test of a GPU, cached or not; return its checks as :func:`.checks.cuda_checks` does."""
    verdict, checks = _self_test(_command(device), SELF_TEST_SECONDS)
    for component, why in verdict.failed.items():
        if all(check["component"] != component or check["ok"] for check in checks):
            checks.append({**failed_check(component, why), "component": component})
    return checks


def _self_test(command: Sequence[str], seconds: float) -> tuple[Verdict, list[dict[str, Any]]]:
    """Run the self-test, and again without every component that crashes or hangs, for at most twice ``seconds``.

    Returns:
        The verdict, and the checks of the last run.
    """
    ended: dict[str, str] = {}  # component to how the self-test ended in it
    limit = time.monotonic() + 2 * seconds
    while True:
        # Each repetition skips one more component, so there are no more of them than components.
        failures, why, running = _run([*command, *ended], min(seconds, limit - time.monotonic()))
        if failures is not None:
            transient = bool(failures.pop("transient", False) or ended)
            checks = failures.pop("checks", [])
            failed = {component: str(text) for component, text in failures.items()}
            return Verdict({**ended, **failed}, transient), checks if isinstance(checks, list) else []
        # No component to blame, or no time left: nothing is trusted.
        if running not in COMPONENTS or running in ended or time.monotonic() >= limit:
            return Verdict(dict.fromkeys(COMPONENTS, why), transient=True), []
        ended[running] = why


def _run(command: Sequence[str], seconds: float) -> tuple[dict[str, object] | None, str, str]:
    """Run the self-test in a new session, so that it can be killed together with its children.

    Returns:
        The JSON object that it printed, or ``None``; why there is none; and the component that was running, if the
        self-test can be repeated without it, else an empty string.
    """
    # A file, because a pipe has no end of file as long as a process that the self-test started has it open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            child = subprocess.Popen(
                command,
                env={**os.environ, _IN_SELF_TEST: "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return None, f"it did not start: {error}", ""
        try:
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=seconds)
        finally:
            timed_out = child.returncode is None
            if timed_out:
                os.killpg(child.pid, signal.SIGKILL)
                # A process that waits for a GPU inside the driver may not react to any signal.
                with suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=_LAST_SECONDS)
        output.seek(0)
        lines = output.read().strip().splitlines()
    try:
        printed = json.loads(lines[-1]) if child.returncode == 0 and lines else None
    except ValueError:
        printed = None
    if isinstance(printed, dict):
        return printed, "", ""
    how = f"it ended with {child.returncode}"
    if timed_out:
        how = f"it did not end within {seconds:g} s"
    elif child.returncode < 0:
        how = f"it was ended by {signal.Signals(-child.returncode).name}"
    components = [line.removeprefix(_TESTING) for line in lines if line.startswith(_TESTING)]
    # A GPU whose process cannot be killed is not tested again.
    running = components[-1] if components and child.returncode is not None else ""
    return None, f"{how}: {'; '.join(lines[-3:]) or 'no output'}", running


def _failures(device: int, skipped: Sequence[str] = ()) -> dict[str, object]:
    """Compare all CUDA code with the reference; return component to what is wrong, ``transient``, and ``checks``.

    A component that leaves the CUDA context broken ends the process, as a crash does: it is the last one announced, and
    the self-test is repeated without it.
    """
    torch.cuda.set_device(device)
    failed: dict[str, list[str]] = {}
    transient = False
    try:
        checks = cuda_checks(_announce, skipped)
    except BrokenContextError as error:
        sys.stdout.write(f"{error}\n")
        sys.stdout.flush()
        os._exit(1)  # nothing is torn down: that would call CUDA, too
    for check in checks:
        if "raised" in check:
            transient = True
            failed.setdefault(check["component"], []).append(check["raised"])
        elif not check["ok"]:
            text = f"{check['op']}: error {check['error']:.2g}, bound {check['bound']:.2g}"
            failed.setdefault(check["component"], []).append(text)
    return {
        **{component: "; ".join(texts[:3]) for component, texts in failed.items()},
        "transient": transient,
        "checks": checks,
    }


def _announce(component: str) -> None:
    sys.stdout.write(f"{_TESTING}{component}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    torch.set_float32_matmul_precision(
        "highest"
    )  # TF32, which an environment variable may set, is no wrong kernel
    signal.alarm(
        math.ceil(SELF_TEST_SECONDS) + 1
    )  # ends the self-test even if the process that started it was killed
    sys.stdout.write("\n" + json.dumps(_failures(int(sys.argv[1]), sys.argv[2:])) + "\n")
