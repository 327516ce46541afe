"""Tracking: what records a run beside its folder, W&B or the user's own, and what a person sees meanwhile."""
