"""Whether it would pay that several ranks orthogonalise one matrix together, where ranks outnumber matrices.

The model is that of :func:`deepspeed_muon.orthogonalize_sharded`: each rank has a part of the long side, so that the
products with the matrix are divided; the products of Gram-sized matrices run on every rank; and the ranks all-reduce
the Gram matrix at the start and at each restart. It is a prediction: the step gives every matrix to one owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_muon.math.flops import gram_flops, orthogonalize_flops
from deepspeed_muon.plan.predict import Exchange, PlannedParameter, PlanSettings, parameter_flops

__all__ = ["Sharing", "shared_seconds", "sharing_of"]

# A gain below this is not worth a second way to run a matrix.
_WORTH = 1.05


@dataclass(frozen=True, slots=True)
class Sharing:
    """What sharing the most expensive block of the busiest rank would come to.

    Attributes:
        parameter: Its name.
        ranks: Ranks that would share it: those of a node, as far as there are so many for each matrix.
        alone_seconds: Predicted time on one rank.
        shared_seconds: Predicted time on all of them.
    """

    parameter: str
    ranks: int
    alone_seconds: float
    shared_seconds: float

    @property
    def pays(self) -> bool:
        """Whether the gain is worth it."""
        return self.alone_seconds > _WORTH * self.shared_seconds


def shared_seconds(rows: int, cols: int, ranks: int, settings: PlanSettings) -> float:
    """Return the predicted time in which ``ranks`` of one node orthogonalise one matrix together.

    Args:
        rows: Rows of the matrix.
        cols: Columns of the matrix.
        ranks: How many share it; one is the ordinary iteration.
        settings: Iteration and hardware.
    """
    rate = settings.gpu.flops * settings.efficiency
    if ranks == 1:
        whole = orthogonalize_flops(
            rows, cols, steps=settings.steps, method=settings.method, dtype=settings.ns_dtype
        )
        return whole / rate
    divided, repeated, reductions = gram_flops(rows, cols, steps=settings.steps, dtype=settings.ns_dtype)
    # The Gram matrix is reduced in float32.
    nbytes = reductions * 2 * 4.0 * min(rows, cols) ** 2 * (ranks - 1) / ranks
    link = settings.gpu.node_bandwidth * settings.link_efficiency
    return (divided / ranks + repeated) / rate + nbytes / link


def sharing_of(
    parameters: Sequence[PlannedParameter], settings: PlanSettings, exchange: Exchange
) -> Sharing | None:
    """Return what sharing the most expensive matrix would come to, or ``None`` where no ranks are idle for it.

    Args:
        parameters: All parameters.
        settings: Stage, ranks, iteration and hardware.
        exchange: Owners and work of the same.
    """
    muon = [parameter for parameter in parameters if parameter.muon]
    mean = float(exchange.flops.mean())
    if not muon or exchange.balance <= _WORTH:
        return None
    largest = max(muon, key=lambda parameter: parameter_flops(parameter, settings))
    free = round(parameter_flops(largest, settings) / mean) if mean else 1
    ranks = min(settings.gpus_per_node, settings.world_size, max(1, free))
    if ranks < 2:
        return None
    alone = sum(n * shared_seconds(r, c, 1, settings) for n, r, c in largest.blocks)
    together = sum(n * shared_seconds(r, c, ranks, settings) for n, r, c in largest.blocks)
    return Sharing(largest.name, ranks, alone, together)
