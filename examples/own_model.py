"""Rotate and quantize a Hugging Face model of your own, train with your own loop, merge, save, load again.

python examples/own_model.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rotexp
from rotexp.models.tiny import FOLDER  # a small Llama that comes with rotexp; take any model here

STEPS, REFRESH_EVERY = 12, 10


def main(folder: Path) -> None:
    """Train the rotations of one model in memory."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    text = Path(__file__).read_text(encoding="utf-8")
    tokens = tokenizer(text, return_tensors="pt").input_ids[:, :256].view(4, 64)
    with torch.no_grad():
        original = model(tokens).logits

    placed = rotexp.place(model, rotation="learned", quant="w4a4")
    print(f"proof: the rotated model's logits are {rotexp.prepare(placed):.0e} (relative) from the model's")

    optimizer = rotexp.CayleySGD(placed.bank.parameters(), lr=0.02)
    with placed.mode.set(rotate=True, quantize=True):
        for step in range(STEPS):
            loss = model(tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % REFRESH_EVERY == 0:
                placed.refresh_quantizers()  # clip ratios are searched anew for the weights as now rotated
            print(f"step {step + 1}: loss {loss.item():.4f}")

    rotexp.merge(placed)
    saved = rotexp.export(placed, folder, tokenizer=tokenizer)
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)(tokens).logits
    error = ((again - original).abs().max() / original.abs().max()).item()
    assert error < 1e-5, f"what was saved computes something else: {error}"
    print(f"saved and loaded by plain transformers: logits {error:.0e} (relative) from the model's")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder) / "merged")
