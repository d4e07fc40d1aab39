"""What the host remembers of the steps of this process: the rates of the param groups, and how the steps ended."""

from __future__ import annotations

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
    """

    configured: float
    last: float = 0.0
    peak: float = 0.0


class StepHistory:
    """Rates and outcomes of steps; recording them needs no device, so every step is recorded.

    Attributes:
        rates: The rates of each param group, by ``id``.
        group_of: ``id`` of the param group of each of AdamW's parameters, by name, in the last sampled step.
        is_resumed: Whether this process has not seen the run's first steps, and so perhaps not its highest rates.
    """

    def __init__(self, every: int) -> None:
        """Make a history for a sample ``every`` so many steps; 0 for none, where outcomes are not recorded."""
        self.rates: dict[int, GroupRates] = {}
        self.group_of: dict[str, int] = {}
        self.is_resumed = False
        # Steps since the last sample, as recorded: (whether it was skipped, norm of its gradients, perhaps on a device,
        # norm to which they are clipped). However rare samples are, no more norms are stored than one judges.
        self._unread: deque[tuple[bool, Any, float]] = deque(maxlen=_LONGEST_WINDOW if every else 0)
        # Steps that a sample judges: (whether it was skipped; factor of its gradients, None without clipping; how many
        # steps in a row, up to this one, were clipped to nothing). All since the last sample, and _WINDOW at least.
        self._judged: deque[tuple[bool, float | None, int]] = deque(
            maxlen=min(max(every, _WINDOW), _LONGEST_WINDOW)
        )
        self._stalled = 0  # how many of the last steps in a row were clipped to nothing

    def resume(self) -> None:
        """Forget the param groups, because a run goes on whose first steps are unknown and which may replace them."""
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
            history.last, history.peak = rate, max(rate, history.peak)
        if len(self._unread) == self._unread.maxlen:
            self._stalled = 0  # steps between those of before and these are dropped
        self._unread.append((skipped, norm, clipping))

    def peak(self, group: int | None) -> float:
        """Return the highest rate of a param group so far, by its ``id``; 0 if no step has trained it."""
        return self.rates[group].peak if group in self.rates else 0.0

    def expected(self, group: int) -> float:
        """Return the highest rate that a param group has had, or is expected to reach or to have reached."""
        rates = self.rates[group]
        may_rise = rates.last >= rates.peak  # it has never fallen
        return max(rates.peak, rates.configured) if may_rise or self.is_resumed else rates.peak

    def read_outcomes(self) -> dict[str, float]:
        """Return how the last steps ended; ``docs/health.md`` says what the names mean. Reads norms on a device."""
        least, _ = QUANTITIES["clip_coefficient"].limits
        # torch.nn.utils.clip_grad_norm_ and DeepSpeed multiply by clipping / (norm + 1e-6) if that is below 1.
        for skipped, norm, clipping in self._unread:
            factor = None
            if not skipped and norm is not None and clipping > 0:
                factor = min(1.0, clipping / (float(norm) + 1e-6))
                self._stalled = self._stalled + 1 if factor < least else 0
            self._judged.append((skipped, factor, self._stalled))
        self._unread.clear()
        facts: dict[str, float] = {}
        if len(self._judged) >= _FEWEST:
            facts["skipped"] = statistics.fmean(skipped for skipped, _, _ in self._judged)
        factors = [factor for _, factor, _ in self._judged if factor is not None]
        if len(factors) >= _FEWEST:
            facts |= {
                "clipped": statistics.fmean(factor < 1 for factor in factors),
                "clip_coefficient": statistics.median(factors),
                "clip_least": min(factors),
                "clip_stalled": max(stalled for _, factor, stalled in self._judged if factor is not None),
            }
        return facts
