"""The unshard guard sees every pending gather, waits where its mode says, changes no value, and leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks_guard as on_ranks
import torch
from world import run_world

from rotexp.sharding import guard as guards
from rotexp.sharding.options import SyncConfig, SyncMode

RESHARDED = {"forward": 3, "pre_backward": 3}
"""Three layers, gathered for forward and again for backward (recomputation finds them gathered)."""
KEPT = {"forward": 3}
"""Gathered parameters stay until backward."""


MODES = ("universal", "selective", "event", "off")
CASES = [
    (world_size, mode, checkpointed, reshard)
    for world_size, reshards in ((2, (True, False)), (4, (2,)))
    for mode in MODES
    for checkpointed in (False, True)
    for reshard in reshards
]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[dict[str, Any]]]:
    """What every rank counted in every case."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for world_size in (2, 4):
        cases = [case for case in CASES if case[0] == world_size]
        folder = tmp_path_factory.mktemp(f"world{world_size}")
        ranks = run_world(on_ranks.count_all, [case[1:] for case in cases], world_size=world_size, folder=folder)
        found |= {case: [rank[index] for rank in ranks] for index, case in enumerate(cases)}
    return found


@pytest.mark.parametrize("case", [case for case in CASES if case[1] != "off"], ids=str)
def test_counts_and_values(counted: Any, case: tuple[int, str, bool, bool | int]) -> None:
    _, mode, _, reshard = case
    unshards = RESHARDED if reshard else KEPT
    for rank in counted[case]:
        assert rank["unshards"] == unshards
        assert rank["barriers"] == (0 if mode == "event" else sum(unshards.values()))
        assert rank["groups"] == 3
        assert rank["touched"]
        assert rank["restored"]
        _assert_bit_equal(rank["guarded"], rank["plain"])


@pytest.mark.parametrize("case", [case for case in CASES if case[1] == "off"], ids=str)
def test_off_touches_nothing(counted: Any, case: Any) -> None:
    for rank in counted[case]:
        assert not rank["touched"]
        assert rank["groups"] == 0
        _assert_bit_equal(rank["guarded"], rank["plain"])


def _assert_bit_equal(found: list[Any], expected: list[Any]) -> None:
    assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_second_install_merges_and_never_wraps_twice(tmp_path: Path) -> None:
    for rank in run_world(on_ranks.install_twice, world_size=2, folder=tmp_path):
        assert rank["same"]
        assert rank["groups"] == 6
        assert rank["by name"] == {"model": 3, "teacher": 3}
        assert rank["student"] == (RESHARDED, 6)  # forward from the first install, pre_backward from the second
        assert rank["teacher"] == (KEPT, 3)
        assert rank["stranger"] == {}
        assert rank["left"] is None


def test_leaving_a_block_takes_back_what_it_guarded_and_no_more(tmp_path: Path) -> None:
    for rank in run_world(on_ranks.nest, world_size=2, folder=tmp_path):
        assert rank == {
            "alone": 3,
            "both": 6,
            "inner": 6,
            "outer again": 3,
            "inner after its block": 0,
            "groups": (3, {"FSDPNet": 3}),
            "the other, still open": 6,
            "restored": True,
        }


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0", "3.0.0"])
def test_a_torch_that_is_not_allowed_is_refused(version: str) -> None:
    with pytest.raises(RuntimeError, match=f"sync_mode=event: torch {version} is outside the allowed range; use"):
        guards.check_torch(SyncMode.event, version)


def test_an_unsharded_model_has_no_groups() -> None:
    guard = guards.install(torch.nn.Linear(2, 2), SyncConfig(SyncMode.universal))
    assert guard is not None
    try:
        assert guard.num_groups == 0
    finally:
        guard.remove()
    assert guards.installed() is None
