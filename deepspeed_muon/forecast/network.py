"""A step on a network of a known rate: the plan's bytes over the rate, added to a measured time without a limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspeed_muon.forecast.predict import Exchange, zero_bytes
from deepspeed_muon.forecast.settings import PlannedParameter, PlanSettings, divisions


@dataclass(frozen=True, slots=True)
class Network:
    """The links between nodes.

    Attributes:
        rate: Bits a second that a node can send, and receive at the same time.
        payload: The part of them that is data. The default is that of TCP over Ethernet: 1448 of 1514 bytes.
        reduce_scatter: Whether the backend has one. gloo has none: torch runs an all-reduce, of twice the bytes.
    """

    rate: float
    payload: float = 1448 / 1514
    reduce_scatter: bool = True

    def __post_init__(self) -> None:
        if not self.rate > 0:  # a NaN too
            raise ValueError(f"a rate of {self.rate:g} bits a second: it must be above 0")

    def seconds(self, nbytes: float) -> float:
        """Return the time that a node takes to send so many bytes."""
        return 8.0 * nbytes / (self.rate * self.payload)


def network_seconds(
    parameters: Sequence[PlannedParameter],
    settings: PlanSettings,
    network: Network,
    exchange: Exchange,
    compute: Mapping[str, float] | None = None,
) -> dict[str, dict[str, float]]:
    """Predict the time on the wire, and the whole step if its time on a network without a limit is known.

    Nothing is taken as hidden behind computation, so the whole step is an upper bound where collectives overlap.

    Args:
        parameters: All parameters that are trained.
        settings: Stage and ranks; ``gpus_per_node`` ranks share a node's link.
        network: The links.
        exchange: From :func:`~deepspeed_muon.forecast.predict.exchange_of`.
        compute: Seconds of forward, backward and step on a network without a limit, by optimizer.

    Returns:
        For ``muon`` and ``adamw`` the seconds of ``exchange`` and ``zero_collectives`` on
        the wire; with ``compute`` that and the ``whole_step`` too.
    """
    zero = zero_bytes(parameters, settings)
    if settings.stage == 3 and not network.reduce_scatter:
        for _, local, among in divisions(parameters, settings):
            gradients = sum(parameter.numel for parameter in local) / settings.tensor_parallel
            ranks = among.data_parallel
            zero += gradients * settings.model_bytes * (ranks - 1) / ranks
    # What one rank receives in one direction, it sends in the other.
    one_way = max(exchange.gather_elements.max(), exchange.scatter_elements.max()) * settings.wire_bytes
    inside = min(settings.gpus_per_node, settings.world_size)
    own = inside * exchange.leaving * float(one_way) * (2.0 if settings.stage else 1.0)
    # A ring passes every link once, however many ranks a node has.
    several_nodes = settings.world_size > settings.gpus_per_node
    found = {}
    for name, nbytes in {"muon": own, "adamw": 0.0}.items():
        seconds = {
            "exchange": network.seconds(nbytes) if several_nodes else 0.0,
            "zero_collectives": network.seconds(zero) if several_nodes else 0.0,
        }
        if compute is not None and name in compute:
            seconds["compute"] = compute[name]
            seconds["whole_step"] = sum(seconds.values())
        found[name] = seconds
    return found
