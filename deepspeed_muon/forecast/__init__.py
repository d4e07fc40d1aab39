"""What a run will move, compute and hold, without running it."""
