"""``python -m deepspeed_muon COMMAND``."""

from __future__ import annotations

import signal
import sys

from deepspeed_muon.tools.__main__ import main

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends a command without a traceback
    sys.exit(main())
