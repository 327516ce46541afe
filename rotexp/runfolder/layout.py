"""What files in the folder of a run, and of a sweep, are called, where several modules need the name."""

from __future__ import annotations

CONFIG_FILE = "config.resolved.yaml"
JOBS_FILE = "jobs.json"
"""Every job of a sweep and how it ended, in the sweep's folder."""
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
ROTATIONS_FILE = "rotations.safetensors"
WEIGHTS_FILE = "weights.safetensors"
"""What was trained beside rotations, as it was before the merge."""
AVERAGE_FILE = "weights_average.safetensors"
"""The averages of the same."""
BEST_FILE = "weights_best.safetensors"
"""The same as they were best."""
