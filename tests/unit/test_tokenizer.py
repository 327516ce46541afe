"""A tokenizer's files are taken over byte for byte; those that cannot be read are refused by the one at fault."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import torch
from transformers import AutoTokenizer, LlamaConfig, Qwen2Config

from rotexp.data.blocks import cut
from rotexp.data.corpora import builtin_corpus
from rotexp.errors.library import quiet_if_refused
from rotexp.models import tiny
from rotexp.models.save import companions, save_checkpoint
from rotexp.models.stored_model import RandomWeights, StoredModel
from rotexp.models.tokenizer import code_of_its_own, load_tokenizer, tokenizer_files

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
MESSAGES = [{"role": "system", "content": "Be  brief."}, {"role": "user", "content": "Grüße, 世界 🙂?"}]
TEXT = "def greet(name):\n\treturn f'Grüße, {name}!'\n\n  Two  spaces, 世界 🙂 <|extra|> <s> and more\n"
SHAPE = {
    "vocab_size": 2100,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def opened(place: Path) -> StoredModel:
    """A checkpoint of which only the place of its tokenizer matters."""
    return StoredModel("test", None, RandomWeights({}, seed=0), str(place))


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, indent=1)
        (folder / name).write_text(text, encoding="utf-8")


def make_sentencepiece(folder: Path) -> None:
    """Llama 2's layout: the sentencepiece model is all there is, with words of the special tokens beside it."""
    (folder / "corpus.txt").write_text(builtin_corpus().evaluation[:60_000], encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        minloglevel=2,
    )
    (folder / "corpus.txt").unlink()
    (folder / "tokenizer.vocab").unlink()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    described = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "chat_template": TEMPLATE, **special}
    write(folder, {"tokenizer_config.json": described, "special_tokens_map.json": special})
    LlamaConfig(**SHAPE).save_pretrained(folder)


def make_byte_pairs(folder: Path) -> None:
    """Qwen's layout: vocabulary and merges, and no `tokenizer.json`; a token is added by the configuration."""
    model = json.loads((tiny.FOLDER / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    added = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False) | {"special": True}
    described = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": {"2048": {"content": "<|extra|>"} | added},
        "eos_token": "<|endoftext|>",
        "unk_token": None,
        "chat_template": TEMPLATE,
    }
    files = {"vocab.json": model["vocab"], "merges.txt": "#version: 0.2\n" + "\n".join(pairs) + "\n"}
    write(folder, files | {"tokenizer_config.json": described, "added_tokens.json": {"<|extra|>": 2048}})
    Qwen2Config(**SHAPE).save_pretrained(folder)


def make_templates(folder: Path) -> None:
    """The layout of today: a fast tokenizer, its templates in files of their own."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tiny.FOLDER / name, folder)
    further = {"additional_chat_templates/tool_use.jinja": "tools: " + TEMPLATE}
    write(folder, {"chat_template.jinja": TEMPLATE, "vocab.bpe": "#version: 0.2\n", **further})
    write(folder, {"tool_chat.jinja": "kept"})
    (folder / "qwen.tiktoken").write_bytes(b"IQ== 0\nIg== 1\n")
    LlamaConfig(**SHAPE).save_pretrained(folder)


LAYOUTS: dict[str, tuple[Callable[[Path], None], set[str]]] = {
    "sentencepiece": (make_sentencepiece, {"tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"}),
    "byte pairs": (make_byte_pairs, {"vocab.json", "merges.txt", "tokenizer_config.json", "added_tokens.json"}),
    "templates": (
        make_templates,
        {
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
            "chat_template.jinja",
            "additional_chat_templates/tool_use.jinja",
            "tool_chat.jinja",
            "vocab.bpe",
            "qwen.tiktoken",
        },
    ),
}


def save(source: Path, target: Path) -> None:
    """Save a small model with what belongs to the source, as an export does."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source)
    auto: Any = AutoModelForCausalLM
    tensors = {name: tensor.clone() for name, tensor in auto.from_config(config).state_dict().items()}
    save_checkpoint(target, tensors, config, dtype=torch.float32, copied=companions(opened(source)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_saved_model_has_its_sources_tokenizer_byte_for_byte(layout: str, tmp_path: Path) -> None:
    make, names = LAYOUTS[layout]
    source, target = tmp_path / "source", tmp_path / "saved"
    source.mkdir()
    make(source)
    write(source, {"modeling_own.py": "raise SystemExit", "tokenizer.py": "raise SystemExit", "README.md": "read me"})
    save(source, target)
    assert set(companions(opened(source))) == names
    saved = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
    assert saved == names | {"config.json", "generation_config.json", "model.safetensors"}
    for name in names:
        assert (target / name).read_bytes() == (source / name).read_bytes(), name
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (source, target))
    assert type(after) is type(before)
    assert after.get_vocab() == before.get_vocab()
    assert after(TEXT)["input_ids"] == before(TEXT)["input_ids"]
    assert after.chat_template == before.chat_template
    chosen = {"chat_template": "tool_use"} if layout == "templates" else {}
    for extra in ({}, chosen):
        prompts = [each.apply_chat_template(MESSAGES, tokenize=False, **extra) for each in (before, after)]
        assert prompts[0] == prompts[1]
        assert "<user>Grüße, 世界 🙂?" in prompts[0]


def test_links_are_copied_as_what_they_point_at(tmp_path: Path) -> None:
    """The hub's cache keeps its files so."""
    for name in ("blobs", "source"):
        (tmp_path / name).mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.FOLDER / name, tmp_path / "blobs" / name[::-1])
        (tmp_path / "source" / name).symlink_to(Path("..") / "blobs" / name[::-1])
    LlamaConfig(**SHAPE).save_pretrained(tmp_path / "source")
    save(tmp_path / "source", tmp_path / "saved")
    assert not (tmp_path / "saved" / "tokenizer.json").is_symlink()
    assert (tmp_path / "saved" / "tokenizer.json").read_bytes() == (tiny.FOLDER / "tokenizer.json").read_bytes()


