"""Runs a training script without a change in it: ``python -m deepspeed_muon.run script.py args...``.

With the launcher: ``deepspeed --module deepspeed_muon.run script.py --deepspeed_config ds.json``. This module registers
the optimizer and runs the script as ``__main__`` with the script's arguments.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

import deepspeed_muon

__all__ = ["main", "split_arguments"]

_USAGE = "usage: python -m deepspeed_muon.run script.py [arguments of the script]"


def split_arguments(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the script and its arguments.

    The launcher puts ``--local_rank=N`` before everything else; the script expects it among its own arguments.

    Raises:
        SystemExit: With the usage, if no script is named or an option precedes it.
    """
    rest = list(arguments)
    launcher = []
    while rest and rest[0].startswith("--local_rank"):
        launcher.append(rest.pop(0))
        if "=" not in launcher[-1] and rest:
            launcher.append(rest.pop(0))
    if not rest or rest[0].startswith("-"):
        raise SystemExit(_USAGE)
    return rest[0], launcher + rest[1:]


def main(arguments: Sequence[str] | None = None) -> None:
    """Register the optimizer and run the script that the arguments name."""
    script, own = split_arguments(sys.argv[1:] if arguments is None else arguments)
    if not os.path.isfile(script):
        raise SystemExit(f"deepspeed_muon.run: no such file: {script}\n{_USAGE}")
    deepspeed_muon.register()
    sys.argv = [script, *own]
    # As with `python script.py`, the script can import the modules of its own folder.
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
