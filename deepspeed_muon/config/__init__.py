"""``optimizer.params``: every key with its default, its check and its sentence of documentation."""

from deepspeed_muon.config.messages import TORCH_OPTIONS, unknown_key_message
from deepspeed_muon.config.settings import DEFAULT_MUON_LR, GROUP_KEYS, RATE_KEYS, MuonConfig, takes_settings
from deepspeed_muon.config.values import MatricesConfig, QkClipConfig, RestoreConfig, TensorParallelMode

__all__ = [
    "DEFAULT_MUON_LR",
    "GROUP_KEYS",
    "RATE_KEYS",
    "TORCH_OPTIONS",
    "MatricesConfig",
    "MuonConfig",
    "QkClipConfig",
    "RestoreConfig",
    "TensorParallelMode",
    "takes_settings",
    "unknown_key_message",
]
