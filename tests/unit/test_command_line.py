"""The command line: a wrong request gets one line and exit code 2, leaves nothing behind, and loads no torch for it."""

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from rotexp.launch.command_line import run_command
from rotexp.process.signals import Interrupted

PRESETS = Path(__file__).parents[2] / "conf" / "model"
MODELS = f"choose one of {', '.join(sorted(path.stem for path in PRESETS.glob('*.yaml')))}"
TRAIN_KEYS = "train has steps, params, micro_batch_size, max_grad_norm, lr_schedule, scheduler, warmup_steps, log_every"

REFUSED: dict[str, list[str]] = {
    # a group, an option
    "model=nope": ["model=nope: no such option; ", MODELS],
    "model=tiney": ["model=tiney: no such option; ", MODELS, "(nearest: tiny)"],
    "model=": ["model=: no such option; ", MODELS],
    "model=3": ["model=3: must be an option of model; ", MODELS],
    "model=null": ["model=null: must be an option of model; ", MODELS],
    "experiment=nope": ["experiment=nope: no such option; choose one of bits, "],
    "optimizer=sgd": ["optimizer=sgd: no such option; choose one of cayley_sgd"],
    "modle=tiny": [
        "modle=tiny: no such key; the configuration has seed, resume, model, ",
        "correct it",
        "(nearest: model)",
    ],
    "model@other=tiny": ["model@other", "no such key; ", "(nearest: model, "],
    "hydra/launcher=nope": ["hydra/launcher=nope: no such option; choose one of basic"],
    # a key
    "train.step=3": ["train.step=3: no such key; ", TRAIN_KEYS, "correct it", "(nearest: train.steps, "],
    "train={step:3}": ["train={step:3}: no such key; ", TRAIN_KEYS, "(nearest: train.steps"],
    "lr=0.1": ["lr=0.1: no such key; ", "(nearest: adamw.lr, optimizer.lr)"],
    "nproc=2": ["nproc=2: no such key; ", "(nearest: launch.nproc)"],
    "foo=1": ["foo=1: no such key; the configuration has seed, resume, model, data, "],
    "optimizer.foo=1": ["optimizer.foo=1: no such key; optimizer has lr, momentum, "],
    "objective.k=5": ["objective.k=5: ", "no such key; choose objective=kl_topk, or leave it out"],
    "hydra.foo=1": ["hydra.foo=1: no such key; --cfg job shows them all"],
    "+foo=1": ["+foo=1: no such key; ", "correct it or leave it out"],
    "+train.foo=1": ["+train.foo=1: no such key; ", TRAIN_KEYS],
    "++foo=1": ["foo: no such key; ", "leave it out"],
    "+train.steps=3": ["+train.steps=3: + adds keys, and this one exists; write train.steps=3"],
    "+model=tiny": ["+model=tiny: + adds keys, and this one exists; write model=tiny"],
    "~model": ["~model: ~ removes keys, and every key is needed; choose another value, model=…"],
    "~train.steps": ["~train.steps: ~ removes keys, and every key is needed; choose another value, train.steps=…"],
    # a value
    "train.steps=abc": ["train.steps=abc: must be a whole number; change it or leave it out"],
    "train.steps=1.5": ["train.steps=1.5: must be a whole number; change it or leave it out"],
    "train.steps=": ["train.steps=: must be a whole number; change it or leave it out"],
    "train.steps=null": ["train.steps=null: must be a whole number; change it or leave it out"],
    "train.steps=true": ["train.steps=true: must be a whole number; change it or leave it out"],
    "train.steps=[1,2]": ["train.steps=[1,2]: must be a whole number; change it or leave it out"],
    "train.steps=-1": ["train.steps=-1: must be 0 or more; 0 evaluates without training"],
    "seed=-1": ["seed=-1: must be 0 or more; choose another"],
    "train.micro_batch_size=x": ["train.micro_batch_size=x: must be a whole number or null; change it"],
    "optimizer.lr=abc": ["optimizer.lr=abc: must be a number; change it"],
    "optimizer.lr=-1": ["optimizer.lr=-1.0 is not a number in (0, 3.142) ", "; choose another"],
    "rotation.r1=2.5": ["rotation.r1=2.5: must be true or false or null; change it"],
    "model.dtype=float8": ["model.dtype=float8: must be one of auto, float32, bfloat16, float16; change it"],
    "optimizer.solver=qr": ["optimizer.solver=qr: must be one of exact, fixed_point; change it"],
    "model.path=[a]": ["model.path=[a]: must be text or null; change it"],
    "quant.weights=4": ["quant.weights=4: must be set key by key; name one of quant.weights.bits, "],
    "quant.weights.bits=9": ["quant.weights.bits=9 is not one of (2, 3, 4, 5, 6, 7, 8, 16); set 16"],
    "train.steps=${nope}": ["train.steps: ", "'nope' not found; correct the reference"],
    "train.steps=${oc.env:NO_SUCH_VARIABLE}": ["train.steps: ", "NO_SUCH_VARIABLE", "correct the reference"],
    "objective._target_=torch.load": ["objective._target_=torch.load: must be a class of rotexp.training"],
    "model=hf": ["model.path=null: must be a hub id or a folder; set model.path=DIR_OR_HUB_ID"],
    "model=hf model.path=": ["model.path=: must be a hub id or a folder; set model.path=DIR_OR_HUB_ID"],
    "model.path=???": ["model.path: has no value; ", "set model.path=…"],
    "data=text": ["data.calibration=null: must be a text file; set data.calibration=FILE"],
    "sharding=full launch.nproc=1": ["sharding.strategy=full: must be ", "2 or more ranks, not 1; set launch.nproc=2"],
    "data.global_batch_size=3 launch.nproc=2": ["data.global_batch_size=3: must be a multiple of the 2 ranks; "],
    # the form
    "train.steps": ["train.steps: has no value; write train.steps=…"],
    "--- foo": ["foo: is not of the form key=value; write it so, and quote values with spaces"],
    "=3": ["=3: has no key; write key=value"],
    "train.steps=[1": ["train.steps=[1: the value cannot be parsed; quote it, as in 'train.steps=\"[1\"'"],
    "model.path='a": ["model.path='a: the value cannot be parsed; quote it, as in 'model.path=\"a\"'"],
    "train.steps=3 train.steps=4": ["train.steps=4: given twice, before as train.steps=3; keep one"],
    "model=tiny model=hf": ["model=hf: given twice, before as model=tiny; keep one"],
    "train.steps=1,2": ["train.steps=1,2: several values; add -m to run one after the other, or quote them"],
    "model=hf,tiny": ["model=hf,tiny: several values; add -m "],
    "train.steps=range(1,3)": ["train.steps=range(1,3): several values; add -m "],
    "-m plugins=[json],[html]": ["plugins=[json],[html]: several values, ", "name all in one, plugins=[a,b]"],
    # a flag
    "--nope": ["--nope: no such flag (--hydra-help lists them); values are set by key=value"],
    "--train.steps=3": ["--train.steps=3: no such flag", "values are set by key=value"],
    "seed=1 -m train.steps=1,2": ["train.steps=1,2: stands behind a flag; put all flags before the first key=value"],
    "--cfg nope": ["--cfg", "'nope'", "choose from 'job', 'hydra', 'all'", "see --hydra-help"],
    "--config-name nope": ["--config-name nope: no such config; name one that lies in --config-dir, or leave it out"],
    "--config-dir /nope": ["--config-dir /nope: no such folder; name the folder that holds your configs"],
    "--config-path /nope": ["--config-path /nope: ", "use --config-dir"],
    "--resolve": ["--resolve", "--cfg"],
    # a file of the user's own
    "--config-dir OWN --config-name unknown_key": ["train.step: no such key; ", TRAIN_KEYS, "(nearest: train.steps"],
    "--config-dir OWN --config-name wrong_type": ["train.steps: must be a whole number; change it"],
    "--config-dir OWN --config-name broken": ["broken.yaml", "line 3", "; correct the file"],
    "--config-dir OWN --config-name empty": ["--config-name empty: ", "empty.yaml cannot be read (it is empty); "],
    "--config-dir OWN --config-name nuls.yaml": ["nuls.yaml cannot be read (it holds NUL bytes", "; correct the file"],
    "--config-dir OWN --config-name a_list": ["a_list.yaml cannot be read (it holds no mapping); correct the file"],
    "--config-dir OWN --config-name no_schema": ["not based on the schema; begin its defaults list with `- schema`"],
    "--config-dir OWN --config-name no_option": ["model=nope: no such option; ", MODELS],
    # a folder
    "hydra.run.dir=/etc/passwd": ["hydra.run.dir=/etc/passwd: cannot be made (", "; choose another folder"],
}
"""A command line, and what its answer holds. OWN is a folder of the user's own configs; `--- ` marks positionals."""

