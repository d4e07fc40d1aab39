"""Pure tensor mathematics of one Muon step: no communication, no DeepSpeed, no plans."""

from deepspeed_muon.math.coefficients import NsSchedule, NsScheduleName, resolve_schedule
from deepspeed_muon.math.newton_schulz import NsDtypeName, NsMethod, NsSettings, orthogonalize
from deepspeed_muon.math.scaling import AdjustLrName, update_scale

__all__ = [
    "AdjustLrName",
    "NsDtypeName",
    "NsMethod",
    "NsSchedule",
    "NsScheduleName",
    "NsSettings",
    "orthogonalize",
    "resolve_schedule",
    "update_scale",
]
