"""The export from the outside: what it writes plain transformers reads; what it cannot write it refuses in one line."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from run_train import Run, run_train
from safetensors.torch import load_file

from rotexp.experiment.finished_model import build_finished, merge_finished
from rotexp.export import main
from rotexp.orthogonal.hadamard import hadamard
from rotexp.rotation.file import load_rotations, save_rotations
from rotexp.runfolder.finished_run import read_finished_run

pytestmark = pytest.mark.slow

Refusal = Callable[..., str]
Train = Callable[..., Run]

COMPARE = """
import sys, json, torch
from transformers import AutoModelForCausalLM
assert "rotexp" not in sys.modules
names, ids = json.loads(sys.argv[1]), torch.arange(40).reshape(2, 20) * 37 % 2048
with torch.no_grad():
    first, *others = [
        torch.load(name) if name.endswith(".pt") else
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()(ids).logits for name in names
    ]
print(json.dumps([float((other - first).abs().max() / first.abs().max()) for other in others]))
"""
"""Prints how far the others' logits are from the first's, relative to its largest."""

TOKENS = torch.arange(40).reshape(2, 20) * 37 % 2048


@dataclass(frozen=True)
class Export:
    """A finished export."""

    folder: Path
    code: int
    output: str
    errors: str

    @property
    def manifest(self) -> dict[str, Any]:
        """What it says of itself."""
        return json.loads((self.folder / "rotexp_manifest.json").read_text(encoding="utf-8"))


def run_python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], check=False, capture_output=True, text=True, cwd=cwd, timeout=200
    )


def run_export(run: Path, folder: Path, *arguments: str, program: tuple[str, ...] = ("-m", "rotexp.export")) -> Export:
    ended = run_python(*program, f"run={run}", f"export.path={folder}", *arguments, cwd=folder.parent)
    return Export(folder, ended.returncode, ended.stdout, ended.stderr)


def distances(*models: Path) -> list[float]:
    """Compare logits in a process that knows nothing of rotexp."""
    ended = run_python("-c", COMPARE, json.dumps([str(model) for model in models]))
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def train(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Run the small job, one step of it."""

    def run(*arguments: str) -> Run:
        own = ["train.steps=1", "evaluation.max_windows=1", "tracker=jsonl", *arguments]
        given = {argument.partition("=")[0] for argument in own}
        kept = [override for override in small if override.partition("=")[0] not in given]
        ended = run_train(tmp_path_factory.mktemp("run") / "folder", *kept, *own)
        assert (ended.code, ended.errors) == (0, "")
        return ended

    return run


@pytest.fixture(scope="module")
def done(train: Train) -> Run:
    """R1 and R2 trained on a checkpoint with tied embeddings."""
    return train()


@pytest.fixture(scope="module")
def done_r4(train: Train) -> Run:
    """With R4 online."""
    return train("rotation=learned_r4")


