"""Makes folders of runs as rotexp leaves them, with figures that tests choose."""

import json
from pathlib import Path
from typing import Any

import yaml

CONFIG: dict[str, Any] = {
    "defaults": ["schema", "_self_"],
    "seed": 0,
    "model": {"name": "tiny", "path": None},
    "quant": {"name": "w4a4", "weights": {"bits": 4}},
    "rotation": {"name": "learned", "learned": True},
    "optimizer": {"lr": 0.1, "name": "cayley_sgd", "_target_": "rotexp.optim.cayley_sgd.CayleySGD"},
    "train": {"steps": 4},
    "sharding": {"strategy": "no_shard", "min_shard_size": 0},
    "tracker": {"kind": "jsonl", "run_name": None},
}
PROTOCOL = {"text_digest": "a825d4bc", "window": 256, "stride": 256, "windows": 4}


def configuration(**changes: Any) -> dict[str, Any]:
    """The configuration with dotted keys changed (`__` for the dot)."""
    config = json.loads(json.dumps(CONFIG))
    for key, value in changes.items():
        *groups, name = key.split("__")
        place = config
        for group in groups:
            place = place[group]
        place[name] = value
    return config


def step_row(step: int, *, loss: Any = 2.5, **changes: Any) -> dict[str, Any]:
    row = {"step": step, "train/loss": loss, "train/tokens": 2048 * step, "time/step_s": 0.5, "grad_norm/total": 1.0}
    row |= {
        "memory/peak_rss_gib_max": 1.0 + step / 8,
        "memory/peak_rss_gib_min": 1.0,
        "throughput/tokens_per_s": 4096.0,
    }
    row |= {"replica/max_abs_diff": 0.0, "rotation/orthogonality_rrt_max": 1e-7 * step}
    return row | changes


def phase_rows(step: int = 0) -> list[dict[str, Any]]:
    load = {
        "step": step,
        "time/load_s": 0.25,
        "memory/load/peak_rss_gib_max": 0.75,
        "memory/load/peak_rss_gib_min": 0.5,
    }
    return [load, {"step": step, "eval/float/perplexity": 26.0, "eval/float/kl": 0.0}]


def summary(*, perplexity: Any = 30.0, world_size: int = 2, **changes: Any) -> dict[str, Any]:
    return {
        "status": "done",
        "error": None,
        "world_size": world_size,
        "train": {"steps": 4, "loss_start": 2.5, "loss_end": 2.5, "seconds": 2.0},
        "evaluation": {
            "protocol": PROTOCOL,
            "float": {"perplexity": 26.0, "kl": 0.0, "top1_agreement": 1.0},
            "trained": {"perplexity": perplexity, "kl": 0.2, "top1_agreement": 0.7},
        },
        "memory": {"load": {"peak_rss_gib_max": 0.75, "peak_rss_gib_min": 0.5}},
        "throughput": {"tokens_per_s": 4096.0},
        "replica": {"max_abs_diff": 0.0},
        "rotation": {"orthogonality_rrt_max": 4e-7},
    } | changes


def make_run(
    folder: Path, *, end: dict[str, Any] | None = None, rows: list[dict[str, Any]] | None = None, **changes: Any
) -> Path:
    """Write a run: `end` is its summary, `rows` its metrics (None: of four steps that went well)."""
    folder.mkdir(parents=True)
    steps = [step_row(step) for step in range(1, 5)]
    train = {"step": 4, "time/train_s": 2.0, "memory/train/peak_rss_gib_max": 1.5, "memory/train/peak_rss_gib_min": 1.0}
    rows = [*phase_rows(), *steps, train] if rows is None else rows
    (folder / "config.resolved.yaml").write_text(yaml.safe_dump(configuration(**changes)), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary() if end is None else end), encoding="utf-8")
    return folder
