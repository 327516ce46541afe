"""Which file of a folder is read: the one transformers reads, tensor by tensor; what is no file of weights is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_gguf import write_gguf
from test_loading_files import (
    CONFIGS,
    SHAPE,
    asked,
    assert_equals_transformers,
    opened,
    randomize,
    reference_of,
    refusal,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from rotexp.models.load import resolve_model

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
ALL = (SINGLE, INDEX, PICKLED, PICKLED_INDEX)


@pytest.fixture(scope="module")
def source() -> dict[str, Tensor]:
    """The tensors of a random Llama, by name."""
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, tie_word_embeddings=False))
    randomize(model)
    return dict(model.state_dict())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with that model's config and no weights."""
    path = tmp_path / "model"
    LlamaConfig(**SHAPE, tie_word_embeddings=False).save_pretrained(path)
    return path


def write(file: Path, tensors: dict[str, Tensor]) -> None:
    if file.suffix == ".bin":
        torch.save(tensors, file)
    else:
        save_file(tensors, file, metadata={"format": "pt"})


def shards(folder: Path, index: str, tensors: dict[str, Tensor], *, to: str = "shard-{}") -> dict[str, str]:
    """Write tensors into three files and their index; return the index's map."""
    suffix = Path(index.removesuffix(".index.json")).suffix
    weight_map = {name: to.format(number % 3) + suffix for number, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        (folder / file).parent.mkdir(exist_ok=True)
        write(folder / file, {name: tensors[name] for name in tensors if weight_map[name] == file})
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def put(folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    shards(folder, name, tensors) if name.endswith(".json") else write(folder / name, tensors)


@pytest.mark.parametrize("there", [ALL[start:] for start in range(4)], ids=lambda names: names[0])
def test_of_several_forms_the_one_that_transformers_takes_is_read(
    folder: Path, source: dict[str, Tensor], there: tuple[str, ...]
) -> None:
    """Each form holds other values, so that a stale one shows; copies under other names are not looked at."""
    for number, name in enumerate(there):
        put(folder, name, {key: tensor + number for key, tensor in source.items()})
    for other in ("model.fp16.safetensors", "consolidated.safetensors", "training_args.bin", "optimizer.bin"):
        (folder / other).write_bytes(b"not read")
    checkpoint = opened(folder)
    assert torch.equal(checkpoint.read("lm_head.weight"), source["lm_head.weight"])
    assert_equals_transformers(checkpoint, reference_of(folder))


@pytest.mark.parametrize("named", ["other.safetensors", "other.safetensors.index.json"])
def test_a_file_that_the_config_names_comes_first_as_in_transformers(
    folder: Path, source: dict[str, Tensor], named: str
) -> None:
    put(folder, SINGLE, {name: tensor + 1 for name, tensor in source.items()})
    put(folder, named, source)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": named}))
    assert_equals_transformers(opened(folder), reference_of(folder))
    for wrong in ("../other.safetensors", "absent.safetensors", "config.json"):
        (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": wrong}))
        assert f"transformers_weights={wrong} of its config.json must be a file of weights in " in refusal(folder)


@pytest.mark.parametrize("index", [INDEX, PICKLED_INDEX])
def test_a_tensor_in_two_shards_is_read_from_the_one_that_the_index_names(
    folder: Path, source: dict[str, Tensor], index: str
) -> None:
    put(folder, SINGLE, source)
    reference = reference_of(folder)
    (folder / SINGLE).unlink()
    weight_map = shards(folder, index, source, to="parts/shard-{}")
    for file in sorted(set(weight_map.values())):  # each holds every tensor, all but one of them spoiled
        stale = {name: tensor if weight_map[name] == file else tensor + 1 for name, tensor in source.items()}
        write(folder / file, stale)
    assert_equals_transformers(opened(folder), reference)


@pytest.mark.parametrize("index", [INDEX, PICKLED_INDEX])
def test_what_the_index_passes_over_is_read_of_its_shards_as_in_transformers(
    folder: Path, source: dict[str, Tensor], index: str
) -> None:
    weight_map = shards(folder, index, source)
    del weight_map["model.norm.weight"]
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_equals_transformers(opened(folder), reference_of(folder))


def test_a_tensor_that_is_not_where_the_index_says_is_named_with_the_file(
    folder: Path, source: dict[str, Tensor]
) -> None:
    weight_map = shards(folder, INDEX, source)
    lost = weight_map["lm_head.weight"]
    write(folder / lost, {name: source[name] for name in source if weight_map[name] == lost and "head" not in name})
    assert refusal(folder) == (
        f"model.path={folder}/{lost}: lacks lm_head.weight, which the index beside it says lie there; "
        f"fetch the model again"
    )


@pytest.mark.parametrize("elsewhere", ["{}/outside.safetensors", "../outside.safetensors", "a/../../b.safetensors", ""])
def test_an_index_that_leads_out_of_its_folder_is_refused(
    folder: Path, source: dict[str, Tensor], elsewhere: str
) -> None:
    weight_map = shards(folder, INDEX, source)
    write(folder.parent / "outside.safetensors", source)
    named = elsewhere.format(folder.parent)
    changed = weight_map | {"lm_head.weight": named}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": changed}))
    assert refusal(folder) == (
        f"model.path={folder}/{INDEX}: must name files in its folder, not {named}; fetch it again"
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "it is empty"),
        ("{", "Expecting property name "),
        ("[]", "it holds no mapping"),
        ("null", "it holds no mapping"),
        ("\0" * 64, "it holds NUL bytes, as a crash leaves them"),
        ("{}", "it holds no weight_map, from tensors to files"),
        ('{"weight_map": {}}', "its weight_map is empty"),
        ('{"weight_map": {"a": 1}}', "it holds no weight_map, from tensors to files"),
        ("[" * 99_999, "it is nested too deeply"),
    ],
)
def test_an_index_that_cannot_be_read_is_named(folder: Path, content: str, why: str) -> None:
    for index in (PICKLED_INDEX, INDEX):
        (folder / index).write_text(content)
        message = refusal(folder)
        assert message.startswith(f"model.path={folder}/{index}: names no files of weights ({why}")
        assert len(message) < 400


def test_a_missing_shard_is_named_and_an_unfinished_download_said(folder: Path, source: dict[str, Tensor]) -> None:
    shards(folder, INDEX, source)
    (folder / "shard-1.safetensors").unlink()
    missing = f"model.path={folder}: shard-1.safetensors of its index is missing"
    assert refusal(folder) == f"{missing}; fetch the model again"
    traces = folder / ".cache" / "huggingface" / "download"
    traces.mkdir(parents=True)
    (traces / "abc.incomplete").write_bytes(b"half")
    assert refusal(folder) == f"{missing} (its download was not finished); fetch the model again"


def test_a_folder_without_weights_under_usual_names_says_what_there_is(folder: Path, source: dict[str, Tensor]) -> None:
    assert ": holds no weights; a folder with config.json and " in refusal(folder)
    (folder / "notes.txt").write_text("no weights")
    write(folder / "model.fp16.safetensors", source)
    message = refusal(folder)
    assert ": holds no weights under a usual name, only model.fp16.safetensors; name one of its files, or " in message
    with pytest.raises(OSError, match=r"no file named model.safetensors"):
        reference_of(folder)
    assert torch.equal(opened(folder / "model.fp16.safetensors").read("lm_head.weight"), source["lm_head.weight"])


def test_an_index_under_another_name_can_be_asked_for(folder: Path, source: dict[str, Tensor]) -> None:
    """A variant's, as hub repositories have them beside the usual one; transformers reads it with `variant`."""
    shards(folder, "model.safetensors.index.fp16.json", source)
    (folder / "model.safetensors.index.fp16.json").rename(folder / "fp16.safetensors.index.json")
    assert torch.equal(opened(folder / "fp16.safetensors.index.json").read("lm_head.weight"), source["lm_head.weight"])


@pytest.fixture
def linked(folder: Path, source: dict[str, Tensor], tmp_path: Path) -> Callable[[str], Path]:
    """Put a file as the hub's cache has it: a link whose target has a digest for a name."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()

    def link(name: str) -> Path:
        made = tmp_path / name
        write_gguf(made) if name.lower().endswith(".gguf") else write(made, source)
        shutil.move(made, blobs / "0a1b2c")
        (folder / name).symlink_to(os.path.relpath(blobs / "0a1b2c", folder))
        return folder / name

    return link


@pytest.mark.parametrize("name", [SINGLE, PICKLED, "model.SAFETENSORS", "model.gguf", "model.GGUF"])
def test_the_name_that_was_typed_decides_and_not_the_links_target(
    linked: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = linked(name)
    monkeypatch.chdir(file.parent)
    direct = opened(file)
    assert torch.equal(opened(Path(name)).read("lm_head.weight"), direct.read("lm_head.weight"))
    assert resolve_model(asked(Path(name)), direct).path == str(file)
    gguf = name.lower().endswith("gguf")
    assert direct.tokenizer == str(file if gguf else file.parent)
    if gguf:
        reference = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=name, dtype=torch.float32)
        assert_equals_transformers(direct, reference)


@pytest.mark.parametrize("name", [SINGLE, PICKLED])
def test_a_folder_of_links_is_read_and_a_linked_folder_has_its_own_name(
    linked: Callable[[str], Path], source: dict[str, Tensor], name: str
) -> None:
    folder = linked(name).parent
    assert_equals_transformers(opened(folder), reference_of(folder))
    (folder.parent / "latest").symlink_to(folder)
    assert opened(folder.parent / "latest").identity == str(folder)
    assert opened(folder.parent / "latest" / name).identity == str(folder.parent / "latest" / name)


@pytest.mark.parametrize("form", [SINGLE, INDEX])
def test_a_link_from_elsewhere_has_the_config_and_tokenizer_of_what_it_leads_to(
    linked: Callable[[str], Path], source: dict[str, Tensor], form: str
) -> None:
    """The first folder on the way that has a config, not the last: the cache's blobs have none beside them."""
    folder = linked(SINGLE).parent
    if form == INDEX:
        (folder / SINGLE).unlink()
        shards(folder, INDEX, source)
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / f"step.{form}").symlink_to(Path("..") / folder.name / form)
    typed = folder.parent / f"here.{form}"
    typed.symlink_to(Path("elsewhere") / f"step.{form}")
    checkpoint = opened(typed)
    assert (checkpoint.identity, checkpoint.tokenizer) == (str(typed), str(folder))
    assert_equals_transformers(checkpoint, reference_of(folder))
    deeper: Any = CONFIGS["llama"].to_dict() | {"num_hidden_layers": 3}
    LlamaConfig(**deeper).save_pretrained(typed.parent)
    nearest = "missing: model.layers.2." if form == SINGLE else "shard-0.safetensors, shard-1.safetensors, "
    assert nearest in refusal(typed)  # the config beside the typed name comes first
    for file in (typed.parent, folder):
        (file / "config.json").unlink()
    assert refusal(typed).startswith(f"model.path={typed.parent}: holds no config.json")


