"""Texts, checkpoints and folders that cannot work: one line that names the key, exit code 2, nothing started."""

import gzip
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import AutoModelForCausalLM, Gemma2Config

from rotexp.models import tiny
from rotexp.train import main

Refusal = Callable[..., str]


@pytest.fixture
def refusal(
    small: list[str],
    own_logging: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Refusal:
    """Ask for the small run with other arguments; returns the line that refuses it."""

    def ask(*arguments: str) -> str:
        given = {argument.partition("=")[0] for argument in arguments}
        kept = [override for override in small if override.partition("=")[0] not in given]
        folder = tmp_path / "run"
        monkeypatch.setattr(sys, "argv", ["rotexp.train", *kept, *arguments, f"hydra.run.dir={folder}"])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        assert (end.value.code, captured.out) == (2, "")
        assert captured.err.count("\n") == 1, captured.err
        assert captured.err.startswith("rotexp: ")
        assert not folder.exists()
        return captured.err.removeprefix("rotexp: ").rstrip("\n")

    return ask


@pytest.fixture
def broken(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint for the test to break."""
    return shutil.copytree(checkpoint, tmp_path / "broken")


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | values), encoding="utf-8")


@pytest.mark.parametrize("key", ["data.calibration", "data.evaluation"])
def test_a_text_that_cannot_be_read_is_named_by_its_key(key: str, refusal: Refusal, tmp_path: Path) -> None:
    latin, empty = tmp_path / "latin.txt", tmp_path / "empty.txt"
    latin.write_bytes("Grüße".encode("latin-1") * 1000)
    empty.write_text(" \n", encoding="utf-8")
    nowhere = tmp_path / "nowhere.txt"
    assert refusal(f"{key}={nowhere}") == f"{key}={nowhere}: no such file; give the path of an existing UTF-8 text file"
    (tmp_path / "folder").mkdir()
    folder = tmp_path / "folder"
    assert refusal(f"{key}={folder}") == f"{key}={folder}: is a folder without files; name one that holds texts"
    assert refusal(f"{key}={latin}").startswith(f"{key}={latin}: is not UTF-8 (byte 2); convert it")
    assert refusal(f"{key}={empty}") == f"{key}={empty}: is empty; give a file that contains text"


def test_a_text_without_permission_is_named_by_its_key(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run as root, whom no permission stops: a file of /proc that even root may not read stands in."""
    unreadable = Path("/proc/self/mem")
    if not unreadable.exists():
        pytest.skip("needs /proc")
    line = refusal(f"data.calibration={unreadable}")
    assert line.startswith(f"data.calibration={unreadable}: cannot be read (")
    assert "check the path and its permissions" in line


def test_one_text_under_two_names_is_refused_however_it_is_written(
    refusal: Refusal, small: list[str], tmp_path: Path
) -> None:
    (calibration,) = (line.partition("=")[2] for line in small if line.startswith("data.calibration="))
    text = Path(calibration).read_text(encoding="utf-8")
    rows = "".join(json.dumps({"text": paragraph}) + "\n" for paragraph in text.split("\n\n"))
    written = {
        "copy.txt": text.encode(),
        "lines.txt": b"\xef\xbb\xbf" + text.replace("\n", " \r\n").encode(),
        "packed": gzip.compress(text.encode()),
        "rows.jsonl": rows.encode(),
    }
    for name, content in written.items():
        (tmp_path / name).write_bytes(content)
        line = refusal(f"data.evaluation={tmp_path / name}", *["data.field=text"] * (name == "rows.jsonl"))
        assert line.startswith(
            f"data.evaluation={tmp_path / name}: holds the same text as data.calibration={calibration}, "
        )
    (tmp_path / "link").symlink_to(calibration)
    assert "another file than data.calibration" in refusal(f"data.evaluation={tmp_path / 'link'}")


def test_a_field_of_texts_that_have_none_is_refused(refusal: Refusal) -> None:
    assert refusal("data.field=text") == "data.field=text: must be null where both texts are plain; leave it out"


@pytest.mark.parametrize("key", ["data.calibration", "data.evaluation"])
def test_a_process_substitution_is_refused_before_it_is_read(key: str, refusal: Refusal) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"A text that can be read once.")
    os.close(writing)
    line = refusal(f"{key}=/dev/fd/{reading}")
    assert line.startswith(f"{key}=/dev/fd/{reading}: is a pipe or file of this command alone, which a resumed or ")
    assert os.read(reading, 99) == b"A text that can be read once."
    os.close(reading)


def test_a_text_shorter_than_one_block_is_refused_with_its_length(refusal: Refusal, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Three short words.", encoding="utf-8")
    for key, length in (("data.calibration", "data.sequence_length"), ("data.evaluation", "evaluation.window")):
        line = refusal(f"{key}={short}")
        assert line.startswith(key)
        assert "fewer than one block of 32" in line
        assert length in line


def test_a_text_with_fewer_blocks_than_a_batch_is_refused_with_their_number(refusal: Refusal, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a few words only, " * 12, encoding="utf-8")
    line = refusal(f"data.calibration={short}", "data.global_batch_size=64")
    assert line.startswith("data.global_batch_size=64: the calibration text has only ")
    assert "lower it" in line


def test_lengths_beyond_the_models_positions_are_refused(refusal: Refusal) -> None:
    for key in ("data.sequence_length", "evaluation.window"):
        line = refusal(f"{key}=257")
        assert line.startswith(f"{key}=257: ")
        assert "256 positions; shorten it" in line


def test_a_model_that_is_not_there_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", Path("no/such-model-anywhere")):
        line = refusal(f"model.path={path}")
        assert line.startswith(f"model.path={path}: no such folder, and the hub did not give it (")
        assert line.endswith("; name a folder")


def test_a_file_instead_of_a_folder_is_refused(refusal: Refusal, checkpoint: Path) -> None:
    file = checkpoint / "config.json"
    allowed = "must be a folder, a hub id, or a .safetensors, .bin or .gguf file; name one"
    assert refusal(f"model.path={file}") == f"model.path={file}: {allowed}"


def test_a_folder_without_configuration_is_refused(refusal: Refusal, broken: Path) -> None:
    (broken / "config.json").unlink()
    line = refusal(f"model.path={broken}")
    assert line == f"model.path={broken}: holds no config.json; name a Hugging Face checkpoint folder"


def test_a_folder_without_weights_is_refused(refusal: Refusal, broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    assert refusal(f"model.path={broken}").startswith(f"model.path={broken}: holds no weights; a folder with ")
    (broken / "pytorch_model.bin").write_bytes(b"no weights")
    line = refusal(f"model.path={broken}")
    assert line.startswith(f"model.path={broken}/pytorch_model.bin: cannot be read as torch tensors (")


def test_a_shard_that_the_index_names_but_is_missing_is_named(refusal: Refusal, broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    line = refusal(f"model.path={broken}")
    assert line.startswith(f"model.path={broken}: model-00001-of-00001.safetensors of its index is missing; ")


def test_a_damaged_weights_file_is_refused(refusal: Refusal, broken: Path) -> None:
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])
    line = refusal(f"model.path={broken}")
    assert line.startswith("model.path")
    assert str(file) in line
    assert "cannot be read as safetensors (" in line
    assert "fetch it again" in line


def test_missing_unexpected_and_misshapen_tensors_are_each_named(refusal: Refusal, broken: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.extra"] = torch.zeros(3)
        tensors["model.norm.weight"] = torch.zeros(7)

    change_tensors(broken, change)
    line = refusal(f"model.path={broken}")
    assert line.startswith(f"model.path={broken}: ")
    assert "missing: model.layers.1.mlp.up_proj.weight" in line
    assert "unexpected: model.layers.0.self_attn.q_proj.extra" in line
    assert "of another shape: model.norm.weight ([7] instead of [48])" in line


def test_an_architecture_not_yet_supported_is_named_with_those_that_are(refusal: Refusal, broken: Path) -> None:
    change_config(broken, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    line = refusal(f"model.path={broken}")
    assert "model_type=gpt2" in line
    assert "not supported, and no supported one has its structure; supported: cohere" in line


def test_an_unknown_or_missing_architecture_is_refused(refusal: Refusal, broken: Path) -> None:
    change_config(broken, model_type="made_up")
    assert "model_type=made_up" in refusal(f"model.path={broken}")
    (broken / "config.json").write_text("{}", encoding="utf-8")
    assert refusal(f"model.path={broken}").startswith("model.path=")
    (broken / "config.json").write_text("not JSON", encoding="utf-8")
    assert refusal(f"model.path={broken}").startswith("model.path=")


def test_code_that_a_checkpoint_brings_is_never_run(refusal: Refusal, broken: Path) -> None:
    trap = broken / "trapped"
    (broken / "modeling_trap.py").write_text(f"open({str(trap)!r}, 'w').close()\n", encoding="utf-8")
    auto = {"AutoConfig": "modeling_trap.Config", "AutoModelForCausalLM": "modeling_trap.Model"}
    change_config(broken, model_type="made_up", auto_map=auto)
    refusal(f"model.path={broken}")
    assert not trap.exists()


def test_a_checkpoint_without_a_tokenizer_is_refused(refusal: Refusal, broken: Path) -> None:
    for file in broken.glob("tokenizer*"):
        file.unlink()
    line = refusal(f"model.path={broken}")
    assert line.startswith(f"model.path={broken}: no tokenizer could be read there (")
    assert line.endswith("; add its files")


def test_a_group_size_that_does_not_divide_is_refused_naming_both(refusal: Refusal) -> None:
    line = refusal("quant.weights.group_size=7")
    assert line.startswith("quant")
    assert "group_size=7 does not divide the width 48; set 6 or 8, or null" in line


@pytest.mark.parametrize("status", ["done", "failed", "running"])
def test_a_folder_that_holds_a_run_is_refused_if_it_is_done_or_must_not_be_continued(
    status: str,
    small: list[str],
    own_logging: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = json.dumps({"status": status})
    (tmp_path / "summary.json").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["rotexp.train", *small, "resume=never", f"hydra.run.dir={tmp_path}"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    remedies = {"done": "; choose another, or remove it"}
    remedy = remedies.get(status, ", and resume=never; choose another, or resume=auto to continue it")
    expected = f"hydra.run.dir={tmp_path}: already holds a run (status {status}){remedy}"
    assert capsys.readouterr().err == f"rotexp: {expected}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert (tmp_path / "summary.json").read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("argument", "method"), [("sync_mode=universal", "wait_for_unshard"), ("sharding=full", "_init_mp_dtypes")]
)
def test_a_torch_whose_private_methods_take_something_else_is_refused_before_a_model_is_looked_for(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch, argument: str, method: str
) -> None:
    monkeypatch.setattr(FSDPParamGroup, method, lambda self, stream: None)
    line = refusal(argument, "model.path=/nowhere")
    taken = f"torch {torch.__version__} has FSDPParamGroup.{method}(self, stream), not {method}(self); "
    assert line.startswith(f"{argument}: {taken}")


def test_training_nothing_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    shape = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Gemma2Config(**shape, num_key_value_heads=2, head_dim=12, vocab_size=2048)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gemma")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.FOLDER / file, tmp_path / "gemma")
    line = refusal(f"model.path={tmp_path / 'gemma'}", "rotation.r2=false")
    assert "rotation.learned=true: nothing is left to train (R1 is left out: " in line
