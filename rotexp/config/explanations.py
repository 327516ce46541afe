"""Say in one line what was wrong with a request: the key, the value, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from importlib.resources import files
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import BooleanNode, DictConfig, EnumNode, FloatNode, IntegerNode, ListConfig, Node, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    InterpolationValidationError,
    OmegaConfBaseException,
)
from yaml import YAMLError  # type: ignore[import-untyped]

from rotexp.config.composition import UnknownKeyError
from rotexp.config.own_parts import as_text_has_it, is_pluggable
from rotexp.config.plugins import KEY as PLUGINS
from rotexp.config.schema import COMPONENTS, Config

REFUSALS = (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError)
"""What composing, checking or opening a request raises when the request is at fault."""

KINDS = {IntegerNode: "a whole number", FloatNode: "a number", BooleanNode: "true or false", ListConfig: "a list"}
"""What a key takes, by the node that holds its value."""


OF_PARTS = ("_target_", "options")
"""Keys that describe a part of the user's own, and are no choices of a group's."""

EXTRAS = {"submitit_slurm": "slurm", "submitit_local": "slurm", "ray": "ray", "ray_aws": "ray", "optuna": "optuna"}
"""Launchers and sweepers of Hydra's plugins, and the extra that installs each."""


@dataclass(frozen=True)
class Vocabulary:
    """What the command line of one entry may set.

    Attributes:
        schema: the dataclass its configuration is based on.
        grouped: whether it is composed from the config groups.
    """

    schema: type[Any] = Config
    grouped: bool = True

    @property
    def components(self) -> dict[str, dict[str, Any]]:
        """The groups whose options have fields of their own, and the schema of each option."""
        return COMPONENTS if self.grouped else {}

    @cached_property
    def own_parts(self) -> tuple[str, ...]:
        """The keys of parts that may have options of any name."""
        groups = {key for key, node in self.nodes.items() if is_pluggable(node)}
        return (*self.components, "train.scheduler", "rotation.start", *groups) if self.grouped else ()

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """The config groups that come with rotexp, and the options of each."""
        folders = [folder for folder in files("rotexp.conf").iterdir() if folder.is_dir() and self.grouped]
        options = {
            folder.name: sorted(file.name[:-5] for file in folder.iterdir() if file.name.endswith(".yaml"))
            for folder in folders
        }
        return {group: names for group, names in sorted(options.items()) if names}

    @cached_property
    def nodes(self) -> dict[str, Node]:
        """Every key of the schema, components included, with the node that holds its default."""
        nodes = dict(_walk(OmegaConf.structured(self.schema), ""))
        for group, options in self.components.items():
            for schema in options.values():
                nodes.update(_walk(as_text_has_it(schema), f"{group}."))
        return nodes

    def owners(self, key: str) -> list[str]:
        """The options whose component has that key."""
        return [
            f"{group}={name}"
            for group, options in self.components.items()
            for name, schema in options.items()
            if key in dict(_walk(as_text_has_it(schema), f"{group}."))
        ]


TRAINING = Vocabulary()
"""That of the main job."""


def check_overrides(lines: Sequence[str], *, sweep: bool, known: Vocabulary = TRAINING) -> None:
    """Refuse overrides that Hydra would take in another sense than the one meant, or refuse without a remedy.

    Args:
        known: what may be set.
        sweep: whether several values are run one after the other.

    Raises:
        ValueError: one is refused.
        OverrideParseException: one cannot be parsed.
    """
    given: dict[str, str] = {}
    for override in OverridesParser.create().parse_overrides(list(lines)):
        if override.is_hydra_override():
            sweep |= override.input_line == "hydra.mode=MULTIRUN"
            continue
        fault = _fault(override, known, sweep=sweep)
        key, line = override.key_or_group, str(override.input_line)
        if given.setdefault(key, line) != line:
            fault = f"given twice, before as {given[key]}; keep one"
        if fault:
            raise ValueError(f"{line}: {fault}")


def _fault(override: Override, known: Vocabulary, *, sweep: bool) -> str:
    key, line = override.key_or_group, str(override.input_line)
    if not key:
        return "has no key; write key=value"
    if override.is_add():
        if key.rpartition(".")[0] in known.own_parts:
            return ""
        if key not in known.groups and key not in known.nodes:
            raise ValueError(_no_such_key(key, known, override=line))
        return f"+ adds keys, and this one exists; write {line.lstrip('+')}"
    if override.is_delete():
        return f"~ removes keys, and every key is needed; choose another value, {key}=…"
    if override.is_sweep_override():
        if key == PLUGINS:
            return "several values, and what is imported is the same for all jobs; name all in one, plugins=[a,b]"
        return "" if sweep else "several values; add -m to run one after the other, or quote them"
    if key in known.groups and not isinstance(override.value(), (str, list, dict)):
        return f"must be an option of {key}; choose one of {', '.join(known.groups[key])}"
    return ""


