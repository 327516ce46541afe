"""Which modules of the user's own a configuration may name: those typed as `plugins=[…]`, and installed ones.

A file never grants anything, neither the user's nor one that is read back from a run's folder: `plugins` counts where
it was typed for this process. Packages that are installed grant themselves by an entry point `rotexp.plugins`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import entry_points
from types import ModuleType

KEY = "plugins"
ENTRY_POINTS = "rotexp.plugins"


_TYPED: ContextVar[tuple[str, ...]] = ContextVar("typed plug-ins", default=())


def grant(typed: Sequence[str]) -> None:
    """Say which plug-ins were typed for this process. Hydra's own record of overrides is none: a file may fill it."""
    _TYPED.set(tuple(typed))


@contextmanager
def granting(typed: Sequence[str]) -> Iterator[None]:
    """Let plug-ins that were given as overrides in Python be typed inside the block."""
    before = _TYPED.set(tuple(typed))
    try:
        yield
    finally:
        _TYPED.reset(before)


def granted_plugins() -> tuple[str, ...]:
    """Return the plug-ins that were typed for this process."""
    return _TYPED.get()


def typed_plugins(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that `plugins=[…]` names among overrides."""
    from hydra.core.override_parser.overrides_parser import OverridesParser  # what is built needs no Hydra

    parsed = OverridesParser.create().parse_overrides(list(overrides))
    typed = next((override.value() for override in parsed if override.key_or_group == KEY), None)
    names = [typed] if isinstance(typed, str) else typed if isinstance(typed, list) else []
    return tuple(str(name) for name in names)


def installed_plugins() -> tuple[str, ...]:
    """Return the modules that installed packages name by entry points."""
    return tuple(point.module for point in entry_points(group=ENTRY_POINTS))


def check_granted(named: Iterable[str], typed: Sequence[str]) -> None:
    """Refuse plug-ins that a file names.

    Raises:
        ValueError: one of them was not typed.
    """
    for name in named:
        if name not in typed:
            raise ValueError(
                f"{KEY}=[{name}]: is named by a file, which may not say what is imported; type {KEY}=[{name}] on the "
                f"command line, or install the package with an entry point of {ENTRY_POINTS}"
            )


def check_importable(typed: Iterable[str]) -> None:
    """Import plug-ins that were typed, so that one that cannot be is refused whether a configuration needs it or not.

    Raises:
        ValueError: one of them cannot be imported.
    """
    for name in typed:
        if not all(part.isidentifier() for part in name.split(".")) or name.partition(".")[0] == "rotexp":
            raise ValueError(f"{KEY}=[{name}]: is no module of your own; name one as Python imports it, such as my_pkg")
        import_plugin(name, where=f"{KEY}=[{name}]")


def import_plugin(module: str, *, where: str) -> ModuleType:
    """Import a module of the user's own.

    Args:
        where: what the message begins with.

    Raises:
        ValueError: it is not there, or it raised something.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ValueError(f"{where}: {module} imports {error.name}, which is not installed; install it") from None
        remedy = "install its package, or start by python -m in the folder that holds it, or name that in PYTHONPATH"
        if "." in str(error.name):
            remedy = "name a module that is there"
        raise ValueError(f"{where}: there is no module {error.name}; {remedy}") from None
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        fault = f"raised {type(error).__name__} while it was imported ({reason})"
        raise ValueError(f"{where}: {module} {fault}; correct it") from None
