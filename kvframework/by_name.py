"""A function and its options, by their names: how a process gives work to a child that imports both.

Such names pass from a process to the one that it starts, over what it opened, and never come from a client.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from kvframework.errors import PluginBroken


class NamedCall(msgspec.Struct, frozen=True, array_like=True):
    """A function, and the options that are its first argument: "module:name" of both, and msgpack of the options."""

    function: str
    options_type: str
    options: bytes

    def __repr__(self) -> str:
        return f"NamedCall({self.function!r}, {self.options_type!r})"  # options may hold secrets

    @classmethod
    def of(cls, function: Callable[..., object], options: msgspec.Struct, *, where: str) -> NamedCall:
        """Raise `PluginBroken`, with `where`, for a function or options that another process could not make."""
        kind = type(options).__qualname__
        if not isinstance(options, msgspec.Struct):
            hint = "derive them from kvframework.api.plugin.Options"
            raise PluginBroken(f"options of type {kind}", where=where, available="a struct", hint=hint)
        names = _name(function, where), _name(type(options), where)
        try:
            call = cls(*names, msgspec.msgpack.encode(options, enc_hook=plain))
            call._unpacked(type(options))
        except (msgspec.MsgspecError, NotImplementedError, TypeError) as error:
            fact = f"{kind} cannot be sent to another process: {error}"
            hint = "give its fields types that msgspec knows, or ByteSize"
            raise PluginBroken(fact, where=where, hint=hint) from error
        return call

    def resolve(self) -> tuple[Callable[..., Any], Any]:
        """Import the function, and make the options. Blocking, and raises what foreign modules raise."""
        function, options_type = _found(self.function), _found(self.options_type)
        return function, self._unpacked(options_type)

    def _unpacked(self, options_type: Any) -> Any:
        return msgspec.msgpack.decode(self.options, type=options_type, dec_hook=_number)


def plain(value: object) -> object:
    """Return a number of a type of its own, such as `ByteSize`, as an integer: a hook of msgspec's encoders."""
    if isinstance(value, int):
        return int(value)
    raise NotImplementedError(f"{type(value).__name__} is no type for an option")


def _number(kind: type, value: object) -> object:
    if issubclass(kind, int) and isinstance(value, int):
        return kind(value)
    raise NotImplementedError(f"{kind.__name__} is no type for an option")


def _name(thing: Callable[..., object] | type, where: str) -> str:
    module, name = getattr(thing, "__module__", None) or "", getattr(thing, "__qualname__", "")
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not thing or module == "__main__":
        raise PluginBroken(
            f"{name or repr(thing)} of {module or 'no module'} cannot be found by its name",
            where=where,
            available="functions and classes at the top of a module that can be imported",
            hint="another process imports it: define it there; what it needs comes with its options",
        )
    return f"{module}:{name}"


def _found(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
