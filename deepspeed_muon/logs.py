"""The logger of the package, ``deepspeed_muon``, and messages that one rank logs for all."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence, Sized

import torch.distributed as dist

from deepspeed_muon.errors import printable

logger = logging.getLogger("deepspeed_muon")


def _make_printable(record: logging.LogRecord) -> bool:
    """Replace characters that a terminal obeys, since names and paths may come from files of unknown origin."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            printable(str(value)) if isinstance(value, (str, os.PathLike)) else value for value in record.args
        )
    return True


logger.addFilter(_make_printable)


def counted(items: Sized, noun: str) -> str:
    """Return the number of items with their noun: ``1 file``, ``2 files``."""
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def announce(text: str, *values: object, on_any_rank: bool = False) -> None:
    """Log a message of level INFO that every user should see, on the first rank unless ``on_any_rank``.

    Most programs configure loggers to show warnings only. The message is written to standard error there.
    """
    if not on_any_rank and dist.is_initialized() and dist.get_rank():
        return
    if logger.isEnabledFor(logging.INFO) and _has_info_handler():
        logger.info(text, *values)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, text, values, None))


def _has_info_handler() -> bool:
    """Return whether a handler of the logger, or of a parent to which it propagates, handles the level INFO."""
    ancestor: logging.Logger | None = logger
    while ancestor is not None:
        if any(handler.level <= logging.INFO for handler in ancestor.handlers):
            return True
        ancestor = ancestor.parent if ancestor.propagate else None
    return False


def warn(text: str, *values: object, group: dist.ProcessGroup | None = None) -> None:
    """Log a warning on the first rank of a group; ``None`` is the default group.

    Call ``logger.warning`` instead for what concerns this rank only.
    """
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        logger.warning(text, *values, stacklevel=2)


def warn_on_each_machine(text: str, *values: object) -> None:
    """Log a warning on the first rank of each machine (``LOCAL_RANK`` 0)."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning(text, *values, stacklevel=2)


def listed(names: Sequence[str], most: int) -> str:
    """Return the first ``most`` names, and the number of the rest."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
