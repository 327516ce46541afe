"""A run's folder: what its files are called, written and read."""
