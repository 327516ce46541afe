"""What a run reads, opened and checked once, before any rank starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rotexp.config.schema import Config
from rotexp.config.targets import made
from rotexp.data.blocks import BlockSampler, TokenBlocks, cut, unknown_share
from rotexp.data.corpora import Corpus, builtin_corpus, cut_to, text_digest, wikitext2_corpus
from rotexp.data.options import DataConfig, DataSource
from rotexp.data.overlap import PASSAGE, SHORTEST_UNIT, Repetition, repetition
from rotexp.data.source import TextSource, fault_of_corpus
from rotexp.data.text_files import find_text
from rotexp.errors.library import refused
from rotexp.experiment.beginning import Beginning
from rotexp.models.load import open_checkpoint
from rotexp.models.stored_model import RandomWeights, StoredModel
from rotexp.models.tokenizer import load_tokenizer
from rotexp.rotation.building import build_for_run
from rotexp.rotation.model import RotatedModel, start_from_file

DOUBTED_SHARE = 0.1
"""Of unknown tokens; natural text of a model's own language has far fewer."""

USUAL_SHARE = 0.05
"""Of whole lines and sentences that unrelated texts may have in common; the built-in ones have 2.6% at the defaults."""

BuiltinCorpus = Callable[[], Corpus]
"""Returns the built-in texts."""


@dataclass(frozen=True)
class Inputs:
    """Checked inputs, picklable for the ranks.

    Attributes:
        calibration: token ids (blocks, data.sequence_length).
        evaluation: token ids (windows, evaluation.window).
        protocol: how held-out figures are made: digests, window, stride, tokens scored.
        beginning: the checkpoint the run begins at, if any.
        warnings: what people may not expect of the texts and the tokenizer.
    """

    checkpoint: StoredModel
    calibration: TokenBlocks
    evaluation: TokenBlocks
    protocol: dict[str, Any]
    beginning: Beginning = field(default_factory=Beginning)
    warnings: tuple[str, ...] = ()


def read_corpus(data: DataConfig, *, builtin: BuiltinCorpus = builtin_corpus) -> tuple[Corpus, list[str]]:
    """Read calibration and evaluation text; return them, and what people may not expect of them.

    Args:
        builtin: returns the built-in texts where those are asked for.

    Raises:
        ValueError: a file is missing or unreadable, the hub did not give the data set, or both are the same text.
    """
    corpus, longer = read_within_limit(data, builtin=builtin)
    if corpus.calibration_spelling == corpus.evaluation_spelling:
        calibration, evaluation = f"data.calibration={data.calibration}", f"data.evaluation={data.evaluation}"
        if data.target is not None:
            calibration, evaluation = "calibration", f"data._target_={data.target}: evaluation"
        raise ValueError(
            f"{evaluation}: holds the same text as {calibration}, whatever its name and spelling; held-out figures "
            f"need text that was not trained on"
        )
    limit = f"data.max_characters={data.max_characters}"
    return corpus, [f"{limit}: {key} is longer, and no more of it is read; null reads all" for key in longer]


def read_within_limit(data: DataConfig, *, builtin: BuiltinCorpus = builtin_corpus) -> tuple[Corpus, list[str]]:
    """Read both texts, whatever they hold, up to the limit; return them, and the keys of those that were longer.

    Raises:
        ValueError: a file is missing or unreadable, or the hub did not give the data set.
    """
    return cut_to(_read_whole_corpus(data, builtin), data.max_characters)


def _read_whole_corpus(data: DataConfig, builtin: BuiltinCorpus) -> Corpus:
    """Read both texts, of the user's own no more than is needed to see whether they are longer than the limit."""
    match data.source:
        case None:
            return _read_own(data)
        case DataSource.builtin:
            return builtin()
        case DataSource.wikitext2:
            return wikitext2_corpus(path=data.path or "Salesforce/wikitext", revision=data.revision)
        case DataSource.text:
            return _read_texts(data)


def _read_own(data: DataConfig) -> Corpus:
    """Read both texts from the source that `_target_` names.

    Raises:
        ValueError: it raised something, or gave no two texts.
    """
    where = f"data._target_={data.target}"
    source: TextSource = made(data, key="data", protocol=TextSource)
    with refused(lambda reason: f"{where}: cannot read its texts ({reason}); change its options, or correct it"):
        read = source.read()
    if fault := fault_of_corpus(read):
        raise ValueError(f"{where}: {fault}; correct it")
    return read


def _read_texts(data: DataConfig) -> Corpus:
    """Read the user's own texts; both are found before either is read.

    Raises:
        ValueError: one is missing or unreadable, or neither has fields and one is named.
    """
    calibration, evaluation = (
        find_text(Path(str(getattr(data, name))), key=f"data.{name}") for name in ("calibration", "evaluation")
    )
    if data.field is not None and not (calibration.has_rows or evaluation.has_rows):
        raise ValueError(f"data.field={data.field}: must be null where both texts are plain; leave it out")
    at_most = None if data.max_characters is None else data.max_characters + 1
    return Corpus(*(text.read(field=data.field, at_most=at_most) for text in (calibration, evaluation)))


