"""``optimizer.params``: every key with its default, its check and its sentence of documentation."""
