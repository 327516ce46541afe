"""Tracking: the run folder's files (the truth), their W&B mirror, and what a person sees meanwhile."""
