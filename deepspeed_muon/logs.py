"""The package's one logger, ``deepspeed_muon``, and warnings that one rank logs for many."""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

__all__ = ["logger", "warn", "warn_on_each_machine"]

logger = logging.getLogger("deepspeed_muon")


def warn(text: str, *values: object, group: dist.ProcessGroup | None = None) -> None:
    """Log a warning on the first rank of a group, for all of its ranks; ``None`` is the default group.

    A rank that alone knows of something warns through ``logger``.
    """
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        logger.warning(text, *values, stacklevel=2)


def warn_on_each_machine(text: str, *values: object) -> None:
    """Log a warning on the first rank of each machine (``LOCAL_RANK`` 0)."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning(text, *values, stacklevel=2)
