"""Run a command through Hydra, and answer a wrong request by one line and exit code 2."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from rotexp.config.composition import PATHS, from_root
from rotexp.config.explanations import REFUSALS, TRAINING, Vocabulary, check_overrides, explain
from rotexp.config.files_of_others import checked_files
from rotexp.config.own_parts import as_text_has_it, writable
from rotexp.config.plugins import grant, typed_plugins
from rotexp.config.schema import COMPONENTS, Config
from rotexp.experiment.options import EvaluateConfig, ExportConfig
from rotexp.files.reading import UnreadableError, read_yaml
from rotexp.process.exit_codes import DONE, INTERRUPTED, SIGNALLED, WRONG_REQUEST, leave_at_once
from rotexp.process.outer import adopt, is_first
from rotexp.process.saying import tell
from rotexp.process.signals import interruptible
from rotexp.sweep.planner import register_planning, swept_keys
from rotexp.sweep.scheduled import ask_for_requeue, optimized_metric
from rotexp.sweep.sweep import Sweep


class Command:
    """What Hydra calls for every job it runs in this process, and the exit codes of those jobs.

    Attributes:
        sweep: what keeps the outcomes of jobs that run in processes of their own (None: all jobs run here).
        plugins: those that were typed; a scheduler's process has no other word of them.
    """

    def __init__(self, job: Callable[[DictConfig], int], *, known: Vocabulary, sweep: Sweep | None) -> None:
        self.job, self.known, self.sweep = job, known, sweep
        self.codes = [DONE]
        self.plugins: tuple[str, ...] = ()

    def __call__(self, composed: DictConfig) -> float | None:
        """Run a job; return what a sweeper may minimize."""
        grant(self.plugins)
        runtime = HydraConfig.get().runtime
        folder, typed_in = Path(runtime.output_dir), Path(runtime.cwd)
        try:
            if Path.cwd() != typed_in:  # hydra.job.chdir=true
                composed = from_root(composed, PATHS, base=typed_in)
            self.codes.append(self.job(composed))
        except REFUSALS as error:  # here, since Hydra would print its own line, and end a sweep
            self.refuse(explain(error, known=self.known))
        except SystemExit as exited:  # rotexp itself returns its codes
            self.refuse(f"a part called sys.exit({'' if exited.code is None else exited.code}); let it raise instead")
        except KeyboardInterrupt as interruption:
            self.interrupt(interruption)
        finally:
            _remove_if_empty(folder, typed_in)
        if self.codes[-1] > SIGNALLED:
            if self.codes[-1] != INTERRUPTED:
                ask_for_requeue()
            sys.exit(self.codes[-1])
        if self.sweep is None or self.codes[-1]:
            return None
        return optimized_metric(folder, composed.sweep.optimized_metric)

    def refuse(self, reason: str) -> None:
        """Say in one line what was wrong with the request."""
        if is_first():
            tell(reason)
        self.codes.append(WRONG_REQUEST)

    def interrupt(self, interruption: KeyboardInterrupt, *, state: str = "nothing was started") -> None:
        """Say that a signal came, and what that left."""
        if is_first():
            tell(f"{interruption or 'interrupted'}; {state}")
        self.codes.append(getattr(interruption, "exit_code", INTERRUPTED))


def run_command(
    job: Callable[[DictConfig], int],
    *,
    config_name: str = "config",
    known: Vocabulary = TRAINING,
    sweep: Sweep | None = None,
) -> None:
    """Compose the configuration from the command line, run the job, exit with its code.

    A sweep runs all its jobs, and exits with the highest code; only a signal ends it before.

    Args:
        config_name: the entry's primary config, a file of `conf/`.
        known: what its command line may set.
        sweep: given where the jobs of a sweep run in processes of their own.
    """
    command = Command(job, known=known, sweep=sweep)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads of several ranks starve each other
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own notes on standard error
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints in its own format and exits with 1
    try:
        overrides = _check_command_line(known)
        command.plugins = typed_plugins(overrides)
        grant(command.plugins)  # a sweep composes its jobs before it calls the command
        register(swept_keys(overrides))
        with interruptible(), checked_files():
            hydra.main(config_path="pkg://rotexp.conf", config_name=config_name, version_base="1.3")(command)()
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        command.refuse(explain(error, known=known))
    except OSError as error:  # Hydra makes the folder before it calls the job
        command.refuse(f"hydra.run.dir={error.filename}: cannot be made ({error.strerror}); choose another folder")
    except KeyboardInterrupt as interruption:
        started = sweep is not None and sweep.outcomes
        command.interrupt(interruption, state="every job was ended" if started else "nothing was started")
    finally:
        if sweep is not None:
            sweep.show(command=sys.argv)
    _leave(max(*command.codes, 0 if sweep is None else sweep.exit_code))


def _leave(code: int) -> NoReturn:
    if adopt() is not None:
        leave_at_once(code)
    sys.exit(code)


def register(swept: Sequence[str] = ()) -> None:
    """Give Hydra the schemas, the resolvers of folder names, and the launcher and sweeper of this machine.

    Args:
        swept: the keys that the command line varies.
    """
    register_planning(swept)
    OmegaConf.register_new_resolver("unique", lambda: secrets.token_hex(2), use_cache=True, replace=True)
    store = ConfigStore.instance()
    store.repo = Schemas(store.repo)
    store.store("schema", writable(Config))
    store.store("export_schema", writable(ExportConfig))
    store.store("evaluate_schema", writable(EvaluateConfig))
    for group, options in COMPONENTS.items():
        for name, schema in options.items():
            store.store(name, as_text_has_it(schema), group=f"schema/{group}")  # runs of before name one for each


class Schemas(dict[str, Any]):
    """What Hydra's store of schemas holds; Hydra copies it for each group that `--help` lists, and changes no copy."""

    def __deepcopy__(self, _: dict[int, Any]) -> Schemas:
        return self


