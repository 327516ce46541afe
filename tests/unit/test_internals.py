"""A torch whose private parts are others than rotexp stands on is refused at start-up, in one line, by what differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from rotexp.config.schema import Config
from rotexp.experiment import inputs
from rotexp.experiment.evaluation_request import AS_IT_COMES
from rotexp.launch.start import check_machine, start
from rotexp.sharding.fsdp_internals import ALLOWED_TORCH, DIVISION, GUARD, Internals
from rotexp.sharding.guard import install, installed
from rotexp.sharding.options import ShardingConfig, SyncConfig, SyncMode
from rotexp.sharding.strategies import STRATEGIES

TORCH = "2.13, which is tested"


def takes_a_stream(_self: Any, stream: Any) -> None: ...
def takes_an_option(_self: Any, stream: Any = None, *more: Any, **options: Any) -> None: ...
def takes_nothing() -> None: ...


def request(*, sync_mode: SyncMode = SyncMode.off, strategy: str = "no_shard") -> Config:
    return replace(AS_IT_COMES, sync_mode=SyncConfig(sync_mode), sharding=ShardingConfig(strategy))


def refusal(config: Config) -> str:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        check_machine(config)
    return str(caught.value)


def test_the_installed_torch_has_what_is_needed() -> None:
    assert [need.faults() for need in (*GUARD, *DIVISION)] == [[]] * len((*GUARD, *DIVISION))


@pytest.mark.parametrize("mode", [mode for mode in SyncMode if mode is not SyncMode.off])
@pytest.mark.parametrize("method", ["wait_for_unshard", "reshard"])
@pytest.mark.parametrize("changed", [takes_a_stream, takes_an_option, takes_nothing])
def test_what_the_guard_wraps_must_take_nothing_more(
    monkeypatch: pytest.MonkeyPatch, changed: Callable[..., None], method: str, mode: SyncMode
) -> None:
    """The wrapper hands on nothing else, so that even an option would be lost, or refused when torch gives it."""
    monkeypatch.setattr(FSDPParamGroup, method, changed)
    found = refusal(request(sync_mode=mode))
    assert found.startswith(f"sync_mode={mode.name}: torch {torch.__version__} has FSDPParamGroup.{method}(")
    assert found.endswith(f", not {method}(self); use sync_mode=off, or torch {TORCH}")
    check_machine(request(sync_mode=SyncMode.off, strategy="zero2_master"))


@pytest.mark.parametrize(
    "strategy", [name for name, strategy in STRATEGIES.items() if not strategy.keeps_weights_whole]
)
@pytest.mark.parametrize(
    ("owner", "method"),
    [(FSDPParamGroup, "_init_mp_dtypes"), (FSDPParam, "_init_extensions"), (FSDPModule, "_get_fsdp_state")],
)
def test_what_sharding_calls_must_go_without_arguments(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, strategy: str
) -> None:
    monkeypatch.setattr(owner, method, takes_an_option)
    check_machine(request(strategy=strategy))
    monkeypatch.setattr(owner, method, takes_a_stream)
    found = refusal(request(strategy=strategy))
    has = f"torch {torch.__version__} has {owner.__name__}.{method}(_self: Any, stream: Any), not {method}(self)"
    assert found == f"sharding={strategy}: {has}; use sharding=no_shard, or torch {TORCH}".replace("Any", "'Any'")
    monkeypatch.delattr(owner, method)
    assert f" has no {owner.__name__}.{method}; " in refusal(request(strategy=strategy))
    check_machine(request())


def test_a_missing_method_of_the_guards_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPParamGroup, "wait_for_unshard")
    has = f"torch {torch.__version__} has no FSDPParamGroup.wait_for_unshard"
    assert refusal(request(sync_mode=SyncMode.event)) == (
        f"sync_mode=event: {has}; use sync_mode=off, or torch {TORCH}"
    )


class Owner:
    """Has attributes of every kind."""

    declared: int
    known = 1

    def __init__(self) -> None:
        self.given = self.known
        self.annotated: int = 2

    def later(self) -> None:
        self.late = self.unset  # type: ignore[attr-defined]


class Heir(Owner):
    """Inherits them."""


def test_attributes_are_found_wherever_a_class_gets_them_and_reading_gives_none() -> None:
    fields = ("declared", "known", "given", "annotated", "late", "later")
    assert Internals(Heir, called=("later",), fields=fields).faults() == []
    assert Internals(Heir, fields=("given", "unset")).faults() == ["has no Heir.unset"]


@pytest.mark.parametrize("need", [*GUARD, *DIVISION], ids=lambda need: need.owner.__name__)
def test_a_field_that_torch_renames_is_missed(need: Internals) -> None:
    renamed = replace(need, fields=(*need.fields, "renamed"))
    assert renamed.faults() == [f"has no {need.owner.__name__}.renamed"]


def test_a_run_is_refused_before_its_model_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(FSDPParamGroup, "wait_for_unshard", takes_a_stream)
    monkeypatch.setattr(inputs, "open_inputs", lambda *_args, **_options: pytest.fail("the model was opened"))
    with pytest.raises(ValueError, match=r"^sync_mode=selective: torch .* has FSDPParamGroup\.wait_for_unshard"):
        start(request(sync_mode=SyncMode.selective), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_guard_is_not_installed_on_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FSDPParamGroup, "reshard", takes_a_stream)
    with pytest.raises(RuntimeError, match=r"^sync_mode=event: .*FSDPParamGroup\.reshard"):
        install(torch.nn.Linear(2, 2), SyncConfig(SyncMode.event))
    assert installed() is None


def test_the_allowed_versions_are_those_of_the_package() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    lowest, upper = (".".join(map(str, version)) for version in ALLOWED_TORCH)
    assert f'"torch>={lowest},<{upper}"' in text
