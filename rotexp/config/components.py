"""Parts that a configuration names by `_target_`, the user's own among them, and the options they are called with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from rotexp.errors.requirements import MISSING


@dataclass(frozen=True)
class Component:
    """A part without a schema: in text its options stand beside `_target_`.

    Attributes:
        name: what tables and W&B call it; the class's name if none is given.
        options: the keyword arguments that its class is called with.
    """

    name: str = MISSING
    _target_: str = MISSING
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """The class, `module.Class`."""
        return self._target_


def component_of(values: Mapping[str, Any]) -> Component:
    """Return the part that text describes, its options beside `name` and `_target_`."""
    target = str(values.get("_target_", ""))
    own = {key: value for key, value in values.items() if key not in ("name", "_target_")}
    return Component(str(values.get("name") or target.rpartition(".")[2]), target, own)


@dataclass(frozen=True, kw_only=True)
class Pluggable:
    """A group of options that also takes a part of the user's own: in text its options stand beside `_target_`.

    Attributes:
        options: the keyword arguments of the class that `_target_` names; those that the group knows stay in it, but
            for what only some of rotexp's own parts take (`HANDED_ON`). The class gets those that its constructor
            names too, where they are not the group's defaults or the constructor has none.
    """

    HANDED_ON: ClassVar[tuple[str, ...]] = ()

    _target_: str | None = None
    options: dict[str, Any] = field(default_factory=dict, hash=False)  # specs are keys of caches

    @classmethod
    def fields_of_group(cls) -> set[str]:
        """Return the names of the group's own options, but for those that only one of rotexp's own parts takes."""
        return {option.name for option in fields(cls)} - {"_target_", "options", *cls.HANDED_ON}

    @property
    def target(self) -> str | None:
        """The class of the user's own, `module.Class`; None for a part of rotexp's."""
        return self._target_
