"""What goes wrong with a model of the user's own is refused or found, and nothing that is right is."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from own_models import TOKENS, error, logits, small_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, OPTConfig

import rotexp
from rotexp.orthogonal.stiefel import polar_projection
from rotexp.quant.spec import QuantSpec
from rotexp.rotation import proof
from rotexp.rotation.model import RotatedModel


def train(placed: RotatedModel, optimizer: Any, *, steps: int) -> None:
    """Step as the guide says."""
    with placed.mode.set(rotate=True, quantize=True):
        for _step in range(steps):
            placed.network(TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_rotations_that_left_orthogonality_are_refused_by_name_and_can_be_projected() -> None:
    placed = rotexp.place(small_model())
    rotexp.prepare(placed)
    train(placed, torch.optim.AdamW(placed.bank.parameters(), lr=0.01), steps=10)
    with pytest.raises(ArithmeticError, match=r"^merge: R1, R2_0, R2_1 left orthogonality \(max.* rotexp\.CayleySGD"):
        rotexp.merge(placed)
    assert set(dict(placed.bank.items())) == {"R1", "R2_0", "R2_1"}
    placed.bank.assign({name: polar_projection(matrix) for name, matrix in placed.bank.items()})
    assert rotexp.merge(placed) < 1e-5


def test_a_merge_is_held_against_the_model_as_it_was_before_it_was_prepared() -> None:
    placed = rotexp.place(small_model())
    rotexp.prepare(placed)
    with torch.no_grad():
        placed.bank["R1"].mul_(1.0 + 1e-4)  # too little to be refused by name, so that rotated and merged agree
    with pytest.raises(ArithmeticError, match="merging changed the logits"):
        rotexp.merge(placed)
    for going_on in (rotexp.merge, rotexp.prepare):
        with pytest.raises(ValueError, match=r"^(merge|prepare): the proof failed, .*; load the model anew$"):
            going_on(placed)


def test_weights_that_were_trained_too_are_merged_against_the_rotated_model(tmp_path: Path) -> None:
    model = small_model()
    original = logits(model)
    placed = rotexp.place(model)
    rotexp.prepare(placed)
    head = model.lm_head.weight.requires_grad_()
    train(placed, torch.optim.SGD([head], lr=0.1), steps=2)
    with placed.mode.set(rotate=True, quantize=False):
        trained = logits(model)
    assert error(trained, original) > 1e-3
    assert rotexp.merge(placed) < 1e-5
    assert error(logits(model), trained) < 1e-5
    assert rotexp.export(placed, tmp_path / "saved").is_dir()


def test_after_a_proof_that_failed_nothing_goes_on(tmp_path: Path) -> None:
    placed = rotexp.place(small_model())
    with torch.no_grad():
        placed.bank["R1"].mul_(1.1)
    with pytest.raises(ArithmeticError, match="rotating changed the float model"):
        rotexp.prepare(placed)
    with pytest.raises(ValueError, match=r"^prepare: the proof failed, .*; load the model anew$"):
        rotexp.prepare(placed)
    with pytest.raises(ValueError, match=r"^merge: the proof failed, .*; load the model anew$"):
        rotexp.merge(placed)
    with pytest.raises(ValueError, match=r"^export: the proof failed, .*; load the model anew$"):
        rotexp.export(placed, tmp_path / "new")
    with pytest.raises(ValueError, match=r"^mode.rotate=True: the proof failed"), placed.mode.set(**TURNED):
        pass


TURNED = {"rotate": True, "quantize": False}


def test_a_model_is_rotated_only_once_it_is_prepared() -> None:
    placed = rotexp.place(small_model())
    with pytest.raises(ValueError, match=r"^mode.rotate=True: norms are not folded yet, .*"), placed.mode.set(**TURNED):
        pass
    assert not placed.mode.rotate
    with placed.mode.set(rotate=False, quantize=True):
        logits(placed.network)
    rotexp.prepare(placed)
    with placed.mode.set(**TURNED):
        logits(placed.network)


def test_proofs_drop_nothing_at_random_and_leave_every_module_in_its_own_mode() -> None:
    model = small_model(attention_dropout=0.5).train()
    placed = rotexp.place(model)
    model.model.layers[1].mlp.eval()
    before = {name: module.training for name, module in model.named_modules()}
    state = torch.get_rng_state()
    assert rotexp.prepare(placed) < 1e-5
    assert rotexp.merge(placed) < 1e-5
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: module.training for name, module in model.named_modules()} == before


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_baked_is_baked_by_equal_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas' fewest threads, which here another rank would have."""
    seen, prepare = [], proof.prepare
    monkeypatch.setattr(proof, "prepare", lambda model: (seen.append(torch.get_num_threads()), prepare(model)))
    monkeypatch.setattr(proof.Communication, "reduce_", lambda _self, tensor, _operation="sum": tensor.fill_(threads))
    before = torch.get_num_threads()
    rotexp.prepare(rotexp.place(small_model()))
    assert seen == [threads]
    assert torch.get_num_threads() == before


