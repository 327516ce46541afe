"""Sweeps: every job in processes of its own, its end recorded however it ended, all of them in one table."""
