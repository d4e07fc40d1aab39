"""What the host remembers of the steps of this process: the rates of the param groups, and how the steps ended."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_muon.monitoring.diagnosis import QUANTITIES

# So many steps are judged together, or all since the last sample if these are more; but never more than the longest.
_WINDOW, _LONGEST_WINDOW = 100, 1000
# Fewer steps are not judged: a loss scale that is still too large skips the first ones.
_FEWEST = 20


@dataclass(slots=True)
class GroupRates:
    """The rates of a param group.

    Attributes:
        configured: The rate that the group was given, which schedules scale.
        last: The rate of the last step.
        peak: The highest rate so far.
        is_rising: Whether the last step had a higher rate than the one before it.
    """

    configured: float
    last: float = 0.0
    peak: float = 0.0
    is_rising: bool = False


class StepHistory:
    """Rates and outcomes of steps; recording them needs no device, so every step is recorded.

    Attributes:
        rates: The rates of each param group, by ``id``.
        group_of: ``id`` of the param group of each of AdamW's parameters, by name, in the last sampled step.
        is_resumed: Whether this process has not seen the run's first steps, and so perhaps not its highest rates.
    """

    def __init__(self, every: int) -> None:
        """Remember as many outcomes as a sample ``every`` so many steps judges."""
        self.rates: dict[int, GroupRates] = {}
        self.group_of: dict[str, int] = {}
        self.is_resumed = False
        # (whether the step was skipped, norm of its gradients, norm to which they are clipped) since the last sample
        self._unread: deque[tuple[bool, Any, float]] = deque(maxlen=_LONGEST_WINDOW if every else 0)
        # (whether the step was skipped, factor of its gradients; None without clipping)
        self._outcomes: deque[tuple[bool, float | None]] = deque(
            maxlen=min(max(every, _WINDOW), _LONGEST_WINDOW)
        )

    def resume(self) -> None:
        """Forget the param groups, because a state dict replaces those of an optimizer that was trained before."""
        self.rates.clear()
        self.group_of.clear()
        self.is_resumed = True

    def record(
        self,
        *,
        rates: Mapping[int, tuple[float, float]],
        skipped: bool,
        norm: Any = None,
        clipping: float = 0.0,
    ) -> None:
        """Record a step, before its sample ends.

        Args:
            rates: ``id`` of each param group to its rate in this step, and to the one that it was given.
            skipped: Whether the step was skipped.
            norm: The norm of the gradients, a number or a tensor, which is read in the next sampled step; ``None`` if
                it is unknown.
            clipping: The norm to which the gradients are clipped; 0 for no clipping.
        """
        for group, (rate, configured) in rates.items():
            history = self.rates.setdefault(group, GroupRates(configured))
            history.is_rising = rate > history.last
            history.last, history.peak = rate, max(rate, history.peak)
        self._unread.append((skipped, norm, clipping))

    def peak(self, group: int | None) -> float:
        """Return the highest rate of a param group so far, by its ``id``; 0 if no step has trained it."""
        return self.rates[group].peak if group in self.rates else 0.0

    def expected(self, group: int) -> float:
        """Return the highest rate that a param group has had, or is expected to reach or to have reached."""
        rates = self.rates[group]
        return max(rates.peak, rates.configured) if rates.is_rising or self.is_resumed else rates.peak

    def read_outcomes(self) -> dict[str, float]:
        """Return how the last steps ended; ``docs/health.md`` says what the names mean. Reads norms on a device."""
        # torch.nn.utils.clip_grad_norm_ and DeepSpeed multiply by clipping / (norm + 1e-6) if that is below 1.
        for skipped, norm, clipping in self._unread:
            is_clipped = not skipped and norm is not None and clipping > 0
            factor = min(1.0, clipping / (float(norm) + 1e-6)) if is_clipped else None
            self._outcomes.append((skipped, factor))
        self._unread.clear()
        facts: dict[str, float] = {}
        if len(self._outcomes) >= _FEWEST:
            facts["skipped"] = statistics.fmean(skipped for skipped, _ in self._outcomes)
        factors = [factor for _, factor in self._outcomes if factor is not None]
        if len(factors) >= _FEWEST:
            least, _ = QUANTITIES["clip_coefficient"].limits
            runs = itertools.groupby(factors, lambda factor: factor < least)
            facts |= {
                "clipped": statistics.fmean(factor < 1 for factor in factors),
                "clip_coefficient": statistics.median(factors),
                "clip_least": min(factors),
                "clip_stalled": max((len(list(run)) for is_stalled, run in runs if is_stalled), default=0),
            }
        return facts
