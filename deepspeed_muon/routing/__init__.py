"""Decides which parameters Muon updates and which AdamW, and how a weight divides into matrices."""
