"""What a program may ask of an engine: its optimizer, its routes, its health."""

from __future__ import annotations

from typing import Any

from deepspeed_muon.errors import BindingError
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.routing.route import Route


def muon_of(engine: Any) -> Muon | None:
    """Return this project's optimizer inside an engine; ``None`` if there is another one, or none yet."""
    optimizer = getattr(engine, "basic_optimizer", None)
    return optimizer if isinstance(optimizer, Muon) else None


def is_active(engine: Any) -> bool:
    """Return whether this project's Muon trains an engine, and not DeepSpeed's own or another optimizer.

    Args:
        engine: A ``DeepSpeedEngine``.
    """
    return muon_of(engine) is not None


def muon_optimizer(engine: Any) -> Muon:
    """Return this project's optimizer inside an engine, whatever wrapper is around it.

    Args:
        engine: A ``DeepSpeedEngine``.

    Raises:
        BindingError: If the engine runs another optimizer.
    """
    optimizer = muon_of(engine)
    if optimizer is None:
        other = type(getattr(engine, "basic_optimizer", None)).__name__
        raise BindingError(f"this engine's optimizer is {other}, not deepspeed_muon.Muon")
    return optimizer


def routes(engine: Any) -> list[Route]:
    """Return the routing table of an engine: where every parameter goes and why.

    Args:
        engine: A ``DeepSpeedEngine`` made with this optimizer.

    Raises:
        BindingError: If the engine runs another optimizer.
    """
    return muon_optimizer(engine).routes


def health(engine: Any) -> dict[str, Any]:
    """Return what the last sampled step measured; ``docs/health.md`` says what each number means.

    Equal on all ranks. Every so many optimizer steps as ``health`` says are sampled, with or without a monitor.

    Args:
        engine: A ``DeepSpeedEngine`` made with this optimizer.

    Returns:
        ``step``, ``update_rms``, ``orthogonality_error``, ``sigma_max``, ``stable_rank``, ``alignment``,
        ``time_gather``, ``time_newton_schulz``, ``time_scatter``, ``seconds``, ``redone``, ``failed``, and
        ``matrices`` with the numbers of each sampled matrix. Before the first sample only ``redone`` and ``failed``,
        of this rank.

    Raises:
        BindingError: If the engine runs another optimizer.
    """
    return muon_optimizer(engine).health()
