"""Consolidate, restore and convert checkpoints. Empty until the checkpoint capability lands."""
