"""Checkpoints that outlive their topology: one safetensors set with everything by name, and what converts to it."""

from deepspeed_muon.checkpoint.consolidate import consolidate
from deepspeed_muon.checkpoint.index import CONSOLIDATED_FOLDER, CheckpointIndex, load_index
from deepspeed_muon.checkpoint.restore import restore

__all__ = ["CONSOLIDATED_FOLDER", "CheckpointIndex", "consolidate", "load_index", "restore"]
