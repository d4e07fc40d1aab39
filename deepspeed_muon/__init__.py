"""Muon for models trained with DeepSpeed ZeRO.

After ``import deepspeed_muon``, ``"optimizer": {"type": "Muon"}`` in a DeepSpeed configuration is this project's Muon.
"""

import atexit
import os
import sys

# A command parses its arguments before the imports below, which take seconds. "-m" is sys.argv[0] during this import.
if sys.argv[:1] in (["-m"], _program := sys.orig_argv[-len(sys.argv) :][:1]) and (
    os.path.basename("".join(_program)) in ("deepspeed_muon", "deepspeed-muon")
):
    from deepspeed_muon.tools import command_line

    command_line.begin()

from deepspeed_muon.checkpoint import consolidate, restore
from deepspeed_muon.config.settings import MuonConfig
from deepspeed_muon.engine import health, is_active, muon_optimizer, routes
from deepspeed_muon.engine.hooks import register, unregister
from deepspeed_muon.errors import (
    BindingError,
    CheckpointError,
    ConfigError,
    InstallationError,
    MuonError,
    NumericalError,
    RankDisagreementError,
    RankMissingError,
    RoutingError,
)
from deepspeed_muon.math.newton_schulz import NsSettings, orthogonalize
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.qk_clip.recorder import QkRecorder
from deepspeed_muon.routing.route import Route
from deepspeed_muon.sharded import orthogonalize_sharded
from deepspeed_muon.transport.ranks import wait_for_gloo
from deepspeed_muon.version import __version__

__all__ = [
    "BindingError",
    "CheckpointError",
    "ConfigError",
    "InstallationError",
    "Muon",
    "MuonConfig",
    "MuonError",
    "NsSettings",
    "NumericalError",
    "QkRecorder",
    "RankDisagreementError",
    "RankMissingError",
    "Route",
    "RoutingError",
    "__version__",
    "consolidate",
    "health",
    "is_active",
    "muon_optimizer",
    "orthogonalize",
    "orthogonalize_sharded",
    "register",
    "restore",
    "routes",
    "unregister",
]

register()
atexit.register(wait_for_gloo)
