"""A configuration may name the user's own parts, where their module was typed, and refuses all else in one line."""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hydra
import pytest
import torch
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rotexp.config.composition import resolved_yaml, to_config, to_plain
from rotexp.config.explanations import explain
from rotexp.config.own_parts import writable
from rotexp.config.plugins import typed_plugins
from rotexp.config.schema import COMPONENTS, Config
from rotexp.config.targets import build
from rotexp.data.options import DataConfig, DataSource
from rotexp.experiment.inputs import read_corpus
from rotexp.launch.command_line import register
from rotexp.optim.options import CayleySGDConfig
from rotexp.rotation.start import drawing
from rotexp.runfolder.finished_run import read_config
from rotexp.training.parts import check_parts
from rotexp.training.schedulers import scheduler_of

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "tests" / "parts"
THEIRS = "plugins=[their_parts]"


@pytest.fixture(autouse=True)
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    register()
    monkeypatch.syspath_prepend(str(PARTS))
    yield
    sys.modules.pop("their_parts", None)


def compose(*overrides: str) -> Config:
    search = f"hydra.searchpath=[file://{PARTS}]"
    with hydra.initialize_config_module("rotexp.conf", version_base="1.3"):
        composed = hydra.compose("config", overrides=[*overrides, search])
    return to_config(composed, typed=typed_plugins(overrides))