def test_a_link_to_nothing_is_said(folder: Path) -> None:
    (folder / SINGLE).symlink_to("../blobs/gone")
    assert refusal(folder / SINGLE) == (
        f"model.path={folder}/{SINGLE}: is a link to ../blobs/gone, which is not there; fetch the model again"
    )


@pytest.mark.parametrize("name", ALL)
def test_a_folder_whose_weights_are_a_link_to_nothing_names_it_and_what_it_leads_to(folder: Path, name: str) -> None:
    """As a hub's cache is after its blobs were removed."""
    (folder / name).symlink_to("../blobs/gone")
    assert refusal(folder) == (
        f"model.path={folder}/{name}: is a link to ../blobs/gone, which is not there; fetch the model again"
    )


def test_a_config_that_is_a_link_to_nothing_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("../blobs/gone")
    assert refusal(folder).startswith(f"model.path={folder}/config.json: is a link to ../blobs/gone, which is not ther")


def test_folders_and_broken_links_are_not_offered_as_files_of_weights(folder: Path) -> None:
    (folder / SINGLE).mkdir()
    (folder / "other.safetensors").symlink_to("gone")
    assert ": holds no weights; a folder with config.json and " in refusal(folder)


def test_a_file_without_a_suffix_is_refused(folder: Path, source: dict[str, Tensor]) -> None:
    write(folder / SINGLE, source)
    (folder / SINGLE).rename(folder / "blob")
    assert refusal(folder / "blob").endswith("or a .safetensors, .bin or .gguf file; name one")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("name", [SINGLE, PICKLED, INDEX, "model.gguf"])
