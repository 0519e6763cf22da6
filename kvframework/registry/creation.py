"""The guarded call of a provider's `create`: any exception or wrong result becomes `PluginBroken` that names the plugin
and its table.

Runs where the object is needed: at startup in the server's main thread, for codecs in the first storage thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from kvframework.config import PluginTable
from kvframework.errors import KVFrameworkError, PluginBroken
from kvframework.overdue import named_at, timed
from kvframework.registry.registry import PluginRegistry

_HINT = "report it to the plugin's author; `kvframework plugins check` says more"


def declared_attributes(contract: type[Any]) -> list[str]:
    """The names of the attributes that a contract requires of its objects."""
    names = dict.fromkeys(name for each in contract.__mro__ for name in inspect.get_annotations(each))
    return [name for name in names if not name.startswith("_")]


class Creator:
    """Makes the objects of one configuration. Each call blocks for as long as the plugin does.

    A `KVFrameworkError` is the plugin's own error and passes, with the table's place if it names none.
    """

    def __init__(self, registry: PluginRegistry) -> None:
        self._registry = registry

    def one(self, kind: str, table: PluginTable, contract: type[Any], create: Callable[..., object], *args: Any) -> Any:
        """The result of `create(*args)`, a `contract`."""
        made = self.call(kind, table, create, *args)
        if not isinstance(made, contract):
            raise self._broken(kind, table, f"create returned {type(made).__name__}", contract.__name__)
        lacking = [name for name in declared_attributes(contract) if not hasattr(made, name)]
        if lacking:
            raise self._broken(kind, table, f"what create returned has no {', '.join(lacking)}", contract.__name__)
        return made

    def several(
        self, kind: str, table: PluginTable, contract: type[Any], create: Callable[..., object], *args: Any
    ) -> list[Any]:
        """The result of `create(*args)`, a list or tuple of `contract`."""
        made = self.call(kind, table, create, *args)
        expected = f"a list of {contract.__name__}"
        if not isinstance(made, list | tuple):
            raise self._broken(kind, table, f"create returned {type(made).__name__}", expected)
        for each in made:
            if not isinstance(each, contract):
                raise self._broken(kind, table, f"create returned a list with {type(each).__name__}", expected)
        return list(made)

    def call(
        self, kind: str, table: PluginTable, function: Callable[..., object], *args: Any, name: str = "create"
    ) -> object:
        """The result of `function(*args)`, of any type."""
        try:
            with named_at(table.where), timed(self._title(kind, table), name, long=name != "check"):
                return function(*args)
        except KVFrameworkError as error:
            error.where = error.where or table.where
            raise
        except (Exception, SystemExit) as error:
            cause = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
            raise self._broken(kind, table, f"{name} raised {cause}") from error

    def _broken(self, kind: str, table: PluginTable, fact: str, available: str = "") -> PluginBroken:
        title = self._title(kind, table)
        return PluginBroken(f"{title}: {fact}", where=table.where, available=available, hint=_HINT)

    def _title(self, kind: str, table: PluginTable) -> str:
        offer = self._registry.offer(kind, table.use)
        return f"{offer.title} ({offer.origin})"
