"""Pure tensor mathematics of one Muon step: no communication, no DeepSpeed, no plans."""
