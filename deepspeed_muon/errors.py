"""The exceptions of this package: one for each thing that a caller would do about it.

Every message names what is wrong, where (parameter, shape, rank, configuration key), and the remedy. All exceptions
derive from :class:`MuonError`, and from the built-in exception that ``torch.optim`` and DeepSpeed raise in such a case.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Return text of unknown origin with escape sequences for the characters that a terminal obeys or cannot show."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )


class MuonError(Exception):
    """Base class of every exception that this package raises on purpose."""

    def __str__(self) -> str:
        """Return the message with everything but its line breaks printable, since it may quote names from files."""
        return "\n".join(map(printable, super().__str__().split("\n")))


class ConfigError(MuonError, ValueError):
    """A setting or an argument cannot be used, or DeepSpeed is configured for what Muon does not support: change it."""


class RoutingError(MuonError, ValueError, TypeError):
    """The parameters cannot be divided between Muon and AdamW as asked: pass others, or other param groups."""


class BindingError(MuonError, RuntimeError):
    """The optimizer and the engine do not fit together: change the order of calls, or what DeepSpeed is given."""


class CheckpointError(MuonError, RuntimeError):
    """A checkpoint cannot be written, is damaged or incomplete, or is of another model: use another one."""


class InstallationError(MuonError, RuntimeError):
    """This DeepSpeed cannot be hooked, or native operators cannot be built or loaded: install what is missing."""


class RankDisagreementError(MuonError, RuntimeError):
    """The ranks have different settings, models or plans, or one of them failed: make them equal."""


class RankMissingError(MuonError, RuntimeError):
    """Other ranks did not join a collective before the process group's timeout, or are gone: restart the job."""


class NumericalError(MuonError, ArithmeticError):
    """A gradient or an update is not finite, or an update is wrong, and ``nonfinite_grad`` is ``error``."""
