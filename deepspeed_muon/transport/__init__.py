"""The two all-to-alls of a Muon step, and the checks by which ranks agree before anything moves."""

from deepspeed_muon.transport.agreement import agree, gather_flags
from deepspeed_muon.transport.pipeline import MuonPipeline, StepStats

__all__ = ["MuonPipeline", "StepStats", "agree", "gather_flags"]
