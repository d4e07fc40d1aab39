"""One step of the optimizer."""