def refusal(*overrides: str) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        check_parts(compose(*overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


EVERY = (
    THEIRS,
    "optimizer=heavy_ball",
    "objective=sharpened",
    "data=halves",
    "data.path=text",
    "train/scheduler=trapezoid",
    "rotation/start=householder",
)


def test_parts_are_named_by_files_with_any_fields_and_options_that_are_added() -> None:
    config = compose(*EVERY, "+optimizer.beta=0.5", "data.sequence_length=64")
    assert (config.optimizer.name, config.optimizer.options) == ("HeavyBall", {"lr": 0.05, "beta": 0.5})
    assert (config.objective.name, config.objective.options) == ("sharpened", {"temperature": 0.9})
    assert (config.data.name, config.data.options, config.data.sequence_length) == ("Halves", {"path": "text"}, 64)
    assert (config.train.scheduler.target, config.rotation.start.options) == ("their_parts.Trapezoid", {"scale": 1.0})
    check_parts(config)
    assert build(config.objective).temperature == 0.9


def test_a_resolved_configuration_repeats_them_where_they_are_granted_again(tmp_path: Path) -> None:
    config = compose(*EVERY)
    text = resolved_yaml(config)
    assert "plugins" not in text
    values = OmegaConf.create({key: value for key, value in yaml.safe_load(text).items() if key != "defaults"})
    again = to_config(OmegaConf.merge(writable(Config), values), typed=["their_parts"])  # type: ignore[arg-type]
    assert again == config
    file = tmp_path / "config.resolved.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"^run=R: names a part of your own \(.*type plugins=\[their_parts\]"
    ) as caught:
        read_config(tmp_path, "run=R")
    assert "restore" not in str(caught.value)
    file.write_text(f"{text}plugins: [their_parts]\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"plugins=\[their_parts\]: is named by a file"):
        read_config(tmp_path, "run=R")


TARGET = "optimizer._target_="
REFUSED = [
    ([THEIRS.replace("their", "no")], "plugins=[no_parts]: there is no module no_parts; install its package, or start"),
    (["plugins=[rotexp.models]"], "plugins=[rotexp.models]: is no module of your own"),
    (["plugins=['../x']"], "plugins=[../x]: is no module of your own"),
    (["optimizer=heavy_ball"], f"{TARGET}their_parts.HeavyBall: must be a class of rotexp.optim, or"),
    (["experiment=granting", "optimizer=heavy_ball"], "plugins=[their_parts]: is named by a file"),
    ([f"{TARGET}their_parts.function"], f"{TARGET}their_parts.function: must be a class that their_parts itself"),
    ([f"{TARGET}their_parts.CayleySGD"], f"{TARGET}their_parts.CayleySGD: must be a class that their_parts itself"),
    ([f"{TARGET}their_parts.os.system"], f"{TARGET}their_parts.os.system: there is no module their_parts.os; name a"),
    ([f"{TARGET}their_parts.Nothing"], f"{TARGET}their_parts.Nothing: must be a class that their_parts itself"),
    ([f"{TARGET}their_parts_too.Some"], f"{TARGET}their_parts_too.Some: must be a class of rotexp.optim, or"),
    ([f"{TARGET}rotexp.models.load.open_checkpoint"], f"{TARGET}rotexp.models.load.open_checkpoint: must be a class"),
    ([f"{TARGET}''"], f"{TARGET}: must be a class of rotexp.optim, or"),
    (["+optimizer.lrr=1"], "optimizer.lrr: is no option of their_parts.HeavyBall; choose one of lr, beta, nesterov"),
    (["+optimizer.params=1"], "optimizer.params: is no option of their_parts.HeavyBall"),
    (["optimizer.lr=fast"], "optimizer.lr=fast: must be a number; change it or leave it out"),
    (["+optimizer.nesterov=1"], "optimizer.nesterov=1: must be true or false"),
    (
        ["++optimizer={_target_:their_parts.Needing}", "~optimizer.lr"],
        "optimizer.beta: has no value, which their_parts.",
    ),
    (["data=halves"], "data.path: has no value"),
    ([f"{TARGET}their_parts.NoProject"], "has no project, which rotexp.optim.protocol.ManifoldOptimizer asks for"),
    (
        [f"{TARGET}their_parts.Raising"],
        "their_parts.Raising: cannot be made of its options (KeyError: 'shape')",
    ),
    ([f"{TARGET}their_parts.Listing"], "its initial_state holds history, a list; a checkpoint holds tensors"),
    ([f"{TARGET}their_parts.NoOptimizer"], "does not derive from torch.optim.Optimizer"),
    ([f"{TARGET}their_parts.Sharpened", "~optimizer.lr"], "has no param_groups, which rotexp.optim.protocol"),
    (["train.scheduler={_target_:their_parts.Sharpened}"], "Sharpened: has no step, which rotexp.training."),
    (["train.scheduler={_target_:their_parts.Stairs}"], "train.scheduler.step_size: has no value, which their_parts."),
    (
        ["train.scheduler={_target_:their_parts.Trapezoid,num_warmup_steps:3}"],
        "train.scheduler.num_warmup_steps: is no option of their_parts.Trapezoid; choose one of decay",
    ),
]


@pytest.mark.parametrize(("overrides", "line"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_used_is_refused_in_one_line(overrides: list[str], line: str) -> None:
    whole = overrides[0].startswith(("plugins", "experiment", "optimizer=heavy_ball"))
    given = overrides if whole else [THEIRS, "optimizer=heavy_ball", *overrides]
    assert line in refusal(*given)


@pytest.mark.parametrize(
    ("plugin", "chosen", "shares"),
    [
        ("their_parts", "{_target_:their_parts.Trapezoid,decay:0.4}", [0.5, 1.0, 1.0, 1.0, 0.5]),
        ("their_parts", "{_target_:their_parts.Stairs,step_size:2,gamma:0.5}", [1.0, 1.0, 0.5, 0.5, 0.25]),
        ("torch", "{_target_:torch.optim.lr_scheduler.StepLR,step_size:2,gamma:0.5}", [1.0, 1.0, 0.5, 0.5, 0.25]),
    ],
)
def test_a_scheduler_is_given_the_numbers_of_steps_by_name_where_it_takes_them(
    plugin: str, chosen: str, shares: list[float]
) -> None:
    config = compose(f"plugins=[{plugin}]", f"train.scheduler={chosen}", "train.steps=5", "train.warmup_steps=1")
    check_parts(config)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    scheduler, rates = scheduler_of(optimizer, config.train), []
    for _ in shares:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == shares


@pytest.mark.parametrize("group", ["model", "ema", "adamw", "launch"])
def test_groups_without_parts_have_no_target(group: str) -> None:
    with pytest.raises(ValueError, match=f"{group}._target_: no such key"):
        compose(THEIRS, f"++{group}._target_=their_parts.HeavyBall")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "raise RuntimeError('no\\nlicense')",
            "broken raised RuntimeError while it was imported (no license); correct",
        ),
        ("raise SystemExit(3)", "broken raised SystemExit while it was imported (3); correct it"),
        ("import not_there", "broken imports not_there, which is not installed; install it"),
        ("def f(:", "broken raised SyntaxError while it was imported"),
    ],
)
def test_a_plugin_that_raises_while_it_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: str
) -> None:
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert refusal("plugins=[broken]").startswith(f"plugins=[broken]: {line}")


def test_an_installed_package_grants_itself_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(PARTS / "their_parts.py", tmp_path / "granted.py")
    overrides = [f"{TARGET}granted.HeavyBall", "optimizer=heavy_ball"]
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "type plugins=[granted]" in refusal(*overrides)
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rotexp.plugins]\nparts = granted\n")
    assert compose(*overrides).optimizer.target == "granted.HeavyBall"