NOT_TOKENS: dict[str, Any] = {
    r"^token_ids: str are no token ids; give an integer tensor \(batch, tokens\)$": "text",
    r"^token_ids: \(3,\) are no token ids; ": torch.tensor([1, 2, 3]),
    r"^token_ids: \(1, 2\) are no token ids; ": torch.zeros(1, 2),
    r"^token_ids: must be from 0 to 63, one at least; ": torch.tensor([[64]]),
}


@pytest.mark.parametrize("reason", NOT_TOKENS)
def test_tokens_that_are_none_are_refused_before_anything_changes(reason: str) -> None:
    placed = rotexp.place(small_model())
    with pytest.raises(ValueError, match=reason):
        rotexp.prepare(placed, NOT_TOKENS[reason])
    assert rotexp.prepare(placed, TOKENS) < 1e-5


@pytest.mark.parametrize("given", [None, "tiny", 3])
def test_what_is_no_model_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^place: \w+ is no Hugging Face model; load one by AutoModelForCausalLM$"):
        rotexp.place(given)


@pytest.mark.parametrize("name", ["prepare", "merge"])
def test_what_was_not_placed_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: LlamaForCausalLM is no placed model; give what rotexp.place"):
        getattr(rotexp, name)(small_model())


def test_texts_in_options_are_converted_as_a_run_converts_them() -> None:
    texts: Any = rotexp.RotationConfig("mine", init="random"), rotexp.QuantConfig("mine", weights=QuantSpec(bits="4"))  # type: ignore[arg-type]
    by_text = rotexp.place(small_model(), rotation=texts[0], quant=texts[1])
    by_name = rotexp.place(small_model(), rotation="random", quant=rotexp.QuantConfig("mine", QuantSpec(4)))
    assert torch.equal(by_text.bank["R1"], by_name.bank["R1"])
    specs = [module.weight_quantizer.spec for module in by_text.rotated_modules]
    assert specs == [module.weight_quantizer.spec for module in by_name.rotated_modules]


WRONG: dict[str, dict[str, Any]] = {
    r"init: Invalid value 'nope', expected one of \[hadamard, random, identity\]": {
        "rotation": rotexp.RotationConfig("mine", init="nope")  # type: ignore[arg-type]
    },
    r"^plugins=\[nomod\]: there is no module nomod; install its package": {
        "quant": rotexp.QuantConfig("mine", weights=QuantSpec(_target_="nomod.NF4"))
    },
    r"weights: Invalid type assigned: int is not a subclass of QuantSpec": {"quant": rotexp.QuantConfig("mine", 4)},  # type: ignore[arg-type]
    r"^seed='a': must be a whole number; give one$": {"seed": "a"},
}


@pytest.mark.parametrize("reason", WRONG)
def test_options_of_the_wrong_kind_are_refused_and_the_model_stays(reason: str) -> None:
    model = small_model()
    with pytest.raises(ValueError, match=reason):
        rotexp.place(model, **WRONG[reason])
    assert not any("rotation" in name for name, _ in model.named_parameters())


def small_opt() -> Any:
    torch.manual_seed(0)
    sizes = {"ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 80}
    config = OPTConfig(vocab_size=64, hidden_size=32, word_embed_proj_dim=32, tie_word_embeddings=False, **sizes)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    nn.init.normal_(model.model.decoder.final_layer_norm.bias)
    return model


OPT_NEEDS = (
    r"^export.format=checkpoint: the merged model has 1 parameters that the plain one lacks \(such as lm_head.bias\) "
    r"and needs 3 norms of model_type=opt as RMSNorm at run time; "
)


def test_one_message_says_all_that_a_model_with_new_biases_needs(tmp_path: Path) -> None:
    placed = rotexp.place(small_opt())
    rotexp.prepare(placed)
    with pytest.raises(ValueError, match=OPT_NEEDS + r"set export.format=r_bin and export.online=true$"):
        rotexp.export(placed, tmp_path / "new")
    assert rotexp.export(placed, tmp_path / "new", ["export.format=r_bin", "export.online=true"]).is_dir()
    rotexp.merge(placed)
    with pytest.raises(ValueError, match=OPT_NEEDS + r"load the model anew, .*, and before it is merged set export"):
        rotexp.export(placed, tmp_path / "other")


def test_one_message_says_that_a_model_is_not_merged_and_needs_a_transform(tmp_path: Path) -> None:
    placed = rotexp.place(small_model(), rotation="learned_r4")
    rotexp.prepare(placed)
    with pytest.raises(ValueError, match=r"^export: the rotations are not merged .*; also export.online=false: .* R4"):
        rotexp.export(placed, tmp_path / "new")


def _saved(placed: RotatedModel, folder: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed.network.save_pretrained(folder)  # type: ignore[operator]
    return [str(warning.message) for warning in caught if "rotation_bank" in str(warning.message)]


def test_saving_warns_until_rotations_are_merged(tmp_path: Path) -> None:
    placed = rotexp.place(small_model())
    rotexp.prepare(placed)
    for each in (placed, copy.deepcopy(placed)):
        (warned,) = _saved(each, tmp_path / "unmerged")
        assert "call rotexp.merge(placed) before" in warned
    rotexp.merge(placed)
    assert _saved(placed, tmp_path / "merged") == []
    weights: Tensor = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").lm_head.weight
    assert torch.equal(weights, placed.network.lm_head.weight)  # type: ignore[arg-type,union-attr]
