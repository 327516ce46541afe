"""Sessions of one run add up: seconds are summed, of peaks the highest counts, and the lowest of the lowest."""

from __future__ import annotations

import pytest
import torch

from rotexp.sharding.communication import Communication
from rotexp.tracking import phases
from rotexp.tracking.phases import PhaseError, Phases


def of_peaks(monkeypatch: pytest.MonkeyPatch, gib: float, before: dict | None = None) -> Phases:
    monkeypatch.setattr(phases, "peaks", lambda _device: {"peak_rss_gib": gib})
    device = torch.device("cpu")
    return Phases(device=device, communication=Communication(), log=lambda _row: None, before=before)


def test_a_later_session_adds_its_seconds_and_raises_peaks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first = of_peaks(monkeypatch, 3.0)
    with first("train"):
        so_far = first.so_far()  # as a checkpoint in the middle of the phase keeps it
    assert so_far["memory"] == {"train": {"peak_rss_gib_max": 3.0, "peak_rss_gib_min": 3.0}}

    later = of_peaks(monkeypatch, 1.0, so_far | {"seconds": {"load": 7.0, "train": 100.0}})
    with later("load"):
        pass
    with later("train"):
        pass
    assert later.memory["train"] == {"peak_rss_gib_max": 3.0, "peak_rss_gib_min": 1.0}
    assert later.memory["load"] == {"peak_rss_gib_max": 1.0, "peak_rss_gib_min": 1.0}
    assert 100.0 < later.seconds["train"] < 101.0
    assert 7.0 < later.seconds["load"] < 8.0


def test_a_failure_carries_the_name_of_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PhaseError, match="phase merge: KeyError: 'x'"), of_peaks(monkeypatch, 1.0)("merge"):
        raise KeyError("x")


def test_an_exit_in_a_phase_is_a_failure_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PhaseError, match="phase train: SystemExit: 0"), of_peaks(monkeypatch, 1.0)("train"):
        raise SystemExit(0)
