"""`python -m rotexp.doctor` says what is there, what is not and what to do, and waits for nobody."""

from __future__ import annotations

import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rotexp.doctor import main
from rotexp.launch import readiness as doctor

REPOSITORY = Path(__file__).parents[2]


def run(*arguments: str, place: Path) -> tuple[int, str, str]:
    """Return exit code, output with runs of spaces as one, and errors, of the command in another folder."""
    ended = subprocess.run(
        [sys.executable, "-m", "rotexp.doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "200", "NETRC": str(place / "none")},
        check=False,
    )
    return ended.returncode, " ".join(ended.stdout.replace("│", " ").split()), ended.stderr


def test_everything_looked_for_is_in_one_table_with_a_remedy_for_what_is_missing(tmp_path: Path) -> None:
    code, output, errors = run("--strict", place=tmp_path)
    assert (code, errors) == (0, "")
    machine = ("accelerator", "nccl", "cores", "integer units", "memory", "disk")
    names = ("libraries torch", *machine, "wandb login", "hub", "extra gguf")
    places = [output.index(name) for name in names]
    assert places == sorted(places)
    assert "wandb login none, runs are recorded offline wandb login; python -m rotexp.upload DIR uploads" in output
    assert "hub switched off by HF_HUB_OFFLINE unset it" in output
    assert f"GiB free in {tmp_path}" in output
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_argument_is_refused_in_one_line(tmp_path: Path) -> None:
    assert run("--stric", place=tmp_path) == (
        2,
        "",
        "rotexp: unrecognized arguments: --stric; --help shows what is allowed\n",
    )


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run the command in this process; returns exit code and output."""

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["doctor", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        code = main()
        return code, " ".join(capsys.readouterr().out.replace("│", " ").split())

    return call


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ("disk", "0.5 GiB free"),
        ("memory", "0.5 GiB free close other programs"),
        ("libraries", "nothing-like-it missing, torch 1 install rotexp anew"),
    ],
)
def test_strict_fails_when_a_default_run_would(
    monkeypatch: pytest.MonkeyPatch, called: Callable[..., tuple[int, str]], target: str, shown: str
) -> None:
    if target == "disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=doctor.GIB // 2))
    elif target == "memory":
        monkeypatch.setattr(doctor, "available_bytes", lambda: doctor.GIB // 2)
    else:
        monkeypatch.setattr(doctor, "requires", lambda _: ["nothing-like-it", "torch>=2", "gone; extra == 'dev'"])
        versions = {"torch": "1"}
        monkeypatch.setattr(doctor, "_version", versions.get)
    code, output = called("--strict")
    assert code == 1
    assert shown in output
    assert called()[0] == 0


def test_what_only_some_runs_need_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, called: Callable[..., tuple[int, str]]
) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _: None)
    code, output = called("--strict")
    assert code == 0
    assert "extra gguf gguf, sentencepiece missing pip install 'rotexp[gguf]'" in output


def test_a_plugin_whose_package_is_absent_is_missing() -> None:
    check = doctor.optional_part("slurm", ("no_such_package.no_such_plugin",))
    assert (check.found, check.remedy) == ("no_such_package.no_such_plugin missing", "pip install 'rotexp[slurm]'")
    assert doctor.optional_part("x", ("json", "http.server")).remedy == ""


@pytest.mark.parametrize("key", [True, False])
def test_a_key_is_a_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: bool) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    if key:
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert (doctor.wandb_login().remedy == "") is key


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a server on this machine that answers every request with an error."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as serving:
        serving.RequestHandlerClass.log_message = lambda *_: None  # type: ignore[method-assign]
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_address[1]}"
        serving.shutdown()
        thread.join()


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_server_that_answers_is_there_whatever_it_answers(server: str) -> None:
    check = doctor.hub({"HF_ENDPOINT": server})
    assert (check.found, check.remedy) == (f"{server} answers", "")


def test_a_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    monkeypatch.setattr(doctor, "NETWORK_SECONDS", 0.2)
    began = time.monotonic()
    check = doctor.hub({"HF_ENDPOINT": silent})
    assert time.monotonic() - began < 2
    assert check.remedy
    assert check.found.startswith(f"{silent}: ")


def test_a_look_up_that_heeds_no_limit_is_left_behind() -> None:
    release = threading.Event()
    began = time.monotonic()
    answer = doctor.within(lambda: str(release.wait(30)), seconds=0.1)
    assert time.monotonic() - began < 2
    assert answer == "no answer within 0 s"
    release.set()
    assert doctor.within(lambda: None, seconds=5) is None


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "nonsense"])
def test_no_server_is_a_reason_not_an_error(address: str) -> None:
    assert doctor.hub({"HF_ENDPOINT": address}).found.startswith(f"{address}: ")
