"""Trains the shipped model `tiny` and its tokenizer from scratch on the calibration half of the `builtin` corpus."""

import argparse
import copy
import json
import logging
import math
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import SAFE_WEIGHTS_NAME

from rotexp.data.corpora import Corpus, builtin_corpus, text_digest
from rotexp.models.tiny import FOLDER

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
VOCABULARY_SIZE = 2048
# The shapes of successive batches, cycled: mostly short, some as long as the model's context.
BLOCK_LENGTHS = (256, 256, 512, 256, 256, 1024)
EVALUATION_BLOCK_LENGTH = 256


@dataclass(frozen=True)
class Recipe:
    """How the model is trained: AdamW at a high learning rate with a short gradient memory, as released models are.

    Residual channels of very unequal size then arise by themselves; they are what rotations are for.
    """

    num_steps: int = 5000
    seed: int = 0
    batch_tokens: int = 1024
    peak_learning_rate: float = 3e-3
    final_learning_rate_share: float = 0.05
    num_warmup_steps: int = 100
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    max_gradient_norm: float = 1.0
    init_std: float = 0.04
    num_progress_lines: int = 25


def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCABULARY_SIZE` tokens, lossless on any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer=trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=max(BLOCK_LENGTHS),
        clean_up_tokenization_spaces=False,
    )


def create_model(*, tokenizer: PreTrainedTokenizerFast, init_std: float) -> LlamaForCausalLM:
    """A freshly initialized Llama of 4 million parameters in fp32, whose sizes are no powers of two."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=192,
        intermediate_size=640,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=max(BLOCK_LENGTHS),
        tie_word_embeddings=True,
        initializer_range=init_std,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def encode(text: str, *, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """The text's token ids, int64, shape `(tokens,)`, without special tokens."""
    return torch.tensor(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def draw_batches(tokens: torch.Tensor, *, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Batches `(sequences, block)` of `batch_tokens` tokens each, cut at random places of `tokens: (tokens,)`."""
    generator = torch.Generator().manual_seed(recipe.seed)
    for step in range(recipe.num_steps):
        length = BLOCK_LENGTHS[step % len(BLOCK_LENGTHS)]
        num_sequences = max(1, recipe.batch_tokens // length)
        starts = torch.randint(len(tokens) - length, (num_sequences, 1), generator=generator)
        yield tokens[starts + torch.arange(length)]


def learning_rate_at(step: int, *, recipe: Recipe) -> float:
    """Linear warmup to the peak, then a cosine down to `final_learning_rate_share` of it."""
    if step < recipe.num_warmup_steps:
        return recipe.peak_learning_rate * (step + 1) / recipe.num_warmup_steps
    progress = (step - recipe.num_warmup_steps) / max(1, recipe.num_steps - recipe.num_warmup_steps)
    floor = recipe.final_learning_rate_share
    return recipe.peak_learning_rate * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


def create_optimizer(model: LlamaForCausalLM, *, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW that decays the linears' weights only: neither norm gains nor the embedding."""
    embedding = model.get_input_embeddings().weight
    decayed = [weight for weight in model.parameters() if weight.ndim == 2 and weight is not embedding]
    others = [weight for weight in model.parameters() if weight.ndim != 2 or weight is embedding]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.peak_learning_rate, betas=(recipe.beta1, recipe.beta2))


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, *, tokens: torch.Tensor) -> float:
    """The exponential of the mean next-token loss over consecutive blocks of `tokens: (tokens,)`."""
    num_blocks = len(tokens) // EVALUATION_BLOCK_LENGTH
    blocks = tokens[: num_blocks * EVALUATION_BLOCK_LENGTH].view(num_blocks, EVALUATION_BLOCK_LENGTH)
    losses = [model(input_ids=block, labels=block).loss.item() for block in blocks.unsqueeze(1)]
    return math.exp(sum(losses) / num_blocks)


def train(model: LlamaForCausalLM, *, tokens: torch.Tensor, held_out: torch.Tensor, recipe: Recipe) -> None:
    """Trains `model` in place on `tokens: (tokens,)`, logging the loss and the perplexity of `held_out` as it goes."""
    optimizer = create_optimizer(model, recipe=recipe)
    interval = max(1, recipe.num_steps // recipe.num_progress_lines)
    start, losses = time.monotonic(), []
    for step, batch in enumerate(draw_batches(tokens, recipe=recipe)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, recipe=recipe)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_gradient_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % interval == 0 and step + 1 < recipe.num_steps:
            log_progress(step + 1, losses=losses, value=perplexity(model, tokens=held_out), start=start)
            losses.clear()


def log_progress(step: int, *, losses: Sequence[float], value: float, start: float) -> None:
    """One line: the step, the mean training loss since the last line, the held-out perplexity, the time so far."""
    loss = sum(losses) / len(losses)
    seconds = time.monotonic() - start
    logger.info(f"step {step}: train loss {loss:.3f}, held-out perplexity {value:.2f}, {seconds:.0f} s")


def save(
    model: LlamaForCausalLM, *, tokenizer: PreTrainedTokenizerFast, facts: Mapping[str, object], output: Path
) -> None:
    """Writes the checkpoint (safetensors), the tokenizer and `build.json` into the folder `output`."""
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / SAFE_WEIGHTS_NAME).chmod(0o644)  # written for the owner alone, but packaged for everyone
    (output / "build.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def build(corpus: Corpus, *, recipe: Recipe, output: Path) -> dict[str, object]:
    """Trains tokenizer and model on `corpus.calibration` and saves them in bfloat16.

    Returns the facts written to `build.json`: versions, text digests, recipe, held-out perplexity before and after
    rounding to bfloat16.
    """
    torch.manual_seed(recipe.seed)
    tokenizer = train_tokenizer(corpus.calibration)
    tokens = encode(corpus.calibration, tokenizer=tokenizer)
    held_out = encode(corpus.evaluation, tokenizer=tokenizer)
    model = create_model(tokenizer=tokenizer, init_std=recipe.init_std)
    logger.info(f"{model.num_parameters()} parameters, {len(tokens)} training and {len(held_out)} held-out tokens")
    train(model, tokens=tokens, held_out=held_out, recipe=recipe)
    trained = perplexity(model, tokens=held_out)
    model.bfloat16()
    rounded = perplexity(copy.deepcopy(model).float(), tokens=held_out)  # type: ignore[no-untyped-call]
    facts: dict[str, object] = {
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "calibration_digest": text_digest(corpus.calibration),
        "evaluation_digest": text_digest(corpus.evaluation),
        "num_training_tokens": len(tokens),
        "num_held_out_tokens": len(held_out),
        "recipe": asdict(recipe),
        "held_out_perplexity_float32": trained,
        "held_out_perplexity_bfloat16": rounded,
    }
    save(model, tokenizer=tokenizer, facts=facts, output=output)
    logger.info(f"held-out perplexity {trained:.2f}, after rounding to bfloat16 {rounded:.2f}; saved in {output}")
    return facts


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: `python -m rotexp.models.tiny.build [--output DIR] [--steps N] [--seed S]`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=Recipe.num_steps, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=Recipe.seed, help="seed of weights and data (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: give at least 1")
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stdout)
    # One thread: the order of every sum is fixed, and a model this small gains little from more.
    torch.set_num_threads(1)
    build(builtin_corpus(), recipe=Recipe(num_steps=options.steps, seed=options.seed), output=options.output)


if __name__ == "__main__":
    main()
