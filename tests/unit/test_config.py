"""The configuration: every option composes, every rule refuses in one line, a resolved file repeats the run."""

import dataclasses
import importlib
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import pytest
import rotexp.conf
import yaml
from omegaconf import DictConfig, OmegaConf

from rotexp.config.components import Component
from rotexp.config.composition import UnknownKeyError, config_digest, resolved_yaml, to_config, to_plain
from rotexp.config.schema import COMPONENTS, Config
from rotexp.config.targets import build, check_target
from rotexp.config.validation import validate, validate_world
from rotexp.launch.command_line import register
from rotexp.optim.options import Solver, StepRule
from rotexp.sharding.options import Dtype, SyncMode
from rotexp.training.objectives import CrossEntropy, TopKKLDivergence

CONF = Path(rotexp.conf.__path__[0])
OPTIONS = sorted(f"{file.parent.name}={file.stem}" for file in CONF.glob("*/*.yaml"))
TEXT_FILES = ["data.calibration=a.txt", "data.evaluation=b.txt"]
NEEDS = {
    "model=hf": ["model.path=somewhere"],
    "data=text": TEXT_FILES,
    "experiment=smollm2_135m_w4a4": TEXT_FILES,
    "quant=none": ["rotation=hadamard"],
}
"""What must be given beside an option."""

PROMISED = {
    "model": {"tiny", "smollm2_135m", "smollm2_135m_gguf", "hf", "random_llama"},
    "data": {"builtin", "wikitext2", "text"},
    "quant": {"w4a4", "w4a4kv4", "w4a8", "w8a8", "w16a4", "none"},
    "rotation": {"none", "hadamard", "random", "learned", "learned_r4"},
    "optimizer": {"cayley_sgd"},
    "objective": {"ce", "kl", "kl_topk"},
    "sharding": {"no_shard", "full"},
    "sync_mode": {"off"},
    "launch": {"auto", "inline", "elastic"},
    "tracker": {"wandb", "jsonl"},
}


@pytest.fixture(scope="module", autouse=True)
def schema() -> None:
    register()


def compose(*overrides: str) -> Config:
    """Compose as the command line does."""
    with hydra.initialize_config_module("rotexp.conf", version_base="1.3"):
        return to_config(hydra.compose("config", overrides=list(overrides)))


def compose_file(file: Path, *overrides: str) -> Config:
    """Compose a config of the user's own, as `--config-dir` and `--config-name` do."""
    with hydra.initialize_config_dir(str(file.parent), version_base="1.3"):
        search = "hydra.searchpath=[pkg://rotexp.conf]"
        return to_config(hydra.compose(file.stem, overrides=[*overrides, search]))


@cache
def composed(*options: str) -> DictConfig:
    with hydra.initialize_config_module("rotexp.conf", version_base="1.3"):
        return hydra.compose("config", overrides=list(options))


def quickly(*overrides: str) -> Config:
    """Like `compose`, but options are composed once, and values merged into a copy of that."""
    options = [override for override in overrides if "." not in override.partition("=")[0]]
    chosen = [option for option in options if not option.startswith("seed=")]
    values = [override for override in overrides if override not in chosen]
    merged = OmegaConf.merge(composed(*chosen), OmegaConf.from_dotlist(values))
    assert isinstance(merged, DictConfig)
    return to_config(merged)


def refusal(*overrides: str) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        quickly(*overrides)
    return str(caught.value)


@pytest.fixture(scope="module")
def default(schema: None) -> Config:
    return compose()


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_validates_and_has_its_own_name(option: str) -> None:
    config = compose(option, *NEEDS.get(option, []))
    validate(config)
    group, _, name = option.partition("=")
    if group in ("model", "data", "quant", "rotation", "optimizer", "objective"):
        assert getattr(config, group).name == name


def test_the_promised_groups_and_options_are_there() -> None:
    for group, promised in PROMISED.items():
        assert promised <= {file.stem for file in (CONF / group).glob("*.yaml")}, group


def test_every_option_says_in_its_first_line_what_it_is() -> None:
    assert [str(file) for file in CONF.glob("*/*.yaml") if not file.read_text(encoding="utf-8").startswith("# ")] == []