@pytest.fixture(scope="module")
def exported(done: Run, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Its export with every default."""
    return run_export(done.folder, tmp_path_factory.mktemp("export") / "folder")


def test_an_export_says_where_it_is_and_how_to_load_it(exported: Export, done: Run) -> None:
    assert (exported.code, exported.errors) == (0, "")
    proof, wrote = exported.output.splitlines()
    assert float(proof.removeprefix("invariance: relative logit error ")) < 1e-5
    load = f'AutoModelForCausalLM.from_pretrained("{exported.folder}")'
    assert wrote == f"wrote {exported.folder} (float32); load it by {load}"
    assert [path.name for path in exported.folder.parent.iterdir()] == ["folder"]


def test_plain_transformers_computes_the_same_in_a_fresh_process(
    exported: Export, done: Run, checkpoint: Path, tmp_path: Path
) -> None:
    rebuilt = build_finished(read_finished_run(done.folder))
    merge_finished(rebuilt)
    with torch.no_grad(), rebuilt.model.mode.set(rotate=True, quantize=False):
        torch.save(rebuilt.model.logits(TOKENS), tmp_path / "merged.pt")
    to_source, to_merged = distances(exported.folder, checkpoint, tmp_path / "merged.pt")
    assert 0 < to_source <= 1e-5
    assert to_merged <= 1e-5


def test_the_folder_is_a_plain_checkpoint_of_the_sources_shapes(exported: Export, checkpoint: Path) -> None:
    names = {path.name for path in exported.folder.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (exported.folder / name).read_bytes() == (checkpoint / name).read_bytes(), name
    source, stored = (load_file(folder / "model.safetensors") for folder in (checkpoint, exported.folder))
    assert stored.keys() - source.keys() == {"lm_head.weight"}
    assert all(stored[name].shape == tensor.shape for name, tensor in source.items())
    assert not torch.equal(stored["model.embed_tokens.weight"], source["model.embed_tokens.weight"])
    config = json.loads((exported.folder / "config.json").read_text(encoding="utf-8"))
    assert config["tie_word_embeddings"] is False
    assert "quantization_config" not in config


def test_the_manifest_says_what_it_is_and_that_nothing_runs_online(
    exported: Export, done: Run, checkpoint: Path
) -> None:
    manifest = exported.manifest
    assert manifest["source"] == {"id": str(checkpoint), "revision": None}
    assert manifest["config_digest"] == done.summary["config_digest"]
    assert manifest["rotations"]["R1"] == {"placement": "residual stream", "shape": [48, 48]}
    assert manifest["rotations"].keys() == {"R1", "R2_0", "R2_1"}
    assert manifest["must_run"] == {"online": [], "rms_norms": []}
    assert (manifest["trained_for"]["weights"]["bits"], manifest["dtype"]) == (4, "float32")


def test_without_rotations_the_source_comes_out_tied_and_bit_for_bit(
    train: Train, checkpoint: Path, tmp_path: Path
) -> None:
    export = run_export(train("rotation=none").folder, tmp_path / "plain")
    assert (export.code, export.errors) == (0, "")
    source, stored = (load_file(folder / "model.safetensors") for folder in (checkpoint, export.folder))
    assert stored.keys() == source.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in source.items())
    assert json.loads((export.folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert distances(export.folder, checkpoint) == [0.0]


def test_dtype_and_file_size_are_as_asked(done: Run, checkpoint: Path, tmp_path: Path) -> None:
    export = run_export(done.folder, tmp_path / "small", "export.dtype=bfloat16", "export.max_shard_size=60KB")
    assert (export.code, export.errors) == (0, "")
    files = sorted(export.folder.glob("model-*.safetensors"))
    assert len(files) > 2
    assert {tensor.dtype for file in files for tensor in load_file(file).values()} == {torch.bfloat16}
    assert distances(export.folder, checkpoint)[0] < 0.1


def test_the_shipped_model_is_exported(tmp_path: Path) -> None:
    """Its embedding is tied and stored in bfloat16."""
    sizes = ["train.steps=0", "data.sequence_length=32", "evaluation.window=32", "evaluation.max_windows=1"]
    run = run_train(tmp_path / "run", "tracker=jsonl", "launch.threads=1", *sizes)
    assert run.code == 0
    export = run_export(run.folder, tmp_path / "export", "export.dtype=float32")
    assert (export.code, export.errors) == (0, "")
    from rotexp.models import tiny

    assert distances(export.folder, tiny.FOLDER)[0] <= 1e-5


def test_online_transforms_are_exported_only_when_asked_for_and_named(
    done_r4: Run, checkpoint: Path, tmp_path: Path
) -> None:
    refused = run_export(done_r4.folder, tmp_path / "refused")
    assert (refused.code, refused.output) == (2, "")
    assert refused.errors.startswith("rotexp: export.online=false: the merged model needs R4 of order 80 at run time, ")
    assert list(tmp_path.iterdir()) == []
    export = run_export(done_r4.folder, tmp_path / "export", "export.online=true")
    assert (export.code, export.errors) == (0, "")
    (transform,) = export.manifest["must_run"]["online"]
    assert (transform["name"], transform["kind"], transform["order"]) == ("R4", "hadamard", 80)
    assert torch.tensor(transform["factors"]).prod() == 80
    assert "model.layers.*.mlp.down_proj" in transform["where"]
    assert_equal_with_transform(export.folder, checkpoint, order=80)


def assert_equal_with_transform(folder: Path, source: Path, *, order: int) -> None:
    """Do by hooks what the manifest says, and compare; without them it must differ."""
    from transformers import AutoModelForCausalLM

    loaded, original = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (folder, source))
    matrix = hadamard(order).float() / order**0.5
    with torch.no_grad():
        expected, without = original(TOKENS).logits, loaded(TOKENS).logits
        for layer in loaded.model.layers:
            layer.mlp.down_proj.register_forward_pre_hook(lambda _module, inputs: (inputs[0] @ matrix,))
        given = loaded(TOKENS).logits
    assert (given - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (without - expected).abs().max() > 1e-2 * expected.abs().max()


def test_r_bin_holds_the_runs_rotations_bit_for_bit(done: Run, done_r4: Run, tmp_path: Path) -> None:
    export = run_export(done.folder, tmp_path / "export", "export.format=r_bin")
    assert (export.code, export.errors) == (0, "")
    assert {path.name for path in export.folder.iterdir()} == {"R.bin", "rotexp_manifest.json"}
    raw = torch.load(export.folder / "R.bin", weights_only=True)
    assert list(raw) == ["R1", "model.layers.0.self_attn.R2", "model.layers.1.self_attn.R2"]
    loaded = load_rotations(export.folder / "R.bin").matrices
    assert loaded.keys() == done.rotations.keys()
    assert all(torch.equal(loaded[name], matrix) for name, matrix in done.rotations.items())
    online = run_export(done_r4.folder, tmp_path / "online", "export.format=r_bin", "export.online=true")
    assert (online.code, online.manifest["must_run"]["online"][0]["order"]) == (0, 80)


def test_a_runs_rotations_load_into_the_same_model_again(done: Run) -> None:
    rebuilt = build_finished(read_finished_run(done.folder))
    held = rebuilt.model.bank.snapshot()
    assert held.keys() == done.rotations.keys()
    assert all(torch.equal(held[name], matrix) for name, matrix in done.rotations.items())


@pytest.fixture
def refusal(
    own_logging: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refusal:
    """Ask for an export in this process; returns the line that refuses it, after checking that nothing was made."""

    def ask(*arguments: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["rotexp.export", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        assert (end.value.code, captured.out) == (2, "")
        assert captured.err.count("\n") == 1, captured.err
        assert captured.err.startswith("rotexp: ")
        assert sorted(tmp_path.rglob("*")) == before
        return captured.err.removeprefix("rotexp: ").rstrip("\n")

    return ask


@pytest.fixture
def broken(done: Run, tmp_path: Path) -> Path:
    """A copy of the run for the test to break."""
    return shutil.copytree(done.folder, tmp_path / "broken")


def change_summary(folder: Path, **values: object) -> None:
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    (folder / "summary.json").write_text(json.dumps(summary | values), encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "run: has no value; set run=DIR"),
        (["run=RUN"], "export.path: has no value; set export.path=DIR"),
        (["run=nowhere", "export.path=new"], "run=nowhere: no such folder; name the folder of a finished run"),
        (["run=.", "export.path=new"], "run=.: holds no run (summary.json is missing); name the folder of a "),
        (
            ["run=RUN", "export.path=new", "export.format=gguf"],
            "export.format=gguf: must be one of checkpoint, r_bin",
        ),
        (["run=RUN", "export.path=new", "export.dtype=int8"], "export.dtype=int8: must be one of auto, float32, "),
        (["run=RUN", "export.path=new", "export.online=2.5"], "export.online=2.5: must be true or false; change it"),
        (
            ["run=RUN", "export.path=new", "export.max_shard_size=5"],
            "export.max_shard_size=5: must be a whole number of KB, MB, GB or TB; write 5GB or so",
        ),
        (["run=RUN", "path=new"], "path=new: no such key; the configuration has run, plugins, export; "),
        (
            ["run=RUN", "export.pth=new"],
            "export.pth=new: no such key; export has path, format, dtype, online, max_shard",
        ),
        (["run=RUN", "model=tiny"], "model: no such key; the configuration has run, plugins, export; "),
        (["run=RUN", "train.steps=3"], "train.steps=3: no such key; "),
        (["--nope"], "--nope: no such flag (--hydra-help lists them)"),
        (
            ["--config-name", "config", "hydra.run.dir=."],
            "the configuration is not based on export's schema; begin its defaults with",
        ),
        (["run=RUN", "export.path=RUN"], "export.path=RUN: is a folder that is not empty; choose another, or empty it"),
        (["run=RUN", "export.path=RUN/summary.json"], "export.path=RUN/summary.json: is a file; name a folder to make"),
    ],
)
def test_a_wrong_request_is_one_line(arguments: list[str], line: str, done: Run, refusal: Refusal) -> None:
    given = [argument.replace("RUN", str(done.folder)) for argument in arguments]
    assert refusal(*given).startswith(line.replace("RUN", str(done.folder)))


def test_a_run_that_is_not_done_is_refused(broken: Path, refusal: Refusal) -> None:
    for status in ("running", "failed", "interrupted"):
        change_summary(broken, status=status)
        line = refusal(f"run={broken}", "export.path=new")
        assert line == f"run={broken}: the run is not done (status {status}); name one that is"
    (broken / "summary.json").write_text("{", encoding="utf-8")
    assert refusal(f"run={broken}", "export.path=new").startswith(f"run={broken}: summary.json cannot be read (")


def test_a_configuration_that_names_code_of_others_is_refused(broken: Path, refusal: Refusal) -> None:
    file = broken / "config.resolved.yaml"
    text = file.read_text(encoding="utf-8")
    assert "rotexp.training.objectives.CrossEntropy" in text
    file.write_text(text.replace("rotexp.training.objectives.CrossEntropy", "os.system"), encoding="utf-8")
    assert "(objective._target_=os.system: must be a class of " in refusal(f"run={broken}", "export.path=new")


@pytest.mark.parametrize("name", ["rotations.safetensors", "config.resolved.yaml"])
def test_a_file_that_is_missing_is_named(name: str, broken: Path, refusal: Refusal) -> None:
    (broken / name).unlink()
    line = refusal(f"run={broken}", "export.path=new")
    assert line == f"run={broken}: {name} is missing; restore it, or run the training again"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("seed: [", "while parsing a flow node"),
        ("- seed", "it holds no mapping"),
        ("seed: ${oc.env:HOME}", "it holds an interpolation"),
        ("seed: many", "could not be converted to Integer"),
        ("optimizer: {name: cayley_sgd}\nobjective: {name: ce}\nseed: many", "Integer"),
        ("optimizer: {name: cayley_sgd}\nobjective: {name: ce}\nsteps: 3", "Key 'steps'"),
    ],
)
def test_a_configuration_that_is_none_is_refused(text: str, reason: str, broken: Path, refusal: Refusal) -> None:
    (broken / "config.resolved.yaml").write_text(text, encoding="utf-8")
    line = refusal(f"run={broken}", "export.path=new")
    assert line.startswith(f"run={broken}: config.resolved.yaml is not the configuration of a run (")
    assert reason in line


def test_rotations_that_are_not_the_runs_are_refused(done_r4: Run, broken: Path, refusal: Refusal) -> None:
    file, given = broken / "rotations.safetensors", load_rotations(broken / "rotations.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert refusal(f"run={broken}", "export.path=new").startswith(f"run={file}: cannot be read as safetensors (")
    shutil.copy(done_r4.folder / file.name, file)
    assert "it was trained with R4 of order 80 online" in refusal(f"run={broken}", "export.path=new")
    rows: dict[str, tuple[dict[str, torch.Tensor], str]] = {
        "foreign": ({"model": "another"}, "its rotations are of model another, not "),  # type: ignore[dict-item]
        "short": ({"R1": torch.eye(16)}, "R1 is [16, 16] instead of [48, 48]"),
        "scaled": ({"R2_0": torch.eye(12) * 2}, "R2_0 is not orthogonal"),
    }
    for changes, said in rows.values():
        matrices = {name: changes.get(name, matrix) for name, matrix in given.matrices.items()}
        facts = given.facts | {name: text for name, text in changes.items() if name == "model"}
        save_rotations(file, matrices, placements=given.placements or {}, online={}, facts=facts)
        assert said in refusal(f"run={broken}", "export.path=new")


def test_a_source_that_is_gone_is_refused(broken: Path, checkpoint: Path, refusal: Refusal) -> None:
    file = broken / "config.resolved.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace(str(checkpoint), "/nowhere/at/all"), encoding="utf-8")
    line = refusal(f"run={broken}", "export.path=new")
    assert line == f"run={broken}: its model is no longer at /nowhere/at/all; put it back there"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_what_belongs_to_the_source_and_was_damaged_since_is_refused_by_its_file(
    name: str, done: Run, checkpoint: Path, refusal: Refusal
) -> None:
    file = checkpoint / name
    whole = file.read_bytes()
    try:
        file.write_bytes(whole[:20])
        line = refusal(f"run={done.folder}", "export.path=new")
    finally:
        file.write_bytes(whole)
    assert line.startswith(f"model.path={file}: cannot be read (")


def test_r_bin_of_no_rotations_is_refused(done: Run, broken: Path, refusal: Refusal) -> None:
    file = broken / "config.resolved.yaml"
    text = file.read_text(encoding="utf-8").replace("r1: null", "r1: false").replace("r2: null", "r2: false")
    file.write_text(text.replace("learned: true", "learned: false"), encoding="utf-8")
    facts = load_rotations(broken / "rotations.safetensors").facts
    save_rotations(broken / "rotations.safetensors", {}, placements={}, online={}, facts=facts)
    line = refusal(f"run={broken}", "export.path=new", "export.format=r_bin")
    assert line == "export.format=r_bin: this run has no rotations; set export.format=checkpoint"


FULL_DISK = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
runpy.run_module("rotexp.export", run_name="__main__", alter_sys=True)
"""

TERMINATED = """
import os, runpy, signal
import rotexp.models.save as save
save._check_shapes = lambda *arguments: os.kill(os.getpid(), signal.SIGTERM)
runpy.run_module("rotexp.export", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("program", "code", "reason"), [(FULL_DISK, 1, "File too large"), (TERMINATED, 143, "interrupted by SIGTERM")]
)
def test_an_export_that_ends_in_the_middle_leaves_nothing(
    program: str, code: int, reason: str, done: Run, tmp_path: Path
) -> None:
    export = run_export(done.folder, tmp_path / "export", program=("-c", program))
    assert export.code == code
    assert export.errors.count("\n") == 1, export.errors
    assert export.errors.startswith("rotexp: the export failed: ")
    assert reason in export.errors
    assert export.errors.endswith(f"; export.path={tmp_path / 'export'} was not written\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "code", "reason"),
    [
        (3e38, 1, "rotexp: the export failed: invariance: rotating changed the float model's logits by "),
        (math.nan, 2, "model.layers.0.mlp.up_proj.weight in model.safetensors holds nan (row 0); "),
    ],
)
def test_weights_that_changed_since_the_run_still_make_a_true_export_or_none(
    value: float, code: int, reason: str, broken: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """The proof compares with the source as it is now; what is not a number is refused as it is read."""
    from safetensors.torch import save_file

    source = shutil.copytree(checkpoint, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = value
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    file = broken / "config.resolved.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace(str(checkpoint), str(source)), encoding="utf-8")
    given = load_rotations(broken / "rotations.safetensors")
    facts = given.facts | {"model": str(source)}
    save_rotations(
        broken / "rotations.safetensors", given.matrices, placements=given.placements or {}, online={}, facts=facts
    )
    export = run_export(broken, tmp_path / "export")
    assert (export.code, export.output) == (code, "")
    assert reason in export.errors
    assert not export.folder.exists()


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (
            ["--help"],
            ["Write a finished run as a plain ", "format: checkpoint", "online: false"],
        ),
        (["--cfg", "job", "--resolve", "run=a", "export.path=b"], ["run: a", "path: b", "dtype: auto"]),
    ],
)
def test_help_and_cfg_answer_without_torch(arguments: list[str], shown: list[str], tmp_path: Path) -> None:
    result = run_python("-X", "importtime", "-m", "rotexp.export", *arguments, cwd=tmp_path)
    assert result.returncode == 0
    assert [text for text in shown if text not in result.stdout] == []
    assert "global_batch_size" not in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert not imported & {"torch", "transformers", "accelerate", "wandb", "numpy"}
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_not_done_is_refused_without_torch_and_an_empty_working_folder_stays(
    broken: Path, tmp_path: Path
) -> None:
    change_summary(broken, status="failed")
    (tmp_path / "empty").mkdir()
    arguments = ["-X", "importtime", "-m", "rotexp.export", f"run={broken}", "export.path=new"]
    result = run_python(*arguments, cwd=tmp_path / "empty")
    assert result.returncode == 2
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert not imported & {"torch", "transformers"}
    assert os.listdir(tmp_path / "empty") == []