def open_inputs(config: Config, *, builtin: BuiltinCorpus = builtin_corpus) -> Inputs:
    """Open the text and the model, and try every placement on the empty model.

    Args:
        builtin: returns the built-in texts where those are asked for.

    Raises:
        ValueError: anything about the request that cannot work; nothing was loaded or started then.
    """
    corpus, warnings = read_corpus(config.data, builtin=builtin)
    checkpoint = open_checkpoint(config.model, seed=config.seed)
    _check_lengths(config, checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    model = build_for_run(checkpoint, config, dtype=torch.float32)
    _check_placement(config, checkpoint, model)  # before the texts, which take minutes to tokenize where they are long
    rows = _num_embedded(model)
    calibration = cut(
        corpus.calibration,
        tokenizer,
        length=config.data.sequence_length,
        rows=rows,
        key=f"data.calibration ({config.data.name})",
    )
    evaluation = cut(
        corpus.evaluation,
        tokenizer,
        length=config.evaluation.window,
        rows=rows,
        key=f"data.evaluation ({config.data.name})",
        max_blocks=config.evaluation.max_windows,
    )
    BlockSampler(len(calibration), global_batch_size=config.data.global_batch_size, steps=0, seed=0)
    scored = tokenizer.decode(evaluation.reshape(-1).tolist(), clean_up_tokenization_spaces=False)
    repeated = repetition(scored, corpus.calibration)
    protocol = _protocol(config, corpus, evaluation) | {"share_in_calibration": repeated.share}
    blocks = {"calibration": calibration, "evaluation": evaluation}
    warnings += [*_repetition(repeated), *_doubts(blocks, tokenizer, checkpoint, rows=rows)]
    return Inputs(checkpoint, calibration, evaluation, protocol, warnings=tuple(warnings))


def _repetition(found: Repetition) -> list[str]:
    """Say that a share of what is scored stands in the calibration text, if it is more than texts have in common."""
    if not found.in_passages and found.share < USUAL_SHARE:
        return []
    shown = f"{found.share:.1%}" if found.share >= 0.001 else "less than 0.1%"
    return [
        f"{shown} of the evaluation text that is scored stands in the calibration text too (passages of {PASSAGE} "
        f"letters or more, whole lines and sentences of {SHORTEST_UNIT}): held-out figures look better than they are; "
        f"evaluate on other text"
    ]


def _doubts(blocks: dict[str, TokenBlocks], tokenizer: Any, checkpoint: StoredModel, *, rows: int) -> Iterator[str]:
    """Say why the tokenizer may be none for the texts, or another model's, where every token has a row all the same."""
    for name, held in blocks.items():
        share = unknown_share(held, tokenizer)
        if share >= DOUBTED_SHARE:
            yield (
                f"data.{name}: {share:.0%} of its tokens are {tokenizer.unk_token!r}, for what the tokenizer does not "
                f"know; is it the model's own, and the text of its language?"
            )
    if len(tokenizer) < rows // 2 and not isinstance(checkpoint.weights, RandomWeights):
        yield (
            f"the tokenizer has {len(tokenizer)} tokens, and the embedding of {checkpoint.identity} has {rows} rows; "
            f"is it the model's own?"
        )


def _check_lengths(config: Config, checkpoint: StoredModel) -> None:
    longest = checkpoint.config.max_position_embeddings
    for key, length in (
        ("data.sequence_length", config.data.sequence_length),
        ("evaluation.window", config.evaluation.window),
    ):
        if length > longest:
            raise ValueError(
                f"{key}={length}: {checkpoint.identity} has {longest} positions; shorten it to at most that"
            )


def _num_embedded(model: RotatedModel) -> int:
    """Return how many tokens the model has a row for."""
    causal: Any = model.network
    return len(causal.get_input_embeddings().weight)


def _check_placement(config: Config, checkpoint: StoredModel, model: RotatedModel) -> None:
    """Refuse what does not fit the model before its weights are read: group sizes, a file to start from, nothing."""
    model.check_widths()
    if config.rotation.learned and config.train.steps and not len(model.bank) and not model.trained_names:
        reasons = "; ".join(model.warnings)
        raise ValueError(f"rotation.learned=true: nothing is left to train ({reasons}); place R2, or set train.steps=0")
    start_from_file(model, config.rotation, identity=checkpoint.identity)


def _protocol(config: Config, corpus: Corpus, evaluation: TokenBlocks) -> dict[str, Any]:
    windows, window = evaluation.shape
    return {
        "data": config.data.name,
        "text_digest": text_digest(corpus.evaluation),
        "text_spelling": corpus.evaluation_spelling,
        "calibration_digest": text_digest(corpus.calibration),
        "calibration_spelling": corpus.calibration_spelling,
        "window": window,
        "stride": window,
        "windows": windows,
        "tokens_scored": windows * (window - 1),
    }
