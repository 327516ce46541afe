"""Recipes: read and written to the bit, composed with what is given, compared by verdicts, shown in the README."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import math
import subprocess
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import yaml
from safetensors.numpy import save_file

import rotexp
from rotexp.config.composition import resolved_yaml, to_plain
from rotexp.config.schema import Config
from rotexp.data.corpora import text_digest
from rotexp.experiment.inputs import read_corpus
from rotexp.face.run import RunError
from rotexp.process.processor import processor
from rotexp.quant.integer_products import has_integer_units
from rotexp.recipes import reproducing, request
from rotexp.recipes.comparing import KIND, ROTATIONS, WEIGHTS, Compared, Comparison, Verdict, compare, differing
from rotexp.recipes.figures import difference, figures_of
from rotexp.recipes.origin import commit_of
from rotexp.recipes.recipe import FORMAT, Figure, Recipe, as_yaml, read_recipe, write_recipe
from rotexp.recipes.request import overrides_of, to_request
from rotexp.recipes.showing import outcome
from rotexp.recipes.tolerances import rounded_up, with_tolerances
from rotexp.runfolder.bits import rotations_digest
from rotexp.runfolder.finished_run import read_finished_run
from rotexp.tracking.machine import machine
from rotexp.tracking.summary import versions
from rotexp.training.options import NumericsConfig

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))

TEXTS = [f"data.calibration={typing.__file__}", f"data.evaluation={ast.__file__}"]
CHOSEN = ["model=random_llama", "model.size=nano", "data=text", "numerics=exact", "train.steps=3", "tracker=jsonl"]
EXACT = rotexp.load_config([*CHOSEN, *TEXTS])
LOSSES = (3.5, 0.1 + 0.2, 2.25)
ROWS = {
    "float": {"perplexity": 26.0, "kl": 0.0, "top1_agreement": 1.0},
    "trained": {"perplexity": 1 / 3, "kl": 1e-05, "top1_agreement": 0.7},
}
TRAINED = "evaluation.trained.perplexity"


def finished(folder: Path, config: Config = EXACT, *, matrix: float = 0.5, digest: str = "aa", **changes: Any) -> Path:
    """Write the folder of a run that is done, with these figures; `changes` replaces parts of its summary."""
    folder.mkdir(parents=True)
    corpus, _ = read_corpus(config.data)
    protocol = {"calibration_digest": text_digest(corpus.calibration), "text_digest": text_digest(corpus.evaluation)}
    summary = {
        "status": "done",
        "world_size": 1,
        "model": {"id": "random_llama-nano", "revision": None, "digest": digest},
        "train": {"steps": 3},
        "evaluation": {"protocol": protocol, **ROWS},
        "time": {"load": 1.5, "train": 2.0},
        "versions": versions(),
        "machine": machine(),
    } | changes
    rows = [
        {"step": step, "train/loss": loss, "grad_norm/total": step / 7} for step, loss in enumerate(LOSSES, start=1)
    ]
    (folder / "config.resolved.yaml").write_text(resolved_yaml(config), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    save_file({"R1": numpy.full((2, 2), matrix, numpy.float32)}, folder / "rotations.safetensors")
    return folder


def rows_with(perplexity: float, *, of: Path) -> dict[str, Any]:
    """The summary's part of the figures of a run, the trained perplexity another."""
    evaluation = json.loads((of / "summary.json").read_text())["evaluation"]
    return {"evaluation": evaluation | {"trained": ROWS["trained"] | {"perplexity": perplexity}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return finished(tmp_path / "run")


@dataclass
class Runs:
    """Stands in for the run: keeps the configurations that were asked for, and finds what `find` says of each."""

    find: Callable[[Config], dict[str, Any]]
    asked: list[Config] = dataclasses.field(default_factory=list)
    folders: list[Path] = dataclasses.field(default_factory=list)

    def __call__(self, config: Config, *, folder: Path) -> rotexp.RunResult:
        self.asked.append(config)
        self.folders.append(folder)
        return rotexp.RunResult(finished(folder, config, **self.find(config)))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    """Runs that find the same again, in a working folder of the test's own."""
    stand_in = Runs(lambda _config: {})
    monkeypatch.setattr(reproducing, "run", stand_in)
    monkeypatch.chdir(tmp_path)
    return stand_in


def bits(recipe: Recipe) -> str:
    return repr(replace(recipe, source=Path(), run=None))


def test_a_file_is_read_back_to_the_same_bits(folder: Path, tmp_path: Path) -> None:
    odd = {"a": Figure(math.nan), "b": Figure(1e22, 5e-324), "c": Figure((0.1 + 0.2, -math.inf, 1e-05), 0.0)}
    found = read_recipe(folder)
    said: dict[str, Any] = {"about": "Tells: # yes", "overrides": ("seed=1",), "noise": {"seeds": 2}}
    recipe = replace(found, figures={**found.figures, **odd}, **said)
    write_recipe(tmp_path / "a.yaml", recipe)
    again = read_recipe(tmp_path / "a.yaml")
    assert bits(again) == bits(recipe)
    assert again.measured
    assert not found.measured


def test_a_folder_says_what_its_run_found(folder: Path) -> None:
    recipe = read_recipe(folder)
    assert recipe.values == {
        "evaluation.float.perplexity": 26.0,
        "evaluation.float.kl": 0.0,
        "evaluation.float.top1_agreement": 1.0,
        TRAINED: 1 / 3,
        "evaluation.trained.kl": 1e-05,
        "evaluation.trained.top1_agreement": 0.7,
        "train.losses": LOSSES,
        "train.loss_end": 2.25,
        "train.loss_best": 0.1 + 0.2,
        "grad_norm.total": 3 / 7,
    }
    assert (recipe.name, recipe.made.seconds, recipe.made.world_size) == ("run", 3.5, 1)
    assert {**recipe.made.machine, "threads": recipe.made.threads} == machine()
    assert recipe.rotations == rotations_digest(folder / "rotations.safetensors")
    assert recipe.model == {"id": "random_llama-nano", "revision": None, "digest": "aa"}


def test_a_run_without_figures_is_no_recipe(tmp_path: Path) -> None:
    for name, evaluation in (("none", None), ("text", {"protocol": {}, "trained": ROWS["trained"] | {"kl": "low"}})):
        run = read_finished_run(finished(tmp_path / name, evaluation=evaluation))
        with pytest.raises(ValueError, match=r"summary (holds no evaluation|has no number for evaluation.trained.kl)"):
            figures_of(run)


def test_the_digest_of_rotations_is_of_names_shapes_and_bits(tmp_path: Path) -> None:
    matrix = numpy.arange(4, dtype=numpy.float32)
    other = matrix.copy()
    other[3] = numpy.nextafter(other[3], numpy.float32(9))
    kinds = [{"R1": matrix}, {"R2_0": matrix}, {"R1": matrix.reshape(2, 2)}, {"R1": other}, {}]
    found = []
    for number, held in enumerate(kinds):
        save_file(held, tmp_path / f"{number}.safetensors", metadata={"seed": str(number)})
        found.append(rotations_digest(tmp_path / f"{number}.safetensors"))
    assert len({*found}) == len(kinds)
    save_file(kinds[0], tmp_path / "again.safetensors", metadata={"seed": "another"})
    assert rotations_digest(tmp_path / "again.safetensors") == found[0]
    (tmp_path / "again.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        rotations_digest(tmp_path / "again.safetensors")


WRONG = {
    "format 2": ({"format": 2}, r"format=2: must be 1; read it with the rotexp that wrote it"),
    "no format": ({"format": None}, r"format=null: must be 1"),
    "no figures": ({"figures": None}, r"is no recipe \(figures is missing, or no mapping\)"),
    "a text of overrides": ({"overrides": "a=1"}, r"is no recipe \(overrides is missing, or no list\)"),
    "a number among overrides": ({"overrides": [1]}, r"is no recipe \(1 is no text of overrides or needs\)"),
    "a figure of text": ({"figures": {"a": {"value": "low"}}}, r"figures: a holds no value, or no tolerance, that is"),
    "a tolerance of text": ({"figures": {"a": {"value": 1.0, "tolerance": "low"}}}, r"figures: a holds no value, or"),
    "nested losses": ({"figures": {"a": {"value": [[1.0]]}}}, r"figures: a holds no value"),
    "made of more": ({"made": {"moon": "full"}}, r"made: moon is unknown; it has date, commit"),
    "a machine of text": ({"made": {"machine": "mine"}}, r"made: machine is no mapping"),
}


@pytest.mark.parametrize(("changes", "reason"), WRONG.values(), ids=WRONG)
def test_a_file_that_is_no_recipe_is_refused_in_one_line(
    changes: dict[str, Any], reason: str, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(as_yaml(read_recipe(folder))) | changes))
    with pytest.raises(ValueError, match=reason) as refusal:
        read_recipe(file)
    assert str(refusal.value).startswith(str(file))
    assert "\n" not in str(refusal.value)


def test_what_is_there_must_be_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "other.yaml").write_text("name: tiny\n")
    (tmp_path / "empty").mkdir()
    undone = finished(tmp_path / "undone", status="failed")
    for name, reason in {
        "nowhere": "is neither a folder nor a file; name",
        "list.yaml": r"cannot be read \(it holds no mapping\)",
        "other.yaml": "is no recipe",
        "empty": r"holds no run \(summary.json is missing\)",
        undone.name: r"the run is not done \(status failed\)",
    }.items():
        with pytest.raises(ValueError, match=f"{name}: {reason}"):
            read_recipe(tmp_path / name)


@pytest.mark.parametrize(
    ("before", "now", "tolerance", "verdict"),
    [
        (1.0, 1.0, None, Verdict.equal),
        (0.0, -0.0, None, Verdict.equal),
        (math.nan, math.nan, None, Verdict.equal),
        (1.0, math.nextafter(1.0, 2.0), None, Verdict.differs),
        (1.0, math.nextafter(1.0, 2.0), 1e-9, Verdict.within),
        (1.0, 1.25, 0.25, Verdict.within),
        (1.0, 1.25, 0.2, Verdict.differs),
        (1.0, math.nan, 9.0, Verdict.differs),
        (1.0, None, 9.0, Verdict.differs),
        (1.0, (1.0,), 9.0, Verdict.differs),
        ((1.0, 2.0), (1.0, 2.0), None, Verdict.equal),
        ((1.0, 2.0), (1.5, 2.0), 0.5, Verdict.within),
        ((1.0, 2.0), (1.0, 3.0), 0.5, Verdict.differs),
        ((1.0, 2.0), (1.0,), 9.0, Verdict.differs),
    ],
)
def test_a_figure_has_equal_bits_is_within_tolerance_or_differs(
    before: Any, now: Any, tolerance: float | None, verdict: Verdict
) -> None:
    assert Compared("a", before, now, tolerance).verdict is verdict


EQUAL, WITHIN, DIFFERS = Compared("a", 1.0, 1.0), Compared("b", 1.0, 1.1, 0.2), Compared("c", 1.0, 1.1, 0.05)
UNMEASURED = Compared("d", 1.0, 1.1)
SAME = {ROTATIONS: ("1", "1"), WEIGHTS: ("2", "2")}


@pytest.mark.parametrize(
    ("figures", "digests", "expected", "holds", "said"),
    [
        ([EQUAL], SAME, True, True, "reproduced: all 1 figures, weights and rotations have equal bits"),
        ([EQUAL], SAME, False, True, "reproduced: all 1 figures, weights and rotations have equal bits"),
        ([EQUAL, WITHIN], SAME, True, False, "not reproduced: equal bits are expected here"),
        ([EQUAL], SAME | {ROTATIONS: ("1", "3")}, True, False, "not reproduced: equal bits are expected here"),
        ([EQUAL], SAME | {ROTATIONS: ("1", "3")}, False, True, "reproduced: 1 of 1 figures have equal bits, 0 more"),
        ([EQUAL, WITHIN], SAME, False, True, "reproduced: 1 of 2 figures have equal bits, 1 more are within"),
        ([EQUAL, WITHIN, DIFFERS], SAME, False, False, "not reproduced: 1 of 3 figures have equal bits, 1 more are"),
        ([WITHIN], SAME | {WEIGHTS: ("2", "3")}, False, False, "not reproduced: the model has other weights"),
    ],
)
def test_bits_hold_where_they_are_expected_and_tolerances_elsewhere(
    figures: list[Compared], digests: dict[str, tuple[str, str]], expected: bool, holds: bool, said: str
) -> None:
    found = Comparison(figures, digests, expected)
    assert found.holds is holds
    measured = Recipe("name", Path(), figures={"a": Figure(1.0, 0.1)})
    assert outcome(measured, found).startswith(said)


def test_a_difference_without_a_tolerance_is_said_to_be_unmeasured() -> None:
    found = Comparison([EQUAL, UNMEASURED], SAME, bits_expected=False)
    assert not found.holds
    line = outcome(Recipe("name", Path(), figures={"a": Figure(1.0)}), found)
    assert line.endswith("no tolerance was measured (--write FILE --noise N measures one, by numerics.noise_seed)")


def test_every_figure_of_the_recipe_is_compared_and_a_missing_one_differs(folder: Path) -> None:
    recipe = read_recipe(folder)
    less = replace(recipe, figures={TRAINED: recipe.figures[TRAINED]}, model={"digest": "bb"})
    found = compare(recipe, less, bits_expected=False)
    assert [figure.name for figure in found.figures] == [*recipe.figures]
    assert found.count(Verdict.equal) == 1
    assert (found.same_weights, found.digests[WEIGHTS]) == (False, ("aa", "bb"))
    unknown = replace(recipe, model={})
    assert compare(unknown, less, bits_expected=False).same_weights, "a run of before that was kept"


def test_facts_that_are_unknown_are_no_equal_ones() -> None:
    assert [*differing({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}, ("a", "b", "c"))] == [
        ("b", "2", "3"),
        ("c", "unknown", "4"),
    ]


def test_a_run_made_again_is_compared_and_its_code_says_whether_it_holds(
    folder: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproducing.reproduce(folder, ["hydra.run.dir=again", "tracker=wandb"]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "versions, kind of machine, texts and model are the recipe's"
    assert output[-1] == "reproduced: all 10 figures, weights and rotations have equal bits"
    assert runs.folders == [Path("again")]
    (asked,) = runs.asked
    assert asked.tracker == rotexp.load_config(["tracker=wandb"]).tracker
    assert asked.evaluation == replace(EXACT.evaluation, share_rows=False)
    assert replace(asked, tracker=EXACT.tracker, evaluation=EXACT.evaluation) == EXACT

    runs.find = lambda _config: rows_with(math.nextafter(1 / 3, 1.0), of=folder)
    assert reproducing.reproduce(folder, ["hydra.run.dir=moved"]) == 1
    output = capsys.readouterr().out.splitlines()
    (line,) = [line for line in output if TRAINED in line]
    assert "differs: by 5.6e-17" in line
    assert output[-1].startswith("not reproduced: equal bits are expected here (numerics=exact), and 9 of 10 figures")


def test_rotations_of_other_bits_do_not_hold_where_bits_are_expected(
    folder: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.find = lambda _config: {"matrix": 0.25}
    assert reproducing.reproduce(folder, ["hydra.run.dir=again"]) == 1
    assert "other bits" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["torch", "cpu"])
def test_elsewhere_a_tolerance_decides(
    key: str, tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"versions": versions() | {"torch": "1.0"}} if key == "torch" else {"machine": machine() | {"cpu": "Z80"}}
    folder = finished(tmp_path / "old", **facts)
    recipe = read_recipe(folder)
    runs.find = lambda _config: rows_with(1 / 3 + 0.01, of=folder)
    for tolerance, code in ((0.02, 0), (0.005, 1), (None, 1)):
        figures = recipe.figures | {TRAINED: Figure(1 / 3, tolerance)}
        overrides, needs = overrides_of(EXACT)
        written = replace(recipe, figures=figures, overrides=tuple(overrides), needs=tuple(needs))
        write_recipe(tmp_path / "old.yaml", written)
        given = [*TEXTS, f"hydra.run.dir=again-{tolerance}"]
        assert reproducing.reproduce(tmp_path / "old.yaml", given) == code
        shown = capsys.readouterr().out
        assert f"│ {key} " in shown
        assert "what is not as it was" in shown
    assert "no tolerance was measured" in shown


def test_a_run_that_fails_or_is_refused_has_said_so_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for error, code in ((RunError(tmp_path, "failed", "on purpose"), 1), (ValueError("refused"), 2)):

        def fail(_config: Config, *, folder: Path, error: Exception = error) -> rotexp.RunResult:
            raise error

        monkeypatch.setattr(reproducing, "run", fail)
        assert reproducing.reproduce(folder, []) == code
    assert capsys.readouterr().err == ""


def test_a_rank_of_somebody_else_is_refused(folder: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(ValueError, match="started this process as a rank; start it once"):
        reproducing.reproduce(folder, [])
    assert runs.asked == []


def test_other_texts_and_other_models_are_refused_before_anything_runs(
    folder: Path, runs: Runs, tmp_path: Path
) -> None:
    (tmp_path / "other.txt").write_text("Another text. " * 200)
    refusal = r"^data.evaluation=.*other.txt: the evaluation text has the digest \w{16}, and the recipe's"
    with pytest.raises(ValueError, match=refusal):
        reproducing.reproduce(folder, ["data.evaluation=other.txt"])
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"model": {"id": "tiny"}}))
    with pytest.raises(ValueError, match=r"^model=random_llama-nano: must be tiny, the recipe's; name that$"):
        reproducing.reproduce(folder, [])
    assert runs.asked == []


def test_how_a_run_is_spread_may_be_given_and_is_said(
    folder: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.find = lambda _config: {"world_size": 2}
    assert reproducing.reproduce(folder, ["sharding=full", "launch.nproc=2", "hydra.run.dir=again"]) == 0
    (asked,) = runs.asked
    assert (asked.sharding, asked.launch.nproc) == (rotexp.load_config(["sharding=full"]).sharding, 2)
    threads = machine()["threads"]
    spreads = f"ranks x threads were 1 x {threads}, and are 2 x {threads}"
    assert f"{spreads}: that changes no bit under numerics=exact\n" in capsys.readouterr().out
    given = [f"launch.threads={threads + 1}", "hydra.run.dir=threads"]
    runs.find = lambda _config: rows_with(1.0, of=folder) | {"machine": machine() | {"threads": threads + 1}}
    assert reproducing.reproduce(folder, given) == 1
    output = capsys.readouterr().out
    assert "│ threads " in output, "a given number is no proven one"
    assert f"and are 1 x {threads + 1}: that changes rounding, which training amplifies\n" in output
    assert "no tolerance was measured" in output


@pytest.mark.parametrize("line", ["train.steps=3", "model=tiny", "numerics=fast", "seed=1", "data.max_characters=9"])
def test_what_is_the_recipes_own_may_not_be_given(line: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=f"^{line}: is the recipe's to say; what may be given is how"):
        to_request(folder, [line])


def test_several_nodes_are_refused(folder: Path) -> None:
    given = ["launch=elastic", "launch.nnodes=2", "launch.rdzv_endpoint=here:1"]
    with pytest.raises(ValueError, match=r"^launch\.nnodes=2: must be 1 where a recipe is made again"):
        to_request(folder, given)


@pytest.mark.parametrize(
    "line",
    ["plugins=[evil]", "+plugins=[evil]", "hydra.searchpath=[pkg://evil]", "hydra/launcher=evil", "hydra.run.dir=/"],
)
def test_a_file_says_nothing_of_what_is_imported_or_where_is_written(line: str, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    write_recipe(file, replace(read_recipe(folder), overrides=(line,)))
    with pytest.raises(ValueError, match="is none that a file may say") as refusal:
        to_request(file, [])
    assert line in str(refusal.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["numerics=exact", "train.steps=7", "seed=3"],
        ["experiment=smollm2_135m_w4a4", "data.calibration=/a.txt", "data.evaluation=/b/*.txt"],
        ["quant=w4a4kv4", "quant.weights.group_size=32", "rotation=learned_r4", "optimizer.lr=1e-5"],
        ["sharding=hybrid", "sync_mode=event", "launch.nproc=4", "launch.threads=1", "data.global_batch_size=8"],
        ["model=random_llama", "model.size=nano", "objective=kl_topk", "evaluation.max_windows=null"],
        ["data=wikitext2", "data.revision='a b\\'c'", "model=hf", "model.path=some/model", "model.revision='123'"],
        ["train.params=rotations_and_scales", "rotation.path=/r.safetensors", "tracker=jsonl"],
    ],
    ids=lambda overrides: " ".join(overrides) or "defaults",
)
def test_overrides_say_a_whole_configuration(overrides: list[str]) -> None:
    config = rotexp.load_config(overrides)
    lines, needs = overrides_of(config)
    paths = [override for override in overrides if override.partition("=")[2].startswith("/")]
    assert {path.partition("=")[0] for path in paths} == {*needs}
    assert not any("/" in line and "=/" in line for line in lines), "no path of this machine is written"
    again = rotexp.load_config([*lines, *paths])
    assert replace(again, tracker=config.tracker) == config
    assert len(lines) <= len(overrides) + 7, "only what differs is said"


def test_what_overrides_cannot_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = rotexp.load_config([])
    odd = replace(config, model=replace(config.model, name="of no option"))
    assert "model.name='of no option'" in overrides_of(odd)[0]
    monkeypatch.setattr(request, "_written", lambda _value: "7")
    with pytest.raises(ValueError, match=r"^model\.name: overrides cannot say what the run had; its folder"):
        overrides_of(odd)


def test_needs_must_be_given(folder: Path, tmp_path: Path) -> None:
    overrides, needs = overrides_of(EXACT)
    assert needs == ["data.calibration", "data.evaluation"]
    file = tmp_path / "a.yaml"
    write_recipe(file, replace(read_recipe(folder), overrides=tuple(overrides), needs=tuple(needs)))
    with pytest.raises(ValueError, match=r"needs data.evaluation, paths of this machine; add data.evaluation=PATH$"):
        to_request(file, TEXTS[:1])
    asked = to_request(file, [*TEXTS, "tracker=jsonl"]).config
    assert to_plain(replace(asked, evaluation=EXACT.evaluation)) == to_plain(EXACT)


def test_a_finished_run_is_written_with_tolerances_over_runs_under_noise(
    folder: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(request, "NOISE", "seed")  # stands in for what changes rounding alone
    runs.find = lambda config: rows_with(1 / 3 + 0.01 * config.seed, of=folder)
    target = tmp_path / "mine.yaml"
    assert reproducing.write(folder, target, ["hydra.run.dir=noise"], noise=3, about="Why.") == 0
    assert [config.seed for config in runs.asked] == [1, 2, 3]
    assert [place.name for place in runs.folders] == ["noise-1", "noise-2", "noise-3"]
    recipe = read_recipe(target)
    assert (recipe.name, recipe.about, recipe.noise) == ("mine", "Why.", {"seeds": 3, "of": "numerics.noise_seed"})
    assert recipe.figures[TRAINED] == Figure(1 / 3, 0.06)
    assert recipe.figures["train.losses"] == Figure(LOSSES, 3.6e-5)
    assert recipe.figures["evaluation.float.kl"] == Figure(0.0, 0.0)
    assert recipe.made.commit == commit_of()
    assert reproducing.write(folder, target, [], noise=0) == 0
    assert (read_recipe(target).about, read_recipe(target).measured) == ("Why.", False)


def test_noise_comes_by_its_key(folder: Path) -> None:
    if "noise_seed" not in {option.name for option in dataclasses.fields(NumericsConfig)}:
        pytest.skip("numerics has no noise_seed")
    assert getattr(to_request(folder, [], noise_seed=3).config.numerics, "noise_seed") == 3  # noqa: B009


@pytest.mark.parametrize(
    ("target", "noise", "reason"),
    [
        ("mine.txt", 0, r"^--write=.*mine.txt: must be a .yaml file"),
        ("nowhere/mine.yaml", 0, r"^--write=.*: must be in a folder that is there; make .*nowhere first"),
        ("mine.yaml", -1, "^--noise=-1: must be 0 or more"),
        ("other.yaml", 0, "other.yaml: is no recipe"),
    ],
)
def test_a_recipe_is_not_written_where_it_has_no_place(
    target: str, noise: int, reason: str, folder: Path, runs: Runs, tmp_path: Path
) -> None:
    (tmp_path / "other.yaml").write_text("name: tiny\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=reason):
        reproducing.write(folder, tmp_path / target, [], noise=noise)
    assert sorted(tmp_path.rglob("*")) == before
    assert runs.asked == []


def test_a_file_is_not_written_as_a_recipe_again(folder: Path, runs: Runs, tmp_path: Path) -> None:
    write_recipe(tmp_path / "a.yaml", read_recipe(folder))
    with pytest.raises(ValueError, match="is a recipe already; --write takes the folder of a finished run"):
        reproducing.write(tmp_path / "a.yaml", tmp_path / "b.yaml", [], noise=0)


def test_a_tolerance_is_twice_the_largest_deviation_and_never_zero_by_luck() -> None:
    figures = {"a": Figure(100.0), "b": Figure((1.0, 3.0)), "c": Figure(0.0)}
    others = [{"a": 100.5, "b": (1.0, 3.0), "c": 0.0}, {"a": 99.0, "b": (1.25, 3.0), "c": 0.0}]
    found = with_tolerances(figures, others)
    assert {name: figure.tolerance for name, figure in found.items()} == {"a": 2.0, "b": 0.5, "c": 0.0}
    same = with_tolerances(figures, [{"a": 100.0, "b": (1.0, 3.0), "c": 0.0}])
    assert {name: figure.tolerance for name, figure in same.items()} == {"a": 1e-3, "b": 3.1e-5, "c": 0.0}
    assert with_tolerances(figures, []) == figures
    for wrong in ({"a": math.nan, "b": (1.0, 3.0), "c": 0.0}, {"b": (1.0, 3.0), "c": 0.0}):
        with pytest.raises(ValueError, match=r"^a: a run under noise has no such figure, or none that compares"):
            with_tolerances(figures, [wrong])


@pytest.mark.parametrize(
    ("number", "rounded"), [(0.0, 0.0), (0.0612, 0.062), (1.0, 1.0), (123.0, 130.0), (9.91e-9, 1e-8)]
)
def test_tolerances_are_rounded_up(number: float, rounded: float) -> None:
    assert rounded_up(number) == rounded
    assert rounded_up(number) >= number


def test_differences_are_those_of_the_worst_step() -> None:
    assert difference((1.0, 2.0, 3.0), (1.0, 2.5, 2.75)) == 0.5
    assert difference(math.inf, math.inf) == 0.0
    assert difference(math.inf, 1.0) == math.inf


def test_a_commit_is_that_of_the_checkout(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    (tmp_path / ".git").mkdir()
    assert commit_of(tmp_path) is None
    found = commit_of()
    if (ROOT / ".git").exists():
        head = ["git", "rev-parse", "--short=12", "HEAD"]
        name = subprocess.run(head, check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()
        assert str(found).partition("-")[0] == name


def test_a_machine_is_told_by_what_decides_bits(tmp_path: Path) -> None:
    found = machine()
    assert {*KIND} < found.keys()
    assert found["integer_units"] is has_integer_units()
    described = tmp_path / "cpuinfo"
    described.write_text("processor : 0\nmodel name\t: A Fast One\nmodel name\t: Another\n")
    assert processor(described) == "A Fast One"
    described.write_text("cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: A Fast One\nmodel\t: 3\n")
    assert processor(described) == "A Fast One, family 26, model 2"
    assert processor(tmp_path / "nowhere")


def test_recipes_of_the_repository_are_named_measured_and_compose() -> None:
    assert {"tiny", "readme_tiny"} <= {file.stem for file in RECIPES}
    for file in RECIPES:
        recipe = read_recipe(file)
        given = [f"{need}=x{number}.txt" for number, need in enumerate(recipe.needs)]
        assert to_request(file, given).config.numerics.exact, file
        assert (recipe.name, yaml.safe_load(file.read_text())["format"]) == (file.stem, FORMAT)
        assert recipe.about, file
        assert recipe.texts.keys() == {"calibration", "evaluation"}
        assert all(figure.tolerance is not None for figure in recipe.figures.values()), file
        assert "/" not in str(recipe.model["id"]), "no path of a machine"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_of_pages_are_what_recipes_say(tables: ModuleType) -> None:
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.rewritten(text) == text, "run python docs/tables.py"
        assert tables.PLACE.search(text), page
    readme = tables.PAGES[0].read_text(encoding="utf-8")
    trained = read_recipe(ROOT / "recipes" / "readme_tiny.yaml").values[TRAINED]
    assert f"{trained:.2f}" in readme


def test_another_figure_would_change_the_table(tables: ModuleType, folder: Path) -> None:
    recipe = read_recipe(folder)
    made = replace(recipe.made, commit="abc", machine={"cores": 2, "cpu": "Z80"}, date="2026-12-01")
    recipe = replace(recipe, name="mine", made=made, overrides=("seed=1",), needs=("data.evaluation",))
    text = tables.section(recipe)
    assert text.splitlines()[:5] == [
        "<!-- recipe: mine -->",
        "```",
        "model    perplexity  against float  KL (nats)  top-1 agreement",
        "float         26.00                    0.0000           100.0%",
        "trained        0.33         -98.7%     0.0000            70.0%",
    ]
    assert tables.PLACE.fullmatch(text)
    command = "`python -m rotexp.train seed=1 data.evaluation=PATH`"
    where = f"{command} on 2 cores of Z80, torch {versions()['torch']}, 4 s, text digest {recipe.texts['evaluation']}"
    assert text.splitlines()[-2] == f"(2026-12-01, abc, {where}: `recipes/mine.yaml`.)"
    moved = replace(recipe, figures={**recipe.figures, TRAINED: Figure(0.5)})
    assert tables.section(moved) != text
