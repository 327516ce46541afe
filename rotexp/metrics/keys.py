"""The name, unit and meaning of every metric, and how W&B summarizes it: the only place that defines them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Metric:
    """One logged series over the optimizer's steps; `name` may hold `<phase>` or `<row>` for a part that varies."""

    name: str
    unit: str
    meaning: str
    summary: str = "last"

    @property
    def wandb_summary(self) -> str:
        """What W&B keeps of the series: the figure that tells most of it, and the last one."""
        return self.summary if self.summary == "last" else f"{self.summary},last"


def _memory(prefix: str, when: str) -> list[Metric]:
    figures = {
        "peak_rss_gib": "peak resident set of a rank's process",
        "peak_allocated_gib": "peak of what the accelerator's allocator handed out",
        "peak_reserved_gib": "peak of what the accelerator's allocator held",
    }
    return [
        Metric(f"memory/{prefix}{figure}_{side}", "GiB", f"{meaning} {when}, {side} over ranks", "max")
        for figure, meaning in figures.items()
        for side in ("max", "min")
    ]


METRICS = (
    Metric("train/loss", "nats", "objective on the global batch (or a simulated rank's share), before the step", "min"),
    Metric("train/lr", "radians or length", "learning rate of the step"),
    Metric("train/lr_weights", "", "learning rate of the step of everything that is no rotation"),
    Metric("train/num_skipped", "steps", "steps skipped so far, since their loss or gradient was not finite", "max"),
    Metric("sharding/sim_world", "ranks", "world that a run on one rank simulates: not a real training"),
    Metric("train/tokens", "tokens", "tokens trained on so far, over all ranks that exist (one of a simulated world)"),
    Metric("train/device_hours", "h", "time spent on training so far, times the ranks"),
    Metric("grad_norm/total", "", "Euclidean norm of all gradients, before clipping", "max"),
    Metric("grad_norm/rotations", "", "Euclidean norm of the rotations' gradients, before clipping", "max"),
    Metric("grad_norm/weights", "", "Euclidean norm of all other gradients, before clipping", "max"),
    Metric("rotation/orthogonality_rrt_max", "", "largest |R Rᵀ − I| over rotations (drift)", "max"),
    Metric("rotation/orthogonality_rtr_max", "", "largest |Rᵀ R − I| over rotations (drift)", "max"),
    Metric("rotation/distance_from_init", "", "largest ‖R − R₀‖ / √n over rotations, Frobenius", "max"),
    Metric(
        "replica/max_abs_diff",
        "",
        "largest difference between two ranks' copies of a rotation or trained weight, whole or a shard that several "
        "hold; summary.json's, after the last step, is of frozen weights too",
        "max",
    ),
    Metric("replica/num_divergent", "tensors", "rotations and trained weights whose copies differ", "max"),
    *_memory("", "since the phase began"),
    *_memory("<phase>/", "in that phase"),
    Metric("throughput/tokens_per_s", "tokens/s", "training tokens a second over all ranks that exist", "mean"),
    Metric("throughput/tokens_per_s_per_device", "tokens/s", "the same divided by the ranks", "mean"),
    Metric(
        "throughput/mfu_pct",
        "%",
        "model FLOPs utilization: the plain model's operations, forward and backward, over the device's peak; absent "
        "on a CPU and where the peak is not known (rotexp/metrics/flops.py says what is counted)",
        "mean",
    ),
    Metric("time/step_s", "s", "one optimizer step, data to update", "mean"),
    Metric("time/data_s", "s", "waiting for data within the step", "mean"),
    Metric("time/sync_s", "s", "waiting at the unshard guard within the step", "mean"),
    Metric(
        "time/eval_<row>_s",
        "s",
        "measuring that variant on rank 0, its weights' rotation, search and quantization included; of the float model "
        "also what the others are compared with",
    ),
    Metric("time/<phase>_s", "s", "a whole phase on rank 0"),
    Metric(
        "comm/num_collectives",
        "collectives",
        "collectives that rotexp itself issued on rank 0 within the step (gradients, own rows of divided weights, the "
        "master, digests, figures), not FSDP2's gathers and reductions, nor those of torch.distributed.checkpoint",
    ),
    Metric(
        "comm/bytes",
        "bytes",
        "what rank 0 gave to those collectives: the whole of what is reduced, exchanged or broadcast, its piece of "
        "what is gathered",
    ),
    Metric("sync/num_unshards", "unshards", "pending all-gathers the guard saw within the step (off: none installed)"),
    Metric("sync/num_barriers", "barriers", "host waits of the guard within the step"),
    Metric("eval/<row>/perplexity", "", "exp of the mean next-token loss on held-out windows", "min"),
    Metric("eval/<row>/kl", "nats", "mean KL divergence from the float model's distribution", "min"),
    Metric("eval/<row>/top1_agreement", "", "share of tokens whose most likely token is the float model's", "max"),
    Metric("eval/loss", "nats", "mean next-token loss on held-out windows, every evaluation.every steps", "min"),
    Metric("eval/invariance", "", "relative logit error of the prepared float model", "max"),
)


@cache
def find_metric(key: str) -> Metric | None:
    """Return the definition of a logged series, None if there is none."""
    patterns = ((metric, re.sub(r"<\w+>", r"\\w+", metric.name)) for metric in METRICS)
    return next((metric for metric, pattern in patterns if re.fullmatch(pattern, key)), None)


def check_keys(keys: Iterable[str]) -> None:
    """Raise KeyError for a metric that is not defined here."""
    unknown = [key for key in keys if find_metric(key) is None]
    if unknown:
        raise KeyError(f"metrics {unknown} are not defined in rotexp.metrics.keys")
