"""Keeps native CUDA kernels and CUDA graphs out of a training process until this machine has passed a self-test.

A kernel that is wrong, hangs or crashes on some GPU would end or spoil a training run. So before the first use all of
them run in a process of their own, with a time limit: ``python -m deepspeed_muon.ops.gate``. The result is kept in
:func:`~deepspeed_muon.ops.autotune.cache_folder` for this GPU, driver, torch and source code, and the processes of a
machine share it. After a failure the process runs torch's code, and one warning says what failed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from deepspeed_muon.logs import warn_on_each_machine

from . import library
from .autotune import cache_folder
from .locks import locked

__all__ = ["Verdict", "cuda_verdict", "decide", "known_verdict"]

SECONDS = float(os.environ.get("DS_MUON_SELF_TEST_SECONDS", "300"))
"""How long the self-test may take; the start of torch and of a CUDA context counts."""

_INSIDE = "DS_MUON_IN_SELF_TEST"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the native CUDA code of this machine may be used, and why not."""

    ok: bool
    why: str = ""


@functools.cache
def cuda_verdict(device: int) -> Verdict:
    """Return the verdict for a GPU; the first process on a machine runs the self-test. Communicates nothing.

    Args:
        device: Number of the GPU among those that this process sees.
    """
    if os.environ.get(_INSIDE):
        return Verdict(True)
    return decide(_identity(device), [sys.executable, "-m", "deepspeed_muon.ops.gate", str(device)])


def known_verdict(device: int) -> Verdict | None:
    """Return the verdict for a GPU if an earlier process ran the self-test."""
    identity = _identity(device)
    return _known(_file(cache_folder(), identity), identity)


def _identity(device: int) -> list[str]:
    from .builder import MuonBuilder

    key = MuonBuilder().spec().key if library.loaded() else "torch"
    driver = str(getattr(torch._C, "_cuda_getDriverVersion")())  # noqa: B009  # only in torch with CUDA
    return [torch.cuda.get_device_name(device), driver, torch.__version__, key]


def _file(folder: Path, identity: Sequence[str]) -> Path:
    return folder / f"selftest-{hashlib.sha256(chr(0).join(identity).encode()).hexdigest()[:16]}.json"


def decide(
    identity: Sequence[str], command: Sequence[str], *, folder: Path | None = None, seconds: float = SECONDS
) -> Verdict:
    """Return the verdict that is known for ``identity``, or that of ``command``, which is then known.

    Args:
        identity: What the verdict holds for.
        command: The self-test: it ends with 0, or says on its last lines what is wrong.
        folder: Where verdicts are kept; ``None`` for :func:`~deepspeed_muon.ops.autotune.cache_folder`.
        seconds: The time limit.
    """
    folder = cache_folder() if folder is None else folder
    file = _file(folder, identity)
    # Whoever waits finds what the first one found.
    with locked(folder / ".testing", seconds + 30):
        verdict = _known(file, identity)
        if verdict is None:
            verdict = _tried(command, seconds)
            with suppress(OSError):  # a home that cannot be written: the next process tests again
                _keep(file, {"identity": list(identity), **asdict(verdict)})
    if not verdict.ok:
        warn_on_each_machine(
            "deepspeed_muon: the self-test of the native CUDA code failed on this machine, so torch's runs: %s\n"
            "`%s` runs it again; remove %s to have the next process do so.",
            verdict.why,
            " ".join(command),
            file,
        )
    return verdict


def _known(file: Path, identity: Sequence[str]) -> Verdict | None:
    try:
        found = json.loads(file.read_text())
        return Verdict(found["ok"], found["why"]) if found["identity"] == list(identity) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(file: Path, found: dict[str, Any]) -> None:
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(found, indent=1))
    os.replace(partial, file)


def _tried(command: Sequence[str], seconds: float) -> Verdict:
    """Run the self-test in a session of its own, so that it can be ended with all that it started."""
    try:
        child = subprocess.Popen(
            command,
            env={**os.environ, _INSIDE: "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        return Verdict(False, f"it did not start: {error}")
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return Verdict(False, f"it did not end within {seconds:g} s")
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if child.returncode == 0:
        return Verdict(True)
    last = "; ".join(output.strip().splitlines()[-3:]) or "no output"
    if child.returncode < 0:
        return Verdict(False, f"it was ended by {signal.Signals(-child.returncode).name}: {last}")
    return Verdict(False, f"it ended with {child.returncode}: {last}")


def _failures(device: int) -> str | None:
    """Run every native CUDA operator and replayed graphs against the reference; return what is wrong."""
    from .checks import cuda_checks

    torch.cuda.set_device(device)
    checks = cuda_checks()
    torch.cuda.synchronize()
    return (
        "\n".join(
            f"{check['op']}: error {check['error']:.2g}, bound {check['bound']:.2g}"
            for check in checks
            if not check["ok"]
        )
        or None
    )


if __name__ == "__main__":
    # A text ends the process with status 1.
    raise SystemExit(_failures(int(sys.argv[1])))