def test_defaults_are_those_of_the_main_job(default: Config) -> None:
    names = {group: getattr(default, group).name for group in ("model", "data", "quant", "rotation", "optimizer")}
    assert names == {
        "model": "tiny",
        "data": "builtin",
        "quant": "w4a4",
        "rotation": "learned",
        "optimizer": "cayley_sgd",
    }
    assert (default.objective.name, default.seed, default.train.max_grad_norm) == ("ce", 0, 1.0)
    assert (default.sharding.strategy, default.sync_mode.mode) == ("no_shard", SyncMode.off)
    assert (default.optimizer.step_rule, default.optimizer.solver) == (StepRule.angle, Solver.exact)


def test_every_dataclass_is_frozen(default: Config) -> None:
    components = [schema for options in COMPONENTS.values() for schema in options.values()]
    for node in [*dataclass_nodes(default), *components]:
        name = dataclasses.fields(node)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(node, name, None)


def dataclass_nodes(node: Any) -> Iterator[Any]:
    yield node
    for option in dataclasses.fields(node):
        child = getattr(node, option.name)
        if dataclasses.is_dataclass(child):
            yield from dataclass_nodes(child)


def test_an_option_of_a_group_brings_only_its_own_keys() -> None:
    assert compose("objective=kl_topk", "objective.k=5").objective.k == 5
    assert not hasattr(compose("objective=kl").objective, "k")


def test_bare_off_on_the_command_line_is_the_option_and_not_false() -> None:
    assert compose("sync_mode=off").sync_mode.mode is SyncMode.off
    assert compose("sync_mode.mode=off").sync_mode.mode is SyncMode.off


def test_off_is_quoted_wherever_yaml_would_read_false() -> None:
    for file in CONF.rglob("*.yaml"):
        values = flatten(yaml.safe_load(file.read_text(encoding="utf-8")) or {})
        modes = {key: value for key, value in values.items() if "sync_mode" in key or key == "mode"}
        assert not any(isinstance(value, bool) for value in modes.values()), file
    assert "'off'" in resolved_yaml(compose())


def test_text_files_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = compose("data=text", *TEXT_FILES).data
    assert (data.calibration, data.evaluation) == (str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))


def test_a_link_keeps_its_name_and_is_no_other_file(tmp_path: Path) -> None:
    """A hub's cache holds blobs without endings, and links that have the files' names."""
    (tmp_path / "blob").write_text("text")
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).symlink_to(tmp_path / "blob")
    link = str(tmp_path / "a.jsonl")
    assert compose("data=text", f"data.calibration={link}", "data.evaluation=/b").data.calibration == link
    message = refusal("data=text", f"data.calibration={link}", f"data.evaluation={tmp_path / 'b.jsonl'}")
    assert message.startswith(f"data.evaluation={tmp_path / 'b.jsonl'}: must be another file than data.calibration; ")


def test_the_name_that_was_typed_is_recorded_and_not_what_it_links_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blobs" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("blobs/deep")
    (tmp_path / "model.safetensors").symlink_to("blobs/0123")
    monkeypatch.chdir(tmp_path)
    config = compose("model=hf", "model.path=model.safetensors", "rotation.path=model.safetensors", "resume=link")
    assert config.model.path == "model.safetensors", "a link to nothing is nothing, so it may be an id of the hub"
    (tmp_path / "blobs" / "0123").touch()
    config = compose("model=hf", "model.path=model.safetensors", "rotation.path=link/../R.bin", "resume=link")
    assert config.model.path == f"{tmp_path}/model.safetensors"
    assert config.rotation.path == f"{tmp_path}/blobs/R.bin", "the parent of what is linked to, as the system has it"
    assert config.resume == f"{tmp_path}/link"
    data = compose("data=text", "data.calibration=/dev/fd/63", "data.evaluation=texts/*.txt").data
    assert (data.calibration, data.evaluation) == ("/dev/fd/63", f"{tmp_path}/texts/*.txt")


