"""The typed errors of this project.

Every error says what is wrong, where (parameter, shape, rank, config key) and what to do about it. All derive from
:class:`MuonError`. Those about a bad value also derive from :class:`ValueError`, as those of ``torch.optim`` do.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text of unknown origin with what a terminal would obey, or cannot show, as escape sequences."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


class MuonError(Exception):
    """Base class of every error that this package raises on purpose."""

    def __str__(self) -> str:
        """Return the message. It may hold names out of files, so only its line breaks are left as they are."""
        return "\n".join(map(printable, super().__str__().split("\n")))


class ConfigError(MuonError, ValueError):
    """A key of the optimizer's configuration is unknown, or its value cannot be used."""


class ScheduleError(ConfigError):
    """A Newton-Schulz schedule cannot run for the requested number of steps, or does not orthogonalise."""


class RoutingError(MuonError, ValueError):
    """The parameters cannot be divided between Muon and AdamW as asked."""


class ParameterTypeError(RoutingError, TypeError):
    """The optimizer got something that is not a parameter, or whose dtype cannot be trained here."""


class RegistrationError(MuonError, RuntimeError):
    """DeepSpeed could not be hooked, or was hooked too late."""


class UnsupportedConfigError(MuonError, NotImplementedError):
    """The DeepSpeed configuration asks for a feature that this optimizer would get wrong."""


class BindingError(MuonError, RuntimeError):
    """The optimizer does not know where ZeRO keeps a parameter that it was asked to update."""


class CheckpointError(MuonError, RuntimeError):
    """A checkpoint cannot be written, is damaged or incomplete, or belongs to another model."""


class PlanMismatchError(MuonError, RuntimeError):
    """The ranks of one data-parallel group derived different exchange plans."""


class ShardingError(MuonError, ValueError):
    """The shards of the ranks do not make up one matrix, or their layout is not known."""


class RankDisagreementError(MuonError, RuntimeError):
    """The ranks were started with different settings, or one of them failed to start."""


class RankMissingError(MuonError, RuntimeError):
    """Other ranks did not join a collective within the process group's time-out, or are gone."""


class NonFiniteGradientError(MuonError, ArithmeticError):
    """A gradient holds an infinity or NaN and the configuration asks for an error."""


class OpsUnavailableError(MuonError, RuntimeError):
    """The native operators can be neither loaded nor built on this machine."""


class OrthogonalizationError(MuonError, ArithmeticError):
    """The update of a matrix was wrong in fp32 too, and the configuration asks for an error."""
