"""Runs a program without a change in it: ``python -m deepspeed_muon.run PROGRAM arguments...``.

``PROGRAM`` is a script, ``-m module``, or the name of a program of this environment, such as ``llamafactory-cli``. With
the launcher: ``deepspeed --module deepspeed_muon.run script.py --deepspeed_config ds.json``. This module registers the
optimizer, sets ``DEEPSPEED_MUON=1`` for all processes that the program starts, and runs it as ``__main__``.
"""

from __future__ import annotations

import atexit
import os
import runpy
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import deepspeed_muon
from deepspeed_muon.logs import logger

__all__ = ["main", "split_arguments"]

_USAGE = "usage: python -m deepspeed_muon.run (script.py | -m module | program) [its arguments]"


def split_arguments(arguments: Sequence[str]) -> tuple[str, list[str], bool]:
    """Return the program, its arguments, and whether it is a module.

    The launcher puts ``--local_rank=N`` before everything else; the program expects it among its own arguments.

    Raises:
        SystemExit: With the usage, if no program is named or an unknown option precedes it.
    """
    rest = list(arguments)
    launcher = []
    while rest and rest[0].startswith("--local_rank"):
        launcher.append(rest.pop(0))
        if "=" not in launcher[-1] and rest:
            launcher.append(rest.pop(0))
    is_module = bool(rest) and rest[0] == "-m"
    if is_module:
        rest.pop(0)
    if not rest or rest[0].startswith("-"):
        raise SystemExit(_USAGE)
    return rest[0], launcher + rest[1:], is_module


def main(arguments: Sequence[str] | None = None) -> None:
    """Register the optimizer and run the program that the arguments name."""
    program, own, is_module = split_arguments(sys.argv[1:] if arguments is None else arguments)
    script = program if is_module or os.path.isfile(program) else shutil.which(program)
    if script is None:
        raise SystemExit(f"deepspeed_muon.run: no such file or program: {program}\n{_USAGE}")
    if not is_module and not _is_python(script):
        raise SystemExit(
            f"deepspeed_muon.run: {script} is not a Python program. Run it by itself, with DEEPSPEED_MUON=1 in its "
            f"environment"
        )
    deepspeed_muon.register()
    os.environ["DEEPSPEED_MUON"] = "1"
    _warn_at_the_end_without_an_engine()
    sys.argv = [script, *own]
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    # As with `python script.py`, the script can import the modules of its own folder.
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


def _is_python(script: str) -> bool:
    if script.endswith((".py", ".pyc", ".pyz")):
        return True
    with open(script, "rb") as file:
        return b"python" in file.readline(200)


def _warn_at_the_end_without_an_engine() -> None:
    """Note every engine with this optimizer, also of child processes; warn at exit if there was none."""
    if "DEEPSPEED_MUON_NOTE" in os.environ:
        return  # a process of a program that was started so
    folder = tempfile.mkdtemp(prefix="deepspeed_muon_run")
    note = Path(folder, "engine")
    os.environ["DEEPSPEED_MUON_NOTE"] = str(note)
    process = os.getpid()

    def look() -> None:
        if os.getpid() != process:
            return  # a fork
        if not note.exists():
            logger.warning(
                "deepspeed_muon: no engine with this Muon was made. Either no configuration asked for the optimizer "
                "type Muon, or the program started its ranks where DEEPSPEED_MUON=1 does not reach them"
            )
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(look)


if __name__ == "__main__":
    main()
