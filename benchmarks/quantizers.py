"""Quantizers and Hadamard transforms over the time of copying their tensor: `python -m benchmarks.quantizers`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import facts
from benchmarks.step import synchronizer
from benchmarks.timing import Spread, interleave, paired_ratios, repeat, spread
from rotexp.orthogonal.hadamard import HadamardTransform, random_hadamard
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.spec import QuantSpec

COPY = "copy"

SHAPES = {
    "1024 × 576": (1024, 576),
    "1024 × 1536": (1024, 1536),
    "4096 × 1536": (4096, 1536),
    "1024 × 8192": (1024, 8192),
}
"""Activations of SmolLM2-135M's stream and MLP, of four blocks of it, and of Llama 3.2 1B's MLP."""

WEIGHTS = QuantSpec(4, clip_search=True)
TOKENS = QuantSpec(4, symmetric=False)
GROUP_SIZE = 32
GROUPS = QuantSpec(4, symmetric=False, group_size=GROUP_SIZE)

Operations = dict[str, Callable[[], object]]


def operations(x: Tensor) -> Operations:
    """Return what is measured on x: (tokens, width), each as a call without arguments; the copy first."""
    return {COPY: x.clone, **quantizers(x), **hadamards(x)}


def quantizers(x: Tensor) -> Operations:
    """Return our quantizers on x: (rows, width), forward alone and with backward, and torch's own kernels."""
    searched, per_token, grouped = FakeQuantizer(WEIGHTS), FakeQuantizer(TOKENS), FakeQuantizer(GROUPS)
    searched(x)  # the clip ratios are searched here and cached
    divides = x.shape[-1] % GROUP_SIZE == 0
    return {
        "tokens, 4 bit asymmetric": lambda: per_token(x),
        "tokens, with backward": with_backward(per_token, x),
        **({f"tokens, groups of {GROUP_SIZE}": lambda: grouped(x)} if divides else {}),
        "weights, 4 bit, searched before": lambda: searched(x),
        "weights, with backward": with_backward(searched, x),
        "weights, search alone": lambda: searched.search(x),
        "torch per channel (peer)": torch_per_channel(x),
    }


def with_backward(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    """Return forward and backward of a function at x."""
    leaf = x.detach().clone().requires_grad_()
    gradient = torch.ones_like(x)

    def run() -> None:
        leaf.grad = None
        function(leaf).backward(gradient)  # type: ignore[no-untyped-call]

    return run


def torch_per_channel(x: Tensor) -> Callable[[], object]:
    """Return torch's symmetric fake quantizer with scales taken from x: (rows, width), row by row."""
    zero = torch.zeros(x.shape[0], dtype=torch.int32, device=x.device)

    def run() -> Tensor:
        scale = (torch.maximum(x.amax(-1), -x.amin(-1)) / 7).float().clamp_(min=1e-12)
        quantized: Tensor = torch.fake_quantize_per_channel_affine(x.float(), scale, zero, 0, -8, 7)
        return quantized

    return run


def hadamards(x: Tensor) -> Operations:
    """Return the fast Hadamard transform of x: (rows, width), and the product with the same matrix held whole."""
    transform = HadamardTransform(x.shape[-1])
    dense = random_hadamard(x.shape[-1], generator=torch.Generator().manual_seed(0)).to(x.device, x.dtype)
    return {
        "Hadamard, fast": lambda: transform(x),
        "Hadamard, with backward": with_backward(transform, x),
        "Hadamard, dense product (peer)": lambda: x @ dense,
    }


def measure(
    name: str, shape: tuple[int, int], *, repetitions: int, device: torch.device, dtype: torch.dtype, calls: int = 3
) -> list[dict[str, Any]]:
    """Time every operation on one shape, in turn.

    Args:
        calls: of an operation in one round, of which the mean is taken.
    """
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    runs = {operation: repeat(run, times=calls) for operation, run in operations(x).items()}
    seconds = interleave(runs, repetitions=repetitions, warmup=2, synchronize=synchronizer(device))
    moved = 2 * x.numel() * x.element_size()
    return [
        {
            "shape": name,
            "dtype": str(dtype).removeprefix("torch."),
            "operation": operation,
            "seconds": dataclasses.asdict(spread(sample / calls for sample in samples)),
            "over_copy": dataclasses.asdict(paired_ratios(samples, seconds[COPY])),
            "bytes_read_and_written_once": moved,
        }
        for operation, samples in seconds.items()
    ]


def table(rows: Sequence[dict[str, Any]]) -> facts.Table:
    """Return the figures for people; GB/s as if the tensor were read and written once."""
    columns = ("tensor", "dtype", "operation", "time (ms)", "÷ copy (quartiles)", "GB/s")
    return facts.make_table("Quantizers and Hadamard transforms against a copy", columns, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    seconds = row["seconds"]["median"]
    rate = f"{row['bytes_read_and_written_once'] / seconds / 1e9:.1f}"
    over = Spread(**row["over_copy"]).text(1)
    return [row["shape"], row["dtype"], row["operation"], f"{1e3 * seconds:.3f}", over, rate]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every shape, and write the figures."""
    parser = facts.parser(__doc__, output="quantizers.json", repetitions=15)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="rows × width, such as 1024x576")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = []
    for name in options.shapes:
        shape = SHAPES.get(name) or parse_shape(name)
        dtype = getattr(torch, options.dtype)
        rows += measure(name, shape, repetitions=options.repetitions, device=torch.device("cpu"), dtype=dtype)
    facts.report(options.output, [table(rows)], {"quantizers": rows})


def parse_shape(text: str) -> tuple[int, int]:
    """Read `1024x576`.

    Raises:
        ValueError: the text is no such shape.
    """
    rows, _, width = text.replace("×", "x").replace(" ", "").partition("x")
    if not rows.isdigit() or not width.isdigit():
        raise ValueError(f"--shapes {text}: must be rows and width, such as 1024x576; write it so")
    return int(rows), int(width)


if __name__ == "__main__":
    main()
