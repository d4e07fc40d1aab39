"""Forecasts of a run's communication, computation and memory, from shapes alone."""