@pytest.mark.parametrize(("content", "what"), [(POINTER, "it is a Git LFS pointer"), (b"", "it is empty")])
def test_pointers_and_empty_files_are_said(folder: Path, name: str, content: bytes, what: str) -> None:
    (folder / name).write_bytes(content)
    asked_for = folder / name if name.endswith("gguf") else folder
    message = refusal(asked_for)
    assert message.startswith(f"model.path={folder}/{name}: ")
    assert f"({what}" in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        (SINGLE, b"GGUF" + bytes(99), "it is a GGUF file"),
        (SINGLE, b"<!DOCTYPE html>", "it is a web page"),
        (PICKLED, bytes(8) + b"{}", "it may be safetensors"),
        (PICKLED, b"PK\x03\x04" + bytes(50), "not in the format of torch 1.6 and later"),
    ],
)
def test_files_that_are_another_kind_than_they_are_named_are_said(
    folder: Path, name: str, content: bytes, what: str
) -> None:
    (folder / name).write_bytes(content)
    assert f"({what}" in refusal(folder)


def test_torch_files_of_before_1_6_are_said(folder: Path, source: dict[str, Tensor]) -> None:
    torch.save(source, folder / PICKLED, _use_new_zipfile_serialization=False)
    assert "cannot be read as torch tensors (not in the format of torch 1.6 and later); fetch" in refusal(folder)


