"""Keeps native CUDA kernels and CUDA graphs out of a training process until this machine has passed a self-test.

A kernel that is wrong, hangs or crashes on some GPU would end or spoil a training run. So before the first use all of
them run in a process of their own, with a time limit: ``python -m deepspeed_muon.ops.gate``. The result is kept in
:func:`~deepspeed_muon.ops.machine.cache_folder` for this GPU, driver, torch and source code, and the processes of a
machine share it: wrong numbers for good, what raised, crashed or hung for some minutes, because it may have been the
machine's state. What failed is replaced by torch's code, each part by itself, and one warning says so.
"""

from __future__ import annotations

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

import torch

from deepspeed_muon.logs import warn_on_each_machine

from . import library
from .machine import file_for, locked, read_json, write_json

SECONDS = float(os.environ.get("DS_MUON_SELF_TEST_SECONDS", "300"))
"""How long the self-test may take, with the start of torch and of a CUDA context; without what hung, as long again."""

_INSIDE = "DS_MUON_IN_SELF_TEST"

# Seconds for which a failure is believed that may have passed since: so long that the processes which start together
# test once.
_PASSING_SECONDS = 600.0

# Seconds for which a test that was ended is waited for.
_LAST_SECONDS = 5.0

_TESTING = "testing "  # stands before the name of a part, in the output

PARTS = ("native", "int8", "graphs", "triton")
"""What is tested and kept out by itself: the native operators, their pass over momentum in 8 bits, CUDA graphs, and the
products of Triton."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which parts of the CUDA code must not be used on this machine, and why.

    Attributes:
        failed: Part to what was wrong.
        passing: Whether something else than a wrong number failed, which may pass.
    """

    failed: dict[str, str] = field(default_factory=dict)
    passing: bool = False

    @property
    def why(self) -> str:
        """What was wrong, in one line."""
        texts = dict.fromkeys(self.failed.values())
        if len(texts) < len(self.failed):
            return "; ".join(texts)
        return "; ".join(f"{part}: {text}" for part, text in self.failed.items())


@functools.cache
def cuda_verdict(device: int) -> Verdict:
    """Return the verdict for a GPU; the first process on a machine runs the self-test. Communicates nothing.

    Args:
        device: Number of the GPU among those that this process sees.
    """
    if os.environ.get(_INSIDE):
        return Verdict()
    return decide(_identity(device), [sys.executable, "-m", "deepspeed_muon.ops.gate", str(device)])


def known_verdict(device: int) -> Verdict | None:
    """Return the verdict for a GPU if an earlier process ran the self-test."""
    return _known(file_for("selftest", _identity(device)))


def _identity(device: int) -> list[str]:
    driver = str(getattr(torch._C, "_cuda_getDriverVersion")())  # noqa: B009  # only in torch with CUDA
    return [torch.cuda.get_device_name(device), driver, torch.__version__, library.key()]


def decide(
    identity: Sequence[str], command: Sequence[str], *, folder: Path | None = None, seconds: float = SECONDS
) -> Verdict:
    """Return the verdict that is known for ``identity``, or that of ``command``, which is then known.

    Args:
        identity: What the verdict holds for.
        command: The self-test; parts to leave out follow. Its last line is a JSON object: part to what is wrong, and
            ``passing``.
        folder: Where verdicts are kept; ``None`` for :func:`~deepspeed_muon.ops.machine.cache_folder`.
        seconds: The time limit.
    """
    file = file_for("selftest", identity, folder)
    # Whoever waits finds what the first one found.
    with locked(file.parent / ".testing", 2 * seconds + 30):
        verdict = _known(file)
        if verdict is None:
            verdict = _tried(command, seconds)
            until = time.time() + _PASSING_SECONDS if verdict.passing else None
            write_json(file, {"identity": list(identity), "failed": verdict.failed, "until": until})
    if verdict.failed:
        warn_on_each_machine(
            "deepspeed_muon: the self-test of the native CUDA code failed on this machine, so torch's runs instead: "
            "%s\n`%s` runs it again; remove %s to have the next process do so.",
            verdict.why,
            " ".join(command),
            file,
        )
    return verdict


def _known(file: Path) -> Verdict | None:
    found = read_json(file)
    failed, until = found.get("failed"), found.get("until")
    if not isinstance(failed, dict):
        return None
    if until is not None and not time.time() < until < time.time() + 2 * _PASSING_SECONDS:
        return None
    return Verdict(failed, passing=until is not None)


def _tried(command: Sequence[str], seconds: float) -> Verdict:
    """Run the self-test, and again without each part that crashes or hangs: at most twice as long as one may take."""
    ended: dict[str, str] = {}
    limit = time.monotonic() + 2 * seconds
    while True:
        found, why, running = _run([*command, *ended], min(seconds, limit - time.monotonic()))
        if found is not None:
            passing = bool(found.pop("passing", False) or ended)
            return Verdict({**ended, **{part: str(text) for part, text in found.items()}}, passing)
        if running not in PARTS or running in ended or time.monotonic() >= limit:
            return Verdict(dict.fromkeys(PARTS, why), passing=True)
        ended[running] = why


def _run(command: Sequence[str], seconds: float) -> tuple[dict[str, object] | None, str, str]:
    """Run the self-test in a session of its own, so that it can be ended with all that it started.

    Returns:
        What it said; without that, why, and the part that was running if it can be left out.
    """
    # Into a file: of a pipe nobody would see the end while something that the test started holds it.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            child = subprocess.Popen(
                command,
                env={**os.environ, _INSIDE: "1"},
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
            ended = child.returncode is not None
            if not ended:
                os.killpg(child.pid, signal.SIGKILL)
                # A process that waits for a GPU inside of the driver may not be ended by anything.
                with suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=_LAST_SECONDS)
        output.seek(0)
        lines = output.read().strip().splitlines()
    try:
        found = json.loads(lines[-1]) if child.returncode == 0 and lines else None
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found, "", ""
    how = f"it ended with {child.returncode}"
    if not ended:
        how = f"it did not end within {seconds:g} s"
    elif child.returncode < 0:
        how = f"it was ended by {signal.Signals(-child.returncode).name}"
    parts = [line.removeprefix(_TESTING) for line in lines if line.startswith(_TESTING)]
    # A GPU whose process does not end is not tried again.
    running = parts[-1] if parts and child.returncode is not None else ""
    return None, f"{how}: {'; '.join(lines[-3:]) or 'no output'}", running


def _failures(device: int, left_out: Sequence[str] = ()) -> dict[str, str | bool]:
    """Run every native CUDA operator and replayed graphs against the reference; return what is wrong, by part."""
    from .checks import cuda_checks

    torch.cuda.set_device(device)
    failed: dict[str, list[str]] = {}
    passing = False
    for check in cuda_checks(_announce, left_out):
        if "raised" in check:
            passing = True
            failed.setdefault(check["part"], []).append(check["raised"])
        elif not check["ok"]:
            text = f"{check['op']}: error {check['error']:.2g}, bound {check['bound']:.2g}"
            failed.setdefault(check["part"], []).append(text)
    return {**{part: "; ".join(texts[:3]) for part, texts in failed.items()}, "passing": passing}


def _announce(part: str) -> None:
    sys.stdout.write(f"{_TESTING}{part}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    signal.alarm(math.ceil(SECONDS) + 1)  # it ends although nobody waits for it any more
    sys.stdout.write("\n" + json.dumps(_failures(int(sys.argv[1]), sys.argv[2:])) + "\n")
