"""The options of tracking: where metrics go beside `metrics.jsonl`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from rotexp.config.components import Pluggable


class TrackerKind(Enum):
    """Where metrics go beside `metrics.jsonl`."""

    wandb = "wandb"
    jsonl = "jsonl"


class WandbMode(Enum):
    """W&B's connection; `auto` is online when a key is present, else offline."""

    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass(frozen=True)
class TrackerConfig(Pluggable):
    """Where metrics go beside `metrics.jsonl`.

    Attributes:
        kind: what rotexp itself does (None: W&B, but nothing beside a tracker that `_target_` names); `wandb` beside
            `_target_` feeds both.
        mode, project, entity, run_name, group, job_type, tags: W&B's.
    """

    kind: TrackerKind | None = None
    mode: WandbMode = WandbMode.auto
    project: str = "rotexp"
    entity: str | None = None
    run_name: str | None = None
    group: str | None = None
    job_type: str = "train"
    tags: list[str] = field(default_factory=list)

    @property
    def mirrors_to_wandb(self) -> bool:
        """Whether a run is mirrored to W&B."""
        chosen = self.kind is TrackerKind.wandb or (self.kind is None and self.target is None)
        return chosen and self.mode is not WandbMode.disabled
