"""What checkpoints need of the engine around the optimizer. ``engine/checkpointing.py`` implements it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.plan.slices import TensorSlice

__all__ = ["SOME_RANKS", "Host", "optimizer_of", "require_all_ranks"]

SOME_RANKS = (
    "the ranks of a save agree over the default process group, whose other ranks would not come, as in DeepSpeed's own "
    "save_checkpoint; save module.state_dict() and optimizer.state_dict() of each rank instead"
)


class Host(Protocol):
    """The engine around an optimizer. The engine sets it as ``Muon.host`` when it binds the optimizer.

    Attributes:
        step_thread: The thread that took the last step; ``None`` before the first one.
        save_id: Random id of the save that ``engine.save_checkpoint`` is writing, equal on all ranks; else ``None``.
    """

    step_thread: int | None
    save_id: str | None

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage."""

    @property
    def parts(self) -> Mapping[str, TensorSlice | str]:
        """Name of each parameter that is a part of a whole tensor, or has another name there, to that part.

        A text in its place says why nobody knows it.
        """

    @property
    def scheduler(self) -> Any:
        """The learning-rate scheduler, or ``None``."""

    def counters(self) -> dict[str, int]:
        """Return ``global_steps``, ``global_samples`` and ``skipped_steps``."""

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Set the counters that :meth:`counters` returns."""

    def param_group_numbers(self) -> list[int]:
        """Return the number of the param group of every partition, in the order of the partitions."""

    def loss_scale(self) -> dict[str, float] | None:
        """Return what the dynamic loss scale needs to continue, or ``None`` where there is none."""

    def set_loss_scale(self, state: Mapping[str, float]) -> None:
        """Continue with a loss scale from :meth:`loss_scale`; nothing happens where there is no dynamic one."""

    def refresh_weights(self) -> None:
        """Round the fp32 masters into the weights of the forward pass. Must be called by all ranks."""

    def begin_restore(self, where: str) -> None:
        """Let steps, saves and forward passes raise from now on, until :meth:`end_restore`; may be called again.

        Args:
            where: What is restored, for the message.
        """

    def end_restore(self) -> None:
        """Let the engine train again."""

    def require_restored(self) -> None:
        """Raise if a restore began and did not end.

        Raises:
            CheckpointError: Naming what was restored and the remedy.
        """


def optimizer_of(engine: Any) -> Muon:
    """Return our optimizer inside an engine.

    Raises:
        CheckpointError: If the engine runs another optimizer, or is not made yet.
    """
    optimizer = getattr(engine, "basic_optimizer", None)
    if not isinstance(optimizer, Muon):
        raise CheckpointError(
            f"this engine's optimizer is {type(optimizer).__name__}, not deepspeed_muon.Muon: use DeepSpeed's own "
            f"checkpoints for it"
        )
    if optimizer.host is None:
        raise CheckpointError("the engine's optimizer holds no parameters")
    return optimizer


def require_all_ranks(engine: Any) -> None:
    """Raise on every rank, without waiting for others, where the ranks cannot save or restore together.

    Raises:
        CheckpointError: If the engine does not have all ranks of the program, or another thread takes its steps: its
            collectives and those of the save would meet in another order on each rank.
    """
    optimizer = getattr(engine, "basic_optimizer", None)
    members = getattr(optimizer, "members", None)
    if members is not None and not members.are_everyone:
        raise CheckpointError(f"this engine has some of the program's ranks only: {SOME_RANKS}")
    thread = getattr(getattr(optimizer, "host", None), "step_thread", None)
    if thread not in (None, threading.get_ident()):
        raise CheckpointError(
            "another thread takes the steps of this engine: save and restore in the thread that calls engine.step"
        )
