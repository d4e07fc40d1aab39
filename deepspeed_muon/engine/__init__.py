"""What a program may ask of an engine: its optimizer, its routes, its health.

Everything that replaces or reads parts of DeepSpeed is in this layer:

* :mod:`.hooks`: the table of the functions of DeepSpeed that are replaced, each with the reason. Start here.
* :mod:`.configure`: ``deepspeed.initialize``, from the comparison of the ranks to the bound optimizer; with
  :mod:`.supported` (what is refused), :mod:`.topology` (which rank has which slice of a tensor), :mod:`.offload`
  and :mod:`.nvme`.
* :mod:`.running` and :mod:`.step`: schedules and steps.
* :mod:`.checkpointing`: DeepSpeed's own checkpoints. Those that do not depend on the number of ranks have a layer of
  their own, :mod:`deepspeed_muon.checkpoint`.
* :mod:`.views`: the only module that reads attributes of ZeRO's wrappers.
* :mod:`.workarounds`: defects of DeepSpeed that every optimizer suffers from, such as those with several backward
  passes.
* :mod:`.patching`: how functions are replaced, and how a changed DeepSpeed is noticed.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.errors import BindingError
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.routing.param_groups import build_groups
from deepspeed_muon.routing.route import Route


def muon_of(engine: object) -> Muon | None:
    """Return this project's optimizer inside an engine; ``None`` if there is another one, or none yet."""
    optimizer = getattr(engine, "basic_optimizer", None)
    return optimizer if isinstance(optimizer, Muon) else None


def is_active(engine: DeepSpeedEngine) -> bool:
    """Return whether this project's Muon trains an engine, and not DeepSpeed's own or another optimizer.

    Args:
        engine: A ``DeepSpeedEngine``.
    """
    return muon_of(engine) is not None


def muon_optimizer(engine: DeepSpeedEngine) -> Muon:
    """Return this project's optimizer inside an engine, whatever wrapper is around it.

    Args:
        engine: A ``DeepSpeedEngine``.

    Raises:
        BindingError: If the engine runs another optimizer.
    """
    optimizer = muon_of(engine)
    if optimizer is None:
        kind = type(getattr(engine, "basic_optimizer", None)).__name__
        raise BindingError(f"this engine's optimizer is {kind}, not deepspeed_muon.Muon")
    return optimizer


def routes(trained: DeepSpeedEngine | Muon | nn.Module) -> list[Route]:
    """Return the routing table: where every parameter goes and why.

    Args:
        trained: A ``DeepSpeedEngine`` made with this optimizer, the optimizer, or a model, which is routed by default
            settings.

    Raises:
        BindingError: If the engine runs another optimizer.
    """
    if isinstance(trained, nn.Module) and not isinstance(trained, DeepSpeedEngine):
        return build_groups(trained, MuonConfig()).routes
    return (trained if isinstance(trained, Muon) else muon_optimizer(trained)).routes


def health(trained: DeepSpeedEngine | Muon) -> dict[str, Any]:
    """Return what the last sampled step measured; ``docs/health.md`` says what each number means.

    Equal on all ranks once a step was sampled. The setting ``health`` is the number of optimizer steps between two
    samples, with or without a monitor.

    Args:
        trained: A ``DeepSpeedEngine`` made with this optimizer, or the optimizer.

    Returns:
        ``step``, ``update_rms``, ``orthogonality_error``, ``sigma_max``, ``stable_rank``, ``alignment``,
        ``time_gather``, ``time_newton_schulz``, ``time_scatter``, ``seconds``, ``redone``, ``failed``,
        ``grad_norm_muon``, ``grad_norm_adamw``, ``update_over_weight``, ``clip_coefficient``, and
        ``matrices`` with the numbers of each sampled matrix. Before the first sample ``redone`` and ``failed``, of this
        rank, and no ``matrices``.

    Raises:
        BindingError: If the engine runs another optimizer.
    """
    return (trained if isinstance(trained, Muon) else muon_optimizer(trained)).health()
