"""A run of two ranks that TensorBoard records, by the example's two files."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_train import run_train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from rotexp.runfolder.records import revived

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins" / "tensorboard"


def test_tensorboard_takes_the_place_of_wandb(small: list[str], tmp_path: Path) -> None:
    own = ["--config-dir", "conf", "plugins=[tensorboard_tracker]", "tracker=tensorboard"]
    run = run_train(tmp_path / "run", *own, *small, "sharding=full", cwd=EXAMPLE)
    assert (run.code, run.errors, run.left_behind) == (0, "", [])
    assert not (run.folder / "wandb").exists()
    (events,) = (run.folder / "tensorboard").iterdir()  # of rank 0 alone
    accumulator = EventAccumulator(str(events), size_guidance={"tensors": 0})
    accumulator.Reload()
    for key in {key for row in run.rows for key in row} - {"step"}:
        shown = [(event.step, float(make_ndarray(event.tensor_proto))) for event in accumulator.Tensors(key)]
        assert shown == [(row["step"], revived(row[key])) for row in run.rows if key in row]
    (config,) = accumulator.Tensors("config/text_summary")
    assert '"_target_": "tensorboard_tracker.TensorBoard"' in make_ndarray(config.tensor_proto)[0].decode()
    (end,) = accumulator.Tensors("summary/text_summary")
    assert '"status": "done"' in make_ndarray(end.tensor_proto)[0].decode()
