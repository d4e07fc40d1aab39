"""``python -m deepspeed_muon COMMAND``, and ``deepspeed-muon COMMAND``."""

from __future__ import annotations

import os
import signal
import sys

from deepspeed_muon.tools.__main__ import main


def run() -> int:
    """Run the command of this process and return its exit status."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends a command without a traceback
    if sys.stdout is sys.stderr and sys.__stdout__ is not None:
        sys.stdout = sys.__stdout__  # command_line.begin replaced it
    # MODULE:FUNCTION may be in the current folder, which only `python -m` searches by itself.
    sys.path.insert(0, os.getcwd())
    return main()


if __name__ == "__main__":
    sys.exit(run())