OWN_CONFIGS = {
    "empty": "",
    "nuls": "\0" * 100,
    "a_list": "[]",
    "unknown_key": "defaults: [config, _self_]\ntrain: {step: 3}\n",
    "wrong_type": "defaults: [config, _self_]\ntrain: {steps: many}\n",
    "broken": "defaults: [config, _self_]\ntrain: {steps: [\n",
    "no_schema": "defaults: [hydra_settings, _self_, {override hydra/job_logging: none}]\nseed: 1\n",
    "no_option": "defaults: [config, {override model: nope}, _self_]\n",
}

PROGRAM = """
import contextlib, io, json, sys
from rotexp.train import main

def answer(arguments):
    errors, output, code = io.StringIO(), io.StringIO(), None
    sys.argv = ["rotexp.train", *arguments]
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
        try:
            main()
        except SystemExit as end:
            code = end.code
    loaded = [name for name in ("torch", "transformers", "wandb") if name in sys.modules]
    return {"code": code, "errors": errors.getvalue(), "output": output.getvalue(), "loaded": loaded}

json.dump([answer(arguments) for arguments in json.load(sys.stdin)], sys.stdout)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("requests")


@pytest.fixture(scope="module")
def answers(place: Path) -> dict[str, Any]:
    """Ask every refused request in one process, so that Python starts once; each names a run folder of its own."""
    own = place / "own"
    own.mkdir()
    for name, text in OWN_CONFIGS.items():
        (own / f"{name}.yaml").write_text(text, encoding="utf-8")
    requests = []
    for number, line in enumerate(REFUSED):
        arguments = line.removeprefix("--- ").replace("OWN", str(own)).split(" ")
        folder = [] if "hydra.run.dir" in line else [f"hydra.run.dir={place / f'run-{number}'}"]
        requests.append(arguments + folder)
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        cwd=place,
        timeout=200,
        check=True,
    )
    assert result.stderr == ""
    return dict(zip(REFUSED, json.loads(result.stdout), strict=True))


@pytest.mark.parametrize("request_line", REFUSED)
def test_a_wrong_request_gets_one_line_and_exit_code_2(request_line: str, answers: dict[str, Any]) -> None:
    answer = answers[request_line]
    assert answer["errors"].count("\n") == 1, answer["errors"]
    assert answer["errors"].startswith("rotexp: ")
    assert [part for part in REFUSED[request_line] if part not in answer["errors"]] == [], answer["errors"]
    assert not [word for word in ("Traceback", "To append", "hydra.cc", "Error executing") if word in answer["errors"]]
    assert (answer["code"], answer["output"]) == (2, "")


@pytest.mark.parametrize("request_line", REFUSED)
def test_a_wrong_request_loads_neither_torch_nor_a_model_library(request_line: str, answers: dict[str, Any]) -> None:
    assert answers[request_line]["loaded"] == []


def test_wrong_requests_leave_no_folder(answers: dict[str, Any], place: Path) -> None:
    assert [path.name for path in place.iterdir()] == ["own"]


def test_the_process_ends_with_code_2_and_one_line(tmp_path: Path) -> None:
    result = run_python("-m", "rotexp.train", "train.step=3", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--help"], ["Train the rotations", "random_llama, smollm2_135m", "global_batch_size: 8"]),
        (["--cfg", "job", "--resolve"], ["steps: 80", "source: tiny", "step_rule: angle"]),
        (["--cfg", "job", "--resolve", "model=random_llama", "train.steps=7"], ["steps: 7", "source: random"]),
    ],
)
def test_help_and_cfg_answer_without_torch(arguments: list[str], shown: list[str], tmp_path: Path) -> None:
    result = run_python("-X", "importtime", "-m", "rotexp.train", *arguments, cwd=tmp_path)
    assert result.returncode == 0
    assert [text for text in shown if text not in result.stdout] == []
    assert "${" not in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "rotexp.config.schema" in imported
    assert not imported & {"torch", "transformers", "accelerate", "wandb", "numpy"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        ("rotexp-train quant=", "quant=none quant=w16a4 quant=w4a4 quant=w4a4kv4 quant=w4a8 quant=w8a8"),
        ("rotexp-train optimizer=cayley_sgd train.st", "train.steps="),
    ],
)
def test_a_shell_is_told_what_completes_a_line(
    line: str, choices: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    answer = run_python("-m", "rotexp.train", "-sc", "query=bash", cwd=tmp_path)
    assert (answer.returncode, answer.stdout.strip(), answer.stderr) == (0, choices, "")
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_names_every_refused_request_and_ends_with_code_2(tmp_path: Path) -> None:
    sweep = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    result = run_python("-m", "rotexp.train", "-m", "train.steps=-1,-2", sweep, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert [line.split(":")[1] for line in result.stderr.splitlines()] == [" train.steps=-1", " train.steps=-2"]
    assert not [path for path in (tmp_path / "sweep").iterdir() if path.is_dir()]


@pytest.fixture
def command(own_logging: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Run a job of the test's own by the command line; returns the exit code."""

    def run(job: Callable[[DictConfig], int], *arguments: str) -> int:
        folders = [f"hydra.run.dir={tmp_path}/run", f"hydra.sweep.dir={tmp_path}/sweep"]
        monkeypatch.setattr(sys, "argv", ["rotexp.train", *arguments, *folders])
        with pytest.raises(SystemExit) as end:
            run_command(job)
        assert isinstance(end.value.code, int)
        return end.value.code

    return run


