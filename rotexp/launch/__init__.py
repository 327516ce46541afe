"""Launch: start the ranks of a run, wait for them, and say how it ended."""