@pytest.mark.parametrize("value", ["org/model", "./org/model", "org/model/.."])
def test_an_id_of_the_hub_is_a_path_only_where_there_is_something(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("data=wikitext2", f"data.path={value}", "model=hf", f"model.path={value}")
    assert (compose(*options).data.path, compose(*options).model.path) == (value, value)
    (tmp_path / "org" / "model").mkdir(parents=True)
    found = f"{tmp_path}/org" if value.endswith("..") else f"{tmp_path}/org/model"
    assert (compose(*options).data.path, compose(*options).model.path) == (found, found)


FORBIDDEN_TARGETS = [
    "torch.load",
    "os.system",
    "builtins.eval",
    "subprocess.run",
    "rotexp.models.load.open_checkpoint",
    "rotexp.optim",
    "rotexp.optim.cayley_sgd",
    "rotexp.optimal.cayley_sgd.CayleySGD",
    "rotexp.optim.cayley_sgd.torch",
    "rotexp.optim.cayley_sgd.torch.load",
    "rotexp.optim.cayley_sgd.CayleySGD.step",
    "rotexp.optim.cayley_sgd.CayleySGD.__init__",
    "rotexp.optim.cayley_sgd.__builtins__",
    "rotexp.optim..cayley_sgd.CayleySGD",
    "rotexp.orthogonal.stiefel.tangent_generator",
    "rotexp.optim.../../os.system",
    "rotexp.training.objectives.os.system",
    "rotexp.training.objectives.F",
    "rotexp.training.objectives.build",
    " rotexp.optim.cayley_sgd.CayleySGD",
    "rotexp.optim.cayley_sgd.CayleySGD\n",
    "rotexp.optim.cayley_sgd.NoSuchClass",
    "rotexp.optim.no_such_module.CayleySGD",
    "rotexp.training.objectives.NoSuchClass",
    "",
]


@pytest.mark.parametrize("target", FORBIDDEN_TARGETS)
def test_a_target_outside_the_allow_list_is_refused_before_anything_is_imported(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    component = Component(name="trick", _target_=target)
    with pytest.raises(ValueError, match=r"must be a class of rotexp\.(optim|training\.objectives), or of a "):
        check_target(component, key="objective")


@pytest.mark.parametrize("group", COMPONENTS)
def test_a_forbidden_target_is_refused_with_its_key_when_the_configuration_is_read(group: str) -> None:
    assert refusal(f"{group}._target_=torch.load").startswith(f"{group}._target_=torch.load: must be ")


def test_build_makes_what_the_target_names_from_the_other_fields() -> None:
    assert isinstance(build(compose().objective), CrossEntropy)
    top_k = build(compose("objective=kl_topk", "objective.k=3").objective)
    assert isinstance(top_k, TopKKLDivergence)
    assert top_k.k == 3


LEARNED_WITHOUT = ["rotation.r1=false", "rotation.r2=false"]
TWO_NODES = ["launch=elastic", "launch.nnodes=2", "launch.rdzv_endpoint=a:1"]
RULES = [
    (["seed=-1"], "seed=-1", "0 or more", "choose another"),
    (["seed=4294967296"], "seed=4294967296", "below 2**32", "choose another"),
    (["model=hf"], "model.path=null", "a hub id or a folder", "set model.path="),
    (["model=hf", "model.path=''"], "model.path=", "a hub id or a folder", "set model.path="),
    (["model=random_llama", "model.size=9b"], "model.size=9b", "one of nano, 135m, 360m, 1b", "set model.size="),
    (["model=random_llama", "model.size=null"], "model.size=null", "one of nano, 135m, 360m", "set model.size="),
    (["data=text"], "data.calibration=null", "a text file", "set data.calibration=FILE"),
    (["data=text", "data.calibration=/a"], "data.evaluation=null", "a text file", "set data.evaluation=FILE"),
    (
        ["data=text", "data.calibration=/a", "data.evaluation=/b/../a"],
        "data.evaluation=/a",
        "another file than data.calibration",
        "was not trained on",
    ),
    (["data.calibration=/a"], "data.calibration=/a", "null for data=builtin", "set data=text"),
    (["data.evaluation=/a"], "data.evaluation=/a", "null for data=builtin", "set data=text"),
    (["data=wikitext2", "data.field=text"], "data.field=text", "null for data=wikitext2", "set data=text"),
    (["data=text", "data.path=/a"], "data.path=/a", "null for data=text", "set data=wikitext2"),
    (["data=text", *TEXT_FILES, "data.field=''"], "data.field=", "a field's name or null", "null is plain text"),
    (["data.max_characters=0"], "data.max_characters=0", "at least 1 or null", "null reads all"),
    (["data.sequence_length=1"], "data.sequence_length=1", "at least 2", "lengthen it"),
    (["data.global_batch_size=0"], "data.global_batch_size=0", "at least 1", "enlarge it"),
    (["quant.weights.bits=9"], "quant.weights.bits=9", "one of (2, 3, 4, 5, 6, 7, 8, 16)", "set 16"),
    (["quant.activations.bits=1"], "quant.activations.bits=1", "one of (2, 3, 4", "set 16"),
    (["quant.kv.group_size=0"], "quant.kv.group_size=0", "below 1", "set null"),
    (["quant.weights.clip_ratio=0"], "quant.weights.clip_ratio=0.0", "(0, 1]", "set 1.0"),
    (["quant.weights.clip_ratio=nan"], "quant.weights.clip_ratio=nan", "(0, 1]", "set 1.0"),
    (
        ["quant.weights.clip_ratio=0.9", "quant.weights.clip_search=true"],
        "quant.weights.clip_ratio=0.9",
        "only 1.0",
        "set one of the two",
    ),
    (["quant.activations.clip_search=true"], "quant.activations.clip_search=true", "false", "only quant.weights"),
    (["quant.kv.clip_search=true"], "quant.kv.clip_search=true", "false", "only quant.weights"),
    (["quant.refresh_every=0"], "quant.refresh_every=0", "at least 1", "1 is every step"),
    (LEARNED_WITHOUT, "rotation.learned=true", "false when neither rotation.r1 nor", "set rotation=none"),
    (["quant=none"], "quant=none", "something that quantizes", "train.steps=0"),
    (["optimizer.lr=0"], "optimizer.lr=0.0", "(0, 3.142)", "choose another"),
    (["optimizer.lr=4"], "optimizer.lr=4.0", "(0, 3.142)", "step_rule=paper"),
    (["optimizer.lr=nan"], "optimizer.lr=nan", "(0, 3.142)", "choose another"),
    (["optimizer.lr=2", "optimizer.solver=fixed_point"], "optimizer.lr=2.0", "solver=fixed_point", "solver=exact"),
    (["optimizer.momentum=1"], "optimizer.momentum=1.0", "[0, 1)", "0.0 switches momentum off"),
    (["optimizer.retract_every=-1"], "optimizer.retract_every=-1", "at least 0", "0 switches"),
    (["optimizer.fixed_point_iterations=0"], "optimizer.fixed_point_iterations=0", "at least 1", "5 is the default"),
    (["objective=kl_topk", "objective.k=0"], "objective.k=0", "at least 1", "name how many tokens"),
    (["train.steps=-1"], "train.steps=-1", "0 or more", "0 evaluates without training"),
    (["train.micro_batch_size=0"], "train.micro_batch_size=0", "at least 1 or null", "enlarge it"),
    (["train.max_grad_norm=0"], "train.max_grad_norm=0.0", "above 0 or null", "null switches clipping off"),
    (["train.max_grad_norm=nan"], "train.max_grad_norm=nan", "above 0 or null", "null switches clipping off"),
    (["train.warmup_steps=-1"], "train.warmup_steps=-1", "0 to train.steps", "shorten it"),
    (["train.warmup_steps=9", "train.steps=8"], "train.warmup_steps=9", "0 to train.steps", "shorten it"),
    (["train.log_every=0"], "train.log_every=0", "at least 1", "1 logs every step"),
    (["evaluation.window=1"], "evaluation.window=1", "at least 2", "lengthen it"),
    (["evaluation.max_windows=0"], "evaluation.max_windows=0", "at least 1 or null", "enlarge it"),
    (["evaluation.micro_batch_size=0"], "evaluation.micro_batch_size=0", "at least 1 or null", "null chooses it"),
    (["metrics.rotation_every=0"], "metrics.rotation_every=0", "at least 1", "1 takes it every step"),
    (["metrics.divergence_every=0"], "metrics.divergence_every=0", "at least 1", "1 takes it every step"),
    (["launch.nproc=0"], "launch.nproc=0", "at least 1 or null", "null decides"),
    (["launch.threads=0"], "launch.threads=0", "at least 1 or null", "null decides"),
    (["launch.timeout_minutes=0"], "launch.timeout_minutes=0.0", "above 0 and at most", "the default is 30"),
    (["launch.grace_seconds=0"], "launch.grace_seconds=0.0", "above 0 and at most", "the default is 60"),
    (["launch.grace_seconds=nan"], "launch.grace_seconds=nan", "above 0 and at most", "the default is 60"),
    (["launch.timeout_minutes=inf"], "launch.timeout_minutes=inf", "above 0 and at most", "the default is 30"),
    (["launch.nnodes=0"], "launch.nnodes=0", "at least 1", "this machine alone"),
    (["launch.nnodes=2"], "launch.nnodes=2", "launch=elastic and launch.rdzv_endpoint=HOST:PORT", "torchrun"),
    (["resume=''"], "resume=", "auto, never or a folder", "leave it out"),
    (["sweep.jobs_at_once=0"], "sweep.jobs_at_once=0", "at least 1", "leave it out"),
    (["train.checkpoint_every=0"], "train.checkpoint_every=0", "at least 1 or null", "saves at the end"),
    (["train.keep_checkpoints=0"], "train.keep_checkpoints=0", "at least 1", "never deleted"),
    (["ema.decay=1"], "ema.decay=1.0", "between 0 and 1, or null", "switches it off"),
    (["adamw.lr=0"], "adamw.lr=0.0", "above 0", "the default is 1e-5"),
    (["evaluation.every=0"], "evaluation.every=0", "at least 1 or null", "null measures at the end"),
    (["evaluation.every=-5"], "evaluation.every=-5", "at least 1 or null", "null measures at the end"),
    (["adamw.scales_lr=-1"], "adamw.scales_lr=-1.0", "above 0", "the default is 1e-2"),
    (["adamw.betas=[0.9]"], "adamw.betas=[0.9]", "two in [0, 1)", "leave them out"),
    (["adamw.eps=0"], "adamw.eps=0.0", "above 0", "the default is"),
    (["adamw.weight_decay=-1"], "adamw.weight_decay=-1.0", "0 or more", "0 switches"),
    (
        ["quant=w16a4", "train.params=rotations_and_scales"],
        "train.params=rotations_and_scales",
        "quant.weights.bits=16, which has no scales",
        "another quant",
    ),
    (
        ["model.dtype=bfloat16", "train.params=all"],
        "model.dtype=bfloat16",
        "float32 for train.params=all, since small updates vanish",
        "sharding=zero2_master",
    ),
    (["resume=/a", "train.steps=0"], "resume=/a", "auto or never where nothing is trained", "leave it out"),
    (["resume=/a", "rotation=hadamard"], "resume=/a", "auto or never where nothing is trained", "leave it out"),
    (
        [
            "launch=elastic",
            "launch.nnodes=2",
            "launch.rdzv_endpoint=a:1",
            "sharding=zero2_master",
            "sharding.sim_world=2",
        ],
        "sharding.sim_world=2",
        "null on several nodes",
        "launch.nnodes=1",
    ),
    (["sharding.sim_world=2"], "sharding.sim_world=2", "left out where no master is split", "zero2_master"),
    (["sharding=full", "sharding.bucket_mib=1"], "sharding.bucket_mib=1", "left out where no master", "zero2_master"),
    (["sharding.strategy=fulll"], "sharding.strategy=fulll", "one of no_shard, full, ", "choose one by sharding=NAME"),
    (["sharding=zero2_master", "sharding.sim_world=1"], "sharding.sim_world=1", "at least 2 or null", "simulates"),
    (["sharding=zero2_master", "sharding.bucket_mib=0"], "sharding.bucket_mib=0", "at least 1", "the default is"),
    (["sharding=zero2_master", "sharding.cpu_offload=true"], "sharding=zero2_master", "without cpu_offload", "another"),
    (["launch=inline", "launch.nproc=2"], "launch.nproc=2", "1 for launch=inline", "use launch=elastic"),
]


@pytest.mark.parametrize(("overrides", "named", "allowed", "remedy"), RULES, ids=[" ".join(rule[0]) for rule in RULES])
def test_a_rule_names_key_value_allowed_and_remedy_in_one_line(
    overrides: list[str], named: str, allowed: str, remedy: str
) -> None:
    message = refusal(*overrides)
    assert message.startswith((f"{named}:", f"{named} "))
    assert allowed in message.split(";")[0]
    assert remedy in message.split(";", 1)[1]
    assert "\n" not in message


def test_training_rules_do_not_bind_a_run_without_training() -> None:
    assert compose("train.steps=0", "quant=none").train.steps == 0
    assert compose("train.steps=0", *LEARNED_WITHOUT).rotation.learned
    assert compose("rotation=hadamard", "quant=none").quant.name == "none"


SIMULATED = ["train.params=all", "sharding=zero2_master"]
WORLD_RULES = [
    (["sharding=full"], 1, "sharding.strategy=full", "2 or more ranks, not 1", "sharding=no_shard"),
    (["data.global_batch_size=3"], 2, "data.global_batch_size=3", "a multiple of the 2 ranks", "launch.nproc"),
    (["train.micro_batch_size=3"], 1, "train.micro_batch_size=3", "a divisor of 8", "change one of them"),
    (["train.micro_batch_size=8"], 2, "train.micro_batch_size=8", "a divisor of 4", "change one of them"),
    ([*SIMULATED, "sharding.sim_world=3"], 1, "data.global_batch_size=8", "of the 3 simulated ranks", "sim_world"),
    (
        [*SIMULATED, "sharding.sim_world=4", "train.micro_batch_size=4"],
        1,
        "train.micro_batch_size=4",
        "a divisor of 2 (data.global_batch_size=8 over 4 simulated ranks)",
        "change one of them",
    ),
    ([*SIMULATED, "sharding.sim_world=2"], 2, "sharding.sim_world=2", "used in a world of one", "launch.nproc=1"),
]


@pytest.mark.parametrize(("overrides", "world_size", "named", "allowed", "remedy"), WORLD_RULES)
def test_a_rule_about_the_world_names_key_value_allowed_and_remedy(
    overrides: list[str], world_size: int, named: str, allowed: str, remedy: str
) -> None:
    config = quickly(*overrides)
    with pytest.raises(ValueError, match=r".") as caught:
        validate_world(config, world_size=world_size)
    message = str(caught.value)
    assert message.startswith(f"{named}: must be ")
    assert allowed in message
    assert remedy in message.split(";", 1)[1]
    assert "\n" not in message


def test_worlds_that_fit_are_accepted(default: Config) -> None:
    validate_world(default, world_size=1)
    validate_world(default, world_size=8)
    validate_world(compose("sharding=full", "train.micro_batch_size=2"), world_size=4)


def test_a_key_that_is_added_by_force_is_refused() -> None:
    for key in ("nonsense", "train.nonsense", "quant.weights.nonsense", "optimizer.nonsense"):
        with pytest.raises(UnknownKeyError, match=f"^{key}: "):
            compose(f"++{key}=1")
    with pytest.raises(ValueError, match=r"^objective.nonsense: is no option of .*CrossEntropy"):
        compose("++objective.nonsense=1")


def test_a_configuration_without_the_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("seed: 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="begin its defaults list with `- schema`"):
        compose_file(tmp_path / "own.yaml")


ROUND_TRIPS = [
    [],
    ["objective=kl_topk", "objective.k=5", "seed=7"],
    ["rotation=learned_r4", "quant=w4a4kv4", "quant.weights.group_size=16", "quant.weights.clip_search=true"],
    ["sharding=full", "launch=elastic", "launch.nproc=2"],
    ["model=hf", "model.path=some/where", "model.dtype=bfloat16", "data=text", *TEXT_FILES],
    ["optimizer.lr=1e-3", "optimizer.step_rule=paper", "train.max_grad_norm=null", "tracker=jsonl"],
    ["train.max_grad_norm=inf", "evaluation.max_windows=null"],
    *[[f"tracker.run_name='{name}'"] for name in ("off", "null", "a: b # c", 'Grüße "🙂 ')],
]


@pytest.mark.parametrize("overrides", ROUND_TRIPS, ids=" ".join)
def test_the_resolved_configuration_composes_to_the_same_configuration(overrides: list[str], tmp_path: Path) -> None:
    config = compose(*overrides)
    text = resolved_yaml(config)
    assert "${" not in text
    (tmp_path / "config.resolved.yaml").write_text(text, encoding="utf-8")
    again = compose_file(tmp_path / "config.resolved.yaml")
    assert again == config
    assert config_digest(again) == config_digest(config)
    assert resolved_yaml(again) == text


def test_a_resolved_configuration_still_takes_overrides(tmp_path: Path) -> None:
    (tmp_path / "config.resolved.yaml").write_text(resolved_yaml(compose("train.steps=7")), encoding="utf-8")
    again = compose_file(tmp_path / "config.resolved.yaml", "train.steps=8", "optimizer.lr=0.2")
    assert (again.train.steps, again.optimizer.lr) == (8, 0.2)


def test_the_plain_configuration_holds_only_what_json_and_wandb_take(default: Config) -> None:
    def leaves(node: Any) -> Iterator[Any]:
        children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else None
        if children is None:
            yield node
        else:
            for child in children:
                yield from leaves(child)

    assert {type(leaf) for leaf in leaves(to_plain(default))} <= {bool, int, float, str, type(None)}


def test_the_digest_changes_with_any_value_and_with_nothing_else(default: Config) -> None:
    digest = config_digest(default)
    assert len(digest) == 16
    assert int(digest, 16) >= 0
    assert config_digest(compose()) == digest
    changed = {path: config_digest(with_value(default, path, other(value))) for path, value in values(default)}
    assert len(changed) > 60
    assert [path for path, value in changed.items() if value == digest] == [("plugins",)]  # typed, never recorded
    assert len(set(changed.values())) == len(changed)


@dataclasses.dataclass(frozen=True)
class Null:
    """No value, of a field with this annotation."""

    annotation: str


def values(node: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value that is not a dataclass, with the names that lead to it."""
    for option in dataclasses.fields(node):
        child, path = getattr(node, option.name), (*prefix, option.name)
        if dataclasses.is_dataclass(child):
            yield from values(child, path)
        elif option.name != "options":  # of any names, none here; spread beside _target_ in text
            yield path, child if child is not None else Null(str(option.type))


def other(value: Any) -> Any:
    """Return another value of the same type; for null, one of the type that the annotation names."""
    match value:
        case bool():
            return not value
        case Enum():
            return next((choice for choice in type(value) if choice is not value), None)
        case int() | float():
            return value + 1
        case list():
            return [*value, 0.5 if value and isinstance(value[0], float) else "another"]
        case Null(annotation):
            others = {"int | None": 3, "bool | None": True, "str | None": "text", "float | None": 0.5, "Any": "part"}
            return Dtype.float16 if annotation == "Dtype | None" else others[annotation]
        case _:
            return f"{value} another"


def with_value(node: Any, path: tuple[str, ...], value: Any) -> Any:
    if not path:
        return value
    return dataclasses.replace(node, **{path[0]: with_value(getattr(node, path[0]), path[1:], value)})


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts and lists by dotted keys."""
    match node:
        case dict():
            parts = [flatten(child, f"{prefix}.{key}".strip(".")) for key, child in node.items()]
        case list():
            parts = [flatten(child, prefix) for child in node]
        case _:
            return {prefix: node}
    return {key: value for part in parts for key, value in part.items()}
