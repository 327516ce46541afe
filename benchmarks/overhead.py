"""What a training step takes besides forward, backward and optimizer: `python -m benchmarks.overhead [override …]`.

A whole run in this process, as `python -m rotexp.train` carries it out, with clocks around those three.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import facts
from benchmarks.timing import Spread, spread
from rotexp.optim.cayley_sgd import CayleySGD
from rotexp.training.objectives import CrossEntropy

TARGET = 0.02
DEFAULTS = ("model=random_llama", "model.size=135m", "data.sequence_length=1024", "data.global_batch_size=1")
SHORT = ("tracker=jsonl", "evaluation.window=64", "evaluation.max_windows=1", "launch=inline")


@dataclass
class Clock:
    """When each training step began, in seconds, and what forward, backward and optimizer took in all."""

    began: list[float] = field(default_factory=list)
    core: list[float] = field(default_factory=list)

    def begin_step(self) -> None:
        """Note that a step begins now."""
        self.began.append(time.perf_counter())
        self.core.append(0.0)

    def around(self, function: Callable[..., Any], *, begins_step: bool = False) -> Callable[..., Any]:
        """Return a function whose calls within training count as core."""

        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            if begins_step:
                self.begin_step()
            began = time.perf_counter()
            result = function(*arguments, **options)
            if self.core:
                self.core[-1] += time.perf_counter() - began
            return result

        return timed

    def overheads(self) -> list[float]:
        """Return for every step but the first and the last the share of it that was not core."""
        periods = [after - before for before, after in zip(self.began, self.began[1:], strict=False)]
        shares = [(period - core) / period for period, core in zip(periods, self.core, strict=False)]
        return shares[1:]


@contextmanager
def clocked() -> Iterator[Clock]:
    """Put clocks around cross entropy's forward, around backward and around the optimizer's step."""
    clock = Clock()
    with ExitStack() as patches:
        objective = clock.around(CrossEntropy.__call__, begins_step=True)
        patches.enter_context(mock.patch.object(CrossEntropy, "__call__", objective))
        patches.enter_context(mock.patch.object(torch.Tensor, "backward", clock.around(torch.Tensor.backward)))
        patches.enter_context(mock.patch.object(CayleySGD, "step", clock.around(CayleySGD.step)))
        yield clock


def measure(overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train in this process, without accumulation, and return the share of each step that is not core.

    Args:
        overrides: of the command line, `objective=ce` and `optimizer=cayley_sgd` among them.
    """
    from rotexp.inputs import open_inputs
    from rotexp.launch.rank import run_rank

    config = _compose([*SHORT, *overrides])
    folder.mkdir(parents=True, exist_ok=True)
    with clocked() as clock:
        run_rank(config, open_inputs(config), folder)
    shares = clock.overheads()
    return {"overrides": list(overrides), "shares": shares, "share": dataclasses.asdict(spread(shares))}


def _compose(overrides: list[str]) -> Any:
    from hydra import compose, initialize_config_module

    from rotexp.command_line import register
    from rotexp.compose import to_config

    register()
    with initialize_config_module("rotexp.conf", version_base="1.3"):
        return to_config(compose("config", overrides))


def table(found: dict[str, Any]) -> facts.Table:
    """Return the figures for people."""
    shown = {name: found["share"][name] for name in ("median", "lower", "upper")}
    percent = Spread(**{name: 100 * value for name, value in shown.items()}, count=found["share"]["count"])
    row = (" ".join(found["overrides"]), percent.text(), f"≤ {100 * TARGET:.0f}", str(percent.count))
    return facts.make_table("Everything else in a step", ("run", "share of the step (%)", "target", "steps"), [row])


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the figures."""
    parser = facts.parser(__doc__, output="overhead.json", repetitions=20)
    parser.add_argument("--quant", default="w16a4")
    parser.epilog = f"Further arguments are overrides in place of: {' '.join(DEFAULTS)}"
    options, overrides = parser.parse_known_args(arguments)
    chosen = [*(overrides or DEFAULTS), f"quant={options.quant}", f"train.steps={options.repetitions + 2}"]
    with tempfile.TemporaryDirectory() as place:
        found = measure(chosen, Path(place) / "run")
    facts.report(options.output, [table(found)], {"overhead": found})


if __name__ == "__main__":
    main()
