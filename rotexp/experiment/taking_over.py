"""What a run takes over from the checkpoint at which it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rotexp.config.composition import differences, to_plain
from rotexp.config.schema import RECORDING, Config
from rotexp.experiment.beginning import Beginning
from rotexp.runfolder.checkpoint_folders import FACTS, read_facts
from rotexp.runfolder.records import revived
from rotexp.sharding.communication import Communication
from rotexp.training.options import Numerics
from rotexp.training.saved_state import load, restore_random_states
from rotexp.training.state import TrainingState

MEASURED_BY = ("seed", "model", "data", "quant", "rotation", "evaluation", "sharding", "numerics")
"""Groups of the configuration on which the figures of the untrained model depend."""
MEASURES_ALIKE = {"evaluation.every", "evaluation.share_rows"}
"""Keys of these groups that change no figure."""
LOSS_OF = ("data", "quant", "rotation", "objective")
"""Groups on which a loss depends, so that one under others says nothing about which is the best."""
MAY_DIFFER = (*RECORDING, "launch.", "profile")
"""Beginnings of keys that may differ unsaid."""


class TakenOver:
    """What a run takes over: of its own checkpoint everything, of another run's what was trained, or nothing.

    Attributes:
        beginning: the checkpoint, if there is one.
        step: the step after which the run begins.
        run_ids: what its trackers called the run, if it is the run's own checkpoint.
        evaluation: figures of the untrained model that need not be measured again.
        shared_rows: from which jobs of the sweep some of them were taken over before.
        phases: seconds and memory of the run's phases so far.
        step_seconds: how long a step took.
    """

    def __init__(self, beginning: Beginning, config: Config, *, protocol: Mapping[str, Any]) -> None:
        self.beginning = beginning
        self.step = 0
        self.run_ids: dict[str, str] = {}
        self.evaluation: dict[str, Any] = {}
        self.shared_rows: dict[str, str] = {}
        self.phases: dict[str, Any] | None = None
        self.step_seconds: float | None = None
        self._config = to_plain(config)
        self._protocol = protocol
        if beginning.path is None:
            return
        try:
            self._read(beginning.path)
        except (KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{beginning.path / FACTS}: is not that of a run ({reason}); remove its folder") from None

    def _read(self, path: Path) -> None:
        """Take over what the checkpoint says of its run."""
        saved = read_facts(path)
        facts = saved["facts"]  # texts of the configuration may read `inf` and mean it
        self._saved: dict[str, Any] = facts | {key: revived(facts[key]) for key in ("state", "evaluation", "phases")}
        self._world_size: int = saved["world_size"]
        self.step = saved["step"]
        if self.beginning.own:
            self.phases = self._saved["phases"]
            self.step_seconds = self._saved["state"]["seconds"] / max(self.step, 1)
            self.run_ids = _run_ids(self._saved["tracker"])
            if self._same(MEASURED_BY) and self._saved["evaluation"]["protocol"] == self._protocol:
                self.evaluation = dict(self._saved["evaluation"])
                self.shared_rows = facts.get("shared_rows", {})
                if not self._config["evaluation"]["share_rows"]:
                    self._forget_shared_rows()

    def _forget_shared_rows(self) -> None:
        """Let the rows that another run had measured be measured again."""
        for row in self.shared_rows:
            del self.evaluation[row]
        self.shared_rows = {}

    def load(self, state: TrainingState, *, base: str, communication: Communication) -> list[str]:
        """Read the checkpoint into a state; return what people should know.

        Args:
            base: the digest of the weights that were read.

        Raises:
            ValueError: the checkpoint is of other weights, holds other tensors, or cannot be read; all ranks alike.
        """
        notes, path = list(self.beginning.notes), self.beginning.path
        if path is None:
            return notes
        if self._saved["base"]["digest"] != base:
            model = self._saved["base"]["model"]
            raise ValueError(f"resume={path}: was trained on other weights ({model}); name a checkpoint of this model")
        try:
            state.prepare_to_load(self._saved["state"])
        except ValueError as error:
            raise ValueError(f"resume={path}: {error}") from None
        load(path, state.tensors(), communication=communication)
        state.loaded(self._saved["state"])
        if not self._compares_with_best():
            state.result.best = None
        notes.append(f"resumed from {path} after step {self.step}")
        differing = differences(self._saved["config"], self._config)
        exact = self._config["numerics"]["mode"] == Numerics.exact.name
        unsaid = [key for key in differing if key.startswith(MAY_DIFFER) and not (exact and key == "launch.threads")]
        if changed := [f"{key}={value}" for key, value in differing.items() if key not in unsaid]:
            notes.append(f"the checkpoint was written with {', '.join(changed)}")
        if not restore_random_states(path, communication=communication):
            notes.append(
                f"random states are not carried from {self._world_size} to {communication.world_size} ranks; weights, "
                "rotations, averages and the order of the data are"
            )
        return notes

    def _compares_with_best(self) -> bool:
        """Return whether losses to come compare with the best one so far."""
        return self._same(LOSS_OF) and self._saved["evaluation"]["protocol"] == self._protocol

    def _same(self, groups: Sequence[str]) -> bool:
        """Return whether the checkpoint has the present configuration in some groups, but for `MEASURES_ALIKE`."""
        changed = differences(self._saved["config"], self._config).keys() - MEASURES_ALIKE
        return not any(key.partition(".")[0] in groups for key in changed)


def _run_ids(saved: Mapping[str, Any]) -> dict[str, str]:
    """Return the ids a checkpoint keeps; earlier ones kept W&B's alone."""
    if "run_ids" in saved:
        return dict(saved["run_ids"])
    return {} if saved["run_id"] is None else {"wandb": saved["run_id"]}
