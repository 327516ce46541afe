"""What every file in the folder of a run, and of a sweep, is called.

What a checkpoint holds is called by `checkpoint_folders.py`; a tracker of the user's own names what it leaves.
"""

from __future__ import annotations

CONFIG_FILE = "config.resolved.yaml"
JOBS_FILE = "jobs.json"
"""Every job of a sweep and how it ended, in the sweep's folder."""
JOB_LOG_FILE = "job.log"
"""The output of a sweep's job, in the job's folder, when several run at once."""
METRICS_FILE = "metrics.jsonl"
DAMAGED_METRICS_FILE = "metrics.jsonl.damaged"
"""What it was before a run went on without lines of it that could not be read; `-2` and so on follows where it was so
before."""
SUMMARY_FILE = "summary.json"
ROTATIONS_FILE = "rotations.safetensors"
BEST_ROTATIONS_FILE = "rotations_best.safetensors"
AVERAGE_ROTATIONS_FILE = "rotations_average.safetensors"
WEIGHTS_FILE = "weights.safetensors"
"""What was trained beside rotations, as it was before the merge."""
AVERAGE_FILE = "weights_average.safetensors"
"""The averages of the same."""
BEST_FILE = "weights_best.safetensors"
"""The same as they were best."""
RANK_LOGS = "rank-*.log"
"""The pattern of what `rank_log` names."""
CHECKPOINTS_FOLDER = "checkpoints"
WANDB_FOLDER = "wandb"
"""Where W&B keeps its runs; it chose the name."""


def rank_log(rank: int) -> str:
    """Return the name of a rank's log."""
    return f"rank-{rank}.log"


def trace_file(rank: int) -> str:
    """Return the name of a rank's profile."""
    return f"trace-rank-{rank}.json"