def test_the_shipped_model_is_saved_with_its_tokenizer_as_it_is(tmp_path: Path) -> None:
    assert companions(opened(tiny.FOLDER)).keys() == {
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    }


@pytest.mark.parametrize("content", ["", "[]", "{", "null", "\0\0"])
def test_a_generation_config_that_no_model_could_be_loaded_with_is_refused(content: str, tmp_path: Path) -> None:
    make_templates(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(
        ValueError, match=rf"^model\.path={tmp_path}/generation_config\.json: .*; correct it, or remove it$"
    ):
        companions(opened(tmp_path))


def test_code_beside_a_tokenizer_is_named_and_not_copied(tmp_path: Path) -> None:
    make_templates(tmp_path)
    assert code_of_its_own(tmp_path) == ""
    for auto_map in ({"AutoTokenizer": ["tokenization_own.Own", None]}, ["tokenization_own.Own", None]):
        write(tmp_path, {"tokenizer_config.json": {"auto_map": auto_map}, "tokenization_own.py": "raise SystemExit"})
        assert code_of_its_own(tmp_path) == "tokenization_own.Own"
        assert not [file for file in tokenizer_files(tmp_path) if file.suffix == ".py"]
        with pytest.raises(
            ValueError, match=rf"^model\.path={tmp_path}: its tokenizer is code \(tokenization_own\.Own\), "
        ):
            load_tokenizer(opened(tmp_path))


def test_a_fast_tokenizer_beside_code_is_read_once_nothing_asks_for_the_code(tmp_path: Path) -> None:
    make_templates(tmp_path)
    described = json.loads((tmp_path / DESCRIBED).read_text(encoding="utf-8")) | {"tokenizer_class": "Own"}
    code = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    write(tmp_path, {DESCRIBED: described | code, "tokenization_own.py": "raise SystemExit"})
    with pytest.raises(ValueError, match=r"^model\.path=") as caught:
        load_tokenizer(opened(tmp_path))
    assert str(caught.value) == (
        f"model.path={tmp_path}: its tokenizer is code (tokenization_own.Own), which is never run; remove auto_map "
        f"from its tokenizer_config.json to use the tokenizer.json there"
    )
    write(tmp_path, {DESCRIBED: described})
    assert load_tokenizer(opened(tmp_path))(TEXT) == load_tokenizer(opened(tiny.FOLDER))(TEXT)


def changed(**values: object) -> str:
    """Return the shipped `tokenizer.json` with other values."""
    return json.dumps(json.loads((tiny.FOLDER / "tokenizer.json").read_text(encoding="utf-8")) | values)


FAST, DESCRIBED = "tokenizer.json", "tokenizer_config.json"


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        (FAST, changed(pre_tokenizer={"type": "OfTomorrow"}), "cannot read it (data did not match any variant of"),
        (FAST, changed(model={"type": "OfTomorrow"}), "cannot read it (data did not match any variant of"),
        (FAST, changed(version="2.0"), "cannot read it (Unknown tokenizer version '2.0' at"),
        (FAST, changed(model={"type": "BPE", "vocab": {"a": -1}, "merges": []}), "cannot read it ("),
        (FAST, changed(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["b", "c"]]}), "cannot read it ("),
        (FAST, changed(model=None), "cannot read it ("),
        (FAST, "[]", "cannot be read (it holds no mapping)"),
        (FAST, "null", "cannot be read (it holds no mapping)"),
        (FAST, "", "cannot be read (it is empty)"),
        (FAST, changed()[:5000], "cannot be read (Expecting property name enclosed in"),
        (FAST, "\0" * 99, "cannot be read (it holds NUL bytes, as a crash leaves them)"),
        (FAST, "[" * 100_000, "cannot be read (it is nested too deeply)"),
        (FAST, changed().encode("utf-16"), "cannot be read (byte 0 is no UTF-8)"),
        (DESCRIBED, "[]", "cannot be read (it holds no mapping)"),
        (DESCRIBED, '"x"', "cannot be read (it holds no mapping)"),
        (DESCRIBED, "", "cannot be read (it is empty)"),
        (DESCRIBED, b"\xff\xfe", "cannot be read (byte 0 is no UTF-8)"),
        ("special_tokens_map.json", "null", "cannot be read (it holds no mapping)"),
        ("added_tokens.json", "[1]", "cannot be read (it holds no mapping)"),
        ("chat_template.jinja", b"\xff", "cannot be read (byte 0 is no UTF-8)"),
    ],
)
def test_the_file_that_is_damaged_or_too_new_is_named(
    name: str, content: str | bytes, fault: str, tmp_path: Path
) -> None:
    make_templates(tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"^model") as caught:
        load_tokenizer(opened(tmp_path))
    message = str(caught.value)
    assert message.startswith(f"model.path={tmp_path}/{name}: ")
    assert fault in message
    assert message.endswith("; fetch the tokenizer's files again")
    assert "\n" not in message


