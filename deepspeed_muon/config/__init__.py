"""``optimizer.params``: every key with its default, its check and its sentence of documentation."""

from deepspeed_muon.config.documentation import takes_settings
from deepspeed_muon.config.messages import TORCH_OPTIONS, unknown_key_message
from deepspeed_muon.config.sections import HealthConfig, MatricesConfig, QkClipConfig, RestoreConfig
from deepspeed_muon.config.settings import DEFAULT_MUON_LR, GROUP_KEYS, RATE_KEYS, MuonConfig
from deepspeed_muon.config.values import TensorParallelMode

__all__ = [
    "DEFAULT_MUON_LR",
    "GROUP_KEYS",
    "RATE_KEYS",
    "TORCH_OPTIONS",
    "HealthConfig",
    "MatricesConfig",
    "MuonConfig",
    "QkClipConfig",
    "RestoreConfig",
    "TensorParallelMode",
    "takes_settings",
    "unknown_key_message",
]
