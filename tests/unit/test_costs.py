"""What it costs to add a part to rotexp itself: one file and one YAML, and nothing else in the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

COMPOSE = """
import sys, hydra
from pathlib import Path
from rotexp.launch.command_line import register
from rotexp.config.composition import to_config, to_plain
register()
with hydra.initialize_config_module("rotexp.conf", version_base="1.3"):
    config = to_config(hydra.compose("config", overrides=sys.argv[1:]), typed=())
"""


@dataclass(frozen=True)
class Part:
    """A part that rotexp does not have, and what shows that it works; `wrong` is refused with `refusal`."""

    file: str
    code: str
    yaml: str
    described: str
    override: str
    shows: str
    found: str
    wrong: str
    refusal: str


OBJECTIVE = Part(
    file="training/objectives/squared.py",
    code='''"""A new objective."""
from typing import Any, ClassVar

class Squared:
    """Square of the mean logit."""
    distills: ClassVar[bool] = False
    def __init__(self, weight: float = 2.0) -> None:
        self.weight = weight
    def __call__(self, model: Any, token_ids: Any, *, teacher: Any = None) -> Any:
        return self.weight * model.logits(token_ids).mean().square()
''',
    yaml="objective/squared.yaml",
    described="name: squared\n_target_: rotexp.training.objectives.squared.Squared\nweight: 3.0\n",
    override="objective=squared",
    shows="from rotexp.training.parts import check_parts; check_parts(config); print(config.objective.options)",
    found="{'weight': 3.0}",
    wrong="objective.weight=low",
    refusal="objective.weight=low: must be a number",
)

TRACKER = Part(
    file="tracking/paper.py",
    code='''"""A new tracker."""
class Paper:
    def __init__(self, run, *, width: int):
        self.file = (run.folder / "paper.txt").open("w")
    def log(self, row, *, step):
        print(step, row, file=self.file)
    def finish(self, summary, *, exit_code):
        self.file.close()
''',
    yaml="tracker/paper.yaml",
    described="_target_: rotexp.tracking.paper.Paper\nwidth: 80\n",
    override="tracker=paper",
    shows="""
from rotexp.tracking.recording import check_own_tracker, open_trackers
from rotexp.tracking.tracker import TrackedRun
check_own_tracker(config.tracker)
trackers = open_trackers(config.tracker, TrackedRun(Path.cwd(), to_plain(config)), rank=0)
trackers.log({"train/loss": 1.0}, step=1)
trackers.finish({"status": "done"}, exit_code=0)
print(Path("paper.txt").read_text())
""",
    found="1 {'train/loss': 1.0}",
    wrong="tracker.width=wide",
    refusal="tracker.width=wide: must be a whole number",
)

STRATEGY = Part(
    file="sharding/pairs.py",
    code='''"""A new strategy."""
from rotexp.sharding.strategies import Sharding

class Pairs(Sharding):
    minimum_world = 4
    def __init__(self, size: int = 2) -> None:
        self.size = size
    def mesh(self, sharding, *, world_size, ranks_per_node):
        return world_size // self.size, self.size
''',
    yaml="sharding/pairs.yaml",
    described="_target_: rotexp.sharding.pairs.Pairs\nsize: 2\n",
    override="sharding=pairs",
    shows="""
from rotexp.launch.start import choose_world_size
from rotexp.sharding.strategies import mesh_sizes
print(choose_world_size(config), mesh_sizes(config.sharding, world_size=8))
""",
    found="4 (4, 2)",
    wrong="sharding.size=two",
    refusal="sharding.size=two: must be a whole number",
)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the package, as it is installed."""
    folder = tmp_path_factory.mktemp("copied")
    skipped = shutil.ignore_patterns("__pycache__", "weights")
    shutil.copytree(ROOT / "rotexp", folder / "rotexp", ignore=skipped)
    shutil.copytree(ROOT / "conf", folder / "rotexp" / "conf", ignore=skipped)
    return folder


@pytest.mark.parametrize("part", [OBJECTIVE, TRACKER, STRATEGY], ids=lambda part: part.override)
def test_a_part_of_rotexps_costs_one_file_and_one_yaml(part: Part, copied: Path) -> None:
    (copied / "rotexp" / part.file).write_text(part.code)
    (copied / "rotexp" / "conf" / part.yaml).write_text(part.described)
    environment = os.environ | {"PYTHONPATH": str(copied), "CUDA_VISIBLE_DEVICES": ""}
    for overrides, expected in (([part.override], part.found), ([part.override, part.wrong], part.refusal)):
        ended = subprocess.run(
            [sys.executable, "-c", COMPOSE + part.shows, *overrides],
            check=False,
            capture_output=True,
            text=True,
            env=environment,
            cwd=copied,
            timeout=200,
        )
        assert expected in ended.stdout + ended.stderr
