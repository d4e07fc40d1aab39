"""The package's one logger, ``deepspeed_muon``, and who speaks where many ranks would say the same."""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

__all__ = ["logger", "warn", "warn_on_each_machine"]

logger = logging.getLogger("deepspeed_muon")


def warn(text: str, *values: object, group: dist.ProcessGroup | None = None) -> None:
    """Log a warning that every rank of a group would log: its first rank does. What one rank knows goes to ``logger``.

    Args:
        text: The message, with ``%`` places for the values.
        values: What fills the places.
        group: The ranks that would say this, ``None`` for all.
    """
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        logger.warning(text, *values, stacklevel=2)


def warn_on_each_machine(text: str, *values: object) -> None:
    """Log a warning about the machine: the first of its ranks does, as ``LOCAL_RANK`` counts them.

    Args:
        text: The message, with ``%`` places for the values.
        values: What fills the places.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning(text, *values, stacklevel=2)
