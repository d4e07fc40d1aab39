"""Builds DeepSpeed's native CPU ops once, before any rank starts.

DeepSpeed compiles its ops on first use. Left to the ranks of a test that takes minutes, eats the test's
time limit, and a rank that is killed meanwhile leaves a lock on which every later run waits. ``warm()`` builds them
ahead in a folder of this project's own. ``python -m tests.support.native_ops`` does the same from the command line.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from tests.support.hygiene import remove_stale_locks

REPOSITORY = Path(__file__).resolve().parents[2]

_BATCHES = (("CPUAdamBuilder",), ("FusedAdamBuilder", "ShareMemCommBuilder"), ())
"""DeepSpeed's builders, in batches that are built side by side; the last one builds this project's library."""

_BUILD = """
import sys
import deepspeed
from deepspeed.accelerator import get_accelerator

for name in sys.argv[1:]:
    builder = get_accelerator().create_op_builder(name)
    # Which ops there are differs between DeepSpeed's versions; one that is missing has a stand-in that cannot load.
    if builder is not None and "not_implemented" not in builder.NAME and builder.is_compatible():
        builder.load()
if not sys.argv[1:]:
    from deepspeed_muon.ops.builder import load

    load()
"""


def extensions_dir() -> Path:
    """Return the folder for native builds: TORCH_EXTENSIONS_DIR if set, else one per DeepSpeed version in .cache."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen).resolve()
    return REPOSITORY / ".cache" / "torch_extensions" / f"ds{metadata.version('deepspeed')}"


@functools.lru_cache
def warm() -> Path:
    """Build the CPU ops if they were not built yet, and clear what a killed build left.

    Safe to call from several processes at once: the first builds, the others wait for it.

    Returns:
        The folder, to be handed to ranks as TORCH_EXTENSIONS_DIR.

    Raises:
        RuntimeError: If a build fails; the message holds the compiler's output.
    """
    folder = extensions_dir()
    folder.mkdir(parents=True, exist_ok=True)
    # The environment's folder is in the compiler's arguments: another one with the same versions builds anew.
    versions = [f"{name}={metadata.version(name)}" for name in ("deepspeed", "torch")]
    environment = "\n".join([*versions, sys.version, os.path.realpath(sys.prefix)])
    # One for each state of the sources, so that worktrees which share the folder do not build in turns.
    marker = folder / f".warm-{_sources()}"
    with open(folder / ".warming", "w") as gate:
        # The kernel drops this lock when its holder dies, so that it cannot go stale itself.
        fcntl.flock(gate, fcntl.LOCK_EX)
        remove_stale_locks(folder)
        _share_our_library(folder)
        if not (marker.exists() and marker.read_text() == environment):
            _build(folder)
            marker.write_text(environment)
    return folder


def _share_our_library(folder: Path) -> None:
    """Let all folders of ``.cache`` have one build of this project's library, which does not depend on DeepSpeed."""
    shared, link = folder.parent / "deepspeed_muon", folder / "deepspeed_muon"
    if folder.parent == REPOSITORY / ".cache" / "torch_extensions" and not link.exists():
        shared.mkdir(exist_ok=True)
        link.symlink_to(shared)


def _sources() -> str:
    """Return a digest of this project's own sources for the CPU."""
    root = REPOSITORY / "ops"
    files = [root / "builder.py", *(root / "csrc").glob("*.*"), *(root / "csrc" / "cpu").glob("*.*")]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in sorted(files))).hexdigest()[:16]


def _build(folder: Path) -> None:
    environment = dict(os.environ, DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR=str(folder))
    # ninja is installed beside the interpreter and found through PATH.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    # DeepSpeed compiles with -g, which changes no instruction and takes a third of the time. The compiler has to be
    # called c++ all the same: ninja compares the commands, and ranks without the script would build anew.
    script = folder / ".without_debug_information" / "c++"
    without_debug_information = environment
    if compiler := shutil.which("c++"):
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(compiler)} "$@" -g0\n')
        script.chmod(0o755)
        without_debug_information = {
            **environment,
            "PATH": f"{script.parent}{os.pathsep}{environment['PATH']}",
        }
    builds = [
        subprocess.Popen(
            [sys.executable, "-c", _BUILD, *batch],
            env=without_debug_information if batch else environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for batch in _BATCHES
    ]
    try:
        outputs = [build.communicate(timeout=1800)[0] for build in builds]
    finally:
        for build in builds:
            with contextlib.suppress(ProcessLookupError):
                build.kill()
            build.wait()
    failed = [output for build, output in zip(builds, outputs, strict=True) if build.returncode]
    if failed:
        raise RuntimeError("building DeepSpeed's CPU ops failed:\n" + "\n".join(failed))


if __name__ == "__main__":
    started = time.monotonic()
    print(f"native ops are in {warm()} ({time.monotonic() - started:.0f} s)")
