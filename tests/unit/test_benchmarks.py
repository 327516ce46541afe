"""The benchmarks' own arithmetic, and that every program runs at the smallest size."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import (
    facts,
    flops,
    footprint,
    memory,
    operations,
    overhead,
    own_rows,
    peers,
    plot,
    quantizers,
    sharding,
    startup,
    step,
    sync_modes,
)
from benchmarks import optimizer as optimizer_benchmark
from benchmarks.ranks import RankRequest
from benchmarks.timing import Spread, interleave, paired_ratios, repeat, spread
from benchmarks.variants import (
    LIMIT,
    QUANTIZERS,
    RANDOM_SIZES,
    PlainModel,
    Workload,
    llama_shape,
    load_network,
    make_steps,
    rotated_model,
    twin,
)
from rotexp.models import load
from rotexp.quant.integer_products import DIGITS, has_integer_units
from rotexp.quant.options import Products

ROOT = Path(__file__).parents[2]
NANO = Workload("nano", batch=2, tokens=16)

BLOCKER = """
import sys

BLOCKED = ("hydra", "omegaconf", "wandb", "accelerate", "rich", "datasets", "gguf")


class Blocking:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in BLOCKED else self.finder.find_spec(name, path, target)


sys.meta_path[:] = [Blocking(finder) for finder in sys.meta_path]
"""
"""What makes a Python, and those it starts, find none of the packages that a stock image may lack."""


def run(*command: str, **environment: str) -> str:
    finished = subprocess.run(
        command, check=False, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=280
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    return finished.stdout


def test_variants_are_timed_in_turn_and_warmups_are_dropped() -> None:
    calls: list[str] = []
    seconds = interleave({name: (lambda name=name: calls.append(name)) for name in "ab"}, repetitions=2, warmup=1)
    assert calls == list("ababab")
    assert {name: len(samples) for name, samples in seconds.items()} == {"a": 2, "b": 2}


def test_the_device_is_awaited_before_and_after_each_run() -> None:
    events: list[str] = []
    interleave({"a": lambda: events.append("run")}, repetitions=1, warmup=0, synchronize=lambda: events.append("wait"))
    assert events == ["wait", "run", "wait"]


def test_spread_is_median_and_quartiles() -> None:
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert spread([2.0]) == Spread(2.0, 2.0, 2.0, 1)
    with pytest.raises(ValueError, match="repetitions"):
        spread([])


def test_ratios_are_of_samples_of_the_same_round() -> None:
    # A machine that is ten times slower in the second round changes both, and so not the ratio.
    assert paired_ratios([2.0, 20.0, 2.2], [1.0, 10.0, 1.1]).median == pytest.approx(2.0)
    with pytest.raises(ValueError, match="argument"):
        paired_ratios([1.0], [1.0, 2.0])


def test_repeat_calls_so_often() -> None:
    calls: list[int] = []
    repeat(lambda: calls.append(1), times=3)()
    assert len(calls) == 3


def test_tables_are_aligned_markdown() -> None:
    text = facts.markdown(facts.make_table("Title", ("a", "long name"), [["1", "2"]]))
    assert text.splitlines() == ["Title", "", "| a | long name |", "| - | --------- |", "| 1 | 2         |"]


def test_json_carries_machine_versions_command_and_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = facts.make_table("T", ("a",), [["1"]])
    facts.report(tmp_path / "found.json", [table], {"x": 1.5})
    found = facts.read_json(tmp_path / "found.json")
    assert found["figures"] == {"x": 1.5}
    assert found["tables"] == [table]
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["cores"] == os.cpu_count()
    assert {"date", "command"} <= found.keys()
    assert "| a |" in capsys.readouterr().out


def test_a_package_that_is_missing_is_reported_so() -> None:
    assert facts.installed_version("no-such-package-anywhere") == "not installed"
    with pytest.raises(peers.MissingPeerError, match="not installed"):
        peers.require("no_such_package_anywhere")


def test_a_missing_peer_becomes_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise peers.MissingPeerError("not installed")

    monkeypatch.setattr(peers, "brevitas_step", missing)
    rows = step.measure(NANO, [LIMIT, peers.BREVITAS], repetitions=1)
    assert rows[-1] == {"workload": NANO.name, "variant": peers.BREVITAS, "missing": "not installed"}
    assert "not installed" in facts.markdown(step.time_table(rows))


def test_sizes_are_those_of_the_random_llamas() -> None:
    for size in RANDOM_SIZES:
        assert llama_shape(size) == load.RANDOM_SIZES[size]
    with pytest.raises(ValueError, match="7t"):
        llama_shape("7t")


def test_variants_share_one_set_of_weights() -> None:
    network = load_network(NANO)
    copied = twin(network)
    own, other = dict(network.named_parameters()), dict(copied.named_parameters())
    assert all(own[name] is other[name] for name in own)
    assert not set(network.modules()) & set(copied.modules())


def test_the_limit_counts_what_its_closed_form_demands() -> None:
    network = load_network(NANO)
    steps, _ = make_steps([LIMIT], network, NANO.token_ids(2048))
    demanded = flops.limit_flops(llama_shape("nano"), tokens=NANO.tokens, batch=NANO.batch)
    assert flops.count_flops(steps[LIMIT]) == demanded


@pytest.mark.parametrize("products", Products)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_rotated_steps_count_at_least_what_the_arithmetic_demands(
    quantizer: str, products: Products, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(QUANTIZERS, quantizer, replace(QUANTIZERS[quantizer], products=products))
    network, shape = load_network(NANO), llama_shape("nano")
    steps, _ = make_steps([quantizer], network, NANO.token_ids(2048))
    steps[quantizer]()
    demanded = step.demanded_flops(network, NANO, quantizer)
    assert demanded is not None
    counted = flops.count_operations(steps[quantizer])
    once = 2 * NANO.batch * NANO.tokens * shape["num_hidden_layers"] * flops.layer_weights(shape)
    integers = quantizer == "w4a4" and products is Products.auto and has_integer_units()
    # Forward codes times codes; backward codes times each digit of the gradient, for the input and for the rotations.
    assert counted.integer == (once * (1 + 2 * DIGITS[torch.float32]) if integers else 0)
    assert demanded <= counted.floating + (3 * once if integers else 0) < 2 * demanded


def test_quantized_weights_cost_the_same_rotations_whatever_the_tokens() -> None:
    shape = llama_shape("nano")
    few, many = (flops.rotation_flops(shape, tokens=tokens, quantized_weights=True) for tokens in (8, 16))
    ends = 2 * 3 * 2 * shape["hidden_size"] ** 2  # embedding and head, which are not quantized, by token
    assert many - few == 8 * ends
    assert flops.rotation_flops(shape, tokens=8, quantized_weights=False) < few


def test_a_cayley_step_is_cubic() -> None:
    assert flops.cayley_flops(4096) / flops.cayley_flops(2048) == pytest.approx(8.0, rel=0.01)
    assert flops.cayley_flops(64, count=30) == 30 * flops.cayley_flops(64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_closed_form_of_what_is_kept_holds_for_the_limit(dtype: torch.dtype) -> None:
    workload = Workload("nano", 1, 128, dtype)
    network, shape = load_network(workload), llama_shape("nano")
    body: Any = PlainModel(twin(network)).network
    tensors = [*network.parameters(), *network.buffers()]
    token_ids = workload.token_ids(2048)
    kept = footprint.count_kept_bytes(
        lambda: body.model(token_ids, use_cache=False).last_hidden_state, parameters=tensors
    )
    assert kept == pytest.approx(footprint.kept_bytes(shape, tokens=128, itemsize=dtype.itemsize), rel=0.03)
    held = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    assert held == footprint.weight_bytes(shape, itemsize=dtype.itemsize)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_the_closed_form_of_a_rotated_step_is_a_lower_bound(quantizer: str) -> None:
    workload, shape = Workload("nano", 1, 128), llama_shape("nano")
    network = load_network(workload)
    model = rotated_model(network, quantizer)
    body: Any = model.network
    tensors = [*network.parameters(), *network.buffers(), *model.bank.parameters()]
    token_ids = workload.token_ids(2048)
    kept = footprint.count_kept_bytes(
        lambda: body.model(token_ids, use_cache=False).last_hidden_state, parameters=tensors
    )
    quantized = QUANTIZERS[quantizer].weights.enabled
    coded = quantized and has_integer_units()
    sizes = {"tokens": 128, "itemsize": 4}
    least = footprint.rotated_peak_bytes(shape, **sizes, quantized_weights=quantized, coded_inputs=coded)
    outside = footprint.weight_bytes(shape, itemsize=4) + 128 * shape["vocab_size"] * 4  # all tokens are one chunk
    bank = 3 * sum(matrix.numel() * 4 for matrix in model.bank.parameters())
    assert kept >= 0.97 * (least - outside - bank)


def test_memory_is_of_the_steps_alone() -> None:
    found = memory.measure(LIMIT, NANO, steps=1)
    assert 0.0 < found["weights_gib"] < found["peak_rss_gib"]


def test_amortized_steps_lie_between_a_cached_and_a_searching_one() -> None:
    seconds = {LIMIT: [1.0], "w4a4": [2.0], "w4a4 searching": [12.0]}
    (row,) = step._amortized(NANO, seconds)
    assert row["ratio"]["median"] == pytest.approx(3.0)


def test_requests_survive_the_command_line() -> None:
    arguments = RankRequest(modes=("off", "event"), tokens=8).arguments()
    assert arguments[arguments.index("--modes") + 1] == "off,event"
    assert arguments[arguments.index("--tokens") + 1] == "8"


def test_a_step_is_seen_in_the_metrics(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert not startup.has_step(metrics)
    metrics.write_text('{"eval/invariance": 0.0}\n')
    assert not startup.has_step(metrics)
    metrics.write_text('{"train/loss": 1.0}\n')
    assert startup.has_step(metrics)


def test_modes_of_the_guard_are_compared_with_off() -> None:
    runs = [
        {"mode": mode, "seconds": seconds, "losses": [1.0], "memory": {"a_max": 1.0}, "sync": {"num_barriers": 2}}
        for mode, seconds in (("off", [1.0, 1.0]), ("event", [2.0, 2.0]))
    ]
    row = sync_modes.row("event", runs)
    assert row["ratio_to_off"] == 2.0
    assert row["losses_equal_off"]
    assert "event" in facts.markdown(sync_modes.table([row]))


def test_shapes_are_read() -> None:
    assert quantizers.parse_shape("64x48") == quantizers.parse_shape("64 × 48") == (64, 48)
    with pytest.raises(ValueError, match="rows and width"):
        quantizers.parse_shape("64")


def plot_rows() -> list[dict[str, Any]]:
    return [
        {"model": model, "batch": 1, "tokens": tokens, "variant": variant, "ratio": {"median": ratio}}
        for model, tokens in (("nano", 64), ("nano", 128), ("135m", 128))
        for variant, ratio in ((LIMIT, 1.0), ("w4a4", 2.0))
    ]


def test_plots_go_over_tokens_and_over_sizes() -> None:
    rows = plot_rows()
    assert [x for x, _ in plot.collect(rows, over="tokens")["w4a4"]] == [64.0, 128.0]
    assert [x for x, _ in plot.collect(rows, over="parameters")["w4a4"]] == [
        float(plot.parameters("nano")),
        float(plot.parameters("135m")),
    ]


def test_the_plot_is_valid_svg_with_a_line_a_variant() -> None:
    image = ElementTree.fromstring(plot.draw(plot_rows()))
    assert len(image.findall("{http://www.w3.org/2000/svg}polyline")) == 4
    with pytest.raises(ValueError, match=r"benchmarks\.step"):
        plot.draw([])


@pytest.mark.parametrize(("number", "text"), [(512, "512"), (1024, "1.02k"), (163e6, "163M"), (1.5e9, "1.5G")])
def test_numbers_are_short(number: float, text: str) -> None:
    assert plot.human(number) == text


def test_step_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "measure_apart", lambda variant, workload, threads: memory.measure(variant, workload))
    output = tmp_path / "step.json"
    variants = ["w16a4", "w4a4"]
    options = ["--models", "nano", "--batches", "1", "--tokens", "16", "--repetitions", "1", "--variants", *variants]
    step.main([*options, "--output", str(output)])
    figures = facts.read_json(output)["figures"]
    assert {row["variant"] for row in figures["step"]} == {LIMIT, *variants}
    assert {row["variant"] for row in figures["memory"]} == {LIMIT, *variants}
    plot.main([str(output), "--output", str(tmp_path / "cost.svg")])
    assert (tmp_path / "cost.svg").stat().st_size > 1000


def test_operations_of_a_step_are_timed_by_kind(tmp_path: Path) -> None:
    output = tmp_path / "operations.json"
    shape = ["--model", "nano", "--tokens", "16", "--repetitions", "1", "--variants", LIMIT, "w4a4"]
    operations.main([*shape, "--output", str(output)])
    found = facts.read_json(output)
    seconds = found["figures"]["operations"]
    # The head's product, forward: 16 tokens of width 48, a vocabulary of 2048; rotating R1 is the other's alone.
    assert all("mm 16×48 · 48×2048" in seconds[variant] for variant in (LIMIT, "w4a4"))
    assert len(seconds["w4a4"]) > len(seconds[LIMIT]) > 10
    assert all(taken >= 0.0 for step in seconds.values() for taken in step.values())
    (table,) = found["tables"]
    assert [row[0] for row in table["rows"][-2:]] == ["all others", "the step"]


def test_optimizer_runs(tmp_path: Path) -> None:
    output = tmp_path / "optimizer.json"
    optimizer_benchmark.main(["--sets", "48² + 2 × 12²", "--repetitions", "1", "--output", str(output)])
    rows = facts.read_json(output)["figures"]["optimizer"]
    assert {"CayleySGD", "one by one"} <= {row["variant"] for row in rows}
    assert any("geoopt" in row["variant"] for row in rows)
    assert {row["threads"] for row in rows} == {1, 2}, "torch.get_num_threads() is 1 in tests"
    assert torch.get_num_threads() == 1


def test_quantizers_run(tmp_path: Path) -> None:
    output = tmp_path / "quantizers.json"
    quantizers.main(["--shapes", "32x48", "--repetitions", "1", "--output", str(output)])
    rows = facts.read_json(output)["figures"]["quantizers"]
    assert rows[0]["operation"] == "copy"
    assert rows[0]["over_copy"]["median"] == 1.0


def test_sharding_runs_and_counts_collectives(tmp_path: Path) -> None:
    output = tmp_path / "sharding.json"
    shape = ["--model", "nano", "--ranks", "2", "--batch", "2", "--tokens", "8", "--steps", "1"]
    once = ["--repetitions", "1", "--rounds", "1"]
    sharding.main([*shape, "--variants", "w4a4", *once, "--output", str(output)])
    (row,) = facts.read_json(output)["figures"]["sharding"]
    # Embedding, two layers and head, each gathered once forward and once backward at most; one reduction.
    assert row["collectives"]["allreduce_"] == 1
    assert 8 <= row["collectives"]["_allgather_base_"] <= 10
    assert row["received_bytes"] > 0
    assert row["account"]["bytes"] == row["bytes"], "what is taken apart moves as many bytes as the step"
    assert row["account"]["parts"].keys() == sharding.PARTS.keys()


def test_own_rows_are_counted(tmp_path: Path) -> None:
    output = tmp_path / "own_rows.json"
    own_rows.main(["--models", "nano", "--output", str(output)])
    by_world = {(row["strategy"], row["ranks"]): row for row in facts.read_json(output)["figures"]["own_rows"]}
    full, zero2 = by_world["full", 4], by_world["zero2", 4]
    # A plain reader's weight is multiplied by R1 in each forward and once for R1's gradient, by every rank or by one.
    readers = 2 * 48**2 * (48 + 24 + 80 + 80)
    assert full["whole"]["multiply_adds"] - zero2["whole"]["multiply_adds"] > readers
    assert full["divided"]["multiply_adds"] == zero2["divided"]["multiply_adds"] > 2 * readers / 4
    assert full["divided"]["multiply_adds"] < full["whole"]["multiply_adds"] / 4
    assert by_world["hybrid", 2]["divided"]["multiply_adds"] == 2 * full["divided"]["multiply_adds"]
    assert by_world["full", 64]["cpu"] == "none", "48 rows are no fair shares of 64 ranks"


def test_startup_runs(tmp_path: Path) -> None:
    output = tmp_path / "startup.json"
    startup.main(["--models", "--repetitions", "1", "--output", str(output)])
    commands = {row["command"] for row in facts.read_json(output)["figures"]["startup"]}
    assert "python -m rotexp.train --help" in commands


@pytest.mark.slow
def test_overhead_runs(tmp_path: Path) -> None:
    output = tmp_path / "overhead.json"
    runs = ["--runs", "rotations, full", "--ranks", "2", "--repetitions", "1"]
    overhead.main([*runs, "--output", str(output), "model=random_llama", "data.sequence_length=16"])
    every = facts.read_json(output)["figures"]["overhead"]
    assert [found["tracker"] for found in every] == ["jsonl", "wandb"]
    for found in every:
        assert found["ranks"] == 2
        assert found["wall"]["count"] == 1
        assert 0.0 < found["digests"]["mean"] + found["drift"]["mean"] < 1000 * found["processor_s"]["mean"]
        assert 0.0 < found["processor"]["mean"] < 1.0
        assert 0.0 < found["wall"]["mean"] < 1.0


def test_the_check_of_an_accelerator_needs_only_torch_and_transformers(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    output = tmp_path / "gpu_check.json"
    size = ["--device", "cpu", "--model", "nano", "--tokens", "8", "--rows", "16", "--repetitions", "1"]
    script = ["bash", "benchmarks/gpu_check.sh", "--sections", "kernels", "steps", "--output", str(output)]
    run(*script, *size, PYTHON=sys.executable, PYTHONPATH=str(tmp_path))
    found = json.loads(output.read_text())
    assert {table["title"] for table in found["tables"]} == {
        "Quantizers and Hadamard transforms against a copy",
        "Training step against the limit",
        "Peak memory against the closed forms",
    }
