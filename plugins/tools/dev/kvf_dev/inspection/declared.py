"""The checks of what a plugin declares: its hook implementations, by pluggy's rules, and a provider's summary, probe
and options. Does not call `create`. Runs in the inspecting process, which has imported the plugin."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import inspect as types

from kvf_dev.inspection.problems import Problem, problem
from kvframework.api.memory import MemoryProvider
from kvframework.api.plugin import PROJECT, ByteSize, Options
from kvframework.api.tier import TierProvider
from kvframework.config import convert, toml_value
from kvframework.config.schema import L1Keys, L2Keys
from kvframework.errors import ConfigFieldError, PluginError
from kvframework.registry import KINDS, AnyProvider, describe_options
from kvframework.registry.registry import probed

_HOOKS = [kind.hook for kind in KINDS.values()]
_MARK = f"{PROJECT}_impl"
_PREFIX = "kvf_"


def hook_problems(plugin: object, where: str) -> Iterator[Problem]:
    """Problems of everything in `plugin`, a module or an object, that is a hook implementation or looks like one."""
    marked = 0
    for name, function in _functions(plugin):
        options = getattr(function, _MARK, None)
        place = f"{where}.{name}"
        if options is None:
            if name.startswith(_PREFIX) and _defined_here(function, plugin) and (meant := _meant(name)):
                yield problem("unmarked-hook", place, expected=f"@hookimpl before def {meant}()")
            continue
        marked += 1
        hook = options.get("specname") or name
        if hook not in _HOOKS:
            meant = _meant(hook)
            yield problem(
                "misspelt-hook",
                place,
                f"there is no hook {hook}",
                expected=", ".join(_HOOKS),
                hint=f"did you mean {meant}?" if meant else "rename it",
            )
        yield from _shape_problems(function, place)
    if not marked:
        yield problem("no-hook", where, expected=" or ".join(_HOOKS))


def _functions(plugin: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in dir(plugin):
        try:
            value = getattr(plugin, name)
        except Exception:  # noqa: BLE001, S112  a property of the plugin's; pluggy passes over it as well
            continue
        if inspect.isroutine(value):
            yield name, value


def _defined_here(function: Callable[..., Any], plugin: object) -> bool:
    return not inspect.ismodule(plugin) or getattr(function, "__module__", None) == plugin.__name__


def _meant(name: str) -> str:
    return next(iter(difflib.get_close_matches(name, _HOOKS, n=1, cutoff=0.7)), "")


def _shape_problems(function: Callable[..., Any], place: str) -> Iterator[Problem]:
    if (
        inspect.iscoroutinefunction(function)
        or inspect.isasyncgenfunction(function)
        or inspect.isgeneratorfunction(function)
    ):
        yield problem("async-hook", place)
    parameters = list(inspect.signature(function).parameters.values())
    only = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    others = [str(each) for each in parameters if each.kind is not each.KEYWORD_ONLY]
    if only:
        yield problem("keyword-only-hook", place, f"it takes {', '.join(only)} by keyword only")
    if others:
        yield problem("hook-arguments", place, f"it takes {', '.join(others)}")


def declared_problems(provider: AnyProvider, title: str) -> Iterator[Problem]:
    """Problems that show without calling anything but the probe."""
    if not isinstance(provider.summary, str) or not provider.summary.strip():
        yield problem("no-summary", title)
    try:
        probed(provider, title)
    except PluginError as error:
        yield problem("probe-fails", title, error.fact.removeprefix(f"{title}: "))
    yield from _option_problems(provider, title)


def core_keys(provider: AnyProvider) -> tuple[str, ...]:
    """The keys that the core takes from a provider's table."""
    if isinstance(provider, MemoryProvider):
        return ("use", "eviction", *L1Keys.__struct_fields__)
    return ("use", *L2Keys.__struct_fields__) if isinstance(provider, TierProvider) else ("use",)


def _option_problems(provider: AnyProvider, title: str) -> Iterator[Problem]:
    reserved = core_keys(provider)
    struct = types.type_info(provider.options)
    assert isinstance(struct, types.StructType)
    for option, field in zip(describe_options(provider.options), struct.fields, strict=True):
        place = f"{title}: {provider.options.__name__}.{field.name}"
        if not option.description.strip():
            yield problem(
                "undocumented-option", place, expected=f"{field.name}: Annotated[..., msgspec.Meta(description=...)]"
            )
        if option.name in reserved:
            yield problem(
                "reserved-option",
                place,
                f"{option.name} is a key of the core: the plugin never sees it",
                expected=f"a name that is none of {', '.join(reserved)}",
            )
        if _unreadable(field.type):
            yield problem("unreadable-option", place, f"no TOML value can be read as {option.type}")
        elif not option.required and (reason := _wrong_default(provider.options, option.name, option.default)):
            yield problem("wrong-default", place, reason)


def _unreadable(kind: types.Type) -> bool:
    if isinstance(kind, types.Metadata):
        return _unreadable(kind.type)
    if isinstance(kind, types.UnionType):
        return any(map(_unreadable, kind.types))
    return isinstance(kind, types.CustomType) and kind.cls is not ByteSize


def _wrong_default(options: type[Options], name: str, default: object) -> str:
    """The reason why the default is no possible TOML value, or ""."""
    if default is not None:
        try:
            toml_value(msgspec.to_builtins(default, enc_hook=_plain))
        except TypeError:
            return f"its default is a {type(default).__name__}, which TOML cannot express"
    field = next(each for each in msgspec.structs.fields(options) if each.encode_name == name)
    one = msgspec.defstruct("One", [(field.name, field.type)], bases=(Options,), frozen=True, rename={field.name: name})
    try:
        plain = msgspec.to_builtins(default, enc_hook=_plain)
        read = getattr(convert({name: plain}, one, where=name), field.name)
    except NotImplementedError:
        return ""  # its type has no conversion from plain values, so the default cannot be checked here
    except ConfigFieldError as error:
        return f"its default {default!r} is refused: {error.fact}"
    return "" if read == default else f"its default {default!r} comes back as {read!r}"


def _plain(value: object) -> object:
    if isinstance(value, ByteSize):
        return int(value)
    raise NotImplementedError(type(value).__name__)
