"""Health of the optimizer: measurements of sampled matrices, their summary over ranks."""