@pytest.mark.parametrize(
    "described",
    [
        {"tokenizer_class": 3},
        {"tokenizer_class": ["LlamaTokenizer"]},
        {"eos_token": ["</s>"]},
        {"added_tokens_decoder": {"first": {"content": "a"}}},
        {"added_tokens_decoder": [1]},
        {"extra_special_tokens": 3},
    ],
    ids=str,
)
def test_values_that_transformers_cannot_use_are_told_with_the_files_they_may_stand_in(
    described: dict[str, Any], tmp_path: Path
) -> None:
    make_templates(tmp_path)
    (tmp_path / "vocab.bpe").unlink()
    (tmp_path / "qwen.tiktoken").unlink()
    write(tmp_path, {DESCRIBED: {"tokenizer_class": "PreTrainedTokenizerFast"} | described})
    with pytest.raises(ValueError, match=r"^model") as caught:
        load_tokenizer(opened(tmp_path))
    assert str(caught.value).startswith(f"model.path={tmp_path}: transformers ")
    assert "cannot make a tokenizer of tokenizer.json, tokenizer_config.json (" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_or_a_broken_link_in_a_files_place_is_named(tmp_path: Path) -> None:
    make_templates(tmp_path)
    file = tmp_path / FAST
    file.unlink()
    file.mkdir()
    with pytest.raises(
        ValueError, match=rf"^model.path={file}: cannot be read \(Is a directory\); fetch the tokenizer's"
    ):
        load_tokenizer(opened(tmp_path))
    file.rmdir()
    file.symlink_to("nowhere")
    with pytest.raises(ValueError, match=rf"^model.path={file}: cannot be read \(No such file or directory\); f"):
        load_tokenizer(opened(tmp_path))


def test_a_panic_of_the_library_is_one_line_without_its_stack(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_templates(tmp_path)
    broken = changed(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    (tmp_path / FAST).write_text(broken, encoding="utf-8")
    line = rf"^model\.path={tmp_path}/{FAST}: tokenizers [\d.]+ cannot read it \(PanicException: Precompiled: "
    with pytest.raises(ValueError, match=line):
        load_tokenizer(opened(tmp_path))
    fixed_length = changed(pre_tokenizer={"type": "FixedLength", "length": 0})
    (tmp_path / FAST).write_text(fixed_length, encoding="utf-8")
    tokenizer = load_tokenizer(opened(tmp_path))
    line = (
        r"^data\.calibration: the tokenizer cannot read the text \(PanicException: chunk size must be non-zero\); use"
    )
    with pytest.raises(ValueError, match=line):
        cut("some text", tokenizer, length=2, rows=2048, key="data.calibration")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("failure", "shown"), [(None, True), (KeyboardInterrupt(), True), (ValueError("no"), False)])
def test_what_libraries_write_to_standard_error_comes_out_unless_something_is_refused(
    failure: BaseException | None, shown: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with suppress(ValueError, KeyboardInterrupt), quiet_if_refused():
        os.write(2, b"by a library\n")
        if failure is not None:
            raise failure
    os.write(2, b"later\n")
    assert capfd.readouterr().err == f"{'by a library' * shown}{chr(10) * shown}later\n"


@pytest.mark.parametrize("lost", ["merges.txt", "vocab.json"])
def test_a_vocabulary_without_its_other_half_is_refused(lost: str, tmp_path: Path) -> None:
    make_byte_pairs(tmp_path)
    (tmp_path / lost).unlink()
    with pytest.raises(ValueError, match=rf"^model\.path={tmp_path}: transformers [\d.]+ cannot make a tokenizer of "):
        load_tokenizer(opened(tmp_path))


def test_the_tokenizer_of_a_gguf_file_that_has_none_is_refused_by_the_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    line = (
        rf"^model\.path={file}: transformers cannot read the tokenizer in this GGUF file \(.*\); give the model as saf"
    )
    with pytest.raises(ValueError, match=line):
        load_tokenizer(opened(file))
    assert companions(opened(file)) == {}
