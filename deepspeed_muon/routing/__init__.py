"""Which parameter goes where."""
