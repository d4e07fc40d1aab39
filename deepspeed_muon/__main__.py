"""``python -m deepspeed_muon``: see :mod:`deepspeed_muon.cli`."""

import sys

from deepspeed_muon.cli import main

if __name__ == "__main__":
    sys.exit(main())