def explain(error: Exception, *, known: Vocabulary = TRAINING) -> str:
    """Say what was wrong with a request, from what Hydra, OmegaConf, the system or rotexp raised."""
    match error:
        case UnknownKeyError():
            return _no_such_key(error.key, known)
        case MissingConfigException() if error.missing_cfg_file:
            return _no_such_option(error.missing_cfg_file, list(error.options or ()), known)
        case OverrideParseException():
            return _not_parsed(error.override, known)
        case ConfigCompositionException():
            return _not_composed(error, known)
        case InterpolationResolutionError() if not isinstance(error, InterpolationValidationError):
            return f"{error.full_key}: {_first_line(str(error.msg))}; correct the reference"
        case OmegaConfBaseException() if error.full_key:
            return _wrong_value(error.full_key, known, shown=error.full_key, reason=str(error.msg))
        case YAMLError():
            return f"{error}; correct the file"
        case OSError() if error.filename:
            return f"{error.filename}: {error.strerror}; check the path and its permissions"
    return str(error)


def _not_composed(error: ConfigCompositionException, known: Vocabulary) -> str:
    """Explain why Hydra could not merge an override or a file."""
    text, cause = str(error), error.__cause__ or error.__context__
    if text.startswith("Could not override"):
        override = text.partition("To append to your config use +")[2]
        key = text.split("'")[1]
        return _no_such_key(getattr(cause, "full_key", None) or key, known, override=override)
    if text.startswith("Could not append"):
        line = text.partition("Either remove + prefix: '")[2].partition("'")[0]
        return f"+{line}: + adds keys, and this one exists; write {line}"
    if not isinstance(cause, OmegaConfBaseException):
        return text
    override = text.partition("Error merging override ")[2]
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)):
        return _no_such_key(str(cause.full_key), known, override=override)
    key = str(cause.full_key or override.partition("=")[0])
    return _wrong_value(key, known, shown=override or key, reason=str(cause.msg or cause))


def _no_such_option(path: str, options: list[str], known: Vocabulary) -> str:
    group, _, option = path.rpartition("/")
    if group.startswith("hydra/") and option in EXTRAS:
        return f"{group}={option}: is not installed; pip install 'rotexp[{EXTRAS[option]}]'"
    options = [name for name in options if name != "__init__"] or known.groups.get(group, [])
    if not options:
        return f"--config-name {path}: no such config; name one that lies in --config-dir, or leave it out"
    return f"{group}={option}: no such option; choose one of {', '.join(options)}{_nearest(option, options)}"


def _no_such_key(key: str, known: Vocabulary, *, override: str = "") -> str:
    shown = override or key
    parent, _, last = key.rpartition(".")
    settable = parent in known.own_parts and "=" in shown and not shown.startswith("+")
    added = f", or +{shown} if it is an option of your own part which its file leaves out" if settable else ""
    if owners := known.owners(key):
        group = key.partition(".")[0]
        return f"{shown}: the chosen {group} has no such key; choose {' or '.join(owners)}, or leave it out{added}"
    names = [name for name in known.nodes if not key.startswith(f"{name}.")]
    siblings = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == parent]
    siblings = [name for name in siblings if name not in OF_PARTS]
    siblings += [] if parent else [group for group in known.groups if group not in siblings]
    allowed = f"{parent or 'the configuration'} has {', '.join(siblings)}" if siblings else "--cfg job shows them all"
    near = _nearest(key.partition("@")[0], names, first=[name for name in names if name.rpartition(".")[2] == last])
    return f"{shown}: no such key; {allowed}; correct it or leave it out{added}{near}"


def _wrong_value(key: str, known: Vocabulary, *, shown: str, reason: str) -> str:
    node = known.nodes.get(key)
    return f"{shown}: {_first_line(reason)}; change it" if node is None else f"{shown}: must be {_allowed(key, node)}"


def _allowed(key: str, node: Node) -> str:
    """Say what a key takes, and what to do."""
    if isinstance(node, DictConfig):
        names = [f"{key}.{name}" for name in map(str, node) if name not in OF_PARTS]
        return f"set key by key; name one of {', '.join(names)}"
    if isinstance(node, EnumNode):
        choices: type[Enum] = node.enum_type
        kind = f"one of {', '.join(choice.name for choice in choices)}"
    else:
        kind = next((kind for cls, kind in KINDS.items() if isinstance(node, cls)), "text")
    return f"{kind}{' or null' if node._is_optional() else ''}; change it or leave it out"


def _not_parsed(override: str, known: Vocabulary) -> str:
    key, equals, value = override.partition("=")
    if equals:
        unquoted = value.strip("'\"")
        return f"{override}: the value cannot be parsed; quote it, as in '{key}=\"{unquoted}\"'"
    if key in known.groups or key in known.nodes:
        return f"{override}: has no value; write {key}=…"
    return f"{override}: is not of the form key=value; write it so, and quote values with spaces"


def _nearest(word: str, choices: Sequence[str], *, first: Sequence[str] = ()) -> str:
    near = list(dict.fromkeys([*first, *difflib.get_close_matches(word, choices, n=3)]))[:3]
    return f" (nearest: {', '.join(near)})" if near else ""


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _walk(node: Any, prefix: str) -> Iterator[tuple[str, Node]]:
    for key in node:
        child = node._get_node(key)
        yield f"{prefix}{key}", child
        if isinstance(child, DictConfig):
            yield from _walk(child, f"{prefix}{key}.")