def _check_command_line(vocabulary: Vocabulary) -> list[str]:
    """Check flags and the form of overrides, before Hydra reads them; return the overrides.

    Raises:
        ValueError: one of them cannot be meant.
        OverrideParseException: an override cannot be parsed.
    """
    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        known, unknown = parser.parse_known_args()
    except argparse.ArgumentError as error:
        raise ValueError(f"{error.argument_name}: {error.message}; see --hydra-help") from None
    if unknown and not unknown[0].startswith("-"):
        raise ValueError(f"{unknown[0]}: stands behind a flag; put all flags before the first key=value, or after all")
    if unknown:
        raise ValueError(f"{unknown[0]}: no such flag (--hydra-help lists them); values are set by key=value")
    if known.config_dir and not Path(known.config_dir).is_dir():
        raise ValueError(f"--config-dir {known.config_dir}: no such folder; name the folder that holds your configs")
    if known.config_dir and known.config_name:
        _check_config_file(Path(known.config_dir) / f"{known.config_name.removesuffix('.yaml')}.yaml")
    if known.config_path:
        raise ValueError(f"--config-path {known.config_path}: would hide rotexp's own configs; use --config-dir")
    check_overrides(known.overrides, sweep=known.multirun, known=vocabulary)
    return list(known.overrides)


def _check_config_file(file: Path) -> None:
    """Refuse a damaged file, of which Hydra would not say the name, or take it for an empty one."""
    try:
        if file.is_file():
            read_yaml(file)
    except UnreadableError as error:
        raise ValueError(
            f"--config-name {file.stem}: {file} cannot be read ({error.reason}); correct the file"
        ) from None


def _remove_if_empty(folder: Path, typed_in: Path) -> None:
    """Leave no trace of a request that was refused; the folder in which it was typed (`hydra.run.dir=.`) is not one."""
    if folder.is_dir() and folder.resolve() != typed_in.resolve() and not any(folder.iterdir()):
        folder.rmdir()
