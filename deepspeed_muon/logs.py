"""The package's one logger, ``deepspeed_muon``, and what one rank says for many."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence, Sized

import torch.distributed as dist

from deepspeed_muon.errors import printable

logger = logging.getLogger("deepspeed_muon")


def _show_escapes(record: logging.LogRecord) -> bool:
    """Keep names and paths of unknown origin from writing escape sequences to the terminal."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            printable(str(each)) if isinstance(each, (str, os.PathLike)) else each for each in record.args
        )
    return True


logger.addFilter(_show_escapes)


def counted(things: Sized, noun: str) -> str:
    """Return the number of things with their noun: ``1 file``, ``2 files``."""
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def announce(text: str, *values: object, on_any_rank: bool = False) -> None:
    """Say what every user should see, also where nobody asked for messages of the level INFO.

    DeepSpeed's logger and most programs show warnings only. There the line goes to standard error. Only the first rank
    says it, unless ``on_any_rank``.
    """
    if not on_any_rank and dist.is_initialized() and dist.get_rank():
        return
    if logger.isEnabledFor(logging.INFO) and _is_shown():
        logger.info(text, *values)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, text, values, None))


def _is_shown() -> bool:
    """Return whether any handler shows the level INFO."""
    at: logging.Logger | None = logger
    while at is not None:
        if any(handler.level <= logging.INFO for handler in at.handlers):
            return True
        at = at.parent if at.propagate else None
    return False


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


def listed(names: Sequence[str], most: int) -> str:
    """Return the first ``most`` names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