def test_a_part_of_ours_is_typed_and_validated_whichever_file_names_it() -> None:
    assert compose("optimizer=ours").optimizer == CayleySGDConfig(lr=0.2)
    assert refusal("optimizer=ours", "optimizer.lr=4").startswith("optimizer.lr=4.0 is not a number in (0, 3.142)")
    assert refusal("optimizer=ours", "++optimizer.lrr=4") == "optimizer.lrr: no such key; remove it"
    with pytest.raises(OmegaConfBaseException) as caught:
        compose("optimizer=ours", "++optimizer.step_rule=none")
    assert explain(caught.value) == "optimizer.step_rule: must be one of paper, angle; change it or leave it out"


@pytest.mark.parametrize("group", COMPONENTS)
def test_parts_of_before_are_read_by_the_names_they_had(group: str, tmp_path: Path) -> None:
    """A resolved configuration of before begins by a schema of each of these groups, and has these targets."""
    text = yaml.safe_load(resolved_yaml(compose()))
    for name, part in COMPONENTS[group].items():
        defaults = ["hydra_settings", "schema", {f"schema/{group}@{group}": name}, "_self_"]
        values = {"name": name, "_target_": part._target_}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(text | {"defaults": defaults, group: values}))
        with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
            composed = hydra.compose(name, overrides=["hydra.searchpath=[pkg://rotexp.conf]"])
        assert getattr(to_config(composed, typed=()), group) == part
    targets = {part._target_ for part in COMPONENTS["objective"].values()}
    assert targets == {
        f"rotexp.training.objectives.{name}" for name in ("CrossEntropy", "KLDivergence", "TopKKLDivergence")
    }


def test_a_start_that_is_not_orthogonal_is_refused() -> None:
    rotation = compose(*EVERY).rotation
    exact = drawing(rotation, seed=3)("R1", (6, 6))
    assert (exact.dtype, exact.shape) == (torch.float32, (6, 6))
    doubled = replace(rotation, start=replace(rotation.start, options={"scale": 2.0}))
    with pytest.raises(
        ValueError, match=r"^rotation.start._target_=their_parts.Householder: what it draws for R1 is 3.0e\+00"
    ):
        drawing(doubled, seed=3)("R1", (6, 6))


def test_a_source_of_ones_own_is_cut_digested_and_compared(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("one two three four. " * 10 + "five six seven eight. " * 9 + "and the end")
    data = compose(*EVERY, f"data.path={file}", "data.max_characters=50").data
    corpus, said = read_corpus(data)
    assert (len(corpus.calibration), len(corpus.evaluation)) == (50, 50)
    assert len(said) == 2
    file.write_text("same. " * 10)
    with pytest.raises(
        ValueError, match=r"^data._target_=their_parts.Halves: evaluation: holds the same text as calibration"
    ):
        read_corpus(data)
    file.write_text("")
    with pytest.raises(ValueError, match=r"the calibration text that read\(\) returned is empty"):
        read_corpus(data)
    file.unlink()
    with pytest.raises(ValueError, match=r"^data._target_=their_parts.Halves: cannot read its texts \(.*No such file"):
        read_corpus(data)
    with pytest.raises(ValueError, match=r"^data.source=builtin: must be null where data._target_ reads"):
        compose(*EVERY, "data.source=builtin")
    with pytest.raises(ValueError, match=r"^data.source=null: "):
        replace(DataConfig("builtin", DataSource.builtin), source=None).validate()


def test_plain_values_are_those_of_the_file() -> None:
    plain = to_plain(compose(*EVERY))
    assert plain["optimizer"] == {"name": "HeavyBall", "_target_": "their_parts.HeavyBall", "lr": 0.05}
    assert plain["rotation"]["start"] == {"name": "Householder", "_target_": "their_parts.Householder", "scale": 1.0}
    assert (plain["data"]["_target_"], plain["data"]["path"]) == ("their_parts.Halves", "text")


@pytest.mark.parametrize(("group", "room"), [("objective", "training/objectives"), ("optimizer", "optim")])
def test_parts_of_ours_are_named_in_their_room_and_their_yaml_alone(group: str, room: str) -> None:
    """But for the dataclass of options that a part may have, and which it then names itself."""
    folder = ROOT / "rotexp" / room
    named = {name for part in COMPONENTS[group].values() for name in [part._target_.rpartition(".")[2]]}
    defined = {
        node.name
        for file in folder.glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
        and {"__call__", "step"} & {getattr(member, "name", "") for member in node.body}
    }
    assert named == defined - {"Objective", "ManifoldOptimizer"}
    for file in (ROOT / "rotexp").rglob("*.py"):
        words = {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}
        assert folder in file.parents or not words & named, file
