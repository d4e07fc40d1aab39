"""Adapters: one reader for each of DeepSpeed's wrappers. Its private attributes are touched here and nowhere else."""

from deepspeed_muon.zero.binding import BoundPartition, StepSet, read_step_sets

__all__ = ["BoundPartition", "StepSet", "read_step_sets"]
