"""The check of every update, the samples of health, and their summary."""
