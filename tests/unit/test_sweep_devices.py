"""Jobs that run at once get disjoint shares of the accelerators and of the cores."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from rotexp.config.schema import Config
from rotexp.launch.options import LaunchConfig, LaunchKind
from rotexp.sharding.options import ShardingConfig
from rotexp.sweep.devices import shares, visible_accelerators, with_share_of_threads


@pytest.mark.parametrize(
    ("listed", "seen"),
    [("0,1,2", ["0", "1", "2"]), ("GPU-5f, MIG-7a", ["GPU-5f", "MIG-7a"]), ("", []), ("-1", []), ("3", ["3"])],
)
def test_the_environment_says_what_is_visible(listed: str, seen: list[str]) -> None:
    assert visible_accelerators({"CUDA_VISIBLE_DEVICES": listed}) == seen


def test_without_it_the_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_accelerators({}) == []
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA H100 (UUID: GPU-2)'\n")
    driver.chmod(driver.stat().st_mode | stat.S_IXUSR)
    assert visible_accelerators({}) == ["0", "1"]


def test_shares_are_disjoint_and_of_one_size() -> None:
    assert shares(list("01234567"), jobs_at_once=2) == [tuple("0123"), tuple("4567")]
    assert shares(list("01234"), jobs_at_once=2) == [("0", "1"), ("2", "3")]
    assert shares([], jobs_at_once=3) == [(), (), ()]
    with pytest.raises(ValueError, match=r"sweep\.jobs_at_once=3: must be at most 2, the accelerators of this machine"):
        shares(["0", "1"], jobs_at_once=3)


@pytest.mark.parametrize(
    ("launch", "strategy", "accelerators", "threads"),
    [
        (LaunchConfig(), "no_shard", 0, 8),
        (LaunchConfig(), "full", 0, 4),
        (LaunchConfig(nproc=8), "full", 0, 1),
        (LaunchConfig(nproc=64), "full", 0, 1),
        (LaunchConfig(), "full", 4, 2),
        (LaunchConfig(kind=LaunchKind.inline), "no_shard", 4, 8),
        (LaunchConfig(threads=3), "no_shard", 0, 3),
    ],
)
def test_cores_are_divided_by_the_jobs_and_their_ranks(
    launch: LaunchConfig, strategy: str, accelerators: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    config = Config(launch=launch, sharding=ShardingConfig(strategy))
    divided = with_share_of_threads(config, accelerators=accelerators, jobs_at_once=2)
    assert divided == replace(config, launch=replace(launch, threads=threads))
    assert with_share_of_threads(config, accelerators=accelerators, jobs_at_once=1) is config