def test_torch_saved_as_safetensors_is_said(folder: Path, source: dict[str, Tensor]) -> None:
    torch.save(source, folder / SINGLE)
    assert "(it is a file of torch.save, and must be named .bin)" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", [SINGLE, PICKLED])
def test_weights_that_are_no_floats_are_refused_by_name(
    folder: Path, source: dict[str, Tensor], name: str, dtype: torch.dtype
) -> None:
    tensor = "model.layers.1.mlp.up_proj.weight"
    write(folder / name, source | {tensor: torch.zeros(48, 32).to(dtype)})
    message = refusal(folder)
    assert message.startswith(f"model.path={folder}: {tensor} in {name} is stored in ")
    assert message.endswith("in float64, float32, float16, bfloat16; give the unquantized checkpoint")
    write(folder / name, source | {"model.rotary_emb.inv_freq": torch.zeros(4).to(dtype)})
    assert torch.equal(opened(folder).read(tensor), source[tensor])


def test_sparse_tensors_are_refused(folder: Path, source: dict[str, Tensor]) -> None:
    torch.save(source | {"lm_head.weight": source["lm_head.weight"].to_sparse()}, folder / PICKLED)
    assert "must hold tensors by name and nothing else" in refusal(folder)


def test_a_trainers_other_files_are_no_weights(folder: Path, source: dict[str, Tensor]) -> None:
    torch.save({"state": {0: torch.ones(2)}, "param_groups": []}, folder / "optimizer.bin")
    assert "must hold tensors by name and nothing else" in refusal(folder / "optimizer.bin")


def test_an_adapter_is_said(folder: Path, source: dict[str, Tensor]) -> None:
    write(folder / "adapter_model.safetensors", {"base_model.model.lm_head.lora_A.weight": torch.ones(2, 2)})
    assert "holds an adapter that is not merged (such as base_model.model.lm_head.lora_A.weight); " in refusal(
        folder / "adapter_model.safetensors"
    )
    (folder / "adapter_config.json").write_text("{}")
    message = refusal(folder)
    assert message.startswith(f"model.path={folder}: holds an adapter such as LoRA's (adapter_config.json); ")
    assert message.endswith("give that folder")
    write(folder / SINGLE, source)
    assert refusal(folder).endswith(f", or name {folder}/{SINGLE} to read it without")
    assert torch.equal(opened(folder / SINGLE).read("lm_head.weight"), source["lm_head.weight"])


def test_a_folder_of_gguf_files_is_said_to_need_a_name(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        write_gguf(tmp_path / f"{name}.gguf")
    assert refusal(tmp_path) == (
        f"model.path={tmp_path}: holds GGUF files; name one of them: a.gguf, b.gguf, c.gguf and 1 more"
    )


def test_an_unquantized_file_is_read_in_every_float(folder: Path, source: dict[str, Tensor]) -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        tensors = {name: tensor.to(dtype) for name, tensor in source.items()}
        write(folder / SINGLE, tensors)
        assert torch.equal(opened(folder).read("lm_head.weight"), load_file(folder / SINGLE)["lm_head.weight"])
