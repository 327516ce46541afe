"""What `import rotexp` gives: lazily, checked, with a model of the user's own placed, trained, merged and saved."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from own_models import TOKENS, error, logits, small_model
from torch import nn
from transformers import AutoModelForCausalLM, StableLmConfig

import rotexp
from rotexp.config.composition import resolved_yaml
from rotexp.config.plugins import granted_plugins
from rotexp.config.schema import Config
from rotexp.launch import beside
from rotexp.models.tiny import FOLDER
from rotexp.quant.spec import QuantSpec
from rotexp.runfolder.layout import rank_log

running = importlib.import_module("rotexp.face.run")  # the package has a function of this name
ROOT = Path(rotexp.__file__).parent


def python(code: str, *, cwd: Path | None = None) -> str:
    """Run code in a process of its own; return what it prints."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=cwd)
    return run.stdout.strip()


def test_to_import_it_imports_nothing_heavy() -> None:
    loaded = python("import rotexp, sys; print({'torch', 'hydra', 'omegaconf', 'transformers'} & set(sys.modules))")
    assert loaded == "set()"


def test_every_name_is_found_and_typed_as_it_is_found() -> None:
    tree = ast.parse(Path(rotexp.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == rotexp._HOMES
    assert rotexp.__all__ == sorted(typed) == dir(rotexp)
    for name, home in typed.items():
        assert getattr(rotexp, name) is getattr(sys.modules[home], name)
    with pytest.raises(AttributeError, match=r"^module 'rotexp' has no attribute 'trian'; it has CayleySGD, "):
        rotexp.trian  # noqa: B018


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_a_command_of_the_same_name_does_not_hide_the_function(command: str) -> None:
    code = f"""
import rotexp, rotexp.{command}, types
from rotexp.{command} import main
assert isinstance(rotexp.{command}, types.FunctionType) and rotexp.{command} is not main
assert main.__module__ == "rotexp.{command}"
import rotexp.train
assert isinstance(rotexp.train, types.ModuleType)
print("both")
"""
    assert python(code) == "both"


def test_load_config_composes_as_the_command_line_and_checks() -> None:
    config = rotexp.load_config(["quant=w4a8", "train.steps=3", "optimizer.lr=0.02"])
    assert isinstance(config, Config)
    assert (config.quant.name, config.train.steps, config.optimizer.lr) == ("w4a8", 3, 0.02)
    assert rotexp.load_config() == rotexp.load_config([]) == dataclasses.replace(rotexp.load_config(["seed=7"]), seed=0)


def test_load_config_reads_configs_of_the_user_s_own(tmp_path: Path) -> None:
    (tmp_path / "quant").mkdir()
    (tmp_path / "quant" / "mine.yaml").write_text("name: mine\nweights: {bits: 3}\n")
    config = rotexp.load_config(["quant=mine"], config_dir=tmp_path)
    assert (config.quant.name, config.quant.weights.bits) == ("mine", 3)
    with pytest.raises(ValueError, match=r"^config_dir=.*nowhere: no such folder; name the folder"):
        rotexp.load_config(config_dir=tmp_path / "nowhere")


@pytest.fixture
def application() -> Iterator[None]:
    """An application of the user's own that has Hydra set up."""
    GlobalHydra.instance().clear()
    with initialize_config_module("rotexp.conf", version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


@pytest.mark.usefixtures("application")
def test_an_application_s_own_hydra_is_left_alone() -> None:
    hydra, store = GlobalHydra.instance().hydra, ConfigStore.instance()
    before = sorted(store.repo)
    had_resolver = OmegaConf.has_resolver("job_name")
    rotexp.load_config(["seed=1"])
    with pytest.raises(ValueError, match="no such key"):
        rotexp.load_config(["sed=1"])
    assert GlobalHydra.instance().hydra is hydra
    assert sorted(store.repo) == before
    assert OmegaConf.has_resolver("job_name") == had_resolver
    assert compose("hydra_settings") is not None


WRONG: dict[str, Any] = {
    r'^\'train.steps=2\': overrides are a list of texts; write \["key=value"': "train.steps=2",
    r"^None: overrides are a list of texts": None,
    r"^train.stepz=2: no such key; train has steps, .*nearest: train.steps": ["train.stepz=2"],
    r"^quant=w5a5: no such option; choose one of none, ": ["quant=w5a5"],
    r"^train.steps=x: must be a whole number; ": ["train.steps=x"],
    r"^seed=0,1: several values are a sweep; start python -m rotexp.train -m seed=0,1, or call once": ["seed=0,1"],
    r"^-m: flags are the command's, and so are sweeps; use python -m rotexp.train$": ["-m", "seed=0,1"],
    r"^hydra.job.chdir=true: concerns the command alone; ": ["hydra.job.chdir=true"],
    r"^launch.nnodes=2: must be 1 from Python; ": ["launch=elastic", "launch.nnodes=2", "launch.rdzv_endpoint=a:1"],
    r"^hydra.run.dir=elsewhere: the folder is given twice, also as folder=": ["hydra.run.dir=elsewhere"],
    r"^\+\+hydra.run.dir=elsewhere: the folder is given twice, also as folder=": ["++hydra.run.dir=elsewhere"],
    r"^Config: model, data, quant, .* has no option; begin from rotexp.load_config": Config(),
}


@pytest.mark.parametrize("reason", WRONG)
def test_a_wrong_request_is_one_line_and_starts_nothing(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=reason) as refused:
        rotexp.run(WRONG[reason], folder=tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


NO_PATHS: dict[str, Callable[[Any], object]] = {
    "folder": lambda value: rotexp.run(["train.steps=1"], folder=value),
    "config_dir": lambda value: rotexp.load_config(config_dir=value),
    "path": lambda value: rotexp.export("run", value),
}


@pytest.mark.parametrize("key", NO_PATHS)
def test_what_is_no_path_is_refused_in_one_line(key: str) -> None:
    with pytest.raises(ValueError, match=rf"^{key}=3: is a int; give a path, or its text$"):
        NO_PATHS[key](3)


def test_a_config_that_there_is_not_is_refused_in_the_words_of_python(tmp_path: Path) -> None:
    for name in ("nowhere", "nowhere.yaml", 3):
        with pytest.raises(ValueError, match=rf"^config_name={name}: no such config; name one of rotexp's or in conf"):
            rotexp.load_config(config_name=name, config_dir=tmp_path)  # type: ignore[arg-type]
    (tmp_path / "mine.yaml").write_text("defaults: [schema, nowhere]\n")
    with pytest.raises(ValueError, match=r"nowhere") as refused:
        rotexp.load_config(config_name="mine", config_dir=tmp_path)
    assert "config_name" not in str(refused.value)


def test_a_configuration_changed_by_hand_is_checked_again() -> None:
    config = rotexp.load_config()
    for train, reason in ({"steps": -1}, "train.steps=-1: must be"), ({"steps": "many"}, "could not be converted"):
        wrong = dataclasses.replace(config, train=dataclasses.replace(config.train, **train))
        with pytest.raises(ValueError, match=reason):
            rotexp.run(wrong)


def test_a_rank_of_an_outer_launcher_starts_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=r"^rotexp.run: this process is a rank that torchrun or srun started; let"):
        rotexp.run(["train.steps=1"])


def test_a_folder_without_a_run_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no run \(summary.json is missing\); name the folder of a run$"):
        rotexp.RunResult(tmp_path)
    with pytest.raises(ValueError, match=r"^folder=3: is a int; give a path"):
        rotexp.RunResult(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^run: int is no run; give its folder"):
        rotexp.evaluate(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^run: has no value; set run=DIR, or choose a model"):
        rotexp.evaluate()


def test_rotations_that_are_not_there_yet_are_said_to_come(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"status": "running"}')
    with pytest.raises(ValueError, match=r"rotations.safetensors is missing \(status running\); training writes it at"):
        _ = rotexp.RunResult(tmp_path).rotations
    (tmp_path / "rotations.safetensors").write_text("damaged")
    with pytest.raises(ValueError, match=r"^rotations=.*: cannot be read as safetensors"):
        _ = rotexp.RunResult(tmp_path).rotations


def test_parts_of_one_s_own_are_granted_to_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Path(__file__).parents[1] / "parts"
    monkeypatch.syspath_prepend(str(parts))
    config = rotexp.load_config(["plugins=[their_parts]", "optimizer=heavy_ball"], config_dir=parts)
    (tmp_path / "config.resolved.yaml").write_text(resolved_yaml(config))
    (tmp_path / "summary.json").write_text('{"status": "running"}')
    assert rotexp.RunResult(tmp_path, plugins=["their_parts"]).config == config
    assert granted_plugins() == ()
    with pytest.raises(ValueError, match=r"names a part of your own .*type plugins=\[their_parts\]"):
        _ = rotexp.RunResult(tmp_path).config
    for again in (rotexp.evaluate, lambda run: rotexp.export(run, tmp_path / "new")):
        with pytest.raises(ValueError, match=r"the run is not done \(status running\)"):
            again(rotexp.RunResult(tmp_path, plugins=["their_parts"]))
        (tmp_path / "summary.json").write_text('{"status": "running"}')


@pytest.mark.parametrize("logs", [False, True])
def test_an_error_of_a_run_goes_to_other_processes_and_names_logs_that_there_are(logs: bool, tmp_path: Path) -> None:
    if logs:
        (tmp_path / rank_log(0)).touch()
    error = rotexp.RunError(tmp_path, "failed", "phase train: RuntimeError: spoiled")
    again = pickle.loads(pickle.dumps(error))
    assert (again.folder, again.status, again.phase) == (tmp_path, "failed", "train")
    shown = f" (see {tmp_path}/rank-*.log)" if logs else ""
    assert str(again) == str(error) == f"the run failed: phase train: RuntimeError: spoiled{shown}"


PROCESS = """
import os, sys, time
sys.stderr.write("rotexp: the run failed: phase save: OSError: full (see some where/rank-*.log)\\n")
sys.stderr.write("a line between\\nrotexp: hydra.run.dir=x: cannot be written (full); free space\\n")
sys.exit({code})
"""


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (1, rotexp.RunError, "the run failed: phase save: OSError: full; hydra.run.dir=x: cannot be written (full); "),
        (2, ValueError, "the run failed: phase save: OSError: full (see some where/rank-*.log); hydra.run.dir=x: "),
    ],
)
def test_every_line_is_shown_as_it_comes_and_becomes_the_error(
    code: int,
    kind: type[Exception],
    said: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(beside, "ENTRY", PROCESS.format(code=code))
    with pytest.raises(kind) as failed:
        rotexp.run(["train.steps=1"], folder=tmp_path)
    assert str(failed.value).startswith(said)
    lines = [line.partition(" ")[0] for line in capfd.readouterr().err.splitlines()]
    assert lines == ["rotexp:", "a", "rotexp:"]


def test_a_module_in_the_working_folder_hides_none_of_python_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secrets.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(beside, "ENTRY", "import secrets, sys; sys.exit(len(secrets.token_bytes(7)))")
    with pytest.raises(rotexp.RunError, match=r"its process ended with exit code 7"):
        rotexp.run(["train.steps=1"], folder=tmp_path / "run")


def test_an_interrupt_while_it_starts_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = running.start

    def remembered(*given: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*given, **options))
        return started[0]

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(beside, "ENTRY", "import time; time.sleep(600)")
    monkeypatch.setattr(running, "start", remembered)
    monkeypatch.setattr(running, "Thread", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rotexp.run(["train.steps=1"], folder=tmp_path)
    assert started[0].poll() is not None


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_an_own_model_is_placed_trained_merged_and_saved(
    tmp_path: Path, tied: bool, dtype: torch.dtype, limit: float
) -> None:
    model = small_model(tied=tied, dtype=dtype)
    original, names = logits(model), list(model.state_dict())
    if tied:
        with pytest.warns(UserWarning, match="lm_head.weight was the embedding's and has a weight of its own now"):
            placed = rotexp.place(model)
    else:
        placed = rotexp.place(model)
    assert torch.equal(logits(model), original)  # until the mode says otherwise
    assert {name for name, tensor in model.named_parameters() if tensor.requires_grad} == {
        f"rotation_bank.{name}" for name in ("R1", "R2_0", "R2_1")
    }
    assert rotexp.prepare(placed) < limit
    before = placed.bank.snapshot()
    optimizer = rotexp.CayleySGD(placed.bank.parameters(), lr=0.05)
    with placed.mode.set(rotate=True, quantize=True):
        model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    assert all(not torch.equal(matrix, placed.bank[name]) for name, matrix in before.items())
    assert rotexp.merge(placed) < limit
    assert error(logits(model), original) < limit
    assert set(model.state_dict()) == set(names) | {"lm_head.weight"}
    for folder in (rotexp.export(placed, tmp_path / "exported"), save(model, tmp_path / "saved")):
        again = AutoModelForCausalLM.from_pretrained(folder)
        assert again.dtype is dtype
        assert error(logits(again), original) < limit


def save(model: Any, folder: Path) -> Path:
    """Save as any Hugging Face model is saved."""
    model.save_pretrained(folder)
    return folder


def test_names_of_options_and_dataclasses_place_alike() -> None:
    config = rotexp.load_config(["rotation=learned_r4", "quant=w4a8"])
    by_name = rotexp.place(small_model(), rotation="learned_r4", quant="w4a8", seed=3)
    by_class = rotexp.place(small_model(), rotation=config.rotation, quant=config.quant, seed=3)
    assert by_name.online == by_class.online == {"R4": 80}
    assert by_name.placements == by_class.placements
    for name, matrix in by_name.bank.items():
        assert torch.equal(matrix, by_class.bank[name])
    quantizers = [[module.weight_quantizer.spec for module in placed.rotated_modules] for placed in (by_name, by_class)]
    assert quantizers[0] == quantizers[1] != []


def test_what_must_run_online_is_saved_only_if_asked_for(tmp_path: Path) -> None:
    model = small_model()
    original = logits(model)
    placed = rotexp.place(model, rotation="hadamard_r4", quant="none")
    with pytest.raises(ValueError, match=r"^merge: norms are not folded yet; call rotexp.prepare"):
        rotexp.merge(placed)
    rotexp.prepare(placed)
    with pytest.raises(ValueError, match=r"^prepare: the model is prepared already"):
        rotexp.prepare(placed)
    with pytest.raises(ValueError, match=r"^export: the rotations are not merged into the weights; call rotexp.merge"):
        rotexp.export(placed, tmp_path / "new", ["export.online=true"])
    rotations = rotexp.export(placed, tmp_path / "rotations", ["export.format=r_bin", "export.online=true"])
    assert set(torch.load(rotations / "R.bin", weights_only=True)) == {
        "R1",
        *(f"model.layers.{layer}.self_attn.R2" for layer in range(2)),
    }
    rotexp.merge(placed)
    assert error(logits(model), original) < 1e-5
    with pytest.raises(ValueError, match=r"^export.online=false: the merged model needs R4 of order 80 at run time"):
        rotexp.export(placed, tmp_path / "new")
    with pytest.raises(ValueError, match=r"^export.format=r_bin: the model has no rotations, or they are merged"):
        rotexp.export(placed, tmp_path / "new", ["export.format=r_bin", "export.online=true"])
    assert not (tmp_path / "new").exists()
    assert (rotexp.export(placed, tmp_path / "new", ["export.online=true"]) / "rotexp_manifest.json").is_file()
    with pytest.raises(ValueError, match=r"^path=.*new: is a folder that is not empty"):
        rotexp.export(placed, tmp_path / "new", ["export.online=true"])


def test_norms_that_become_others_are_said_when_saving(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 80}
    model = AutoModelForCausalLM.from_config(StableLmConfig(vocab_size=64, hidden_size=64, **sizes))
    placed = rotexp.place(model.eval())
    rotexp.prepare(placed)
    rotexp.merge(placed)
    with pytest.raises(ValueError, match=r"^export\.(format=checkpoint|online=false): the merged model (has|needs) "):
        rotexp.export(placed, tmp_path / "new")


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return small_model()


def on_two_devices() -> nn.Module:
    model = small_model()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.to("cpu"))
    model.model.norm.weight = nn.Parameter(_Elsewhere(torch.ones(48)))
    return model


class _Elsewhere(torch.Tensor):
    """A tensor that says it lies on another device, of which this machine need not have one."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)


def in_int8() -> nn.Module:
    model = small_model()
    model.lm_head.weight = nn.Parameter(torch.zeros(64, 48, dtype=torch.int8), requires_grad=False)
    return model


def placed_already() -> nn.Module:
    model = small_model()
    rotexp.place(model)
    return model


def of_other_architecture() -> nn.Module:
    from transformers import BloomConfig

    return AutoModelForCausalLM.from_config(BloomConfig(vocab_size=64, hidden_size=48, n_layer=1, n_head=4))


UNFIT: dict[str, Callable[[], Any]] = {
    r"^place: \S+ and \d+ more are on the meta device or offloaded; load the weights first$": on_meta,
    r"^place: parameters are on cpu, cuda:1; move the model to one device$": on_two_devices,
    r"^place: lm_head.weight is int8; load the weights unquantized, in one of float32, ": in_int8,
    r"^place: model.embed_tokens.weight is float64; ": lambda: small_model(dtype=torch.float64),
    r"^place: rotations are placed in this model already; place once, or load the model anew$": placed_already,
    r"^place: Linear is no Hugging Face model; load one by AutoModelForCausalLM$": lambda: nn.Linear(2, 2),
    r"^place: LlamaModel has no head for tokens; load it by AutoModelForCausalLM$": lambda: small_model().model,
    r"^model_type=bloom: ": of_other_architecture,
}


@pytest.mark.parametrize("reason", UNFIT)
def test_a_model_that_cannot_be_placed_is_refused_in_one_line(reason: str) -> None:
    model = UNFIT[reason]()
    with pytest.raises(ValueError, match=reason) as refused:
        rotexp.place(model)
    assert "\n" not in str(refused.value)


WRONG_OPTIONS: dict[str, dict[str, Any]] = {
    r"^rotation=learnt: no such option; choose one of ": {"rotation": "learnt"},
    r"^quant=4: must be the name of an option, or a QuantConfig; ": {"quant": 4},
    r"^quant: QuantConfig has no name, as in a Config\(\) without groups; name an option": {"quant": Config().quant},
    r"^rotation: RotationConfig has no name": {"rotation": rotexp.RotationConfig()},
    r"^quant.weights.bits=1 is not one of": {"quant": rotexp.QuantConfig("mine", weights=QuantSpec(bits=1))},
    r"^quant.weights.group_size=7 does not divide the width 48": {
        "quant": rotexp.QuantConfig("mine", weights=QuantSpec(bits=4, group_size=7))
    },
    r"^rotation.path=R.bin: is a run's; ": {"rotation": rotexp.RotationConfig("mine", path="R.bin")},
    r"^rotation.block_size=32: must divide 48": {"rotation": "learned_block32"},
}


@pytest.mark.parametrize("reason", WRONG_OPTIONS)
def test_wrong_options_of_a_placement_leave_the_model_as_it_was(reason: str) -> None:
    model = small_model(tied=True)
    modules = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(ValueError, match=reason):
        rotexp.place(model, **WRONG_OPTIONS[reason])
    assert [(name, type(module)) for name, module in model.named_modules()] == modules
    assert model.config.tie_word_embeddings
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_shipped_model_can_be_loaded_by_hand_and_placed() -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    with pytest.warns(UserWarning, match="has a weight of its own now"):
        placed = rotexp.place(model, quant="w4a4kv4", rotation="learned_r3_r4")
    assert rotexp.prepare(placed) < 1e-5


@pytest.mark.parametrize("given", [[], ["export.format=r_bin"]], ids=["checkpoint", "r_bin"])
def test_a_rank_that_looks_on_takes_what_the_first_wrote_for_no_other_s(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas gather nothing, so nothing holds the first rank back."""
    placed = rotexp.place(small_model(), quant="none")
    rotexp.prepare(placed)
    if not given:
        rotexp.merge(placed)
    before = rotexp.export(placed, tmp_path / "new", given)
    files = sorted(before.iterdir())
    with pytest.raises(ValueError, match=r"^path=.*new: is a folder that is not empty"):
        rotexp.export(placed, tmp_path / "new", given)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    assert rotexp.export(placed, tmp_path / "new", given) == tmp_path / "new"
    assert sorted(before.iterdir()) == files


def test_a_coordinator_takes_any_module_that_is_held_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ParameterList([torch.eye(4)]))
    coordinator = rotexp.Coordinator(model, replicated=model[1])
    model[0].weight.grad, model[1][0].grad = torch.full((4, 4), 3.0), torch.full((4, 4), 4.0)
    norms = coordinator.clip(1.0)
    assert (norms.rotations.item(), norms.weights.item(), norms.total.item()) == (16, 12, 20)
    assert torch.allclose(model[1][0].grad, torch.tensor(4.0 / 20))
    coordinator.broadcast()
    assert coordinator.consolidate(torch.ones(1)).tolist() == [1]
    assert coordinator.divergence().names == ()
    with pytest.raises(ValueError, match=r"^the model registers 0 rotation banks, .*, or name the module"):
        rotexp.Coordinator(model)
    with pytest.raises(ValueError, match=r"^replicated: is no module of the model; register"):
        rotexp.Coordinator(model, replicated=nn.ParameterList([torch.eye(4)]))


def test_a_guard_needs_a_sharded_model_and_a_mode_that_there_is() -> None:
    for mode, states, reason in (
        ("off", None, r"^mode=off: must be one of selective, universal, event; choose one"),
        ("universal", ["forward"], r"^states=\['forward'\]: must be left out with mode=universal; or choose mode=sel"),
        ("selective", ["sideways"], r"^sync_mode.states=sideways: must be of forward, "),
        ("universal", None, r"^Linear has no parameter groups of FSDP2; call fully_shard before$"),
    ):
        with pytest.raises(ValueError, match=reason), rotexp.guarded(nn.Linear(2, 2), mode, states=states):
            pass