def test_a_part_that_exits_in_a_job_is_a_wrong_request(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def leaves(composed: DictConfig) -> int:
        sys.exit(0)

    assert command(leaves) == 2
    assert capsys.readouterr().err == "rotexp: a part called sys.exit(0); let it raise instead\n"


def test_the_jobs_code_is_the_exit_code(command: Callable[..., int]) -> None:
    assert [command(lambda composed, code=code: code) for code in (0, 1, 143)] == [0, 1, 143]


def test_a_sweep_runs_every_job_and_ends_with_the_highest_code(command: Callable[..., int]) -> None:
    seen: list[int] = []

    def job(composed: DictConfig) -> int:
        seen.append(composed.train.steps)
        return composed.train.steps % 2

    assert command(job, "-m", "train.steps=1,2,4") == 1
    assert seen == [1, 2, 4]


def test_no_job_of_a_sweep_is_silenced(command: Callable[..., int]) -> None:
    silenced: list[bool] = []

    def job(composed: DictConfig) -> int:
        silenced.append(logging.getLogger("rotexp.made_by_the_first_job").disabled)
        return 0

    assert command(job, "-m", "train.steps=1,2") == 0
    assert silenced == [False, False]


def test_a_signal_ends_a_sweep(command: Callable[..., int]) -> None:
    seen: list[int] = []

    def job(composed: DictConfig) -> int:
        seen.append(composed.train.steps)
        return 143

    assert command(job, "-m", "train.steps=1,2,4") == 143
    assert seen == [1]


def test_an_interruption_before_the_run_is_one_line_and_its_own_code(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def job(composed: DictConfig) -> int:
        raise Interrupted(signal.SIGTERM)

    assert command(job) == 143
    assert capsys.readouterr().err == "rotexp: interrupted by SIGTERM; nothing was started\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a.b=1: must be 2;\n  change it"), "rotexp: a.b=1: must be 2; change it\n"),
        (PermissionError(13, "Permission denied", "/some/file"), "rotexp: /some/file: Permission denied; check the "),
    ],
)
def test_what_a_job_refuses_is_one_line_and_code_2(
    error: Exception, line: str, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def job(composed: DictConfig) -> int:
        raise error

    assert command(job) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(line)
    assert errors.count("\n") == 1


def test_a_defect_keeps_its_traceback(own_logging: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def job(composed: DictConfig) -> int:
        raise RuntimeError("a defect of ours")

    monkeypatch.setattr(sys, "argv", ["rotexp.train", f"hydra.run.dir={tmp_path}/run"])
    with pytest.raises(RuntimeError, match="a defect of ours"):
        run_command(job)


def test_only_an_empty_run_folder_is_removed(command: Callable[..., int], tmp_path: Path) -> None:
    command(lambda composed: 2)
    assert not (tmp_path / "run").exists()

    def job(composed: DictConfig) -> int:
        (tmp_path / "run" / "kept").touch()
        return 1

    command(job)
    assert (tmp_path / "run" / "kept").exists()


def run_python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], check=False, capture_output=True, text=True, cwd=cwd, timeout=100
    )
