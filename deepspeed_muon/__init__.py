"""Muon for models trained with DeepSpeed ZeRO.

``import deepspeed_muon`` makes ``"optimizer": {"type": "Muon"}`` of a DeepSpeed configuration resolve to this project.
"""

from deepspeed_muon.config import MuonConfig
from deepspeed_muon.errors import (
    BindingError,
    CheckpointError,
    ConfigError,
    MuonError,
    NonFiniteGradientError,
    OpsUnavailableError,
    PlanMismatchError,
    RankDisagreementError,
    RegistrationError,
    RoutingError,
    ScheduleError,
    UnsupportedConfigError,
)
from deepspeed_muon.math.newton_schulz import NsSettings, orthogonalize
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.registration import is_registered, muon_optimizer, register, routes, unregister
from deepspeed_muon.routing import Route

__version__ = "0.1.0"

__all__ = [
    "BindingError",
    "CheckpointError",
    "ConfigError",
    "Muon",
    "MuonConfig",
    "MuonError",
    "NonFiniteGradientError",
    "NsSettings",
    "OpsUnavailableError",
    "PlanMismatchError",
    "RankDisagreementError",
    "RegistrationError",
    "Route",
    "RoutingError",
    "ScheduleError",
    "UnsupportedConfigError",
    "__version__",
    "is_registered",
    "muon_optimizer",
    "orthogonalize",
    "register",
    "routes",
    "unregister",
]

register()
