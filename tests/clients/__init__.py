"""Programs that nobody here wrote, run unchanged with this Muon: ``make clients``."""
